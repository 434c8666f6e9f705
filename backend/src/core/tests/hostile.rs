//! Schedulers and frontends that have proved themselves and then say whatever they like, by a seed; where there are
//! several schedulers, they claim to be the primary in turn. Nothing panics (sums are checked in tests), nothing grows
//! without bound, and every transfer stays within the staging memory.

use std::collections::{BTreeMap, BTreeSet};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use proto::{
    GpuId,
    slot::{GUARD_BYTES, GUARD_EMPTY, guard_word},
};

const STEPS: usize = 400;
const FRONTENDS: u32 = 3;
const MODEL_THREADS: usize = 2;

struct Attack {
    rng: ChaCha8Rng,
    core: Core,
    staging: Staging,
    now: Timestamp,
    next_connection: u64,
    dialled: Vec<(Peer, ConnectionId)>,
    up: Vec<(Peer, ConnectionId)>,
    reads: Vec<(ConnectionId, u64)>,
    /// The first task of each READ of guards.
    guarded: BTreeMap<u64, TaskId>,
    writes: Vec<(ConnectionId, u64)>,
    /// The GPUs that have batches, once for each.
    executing: Vec<usize>,
    /// GPUs to whose memory weights are on their way, and what is there.
    copying: BTreeMap<usize, ModelId>,
    weights: BTreeSet<(usize, ModelId)>,
    has_memory: bool,
    measures: Vec<ModelId>,
    loads: Vec<LoadId>,
    executed: u64,
    /// Batches that were given to a GPU that had one.
    behind: usize,
    /// Of these, what was asked back and was given back, and what had begun.
    given_back: usize,
    refused: usize,
    /// A trial waits.
    tries: bool,
    guards: usize,
    schedulers: u16,
    /// The highest that a scheduler was made to claim by purpose.
    epoch: u32,
    /// How often another primary was obeyed, and what it was told of.
    obeyed: usize,
    inherited: usize,
}

impl Attack {
    fn new(seed: u64) -> Self {
        let has_memory = seed.is_multiple_of(3);
        let weights = Weights::new(if has_memory { 6 } else { 0 }, Span::from_millis(1));
        let models = [loaded("m", 8), loaded("n", 5)].map(|model| Arc::new(Loaded { weights, ..model })).to_vec();
        let staging = Staging::new(2, &models.iter().map(|model| model.shape).collect::<Vec<_>>(), 0);
        let count = 1 + (seed % 3) as u16;
        let schedulers = (1..=count).map(|port| ([127, 0, 0, 1], port).into()).collect();
        let memory_pages = has_memory.then_some(10);
        let host_pages = memory_pages.and_then(|_| seed.is_multiple_of(2).then_some(12));
        let landings = BTreeMap::from([(0, 9)]);
        let name = "backend".to_owned();
        let is_auto = false;
        let config =
            CoreConfig { name, schedulers, token: 6, staging, lkey: 7, landings, memory_pages, host_pages, is_auto };
        let mut attack = Self {
            rng: ChaCha8Rng::seed_from_u64(seed),
            core: Core::new(config, models),
            staging,
            now: Timestamp(1_000_000_000),
            next_connection: 1,
            dialled: Vec::new(),
            up: Vec::new(),
            reads: Vec::new(),
            guarded: BTreeMap::new(),
            guards: 0,
            writes: Vec::new(),
            executing: Vec::new(),
            copying: BTreeMap::new(),
            weights: BTreeSet::new(),
            has_memory,
            loads: Vec::new(),
            measures: Vec::new(),
            executed: 0,
            behind: 0,
            given_back: 0,
            refused: 0,
            tries: false,
            schedulers: count,
            epoch: 1,
            obeyed: 0,
            inherited: 0,
        };
        // They begin well, mostly: then they get further.
        attack.outputs();
        if !seed.is_multiple_of(4) {
            attack.answer_dialled(true);
            attack.tell_time();
            attack.outputs();
            (1..count).for_each(|_| attack.answer_dialled(true));
            for frontend in (0..FRONTENDS).map(FrontendId) {
                let link_address = "127.0.0.1:2".to_owned();
                let joined = SchedulerToBackend::FrontendJoined { frontend, link_address, pass: PASS };
                attack.tell(&joined);
                attack.outputs();
                attack.answer_dialled(true);
            }
        }
        attack
    }

    fn tell(&mut self, message: &SchedulerToBackend) {
        if let Some(&(_, connection)) = self.up.iter().find(|(peer, _)| matches!(peer, Peer::Scheduler(_))) {
            self.core.handle_event(self.now, Event::Message { connection, frame: encode(message) });
        }
    }

    fn tell_time(&mut self) {
        let (sent_at, received_at) = (self.now, self.now + Span(5));
        self.tell(&SchedulerToBackend::Clock(ClockReply { sent_at, received_at, replied_at: received_at }));
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        (!from.is_empty()).then(|| from[self.rng.random_range(0..from.len())])
    }

    fn number(&mut self, sensible: u64) -> u64 {
        match self.rng.random_range(0..12) {
            0 => u64::MAX - self.rng.random_range(0..3),
            1 => self.rng.random(),
            2 => 1 << self.rng.random_range(0..64),
            _ => self.rng.random_range(0..=sensible),
        }
    }

    fn instant(&mut self) -> Timestamp {
        match self.rng.random_range(0..10) {
            0 => Timestamp::NEVER,
            1 => Timestamp::PAST,
            2 => Timestamp(self.rng.random()),
            _ => self.now + Span(self.rng.random_range(-10_000_000..30_000_000)),
        }
    }

    fn task(&mut self) -> TaskId {
        let frontend = FrontendId(self.rng.random_range(0..FRONTENDS));
        if self.rng.random_range(0..12) == 0 {
            TaskId(self.rng.random())
        } else {
            TaskId::new(frontend, self.number(8) >> 24)
        }
    }

    fn plan(&mut self) -> BatchPlan {
        let slot = SlotDescriptor {
            slot: self.number(20) as u32 | if self.rng.random_range(0..8) == 0 { SlotDescriptor::GUARDED } else { 0 },
            input_offset: self.number(1 << 12),
            input_bytes: [8, 8, 8, 8, 5, 5, 0, u32::MAX][self.rng.random_range(0..8)],
            answer_offset: self.number(1 << 12),
            answer_bytes_max: [300, 300, 300, 88, 87, u32::MAX][self.rng.random_range(0..6)],
            key: 5,
        };
        let stamps = SchedulerStamps { queued_at: self.instant(), due_at: self.instant(), granted_at: self.instant() };
        let first = PlannedTask { task: self.task(), attempt: self.number(2) as u16, slot, stamps };
        let count = [1, 1, 2, 4, 0, 5, 256][self.rng.random_range(0..7)];
        let neighbours = self.rng.random();
        let tasks = (0..count).map(|index: u64| match neighbours {
            true => PlannedTask {
                task: TaskId(first.task.0.wrapping_add(index)),
                slot: SlotDescriptor {
                    slot: slot.slot.wrapping_add(index as u32),
                    input_offset: slot.input_offset.wrapping_add(index * u64::from(slot.input_bytes)),
                    answer_offset: slot.answer_offset.wrapping_add(index * u64::from(slot.answer_bytes_max)),
                    ..slot
                },
                ..first
            },
            false => PlannedTask { task: self.task(), ..first },
        });
        let tasks = tasks.collect();
        // One of another ModelThread would end it all.
        let plan = if self.rng.random_range(0..300) == 0 { self.number(6) } else { self.rng.random_range(0..9) };
        let soon = self.now + Span::from_millis(5);
        BatchPlan {
            plan: PlanId(plan),
            gpu_index: self.number(1) as u32,
            model: ModelId(5 + (self.number(1) as u32).min(9)),
            exec_at: if self.rng.random() { self.now } else { self.instant() },
            latest: if self.rng.random() { soon } else { self.instant() },
            tasks,
            sample: self.rng.random::<bool>().then(|| self.number(4) as u16),
        }
    }

    /// Mostly of one era, and more than anybody has claimed.
    fn claim(&mut self) -> Claim {
        let era = Era(if self.rng.random_range(0..60) == 0 { 9 } else { 8 });
        let scheduler = self.rng.random_range(0..3);
        let number = match self.rng.random_range(0..40) {
            0 => u32::MAX - self.rng.random_range(0..3),
            1..=9 => self.rng.random_range(0..=self.epoch),
            _ => {
                self.epoch += 1;
                self.epoch
            }
        };
        Claim { era, epoch: Epoch { number, scheduler } }
    }

    fn say(&mut self) {
        let scheduler = self.up.iter().filter(|(peer, _)| !matches!(peer, Peer::Frontend(_))).map(|entry| entry.1);
        let Some(connection) = self.pick(&scheduler.collect::<Vec<_>>()) else { return };
        let frontend = FrontendId(self.number(u64::from(FRONTENDS) - 1) as u32);
        let message = match self.rng.random_range(0..16) {
            0 if self.rng.random_range(0..4) == 0 => SchedulerToBackend::FrontendLeft { frontend },
            1 if self.rng.random_range(0..20) == 0 => SchedulerToBackend::Clock(ClockReply {
                sent_at: self.instant(),
                received_at: self.instant(),
                replied_at: self.instant(),
            }),
            1 | 2 => return self.tell_time(),
            3 if self.rng.random_range(0..4) == 0 => {
                let texts = ["127.0.0.1:2", "127.0.0.1:2", "", "nowhere"].map(str::to_owned);
                let link_address = if self.rng.random_range(0..8) == 0 {
                    "\u{1b}".repeat(10_000)
                } else {
                    texts[self.rng.random_range(0..4)].clone()
                };
                SchedulerToBackend::FrontendJoined { frontend, link_address, pass: PASS }
            }
            6 => SchedulerToBackend::Load {
                load: LoadId(self.number(3)),
                name: "n".repeat(self.rng.random_range(0..3)),
                brought: None,
                is_placed: self.rng.random_range(0..2) == 0,
            },
            7 => SchedulerToBackend::Host {
                load: LoadId(self.number(3)),
                version: "1".into(),
                model: ModelId(5 + self.number(2) as u32 % 4),
            },
            8 => SchedulerToBackend::Discard { load: LoadId(self.number(3)) },
            9 if self.rng.random_range(0..20) == 0 => {
                SchedulerToBackend::Unload { model: ModelId(5 + self.number(2) as u32 % 4) }
            }
            4 if self.schedulers > 1 => SchedulerToBackend::Takeover { epoch: self.claim().epoch },
            5 if self.rng.random_range(0..4) == 0 => SchedulerToBackend::AskPrimary,
            12 if self.has_memory || self.rng.random_range(0..300) == 0 => {
                let gpu = GpuId(self.number(1) as u32);
                SchedulerToBackend::AskResident { gpu_index: (gpu.0).min(2), gpu }
            }
            13 | 14 if self.has_memory => {
                let (gpu, model) = (GpuId(self.number(1) as u32), ModelId(5 + (self.number(1) as u32).min(9)));
                let (earliest, latest) = (self.now, if self.rng.random() { self.now } else { self.instant() });
                match self.rng.random_range(0..4) {
                    0 => SchedulerToBackend::UnloadWeights { gpu, model },
                    _ => SchedulerToBackend::LoadWeights { gpu, model, earliest, latest },
                }
            }
            10 | 11 => SchedulerToBackend::Cancel { plan: PlanId(self.number(6)), task: self.task() },
            _ => SchedulerToBackend::Plan(self.plan()),
        };
        let mut frame = encode(&message);
        if self.rng.random_range(0..1_000) == 0 {
            frame = (0..self.rng.random_range(0..60)).map(|_| self.rng.random()).collect();
        }
        self.core.handle_event(self.now, Event::Message { connection, frame });
    }

    /// A batch is planned behind one that executes, as planners do, and what it reads comes.
    fn follow(&mut self) {
        let Some(gpu) = self.pick(&self.executing.clone()) else { return };
        let stamps = SchedulerStamps { queued_at: self.now, due_at: self.now, granted_at: self.now };
        let slot = SlotDescriptor {
            slot: 0,
            input_offset: 0,
            input_bytes: 8,
            answer_offset: 64,
            answer_bytes_max: 300,
            key: 5,
        };
        let task = TaskId::new(FrontendId(self.rng.random_range(0..FRONTENDS)), 1);
        let plan = BatchPlan {
            exec_at: self.now,
            latest: self.now + Span::from_millis(5),
            gpu_index: gpu as u32,
            model: ModelId(5),
            tasks: vec![PlannedTask { task, attempt: 0, slot, stamps }],
            ..self.plan()
        };
        self.tell(&SchedulerToBackend::Plan(plan));
        self.outputs();
        if let Some((connection, token)) = self.reads.pop() {
            self.core.handle_event(self.now, Event::ReadDone { connection, token, result: Ok(()) });
        }
        // The time of what follows passes while the one before it goes on.
        if self.rng.random() {
            self.outputs();
            self.now += Span::from_millis(6);
        }
    }

    fn answer_dialled(&mut self, is_well: bool) {
        let Some((peer, connection)) = self.pick(&self.dialled.clone()) else { return };
        self.dialled.retain(|other| other.1 != connection);
        let welcome = match peer {
            Peer::Scheduler(_) => {
                let threads = if is_well || self.rng.random_range(0..4) > 0 {
                    0
                } else {
                    [0, 0, 0, MODEL_THREADS][self.rng.random_range(0..4)]
                };
                let addresses = vec!["127.0.0.1:3".to_owned(); threads];
                let is_odd = !is_well && self.rng.random_range(0..8) == 0;
                let models = [[5, 6], [5, 5]][usize::from(is_odd)].map(ModelId).to_vec();
                encode(&BackendWelcome {
                    backend: BackendId(if is_well || self.schedulers > 1 { 3 } else { self.number(3) as u32 }),
                    models,
                    model_threads: ModelThreads { addresses, pass: self.rng.random() },
                    claim: if is_well { claim(1) } else { self.claim() },
                })
            }
            Peer::ModelThread(..) => vec![],
            Peer::Frontend(_) => encode(&LinkWelcome {
                arena_address: if is_well { 4096 } else { self.number(4096) },
                arena_bytes: if is_well || self.rng.random() { u64::MAX } else { self.number(1 << 13) },
                arena_rkey: self.rng.random(),
                guards_offset: if is_well { 1 << 40 } else { self.number(1 << 13) },
                guards_rkey: 6,
            }),
        };
        self.up.push((peer, connection));
        self.core.handle_event(self.now, Event::Connected { connection, welcome });
    }

    /// Transfers that are under way on a connection end before it does.
    fn down(&mut self, connection: ConnectionId) {
        self.dialled.retain(|other| other.1 != connection);
        self.up.retain(|other| other.1 != connection);
        let result = Err(TransferError::Flushed);
        for (_, token) in self.reads.extract_if(.., |read| read.0 == connection).collect::<Vec<_>>() {
            self.core.handle_event(self.now, Event::ReadDone { connection, token, result });
        }
        for (_, token) in self.writes.extract_if(.., |write| write.0 == connection).collect::<Vec<_>>() {
            self.core.handle_event(self.now, Event::WriteDone { connection, token, result });
        }
        let reason = DisconnectReason::new("as it likes");
        self.core.handle_event(self.now, Event::Disconnected { connection, reason });
    }

    fn finish(&mut self) {
        let now = self.now;
        if let Some((gpu, model)) = self.copying.pop_first() {
            let is_done = self.rng.random_range(0..8) > 0;
            assert!(!is_done || self.weights.insert((gpu, model)), "{model:?} is there twice");
            return self.core.handle_copied(now, gpu, is_done.then_some(Span::ZERO));
        }
        match self.rng.random_range(0..4) {
            0 | 1 if !self.reads.is_empty() => {
                let (connection, token) = self.reads.swap_remove(self.rng.random_range(0..self.reads.len()));
                self.core.handle_event(now, Event::ReadDone { connection, token, result: Ok(()) });
            }
            2 if !self.writes.is_empty() => {
                let (connection, token) = self.writes.swap_remove(self.rng.random_range(0..self.writes.len()));
                self.core.handle_event(now, Event::WriteDone { connection, token, result: Ok(()) });
            }
            _ if !self.executing.is_empty() => {
                let gpu = self.executing.swap_remove(self.rng.random_range(0..self.executing.len()));
                let (started_at, finished_at) = (now, now + Span(1_000));
                let execution = match self.rng.random_range(0..3) {
                    0 => Execution::WindowMissed { rejected_at: now },
                    1 => Execution::Failed { started_at, finished_at, reason: "no".repeat(300) },
                    _ => Execution::Done { started_at, finished_at, outputs: Outputs::default() },
                };
                self.executed += 1;
                self.core.handle_executed(now, gpu, execution);
            }
            _ => {}
        }
    }

    fn finish_load(&mut self) {
        if !self.loads.is_empty() && !self.tries {
            self.tries = true;
            let takes = Span(self.rng.random_range(0..4_000_000));
            return self.core.handle_trial(self.now, vec![0, 9], takes, Span::from_millis(5), false);
        }
        if let Some(model) = self.measures.pop() {
            let measured = self.rng.random::<bool>().then(|| (LatencyProfile::linear(1.0, 2.0, 4).unwrap(), None));
            let of = self.core.hosted(model).map(Arc::downgrade).unwrap_or_default();
            self.core.handle_measured(self.now, (model, &of), measured);
        }
        let Some(load) = self.loads.pop() else { return };
        let result = match self.rng.random_range(0..4) {
            0 => Ok(vec![]),
            1 => Err("torn".to_owned()),
            2 => Ok(vec![Loaded { basis: Basis::One, ..loaded("n", self.rng.random_range(1..12)) }]),
            _ => Ok(vec![loaded("o", 4)]),
        };
        self.core.handle_loaded(self.now, load, result);
    }

    fn batches_of(&self, gpu: usize) -> usize {
        self.executing.iter().filter(|other| **other == gpu).count()
    }

    fn outputs(&mut self) {
        while let Some(output) = self.core.poll_output() {
            match output {
                Output::Connect { peer, .. } => {
                    let connection = ConnectionId(self.next_connection);
                    self.next_connection += 1;
                    self.dialled.push((peer, connection));
                    self.core.handle_connecting(peer, connection);
                }
                Output::Disconnect { connection } => {
                    if self.dialled.iter().chain(&self.up).any(|other| other.1 == connection) {
                        self.down(connection);
                    }
                }
                Output::LookAtGuards { token, offset, guards } => {
                    assert!(offset + guards * GUARD_BYTES <= self.staging.bytes());
                    let word =
                        |task| if self.rng.random_range(0..4) > 0 { guard_word(TaskId(task)) } else { GUARD_EMPTY };
                    let words: Vec<u64> = (self.guarded[&token].0..).take(guards).map(word).collect();
                    assert_eq!(words.len(), guards);
                    self.guards += guards;
                    self.core.handle_guards(self.now, token, &words);
                }
                Output::ReadGuards { connection, task, transfer } => {
                    assert!(transfer.local_offset + transfer.bytes <= self.staging.bytes());
                    self.guarded.insert(transfer.token, task);
                    self.reads.push((connection, transfer.token));
                }
                Output::Read { connection, transfer, .. } => {
                    assert!(transfer.local_offset + transfer.bytes <= self.staging.bytes());
                    if self.rng.random_range(0..10) == 0 {
                        self.core.handle_read_failed(self.now, transfer.token);
                    } else {
                        self.reads.push((connection, transfer.token));
                    }
                }
                Output::Write { connection, transfer, header, text, .. } => {
                    assert!(transfer.local_offset + transfer.bytes <= self.staging.bytes());
                    assert_eq!(transfer.bytes, ANSWER_HEADER_BYTES + header.payload_bytes as usize);
                    assert!(text.is_none_or(|text| text.len() == header.payload_bytes as usize));
                    if self.rng.random_range(0..10) == 0 {
                        self.core.handle_write_failed(self.now, transfer.token);
                    } else {
                        self.writes.push((connection, transfer.token));
                    }
                }
                Output::Execute { gpu, job } => {
                    assert!(self.batches_of(gpu) < worker::HANDED_MAX, "a GPU is given too many batches");
                    self.behind += self.batches_of(gpu);
                    let inside = |run: &Run| run.input_offset.max(run.output_offset) < self.staging.bytes();
                    assert!(job.runs.iter().all(inside));
                    let model = job.model;
                    // What clients have loaded has no weights.
                    let has_weights = self.has_memory && self.core.loaded(model).weights.pages > 0;
                    assert!(!has_weights || self.weights.contains(&(gpu, model)), "its weights are not there");
                    self.executing.push(gpu);
                }
                Output::TakeBack { gpu } => {
                    assert!(self.batches_of(gpu) > 0, "it has nothing");
                    // The GPU may have begun it just now.
                    let is_given = self.rng.random();
                    *if is_given { &mut self.given_back } else { &mut self.refused } += 1;
                    if is_given {
                        let place = self.executing.iter().position(|other| *other == gpu);
                        self.executing.swap_remove(place.expect("counted above"));
                        self.core.handle_taken_back(self.now, gpu);
                    }
                }
                Output::Try { .. } => assert!(std::mem::take(&mut self.tries), "nobody waits for a trial"),
                Output::Interrupt { gpu } => assert!(self.executing.contains(&gpu), "nothing is there to be ended"),
                Output::SendAhead { .. } => panic!("no executor here has GPUs"),
                Output::CopyWeights { gpu, model, .. } => assert!(self.copying.insert(gpu, model).is_none()),
                Output::ReleaseWeights { executor } => {
                    let is_it = |model| Arc::ptr_eq(&self.core.loaded(model).executor, &executor);
                    assert!(!self.weights.iter().any(|(_, held)| is_it(*held)), "a GPU has it");
                }
                Output::FreeWeights { gpu, model, .. } => assert!(self.weights.remove(&(gpu, model))),
                Output::Load { load, .. } => self.loads.push(load),
                Output::Measure { model, .. } => self.measures.push(model),
                Output::Send { connection, frame } => {
                    let is_up =
                        self.up.iter().any(|(peer, up)| *up == connection && !matches!(peer, Peer::Frontend(_)));
                    assert!(is_up, "a frame for nobody");
                    for message in read_frame::<BackendToScheduler>(&frame) {
                        match message.unwrap() {
                            Addressed::Control(BackendToControl::Obeys { .. }) => self.obeyed += 1,
                            Addressed::Control(BackendToControl::Unfinished { .. }) => self.inherited += 1,
                            _ => {}
                        }
                    }
                }
            }
        }
    }

    fn step(&mut self) {
        match self.rng.random_range(0..24) {
            0 => self.answer_dialled(false),
            9..=11 if !self.executing.is_empty() => self.follow(),
            1..=11 => self.say(),
            12..=18 => self.finish(),
            19 => self.finish_load(),
            20 if self.schedulers > 1 && self.rng.random_range(0..4) == 0 => {
                let schedulers = self.up.iter().filter(|(peer, _)| !matches!(peer, Peer::Frontend(_)));
                let schedulers: Vec<_> = schedulers.map(|entry| entry.1).collect();
                self.pick(&schedulers).into_iter().for_each(|connection| self.down(connection));
            }
            20 => {
                let frontends =
                    self.up.iter().chain(&self.dialled).filter(|(peer, _)| matches!(peer, Peer::Frontend(_)));
                let connections: Vec<_> = frontends.map(|entry| entry.1).collect();
                match (self.pick(&connections), self.rng.random_range(0..3)) {
                    (Some(connection), 0) => self.down(connection),
                    (Some(connection), 1) => {
                        self.core.handle_event(self.now, Event::Message { connection, frame: vec![1; 3] });
                    }
                    (Some(connection), _) => {
                        self.core.handle_event(self.now, Event::Immediate { connection, immediate: 3, bytes: 9 });
                    }
                    (None, _) => {}
                }
            }
            // Sessions that were left are about to be joined again.
            21 if self.schedulers > 1 => self.now += Span::from_millis(self.rng.random_range(0..60)),
            _ => self.now += Span(self.rng.random_range(0..4_000_000)),
        }
        self.core.handle_timeout(self.now);
        self.outputs();
        let plans_max = self.staging.gpus() * (worker::WAITING_MAX + crate::staging::BUFFERS);
        let connections_max = usize::from(self.schedulers) * (1 + MODEL_THREADS) + FRONTENDS as usize + 8;
        assert!(self.core.plans() <= plans_max && self.dialled.len() + self.up.len() <= connections_max);
    }
}

#[test]
fn a_hostile_scheduler_and_hostile_frontends_break_nothing() {
    let (mut executed, mut behind, mut guards, mut obeyed, mut inherited) = (0, 0, 0, 0, 0);
    let (mut given_back, mut refused) = (0, 0);
    for seed in 0..1_800 {
        eprintln!("seed {seed}");
        let mut attack = Attack::new(seed);
        (0..STEPS).for_each(|_| attack.step());
        executed += attack.executed;
        behind += attack.behind;
        given_back += attack.given_back;
        refused += attack.refused;
        guards += attack.guards;
        obeyed += attack.obeyed;
        inherited += attack.inherited;
    }
    assert!(obeyed > 2_000 && inherited > 50, "{obeyed} primaries were obeyed, and told of {inherited} plans");
    assert!(executed > 80, "only {executed} batches were executed: the attack does not reach far");
    assert!(behind > 5, "only {behind} batches were behind another");
    assert!(given_back > 0 && refused > 0, "{given_back} of them were taken back, and {refused} had begun");
    assert!(guards > 10, "only {guards} guards were looked at");
}
