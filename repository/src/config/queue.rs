//! Triton's queue policies (`dynamic_batching`): what requests that wait may expect, by their priority.
//!
//! A timeout is how long a request may wait there; here it is the objective of its answer, which it must wait less for.

use std::collections::BTreeMap;

use prost_reflect::{DynamicMessage, MapKey, Value};
use proto::Span;

use crate::{
    config::file::{ConfigFile, get},
    error::RepositoryError,
    limits::SLO_MAX,
};

/// The most requests that a bound allows: more is none.
const REQUESTS_MAX: u32 = 1_000_000;
const _: () = assert!(REQUESTS_MAX < u32::MAX);

/// What requests of one priority may expect while they wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QueuePolicy {
    /// `default_timeout_microseconds` with `timeout_action: REJECT`; `None` if it is 0.
    pub timeout: Option<QueueTimeout>,
    /// `max_queue_size`: requests that may wait; `None` if only the scheduler bounds them.
    pub requests_max: Option<u32>,
}

/// How long requests may take that name no shorter time themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueTimeout {
    /// How long.
    pub span: Span,
    /// `allow_timeout_override`: whether a request may name a shorter time; otherwise what it names is not looked at.
    pub is_overridable: bool,
}

/// The policies of a model.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct QueuePolicies {
    /// `default_queue_policy`.
    default: QueuePolicy,
    /// `priority_queue_policy`, by level.
    levels: BTreeMap<u8, QueuePolicy>,
}

impl QueuePolicies {
    /// That of requests of a priority, which is 0 where a model has no levels.
    #[must_use]
    pub fn of(&self, priority: u8) -> &QueuePolicy {
        self.levels.get(&priority).unwrap_or(&self.default)
    }

    /// The objective of a request of this priority: its own, `asked`, or the model's, `slo`; with the policy's timeout
    /// it is never longer than that. `ENDLESS` if there is none.
    #[must_use]
    pub fn objective(&self, priority: u8, asked: Option<Span>, slo: Span) -> Span {
        match self.of(priority).timeout {
            None => asked.unwrap_or(slo),
            Some(QueueTimeout { span, is_overridable: true }) => asked.unwrap_or(slo).min(span),
            Some(QueueTimeout { span, is_overridable: false }) => slo.min(span),
        }
    }

    /// How many requests of each priority may wait, by priority from 0 to `levels`; 0 where only the scheduler says so,
    /// and nothing at all if it does for all.
    #[must_use]
    pub fn requests_max(&self, levels: u8) -> Vec<u32> {
        let bounds: Vec<u32> = (0..=levels).map(|level| self.of(level).requests_max.unwrap_or_default()).collect();
        if bounds.iter().all(|&bound| bound == 0) { Vec::new() } else { bounds }
    }
}

impl ConfigFile<'_> {
    /// The queue policies of a model with so many priority levels.
    pub(super) fn queue_policies(&self, levels: u8) -> Result<QueuePolicies, RepositoryError> {
        let batching = get(&self.message, "dynamic_batching");
        let batching = batching.as_message().expect("the schema says message");
        let policy = |key: &str, message: &Value| {
            self.queue_policy(
                &format!("dynamic_batching.{key}"),
                message.as_message().expect("the schema says message"),
            )
        };
        let default = policy("default_queue_policy", &get(batching, "default_queue_policy"))?;
        let by_level = get(batching, "priority_queue_policy");
        let mut policies = QueuePolicies { default, levels: BTreeMap::new() };
        for (key, message) in by_level.as_map().into_iter().flatten() {
            let MapKey::U64(found) = *key else { unreachable!("the schema says uint64") };
            let level = u8::try_from(found).ok().filter(|level| (1..=levels).contains(level)).ok_or_else(|| {
                let expected = format!("1 to priority_levels, which is {levels}");
                self.error("dynamic_batching.priority_queue_policy.key", found, expected)
            })?;
            let key = format!("priority_queue_policy[{level}]");
            policies.levels.insert(level, policy(&key, message)?);
        }
        Ok(policies)
    }

    fn queue_policy(&self, key: &str, message: &DynamicMessage) -> Result<QueuePolicy, RepositoryError> {
        let micros = get(message, "default_timeout_microseconds").as_u64().unwrap_or_default();
        let span = i64::try_from(micros).ok().filter(|&micros| micros <= SLO_MAX.0 / 1000).map(Span::from_micros);
        let span = span.ok_or_else(|| {
            let expected = format!("microseconds, at most {}, or 0 for none", SLO_MAX.0 / 1000);
            self.error(&format!("{key}.default_timeout_microseconds"), micros, expected)
        })?;
        let is_rejecting = get(message, "timeout_action").as_enum_number() == Some(0);
        if !is_rejecting && span > Span::ZERO {
            self.note(&format!("{key}.timeout_action: DELAY"), "what has no objective waits as long as it takes");
        }
        let is_overridable = get(message, "allow_timeout_override").as_bool().unwrap_or_default();
        let timeout = (is_rejecting && span > Span::ZERO).then_some(QueueTimeout { span, is_overridable });
        let found = get(message, "max_queue_size").as_u32().unwrap_or_default();
        let requests_max = (1..=REQUESTS_MAX).contains(&found).then_some(found);
        Ok(QueuePolicy { timeout, requests_max })
    }
}
