//! Metrics of programs' own, between the threads that hear programs and whoever scrapes the backend.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use proto::backend_to_program::{MetricsSaid, MetricsTold, ToProgram, line};

use super::excerpt;
use crate::program_metrics::{Owner, Registry};

/// Those of all programs of a backend; by default none is kept.
#[derive(Debug, Clone, Default)]
pub struct Metrics(Arc<Mutex<Registry>>);

impl Metrics {
    /// With room for so many lines of them; with none they are taken and not kept.
    #[must_use]
    pub fn new(lines_max: usize) -> Self {
        Self(Arc::new(Mutex::new(Registry::new(lines_max))))
    }

    /// All of them, in Prometheus's text format.
    #[must_use]
    pub fn text(&self) -> String {
        self.lock().text()
    }

    /// Those of a model that is loaded.
    pub(super) fn of_model(&self) -> OfModel {
        let owner = self.lock().handle_begin();
        OfModel { metrics: self.clone(), owner }
    }

    fn lock(&self) -> MutexGuard<'_, Registry> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Those of a model, as long as any process of it lives.
#[derive(Debug)]
pub(super) struct OfModel {
    metrics: Metrics,
    owner: Owner,
}

impl OfModel {
    /// A program of the model says this. Yields what it is to be told, if it wants to know.
    pub(super) fn handle(&self, said: &MetricsSaid) -> Option<Vec<u8>> {
        let made = {
            let mut registry = self.metrics.lock();
            said.changes.iter().try_fold(None, |_, change| registry.handle_change(self.owner, change))
        };
        let (value, failed) = match made {
            Ok(value) => (value, None),
            Err(error) => (None, Some(excerpt(&error.to_string()))),
        };
        Some(line(&ToProgram::Metrics(MetricsTold { id: said.id?, value, failed })))
    }
}

impl Drop for OfModel {
    fn drop(&mut self) {
        self.metrics.lock().handle_end(self.owner);
    }
}
