//! What a backend says of a model that it hosts, checked.

use proto::{
    BatchCost, LatencyProfile, Span, Weights,
    backend_to_scheduler::{BackendHello, GPUS_PER_BACKEND_MAX, ModelOffer, PRIORITIES},
    frontend_to_scheduler::NAME_BYTES_MAX,
    weights::{LOAD_MAX, PAGES_MAX},
};

use super::members::JoinError;

/// An offer with its profile validated, or what is wrong with it.
pub(super) fn check_offer(gpus: u32, memory_pages: Option<u32>, offer: &ModelOffer) -> Result<ModelOffer, String> {
    let ModelOffer { name, version, profile, gpu_indexes, queue_max, .. } = offer;
    if name.is_empty() || name.len() > NAME_BYTES_MAX || version.len() > NAME_BYTES_MAX {
        return Err(format!("a model's name and version have 1 to {NAME_BYTES_MAX} bytes, found {}", name.len()));
    }
    if let Some(index) = gpu_indexes.iter().find(|index| **index >= gpus) {
        return Err(format!("{name} names GPU {index} of {gpus} (they count from 0)"));
    }
    if queue_max.len() > PRIORITIES {
        return Err(format!("{name} bounds requests of {} priorities, expected at most {PRIORITIES}", queue_max.len()));
    }
    let profile = check_costs(name, profile.clone(), offer.cost)?;
    // Where memory is not short, weights take nothing.
    let weights = memory_pages.map_or(Weights::default(), |_| offer.weights);
    if memory_pages.is_some_and(|pages| weights.pages > pages) {
        return Err(format!("{name} takes {} pages of a memory that has {}", weights.pages, memory_pages.unwrap_or(0)));
    }
    for (span, what) in [(weights.load, "to load"), (weights.read, "to read from disk")] {
        if !(Span::ZERO..=LOAD_MAX).contains(&span) {
            return Err(format!("{name} takes {span} {what}, expected at most {LOAD_MAX}"));
        }
    }
    Ok(ModelOffer { profile, weights, ..offer.clone() })
}

/// The offers of a hello, checked.
///
/// # Errors
/// What is wrong with it.
pub(super) fn check_offers(hello: &BackendHello) -> Result<Vec<ModelOffer>, JoinError> {
    if !(1..=GPUS_PER_BACKEND_MAX).contains(&hello.gpus) {
        let text = format!("gpus is {}, expected 1 to {GPUS_PER_BACKEND_MAX}", hello.gpus);
        return Err(JoinError::BadOffer(text));
    }
    if let Some(pages) = hello.memory_pages.filter(|pages| !(1..=PAGES_MAX).contains(pages)) {
        let text = format!("the memory of a GPU has {pages} pages, expected 1 to {PAGES_MAX}");
        return Err(JoinError::BadOffer(text));
    }
    let check = |offer| check_offer(hello.gpus, hello.memory_pages, offer).map_err(JoinError::BadOffer);
    let checked = hello.models.iter().map(check);
    checked.collect()
}

/// l(b), validated, or what is wrong with it or with the cost of a batch.
pub(super) fn check_costs(
    name: &str,
    profile: LatencyProfile,
    cost: Option<BatchCost>,
) -> Result<LatencyProfile, String> {
    if let Some(BatchCost { fixed, per_task_ppm }) = cost {
        let is_right =
            (Span::ZERO..=LOAD_MAX).contains(&fixed) && (1..=BatchCost::PER_TASK_MAX).contains(&per_task_ppm);
        if !is_right {
            return Err(format!(
                "{name}: a batch costs {fixed} and {per_task_ppm} millionths for each further task, expected at most \
                 {LOAD_MAX} and 1 to {}",
                BatchCost::PER_TASK_MAX
            ));
        }
    }
    profile.validated().map_err(|error| format!("{name}: {error}"))
}
