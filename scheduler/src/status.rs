//! The cluster for operators: `GET /v2/cluster` at a scheduler's `[admin] http`, in pages of bounded size. All is
//! worked out from what control has left on the [`Board`], on the listener's thread.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use admin::Query;
use proto::{BackendId, ModelId, Span, Timestamp, weights::PAGE_BYTES};
use serde::{Deserialize, Serialize};

mod metrics;

use crate::{
    advice::Advice,
    history::{History, Lane, Ran},
    snapshot::{
        BackendShown, Board, FrontendShown, GpuShown, MemberState, ModelName, ModelShown, SchedulerState, Snapshot,
    },
};

/// Where it is told.
pub const PATH: &str = "/v2/cluster";
/// Frontends, and backends, of one page.
const MEMBERS_PER_PAGE: usize = 200;
/// Models of one page.
const MODELS_PER_PAGE: usize = 1_000;
/// What a query may ask for alone.
const PARTS: [&str; 3] = ["all", "members", "models"];
/// Names of models that only one backend hosts which are told with it.
const ONLY_HERE_NAMED: usize = 3;
/// What GPUs ran is told of so long.
const RAN: Span = Span::from_millis(2_000);
/// What GPUs ran is worked out so often at most, for whoever looks and however many pages a cluster has.
const RAN_EVERY: Span = Span::from_millis(250);
/// Names of models that are told of a sub-cluster.
const NAMED: usize = 3;

/// One page. Members, and models, come in the order of their ids; counts are of all pages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClusterPage {
    /// Which page it is, from 0.
    pub page: usize,
    /// How many there are.
    pub pages: usize,
    /// How long ago the scheduler has told so.
    pub age_ms: f64,
    /// What operators call the scheduler that tells.
    pub scheduler: String,
    /// Which network it is on.
    pub arm: String,
    /// It is the primary.
    pub is_primary: bool,
    /// The epoch of the primary, as far as it is known.
    pub epoch: String,
    /// All schedulers.
    pub schedulers: Vec<SchedulerRow>,
    /// How many there are of each.
    pub counts: Counts,
    /// How many GPUs are needed, and why.
    pub advice: AdviceRow,
    /// Of this page.
    pub frontends: Vec<FrontendRow>,
    /// Of this page.
    pub backends: Vec<BackendRow>,
    /// Of this page.
    pub models: Vec<ModelRow>,
}

/// How many there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    /// Frontends.
    pub frontends: usize,
    /// Backends.
    pub backends: usize,
    /// Their GPUs.
    pub gpus: usize,
    /// Models with their versions, those that nobody hosts any more among them.
    pub models: usize,
    /// Of these, those that a live backend hosts.
    pub models_hosted: usize,
    /// Frontends that serve.
    pub frontends_serving: usize,
    /// Backends that serve.
    pub backends_serving: usize,
    /// GPUs that plans go to.
    pub gpus_serving: usize,
}

/// How many GPUs are needed, and why; parts and numbers of GPUs are averages over the window.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct AdviceRow {
    /// GPUs that plans go to.
    pub gpus: u32,
    /// How many are needed; none while that is not known.
    pub gpus_needed: Option<u32>,
    /// The reason in words.
    pub reason: String,
    /// Part of the GPUs' time in which tasks with an objective ran.
    pub busy: f64,
    /// The rest.
    pub idle: f64,
    /// Tasks that are lost, of all.
    pub bad: f64,
    /// GPUs that the tasks would keep busy at the price at which GPUs are paid for.
    pub work_gpus: f64,
    /// Tasks in time, since this scheduler is the primary.
    pub tasks_in_time: u64,
    /// Tasks that were lost, since then.
    pub tasks_lost: u64,
    /// GPUs that host the same models; at most 128, and on the first page of all parts alone.
    pub sub_clusters: Vec<SubClusterRow>,
}

/// GPUs that host the same models.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SubClusterRow {
    /// How many models, whatever versions they have.
    pub models: usize,
    /// The first of their names.
    pub models_first: Vec<String>,
    /// GPUs that plans go to.
    pub gpus: u32,
    /// How many are needed; none while that is not known.
    pub gpus_needed: Option<u32>,
    /// The reason in words.
    pub reason: String,
    /// As of all.
    pub bad: f64,
    /// As of all.
    pub work_gpus: f64,
}

/// A scheduler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulerRow {
    /// Its `listen`.
    pub address: String,
    /// `primary`, `standby`, `starting` or `unreachable`.
    pub state: String,
}

/// A frontend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontendRow {
    /// What operators call it.
    pub name: String,
    /// Its id.
    pub id: u32,
    /// `joining`, `unlinked`, `serving` or `drained`.
    pub state: String,
    /// It obeys this scheduler.
    pub obeys: bool,
    /// What its connection came from.
    pub address: Option<String>,
    /// Its arm, and where its packets arrive.
    pub path: Option<String>,
}

/// A backend.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BackendRow {
    /// What operators call it.
    pub name: String,
    /// Its id.
    pub id: u32,
    /// `joining`, `unlinked`, `serving`, `drained` or `leaving`.
    pub state: String,
    /// It obeys this scheduler.
    pub obeys: bool,
    /// What its connection came from.
    pub address: Option<String>,
    /// Its arm, and where its packets arrive.
    pub path: Option<String>,
    /// Frontends that it is linked to.
    pub links: usize,
    /// Where the scheduler places models on it: its sub-cluster.
    #[serde(default)]
    pub sub_cluster: Option<u16>,
    /// Its GPUs.
    pub gpus: Vec<GpuRow>,
    /// Models, with their versions, that it hosts.
    pub models: usize,
    /// Every model that it hosts is hosted by another live backend.
    pub safe_to_remove: bool,
    /// Of its models, how many no other live backend hosts.
    pub only_here: usize,
    /// The first of these.
    pub only_here_first: Vec<String>,
    /// Of GPUs whose memory holds but a part of what they host.
    pub weights: WeightsRow,
}

/// Memory for weights at a backend, and what has become of weights there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightsRow {
    /// Bytes for weights in its GPUs' memories.
    pub gpu_bytes: u64,
    /// Of these, those that something is in.
    pub gpu_bytes_used: u64,
    /// Bytes for weights in its host's memory, if that is bounded.
    pub host_bytes: u64,
    /// Of these, those that something is in.
    pub host_bytes_used: u64,
    /// Loads into a GPU's memory.
    pub loads: u64,
    /// Loads that failed.
    pub failed: u64,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuRow {
    /// Its place at its backend.
    pub index: usize,
    /// What planners call it.
    pub id: u32,
    /// `serving`, `idle` (no plan goes there) or `unusable`.
    pub state: String,
    /// Models, with their versions, that it hosts.
    pub models: usize,
    /// Bytes for weights in its memory, if that holds but a part of what it hosts.
    pub weights_bytes: Option<u64>,
    /// What it ran lately, at the scheduler that planned it.
    #[serde(default)]
    pub ran: Option<RanRow>,
}

/// What a GPU ran in the last two seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RanRow {
    /// The part of that time in which it executed batches that have ended.
    pub busy: f64,
    /// The model of the batch that ended last.
    pub model: Option<String>,
    /// How many tasks it had.
    pub batch: Option<u32>,
}

/// A model.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ModelRow {
    /// As in the repository.
    pub name: String,
    /// As in the repository.
    pub version: String,
    /// Live backends that host it.
    pub backends: u32,
    /// GPUs of these that do.
    pub gpus: u32,
    /// Requests with an objective that come in a second, averaged over the advice's window.
    #[serde(default)]
    pub rate_rps: f64,
    /// Bytes of its weights, where GPUs' memory is short.
    #[serde(default)]
    pub weights_bytes: u64,
    /// Of these backends, those that the scheduler places models on.
    #[serde(default)]
    pub backends_placed: u32,
    /// The sub-cluster of all of those, if that is one.
    #[serde(default)]
    pub sub_cluster: Option<u16>,
}

/// Tells of the cluster, page by page.
pub struct Status {
    board: Board,
    /// What operators call the scheduler.
    name: String,
    arm: String,
    /// All schedulers, by rank.
    schedulers: Vec<String>,
    history: Option<History>,
    told: RefCell<Told>,
}

/// What GPUs ran lately.
type RanByLane = BTreeMap<Lane, Ran>;

/// What was worked out from the newest snapshot.
#[derive(Debug, Default)]
struct Told {
    snapshot: Arc<Snapshot>,
    models: Vec<ModelName>,
    hosts: Hosts,
    /// What GPUs ran until then.
    ran: Option<(Timestamp, RanByLane)>,
}

impl Status {
    /// Of the scheduler that operators call `name`, on this arm, as one of these.
    #[must_use]
    pub fn new(board: Board, name: String, arm: String, schedulers: Vec<String>) -> Self {
        Self { board, name, arm, schedulers, history: None, told: RefCell::default() }
    }

    /// And of what GPUs did.
    #[must_use]
    pub fn with_history(self, history: Option<History>) -> Self {
        Self { history, ..self }
    }

    /// The page that a query asks for (`page=N`), as JSON. `part=members` or `part=models` leaves the others out, as
    /// `match=TEXT` does with what has that neither in its name nor in its state, and `rows=N` makes pages smaller. It
    /// is told of now on the process's clock, and on the scheduler's.
    ///
    /// # Errors
    /// One line that says what was found and expected.
    pub fn page(&self, (now, era_now): (Timestamp, Timestamp), query: &str) -> Result<String, String> {
        let asked = Asked::of(query)?;
        let told = &mut *self.told.borrow_mut();
        let known = told.models.len();
        let (taken_at, snapshot) =
            self.board.newest(&mut told.models).ok_or("the scheduler has not told of itself yet; try again")?;
        if !Arc::ptr_eq(&snapshot, &told.snapshot) || known != told.models.len() {
            told.hosts = Hosts::of(&snapshot, told.models.len());
            told.snapshot = snapshot;
        }
        // Another primary's clock may be behind.
        let is_new = told.ran.as_ref().is_some_and(|(at, _)| (*at..*at + RAN_EVERY).contains(&era_now));
        if let Some(history) = self.history.as_ref().filter(|_| asked.members.is_some() && !is_new) {
            told.ran = Some((era_now, history.ran((era_now - RAN, era_now))));
        }
        let page = self.cut(told, &asked, (now - taken_at).as_millis_f64());
        let pages = page.pages;
        if page.page >= pages {
            return Err(format!("page: found {}, expected one below {pages}", page.page));
        }
        Ok(serde_json::to_string(&page).expect("its keys are names") + "\n")
    }

    fn cut(&self, told: &Told, asked: &Asked, age_ms: f64) -> ClusterPage {
        let Told { snapshot, models, hosts, ran } = told;
        let ran = ran.as_ref().map(|(_, ran)| ran);
        let frontends = asked.members(snapshot.frontends.iter(), |frontend, matches| {
            matches(&frontend.name) || matches(word(frontend.state))
        });
        let backends = asked.members(snapshot.backends.iter().zip(&hosts.only_here), |(backend, _), matches| {
            let mut gpus = backend.gpus.iter();
            matches(&backend.name) || matches(word(backend.state)) || gpus.any(|gpu| matches(word_of_gpu(gpu)))
        });
        let found = asked.models(models);
        let pages = frontends.pages.max(backends.pages).max(found.pages).max(1);
        let state = |(address, state): (&String, &SchedulerState)| SchedulerRow {
            address: address.clone(),
            state: word_of_scheduler(*state).to_owned(),
        };
        let own = snapshot.schedulers.get(usize::from(snapshot.rank));
        ClusterPage {
            page: asked.page,
            pages,
            age_ms,
            scheduler: self.name.clone(),
            arm: self.arm.clone(),
            is_primary: own == Some(&SchedulerState::Primary),
            epoch: snapshot.epoch.to_string(),
            schedulers: self.schedulers.iter().zip(&snapshot.schedulers).map(state).collect(),
            counts: counts(told),
            advice: match advice_row(&snapshot.advice, models) {
                advice if asked.is_first_of_all() => advice,
                advice => AdviceRow { sub_clusters: Vec::new(), ..advice },
            },
            frontends: frontends.rows.into_iter().map(frontend_row).collect(),
            backends: backends
                .rows
                .into_iter()
                .map(|(of, only_here)| backend_row(of, (only_here, ran), models))
                .collect(),
            models: found
                .rows
                .into_iter()
                .map(|id| {
                    let (name, version) = models[id].clone();
                    let ModelShown { rate_rps, pages } = snapshot.models.get(id).copied().unwrap_or_default();
                    ModelRow {
                        name,
                        version,
                        backends: hosts.backends[id],
                        gpus: hosts.gpus[id],
                        rate_rps,
                        weights_bytes: u64::from(pages) * PAGE_BYTES,
                        backends_placed: hosts.placed[id],
                        sub_cluster: hosts.sub_clusters[id],
                    }
                })
                .collect(),
        }
    }
}

fn counts(Told { snapshot, models, hosts, .. }: &Told) -> Counts {
    let live = || snapshot.backends.iter().filter(|backend| is_live(backend));
    let gpus_serving = live().flat_map(|backend| &backend.gpus).filter(|gpu| gpu.is_usable && gpu.is_planned).count();
    Counts {
        frontends: snapshot.frontends.len(),
        backends: snapshot.backends.len(),
        gpus: snapshot.backends.iter().map(|backend| backend.gpus.len()).sum(),
        models: models.len(),
        models_hosted: hosts.backends.iter().filter(|hosts| **hosts > 0).count(),
        frontends_serving: snapshot.frontends.iter().filter(|of| of.state == MemberState::Serving).count(),
        backends_serving: live().count(),
        gpus_serving,
    }
}

/// What a query asks for.
struct Asked {
    page: usize,
    /// Of members, and of models: rows of a page; none of those that are not asked for.
    members: Option<usize>,
    models: Option<usize>,
    matches: Box<dyn Fn(&str) -> bool>,
}

/// Those of one page, and how many pages there are.
struct Cut<T> {
    pages: usize,
    rows: Vec<T>,
}

impl<T> Cut<T> {
    fn of(all: impl Iterator<Item = T>, page: usize, size: Option<usize>) -> Self {
        let Some(size) = size else { return Self { pages: 0, rows: Vec::new() } };
        let mut count = 0;
        let from = page.saturating_mul(size);
        let is_here = |_: &T| {
            count += 1;
            (from..from.saturating_add(size)).contains(&(count - 1))
        };
        let rows = all.filter(is_here).collect();
        Self { pages: count.div_ceil(size), rows }
    }
}

impl Asked {
    /// All of the first page, if the query does not say it.
    fn of(query: &str) -> Result<Self, String> {
        let query = Query::of(query);
        let rows = query.number("rows", 1..=MODELS_PER_PAGE, MODELS_PER_PAGE)?;
        let part = PARTS[query.one_of("part", &PARTS)?];
        Ok(Self {
            page: query.number("page", 0..=usize::MAX, 0)?,
            members: (part != "models").then_some(rows.min(MEMBERS_PER_PAGE)),
            models: (part != "members").then_some(rows),
            matches: Box::new(query.part_of("match")),
        })
    }

    fn is_first_of_all(&self) -> bool {
        self.page == 0 && self.members.is_some() && self.models.is_some()
    }

    fn members<T>(&self, all: impl Iterator<Item = T>, is_meant: impl Fn(&T, &dyn Fn(&str) -> bool) -> bool) -> Cut<T> {
        Cut::of(all.filter(|member| is_meant(member, &self.matches)), self.page, self.members)
    }

    fn models(&self, names: &[ModelName]) -> Cut<usize> {
        Cut::of((0..names.len()).filter(|&id| (self.matches)(&names[id].0)), self.page, self.models)
    }
}

/// Who hosts what.
#[derive(Debug, Default)]
struct Hosts {
    /// By model: live backends that host it.
    backends: Vec<u32>,
    /// By model: usable GPUs of these.
    gpus: Vec<u32>,
    /// By model: those of these backends that are in a sub-cluster.
    placed: Vec<u32>,
    /// By model: the sub-cluster of all of those, if that is one.
    sub_clusters: Vec<Option<u16>>,
    /// By place of the backend: what it hosts and no other live backend does, and how much it hosts.
    only_here: Vec<OnlyHere>,
}

#[derive(Debug, Default)]
struct OnlyHere {
    first: Vec<ModelId>,
    count: usize,
    hosted: usize,
}

impl Hosts {
    fn of(snapshot: &Snapshot, models: usize) -> Self {
        let none = || vec![0; models];
        let (sub_clusters, only_here) = (vec![None; models], Vec::new());
        let mut hosts = Self { backends: none(), gpus: none(), placed: none(), sub_clusters, only_here };
        let (mut seen, mut usable) = (Seen::new(models), Seen::new(models));
        for backend in snapshot.backends.iter().filter(|backend| is_live(backend)) {
            seen.begin();
            for &ModelId(model) in backend.gpus.iter().filter(|gpu| gpu.is_usable).flat_map(|gpu| &*gpu.models) {
                // Names come with the snapshot that has their ids.
                let model = model as usize;
                hosts.gpus[model] += 1;
                if !seen.is_first(model) {
                    continue;
                }
                hosts.backends[model] += 1;
                if let Some(here) = backend.sub_cluster {
                    let (at, placed) = (&mut hosts.sub_clusters[model], &mut hosts.placed[model]);
                    *at = Some(here).filter(|_| *placed == 0 || *at == Some(here));
                    *placed += 1;
                }
            }
        }
        for backend in &snapshot.backends {
            usable.begin();
            let live = backend.gpus.iter().filter(|gpu| gpu.is_usable && is_live(backend));
            live.flat_map(|gpu| &*gpu.models).for_each(|model| {
                usable.is_first(model.0 as usize);
            });
            seen.begin();
            let mut only_here = OnlyHere::default();
            for &model in backend.gpus.iter().flat_map(|gpu| &*gpu.models) {
                let id = model.0 as usize;
                if !seen.is_first(id) {
                    continue;
                }
                only_here.hosted += 1;
                if hosts.backends[id] == u32::from(usable.has(id)) {
                    only_here.count += 1;
                    only_here.first.extend(Some(model).filter(|_| only_here.first.len() < ONLY_HERE_NAMED));
                }
            }
            hosts.only_here.push(only_here);
        }
        hosts
    }
}

/// Models of one backend after another.
struct Seen {
    /// By model: in which round it was seen last.
    last: Vec<u32>,
    round: u32,
}

impl Seen {
    fn new(models: usize) -> Self {
        Self { last: vec![0; models], round: 0 }
    }

    /// The next backend's.
    fn begin(&mut self) {
        self.round += 1;
    }

    fn is_first(&mut self, model: usize) -> bool {
        std::mem::replace(&mut self.last[model], self.round) != self.round
    }

    fn has(&self, model: usize) -> bool {
        self.last[model] == self.round
    }
}

/// Whether plans go there, or would if this scheduler were the primary.
fn is_live(backend: &BackendShown) -> bool {
    backend.state == MemberState::Serving
}

fn frontend_row(frontend: &FrontendShown) -> FrontendRow {
    let FrontendShown { id, name, at, state, obeys } = frontend;
    FrontendRow {
        name: name.clone(),
        id: *id,
        state: word(*state).to_owned(),
        obeys: *obeys,
        address: at.map(|at| at.address.to_string()),
        path: at.and_then(|at| at.path).map(|path| path.to_string()),
    }
}

fn backend_row(
    backend: &BackendShown,
    (only_here, ran): (&OnlyHere, Option<&RanByLane>),
    models: &[ModelName],
) -> BackendRow {
    let BackendShown { id, name, at, state, obeys, links, sub_cluster, weights, gpus } = backend;
    let bytes = |pages: u64| pages.saturating_mul(PAGE_BYTES);
    BackendRow {
        name: name.clone(),
        id: *id,
        state: word(*state).to_owned(),
        obeys: *obeys,
        address: at.map(|at| at.address.to_string()),
        path: at.and_then(|at| at.path).map(|path| path.to_string()),
        links: *links,
        sub_cluster: *sub_cluster,
        gpus: (0..).zip(gpus).map(|(index, gpu)| gpu_row((*id, index), gpu, (ran, models))).collect(),
        models: only_here.hosted,
        safe_to_remove: only_here.count == 0,
        only_here: only_here.count,
        only_here_first: only_here.first.iter().map(|model| models[model.0 as usize].0.clone()).collect(),
        weights: WeightsRow {
            gpu_bytes: bytes(weights.pages),
            gpu_bytes_used: bytes(weights.pages_used),
            host_bytes: bytes(weights.host_pages),
            host_bytes_used: bytes(weights.host_pages_used),
            loads: weights.loads,
            failed: weights.failed,
        },
    }
}

fn gpu_row((backend, index): (u32, u32), gpu: &GpuShown, (ran, names): (Option<&RanByLane>, &[ModelName])) -> GpuRow {
    let weights_bytes = gpu.pages.map(|pages| u64::from(pages) * PAGE_BYTES);
    let ran = ran.map(|ran| {
        let lane = Lane { backend: BackendId(backend), gpu: index };
        let Ran { busy, last } = ran.get(&lane).copied().unwrap_or_default();
        let model = last.and_then(|(_, model, _)| names.get(model.0 as usize)).map(|(name, _)| name.clone());
        RanRow { busy: busy.as_secs_f64() / RAN.as_secs_f64(), model, batch: last.map(|(_, _, tasks)| tasks) }
    });
    let (state, models) = (word_of_gpu(gpu).to_owned(), gpu.models.len());
    GpuRow { index: index as usize, id: gpu.id.0, state, models, weights_bytes, ran }
}

fn word_of_gpu(gpu: &GpuShown) -> &'static str {
    match (gpu.is_usable, gpu.is_planned) {
        (false, _) => "unusable",
        (true, false) => "idle",
        (true, true) => "serving",
    }
}

fn advice_row(advice: &Advice, models: &[ModelName]) -> AdviceRow {
    let sub_clusters = advice.sub_clusters.iter().map(|sub| {
        let (models, models_first) = names(&sub.models, models);
        SubClusterRow {
            models,
            models_first,
            gpus: sub.gpus,
            gpus_needed: sub.needed,
            reason: sub.to_string(),
            bad: sub.lost_part,
            work_gpus: sub.work,
        }
    });
    let idle = advice.idle_part();
    AdviceRow {
        gpus: advice.gpus,
        gpus_needed: advice.needed,
        reason: advice.reason(),
        busy: if advice.gpus == 0 { 0.0 } else { 1.0 - idle },
        idle,
        bad: advice.lost_part,
        work_gpus: advice.work,
        tasks_in_time: advice.in_time,
        tasks_lost: advice.lost,
        sub_clusters: sub_clusters.collect(),
    }
}

/// How many names what a sub-cluster hosts has, and the first of them in their order.
fn names(hosted: &[ModelId], models: &[ModelName]) -> (usize, Vec<String>) {
    let names: BTreeSet<&String> = hosted.iter().filter_map(|id| Some(&models.get(id.0 as usize)?.0)).collect();
    (names.len(), names.into_iter().take(NAMED).cloned().collect())
}

fn word(state: MemberState) -> &'static str {
    match state {
        MemberState::Joining => "joining",
        MemberState::Unlinked => "unlinked",
        MemberState::Serving => "serving",
        MemberState::Drained => "drained",
        MemberState::Leaving => "leaving",
    }
}

fn word_of_scheduler(state: SchedulerState) -> &'static str {
    match state {
        SchedulerState::Primary => "primary",
        SchedulerState::Standby => "standby",
        SchedulerState::Starting => "starting",
        SchedulerState::Unreachable => "unreachable",
    }
}

#[cfg(test)]
mod tests;
