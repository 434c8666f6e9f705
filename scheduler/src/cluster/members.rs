//! Who is there: frontends, backends with their GPUs, models, and which backend is linked to which frontend.
//!
//! A backend's GPUs are used once it is linked to every frontend that was there when it joined (or has had
//! [`LINK_GRACE`] to do so), so that no batch is sent to where its inputs cannot be read from.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use proto::{
    BackendId, FrontendId, GpuId, LatencyProfile, ModelId, Span, Timestamp,
    backend_to_scheduler::{BackendHello, ModelOffer},
    frontend_to_scheduler::NAME_BYTES_MAX,
};
use thiserror::Error;

use crate::estimates::TOLERANCE;

/// How long a backend's GPUs wait for its links to the frontends that are there. One that cannot be reached must not
/// keep the others from being served.
pub(super) const LINK_GRACE: Span = Span::from_millis(2_000);

/// The most of each kind that the scheduler keeps track of.
const FRONTENDS_MAX: usize = 1024;
const BACKENDS_MAX: usize = 4096;
const GPUS_PER_BACKEND_MAX: u32 = 64;
const MODELS_MAX: usize = 65_536;

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
    /// l(b) of what it hosts; backends that offer the same share a table.
    offers: BTreeMap<ModelId, Arc<LatencyProfile>>,
    pub(super) linked: BTreeSet<FrontendId>,
    /// Frontends that its GPUs still wait for; `None` once they are in use.
    awaited: Option<BTreeSet<FrontendId>>,
    use_from: Timestamp,
}

#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) backend: BackendId,
    pub(super) index: u32,
    /// What it hosts; ascending.
    pub(super) models: Vec<ModelId>,
    /// What the planner takes it to host.
    pub(super) planned: Vec<ModelId>,
}

#[derive(Debug)]
pub(super) struct Model {
    pub(super) name: String,
    pub(super) version: String,
    /// The slowest of all offers, batch size by batch size: a candidate must fit its window on whichever GPU it gets.
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
    /// Models that it offers in vain.
    pub(super) unwanted: BTreeSet<ModelId>,
}

/// What a load changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Hosted {
    /// Under which id each backend hosts the model now.
    pub(super) models: BTreeMap<BackendId, ModelId>,
    /// Other versions of the model, which these backends have no use for any more.
    pub(super) replaced: BTreeSet<(BackendId, ModelId)>,
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

    /// Takes in a backend; of its models those that are `unwanted` are not used.
    pub(super) fn add_backend(
        &mut self,
        now: Timestamp,
        hello: BackendHello,
        unwanted: impl Fn(&str) -> bool,
    ) -> Result<Joined, JoinError> {
        if self.backends.len() >= BACKENDS_MAX {
            return Err(JoinError::TooMany { kind: "backends", max: BACKENDS_MAX });
        }
        let offers = check_offers(&hello)?;
        if self.models.len() + offers.len() > MODELS_MAX {
            return Err(JoinError::TooMany { kind: "models", max: MODELS_MAX });
        }
        let backend = BackendId(self.next_backend);
        self.next_backend += 1;
        let (mut reprofiled, mut refused) = (BTreeSet::new(), BTreeSet::new());
        let (mut models, mut taken) = (Vec::new(), BTreeMap::new());
        let mut hosted: Vec<Vec<ModelId>> = vec![Vec::new(); hello.gpus as usize];
        for offer in offers {
            let (model, changed) = self.merge_offer(&offer);
            if changed {
                reprofiled.insert(model);
            }
            models.push(model);
            if unwanted(&offer.name) {
                refused.insert(model);
                continue;
            }
            taken.insert(model, self.shared(model, &offer.profile));
            for &index in &offer.gpu_indexes {
                hosted[index as usize].push(model);
            }
        }
        let mut gpus = Vec::new();
        for (index, mut models) in hosted.into_iter().enumerate() {
            models.sort_unstable();
            models.dedup();
            gpus.push(self.add_gpu(Gpu { backend, index: index as u32, models, planned: Vec::new() }));
        }
        let awaited = Some(self.frontends.keys().copied().collect());
        let use_from = now + LINK_GRACE;
        self.backends.insert(backend, Backend { gpus, offers: taken, linked: BTreeSet::new(), awaited, use_from });
        Ok(Joined { backend, models, reprofiled, unwanted: refused })
    }

    fn add_gpu(&mut self, gpu: Gpu) -> GpuId {
        let id = GpuId(self.next_gpu);
        self.next_gpu += 1;
        self.gpus.insert(id, gpu);
        id
    }

    /// Gives a GPU a new id, as one that the planner does not know.
    pub(super) fn rename_gpu(&mut self, old: GpuId) -> GpuId {
        let gpu = self.gpus.remove(&old).expect("the caller looked it up");
        let (backend, index) = (gpu.backend, gpu.index as usize);
        let new = self.add_gpu(gpu);
        self.backends.get_mut(&backend).expect("GPUs leave with their backend").gpus[index] = new;
        new
    }

    /// GPUs in use of which the planner is wrong: what they host has changed.
    pub(super) fn misplanned_gpus(&self) -> Vec<GpuId> {
        let in_use = || self.gpus.iter().filter(|(_, gpu)| self.backends[&gpu.backend].awaited.is_none());
        let hosted: BTreeSet<ModelId> = in_use().flat_map(|(_, gpu)| gpu.models.iter().copied()).collect();
        let differs = |gpu: &Gpu| {
            let only_in = |one: &[ModelId], other: &[ModelId]| {
                one.iter().any(|model| hosted.contains(model) && other.binary_search(model).is_err())
            };
            only_in(&gpu.models, &gpu.planned) || only_in(&gpu.planned, &gpu.models)
        };
        in_use().filter(|(_, gpu)| differs(gpu)).map(|(&id, _)| id).collect()
    }

    /// Takes a model, whatever its version, from all GPUs. Yields who hosted it.
    pub(super) fn withdraw(&mut self, name: &str) -> BTreeSet<(BackendId, ModelId)> {
        let mut hosts = BTreeSet::new();
        for gpu in self.gpus.values_mut() {
            let gone = gpu.models.extract_if(.., |model| self.models[model.0 as usize].name == name);
            hosts.extend(gone.map(|model| (gpu.backend, model)));
        }
        for (backend, model) in &hosts {
            self.backends.get_mut(backend).expect("GPUs leave with their backend").offers.remove(model);
        }
        hosts
    }

    /// Backends that host a model, with their GPUs that do and what it takes there.
    pub(super) fn offers(&self, model: ModelId) -> impl Iterator<Item = (BackendId, Vec<GpuId>, &LatencyProfile)> {
        self.backends.iter().filter_map(move |(&id, backend)| {
            let offer = backend.offers.get(&model)?;
            let hosts = backend.gpus.iter().copied().filter(|gpu| self.gpus[gpu].models.binary_search(&model).is_ok());
            Some((id, hosts.collect(), &**offer))
        })
    }

    /// One table for all who offer the same.
    fn shared(&self, model: ModelId, offer: &LatencyProfile) -> Arc<LatencyProfile> {
        let mut others = self.backends.values().filter_map(|backend| backend.offers.get(&model));
        others.find(|other| ***other == *offer).cloned().unwrap_or_else(|| Arc::new(offer.clone()))
    }

    /// Whether any backend has ever offered a model of that name.
    pub(super) fn is_known(&self, name: &str) -> bool {
        self.models.iter().any(|model| model.name == name)
    }

    /// The offer of a backend that has loaded `name`, checked; or why it cannot be taken.
    pub(super) fn checked(&self, backend: BackendId, name: &str, offer: &ModelOffer) -> Result<ModelOffer, String> {
        if offer.name != name {
            return Err(format!("it was asked to load {name} and offers {}", offer.name));
        }
        if self.models.len() >= MODELS_MAX && self.position(offer).is_none() {
            return Err(JoinError::TooMany { kind: "models", max: MODELS_MAX }.to_string());
        }
        let gpus = self.backends.get(&backend).map_or(0, |backend| backend.gpus.len() as u32);
        check_offer(gpus, offer)
    }

    /// Backends host what they have loaded, instead of any other version. The profile is made of these offers alone.
    pub(super) fn host(&mut self, offers: &BTreeMap<BackendId, ModelOffer>) -> Hosted {
        let mut hosted = Hosted::default();
        for (&backend, offer) in offers {
            let is_first = self.position(offer).is_none_or(|model| hosted.models.values().all(|other| *other != model));
            let (model, _) = self.merge_offer(offer);
            if is_first {
                let entry = &mut self.models[model.0 as usize];
                (entry.profile, entry.input_bytes) = (offer.profile.clone(), offer.input_bytes);
            }
            hosted.models.insert(backend, model);
            let profile = self.shared(model, &offer.profile);
            if let Some(backend) = self.backends.get_mut(&backend) {
                backend.offers.retain(|other, _| self.models[other.0 as usize].name != offer.name);
                backend.offers.insert(model, profile);
            }
            for gpu in self.backends.get(&backend).into_iter().flat_map(|backend| &backend.gpus) {
                let gpu = self.gpus.get_mut(gpu).expect("GPUs leave with their backend");
                let former = gpu.models.extract_if(.., |model| self.models[model.0 as usize].name == offer.name);
                hosted.replaced.extend(former.filter(|former| *former != model).map(|former| (backend, former)));
                if offer.gpu_indexes.contains(&gpu.index) {
                    gpu.models.insert(gpu.models.partition_point(|other| *other < model), model);
                }
            }
        }
        hosted
    }

    fn position(&self, offer: &ModelOffer) -> Option<ModelId> {
        let same = |model: &Model| model.name == offer.name && model.version == offer.version;
        self.models.iter().position(same).map(|index| ModelId(index as u32))
    }

    /// The offered model's id, and whether it is new or its profile changed.
    fn merge_offer(&mut self, offer: &ModelOffer) -> (ModelId, bool) {
        let Some(id) = self.position(offer) else {
            self.models.push(Model {
                name: offer.name.clone(),
                version: offer.version.clone(),
                profile: offer.profile.clone(),
                input_bytes: offer.input_bytes,
            });
            return (ModelId((self.models.len() - 1) as u32), true);
        };
        let profile = &mut self.models[id.0 as usize].profile;
        let slowest = profile.slowest(&offer.profile);
        let changed = slowest != *profile;
        *profile = slowest;
        (id, changed)
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

    /// Yields the ids of the GPUs that went with it, and the models whose profile changed: those who are left need not
    /// wait for one that is not there. Small differences are kept, as re-measured offers never are the same.
    pub(super) fn remove_backend(&mut self, backend: BackendId) -> Option<(Vec<GpuId>, Vec<ModelId>)> {
        let gone = self.backends.remove(&backend)?;
        for gpu in &gone.gpus {
            self.gpus.remove(gpu);
        }
        let mut reprofiled = Vec::new();
        for model in gone.offers.into_keys() {
            let mut left = self.backends.values().filter_map(|backend| backend.offers.get(&model));
            let Some(first) = left.next() else { continue };
            let slowest = left.fold(LatencyProfile::clone(first), |slowest, other| slowest.slowest(other));
            let profile = &mut self.models[model.0 as usize].profile;
            if !slowest.is_near(profile, TOLERANCE) {
                *profile = slowest;
                reprofiled.push(model);
            }
        }
        Some((gone.gpus, reprofiled))
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

    /// The planner knows what a backend's GPUs host now.
    pub(super) fn note_planned(&mut self, backend: BackendId) {
        for gpu in self.backends.get(&backend).into_iter().flat_map(|backend| &backend.gpus) {
            let gpu = self.gpus.get_mut(gpu).expect("GPUs leave with their backend");
            gpu.planned.clone_from(&gpu.models);
        }
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
    if !(1..=GPUS_PER_BACKEND_MAX).contains(&hello.gpus) {
        let text = format!("gpus is {}, expected 1 to {GPUS_PER_BACKEND_MAX}", hello.gpus);
        return Err(JoinError::BadOffer(text));
    }
    let checked = hello.models.iter().map(|offer| check_offer(hello.gpus, offer).map_err(JoinError::BadOffer));
    checked.collect()
}

/// An offer with its profile validated, or what is wrong with it.
fn check_offer(gpus: u32, offer: &ModelOffer) -> Result<ModelOffer, String> {
    let ModelOffer { name, version, profile, gpu_indexes, .. } = offer;
    if name.is_empty() || name.len() > NAME_BYTES_MAX || version.len() > NAME_BYTES_MAX {
        return Err(format!("a model's name and version have 1 to {NAME_BYTES_MAX} bytes, found {}", name.len()));
    }
    if let Some(index) = gpu_indexes.iter().find(|index| **index >= gpus) {
        return Err(format!("{name} names GPU {index} of {gpus} (they count from 0)"));
    }
    let profile = profile.clone().validated().map_err(|error| format!("{name}: {error}"))?;
    Ok(ModelOffer { profile, ..offer.clone() })
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

    /// Every model is wanted.
    fn all(_: &str) -> bool {
        false
    }

    #[test]
    fn a_backend_is_used_once_it_is_linked_to_all_who_were_there() {
        let mut members = Members::default();
        let early = members.add_frontend("a:1".into()).unwrap();
        let joined = members.add_backend(Timestamp(0), hello(1, vec![offer("m", 1.0, vec![0])]), all).unwrap();
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
        let joined = members.add_backend(Timestamp(5), hello(1, vec![]), all).unwrap();
        assert_eq!(members.poll_timeout(), Some(Timestamp(5) + LINK_GRACE));
        assert_eq!(members.take_usable(Timestamp(5) + LINK_GRACE), [joined.backend]);
        assert_eq!(members.poll_timeout(), None);
    }

    #[test]
    fn two_offers_of_a_model_share_its_id_and_the_slower_profile() {
        let mut members = Members::default();
        let one = members.add_backend(Timestamp(0), hello(2, vec![offer("m", 1.0, vec![0, 1])]), all).unwrap();
        let other = members.add_backend(Timestamp(0), hello(1, vec![offer("m", 2.0, vec![0])]), all).unwrap();
        let same = members.add_backend(Timestamp(0), hello(1, vec![offer("m", 0.5, vec![0])]), all).unwrap();
        assert_eq!((one.models.clone(), other.models), (vec![ModelId(0)], vec![ModelId(0)]));
        assert_eq!((other.reprofiled.len(), same.reprofiled.len()), (1, 0));
        assert_eq!(members.models[0].profile.latency(3), Span::from_millis(7));
        assert_eq!(members.gpus.len(), 4);
    }

    #[test]
    fn a_slower_backend_counts_while_it_is_there_and_equal_offers_are_one() {
        let mut members = Members::default();
        let [slow, fast, same] = [2.0, 1.0, 1.0].map(|alpha_ms| {
            let offers = vec![offer("m", alpha_ms, vec![0, 1])];
            members.add_backend(Timestamp(0), hello(3, offers), all).unwrap().backend
        });
        let offers: Vec<_> = members.offers(ModelId(0)).collect();
        let ids = |backend: BackendId| members.backends[&backend].gpus[..2].to_vec();
        assert_eq!(offers.iter().map(|offer| offer.0).collect::<Vec<_>>(), [slow, fast, same]);
        assert!(offers.iter().all(|(backend, gpus, _)| *gpus == ids(*backend)));
        assert!(std::ptr::eq(offers[1].2, offers[2].2) && !std::ptr::eq(offers[0].2, offers[1].2));
        assert_eq!(members.remove_backend(fast).unwrap().1, []);
        assert_eq!(members.models[0].profile.latency(3), Span::from_millis(7));
        assert_eq!(members.remove_backend(slow).unwrap().1, [ModelId(0)]);
        assert_eq!(members.models[0].profile.latency(3), Span::from_millis(4));
        assert_eq!(members.remove_backend(same).unwrap().1, [], "who comes back is measured again");
        assert_eq!(members.models[0].profile.latency(3), Span::from_millis(4));
    }

    #[test]
    fn wrong_offers_are_refused_with_the_reason() {
        let mut members = Members::default();
        let mut refuse = |hello| members.add_backend(Timestamp(0), hello, all).unwrap_err().to_string();
        assert!(refuse(hello(0, vec![])).contains("gpus is 0, expected 1 to 64"));
        assert!(refuse(hello(2, vec![offer("m", 1.0, vec![2])])).contains("m names GPU 2 of 2"));
        assert!(refuse(hello(1, vec![offer("", 1.0, vec![0])])).contains("name"));
    }

    #[test]
    fn a_loaded_version_takes_the_place_of_the_others_and_their_profile() {
        let mut members = Members::default();
        let one = members.add_backend(Timestamp(0), hello(2, vec![offer("m", 5.0, vec![0, 1])]), all).unwrap();
        let other = members.add_backend(Timestamp(0), hello(1, vec![offer("m", 5.0, vec![0])]), all).unwrap();
        members.take_usable(Timestamp(0)).iter().for_each(|backend| members.note_planned(*backend));
        let newer = |alpha_ms| ModelOffer { version: "2".into(), ..offer("m", alpha_ms, vec![0]) };
        let offers = [(one.backend, newer(1.0)), (other.backend, newer(2.0))].into();
        let hosted = members.host(&offers);
        assert_eq!(hosted.models, [(one.backend, ModelId(1)), (other.backend, ModelId(1))].into());
        assert_eq!(hosted.replaced, [(one.backend, ModelId(0)), (other.backend, ModelId(0))].into());
        assert_eq!(members.models[1].profile.latency(1), Span::from_millis(3));
        // The second GPU of the first backend hosts nothing that is of use any more, so the planner need not know.
        assert_eq!(members.misplanned_gpus(), [one_gpu(&members, one.backend), one_gpu(&members, other.backend)]);
        let again = [(one.backend, newer(0.5)), (other.backend, newer(0.5))].into();
        assert_eq!(members.host(&again).replaced, BTreeSet::new());
        assert_eq!(members.models[1].profile.latency(1), Span::from_micros(1_500), "not the slower one of before");
        assert_eq!(members.withdraw("m"), [(one.backend, ModelId(1)), (other.backend, ModelId(1))].into());
        assert!(!members.is_hosted(ModelId(1)) && members.is_known("m"));
    }

    fn one_gpu(members: &Members, backend: BackendId) -> GpuId {
        members.backends[&backend].gpus[0]
    }
}
