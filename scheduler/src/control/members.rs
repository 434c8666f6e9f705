//! Who is there: frontends, backends with their GPUs, models, and which backend is linked to which frontend. Who is
//! used and served follows from the links ([`Reach`]); a member has [`LINK_GRACE`](super::joining::LINK_GRACE) to
//! make its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use proto::{
    BackendId, BatchCost, FrontendId, GpuId, LatencyProfile, LinkId, ModelId, ModelThreadId, Span, Timestamp, Weights,
    backend_to_scheduler::{BackendHello, ModelOffer, ResidentModel},
    frontend_to_scheduler::ADDRESS_BYTES_MAX,
    hello::Member,
    member_name::MEMBER_NAME_BYTES_MAX,
    request_times::RequestTimes,
    scheduler_to_frontend::{DropReason, NetworkTimes},
    weights::WeightsTally,
};
use thiserror::Error;

use super::{
    joining::Joining,
    offers::{check_offer, check_offers},
    reach::Reach,
    topics::Announcements,
};
use crate::{MODELS_MAX, estimates::TOLERANCE, news::PlannedWith};

/// The most of each kind that the scheduler keeps track of.
const FRONTENDS_MAX: usize = 1024;
pub(super) const BACKENDS_MAX: usize = 4096;

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
    /// No frontend can be reached there.
    #[error("link_address has {found} bytes, expected ip:port, at most {ADDRESS_BYTES_MAX}")]
    BadAddress {
        /// Its length.
        found: usize,
    },
    /// Operators cannot call it so.
    #[error("name: found {found} bytes, expected 1 to {MEMBER_NAME_BYTES_MAX} letters, digits, `-`, `_` and `.`")]
    BadName {
        /// Its length.
        found: usize,
    },
    /// It is about to end.
    #[error("the scheduler is about to end and takes nobody in")]
    Leaving,
    /// Its id is in use here.
    #[error("{who}")]
    Taken {
        /// By whom.
        who: &'static str,
    },
    /// It keeps no common clock with the others yet.
    #[error("this scheduler has just started, and does not know yet who is the primary; try again")]
    NotWarm,
}

impl JoinError {
    /// The member's former connection has not been reported down.
    const PRESENT: Self = Self::Taken { who: "your former connection has just ended, or is about to; try again" };
    /// Two members were given the same id, by schedulers that did not know of each other.
    const SOMEBODY_ELSE: Self = Self::Taken { who: "another member has your id; it is to be started anew" };
}

#[derive(Debug)]
pub(super) struct Frontend {
    pub(super) link_address: String,
    /// What it was last told of each model.
    pub(super) told: BTreeMap<ModelId, Told>,
    pub(super) announcements: Announcements,
    /// Tells it from another member of its name, and makes passes of backends ([`LinkPass`](proto::LinkPass)).
    pub(super) token: u64,
    /// What it brings along once it obeys us.
    pub(super) heir: Heir,
    joining: Joining,
}

/// A frontend's way to obey a primary: it names its links, then to each ModelThread its open tasks.
#[derive(Debug, Default)]
pub(super) struct Heir {
    pub(super) obeys: bool,
    /// Links that could reach its slots then.
    pub(super) links: BTreeMap<BackendId, LinkId>,
    /// ModelThreads that have heard of all its open tasks.
    pub(super) threads: u16,
    /// These have been told what to do with them.
    pub(super) is_settled: bool,
}

/// What a frontend knows of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) gpus: u32,
    pub(super) least_latency: Span,
    pub(super) batching: Span,
    pub(super) network: NetworkTimes,
    pub(super) model_thread: ModelThreadId,
}

/// What a model takes at a backend.
#[derive(Debug)]
struct Offer {
    /// l(b); backends that offer the same share a table.
    profile: Arc<LatencyProfile>,
    /// If its tasks are unequal, and that could be measured.
    cost: Option<BatchCost>,
    /// Whether it was measured since it was offered.
    is_measured: bool,
    /// Whether its backend would not host it of its own accord.
    is_guest: bool,
}

impl Offer {
    fn new(profile: Arc<LatencyProfile>, ModelOffer { cost, is_guest, .. }: &ModelOffer) -> Self {
        Self { profile, cost: *cost, is_measured: false, is_guest: *is_guest }
    }
}

#[derive(Debug)]
pub(super) struct Backend {
    /// Its GPUs; the position is the index in plans.
    pub(super) gpus: Vec<GpuId>,
    /// Of what it hosts.
    offers: BTreeMap<ModelId, Offer>,
    /// What it hosts and is not wanted: it is told to unload that as soon as it obeys.
    in_vain: BTreeSet<ModelId>,
    pub(super) linked: BTreeMap<FrontendId, LinkId>,
    joining: Joining,
    /// What has become of weights there, as it says.
    pub(super) tally: WeightsTally,
    /// Models that it has on disk only, as it says.
    pub(super) on_disk: BTreeSet<ModelId>,
    /// It wants no more plans.
    leaves: bool,
    /// It is used until others host what it does, though it leaves or is about to be drained.
    evacuates: bool,
    /// What it hosts is ours to choose.
    pub(super) is_auto: bool,
    /// The sub-cluster that it is in, as it says.
    pub(super) sub_cluster: Option<u16>,
    token: u64,
    /// It takes our plans, and no other scheduler's.
    pub(super) obeys: bool,
    /// It was here when we took over and has not said yet whether it obeys: what it runs is not known.
    pub(super) owes: bool,
}

#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) backend: BackendId,
    pub(super) index: u32,
    /// What it hosts; ascending. Shared with whoever tells operators.
    pub(super) models: Arc<Vec<ModelId>>,
    /// Whether its executor works, as its backend says.
    is_usable: bool,
    /// What planners take it to host; `None` while it is not in use.
    pub(super) planned: Option<Arc<Vec<ModelId>>>,
    /// If it holds but a part of what it hosts.
    pub(super) memory: Option<Memory>,
}

/// A GPU's memory for weights.
#[derive(Debug, Clone)]
pub(super) struct Memory {
    pub(super) pages: u32,
    pub(super) resident: Resident,
    /// Its backend does not have there what planners believe.
    pub(super) is_disputed: bool,
}

impl Gpu {
    fn is_disputed(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.is_disputed)
    }

    /// Its backend has yet to say what is in its memory.
    pub(super) fn is_asked(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| matches!(memory.resident, Resident::Asked(_)))
    }

    /// It hosts this, too.
    fn insert(&mut self, model: ModelId) {
        if let Err(at) = self.models.binary_search(&model) {
            Arc::make_mut(&mut self.models).insert(at, model);
        }
    }

    /// It hosts this no more. False if it did not.
    fn remove(&mut self, model: ModelId) -> bool {
        let found = self.models.binary_search(&model);
        found.map(|at| Arc::make_mut(&mut self.models).remove(at)).is_ok()
    }
}

impl Memory {
    /// Of a GPU that nobody has been asked about.
    fn new(pages: u32) -> Self {
        Self { pages, resident: Resident::Unknown, is_disputed: false }
    }
}

/// What is in a GPU's memory before planners decide about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Resident {
    /// Its backend has not been asked.
    Unknown,
    /// It has said so much.
    Asked(Vec<ResidentModel>),
    /// That is all.
    Known(Vec<ResidentModel>),
}

#[derive(Debug)]
pub(super) struct Model {
    pub(super) name: String,
    pub(super) version: String,
    /// The slowest of all offers, batch size by batch size: a candidate must fit its window on whichever GPU it gets.
    pub(super) profile: LatencyProfile,
    /// Bytes of one task's input; where requests choose its size, of the largest.
    pub(super) input_bytes: u32,
    /// Of the smallest, as the model's owner was told.
    pub(super) input_bytes_min: u32,
    /// What it takes in memory, by the largest of all offers.
    pub(super) weights: Weights,
    /// Requests that may wait, by their priority, as the newest offer has it.
    pub(super) queue_max: Vec<u32>,
    /// The ModelThread that plans it.
    pub(super) owner: ModelThreadId,
    /// As its owner plans it; `None` until that has said so.
    pub(super) planned: Option<PlannedWith>,
    /// GPUs in use that host it.
    pub(super) hosts: u32,
    /// What its owner was told: whether there are any, or why its tasks are dropped.
    pub(super) hosted: Result<(), DropReason>,
    /// What its requests take, if they are unequal and that has been learned.
    pub(super) request_times: Option<RequestTimes>,
}

#[derive(Debug)]
pub(super) struct Members {
    pub(super) frontends: BTreeMap<FrontendId, Frontend>,
    pub(super) backends: BTreeMap<BackendId, Backend>,
    pub(super) gpus: BTreeMap<GpuId, Gpu>,
    pub(super) models: Vec<Model>,
    /// All versions of each model, by its name.
    versions: BTreeMap<String, Vec<ModelId>>,
    /// Models that have an owner; the rest have come just now.
    pub(super) dealt: usize,
    /// Members that operators have drained.
    drained: BTreeSet<Member>,
    /// What became of weights at backends that are gone.
    past: WeightsTally,
    reach: Reach,
    /// When that was decided.
    reached_at: Timestamp,
    /// The ids that are given next. Schedulers begin at random, so that two of them hardly ever give the same.
    next_frontend: u32,
    next_backend: u32,
    next_gpu: u32,
}

/// Who a new member says it is: the id that another scheduler gave it, and its token.
#[derive(Debug, Clone, Copy)]
pub(super) struct Known<Id> {
    pub(super) id: Option<Id>,
    pub(super) token: u64,
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

/// What a load changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Hosted {
    /// Under which ids each backend hosts the model's versions now.
    pub(super) models: BTreeSet<(BackendId, ModelId)>,
    /// Other versions of the model, which these backends have no use for once frontends know the new ones.
    pub(super) replaced: BTreeSet<(BackendId, ModelId)>,
    /// Backends whose offers are of more versions than there is room for.
    pub(super) refused: BTreeSet<BackendId>,
}

impl Members {
    /// Nobody yet. The first ids follow from `first_id`.
    pub(super) fn new(first_id: u32) -> Self {
        Self {
            frontends: BTreeMap::new(),
            backends: BTreeMap::new(),
            gpus: BTreeMap::new(),
            models: Vec::new(),
            versions: BTreeMap::new(),
            dealt: 0,
            drained: BTreeSet::new(),
            past: WeightsTally::default(),
            reach: Reach::default(),
            reached_at: Timestamp::PAST,
            next_frontend: first_id % FrontendId::COUNT_MAX,
            next_backend: first_id,
            next_gpu: 0,
        }
    }

    /// Takes in a frontend that has yet to connect to so many `threads`.
    pub(super) fn add_frontend(
        &mut self,
        now: Timestamp,
        link_address: String,
        threads: usize,
        known: Known<FrontendId>,
    ) -> Result<FrontendId, JoinError> {
        if link_address.is_empty() || link_address.len() > ADDRESS_BYTES_MAX {
            return Err(JoinError::BadAddress { found: link_address.len() });
        }
        if self.frontends.len() >= FRONTENDS_MAX {
            return Err(JoinError::TooMany { kind: "frontends", max: FRONTENDS_MAX });
        }
        let id = match known.id {
            Some(id) if id.0 >= FrontendId::COUNT_MAX => return Err(JoinError::SOMEBODY_ELSE),
            Some(id) => match self.frontends.get(&id) {
                Some(present) if present.token == known.token => return Err(JoinError::PRESENT),
                Some(_) => return Err(JoinError::SOMEBODY_ELSE),
                None => id,
            },
            None => {
                let mut ids = (self.next_frontend..FrontendId::COUNT_MAX).chain(0..self.next_frontend).map(FrontendId);
                let id = ids.find(|id| !self.frontends.contains_key(id)).expect("there are fewer than ids");
                self.next_frontend = (id.0 + 1) % FrontendId::COUNT_MAX;
                id
            }
        };
        let joining = Joining::new(now, threads, 0);
        let (told, announcements, heir) = (BTreeMap::new(), Announcements::default(), Heir::default());
        let entry = Frontend { link_address, told, announcements, token: known.token, heir, joining };
        self.frontends.insert(id, entry);
        Ok(id)
    }

    /// Takes in a backend that has yet to connect to so many `threads`; of its models those that are `unwanted` are not
    /// used, and it is told so once it obeys.
    pub(super) fn add_backend(
        &mut self,
        now: Timestamp,
        hello: BackendHello,
        threads: usize,
        unwanted: impl Fn(&str) -> bool,
    ) -> Result<Joined, JoinError> {
        if self.backends.len() >= BACKENDS_MAX {
            return Err(JoinError::TooMany { kind: "backends", max: BACKENDS_MAX });
        }
        let offers = check_offers(&hello)?;
        if self.models.len() + offers.len() + hello.more as usize > MODELS_MAX {
            return Err(JoinError::TooMany { kind: "models", max: MODELS_MAX });
        }
        let known = Known { id: hello.known_as, token: hello.standing.token };
        let backend = match known.id {
            Some(id) => match self.backends.get(&id) {
                Some(present) if present.token == known.token => return Err(JoinError::PRESENT),
                Some(_) => return Err(JoinError::SOMEBODY_ELSE),
                None if id == BackendId::NOBODY => return Err(JoinError::SOMEBODY_ELSE),
                None => id,
            },
            None => {
                let mut ids = (self.next_backend..u32::MAX).chain(0..self.next_backend).map(BackendId);
                let id = ids.find(|id| !self.backends.contains_key(id)).expect("there are fewer than ids");
                self.next_backend = id.0 + 1;
                id
            }
        };
        let gpus = (0..hello.gpus).map(|index| {
            let memory = hello.memory_pages.map(Memory::new);
            self.add_gpu(Gpu { backend, index, models: Arc::default(), is_usable: true, planned: None, memory })
        });
        let gpus = gpus.collect();
        let joining = Joining::new(now, threads, hello.more as usize);
        let (linked, offered, in_vain) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        let (token, is_auto) = (known.token, hello.is_auto);
        let (tally, on_disk) = (WeightsTally::default(), BTreeSet::new());
        let entry = Backend {
            gpus,
            offers: offered,
            in_vain,
            linked,
            joining,
            tally,
            on_disk,
            leaves: false,
            evacuates: false,
            is_auto,
            sub_cluster: None,
            token,
            obeys: false,
            owes: false,
        };
        self.backends.insert(backend, entry);
        Ok(self.take_offers(backend, offers, unwanted))
    }

    /// Takes in more of what a backend that has just joined offers.
    ///
    /// # Errors
    /// If its hello did not tell of so many, or one of them is wrong.
    pub(super) fn add_offers(
        &mut self,
        now: Timestamp,
        backend: BackendId,
        offers: &[ModelOffer],
        unwanted: impl Fn(&str) -> bool,
    ) -> Result<Joined, String> {
        let Some(entry) = self.backends.get_mut(&backend) else { return Err("it has left".to_owned()) };
        let expected = entry.joining.offers;
        if offers.is_empty() || offers.len() > expected {
            return Err(format!("it offers {} models more, expected 1 to {expected}", offers.len()));
        }
        // Whoever has much to tell has had no time to link to anybody.
        entry.joining = Joining::new(now, entry.joining.threads, expected - offers.len());
        // There was room for as many when it joined; others may have come since.
        if !self.has_room(offers) {
            return Err(JoinError::TooMany { kind: "models", max: MODELS_MAX }.to_string());
        }
        let offers: Vec<_> =
            offers.iter().map(|offer| self.checked(backend, &offer.name, offer)).collect::<Result<_, _>>()?;
        Ok(self.take_offers(backend, offers, unwanted))
    }

    /// Whether a backend has named all models that it offers.
    pub(super) fn has_offered(&self, backend: BackendId) -> bool {
        self.backends.get(&backend).is_some_and(|entry| entry.joining.offers == 0)
    }

    fn take_offers(&mut self, backend: BackendId, offers: Vec<ModelOffer>, unwanted: impl Fn(&str) -> bool) -> Joined {
        let (mut models, mut reprofiled) = (Vec::new(), BTreeSet::new());
        for offer in offers {
            let (model, changed) = self.merge_offer(&offer);
            if changed {
                reprofiled.insert(model);
            }
            models.push(model);
            let profile = self.shared(model, &offer.profile);
            let entry = self.backends.get_mut(&backend).expect("it has been added");
            if unwanted(&offer.name) {
                entry.in_vain.insert(model);
                continue;
            }
            entry.offers.insert(model, Offer::new(profile, &offer));
            for &index in &offer.gpu_indexes {
                self.gpus.get_mut(&entry.gpus[index as usize]).expect("GPUs leave with their backend").insert(model);
            }
        }
        Joined { backend, models, reprofiled }
    }

    fn add_gpu(&mut self, gpu: Gpu) -> GpuId {
        let id = GpuId(self.next_gpu);
        self.next_gpu += 1;
        self.gpus.insert(id, gpu);
        id
    }

    /// Gives a GPU that left the planners a new id, as one that they do not know.
    pub(super) fn rename_gpu(&mut self, old: GpuId) -> GpuId {
        let gone = self.gpus.remove(&old).expect("the caller looked it up");
        let memory = gone.memory.map(|memory| Memory::new(memory.pages));
        let gpu = Gpu { planned: None, memory, ..gone };
        let (backend, index) = (gpu.backend, gpu.index as usize);
        let new = self.add_gpu(gpu);
        self.backends.get_mut(&backend).expect("GPUs leave with their backend").gpus[index] = new;
        new
    }

    /// GPUs that planners know and should not, as their backend is not in use any more, or as what they host is another
    /// now. One may differ in models that nobody hosted when it changed, and that matters as soon as somebody does.
    pub(super) fn gpus_that_leave(&self, reach: &Reach) -> Vec<GpuId> {
        let obeys = |gpu: &Gpu| self.backends.get(&gpu.backend).is_some_and(|entry| entry.obeys);
        let is_used = |gpu: &Gpu| gpu.is_usable && obeys(gpu) && reach.backends.contains(&gpu.backend);
        let used = || self.gpus.iter().filter(|(_, gpu)| is_used(gpu));
        let hosted: BTreeSet<ModelId> = used().flat_map(|(_, gpu)| gpu.models.iter().copied()).collect();
        let differs = |gpu: &Gpu, planned: &[ModelId]| {
            let only_in = |one: &[ModelId], other: &[ModelId]| {
                one.iter().any(|model| hosted.contains(model) && other.binary_search(model).is_err())
            };
            only_in(&gpu.models, planned) || only_in(planned, &gpu.models)
        };
        let leaves = |gpu: &Gpu| match &gpu.planned {
            Some(planned) => !is_used(gpu) || differs(gpu, planned) || gpu.is_disputed(),
            None => false,
        };
        self.gpus.iter().filter(|(_, gpu)| leaves(gpu)).map(|(&id, _)| id).collect()
    }

    /// GPUs in use that planners do not know; from now on they do.
    pub(super) fn gpus_that_come(&mut self) -> Vec<GpuId> {
        let mut coming = Vec::new();
        for (&id, gpu) in &mut self.gpus {
            let obeys = self.backends.get(&gpu.backend).is_some_and(|entry| entry.obeys);
            let is_known = gpu.memory.as_ref().is_none_or(|memory| matches!(memory.resident, Resident::Known(_)));
            let is_used = gpu.is_usable && obeys && self.reach.backends.contains(&gpu.backend);
            if gpu.planned.is_none() && is_used && is_known {
                gpu.planned = Some(Arc::clone(&gpu.models));
                coming.push(id);
            }
        }
        coming
    }

    /// Backends that take our plans. Only they load, host and unload what they are told to.
    pub(super) fn obeying(&self) -> impl Iterator<Item = BackendId> {
        self.backends.iter().filter(|(_, entry)| entry.obeys).map(|(&id, _)| id)
    }

    /// A backend obeys. Yields what it hosts in vain.
    pub(super) fn set_obeys(&mut self, backend: BackendId) -> BTreeSet<ModelId> {
        let Some(entry) = self.backends.get_mut(&backend) else { return BTreeSet::new() };
        (entry.obeys, entry.owes) = (true, false);
        std::mem::take(&mut entry.in_vain)
    }

    /// Takes a model, whatever its version, from all GPUs. Yields who hosted it and obeys; others are told once they
    /// do.
    pub(super) fn withdraw(&mut self, name: &str) -> BTreeSet<(BackendId, ModelId)> {
        let mut hosts = BTreeSet::new();
        for gpu in self.gpus.values_mut() {
            let (backend, versions) = (gpu.backend, self.versions.get(name).into_iter().flatten().copied());
            hosts.extend(versions.filter(|&model| gpu.remove(model)).map(|model| (backend, model)));
        }
        hosts.retain(|&(backend, model)| {
            let entry = self.backends.get_mut(&backend).expect("GPUs leave with their backend");
            entry.offers.remove(&model);
            if !entry.obeys {
                entry.in_vain.insert(model);
            }
            entry.obeys
        });
        hosts
    }

    /// Whether any backend has ever offered a model of that name.
    pub(super) fn is_known(&self, name: &str) -> bool {
        self.versions.contains_key(name)
    }

    /// The offer of a backend that has loaded `name`, checked; or why it cannot be taken.
    pub(super) fn checked(&self, backend: BackendId, name: &str, offer: &ModelOffer) -> Result<ModelOffer, String> {
        if offer.name != name {
            return Err(format!("it was asked to load {name} and offers {}", offer.name));
        }
        if !self.has_room(std::slice::from_ref(offer)) {
            return Err(JoinError::TooMany { kind: "models", max: MODELS_MAX }.to_string());
        }
        let gpus = self.backends.get(&backend).map_or(&[][..], |backend| &backend.gpus[..]);
        let memory = gpus.first().and_then(|gpu| self.gpus[gpu].memory.as_ref());
        check_offer(gpus.len() as u32, memory.map(|memory| memory.pages), offer)
    }

    /// Backends host what they have loaded. The profile is made of these offers alone. Other versions stay until they
    /// are [let go](Self::let_go).
    pub(super) fn host(&mut self, offers: &BTreeMap<BackendId, Vec<ModelOffer>>) -> Hosted {
        let mut hosted = Hosted::default();
        for (&backend, offers) in offers {
            // Each was checked when it came, but several may have come since.
            if !self.has_room(offers) {
                hosted.refused.insert(backend);
                continue;
            }
            for offer in offers {
                if let Some(known) = self.position(offer) {
                    self.let_go(backend, known);
                }
                let model = self.host_version(backend, offer, &hosted);
                hosted.models.insert((backend, model));
            }
            // An ensemble takes nothing's place.
            let Some(first) = offers.first() else { continue };
            let others = self.versions_on(backend, &first.name).map(|model| (backend, model));
            let others: Vec<_> = others.filter(|other| !hosted.models.contains(other)).collect();
            hosted.replaced.extend(others);
        }
        hosted
    }

    /// The versions of a model that a backend hosts.
    pub(super) fn versions_on(&self, backend: BackendId, name: &str) -> impl Iterator<Item = ModelId> {
        let versions = self.versions.get(name).into_iter().flatten().copied();
        versions.filter(move |model| {
            let gpus = self.backends.get(&backend).into_iter().flat_map(|entry| &entry.gpus);
            gpus.map(|gpu| &self.gpus[gpu]).any(|gpu| gpu.models.binary_search(model).is_ok())
        })
    }

    /// Takes a version of a model from a backend. False if it does not host it.
    pub(super) fn let_go(&mut self, backend: BackendId, model: ModelId) -> bool {
        let Some(entry) = self.backends.get_mut(&backend) else { return false };
        entry.offers.remove(&model);
        entry.on_disk.retain(|other| *other != model);
        let mut is_hosted = false;
        for gpu in &entry.gpus {
            let gpu = self.gpus.get_mut(gpu).expect("GPUs leave with their backend");
            is_hosted |= gpu.remove(model);
        }
        is_hosted
    }

    /// A backend hosts a version that it has loaded, as others do that are in `hosted`.
    fn host_version(&mut self, backend: BackendId, offer: &ModelOffer, hosted: &Hosted) -> ModelId {
        let is_first = self.position(offer).is_none_or(|model| hosted.models.iter().all(|(_, other)| *other != model));
        let (model, _) = self.merge_offer(offer);
        if is_first {
            let entry = &mut self.models[model.0 as usize];
            (entry.profile, entry.input_bytes) = (offer.profile.clone(), offer.input_bytes);
            entry.weights = offer.weights;
        }
        let profile = self.shared(model, &offer.profile);
        let Some(entry) = self.backends.get_mut(&backend) else { return model };
        entry.offers.insert(model, Offer::new(profile, offer));
        for gpu in &entry.gpus {
            let gpu = self.gpus.get_mut(gpu).expect("GPUs leave with their backend");
            if offer.gpu_indexes.contains(&gpu.index) {
                gpu.insert(model);
            }
        }
        model
    }

    /// Whether there may be as many models as there are with these.
    fn has_room(&self, offers: &[ModelOffer]) -> bool {
        let new = offers.iter().filter(|offer| self.position(offer).is_none()).count();
        self.models.len() + new <= MODELS_MAX
    }

    fn position(&self, offer: &ModelOffer) -> Option<ModelId> {
        let versions = self.versions.get(&offer.name)?;
        versions.iter().copied().find(|model| self.models[model.0 as usize].version == offer.version)
    }

    /// The offered model's id, and whether it is new or its profile changed.
    fn merge_offer(&mut self, offer: &ModelOffer) -> (ModelId, bool) {
        let Some(id) = self.position(offer) else {
            let id = ModelId(self.models.len() as u32);
            self.versions.entry(offer.name.clone()).or_default().push(id);
            self.models.push(Model {
                name: offer.name.clone(),
                version: offer.version.clone(),
                profile: offer.profile.clone(),
                input_bytes: offer.input_bytes,
                input_bytes_min: offer.input_bytes,
                weights: offer.weights,
                queue_max: offer.queue_max.clone(),
                owner: ModelThreadId(0),
                planned: None,
                hosts: 0,
                hosted: Err(DropReason::NoBackend),
                request_times: None,
            });
            return (id, true);
        };
        let Model { profile, weights, queue_max, .. } = &mut self.models[id.0 as usize];
        let (slowest, largest) = (profile.slowest(&offer.profile), weights.largest(offer.weights));
        let changed = slowest != *profile || largest != *weights;
        (*profile, *weights) = (slowest, largest);
        queue_max.clone_from(&offer.queue_max);
        (id, changed)
    }

    /// Backends cut off a frontend that their primary has lost, but not one that only a standby has.
    pub(super) fn remove_frontend(&mut self, frontend: FrontendId) -> Option<Frontend> {
        for backend in self.backends.values_mut().filter(|backend| backend.obeys) {
            backend.linked.remove(&frontend);
        }
        self.reach.frontends.remove(&frontend);
        self.drained.remove(&Member::Frontend(frontend));
        self.frontends.remove(&frontend)
    }

    /// Yields the ids of the GPUs that went with it, and the models whose profile changed: those who are left need not
    /// wait for one that is not there. Small differences are kept, as re-measured offers never are the same.
    pub(super) fn remove_backend(&mut self, backend: BackendId) -> Option<(Vec<GpuId>, Vec<ModelId>)> {
        let gone = self.backends.remove(&backend)?;
        self.reach.backends.remove(&backend);
        self.drained.remove(&Member::Backend(backend));
        self.past = self.past.plus(gone.tally.past());
        for gpu in &gone.gpus {
            self.gpus.remove(gpu);
        }
        let mut reprofiled = Vec::new();
        for (model, offer) in gone.offers {
            let cost = self.cost(model);
            let has_cost = offer.cost.is_none_or(|gone| cost.map(|left| left.slowest(gone)) == cost);
            let Some(slowest) = self.slowest(model) else { continue };
            let profile = &mut self.models[model.0 as usize].profile;
            let is_near = slowest.is_near(profile, TOLERANCE);
            if !is_near {
                *profile = slowest;
            }
            if !is_near || !has_cost {
                reprofiled.push(model);
            }
        }
        Some((gone.gpus, reprofiled))
    }

    /// Notes a link, or its end. False if either end is not there (any more).
    pub(super) fn set_linked(&mut self, backend: BackendId, frontend: FrontendId, link: Option<LinkId>) -> bool {
        let Some(entry) = self.backends.get_mut(&backend) else { return false };
        let former = match link {
            // Whoever it is may join later here than there.
            Some(link) if entry.linked.len() < 2 * FRONTENDS_MAX => entry.linked.insert(frontend, link),
            Some(_) => return false,
            None => entry.linked.remove(&frontend),
        };
        former != link && self.frontends.contains_key(&frontend)
    }

    /// The fences that must be confirmed before what a frontend was said to wait for can run again: links that could
    /// reach its slots, but not of a backend that obeys us and knows them.
    pub(super) fn doubtful_links(&self, frontend: FrontendId) -> Vec<(BackendId, LinkId)> {
        let Some(entry) = self.frontends.get(&frontend) else { return Vec::new() };
        let is_known = |backend: &BackendId, link: &LinkId| {
            let backend = self.backends.get(backend).filter(|backend| backend.obeys);
            backend.is_some_and(|backend| backend.linked.get(&frontend) == Some(link))
        };
        let doubtful = entry.heir.links.iter().filter(|(backend, link)| !is_known(backend, link));
        doubtful.map(|(&backend, &link)| (backend, link)).collect()
    }

    /// GPUs of a backend that planners know.
    pub(super) fn planned_gpus(&self, backend: BackendId) -> BTreeSet<GpuId> {
        let gpus = self.backends.get(&backend).into_iter().flat_map(|entry| &entry.gpus);
        gpus.copied().filter(|gpu| self.gpus[gpu].planned.is_some()).collect()
    }

    /// A member is connected to one more ModelThread.
    pub(super) fn handle_connected(&mut self, member: Member) {
        let joining = match member {
            Member::Frontend(frontend) => self.frontends.get_mut(&frontend).map(|entry| &mut entry.joining),
            Member::Backend(backend) => self.backends.get_mut(&backend).map(|entry| &mut entry.joining),
        };
        if let Some(joining) = joining {
            joining.threads = joining.threads.saturating_sub(1);
        }
    }

    /// Members that take too long to join.
    pub(super) fn overdue(&mut self, now: Timestamp) -> Vec<Member> {
        let frontends = self.frontends.iter_mut().map(|(&id, entry)| (Member::Frontend(id), &mut entry.joining));
        let backends = self.backends.iter_mut().map(|(&id, entry)| (Member::Backend(id), &mut entry.joining));
        let overdue = frontends.chain(backends).filter_map(|(id, joining)| joining.is_overdue(now).then_some(id));
        overdue.collect()
    }

    /// Who is to be used and served now.
    pub(super) fn reach(&self, now: Timestamp) -> Reach {
        let counts = |joining: &Joining| joining.grace_until <= now;
        let has_joined = Joining::is_over;
        let is_drained = |id: &BackendId| self.drained.contains(&Member::Backend(*id));
        let stays = |id: &BackendId, entry: &Backend| entry.evacuates || !(entry.leaves || is_drained(id));
        let backends = self.backends.iter();
        let backends = backends.filter(|(id, entry)| has_joined(&entry.joining) && stays(id, entry));
        let backends = backends.map(|(&id, entry)| (id, counts(&entry.joining) || self.reach.backends.contains(&id)));
        let frontends = self.frontends.iter().filter(|(_, entry)| has_joined(&entry.joining));
        let frontends =
            frontends.map(|(&id, entry)| (id, counts(&entry.joining) || self.reach.frontends.contains(&id)));
        let is_linked = |backend, frontend| self.backends[&backend].linked.contains_key(&frontend);
        Reach::of(&backends.collect(), &frontends.collect(), is_linked)
    }

    /// Takes note of who is used and served. Yields the frontends that are served now and were not, and the other way
    /// round.
    pub(super) fn set_reach(&mut self, now: Timestamp, reach: Reach) -> (Vec<FrontendId>, Vec<FrontendId>) {
        self.reached_at = now;
        let former = std::mem::replace(&mut self.reach, reach);
        let (now, before) = (&self.reach.frontends, &former.frontends);
        for model in &mut self.models {
            model.hosts = 0;
        }
        for gpu in self.gpus.values().filter(|gpu| gpu.is_usable && self.reach.backends.contains(&gpu.backend)) {
            for model in &*gpu.models {
                self.models[model.0 as usize].hosts += 1;
            }
        }
        (now.difference(before).copied().collect(), before.difference(now).copied().collect())
    }

    /// Models that GPUs in use host now and did not; their owners are to be told.
    pub(super) fn hosted_anew(&mut self) -> Vec<ModelId> {
        let mut anew = Vec::new();
        for (id, model) in (0..).map(ModelId).zip(&mut self.models) {
            if model.hosts > 0 && model.hosted.is_err() {
                model.hosted = Ok(());
                anew.push(id);
            }
        }
        anew
    }

    /// Models that no GPU in use hosts any more; their owners are to be told.
    pub(super) fn unhosted(&self) -> Vec<ModelId> {
        let ids = (0..).map(ModelId).zip(&self.models);
        ids.filter(|(_, model)| model.hosts == 0 && model.hosted.is_ok()).map(|(id, _)| id).collect()
    }

    /// When [`Self::reach`] may be another one even if nobody links.
    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        let backends = self.backends.iter().filter(|(id, entry)| !entry.leaves && !self.reach.backends.contains(id));
        let frontends = self.frontends.iter().filter(|(id, _)| !self.reach.frontends.contains(id));
        let joining = backends.map(|(_, entry)| entry.joining).chain(frontends.map(|(_, entry)| entry.joining));
        joining.map(|joining| joining.grace_until).filter(|&at| at > self.reached_at).min()
    }

    /// Whether a backend's GPUs are in use.
    pub(super) fn is_used(&self, backend: BackendId) -> bool {
        self.reach.backends.contains(&backend)
    }

    /// Whether every backend in use reaches the frontend.
    pub(super) fn is_served(&self, frontend: FrontendId) -> bool {
        self.reach.frontends.contains(&frontend)
    }
}

mod copies;
mod costs;
mod draining;
mod shown;
#[cfg(test)]
mod tests;
mod weights;
