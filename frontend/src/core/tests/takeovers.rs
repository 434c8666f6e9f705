//! Takeovers by a seed: schedulers are lost, claim in turn, come back as what they were or as another era's, while
//! tasks wait, run, are answered, dropped and fenced. What a task is and where it runs outlives primaries, as backends
//! tell the next one. A failing seed is in the assertion's text.

use super::{
    takeover::{Bench, Done, STANDBY, claim},
    *,
};

const STEPS: usize = 600;

/// Where a task is, whoever is the primary.
#[derive(Debug, Clone, Copy, PartialEq)]
enum At {
    Queued,
    Running(ConnectionId),
    /// It ran at a link that is down; nobody has asked about it yet.
    Lost,
}

struct Rumble {
    seed: u64,
    rng: ChaCha8Rng,
    bench: Bench,
    threads: u16,
    links: BTreeMap<ConnectionId, (BackendId, LinkId)>,
    next_link: u32,
    tasks: BTreeMap<TaskId, (SlotDescriptor, u16, At)>,
    /// What the present primary was told of, and whether it was told that this is all.
    known: BTreeSet<TaskId>,
    all_open: u16,
    primary: Option<usize>,
    /// In this life.
    obeyed: Epoch,
    cut: BTreeSet<ConnectionId>,
    /// The last epoch that anybody claimed.
    number: u32,
    requests: BTreeSet<RequestId>,
    later: Vec<RequestId>,
    takeovers: usize,
    restarts: usize,
    answered: usize,
}

impl Rumble {
    fn new(seed: u64) -> Self {
        let mut rumble = Self {
            seed,
            rng: ChaCha8Rng::seed_from_u64(seed),
            bench: Bench::new(2 + (seed % 2) as usize),
            threads: (seed % 3) as u16,
            links: BTreeMap::new(),
            next_link: 0,
            tasks: BTreeMap::new(),
            known: BTreeSet::new(),
            all_open: 0,
            primary: None,
            obeyed: Epoch::NONE,
            cut: BTreeSet::new(),
            number: 0,
            requests: BTreeSet::new(),
            later: Vec::new(),
            takeovers: 0,
            restarts: 0,
            answered: 0,
        };
        rumble.look();
        rumble
    }

    fn pick<T: Copy>(&mut self, from: impl IntoIterator<Item = T>) -> Option<T> {
        let all: Vec<T> = from.into_iter().collect();
        (!all.is_empty()).then(|| all[self.rng.random_range(0..all.len())])
    }

    /// What a primary takes in over any of its connections.
    fn owner(&self, connection: ConnectionId) -> Option<usize> {
        let dialled = self.bench.dialled.iter().zip(&self.bench.lines);
        dialled.enumerate().find_map(|(index, (dialled, lines))| {
            let is_it = dialled.as_ref().is_some_and(|(control, _)| *control == connection);
            (is_it || lines.contains(&connection)).then_some(index)
        })
    }

    /// Takes in what the frontend did.
    fn look(&mut self) {
        let seed = self.seed;
        for done in std::mem::take(&mut self.bench.done) {
            match done {
                Done::Cut(connection) => {
                    self.cut.insert(connection);
                    self.link_ends(connection);
                    if self.primary.is_some() && self.primary == self.owner(connection) {
                        self.primary = None;
                    }
                }
                Done::Said(connection, message) => {
                    assert!(!self.cut.contains(&connection), "seed {seed}: {message:?} to who was cut off");
                    if let Some(index) = self.owner(connection) {
                        self.hear(index, message);
                    }
                }
            }
        }
        for (request, result) in std::mem::take(&mut self.bench.replies) {
            assert!(
                self.requests.remove(&request),
                "seed {seed}: {request:?} ended twice, or was cancelled: {result:?}"
            );
            self.answered += usize::from(result.is_ok());
        }
        if !self.bench.core.obeys().is_primary() && self.obeyed != Epoch::NONE {
            assert!(self.requests.is_empty(), "seed {seed}: {:?} are nobody's", self.requests);
            assert_eq!(self.bench.core.outstanding(), 0, "seed {seed}");
            (self.tasks, self.known, self.obeyed) = Default::default();
            self.restarts += 1;
        }
    }

    fn hear(&mut self, index: usize, message: FrontendToScheduler) {
        let seed = self.seed;
        let is_primary = self.primary == Some(index);
        match message {
            Addressed::Control(FrontendToControl::Obeys { epoch }) => {
                assert_eq!(self.primary, None, "seed {seed}: two are obeyed");
                assert!(epoch > self.obeyed, "seed {seed}: {epoch} after {}", self.obeyed);
                (self.primary, self.obeyed, self.all_open) = (Some(index), epoch, 0);
                self.known.clear();
                self.takeovers += 1;
            }
            Addressed::ModelThread(FrontendToModelThread::Open { task, attempt, slot, .. }) => {
                assert!(is_primary && self.all_open <= self.threads, "seed {seed}: {task:?} is named late");
                assert!(self.known.insert(task), "seed {seed}: {task:?} is named twice");
                let known = *self.tasks.entry(task).or_insert((slot, 0, At::Queued));
                assert_eq!((known.0, known.1), (slot, attempt), "seed {seed}: {task:?} is another one");
            }
            Addressed::ModelThread(FrontendToModelThread::AllOpen) => {
                self.all_open += 1;
                if self.all_open == self.threads.max(1) {
                    let all: BTreeSet<TaskId> = self.tasks.keys().copied().collect();
                    assert_eq!(self.known, all, "seed {seed}: not all that are open were named");
                }
            }
            Addressed::ModelThread(FrontendToModelThread::Submit { task, slot, .. }) => {
                assert!(is_primary && self.known.insert(task), "seed {seed}: {task:?} was named before");
                self.check_slot(task, slot);
                assert!(self.tasks.insert(task, (slot, 0, At::Queued)).is_none(), "seed {seed}: {task:?}");
            }
            Addressed::ModelThread(FrontendToModelThread::Cancel { task, .. }) => {
                assert!(is_primary && self.known.contains(&task), "seed {seed}: {task:?} was never named");
            }
            Addressed::ModelThread(FrontendToModelThread::Fenced { unanswered, .. }) => {
                for task in unanswered {
                    let (_, attempt, at) = self.tasks.get_mut(&task).expect("it has not ended");
                    (*attempt, *at) = (*attempt + 1, At::Queued);
                }
            }
            Addressed::Control(FrontendToControl::Link { backend, link }) => {
                assert!(self.links.values().any(|known| *known == (backend, link)), "seed {seed}: {backend:?}");
            }
            Addressed::Control(FrontendToControl::ClockRequest { .. })
            | Addressed::Control(FrontendToControl::Misses { .. }) => {}
            Addressed::Control(FrontendToControl::PageRead | FrontendToControl::Drained { .. }) => {
                panic!("nobody is sent pages, or drained, here")
            }
            Addressed::Control(FrontendToControl::Refuses { .. }) => panic!("nobody breaks its word here"),
            Addressed::Control(FrontendToControl::ChangeModel { .. }) => panic!("nobody changes models here"),
        }
    }

    /// Invariant 3: what can still be READ or written is leased to nobody else.
    fn check_slot(&self, task: TaskId, slot: SlotDescriptor) {
        let end = |slot: &SlotDescriptor| slot.answer_offset + u64::from(slot.answer_bytes_max);
        for (other, (taken, _, at)) in &self.tasks {
            let apart = end(&slot) <= taken.input_offset || end(taken) <= slot.input_offset;
            assert!(apart || !matches!(at, At::Running(_)), "seed {}: {task:?} has {other:?}'s slot", self.seed);
        }
    }

    fn link_ends(&mut self, connection: ConnectionId) {
        self.links.remove(&connection);
        for (_, _, at) in self.tasks.values_mut().filter(|(_, _, at)| *at == At::Running(connection)) {
            *at = At::Lost;
        }
    }

    fn request(&mut self) {
        let comes_later = self.rng.random_range(0..3) == 0;
        if let Ok(request) = self.bench.request(comes_later) {
            self.requests.insert(request);
            self.later.extend(comes_later.then_some(request));
        }
    }

    /// The primary plans, drops, or asks.
    fn order(&mut self) {
        let Some(primary) = self.primary else { return };
        let known: Vec<TaskId> = self.known.iter().copied().filter(|task| self.tasks.contains_key(task)).collect();
        let Some(task) = self.pick(known) else { return };
        let (slot, _, at) = self.tasks[&task];
        match at {
            At::Queued if self.rng.random_range(0..3) == 0 => {
                let is_late = slot.is_guarded() && self.rng.random();
                let reason = if is_late { DropReason::InputLate } else { DropReason::Deadline };
                self.tasks.remove(&task);
                self.bench.tell(primary, &SchedulerToFrontend::Dropped { task, reason });
            }
            At::Queued => {
                let links: Vec<ConnectionId> = self.links.keys().copied().collect();
                if let Some(link) = self.pick(links) {
                    self.tasks.get_mut(&task).expect("it was found").2 = At::Running(link);
                }
            }
            At::Running(link) if self.rng.random_range(0..8) == 0 => {
                let (backend, link) = self.links[&link];
                self.bench.tell(primary, &SchedulerToFrontend::Fence { backend, link, tasks: vec![task] });
            }
            At::Running(_) => {}
            At::Lost => {
                let (backend, link) = (BackendId::NOBODY, LinkId::ALL);
                self.bench.tell(primary, &SchedulerToFrontend::Fence { backend, link, tasks: vec![task] });
            }
        }
    }

    /// A backend answers; it knows nothing of primaries.
    fn answer(&mut self) {
        let running: Vec<TaskId> =
            self.tasks.iter().filter(|(_, (_, _, at))| matches!(at, At::Running(_))).map(|(task, _)| *task).collect();
        let Some(task) = self.pick(running) else { return };
        let (slot, attempt, At::Running(link)) = self.tasks[&task] else { return };
        self.bench.answer(link, task, attempt + 1, slot);
        self.tasks.remove(&task);
        self.bench.answer(link, task, attempt, slot);
    }

    fn link(&mut self) {
        if self.links.len() < 4 && self.bench.core.frontend().is_some() {
            self.next_link += 1;
            let (backend, link) = (BackendId(self.next_link), LinkId(1));
            let refused = self.bench.refused.len();
            let connection = self.bench.link(backend.0, link.0, self.bench.core.obeys().epoch);
            if self.bench.refused.len() == refused && self.bench.core.links.contains_key(&connection) {
                self.links.insert(connection, (backend, link));
            }
        }
    }

    fn lose_link(&mut self) {
        let links: Vec<ConnectionId> = self.links.keys().copied().collect();
        if let Some(link) = self.pick(links) {
            self.link_ends(link);
            self.bench.down(link);
        }
    }

    /// A scheduler accepts whoever waits: as a standby, or as something worse.
    fn accept(&mut self) {
        let waiting: Vec<usize> =
            (0..self.bench.dialled.len()).filter(|&index| self.bench.core.membership[index].is_connecting()).collect();
        let Some(index) = self.pick(waiting) else { return };
        let Claim { era, epoch } = match self.rng.random_range(0..30) {
            0 => claim(self.number, self.bench.core.obeys().epoch.scheduler),
            1 => Claim { era: Era(self.rng.random()), epoch: Epoch::NONE },
            2..5 => claim(self.number.saturating_sub(1), index as u16),
            _ => STANDBY,
        };
        self.bench.welcome(index, era, epoch, self.threads);
        self.bench.clock(index, OFFSET);
        self.bench.offer(index, ModelId(self.rng.random_range(0..9)), self.threads.saturating_sub(1), 0);
    }

    fn claim(&mut self) {
        let joined = (0..self.bench.dialled.len())
            .filter(|&index| Some(index) != self.primary && self.bench.core.membership[index].has_joined());
        let joined: Vec<usize> = joined.collect();
        if let Some(index) = self.pick(joined) {
            self.number += 1;
            self.bench.take_over(index, claim(self.number, index as u16).epoch);
        }
    }

    fn lose(&mut self) {
        let index = self.rng.random_range(0..self.bench.dialled.len());
        let Some((control, _)) = self.bench.dialled[index] else { return };
        let connections: Vec<ConnectionId> = self.bench.lines[index].iter().copied().chain([control]).collect();
        let Some(connection) = self.pick(connections) else { return };
        if self.bench.core.membership.session_of(connection) == Some(index) {
            if self.primary == Some(index) {
                self.primary = None;
            }
            self.cut.insert(connection);
            self.bench.down(connection);
        }
    }

    fn step(&mut self) {
        match self.rng.random_range(0..60) {
            0..14 => self.request(),
            14..30 => self.order(),
            30..40 => self.answer(),
            40..45 => self.accept(),
            45..47 => self.claim(),
            47 => self.lose(),
            48..50 => self.link(),
            50 => self.lose_link(),
            51 => {
                let open: Vec<RequestId> = self.requests.iter().copied().collect();
                if let Some(request) = self.pick(open) {
                    self.requests.remove(&request);
                    self.bench.cancel(request);
                }
            }
            52..54 => {
                if !self.later.is_empty() {
                    let index = self.rng.random_range(0..self.later.len());
                    let request = self.later.swap_remove(index);
                    self.bench.inputs(request);
                }
            }
            54 => {
                let index = self.rng.random_range(0..self.bench.dialled.len());
                if self.bench.core.membership[index].is_welcomed() {
                    self.bench.tell(index, &SchedulerToFrontend::AskPrimary);
                }
            }
            _ => {
                let most = if self.rng.random_range(0..20) == 0 { 400_000_000 } else { 4_000_000 };
                let span = Span(self.rng.random_range(0..most));
                self.bench.pass(span);
            }
        }
        self.look();
    }

    /// No faults any more: everything comes to its end.
    fn end(&mut self) {
        for _ in 0..400 {
            self.accept();
            self.look();
            if self.primary.is_none() {
                self.claim();
                self.look();
            }
            self.order();
            self.look();
            self.answer();
            self.look();
            for request in std::mem::take(&mut self.later) {
                self.bench.inputs(request);
            }
            self.look();
            self.bench.pass(Span::from_millis(20));
            self.look();
        }
    }
}

#[test]
fn whoever_is_obeyed_knows_all_open_tasks_and_each_request_ends_once() {
    let (mut takeovers, mut restarts, mut answered) = (0, 0, 0);
    for seed in 0..1_000 {
        let mut rumble = Rumble::new(seed);
        (0..STEPS).for_each(|_| rumble.step());
        rumble.end();
        assert!(rumble.requests.is_empty(), "seed {seed}: {:?} never ended", rumble.requests);
        assert_eq!(rumble.bench.core.outstanding(), 0, "seed {seed}: {:?}", rumble.tasks);
        takeovers += rumble.takeovers;
        restarts += rumble.restarts;
        answered += rumble.answered;
    }
    assert!(takeovers > 4_000 && restarts > 80 && answered > 40_000, "{takeovers} {restarts} {answered}");
}
