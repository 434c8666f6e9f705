//! Step 7, Step 9.
//! The READ of a task's input out of its frontend's slot, and of its guard before, if it has one; and the
//! WRITE of its answer into it.

use std::{fmt::Display, sync::Arc};

use proto::{FrontendId, ModelId, TaskId, backend_to_frontend::ANSWER_HEADER_BYTES, slot::GUARD_BYTES};
use transport::{ConnectionId, Transfer};

use super::{Core, Output, Run};
use crate::{
    executor::OnGpus,
    staging::Place,
    worker::{self, Ahead, Input, Push},
};

impl Core {
    /// The driver could not post a transfer from or to this frontend.
    pub fn note_not_posted(&mut self, frontend: FrontendId, why: impl Display) {
        self.told.transfers.note(frontend, why);
    }

    /// What a GPU's own memory is registered as, if the model's inputs are READ into that.
    fn landing(&self, gpu: usize, model: ModelId) -> Option<u32> {
        let takes = self.loaded(model).executor.on_gpus().is_some_and(OnGpus::takes_inputs_ahead);
        self.config.landings.get(&gpu).copied().filter(|_| takes)
    }

    /// Where an input is READ to: what that is registered as, and the offset in it.
    fn input_at(&self, place: Place, model: ModelId) -> (u32, usize) {
        let (staging, shape) = (self.config.staging, self.loaded(model).shape);
        match self.landing(place.gpu, model) {
            Some(lkey) => (lkey, staging.landing_offset(place, shape)),
            None => (self.config.lkey, staging.input_offset(place, shape)),
        }
    }

    /// Where the inputs and outputs of a batch are.
    pub(super) fn runs(&self, (gpu, buffer): (usize, usize), model: ModelId, runs: Vec<worker::Run>) -> Vec<Run> {
        let (staging, shape) = (self.config.staging, self.loaded(model).shape);
        let run = |worker::Run { tasks, input_bytes, fetched_with }| {
            let place = |task| Place { gpu, buffer, task };
            let before = (tasks.start - fetched_with) * input_bytes;
            let input_offset = self.input_at(place(fetched_with), model).1 + before;
            let output_offset = staging.answer_offset(place(tasks.start), shape) + ANSWER_HEADER_BYTES;
            Run { tasks: tasks.len(), input_offset, input_bytes, output_offset }
        };
        runs.into_iter().map(run).collect()
    }

    /// The inputs of the batch that a GPU runs next, if it has memory of its own to put them in.
    pub(super) fn send_ahead(&mut self, gpu: usize) {
        while let Some(Ahead { number, buffer, model, runs }) = self.hosting.workers[gpu].poll_ahead() {
            let executor = Arc::clone(&self.loaded(model).executor);
            if executor.on_gpus().is_some_and(OnGpus::takes_inputs_ahead) {
                let runs = self.runs((gpu, buffer), model, runs);
                self.outputs.push_back(Output::SendAhead { gpu, number, executor, runs });
            }
        }
    }

    /// A READ to post; nothing if it cannot be done.
    pub(super) fn read(
        &mut self,
        (place, tasks): (Place, usize),
        model: ModelId,
        task: TaskId,
        Input { offset: input_offset, bytes: input_bytes, key }: Input,
    ) -> Option<Output> {
        let frontend = task.frontend();
        let bytes = tasks * input_bytes as usize;
        let remote = self.links.remote(frontend, key, (input_offset, bytes));
        if remote.is_none() {
            let text = format_args!("no link, or an input outside its arena, at {input_offset}");
            self.told.transfers.note(frontend, text);
        }
        let transfer = to_here(place, remote?, self.input_at(place, model), bytes);
        Some(Output::Read { connection: remote?.0, task, transfer })
    }

    /// A READ of guards to post; nothing if it cannot be done. They go to staging memory, where they can be looked at,
    /// and where an input has room for its guard.
    pub(super) fn read_guards(
        &mut self,
        (place, tasks): (Place, usize),
        model: ModelId,
        task: TaskId,
        slot: u32,
    ) -> Option<Output> {
        let frontend = task.frontend();
        let remote = self.links.remote_guards(frontend, slot, tasks);
        if remote.is_none() {
            self.told.transfers.note(frontend, format_args!("no link, or a guard outside its arena, of slot {slot}"));
        }
        let at = (self.config.lkey, self.config.staging.input_offset(place, self.loaded(model).shape));
        let transfer = to_here(place, remote?, at, tasks * GUARD_BYTES);
        Some(Output::ReadGuards { connection: remote?.0, task, transfer })
    }

    /// A WRITE_WITH_IMM to post; nothing if it cannot be done.
    pub(super) fn write(&mut self, push: Push) -> Option<Output> {
        let Push { place, model, frontend, answer_offset, key, immediate, header, text } = push;
        let bytes = ANSWER_HEADER_BYTES + header.payload_bytes as usize;
        let Some((connection, remote_address, rkey)) = self.links.remote(frontend, key, (answer_offset, bytes)) else {
            let text = format_args!("no link, or an answer outside its arena, at {answer_offset}");
            self.told.transfers.note(frontend, text);
            return None;
        };
        let transfer = Transfer {
            token: place.token(),
            lkey: self.config.lkey,
            local_offset: self.config.staging.answer_offset(place, self.loaded(model).shape),
            remote_address,
            rkey,
            bytes,
        };
        Some(Output::Write { connection, transfer, immediate, header, text })
    }
}

fn to_here(
    place: Place,
    (_, remote_address, rkey): (ConnectionId, u64, u32),
    (lkey, local_offset): (u32, usize),
    bytes: usize,
) -> Transfer {
    Transfer { token: place.token(), lkey, local_offset, remote_address, rkey, bytes }
}
