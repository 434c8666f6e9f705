//! A GPU that is none: it computes on the CPU ([`lowering::interpret`]), runs streams lazily and out of step
//! ([`work`]), and panics where a rule of [`super`]'s is broken, as that is always a bug of ours. Tests of all that is
//! built on [`Driver`] use it; nothing serves with it.
//!
//! Calls can be made to fail ([`Fake::fail`], [`Fake::break_down`]), and are counted ([`Fake::calls`]). What has not
//! been given back when it is dropped makes it panic, too.

mod memory;
#[cfg(test)]
mod tests;
mod work;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, ThreadId},
};

use lowering::Plan;
use proto::{Span, weights::PAGE_BYTES};
use transport::{DeviceMemory, Keeper, Region};

use super::{Address, Bases, Device, Driver, DriverError, Event, Graph, Page, Prepared, Stream};
use memory::Memory;
use work::{Streams, Use, Work};

/// A GPU on the CPU.
#[derive(Debug)]
pub struct Fake {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    memory: Memory,
    streams: Streams,
    /// First addresses and lengths of host memory that is pinned.
    pinned: Vec<(u64, u64)>,
    prepared: BTreeMap<u64, Ready>,
    graphs: BTreeMap<u64, Vec<Work>>,
    next_id: u64,
    /// Who captures, and what has been captured so far.
    capture: Option<(ThreadId, Vec<Work>)>,
    calls: BTreeMap<&'static str, u64>,
    /// What RDMA devices have written, and nobody can count on yet.
    arriving: Vec<(Address, Vec<u8>)>,
    /// Calls that may fail until one does.
    until_failure: Option<u64>,
    is_broken: bool,
}

#[derive(Debug, Clone)]
struct Ready {
    plan: Arc<Plan>,
    at: Bases,
    /// What was behind the weights' addresses.
    weights_bytes: u64,
}

/// How a call meets a capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// It waits, or takes or gives something back: not while this thread captures.
    Other,
    /// It puts something on a stream that a capture does not take.
    Put(Stream),
    /// It puts something on a stream that is captured, if it is captured.
    Captured(Stream),
}

impl Fake {
    /// A GPU with so many pages of memory. The seed decides how streams run out of step.
    #[must_use]
    pub fn new(pages: usize, seed: u64) -> Arc<Self> {
        let state = State {
            memory: Memory::new(pages),
            streams: Streams::new(seed),
            pinned: Vec::new(),
            prepared: BTreeMap::new(),
            graphs: BTreeMap::new(),
            next_id: 0,
            capture: None,
            calls: BTreeMap::new(),
            arriving: Vec::new(),
            until_failure: None,
            is_broken: false,
        };
        Arc::new(Self { state: Mutex::new(state) })
    }

    /// Of the calls from now on that can fail, this one will (0 for the next), and no other.
    pub fn fail(&self, nth: u64) {
        self.state().until_failure = Some(nth);
    }

    /// Whether the failure that [`Self::fail`] asked for is yet to come.
    #[must_use]
    pub fn will_fail(&self) -> bool {
        self.state().until_failure.is_some()
    }

    /// All calls that can fail do so from now on.
    pub fn break_down(&self) {
        self.state().is_broken = true;
    }

    /// As an RDMA device writes, to memory that it may reach.
    pub fn write_remotely(&self, at: Address, bytes: Vec<u8>) {
        let mut state = self.state();
        let range = at.0..at.0 + bytes.len() as u64;
        assert!(state.memory.is_shared(&range), "RDMA devices reach only pages that were taken for them");
        state.arriving.push((at, bytes));
    }

    /// How often each call was made.
    #[must_use]
    pub fn calls(&self) -> BTreeMap<&'static str, u64> {
        self.state().calls.clone()
    }

    /// What has not been given back, in words.
    #[must_use]
    pub fn leaks(&self) -> Vec<String> {
        self.state().leaks()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Whoever broke a rule has panicked, and gives things back while it unwinds.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call begins.
    fn enter(&self, call: &'static str, manner: Manner) -> MutexGuard<'_, State> {
        // Another thread may come in between any two calls, and a lock that is missing shows.
        thread::yield_now();
        let mut state = self.state();
        *state.calls.entry(call).or_default() += 1;
        state.check_capture(call, manner);
        state
    }

    /// A call begins that may fail.
    fn try_enter(&self, call: &'static str, manner: Manner) -> Result<MutexGuard<'_, State>, DriverError> {
        let mut state = self.enter(call, manner);
        state.fail_if_told(call)?;
        Ok(state)
    }
}

impl State {
    fn fail_if_told(&mut self, call: &'static str) -> Result<(), DriverError> {
        let fails_now = self.until_failure == Some(0);
        self.until_failure = if fails_now { None } else { self.until_failure.map(|calls| calls - 1) };
        if fails_now || self.is_broken {
            return Err(DriverError(format!("{call} failed: it was told to")));
        }
        Ok(())
    }

    fn check_capture(&self, call: &'static str, manner: Manner) {
        let Some((thread, _)) = &self.capture else { return };
        let is_ours = *thread == thread::current().id();
        match manner {
            Manner::Captured(Stream::Execute) => assert!(is_ours, "{call}: another thread captures this stream"),
            Manner::Put(Stream::Execute) => panic!("{call}: this cannot be captured"),
            _ => assert!(!is_ours, "{call}: while a thread captures, it does nothing else"),
        }
    }

    fn leaks(&self) -> Vec<String> {
        let counts = [
            ("events", self.streams.events()),
            ("prepared plans", self.prepared.len()),
            ("graphs", self.graphs.len()),
            ("pinned regions", self.pinned.len()),
            ("captures", usize::from(self.capture.is_some())),
        ];
        let counts = counts.into_iter().filter(|(_, count)| *count > 0);
        self.memory.leaks().into_iter().chain(counts.map(|(what, count)| format!("{count} {what}"))).collect()
    }

    /// Whether work that the host has not seen done uses this. A broken GPU does no work.
    fn is_used(&self, what: &Use) -> bool {
        !self.is_broken && self.streams.is_used(what)
    }

    fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn check_pinned(&self, region: &Region, offset: usize, bytes: usize) {
        let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= region.len());
        assert!(is_inside, "copies stay inside host memory");
        let is_pinned = self.pinned.contains(&(region.address(), region.len() as u64));
        assert!(is_pinned, "host memory of copies is pinned");
    }

    /// Puts work on a stream, or remembers it.
    fn put(&mut self, stream: Stream, work: Work) {
        self.check_mapped(&work);
        match &mut self.capture {
            Some((_, captured)) if stream == Stream::Execute => captured.push(work),
            _ => self.streams.put(stream, work, None),
        }
    }

    fn check_mapped(&self, work: &Work) {
        for used in work.uses() {
            if let Use::Memory(range) = used {
                assert!(self.memory.is_mapped(&range), "work reaches only what is mapped");
            }
        }
    }
}

impl Driver for Fake {
    fn device(&self) -> Result<Device, DriverError> {
        let state = self.try_enter("device", Manner::Other)?;
        Ok(Device {
            name: "a GPU on the CPU".to_owned(),
            // No other one of this host has it now.
            uuid: format!("GPU-{}-{:p}", std::process::id(), self),
            pci: "0000:00:00.0".to_owned(),
            memory_bytes: state.memory.bytes(),
            free_bytes: state.memory.free_bytes(),
            compute_capability: (8, 0),
        })
    }

    fn reserve(&self, bytes: u64) -> Result<Address, DriverError> {
        Ok(self.try_enter("reserve", Manner::Other)?.memory.reserve(bytes))
    }

    fn release(&self, at: Address, bytes: u64) {
        self.enter("release", Manner::Other).memory.release(at, bytes);
    }

    fn create_page(&self) -> Result<Page, DriverError> {
        let mut state = self.try_enter("create_page", Manner::Other)?;
        state.memory.create_page().ok_or_else(|| DriverError("create_page failed: out of memory".to_owned()))
    }

    fn create_shared_page(&self) -> Result<Page, DriverError> {
        let mut state = self.try_enter("create_shared_page", Manner::Other)?;
        let page = state.memory.create_page();
        let page = page.ok_or_else(|| DriverError("create_shared_page failed: out of memory".to_owned()))?;
        state.memory.share_page(page);
        Ok(page)
    }

    /// No RDMA device of this host could be given its addresses.
    fn share(&self, at: Address, bytes: u64, _: Arc<dyn Keeper>) -> Result<DeviceMemory, DriverError> {
        let state = self.try_enter("share", Manner::Other)?;
        let is_shared = state.memory.is_shared(&(at.0..at.0 + bytes));
        assert!(is_shared, "what is shared lies in pages that were taken for that");
        Err(DriverError("share failed: this GPU is none, and only Fake::write_remotely writes to it".to_owned()))
    }

    fn flush_remote_writes(&self) -> Result<(), DriverError> {
        let mut state = self.try_enter("flush_remote_writes", Manner::Other)?;
        let State { arriving, memory, .. } = &mut *state;
        arriving.drain(..).for_each(|(at, bytes)| memory.write(at, &bytes));
        Ok(())
    }

    fn destroy_page(&self, page: Page) {
        self.enter("destroy_page", Manner::Other).memory.destroy_page(page);
    }

    fn map(&self, at: Address, pages: &[Page]) -> Result<(), DriverError> {
        self.try_enter("map", Manner::Other)?.memory.map(at, pages);
        Ok(())
    }

    fn unmap(&self, at: Address, pages: usize) -> Result<(), DriverError> {
        let mut state = self.try_enter("unmap", Manner::Other)?;
        let range = at.0..at.0 + pages as u64 * PAGE_BYTES;
        let is_used = state.is_used(&Use::Memory(range.clone()));
        assert!(!is_used, "a page is unmapped only when all work that may use it has been seen done");
        state.memory.unmap(range);
        Ok(())
    }

    fn pin(&self, region: &Region) -> Result<(), DriverError> {
        let mut state = self.try_enter("pin", Manner::Other)?;
        let pin = (region.address(), region.len() as u64);
        assert!(pin.1 > 0 && !state.pinned.contains(&pin), "host memory is pinned once");
        state.pinned.push(pin);
        Ok(())
    }

    fn unpin(&self, region: &Region) {
        let mut state = self.enter("unpin", Manner::Other);
        let (start, bytes) = (region.address(), region.len() as u64);
        let is_used = state.is_used(&Use::Host(start..start + bytes));
        assert!(!is_used, "host memory of copies stays pinned until they have been seen done");
        let index = state.pinned.iter().position(|pinned| *pinned == (start, bytes));
        state.pinned.swap_remove(index.expect("host memory is unpinned once"));
    }

    fn copy_in(&self, stream: Stream, to: Address, from: (&Region, usize), bytes: usize) -> Result<(), DriverError> {
        let mut state = self.try_enter("copy_in", Manner::Put(stream))?;
        state.check_pinned(from.0, from.1, bytes);
        state.put(stream, Work::CopyIn { to, from: (from.0.clone(), from.1), bytes });
        Ok(())
    }

    fn copy_out(&self, stream: Stream, to: (&Region, usize), from: Address, bytes: usize) -> Result<(), DriverError> {
        let mut state = self.try_enter("copy_out", Manner::Put(stream))?;
        state.check_pinned(to.0, to.1, bytes);
        state.put(stream, Work::CopyOut { to: (to.0.clone(), to.1), from, bytes });
        Ok(())
    }

    fn copy_on_device(
        &self,
        stream: Stream,
        to: (Address, usize),
        from: (Address, usize),
        bytes: usize,
        rows: usize,
    ) -> Result<(), DriverError> {
        let mut state = self.try_enter("copy_on_device", Manner::Captured(stream))?;
        assert!(bytes > 0 && rows > 0 && to.1 >= bytes && from.1 >= bytes, "rows do not overlap");
        state.put(stream, Work::CopyRows { to, from, bytes, rows });
        Ok(())
    }

    fn clear(&self, stream: Stream, at: Address, bytes: usize) -> Result<(), DriverError> {
        self.try_enter("clear", Manner::Captured(stream))?.put(stream, Work::Clear { at, bytes });
        Ok(())
    }

    fn create_event(&self, is_timed: bool) -> Result<Event, DriverError> {
        Ok(Event(self.try_enter("create_event", Manner::Other)?.streams.create_event(is_timed)))
    }

    fn destroy_event(&self, event: Event) {
        self.enter("destroy_event", Manner::Other).streams.destroy_event(event.0);
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), DriverError> {
        self.try_enter("record", Manner::Put(stream))?.streams.record(stream, event.0);
        Ok(())
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<(), DriverError> {
        self.try_enter("wait", Manner::Put(stream))?.streams.wait(stream, event.0);
        Ok(())
    }

    fn is_done(&self, event: Event) -> Result<bool, DriverError> {
        let mut state = self.try_enter("is_done", Manner::Other)?;
        let State { streams, memory, .. } = &mut *state;
        Ok(streams.is_done(event.0, memory))
    }

    fn synchronize(&self, event: Event) -> Result<(), DriverError> {
        let mut state = self.try_enter("synchronize", Manner::Other)?;
        let State { streams, memory, .. } = &mut *state;
        streams.synchronize(event.0, memory);
        Ok(())
    }

    fn elapsed(&self, from: Event, to: Event) -> Result<Span, DriverError> {
        let mut state = self.try_enter("elapsed", Manner::Other)?;
        let elapsed = state.streams.elapsed(from.0, to.0).map(Span::from_nanos);
        elapsed.ok_or_else(|| DriverError("elapsed failed: not two timed events that are done".to_owned()))
    }

    fn prepare(&self, plan: &Arc<Plan>, at: Bases) -> Result<Prepared, DriverError> {
        let mut state = self.try_enter("prepare", Manner::Put(Stream::Execute))?;
        let arena = at.arena.0..at.arena.0 + plan.arena_bytes as u64;
        assert!(state.memory.is_mapped(&arena), "the arena is mapped for as many bytes as the plan needs");
        let State { streams, memory, .. } = &mut *state;
        streams.finish(memory);
        // Trying algorithms leaves something there.
        memory.write(at.arena, &vec![0xff; plan.arena_bytes]);
        let weights_bytes = memory.mapped_from(at.weights);
        let id = state.next_id();
        state.prepared.insert(id, Ready { plan: Arc::clone(plan), at, weights_bytes });
        Ok(Prepared(id))
    }

    fn forget(&self, prepared: Prepared) {
        let mut state = self.enter("forget", Manner::Other);
        let is_used = state.is_used(&Use::Prepared(prepared.0));
        assert!(!is_used, "a prepared plan is given back when nothing runs that uses it");
        let uses_it = |work: &Work| matches!(work, Work::Run { prepared: id, .. } if *id == prepared.0);
        assert!(!state.graphs.values().flatten().any(uses_it), "a prepared plan is given back after its graphs");
        assert!(state.prepared.remove(&prepared.0).is_some(), "a prepared plan is given back once");
    }

    fn enqueue(&self, prepared: Prepared) -> Result<(), DriverError> {
        let mut state = self.try_enter("enqueue", Manner::Captured(Stream::Execute))?;
        let Ready { plan, at, weights_bytes } = state.prepared.get(&prepared.0).expect("plans are prepared").clone();
        state.put(Stream::Execute, Work::Run { prepared: prepared.0, plan, at, weights_bytes });
        Ok(())
    }

    fn begin_capture(&self) -> Result<(), DriverError> {
        let mut state = self.try_enter("begin_capture", Manner::Put(Stream::Execute))?;
        state.capture = Some((thread::current().id(), Vec::new()));
        Ok(())
    }

    fn end_capture(&self) -> Result<Graph, DriverError> {
        let mut state = self.enter("end_capture", Manner::Captured(Stream::Execute));
        let (_, captured) = state.capture.take().expect("a capture ends after it has begun");
        state.fail_if_told("end_capture")?;
        let id = state.next_id();
        state.graphs.insert(id, captured);
        Ok(Graph(id))
    }

    fn launch(&self, graph: Graph) -> Result<(), DriverError> {
        let mut state = self.try_enter("launch", Manner::Put(Stream::Execute))?;
        let captured = state.graphs.get(&graph.0).expect("graphs are launched until they are given back").clone();
        for work in captured {
            state.check_mapped(&work);
            state.streams.put(Stream::Execute, work, Some(Use::Graph(graph.0)));
        }
        Ok(())
    }

    fn destroy_graph(&self, graph: Graph) {
        let mut state = self.enter("destroy_graph", Manner::Other);
        let is_used = state.is_used(&Use::Graph(graph.0));
        assert!(!is_used, "a graph is given back when it does not run");
        assert!(state.graphs.remove(&graph.0).is_some(), "a graph is given back once");
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let (leaks, is_broken) = (self.leaks(), self.state().is_broken);
        // A broken GPU's memory cannot be given back.
        assert!(leaks.is_empty() || is_broken || thread::panicking(), "not given back: {}", leaks.join(", "));
    }
}
