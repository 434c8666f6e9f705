//! What control knows of the cluster at a moment, for operators. Taking it costs a few words for each member and GPU:
//! lists of models are shared, and each model's name is copied once. What follows from it is worked out by
//! [`status`](crate::status), on another thread.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
};

use proto::{Epoch, GpuId, ModelId, Span, Timestamp, weights::WeightsTally};
use transport::Path;

use crate::advice::Advice;

/// How often control leaves a snapshot.
const INTERVAL: Span = Span::from_millis(250);

/// The cluster as one scheduler knows it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Snapshot {
    /// Of the primary, as far as it is known.
    pub epoch: Epoch,
    /// Its place in the list of schedulers.
    pub rank: u16,
    /// By their places in the list.
    pub schedulers: Vec<SchedulerState>,
    /// By id.
    pub frontends: Vec<FrontendShown>,
    /// By id.
    pub backends: Vec<BackendShown>,
    /// By id.
    pub models: Vec<ModelShown>,
    /// How many GPUs are needed.
    pub advice: Arc<Advice>,
}

/// What one scheduler knows of another one, or of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchedulerState {
    /// Members obey it.
    Primary,
    /// It would take over.
    Standby,
    /// It does not know yet who is the primary.
    Starting,
    /// It is not connected.
    Unreachable,
}

/// How a member stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberState {
    /// It has yet to connect to ModelThreads, or to name its models.
    Joining,
    /// Links to others are missing.
    Unlinked,
    /// It takes part, as far as this scheduler knows.
    Serving,
    /// An operator has drained it.
    Drained,
    /// It is about to end.
    Leaving,
}

/// Where a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Whereabouts {
    /// What its connection came from.
    pub address: SocketAddr,
    /// The way of packets to it.
    pub path: Option<Path>,
}

/// A frontend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrontendShown {
    /// Given by the first scheduler that it joined.
    pub id: u32,
    /// What operators call it.
    pub name: String,
    /// Where it is.
    pub at: Option<Whereabouts>,
    /// How it stands.
    pub state: MemberState,
    /// It obeys this scheduler.
    pub obeys: bool,
}

/// A backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendShown {
    /// Given by the first scheduler that it joined.
    pub id: u32,
    /// What operators call it.
    pub name: String,
    /// Where it is.
    pub at: Option<Whereabouts>,
    /// How it stands.
    pub state: MemberState,
    /// It obeys this scheduler.
    pub obeys: bool,
    /// Frontends that it is linked to.
    pub links: usize,
    /// Where models are placed on it: its sub-cluster.
    pub sub_cluster: Option<u16>,
    /// What has become of weights there.
    pub weights: WeightsTally,
    /// By their indexes.
    pub gpus: Vec<GpuShown>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuShown {
    /// What planners call it.
    pub id: GpuId,
    /// Its executor works.
    pub is_usable: bool,
    /// Planners use it.
    pub is_planned: bool,
    /// What it hosts; ascending.
    pub models: Arc<Vec<ModelId>>,
    /// Pages for weights, if its memory holds but a part of what it hosts.
    pub pages: Option<u32>,
}

/// What changes of a model.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ModelShown {
    /// Requests with an objective that come in a second, averaged over the advice's window.
    pub rate_rps: f64,
    /// What its weights take in a GPU's memory, where that is short.
    pub pages: u32,
}

/// A model's name and version; the position is its id, and none ever goes.
pub type ModelName = (String, String);

/// Where control leaves what it knows, for another thread to find. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Board(Arc<Mutex<Posted>>);

/// What is there.
#[derive(Debug, Default)]
struct Posted {
    /// The newest, and when it was taken.
    newest: Option<(Timestamp, Arc<Snapshot>)>,
    models: Vec<ModelName>,
}

impl Board {
    /// Its control's side.
    #[must_use]
    pub fn publisher(&self) -> Publisher {
        Publisher { board: self.clone(), due: Timestamp::PAST }
    }

    /// The newest snapshot, if there is any, and when it was taken. Names of models beyond those that are known are
    /// added to `models`.
    pub fn newest(&self, models: &mut Vec<ModelName>) -> Option<(Timestamp, Arc<Snapshot>)> {
        // No invariant spans two changes of it.
        let posted: MutexGuard<'_, Posted> = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        models.extend_from_slice(posted.models.get(models.len()..).unwrap_or_default());
        posted.newest.clone()
    }
}

/// Leaves snapshots on a [`Board`].
pub struct Publisher {
    board: Board,
    due: Timestamp,
}

impl Publisher {
    /// Leaves one if it is time, and nobody looks just now: whoever takes it is told how many models are named there
    /// already, and names the rest.
    pub fn turn(&mut self, now: Timestamp, take: impl FnOnce(usize) -> (Snapshot, Vec<ModelName>)) {
        if now < self.due {
            return;
        }
        let mut posted = match self.board.0.try_lock() {
            Ok(posted) => posted,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        self.due = now + INTERVAL;
        let (snapshot, models) = take(posted.models.len());
        posted.models.extend(models);
        posted.newest = Some((now, Arc::new(snapshot)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_leaves_a_snapshot_now_and_then_names_each_model_once_and_waits_for_nobody() {
        let (board, mut known) = (Board::default(), Vec::new());
        let mut publisher = board.publisher();
        assert_eq!(board.newest(&mut known), None);
        let at = |ms| Timestamp::ZERO + Span::from_millis(ms);
        let named = |from: usize, to: usize| (from..to).map(|id| (format!("m{id}"), "1".to_owned())).collect();
        let of_rank = |rank| Snapshot { rank, ..Snapshot::default() };
        publisher.turn(at(0), |from| (of_rank(1), named(from, 2)));
        publisher.turn(at(249), |_| unreachable!("it is not time yet"));
        assert_eq!(board.newest(&mut known), Some((at(0), Arc::new(of_rank(1)))));
        publisher.turn(at(250), |from| (of_rank(2), named(from, 3)));
        assert_eq!(board.newest(&mut known), Some((at(250), Arc::new(of_rank(2)))));
        assert_eq!(known, named(0, 3));
        let looks = board.0.lock().unwrap();
        publisher.turn(at(500), |_| unreachable!("somebody looks"));
        drop(looks);
        publisher.turn(at(501), |from| (of_rank(3), named(from, 3)));
        assert_eq!(board.newest(&mut known).map(|(taken, _)| taken), Some(at(501)));
    }
}
