//! What `top` knows, and what its user has chosen. No IO and no clock: what was told comes in with `now`.
//!
//! What a member told last stays until it tells something else, so a scheduler that has stopped is shown as it was,
//! with its age. Rows are put together and sorted when something is told or an order chosen; a frame looks at those
//! that it shows, whatever the size of the cluster.

use std::{cmp::Ordering, collections::BTreeMap};

use proto::{Span, Timestamp};
use scheduler::status::{BackendRow, ClusterPage, FrontendRow, GpuRow, SchedulerRow};

use super::traffic::{Rates, TrafficPage, together};

/// Whoever has not told anything for so long counts only if nobody has.
const FRESH: Span = Span::from_millis(5_000);

/// What a member answered, or why it did not, in one line: of a scheduler, or a frontend, by its place in the list.
#[derive(Debug)]
pub(super) enum News {
    Cluster(usize, Result<Box<ClusterPage>, String>),
    Traffic(usize, Result<TrafficPage, String>),
}

/// What the user wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Quit,
    NextView,
    PreviousView,
    NextOrder,
    PreviousOrder,
    /// By so many rows.
    Scroll(isize),
    /// By as many as are shown.
    PageUp,
    PageDown,
}

/// What is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum View {
    Gpus,
    Models,
    Members,
}

impl View {
    pub(super) const ALL: [Self; 3] = [Self::Gpus, Self::Models, Self::Members];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gpus => "GPUs",
            Self::Models => "models",
            Self::Members => "members",
        }
    }

    /// By what its rows can be sorted.
    pub(super) fn orders(self) -> &'static [&'static str] {
        match self {
            Self::Gpus => &["name", "busy"],
            Self::Models => &["rate", "missed", "p99", "name"],
            Self::Members => &["role"],
        }
    }
}

/// A member that is asked.
#[derive(Debug)]
struct Source<T> {
    address: String,
    /// When it told something last, and what.
    told: Option<(Timestamp, T)>,
    /// Why it has not told anything since.
    wrong: Option<String>,
}

impl<T> Source<T> {
    fn all(addresses: &[String]) -> Vec<Self> {
        addresses.iter().map(|address| Self { address: address.clone(), told: None, wrong: None }).collect()
    }

    fn handle(&mut self, now: Timestamp, news: Result<T, String>) {
        match news {
            Ok(told) => (self.told, self.wrong) = (Some((now, told)), None),
            Err(wrong) => self.wrong = Some(wrong),
        }
    }

    fn is_fresh(&self, now: Timestamp) -> bool {
        self.told.as_ref().is_some_and(|(at, _)| now - *at < FRESH)
    }

    /// If it does not answer: where it is, why, and how long ago it did.
    fn silent(&self, now: Timestamp) -> Option<Silent<'_>> {
        let wrong = self.wrong.as_deref()?;
        Some((&self.address, wrong, self.told.as_ref().map(|(at, _)| now - *at)))
    }
}

/// A member that does not answer.
pub(super) type Silent<'a> = (&'a str, &'a str, Option<Span>);

/// All of it.
#[derive(Debug)]
pub(super) struct State {
    schedulers: Vec<Source<ClusterPage>>,
    frontends: Vec<Source<TrafficPage>>,
    /// The scheduler whose page is shown.
    chosen: Option<usize>,
    /// Its GPUs as they are sorted: by place of their backend, and at it.
    gpus: Vec<(usize, usize)>,
    /// As they are sorted.
    models: Vec<Model>,
    /// Of all models; `None` if no frontend has told rates.
    total: Option<Rates>,
    /// The place of what is shown in [`View::ALL`],
    view: usize,
    /// of each of them, by which of its orders rows are sorted,
    orders: [usize; 3],
    /// and how many rows are above the first that is shown.
    scrolled: [usize; 3],
    /// How many rows fit.
    fit: usize,
}

/// A model that the scheduler or a frontend knows.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Model {
    pub(super) name: String,
    pub(super) version: String,
    /// That host it, if the scheduler knows it.
    pub(super) gpus: Option<u32>,
    pub(super) objective_ms: Option<f64>,
    /// If a frontend told any.
    pub(super) rates: Option<Rates>,
}

/// A GPU and its backend.
pub(super) type Lane<'a> = (&'a BackendRow, &'a GpuRow);

/// Whoever is in the cluster.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Member<'a> {
    Scheduler(&'a SchedulerRow),
    Frontend(&'a FrontendRow),
    Backend(&'a BackendRow),
}

impl State {
    /// Nothing is known yet of members at these addresses.
    pub(super) fn new(schedulers: &[String], frontends: &[String]) -> Self {
        Self {
            schedulers: Source::all(schedulers),
            frontends: Source::all(frontends),
            chosen: None,
            gpus: Vec::new(),
            models: Vec::new(),
            total: None,
            view: 0,
            orders: [0; 3],
            scrolled: [0; 3],
            fit: 0,
        }
    }

    /// A member has answered, or has not.
    pub(super) fn handle_news(&mut self, now: Timestamp, news: News) {
        match news {
            News::Cluster(index, news) => {
                self.schedulers[index].handle(now, news.map(|page| *page));
                self.chosen = self.choose();
                let backends = self.page().into_iter().flat_map(|page| page.backends.iter().enumerate());
                self.gpus =
                    backends.flat_map(|(place, of)| (0..of.gpus.len()).map(move |index| (place, index))).collect();
                self.sort_gpus();
            }
            News::Traffic(index, news) => self.frontends[index].handle(now, news),
        }
        let (total, models) = self.traffic(now);
        (self.total, self.models) = (total, models);
        self.sort_models();
        self.scroll(0);
    }

    /// So many rows fit into the terminal from now on.
    pub(super) fn handle_size(&mut self, fit: usize) {
        self.fit = fit;
        self.scroll(0);
    }

    /// A key was pressed; true if that is the end.
    pub(super) fn handle_key(&mut self, key: Key) -> bool {
        let turn = |place: usize, of: usize, forwards: bool| (place + if forwards { 1 } else { of - 1 }) % of;
        let page = isize::try_from(self.fit).unwrap_or(isize::MAX);
        match key {
            Key::Quit => return true,
            Key::NextView | Key::PreviousView => {
                self.view = turn(self.view, View::ALL.len(), key == Key::NextView);
                self.scroll(0);
            }
            Key::NextOrder | Key::PreviousOrder => {
                let orders = self.view().orders().len();
                self.orders[self.view] = turn(self.orders[self.view], orders, key == Key::NextOrder);
                match self.view() {
                    View::Gpus => self.sort_gpus(),
                    View::Models => self.sort_models(),
                    View::Members => {}
                }
            }
            Key::Scroll(by) => self.scroll(by),
            Key::PageUp => self.scroll(-page),
            Key::PageDown => self.scroll(page),
        }
        false
    }

    /// No further than the last row: a key that scrolls back is seen at once.
    fn scroll(&mut self, by: isize) {
        let last = self.rows().saturating_sub(self.fit);
        self.scrolled[self.view] = self.scrolled[self.view].min(last).saturating_add_signed(by).min(last);
    }

    pub(super) fn view(&self) -> View {
        View::ALL[self.view]
    }

    /// By what rows are sorted.
    pub(super) fn order(&self) -> &'static str {
        self.order_of(self.view())
    }

    fn order_of(&self, view: View) -> &'static str {
        view.orders()[self.orders[view as usize]]
    }

    /// Rows above the first that is shown.
    pub(super) fn scrolled(&self) -> usize {
        self.scrolled[self.view]
    }

    /// How many rows the view has.
    pub(super) fn rows(&self) -> usize {
        match self.view() {
            View::Gpus => self.gpus.len(),
            View::Models => self.models.len(),
            View::Members => self.page().map_or(0, |page| {
                let ClusterPage { schedulers, frontends, backends, .. } = page;
                schedulers.len() + frontends.len() + backends.len()
            }),
        }
    }

    /// That of the primary, unless it has told nothing for a while in which another one has.
    fn choose(&self) -> Option<usize> {
        let told =
            self.schedulers.iter().enumerate().filter_map(|(index, source)| Some((index, source.told.as_ref()?)));
        let newest = told.clone().map(|(_, (at, _))| *at).max()?;
        let best = told.max_by_key(|(_, (at, page))| (newest - *at < FRESH, page.is_primary, *at));
        best.map(|(index, _)| index)
    }

    fn told(&self) -> Option<&(Timestamp, ClusterPage)> {
        self.schedulers[self.chosen?].told.as_ref()
    }

    fn page(&self) -> Option<&ClusterPage> {
        self.told().map(|(_, page)| page)
    }

    /// The cluster as it was told last, and how long ago it was so.
    pub(super) fn cluster(&self, now: Timestamp) -> Option<(Span, &ClusterPage)> {
        let (at, page) = self.told()?;
        let age_ms = if page.age_ms.is_finite() { page.age_ms } else { 0.0 };
        Some((now - *at + Span::from_millis_f64(age_ms), page))
    }

    /// Members that do not answer.
    pub(super) fn silent(&self, now: Timestamp) -> Vec<Silent<'_>> {
        let schedulers = self.schedulers.iter().filter_map(|source| source.silent(now));
        schedulers.chain(self.frontends.iter().filter_map(|source| source.silent(now))).collect()
    }

    /// The row of a GPU, as they are sorted.
    pub(super) fn lane(&self, row: usize) -> Option<Lane<'_>> {
        let &(place, index) = self.gpus.get(row)?;
        let backend = self.page()?.backends.get(place)?;
        Some((backend, backend.gpus.get(index)?))
    }

    /// The row of a model, as they are sorted.
    pub(super) fn model(&self, row: usize) -> Option<&Model> {
        self.models.get(row)
    }

    /// The row of a member: schedulers, then frontends, then backends.
    pub(super) fn member(&self, row: usize) -> Option<Member<'_>> {
        let ClusterPage { schedulers, frontends, backends, .. } = self.page()?;
        let after = |count: usize| row.checked_sub(count);
        let frontend = || frontends.get(after(schedulers.len())?).map(Member::Frontend);
        let backend = || backends.get(after(schedulers.len() + frontends.len())?).map(Member::Backend);
        schedulers.get(row).map(Member::Scheduler).or_else(frontend).or_else(backend)
    }

    /// Of all models; `None` if no frontend has told rates.
    pub(super) fn total(&self) -> Option<&Rates> {
        self.total.as_ref()
    }

    /// What frontends told of their traffic last, those that have told something lately, or else all; and all models.
    fn traffic(&self, now: Timestamp) -> (Option<Rates>, Vec<Model>) {
        let is_any_fresh = self.frontends.iter().any(|source| source.is_fresh(now));
        let counts = |source: &&Source<TrafficPage>| source.is_fresh(now) || !is_any_fresh;
        let told = self.frontends.iter().filter(counts).filter_map(|source| source.told.as_ref().map(|(_, page)| page));
        let has_rates = told.clone().any(|page| page.window_ms > 0);
        let (all, rows) = together(told);
        let mut models = BTreeMap::<(String, String), Model>::new();
        for row in self.page().into_iter().flat_map(|page| &page.models) {
            let (name, version) = (row.name.clone(), row.version.clone());
            let model =
                Model { name: name.clone(), version: version.clone(), gpus: Some(row.gpus), ..Model::default() };
            models.insert((name, version), model);
        }
        for row in rows {
            let key = (row.name.clone(), row.version.clone());
            let model = models.entry(key).or_default();
            (model.name, model.version) = (row.name, row.version);
            (model.objective_ms, model.rates) = (row.objective_ms, Some(row.rates).filter(|_| has_rates));
        }
        (has_rates.then_some(all), models.into_values().collect())
    }

    fn sort_gpus(&mut self) {
        let mut gpus = std::mem::take(&mut self.gpus);
        let backends = self.page().map_or(&[][..], |page| &page.backends);
        let busy = |&(place, index): &(usize, usize)| backends[place].gpus[index].ran.as_ref().map(|ran| ran.busy);
        gpus.sort_by(|one, other| {
            let by_busy =
                if self.order_of(View::Gpus) == "busy" { downwards(busy(one), busy(other)) } else { Ordering::Equal };
            by_busy.then_with(|| backends[one.0].name.cmp(&backends[other.0].name)).then_with(|| one.cmp(other))
        });
        self.gpus = gpus;
    }

    fn sort_models(&mut self) {
        let order = self.order_of(View::Models);
        let value = |model: &Model| {
            let rates = model.rates.as_ref()?;
            match order {
                "rate" => Some(rates.requests),
                "missed" => Some(rates.missed),
                "p99" => rates.p99_ms,
                _ => None,
            }
        };
        self.models.sort_by(|one, other| {
            let names = || (&one.name, &one.version).cmp(&(&other.name, &other.version));
            downwards(value(one), value(other)).then_with(names)
        });
    }
}

/// The larger one first, and what is not known last.
fn downwards(one: Option<f64>, other: Option<f64>) -> Ordering {
    let known = |value: Option<f64>| value.filter(|value| value.is_finite()).unwrap_or(f64::NEG_INFINITY);
    known(other).total_cmp(&known(one))
}
