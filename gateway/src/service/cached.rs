//! Requests whose model's answers are kept: whether another was answered so, is being asked, or has to be.

#![allow(clippy::disallowed_methods)] // Waits in real time.

use frontend::{
    InferError,
    core::Core,
    tasks::{Reply, Timing},
};
use proto::{BackendId, Span, Timestamp, scheduler_to_frontend::DropReason, stages::AnswerStamps};

use super::{Service, inference::Given};
use crate::{
    budget::Charge,
    cache::{Asking, Kept, Question, Turn},
    pool::AT_ONCE_BYTES_MAX,
    protocol::Pictures,
};

impl Service {
    /// What decides the answer to a request, if its model's answers are kept.
    ///
    /// # Errors
    /// If too much of its client waits for the pool.
    pub(super) async fn question(&self, given: &Given, charge: &Charge) -> Result<Option<Question>, InferError> {
        let (index, model) = &given.model;
        if !model.configuration.caches_responses() || !self.cache.is_on() {
            return Ok(None);
        }
        let loads = |core: &Core| core.loads(core.models().get(*index));
        let Some(loads) = self.desk.with_core(loads) else { return Ok(None) };
        // An ensemble answers what is wanted of it and nothing else.
        let wanted = model.ensemble().is_some().then(|| given.terms.wanted_bits());
        let mut numbers = vec![*index as u64, given.terms.application().0.into()];
        numbers.extend(loads);
        numbers.extend(wanted.into_iter().flatten());
        let pictures = given.pictures.as_ref().map_or(&[][..], |Pictures { pictures, .. }| pictures);
        let bytes = given.inputs.iter().map(|(_, data)| data.len()).chain(pictures.iter().map(|data| data.len()));
        let digester = self.digester;
        if bytes.sum::<usize>() <= AT_ONCE_BYTES_MAX {
            return Ok(Some(digester.question(&numbers, &given.inputs, pictures)));
        }
        let (inputs, pictures, held) = (given.inputs.clone(), pictures.to_vec(), charge.clone());
        let digest = move || {
            let _held = held;
            digester.question(&numbers, &inputs, &pictures)
        };
        self.pool.run(charge, digest).await.map(Some)
    }

    /// Waits until a question is answered, or it is its turn to be asked. What it waits for counts as its own deadline
    /// says: others who ask have earlier ones.
    ///
    /// # Errors
    /// If that passes meanwhile.
    pub(super) async fn turn(
        &self,
        given: &mut Given,
        question: Question,
    ) -> Result<Result<Asking, Reply>, InferError> {
        let ((index, _), slo, arrived) = (&given.model, given.terms.slo(), self.desk.now());
        let until = if slo == Span::ENDLESS { Timestamp::NEVER } else { arrived + slo };
        let waiting = match self.cache.ask(question, until) {
            Turn::Ask(asking) => {
                self.record.handle_cache_miss(*index, self.desk.now() - arrived);
                return Ok(Ok(asking));
            }
            Turn::Answered(kept) => return Ok(Err(self.answered(*index, &kept, arrived, until))),
            Turn::Wait(waiting) => waiting,
        };
        let counted = self.desk.count(*index);
        let turn = match slo {
            Span::ENDLESS => Ok(waiting.wait().await),
            slo => tokio::time::timeout(slo.to_duration(), waiting.wait()).await,
        };
        let Ok(turn) = turn else {
            let error = InferError::Dropped(DropReason::Deadline);
            counted.end(&Err(error.clone()));
            return Err(error);
        };
        counted.leave();
        match turn {
            Turn::Answered(kept) => Ok(Err(self.answered(*index, &kept, arrived, until))),
            Turn::Ask(asking) => {
                let waited = self.desk.now() - arrived;
                self.record.handle_cache_miss(*index, waited);
                given.waited = if slo == Span::ENDLESS { Span::ZERO } else { waited };
                Ok(Ok(asking))
            }
            Turn::Wait(_) => unreachable!("who has waited does not wait again"),
        }
    }

    /// The reply that a kept answer makes.
    fn answered(&self, index: usize, kept: &Kept, arrived: Timestamp, deadline: Timestamp) -> Reply {
        let answered_at = self.desk.now();
        let at = arrived.0;
        let stamps = AnswerStamps {
            queued_at_ns: at,
            due_at_ns: at,
            granted_at_ns: at,
            planned_at_ns: at,
            fetched_at_ns: at,
            exec_at_ns: at,
            started_at_ns: at,
            finished_at_ns: at,
        };
        let (backend, gpu, batch_size) = (BackendId(0), 0, Timing::OF_CACHE);
        let timing = Timing { admitted_at: arrived, deadline, stamps, answered_at, batch_size, backend, gpu };
        let (outputs, shapes, batches) = (kept.outputs(), kept.shapes(), Vec::new());
        self.record.handle_cache_hit(answered_at, index, &timing);
        Reply { outputs, shapes, rows: kept.rows, timing, batches, was_late: false }
    }
}
