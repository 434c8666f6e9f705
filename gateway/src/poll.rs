//! The repository is looked at now and then (`model_control_mode = "poll"`): models that came or changed are loaded,
//! those that have gone are unloaded.
#![allow(clippy::disallowed_methods)] // Waits in real time.

use std::{convert::Infallible, path::PathBuf, time::Duration};

use frontend::{InferError, desk::Desk};
use proto::frontend_to_scheduler::ModelChange;
use repository::Stamps;

use crate::{
    config::{Config, ModelControlMode},
    drive::GatewayError,
};

/// A day: less often than that is never.
const SECONDS_MAX: u32 = 86_400;

/// What is looked at, and what it was like.
pub(crate) struct Poll {
    repository: PathBuf,
    every: Duration,
    former: Stamps,
}

impl Poll {
    /// Of a repository that is about to be read; nothing if it is not to be looked at.
    pub(crate) fn of(config: &Config) -> Result<Option<Self>, GatewayError> {
        if config.model_control_mode != ModelControlMode::Poll {
            return Ok(None);
        }
        let seconds = config.repository_poll_secs;
        if !(1..=SECONDS_MAX).contains(&seconds) {
            let text = format!("repository_poll_secs: found {seconds}, expected 1 to {SECONDS_MAX}");
            return Err(GatewayError::Config(text));
        }
        let repository = config.repository.clone();
        let former = Stamps::of(&repository).map_err(|error| GatewayError::Config(error.to_string()))?;
        Ok(Some(Self { repository, every: Duration::from_secs(seconds.into()), former }))
    }

    /// Looks again and again.
    pub(crate) async fn run(mut self, desk: &Desk) -> Infallible {
        loop {
            tokio::time::sleep(self.every).await;
            let repository = self.repository.clone();
            // Files can be slow; others of this thread must not wait for them.
            match tokio::task::spawn_blocking(move || Stamps::of(&repository)).await {
                Ok(Ok(now)) => self.follow(desk, now).await,
                Ok(Err(error)) => tracing::warn!("the repository cannot be looked at: {error}"),
                Err(error) => tracing::warn!("the repository cannot be looked at: {error}"),
            }
        }
    }

    /// Lets the cluster serve what there is `now`. What could not be asked for is asked for the next time.
    async fn follow(&mut self, desk: &Desk, now: Stamps) {
        let (changed, gone) = now.since(&self.former);
        let changed = changed.into_iter().map(|name| (ModelChange::Load, name));
        let gone = gone.into_iter().map(|name| (ModelChange::Unload, name));
        let mut is_asked = true;
        for (to, name) in changed.chain(gone) {
            match desk.change_model(to, name, None).await {
                Ok(()) => tracing::info!("the repository has changed: {to:?} '{name}' is done"),
                Err(InferError::ChangeFailed(reason)) => tracing::warn!("the repository has changed: {reason}"),
                Err(error) => {
                    tracing::warn!("the repository has changed, which will be tried again: {error}");
                    is_asked = false;
                }
            }
        }
        if is_asked {
            self.former = now;
        }
    }
}
