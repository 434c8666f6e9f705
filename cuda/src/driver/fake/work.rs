//! Streams, and what is put on them. Nothing runs until somebody waits; then streams run out of step, as a seed
//! decides, but for events that are waited for. So a wait that is missing gives wrong values sooner or later.
//!
//! Events tell what the *host* has seen done: memory may be in use by all that it has not.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::Arc,
};

use lowering::{Plan, interpret};
use transport::Region;

use super::super::{Address, Bases, Stream};
use super::memory::Memory;
use crate::random::Random;

/// How far each stream is.
pub(super) type Clock = [u64; Stream::ALL.len()];

/// Something to do.
#[derive(Debug, Clone)]
pub(super) enum Work {
    CopyIn {
        to: Address,
        from: (Region, usize),
        bytes: usize,
    },
    CopyOut {
        to: (Region, usize),
        from: Address,
        bytes: usize,
    },
    CopyRows {
        to: (Address, usize),
        from: (Address, usize),
        bytes: usize,
        rows: usize,
    },
    Clear {
        at: Address,
        bytes: usize,
    },
    /// The event, and how often it has been recorded.
    Record(u64, u64),
    Wait(u64, u64),
    Run {
        prepared: u64,
        plan: Arc<Plan>,
        at: Bases,
        weights_bytes: u64,
    },
}

/// What work uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Use {
    /// The GPU's memory.
    Memory(Range<u64>),
    /// Host memory, by its addresses.
    Host(Range<u64>),
    /// A prepared plan.
    Prepared(u64),
    /// A graph.
    Graph(u64),
}

impl Use {
    fn meets(&self, other: &Self) -> bool {
        let overlap = |one: &Range<u64>, other: &Range<u64>| one.start < other.end && other.start < one.end;
        match (self, other) {
            (Self::Memory(one), Self::Memory(other)) | (Self::Host(one), Self::Host(other)) => overlap(one, other),
            _ => self == other,
        }
    }
}

impl Work {
    /// What it uses until it is done.
    pub(super) fn uses(&self) -> Vec<Use> {
        let memory = |at: Address, bytes: usize| Use::Memory(at.0..at.0 + bytes as u64);
        let host = |(region, offset): &(Region, usize), bytes: usize| {
            let start = region.address() + *offset as u64;
            Use::Host(start..start + bytes as u64)
        };
        match self {
            Self::CopyIn { to, from, bytes } => vec![memory(*to, *bytes), host(from, *bytes)],
            Self::CopyOut { to, from, bytes } => vec![host(to, *bytes), memory(*from, *bytes)],
            Self::CopyRows { to, from, bytes, rows } => {
                let extent = |pitch: usize| pitch * (rows - 1) + bytes;
                vec![memory(to.0, extent(to.1)), memory(from.0, extent(from.1))]
            }
            Self::Clear { at, bytes } => vec![memory(*at, *bytes)],
            Self::Record(..) | Self::Wait(..) => Vec::new(),
            Self::Run { prepared, plan, at, weights_bytes } => vec![
                Use::Prepared(*prepared),
                memory(at.arena, plan.arena_bytes),
                memory(at.weights, *weights_bytes as usize),
            ],
        }
    }
}

/// An event.
#[derive(Debug)]
struct Mark {
    is_timed: bool,
    is_destroyed: bool,
    recorded: u64,
    done: u64,
    /// What is done when what was recorded last is.
    clock: Clock,
    /// When it was.
    at_ns: i64,
}

/// All streams of a GPU.
#[derive(Debug)]
pub(super) struct Streams {
    queues: [VecDeque<Work>; Stream::ALL.len()],
    /// How much has been put on each.
    put: Clock,
    /// How much of all streams is done when all of this one is.
    clocks: [Clock; Stream::ALL.len()],
    /// How much the host has seen done.
    seen: Clock,
    /// What is used by what the host has not seen done.
    uses: Vec<(usize, u64, Use)>,
    events: BTreeMap<u64, Mark>,
    next_event: u64,
    now_ns: i64,
    random: Random,
}

impl Streams {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            queues: Default::default(),
            put: Clock::default(),
            clocks: Default::default(),
            seen: Clock::default(),
            uses: Vec::new(),
            events: BTreeMap::new(),
            next_event: 0,
            now_ns: 0,
            random: Random(seed),
        }
    }

    /// Events that have not been given back.
    pub(super) fn events(&self) -> usize {
        self.events.values().filter(|event| !event.is_destroyed).count()
    }

    /// Whether anything uses this that the host has not seen done.
    pub(super) fn is_used(&self, what: &Use) -> bool {
        self.uses.iter().any(|(_, _, used)| used.meets(what))
    }

    pub(super) fn put(&mut self, stream: Stream, work: Work, besides: Option<Use>) {
        let index = stream as usize;
        self.put[index] += 1;
        self.clocks[index][index] = self.put[index];
        let uses = work.uses().into_iter().chain(besides);
        self.uses.extend(uses.map(|used| (index, self.put[index], used)));
        self.queues[index].push_back(work);
    }

    pub(super) fn create_event(&mut self, is_timed: bool) -> u64 {
        self.next_event += 1;
        let mark = Mark { is_timed, is_destroyed: false, recorded: 0, done: 0, clock: Clock::default(), at_ns: 0 };
        self.events.insert(self.next_event, mark);
        self.next_event
    }

    pub(super) fn destroy_event(&mut self, event: u64) {
        self.event(event).is_destroyed = true;
    }

    fn event(&mut self, event: u64) -> &mut Mark {
        let mark = self.events.get_mut(&event).filter(|mark| !mark.is_destroyed);
        mark.expect("events are used until they are given back")
    }

    pub(super) fn record(&mut self, stream: Stream, event: u64) {
        let clock = self.clocks[stream as usize];
        let mark = self.event(event);
        mark.recorded += 1;
        mark.clock = clock;
        let recorded = mark.recorded;
        self.put(stream, Work::Record(event, recorded), None);
    }

    pub(super) fn wait(&mut self, stream: Stream, event: u64) {
        let mark = self.event(event);
        let (recorded, clock) = (mark.recorded, mark.clock);
        self.put(stream, Work::Wait(event, recorded), None);
        let known = &mut self.clocks[stream as usize];
        *known = std::array::from_fn(|index| known[index].max(clock[index]));
    }

    /// Whether an event is done, after some more work.
    pub(super) fn is_done(&mut self, event: u64, memory: &mut Memory) -> bool {
        for _ in 0..self.random.below(4) {
            self.step(memory);
        }
        let mark = self.event(event);
        let (is_done, clock) = (mark.done >= mark.recorded, mark.clock);
        if is_done {
            self.see(clock);
        }
        is_done
    }

    pub(super) fn synchronize(&mut self, event: u64, memory: &mut Memory) {
        while !self.is_done(event, memory) {}
    }

    /// Waits for everything.
    pub(super) fn finish(&mut self, memory: &mut Memory) {
        while self.step(memory) {}
        self.see(self.put);
    }

    /// Nanoseconds of the GPU's between two events, if both have been recorded with their times and are done.
    pub(super) fn elapsed(&mut self, from: u64, to: u64) -> Option<i64> {
        let mut at = |event| {
            let mark = self.event(event);
            (mark.is_timed && mark.recorded > 0 && mark.done == mark.recorded).then_some(mark.at_ns)
        };
        Some(at(to)? - at(from)?)
    }

    fn see(&mut self, clock: Clock) {
        self.seen = std::array::from_fn(|index| self.seen[index].max(clock[index]));
        let seen = self.seen;
        self.uses.retain(|(stream, index, _)| *index > seen[*stream]);
    }

    /// Does the next thing on one of the streams that can go on. False if there is none.
    fn step(&mut self, memory: &mut Memory) -> bool {
        let can_go_on = |queue: &VecDeque<Work>| match queue.front() {
            None => false,
            Some(Work::Wait(event, recorded)) => self.events[event].done >= *recorded,
            Some(_) => true,
        };
        let ready = (0..self.queues.len()).filter(|&stream| can_go_on(&self.queues[stream])).collect::<Vec<_>>();
        if ready.is_empty() {
            let is_empty = self.queues.iter().all(VecDeque::is_empty);
            assert!(is_empty, "an event that was recorded before it is waited for comes");
            return false;
        }
        let stream = ready[self.random.below(ready.len())];
        let work = self.queues[stream].pop_front().expect("it has something to do");
        self.now_ns += cost_ns(&work);
        match work {
            Work::Wait(..) => {}
            Work::Record(event, recorded) => {
                let mark = self.events.get_mut(&event).expect("marks stay");
                (mark.done, mark.at_ns) = (recorded, self.now_ns);
            }
            work => run(work, memory),
        }
        true
    }
}

/// What a GPU might take, so that larger batches take longer.
fn cost_ns(work: &Work) -> i64 {
    match work {
        Work::Run { plan, .. } => (1000 + 100 * plan.batch as i64) * plan.steps.len() as i64,
        Work::Record(..) | Work::Wait(..) => 0,
        _ => 500,
    }
}

fn run(work: Work, memory: &mut Memory) {
    match work {
        Work::CopyIn { to, from: (region, offset), bytes } => {
            let mut copied = vec![0; bytes];
            region.read(offset, &mut copied);
            memory.write(to, &copied);
        }
        Work::CopyOut { to: (region, offset), from, bytes } => {
            let mut copied = vec![0; bytes];
            memory.read(from, &mut copied);
            region.write(offset, &copied);
        }
        Work::CopyRows { to, from, bytes, rows } => {
            let mut row = vec![0; bytes];
            for index in 0..rows {
                memory.read(from.0.plus((index * from.1) as u64), &mut row);
                memory.write(to.0.plus((index * to.1) as u64), &row);
            }
        }
        Work::Clear { at, bytes } => memory.write(at, &vec![0; bytes]),
        Work::Run { plan, at, weights_bytes, .. } => run_plan(&plan, at, weights_bytes, memory),
        Work::Record(..) | Work::Wait(..) => unreachable!("events are the streams' own"),
    }
}

fn run_plan(plan: &Plan, at: Bases, weights_bytes: u64, memory: &mut Memory) {
    let mut arena = vec![0; plan.arena_bytes];
    memory.read(at.arena, &mut arena);
    let mut weights = vec![0; memory.written(at.weights, weights_bytes) as usize];
    memory.read(at.weights, &mut weights);
    interpret::run(plan, &mut lowering::interpret::Memory { arena: &mut arena, weights: &weights });
    memory.write(at.arena, &arena);
}
