//! Which GPUs a backend offers.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{error::BackendError, limits::GPUS_MAX};

/// GPUs to offer: so many of them, or these.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Gpus {
    /// The first ones of the host.
    Count(u32),
    /// By their numbers, or by (the beginnings of) their names.
    Named(Vec<GpuName>),
}

/// A GPU of the host: its number, as `nvidia-smi` counts, or `GPU-...` or `MIG-...`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum GpuName {
    /// Counted from 0.
    Number(u32),
    /// As `nvidia-smi -L` lists it, or as much of it as no other one begins with.
    Uuid(String),
}

impl fmt::Display for GpuName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Uuid(uuid) => f.write_str(uuid),
        }
    }
}

/// As a command's argument.
impl FromStr for GpuName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.parse() {
            Ok(number) => Ok(Self::Number(number)),
            Err(_) if is_uuid(text) => Ok(Self::Uuid(text.to_owned())),
            Err(_) => Err(format!("found {text:?}, expected a number, or a name that begins with GPU- or MIG-")),
        }
    }
}

impl From<u32> for Gpus {
    fn from(count: u32) -> Self {
        Self::Count(count)
    }
}

impl Gpus {
    /// How many.
    #[must_use]
    pub fn count(&self) -> u32 {
        match self {
            Self::Count(count) => *count,
            Self::Named(names) => u32::try_from(names.len()).unwrap_or(u32::MAX),
        }
    }

    /// Each of them.
    #[must_use]
    pub fn names(&self) -> Vec<GpuName> {
        match self {
            Self::Count(count) => (0..*count).map(GpuName::Number).collect(),
            Self::Named(names) => names.clone(),
        }
    }

    /// That there are as many as there can be, and none twice.
    pub(super) fn check(&self) -> Result<(), BackendError> {
        let count = self.count();
        if !(1..=GPUS_MAX).contains(&count) {
            return Err(BackendError::Config(format!("gpus: found {count}, expected 1 to {GPUS_MAX}")));
        }
        let names = self.names();
        let twice = names.iter().enumerate().find(|&(at, name)| names[..at].contains(name));
        if let Some((_, name)) = twice {
            return Err(BackendError::Config(format!("gpus: found {name} twice, expected each GPU once")));
        }
        let odd = |name: &&GpuName| matches!(name, GpuName::Uuid(uuid) if !is_uuid(uuid));
        match names.iter().find(odd) {
            Some(name) => {
                let expected = "expected numbers, or names that begin with GPU- or MIG- (nvidia-smi -L)";
                Err(BackendError::Config(format!("gpus: found \"{name}\", {expected}")))
            }
            None => Ok(()),
        }
    }
}

fn is_uuid(name: &str) -> bool {
    ["GPU-", "MIG-"].iter().any(|prefix| name.starts_with(prefix))
}
