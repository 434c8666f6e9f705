//! Step 8 in another process: a program that speaks docs/process.md over a socket, with tensors in shared memory. Each
//! GPU that hosts the model has a process of its own, with a thread that starts it, watches over it and starts it
//! again.
//!
//! The shared memory is a file that is read and written here and never mapped: whatever the program does with it, it
//! cannot be torn away under a batch, and what was copied out of it does not change any more.
//!
//! Nothing that a program says is believed. One that breaks the protocol is killed, and fails the batch that it had.
//! The thread of a GPU waits for nothing else than the answer; if that does not come, the watchdog has the program
//! killed.
//!
//! Metrics that a program has of its own ([`metrics`]) belong to its model, whichever of its processes counts.
//!
//! A program that calls other models ([`calls`]) does so on a lane of its own: no GPU's turn passes while it waits.
#![allow(clippy::disallowed_methods)] // It drives processes.

mod ask;
mod calls;
mod keeper;
mod launcher;
mod layout;
mod metrics;
#[allow(unsafe_code)]
mod namespaces;
mod output;
mod package;
mod records;

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    net::Shutdown,
    os::unix::{fs::FileExt as _, net::UnixStream},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use proto::{
    LatencyProfile,
    backend_to_program::{Batch, Breach, FromProgram, Lines, ToProgram, line},
};
use repository::{Model, Program};

use crate::{
    calls::{Callee, Waits},
    error::{ExecutorError, TaskError},
    executor::Executor,
};
use calls::{Caller, Calls};
use keeper::Keeper;
pub(crate) use launcher::THIS_BINARY;
pub use launcher::launch_if_asked;
use layout::Layout;
pub use metrics::Metrics;
use metrics::OfModel;
pub(super) use output::printable;

/// The longest reason that is taken from a program.
const REASON_BYTES_MAX: usize = 1_000;
/// Bytes that are read of a socket at once.
const READ_BYTES: usize = 16_384;
/// Processes of a model end in this time when their backend does.
const END_TIMEOUT: Duration = Duration::from_secs(6);

/// What all programs of a backend have in common.
#[derive(Debug, Clone)]
pub struct Programs {
    launcher: String,
    census: Arc<Census>,
    /// Whom they may ask, if anybody, and who waits for whom.
    callee: Option<Arc<dyn Callee>>,
    waits: Waits,
    metrics: Metrics,
}

/// How many keepers there are.
#[derive(Debug, Default)]
struct Census {
    keepers: Mutex<usize>,
    changed: Condvar,
}

impl Default for Programs {
    fn default() -> Self {
        Self::launched_by(launcher::THIS_BINARY)
    }
}

impl Programs {
    /// Started by another binary, which must call [`launch_if_asked`], as that of a test cannot.
    #[must_use]
    pub fn launched_by(launcher: &str) -> Self {
        let (launcher, waits, metrics) = (launcher.to_owned(), Waits::default(), Metrics::default());
        Self { launcher, census: Arc::default(), callee: None, waits, metrics }
    }

    /// The same, which may ask other models by `callee`.
    #[must_use]
    pub fn asking(self, callee: Arc<dyn Callee>) -> Self {
        Self { callee: Some(callee), ..self }
    }

    /// The same, whose own metrics are kept in `metrics`.
    #[must_use]
    pub fn counting(self, metrics: Metrics) -> Self {
        Self { metrics, ..self }
    }

    /// Models are about to come that ask others.
    pub(crate) fn prepare_to_ask(&self) {
        self.callee.iter().for_each(|callee| callee.prepare());
    }

    /// Waits until all programs have ended whose executors are dropped, for some seconds at most: each may finish what
    /// it has. Those that are left end with this process.
    pub fn wait_until_ended(&self) {
        let keepers = self.census.keepers.lock().unwrap_or_else(PoisonError::into_inner);
        let left = self.census.changed.wait_timeout_while(keepers, END_TIMEOUT, |keepers| *keepers > 0);
        drop(left);
    }

    fn change(&self, by: isize) {
        let mut keepers = self.census.keepers.lock().unwrap_or_else(PoisonError::into_inner);
        *keepers = keepers.saturating_add_signed(by);
        self.census.changed.notify_all();
    }
}

/// A model that programs run.
pub struct Process {
    layout: Arc<Layout>,
    caller: Caller,
    metrics: Arc<OfModel>,
    instances: Vec<Arc<Instance>>,
    /// Tells which of several batches began first.
    batches: AtomicU64,
}

/// One process of a model, between the threads that use it and the one that keeps it.
#[derive(Debug)]
struct Instance {
    state: Mutex<State>,
    /// Of the keeper, which reads the other end: a byte says that the state has changed.
    waker: UnixStream,
}

#[derive(Debug, Default)]
struct State {
    /// To a process that can run a batch.
    connection: Option<Arc<Connection>>,
    /// A batch is there.
    busy: Option<Busy>,
    /// Why the keeper is to end the process.
    broken: Option<Trouble>,
    /// Why there is none.
    down: String,
    /// The model is not wanted any more.
    is_over: bool,
}

/// A batch that a process has.
#[derive(Debug, Clone, Copy)]
struct Busy {
    number: u64,
    /// The GPU that it is for; `None` if it does not matter.
    gpu: Option<usize>,
}

/// The way to a process that is ready.
#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    memory: File,
    talk: Mutex<Talk>,
}

/// What of the words between them is incomplete.
#[derive(Debug, Default)]
struct Talk {
    heard: Lines,
    /// The program is to be told this before anything else: answers to calls that it did not wait for.
    untold: Vec<u8>,
}

/// Why a batch was not run.
#[derive(Debug)]
enum Trouble {
    /// The program says so, and can go on.
    Failed(String),
    /// The process is to be killed.
    Broken(String),
    /// The process has ended.
    Ended,
}

impl From<Breach> for Trouble {
    fn from(Breach(reason): Breach) -> Self {
        Self::Broken(reason)
    }
}

impl Instance {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the keeper look at the state.
    fn wake(&self) {
        // If it is full of wakes, one more is not needed.
        let _ = (&self.waker).write(&[0]);
    }

    /// Has the process at the end of `connection` killed, unless it is another one already.
    fn break_off(&self, state: &mut State, connection: &Arc<Connection>, trouble: Trouble) {
        // Whoever waits for an answer has one now, even if something else holds the other end open.
        let _ = connection.stream.shutdown(Shutdown::Both);
        if state.connection.take_if(|present| Arc::ptr_eq(present, connection)).is_some() {
            state.down = "its program is being started again".to_owned();
            state.broken = Some(trouble);
            self.wake();
        }
    }
}

impl Process {
    /// Starts so many processes of `program` for `model`, and waits until they are ready. They may ask other models if
    /// they run on lanes of their own, which `has_lanes` says.
    ///
    /// # Errors
    /// If one of them cannot be started, says that it cannot load the model, or is not ready in time.
    pub fn load(
        model: &Model,
        program: &Program,
        (processes, has_lanes): (usize, bool),
        programs: &Programs,
    ) -> Result<Self, ExecutorError> {
        let refused = |cause: String| ExecutorError(format!("model {}: {cause}", model.name));
        let layout = Arc::new(Layout::new(model));
        let (bytes, bytes_max) = (layout.memory_bytes(), program.limits.memory_bytes);
        if bytes > bytes_max {
            let found =
                format!("tensors of {} tasks take {bytes} bytes, its program may use {bytes_max}", model.max_batch);
            return Err(refused(format!("{found}; lower max_batch_size, max_dims or max_bytes, or raise memory_mb")));
        }
        // Dropped with what it has if one of them fails.
        let callee = match &programs.callee {
            Some(callee) if has_lanes => Ok(Arc::clone(callee)),
            Some(_) if program.calls => Err("this backend has no lane for it: raise `lanes`".to_owned()),
            Some(_) => Err("it runs in a GPU's turn: say so by parameters: calls \"true\"".to_owned()),
            None => Err("there is nobody to ask".to_owned()),
        };
        let caller = Caller::new(model, &programs.waits, callee);
        let (instances, batches) = (Vec::new(), AtomicU64::new(0));
        let metrics = Arc::new(programs.metrics.of_model());
        let layout_of_process = Arc::clone(&layout);
        let mut process = Self { layout: layout_of_process, caller, metrics: Arc::clone(&metrics), instances, batches };
        let mut starting = Vec::new();
        for _ in 0..processes.max(1) {
            let keeper = Keeper::start(model, program, (&layout, &metrics), programs);
            let (instance, started) = keeper.map_err(|error| refused(format!("its program: {error}")))?;
            process.instances.push(instance);
            starting.push(started);
        }
        for started in starting {
            started.recv().unwrap_or_else(|_| Err("its keeper panicked".to_owned())).map_err(refused)?;
        }
        Ok(process)
    }

    /// Takes a process that is idle, for this batch.
    fn take(&self, batch: Busy) -> Result<(&Instance, Arc<Connection>), ExecutorError> {
        let mut reason = "its processes are busy: it is hosted by more GPUs than it has processes".to_owned();
        for instance in &self.instances {
            let mut state = instance.state();
            match &state.connection {
                Some(connection) if state.busy.is_none() => {
                    let connection = Arc::clone(connection);
                    state.busy = Some(batch);
                    return Ok((instance, connection));
                }
                Some(_) => {}
                None => reason.clone_from(&state.down),
            }
        }
        Err(ExecutorError(reason))
    }

    fn execute_for(
        &self,
        gpu: Option<usize>,
        inputs: &[u8],
        outputs: &mut [u8],
    ) -> Result<Vec<TaskError>, ExecutorError> {
        let number = self.batches.fetch_add(1, Ordering::Relaxed);
        let (instance, connection) = self.take(Busy { number, gpu })?;
        // Those that it would ask may be loaded behind it.
        let tried = gpu.is_none().then(|| self.caller.without("it is only tried"));
        let caller = tried.as_ref().unwrap_or(&self.caller);
        let result = connection.run((&self.layout, caller, &self.metrics), number, inputs, outputs);
        let mut state = instance.state();
        state.busy = None;
        match result {
            Ok(failed) => {
                let failed = failed.into_iter().map(|(task, reason)| TaskError { task, reason });
                Ok(failed.collect())
            }
            Err(Trouble::Failed(reason)) => Err(ExecutorError(reason)),
            Err(trouble) => {
                let reason = match &trouble {
                    Trouble::Broken(reason) => reason,
                    _ => "it ended",
                };
                let error = ExecutorError(format!("the program of the model failed: {reason}"));
                instance.break_off(&mut state, &connection, trouble);
                Err(error)
            }
        }
    }
}

impl Executor for Process {
    /// Each GPU has one of its processes.
    fn runs_beside(&self) -> bool {
        false
    }

    fn execute(&self, inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> {
        self.execute_for(None, inputs, outputs)
    }

    fn execute_on(&self, gpu: usize, inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> {
        self.execute_for(Some(gpu), inputs, outputs)
    }

    fn emulated_profile(&self) -> Option<&LatencyProfile> {
        None
    }

    fn interrupt(&self, gpu: usize) {
        let of_gpu = |instance: &Arc<Instance>| {
            let busy = instance.state().busy.filter(|batch| batch.gpu == Some(gpu))?;
            Some((busy.number, Arc::clone(instance)))
        };
        let Some((_, longest)) = self.instances.iter().filter_map(of_gpu).min_by_key(|(number, _)| *number) else {
            return;
        };
        let mut state = longest.state();
        if let Some(connection) = state.connection.clone() {
            let trouble = Trouble::Broken("it did not answer in time, and was killed".to_owned());
            longest.break_off(&mut state, &connection, trouble);
        }
    }

    fn is_up(&self) -> bool {
        self.instances.iter().any(|instance| instance.state().connection.is_some())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        for instance in &self.instances {
            instance.state().is_over = true;
            instance.wake();
        }
    }
}

impl Connection {
    /// One batch: its inputs go into the memory, the program is told, and its outputs come out of there. Yields the
    /// tasks that have none, and why.
    fn run(
        &self,
        (layout, caller, metrics): (&Layout, &Caller, &OfModel),
        id: u64,
        inputs: &[u8],
        outputs: &mut [u8],
    ) -> Result<Vec<(usize, String)>, Trouble> {
        let mut talk = self.talk.lock().unwrap_or_else(PoisonError::into_inner);
        if !talk.heard.is_empty() {
            return Err(Trouble::Broken("it wrote more than an answer".to_owned()));
        }
        let placement = layout.place(inputs, |offset, bytes| self.memory.write_all_at(bytes, offset));
        let mut placement = placement.map_err(failed)?;
        if placement.groups.is_empty() {
            return Ok(placement.refused);
        }
        let batch = Batch { id, groups: std::mem::take(&mut placement.groups) };
        let mut told = std::mem::take(&mut talk.untold);
        told.extend(line(&ToProgram::Batch(batch)));
        (&self.stream).write_all(&told).map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => Trouble::Ended,
            _ => failed(error),
        })?;
        match talk.hear_answer(&self.stream, (caller, metrics))? {
            FromProgram::Done { id: answered, mut groups } if answered == id => {
                // They are told for each task, so they are short before.
                let reasons = groups.iter_mut().filter_map(|group| group.failed.as_mut());
                reasons.for_each(|reason| *reason = excerpt(reason));
                layout.take(placement, &groups, outputs, |offset, bytes| {
                    self.memory.read_exact_at(bytes, offset).map_err(failed)
                })
            }
            FromProgram::Failed { id: answered, reason } if answered == id => Err(Trouble::Failed(excerpt(&reason))),
            FromProgram::Done { id: other, .. } | FromProgram::Failed { id: other, .. } => {
                Err(Trouble::Broken(format!("it answered batch {other}, expected {id}")))
            }
            FromProgram::Ready { .. }
            | FromProgram::Refused(_)
            | FromProgram::Config(_)
            | FromProgram::Call(_)
            | FromProgram::Metrics(_) => {
                Err(Trouble::Broken("it said that it has started, expected an answer".to_owned()))
            }
        }
    }
}

impl Talk {
    /// What the program says next that is neither a call nor about metrics. Both are answered meanwhile.
    fn hear_answer(
        &mut self,
        stream: &UnixStream,
        (caller, metrics): (&Caller, &OfModel),
    ) -> Result<FromProgram, Trouble> {
        let mut calls = Calls::of(caller);
        loop {
            match calls.awaits() {
                Some(bytes) => {
                    if let Some(bytes) = self.heard.poll_bytes(bytes) {
                        calls.handle_bytes(bytes).map_err(failed)?;
                        continue;
                    }
                }
                None => {
                    if let Some(line) = self.heard.poll()? {
                        match FromProgram::parse(&line)? {
                            FromProgram::Call(call) => calls.handle_call(call)?,
                            FromProgram::Metrics(said) => {
                                metrics.handle(&said).map_or(Ok(()), |told| calls.tell(&told))?;
                            }
                            said => {
                                self.untold = calls.end();
                                return Ok(said);
                            }
                        }
                        continue;
                    }
                }
            }
            if calls.is_idle() || calls.wait(stream).map_err(failed)? {
                self.hear(stream)?;
            }
        }
    }

    /// Waits for what the program says, and takes it in.
    fn hear(&mut self, mut stream: &UnixStream) -> Result<(), Trouble> {
        let mut bytes = [0; READ_BYTES];
        match stream.read(&mut bytes) {
            Ok(0) => Err(Trouble::Ended),
            Ok(read) => {
                self.heard.handle_bytes(&bytes[..read]);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Err(Trouble::Ended),
            Err(error) => Err(Trouble::Broken(format!("it cannot be heard: {error}"))),
        }
    }
}

fn failed(error: io::Error) -> Trouble {
    Trouble::Broken(format!("the way to it failed: {error}"))
}

/// What a program gives as a reason, in one line that is not too long.
fn excerpt(reason: &str) -> String {
    let end = reason.floor_char_boundary(REASON_BYTES_MAX);
    printable(&reason[..end])
}

#[cfg(test)]
mod tests;
