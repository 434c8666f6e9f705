//! How packets of soft-RoCE reach peers on the same host.

use serde::{Deserialize, Serialize};

/// The key `local_path` of a role's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LocalPath {
    /// By rings in memory that both processes map, where they run as one user in one network namespace and both say so;
    /// by UDP elsewhere.
    #[default]
    Ring,
    /// By UDP, as to any other host.
    Udp,
}

impl std::str::FromStr for LocalPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "ring" => Ok(Self::Ring),
            "udp" => Ok(Self::Udp),
            _ => Err(format!("expected `ring` or `udp`, found `{text}`")),
        }
    }
}

impl std::fmt::Display for LocalPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Ring => "ring",
            Self::Udp => "udp",
        })
    }
}
