//! Who is there: frontends, backends with their GPUs, models, and which backend is linked to which frontend.
//!
//! A backend's GPUs are used once it is linked to every frontend that was there when it joined (or has had
//! [`LINK_GRACE`] to do so), so that no batch is sent to where its inputs cannot be read from.

use std::collections::{BTreeMap, BTreeSet};

use proto::{
    BackendId, FrontendId, GpuId, LatencyProfile, ModelId, Span, Timestamp,
    backend_to_scheduler::{BackendHello, ModelOffer},
};
use thiserror::Error;

/// How long a backend's GPUs wait for its links to the frontends that are there. One that cannot be reached must not
/// keep the others from being served.
pub(super) const LINK_GRACE: Span = Span::from_millis(2_000);

/// The most of each kind that the scheduler keeps track of.
const FRONTENDS_MAX: usize = 1024;
const BACKENDS_MAX: usize = 4096;
const GPUS_PER_BACKEND_MAX: u32 = 64;
const MODELS_MAX: usize = 65_536;
const NAME_BYTES_MAX: usize = 256;

/// Why a member was refused; the member prints it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum JoinError {
    /// No room for another one.
    #[error("the scheduler has {max} {kind} and takes no more")]
    TooMany {
        /// What there are too many of.
        kind: &'static str,
        /// How many it takes.
        max: usize,
    },
    /// The offer contradicts itself or exceeds a limit.
    #[error("the backend's offer is wrong: {0}")]
    BadOffer(String),
}

#[derive(Debug)]
pub(super) struct Frontend {
    pub(super) link_address: String,
    /// Tasks submitted and not ended.
    pub(super) tasks: usize,
    /// What it was last told of each model.
    pub(super) told: BTreeMap<ModelId, (u32, Span)>,
}

#[derive(Debug)]
pub(super) struct Backend {
    /// Its GPUs; the position is the index in plans.
    pub(super) gpus: Vec<GpuId>,
    pub(super) linked: BTreeSet<FrontendId>,
    /// Frontends that its GPUs still wait for; `None` once they are in use.
    awaited: Option<BTreeSet<FrontendId>>,
    use_from: Timestamp,
}

#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) backend: BackendId,
    pub(super) index: u32,
    pub(super) models: Vec<ModelId>,
}

#[derive(Debug)]
pub(super) struct Model {
    pub(super) name: String,
    pub(super) version: String,
    /// The slowest of all offers, batch size by batch size: a batch must fit its window on whichever GPU it gets.
    pub(super) profile: LatencyProfile,
    /// Bytes of one task's input.
    pub(super) input_bytes: u32,
}

#[derive(Debug, Default)]
pub(super) struct Members {
    pub(super) frontends: BTreeMap<FrontendId, Frontend>,
    pub(super) backends: BTreeMap<BackendId, Backend>,
    pub(super) gpus: BTreeMap<GpuId, Gpu>,
    pub(super) models: Vec<Model>,
    next_frontend: u32,
    next_backend: u32,
    next_gpu: u32,
}

/// What a backend's join changed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Joined {
    pub(super) backend: BackendId,
    /// In the order of its hello.
    pub(super) models: Vec<ModelId>,
    /// Models that are new or whose profile changed.
    pub(super) reprofiled: BTreeSet<ModelId>,
}

impl Members {
    pub(super) fn add_frontend(&mut self, link_address: String) -> Result<FrontendId, JoinError> {
        if self.frontends.len() >= FRONTENDS_MAX {
            return Err(JoinError::TooMany { kind: "frontends", max: FRONTENDS_MAX });
        }
        let id = FrontendId(self.next_frontend);
        self.next_frontend += 1;
        self.frontends.insert(id, Frontend { link_address, tasks: 0, told: BTreeMap::new() });
        Ok(id)
    }

    pub(super) fn add_backend(&mut self, now: Timestamp, hello: BackendHello) -> Result<Joined, JoinError> {
        if self.backends.len() >= BACKENDS_MAX {
            return Err(JoinError::TooMany { kind: "backends", max: BACKENDS_MAX });
        }
        let offers = check_offers(&hello)?;
        if self.models.len() + offers.len() > MODELS_MAX {
            return Err(JoinError::TooMany { kind: "models", max: MODELS_MAX });
        }
        let backend = BackendId(self.next_backend);
        self.next_backend += 1;
        let mut reprofiled = BTreeSet::new();
        let mut models = Vec::new();
        let mut hosted: Vec<Vec<ModelId>> = vec![Vec::new(); hello.gpus as usize];
        for offer in offers {
            let (model, changed) = self.merge_offer(&offer);
            if changed {
                reprofiled.insert(model);
            }
            for &index in &offer.gpu_indexes {
                hosted[index as usize].push(model);
            }
            models.push(model);
        }
        let mut gpus = Vec::new();
        for (index, mut models) in hosted.into_iter().enumerate() {
            models.sort_unstable();
            models.dedup();
            let id = GpuId(self.next_gpu);
            self.next_gpu += 1;
            self.gpus.insert(id, Gpu { backend, index: index as u32, models });
            gpus.push(id);
        }
        let awaited = Some(self.frontends.keys().copied().collect());
        let use_from = now + LINK_GRACE;
        self.backends.insert(backend, Backend { gpus, linked: BTreeSet::new(), awaited, use_from });
        Ok(Joined { backend, models, reprofiled })
    }

    /// The offered model's id, and whether it is new or its profile changed.
    fn merge_offer(&mut self, offer: &ModelOffer) -> (ModelId, bool) {
        let known = self.models.iter().position(|m| m.name == offer.name && m.version == offer.version);
        let Some(index) = known else {
            self.models.push(Model {
                name: offer.name.clone(),
                version: offer.version.clone(),
                profile: offer.profile.clone(),
                input_bytes: offer.input_bytes,
            });
            return (ModelId((self.models.len() - 1) as u32), true);
        };
        let profile = &mut self.models[index].profile;
        let slowest = slowest(profile, &offer.profile);
        let changed = slowest != *profile;
        *profile = slowest;
        (ModelId(index as u32), changed)
    }

    pub(super) fn remove_frontend(&mut self, frontend: FrontendId) -> Option<Frontend> {
        for backend in self.backends.values_mut() {
            backend.linked.remove(&frontend);
            if let Some(awaited) = &mut backend.awaited {
                awaited.remove(&frontend);
            }
        }
        self.frontends.remove(&frontend)
    }

    /// Yields the ids of the GPUs that went with it.
    pub(super) fn remove_backend(&mut self, backend: BackendId) -> Option<Vec<GpuId>> {
        let gone = self.backends.remove(&backend)?;
        for gpu in &gone.gpus {
            self.gpus.remove(gpu);
        }
        Some(gone.gpus)
    }

    /// Notes a link, or its end. False if either is not there (any more).
    pub(super) fn set_linked(&mut self, backend: BackendId, frontend: FrontendId, linked: bool) -> bool {
        let Some(entry) = self.backends.get_mut(&backend).filter(|_| self.frontends.contains_key(&frontend)) else {
            return false;
        };
        if linked {
            entry.linked.insert(frontend);
            if let Some(awaited) = &mut entry.awaited {
                awaited.remove(&frontend);
            }
        } else {
            entry.linked.remove(&frontend);
        }
        true
    }

    /// Backends whose GPUs can be used from now on; each is yielded once.
    pub(super) fn take_usable(&mut self, now: Timestamp) -> Vec<BackendId> {
        let mut usable = Vec::new();
        for (id, backend) in &mut self.backends {
            if backend.awaited.as_ref().is_some_and(|awaited| awaited.is_empty() || backend.use_from <= now) {
                backend.awaited = None;
                usable.push(*id);
            }
        }
        usable
    }

    /// When [`Self::take_usable`] has something to yield even if nobody links.
    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        self.backends.values().filter(|b| b.awaited.is_some()).map(|b| b.use_from).min()
    }

    /// GPUs in use that host the model, and that are linked to `frontend`.
    pub(super) fn gpus_for(&self, model: ModelId, frontend: FrontendId) -> u32 {
        let serves = |gpu: &&Gpu| {
            let backend = &self.backends[&gpu.backend];
            backend.awaited.is_none() && backend.linked.contains(&frontend) && gpu.models.contains(&model)
        };
        self.gpus.values().filter(serves).count() as u32
    }

    /// Whether any GPU in use hosts the model.
    pub(super) fn is_hosted(&self, model: ModelId) -> bool {
        self.gpus.values().any(|gpu| gpu.models.contains(&model) && self.backends[&gpu.backend].awaited.is_none())
    }
}

fn check_offers(hello: &BackendHello) -> Result<Vec<ModelOffer>, JoinError> {
    let bad = |text: String| Err(JoinError::BadOffer(text));
    if !(1..=GPUS_PER_BACKEND_MAX).contains(&hello.gpus) {
        return bad(format!("gpus is {}, expected 1 to {GPUS_PER_BACKEND_MAX}", hello.gpus));
    }
    let mut offers = Vec::with_capacity(hello.models.len());
    for offer in &hello.models {
        let ModelOffer { name, version, profile, gpu_indexes, .. } = offer;
        if name.is_empty() || name.len() > NAME_BYTES_MAX || version.len() > NAME_BYTES_MAX {
            return bad(format!("a model's name and version have 1 to {NAME_BYTES_MAX} bytes, found {}", name.len()));
        }
        if let Some(index) = gpu_indexes.iter().find(|index| **index >= hello.gpus) {
            return bad(format!("{name} names GPU {index} of {} (they count from 0)", hello.gpus));
        }
        match profile.clone().validated() {
            Ok(profile) => offers.push(ModelOffer { profile, ..offer.clone() }),
            Err(error) => return bad(format!("{name}: {error}")),
        }
    }
    Ok(offers)
}

/// The slower of two profiles at every batch size that both have.
fn slowest(one: &LatencyProfile, other: &LatencyProfile) -> LatencyProfile {
    let sizes = 1..=one.max_batch().min(other.max_batch());
    let table = sizes.map(|batch| one.latency(batch).max(other.latency(batch))).collect();
    LatencyProfile::from_table(table).expect("the maximum of two valid profiles is valid")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(name: &str, alpha_ms: f64, gpu_indexes: Vec<u32>) -> ModelOffer {
        let profile = LatencyProfile::linear(alpha_ms, 1.0, 8).unwrap();
        ModelOffer { name: name.into(), version: "1".into(), profile, input_bytes: 100, gpu_indexes }
    }

    fn hello(gpus: u32, models: Vec<ModelOffer>) -> BackendHello {
        BackendHello { gpus, models }
    }

    #[test]
    fn a_backend_is_used_once_it_is_linked_to_all_who_were_there() {
        let mut members = Members::default();
        let early = members.add_frontend("a:1".into()).unwrap();
        let joined = members.add_backend(Timestamp(0), hello(1, vec![offer("m", 1.0, vec![0])])).unwrap();
        let late = members.add_frontend("b:1".into()).unwrap();
        assert!(members.take_usable(Timestamp(1)).is_empty());
        assert!(!members.is_hosted(joined.models[0]));
        assert!(members.set_linked(joined.backend, early, true));
        assert_eq!(members.take_usable(Timestamp(2)), [joined.backend]);
        assert!(members.take_usable(Timestamp(3)).is_empty());
        assert_eq!(members.gpus_for(joined.models[0], early), 1);
        assert_eq!(members.gpus_for(joined.models[0], late), 0);
    }

    #[test]
    fn a_frontend_that_cannot_be_reached_delays_a_backend_only_so_long() {
        let mut members = Members::default();
        members.add_frontend("a:1".into()).unwrap();
        let joined = members.add_backend(Timestamp(5), hello(1, vec![])).unwrap();
        assert_eq!(members.poll_timeout(), Some(Timestamp(5) + LINK_GRACE));
        assert_eq!(members.take_usable(Timestamp(5) + LINK_GRACE), [joined.backend]);
        assert_eq!(members.poll_timeout(), None);
    }

    #[test]
    fn two_offers_of_a_model_share_its_id_and_the_slower_profile() {
        let mut members = Members::default();
        let one = members.add_backend(Timestamp(0), hello(2, vec![offer("m", 1.0, vec![0, 1])])).unwrap();
        let other = members.add_backend(Timestamp(0), hello(1, vec![offer("m", 2.0, vec![0])])).unwrap();
        let same = members.add_backend(Timestamp(0), hello(1, vec![offer("m", 0.5, vec![0])])).unwrap();
        assert_eq!((one.models.clone(), other.models), (vec![ModelId(0)], vec![ModelId(0)]));
        assert_eq!((other.reprofiled.len(), same.reprofiled.len()), (1, 0));
        assert_eq!(members.models[0].profile.latency(3), Span::from_millis(7));
        assert_eq!(members.gpus.len(), 4);
    }

    #[test]
    fn wrong_offers_are_refused_with_the_reason() {
        let mut members = Members::default();
        let mut refuse = |hello| members.add_backend(Timestamp(0), hello).unwrap_err().to_string();
        assert!(refuse(hello(0, vec![])).contains("gpus is 0, expected 1 to 64"));
        assert!(refuse(hello(2, vec![offer("m", 1.0, vec![2])])).contains("m names GPU 2 of 2"));
        assert!(refuse(hello(1, vec![offer("", 1.0, vec![0])])).contains("name"));
    }
}
