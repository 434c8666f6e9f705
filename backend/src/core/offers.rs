//! What a backend tells a scheduler that it hosts, in pages: the first is in its hello, and the others follow as the
//! scheduler answers. Thousands of models with their latency profiles are more than any message holds.

use std::collections::VecDeque;

use proto::{
    ModelId,
    backend_to_scheduler::{BackendToControl, ModelOffer, OFFERED_BYTES_MAX, OFFERS_BYTES_MAX, OFFERS_UNANSWERED_MAX},
};

/// What one scheduler is told, and has answered.
#[derive(Debug, Default)]
pub(super) struct Offers {
    /// What it has yet to be told, by our names.
    waiting: VecDeque<(ModelId, ModelOffer)>,
    /// Pages that it has not answered, with our names of their models in their order.
    unanswered: VecDeque<Vec<ModelId>>,
}

impl Offers {
    /// Of all this.
    pub(super) fn new(waiting: impl IntoIterator<Item = (ModelId, ModelOffer)>) -> Self {
        Self { waiting: waiting.into_iter().collect(), unanswered: VecDeque::new() }
    }

    /// The first page, for a hello, and how many models are left.
    pub(super) fn first_page(&mut self) -> (Vec<ModelOffer>, u32) {
        let models = self.take_page(OFFERED_BYTES_MAX);
        (models, self.waiting.len() as u32)
    }

    /// The next page, unless there is none or too many have not been answered.
    pub(super) fn poll_page(&mut self) -> Option<BackendToControl> {
        let is_over = self.waiting.is_empty() || self.unanswered.len() >= OFFERS_UNANSWERED_MAX;
        (!is_over).then(|| BackendToControl::Offers { models: self.take_page(OFFERS_BYTES_MAX) })
    }

    /// The scheduler names the models of the oldest page: its names and ours.
    ///
    /// # Errors
    /// If those are not as many.
    pub(super) fn handle_answered(
        &mut self,
        theirs: Vec<ModelId>,
    ) -> Result<impl Iterator<Item = (ModelId, ModelId)> + use<>, String> {
        let ours = self.unanswered.pop_front().ok_or("the scheduler names models that it was not told of")?;
        if ours.len() != theirs.len() {
            return Err(format!("the scheduler names {} models, expected {}", theirs.len(), ours.len()));
        }
        Ok(theirs.into_iter().zip(ours))
    }

    /// Whether everything is told and answered.
    pub(super) fn is_over(&self) -> bool {
        self.waiting.is_empty() && self.unanswered.is_empty()
    }

    fn take_page(&mut self, bytes_max: usize) -> Vec<ModelOffer> {
        let (mut ours, mut page, mut bytes) = (Vec::new(), Vec::new(), 0);
        while bytes < bytes_max
            && let Some((model, offer)) = self.waiting.pop_front()
        {
            bytes += wincode::serialized_size(&offer).expect("its size is that of memory") as usize;
            ours.push(model);
            page.push(offer);
        }
        self.unanswered.push_back(ours);
        page
    }
}
