//! Step 7: the READ of a task's input out of its frontend's slot; and step 9: the WRITE of its answer into it.

use proto::{ModelId, TaskId, backend_to_frontend::ANSWER_HEADER_BYTES};
use transport::Transfer;

use super::{Core, Output};
use crate::{staging::Place, worker::Push};

impl Core {
    /// A READ to post; nothing if it cannot be done.
    pub(super) fn read(
        &self,
        (place, tasks): (Place, usize),
        model: ModelId,
        task: TaskId,
        input_offset: u64,
    ) -> Option<Output> {
        let (shape, frontend) = (self.loaded(model).shape, task.frontend());
        let bytes = tasks * shape.input_bytes;
        let Some((connection, remote_address, rkey)) = self.links.remote(frontend, input_offset, bytes) else {
            tracing::warn!(
                frontend = frontend.0,
                input_offset,
                "no link to the frontend, or an input outside its arena"
            );
            return None;
        };
        let transfer = Transfer {
            token: place.token(),
            lkey: self.config.lkey,
            local_offset: self.config.staging.input_offset(place, shape),
            remote_address,
            rkey,
            bytes,
        };
        Some(Output::Read { connection, task, transfer })
    }

    /// A WRITE_WITH_IMM to post; nothing if it cannot be done.
    pub(super) fn write(&self, push: Push) -> Option<Output> {
        let Push { place, model, frontend, answer_offset, immediate, header, text } = push;
        let bytes = ANSWER_HEADER_BYTES + header.payload_bytes as usize;
        let Some((connection, remote_address, rkey)) = self.links.remote(frontend, answer_offset, bytes) else {
            tracing::warn!(
                frontend = frontend.0,
                answer_offset,
                "no link to the frontend, or an answer outside its arena"
            );
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
