//! What was found, and what to do about it.

use std::fmt;

use serde::Serialize;

/// Twice the slots of a frontend of default size (`arena_bytes`), so that its rings and a backend's staging fit too.
pub(super) const REGISTERED_BYTES_USUAL: u64 = 128 << 20;

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    /// As it should be.
    Ok,
    /// Works, but something else would be faster, steadier, or needed for the other arm.
    Advice,
    /// The arm that was asked for cannot work.
    Stop,
}

/// One line of the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) subject: String,
    pub(super) level: Level,
    pub(super) found: String,
    /// What to do; nothing where all is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) remedy: Option<String>,
    /// Commands that do it, for root, in this order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) commands: Vec<String>,
}

impl Finding {
    pub(super) fn ok(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Self { subject: subject.into(), level: Level::Ok, found: found.into(), remedy: None, commands: Vec::new() }
    }

    pub(super) fn advice(subject: impl Into<String>, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { level: Level::Advice, remedy: Some(remedy.into()), ..Self::ok(subject, found) }
    }

    pub(super) fn stop(subject: impl Into<String>, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { level: Level::Stop, ..Self::advice(subject, found, remedy) }
    }

    pub(super) fn with_commands<C: Into<String>>(mut self, commands: impl IntoIterator<Item = C>) -> Self {
        self.commands = commands.into_iter().map(Into::into).collect();
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = match self.level {
            Level::Ok => "ok    ",
            Level::Advice => "advice",
            Level::Stop => "STOP  ",
        };
        write!(f, "{mark} {}: {}", self.subject, self.found)?;
        match &self.remedy {
            Some(remedy) => write!(f, "; {remedy}"),
            None => Ok(()),
        }
    }
}
