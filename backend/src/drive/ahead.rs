//! Step 7, its last part: while a GPU runs a batch, the inputs of the next go from staging memory, or from where READs
//! have put them in the GPU's own, to a place that the model takes them from. Each GPU has a thread for it, as the one
//! that runs batches waits for the GPU then. Two batches have room there: the one that runs, and the one whose inputs
//! go ahead.

use std::sync::{Mutex, MutexGuard, PoisonError};

use cuda::{SLOTS, Slot};

use super::{gpu::parts, pinned::Staged};
use crate::{core::Run, error::ExecutorError, executor::OnGpus};

const _: () = assert!(SLOTS > 2, "one is run while the other one is filled, and there is one to try models in");

/// What has gone ahead to one GPU.
#[derive(Debug, Default)]
pub(super) struct Ahead(Mutex<Slots>);

#[derive(Debug, Default)]
struct Slots {
    /// The place of the batch that runs, or ran last.
    running: usize,
    /// Whose inputs are in the other one: the session, and its number for them.
    other: Option<(u64, u64)>,
}

impl Ahead {
    fn slots(&self) -> MutexGuard<'_, Slots> {
        // Who panicked while inputs were put there has not said that they are.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Inputs go ahead under a session's number. Nothing is lost if that fails: they are sent once more.
    pub(super) fn send(&self, (session, number): (u64, u64), (model, gpu): (&OnGpus, usize), from: (&Staged, &[Run])) {
        let mut slots = self.slots();
        slots.other = None;
        let other = Slot(1 - slots.running);
        match stage((model, gpu), other, from) {
            Ok(()) => slots.other = Some((session, number)),
            Err(error) => tracing::debug!(gpu, %error, "inputs could not go ahead"),
        }
    }

    /// The place of a batch that runs next whose inputs do not go ahead, and which stages them itself.
    pub(super) fn own(&self) -> Slot {
        Slot(self.slots().running)
    }

    /// Where the inputs are of the batch that runs next; they are sent there unless they went ahead.
    pub(super) fn take(
        &self,
        (session, number): (u64, Option<u64>),
        (model, gpu): (&OnGpus, usize),
        from: (&Staged, &[Run]),
    ) -> Result<Slot, ExecutorError> {
        let mut slots = self.slots();
        let went = slots.other.is_some() && slots.other == number.map(|number| (session, number));
        if went {
            slots.running = 1 - slots.running;
            slots.other = None;
        } else {
            stage((model, gpu), Slot(slots.running), from)?;
        }
        Ok(Slot(slots.running))
    }
}

fn stage((model, gpu): (&OnGpus, usize), slot: Slot, (staged, runs): (&Staged, &[Run])) -> Result<(), ExecutorError> {
    staged.pin(model, gpu)?;
    match staged.landing(gpu) {
        Some(landing) => {
            let part = |run: &Run| run.input_offset..run.input_offset + run.tasks * run.input_bytes;
            Ok(model.on(gpu).stage_landed(slot, landing, &runs.iter().map(part).collect::<Vec<_>>())?)
        }
        None => Ok(model.on(gpu).stage(slot, &parts(staged.region(), runs))?),
    }
}
