//! The name of a network in configurations.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Stands for the device that the route to the scheduler leaves by.
pub const AUTO_DEVICE: &str = "auto";

/// What configuration files and `--arm` call an arm: `soft`, `verbs:DEVICE` or `verbs:auto`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ArmName {
    /// soft-RoCE, on any machine.
    #[default]
    Soft,
    /// The verbs device of this name, or [`AUTO_DEVICE`].
    Verbs(String),
}

impl ArmName {
    /// Whether it is the device that the route to the scheduler leaves by.
    #[must_use]
    pub fn is_auto(&self) -> bool {
        matches!(self, Self::Verbs(device) if device == AUTO_DEVICE)
    }
}

impl FromStr for ArmName {
    type Err = ArmNameError;

    fn from_str(text: &str) -> Result<Self, ArmNameError> {
        match text.split_once(':') {
            None if text == "soft" => Ok(Self::Soft),
            Some(("verbs", device)) if !device.is_empty() => Ok(Self::Verbs(device.to_owned())),
            _ => Err(ArmNameError(text.to_owned())),
        }
    }
}

impl TryFrom<String> for ArmName {
    type Error = ArmNameError;

    fn try_from(text: String) -> Result<Self, ArmNameError> {
        text.parse()
    }
}

impl fmt::Display for ArmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Soft => f.write_str("soft"),
            Self::Verbs(device) => write!(f, "verbs:{device}"),
        }
    }
}

/// What is no arm's name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("expected `soft`, `verbs:auto` or `verbs:DEVICE` (see ibv_devices), found `{0}`")]
pub struct ArmNameError(pub String);
