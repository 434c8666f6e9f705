//! The thread that keeps one process of a model: starts it, hears what it has to say, ends it when it is not wanted or
//! not to be trusted any more, and starts it again, later each time until it has lived for a while.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    net::Shutdown,
    os::{
        fd::OwnedFd,
        unix::{
            net::UnixStream,
            process::{CommandExt as _, ExitStatusExt as _},
        },
    },
    process::{Child, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread::Builder,
};

use crossbeam_channel::{Receiver, Sender};
use proto::{
    Span, Timestamp,
    backend_to_program::{FromProgram, LINE_BYTES_MAX, Lines, ModelTold, PROTOCOL, TensorTold, ToProgram, line},
    backoff::Backoff,
};
use repository::{Launch, Model, Program, Tensor};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_setfl, ftruncate, memfd_create},
    pipe::{PipeFlags, pipe_with},
    process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open},
};
use transport::Clock;

use super::{
    Connection, Instance, Layout, OfModel, Programs, State, Talk, Trouble, excerpt, launcher::Order, layout::bytes_max,
    output::Output,
};

/// The first wait until a process is started again; each doubles it.
const RESTART_MIN: Span = Span::from_millis(100);
/// The longest wait.
const RESTART_MAX: Span = Span::from_millis(30_000);
/// One that has lived so long waits as if it had never ended before.
const LIVED: Span = Span::from_millis(10_000);
/// How long a process may take to end by itself.
const END_SPAN: Span = Span::from_millis(5_000);
/// How often it is looked after output that has to wait.
const LOOK: Span = Span::from_millis(100);
/// Bytes of output that are read at once.
const READ_BYTES: usize = 16_384;

pub(super) struct Keeper {
    clock: Clock,
    model: String,
    order: Order,
    launcher: String,
    /// What each process is told first.
    told: Vec<u8>,
    start: Span,
    memory_bytes: u64,
    metrics: Arc<OfModel>,
    instance: Arc<Instance>,
    wakes: UnixStream,
}

/// One life of a process.
struct Life {
    child: Child,
    /// Tells when it ends.
    end: OwnedFd,
    stream: UnixStream,
    memory: Option<File>,
    log: Option<File>,
    output: Output,
    heard: Lines,
    /// What is left of what it is told first.
    untold: Vec<u8>,
    phase: Phase,
    reason: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// It is to say that it is ready by then.
    Starts(Timestamp),
    /// It runs batches.
    Serves,
    /// It was told to end, and is killed then.
    Ends(Timestamp),
}

/// How the first start went.
type Started = Result<(), String>;

impl Keeper {
    /// Of `program`, whose paths are absolute and which is told so much first. It starts nothing yet.
    pub(super) fn new(
        model: &str,
        program: &Program,
        told: &ToProgram,
        (memory_bytes, metrics): (u64, &Arc<OfModel>),
        programs: &Programs,
    ) -> io::Result<Self> {
        let (waker, wakes) = UnixStream::pair()?;
        waker.set_nonblocking(true)?;
        wakes.set_nonblocking(true)?;
        let state = Mutex::new(State { down: "its program is being started".to_owned(), ..State::default() });
        Ok(Self {
            clock: Clock::start(),
            model: model.to_owned(),
            order: Order::new(program),
            launcher: programs.launcher.clone(),
            told: line(told),
            start: program.limits.start,
            memory_bytes,
            metrics: Arc::clone(metrics),
            instance: Arc::new(Instance { state, waker }),
            wakes,
        })
    }

    /// Starts the thread and its first process. The receiver tells how that went.
    pub(super) fn start(
        model: &Model,
        program: &Program,
        (layout, metrics): (&Layout, &Arc<OfModel>),
        programs: &Programs,
    ) -> io::Result<(Arc<Instance>, Receiver<Started>)> {
        let program = absolute(program)?;
        let told = ToProgram::Model(Box::new(told(model, &program, layout)));
        let keeper = Self::new(&model.name, &program, &told, (layout.memory_bytes(), metrics), programs)?;
        let instance = Arc::clone(&keeper.instance);
        let (tell, started) = crossbeam_channel::bounded(1);
        let programs = programs.clone();
        programs.change(1);
        let thread = Builder::new().name("program".to_owned()).spawn({
            let programs = programs.clone();
            move || {
                keeper.run(&tell);
                programs.change(-1);
            }
        });
        if let Err(error) = thread {
            programs.change(-1);
            return Err(error);
        }
        Ok((instance, started))
    }

    fn run(mut self, started: &Sender<Started>) {
        let mut backoff = Backoff::new(RESTART_MIN, RESTART_MAX);
        let mut is_first = true;
        loop {
            let began_at = self.clock.now();
            let (reason, was_ready) = match self.spawn() {
                Ok(life) => self.live(life, started),
                Err(error) => (format!("it cannot be started: {error}"), false),
            };
            if self.instance.state().is_over {
                tracing::info!(model = self.model, "the program has ended: {reason}");
                return;
            }
            if is_first && !was_ready {
                let _ = started.send(Err(format!("its program: {reason}")));
                return;
            }
            is_first = false;
            let now = self.clock.now();
            if now - began_at >= LIVED {
                backoff.handle_success();
            }
            let again_at = backoff.handle_failure(now);
            self.instance.state().down = format!("its program is started again: {reason}");
            tracing::warn!(model = self.model, "the program is started again in {}: {reason}", again_at - now);
            if self.sleep_until(again_at) {
                return;
            }
        }
    }

    /// Whether the model is not wanted any more.
    fn sleep_until(&mut self, at: Timestamp) -> bool {
        loop {
            let now = self.clock.now();
            if self.instance.state().is_over || now >= at {
                return self.instance.state().is_over;
            }
            let _ = wait(&mut [PollFd::new(&self.wakes, PollFlags::IN)], at - now);
            self.drain_wakes();
        }
    }

    fn drain_wakes(&mut self) {
        let mut bytes = [0; 64];
        while matches!(self.wakes.read(&mut bytes), Ok(1..)) {}
    }

    fn spawn(&self) -> io::Result<Life> {
        let memory = memfd_create("downbeat-tensors", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&memory, self.memory_bytes)?;
        // Whatever the program does, the memory is there, and is no larger.
        fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let (stream, theirs) = UnixStream::pair()?;
        let (log, log_of_program) = pipe_with(PipeFlags::CLOEXEC)?;
        fcntl_setfl(&log, rustix::fs::OFlags::NONBLOCK)?;
        let mut command = self.order.command(&self.launcher);
        command.stdin(OwnedFd::from(theirs)).stdout(memory.try_clone()?).stderr(Stdio::from(log_of_program));
        // All that stays in this group can be killed at once. A group is no reason for the standard library to fork.
        let child = command.process_group(0).spawn()?;
        let end = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
        stream.set_nonblocking(true)?;
        Ok(Life {
            child,
            end,
            stream,
            memory: Some(memory.into()),
            log: Some(log.into()),
            output: Output::default(),
            heard: Lines::default(),
            untold: self.told.clone(),
            phase: Phase::Starts(self.clock.now() + self.start),
            reason: None,
        })
    }

    /// Until the process is gone. Yields why it ended, and whether it was ready before.
    fn live(&mut self, mut life: Life, started: &Sender<Started>) -> (String, bool) {
        let mut was_ready = false;
        match self.hear_first(&mut life) {
            Some(FromProgram::Ready { protocol: PROTOCOL }) if self.hand_over(&mut life) => {
                was_ready = true;
                let _ = started.send(Ok(()));
            }
            Some(FromProgram::Ready { protocol: PROTOCOL }) | None => {}
            Some(other) => life.reason = Some(unready(other)),
        }
        while self.turn(&mut life).is_some_and(|ready| !ready.has_ended) {}
        let broken = {
            let state = &mut *self.instance.state();
            state.connection = None;
            state.broken.take()
        };
        (life.end(self.clock.now(), &self.model, broken), was_ready)
    }

    /// Starts a process, hears the first that it says, and ends it; or why it said nothing.
    pub(super) fn ask(mut self) -> Result<FromProgram, String> {
        let mut life = self.spawn().map_err(|error| format!("it cannot be started: {error}"))?;
        let said = self.hear_first(&mut life);
        let reason = life.end(self.clock.now(), &self.model, None);
        said.ok_or(reason)
    }

    /// The first that the process says besides what its metrics are; nothing if it ends before, or has said what it
    /// cannot say.
    fn hear_first(&mut self, life: &mut Life) -> Option<FromProgram> {
        while let Some(ready) = self.turn(life) {
            // One that has ended may have said something before.
            if ready.may_talk || ready.has_ended {
                match self.hear(life) {
                    Ok(None) => {}
                    Ok(said) => return said,
                    Err(reason) => life.reason = Some(reason),
                }
            }
            if ready.has_ended {
                break;
            }
        }
        None
    }

    /// What the process has said besides what its metrics are.
    fn hear(&self, life: &mut Life) -> Result<Option<FromProgram>, String> {
        loop {
            match life.talk(self.clock.now())? {
                Some(FromProgram::Metrics(_)) if life.untold.len() > LINE_BYTES_MAX => {
                    return Err("it asks and does not read what it is answered".to_owned());
                }
                Some(FromProgram::Metrics(said)) => life.untold.extend(self.metrics.handle(&said).unwrap_or_default()),
                said => return Ok(said),
            }
        }
    }

    /// Waits until something happens; `None` if the process is to be killed.
    fn turn(&mut self, life: &mut Life) -> Option<Ready> {
        let wait_for = self.next_wait(life)?;
        let ready = self.wait_for(life, wait_for);
        life.drain_log(self.clock.now(), &self.model);
        self.drain_wakes();
        Some(ready)
    }

    /// How long to wait for anything that happens; `None` if the process is to be killed.
    fn next_wait(&self, life: &mut Life) -> Option<Span> {
        let now = self.clock.now();
        let mut state = self.instance.state();
        if life.reason.is_some() || state.broken.is_some() {
            return None;
        }
        if state.is_over && !matches!(life.phase, Phase::Ends(_)) {
            state.connection = None;
            // The end of what it reads is the program's sign to end.
            let _ = life.stream.shutdown(Shutdown::Both);
            life.phase = Phase::Ends(now + END_SPAN);
        }
        let until = match life.phase {
            Phase::Starts(by) if by <= now => {
                life.reason = Some(format!("it was not ready within {} (parameter start_timeout_ms)", self.start));
                return None;
            }
            Phase::Ends(by) if by <= now => {
                life.reason = Some(format!("it did not end within {END_SPAN}, and was killed"));
                return None;
            }
            Phase::Starts(by) | Phase::Ends(by) => by - now,
            Phase::Serves => Span::from_millis(60_000),
        };
        Some(if life.log.is_some() && life.output.wants_bytes(now) == 0 { until.min(LOOK) } else { until })
    }

    fn wait_for(&self, life: &mut Life, most: Span) -> Ready {
        let now = self.clock.now();
        let mut events = vec![PollFd::new(&self.wakes, PollFlags::IN), PollFd::new(&life.end, PollFlags::IN)];
        let talk = match life.phase {
            Phase::Starts(_) if life.untold.is_empty() => PollFlags::IN,
            Phase::Starts(_) => PollFlags::IN | PollFlags::OUT,
            _ => PollFlags::empty(),
        };
        if !talk.is_empty() {
            events.push(PollFd::new(&life.stream, talk));
        }
        if let Some(log) = life.log.as_ref().filter(|_| life.output.wants_bytes(now) > 0) {
            events.push(PollFd::new(log, PollFlags::IN));
        }
        let _ = wait(&mut events, most);
        let is_ready = |at: usize| events.get(at).is_some_and(|event| !event.revents().is_empty());
        Ready { has_ended: is_ready(1), may_talk: !talk.is_empty() && is_ready(2) }
    }

    /// The process is ready: batches may come. False if nobody wants it any more.
    fn hand_over(&self, life: &mut Life) -> bool {
        let stream = life.stream.try_clone().and_then(|stream| stream.set_nonblocking(false).map(|()| stream));
        let (Ok(stream), Some(memory)) = (stream, life.memory.take()) else {
            life.reason = Some("its socket cannot be used twice".to_owned());
            return false;
        };
        let talk =
            Mutex::new(Talk { heard: std::mem::take(&mut life.heard), untold: std::mem::take(&mut life.untold) });
        life.phase = Phase::Serves;
        let mut state = self.instance.state();
        state.connection = Some(Arc::new(Connection { stream, memory, talk }));
        !state.is_over
    }
}

/// What has happened.
struct Ready {
    has_ended: bool,
    may_talk: bool,
}

impl Life {
    /// Tells it what it is to know, and hears what it says to that.
    fn talk(&mut self, now: Timestamp) -> Result<Option<FromProgram>, String> {
        if !self.untold.is_empty() {
            match self.stream.write(&self.untold) {
                Ok(written) => drop(self.untold.drain(..written)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Why it is gone shows when it has ended.
                Err(_) => self.untold.clear(),
            }
        }
        let mut bytes = [0; READ_BYTES];
        loop {
            if let Some(line) = self.heard.poll().map_err(|breach| breach.0)? {
                return FromProgram::parse(&line).map(Some).map_err(|breach| breach.0);
            }
            match self.stream.read(&mut bytes) {
                Ok(read @ 1..) => self.heard.handle_bytes(&bytes[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                // A reset says that it has not read what it was told.
                Err(error) if error.kind() != io::ErrorKind::ConnectionReset => {
                    return Err(format!("it cannot be heard: {error}"));
                }
                Ok(_) | Err(_) => {
                    // It has ended, and soon it shows how, or it has closed its socket.
                    self.phase = Phase::Ends(now + END_SPAN);
                    return Ok(None);
                }
            }
        }
    }

    fn drain_log(&mut self, now: Timestamp, model: &str) {
        let mut bytes = [0; READ_BYTES];
        while let Some(log) = &mut self.log {
            let wanted = self.output.wants_bytes(now).min(READ_BYTES);
            if wanted == 0 {
                break;
            }
            match log.read(&mut bytes[..wanted]) {
                Ok(0) => self.log = None,
                Ok(read) => self.output.handle_bytes(now, &bytes[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        self.tell(model);
    }

    fn tell(&mut self, model: &str) {
        while let Some(line) = self.output.poll_line() {
            tracing::info!(target: "program", model, "{line}");
        }
    }

    /// Kills what is left of it, and says how it ended.
    fn end(mut self, now: Timestamp, model: &str, broken: Option<Trouble>) -> String {
        let cause = match broken {
            Some(Trouble::Failed(reason) | Trouble::Broken(reason)) => Some(reason),
            Some(Trouble::Ended) | None => self.reason.take(),
        };
        if cause.is_none() {
            // Its socket ends a moment before itself.
            let _ = wait(&mut [PollFd::new(&self.end, PollFlags::IN)], LOOK);
        }
        // Before it is waited for: nobody else can have its number until then.
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let status = self.child.wait();
        self.drain_log(now, model);
        self.output.handle_end(now);
        self.tell(model);
        let ended = status.as_ref().map_or_else(ToString::to_string, describe);
        match (cause, self.output.last()) {
            (Some(cause), _) => cause,
            (None, "") => format!("it ended with {ended}"),
            (None, last) => format!("it ended with {ended}; its last words: {last}"),
        }
    }
}

/// Why a process that says this first is not to run batches.
fn unready(said: FromProgram) -> String {
    match said {
        FromProgram::Ready { protocol } => format!("it speaks protocol {protocol}, expected {PROTOCOL}"),
        FromProgram::Refused(reason) => excerpt(&reason),
        FromProgram::Done { .. } | FromProgram::Failed { .. } => "it answered a batch that it was not given".to_owned(),
        FromProgram::Call(_) => "it called a model before it was ready".to_owned(),
        FromProgram::Metrics(_) => "it has metrics, expected that it is ready".to_owned(),
        FromProgram::Config(_) => "it completed a configuration, expected that it is ready".to_owned(),
    }
}

/// What a launcher passes on as a shell does.
fn describe(status: &ExitStatus) -> String {
    match status.code() {
        Some(code @ 129..=192) => format!("signal {}", code - 128),
        Some(code) => format!("exit code {code}"),
        None => format!("signal {}", status.signal().unwrap_or_default()),
    }
}

fn wait(events: &mut [PollFd<'_>], most: Span) -> io::Result<usize> {
    let most = most.max(Span(1));
    let timeout = Timespec { tv_sec: most.0 / 1_000_000_000, tv_nsec: most.0 % 1_000_000_000 };
    Ok(poll(events, Some(&timeout))?)
}

/// Its folder is where it runs, so its paths must lead to it from there.
pub(super) fn absolute(program: &Program) -> io::Result<Program> {
    let folder = program.folder.canonicalize()?;
    let launch = match &program.launch {
        Launch::Python { interpreter, file } => {
            Launch::Python { interpreter: interpreter.clone(), file: file.canonicalize()? }
        }
        Launch::Program(words) => {
            let mut words = words.clone();
            if words[0].contains('/') {
                words[0] = std::path::absolute(&words[0])?.display().to_string();
            }
            Launch::Program(words)
        }
    };
    Ok(Program { launch, folder, ..program.clone() })
}

/// What a program is told of its model.
fn told(model: &Model, program: &Program, layout: &Layout) -> ModelTold {
    let tensor = |tensor: &Tensor| TensorTold {
        name: tensor.name.clone(),
        datatype: tensor.datatype.name().to_owned(),
        shape: model_dims(tensor),
        optional: tensor.is_optional(),
        bytes_max: bytes_max(tensor) as u64,
    };
    ModelTold {
        protocol: PROTOCOL,
        name: model.name.clone(),
        version: model.version.clone(),
        folder: program.folder.display().to_string(),
        file: program.file().display().to_string(),
        max_batch: model.max_batch,
        is_batched: model.is_batched,
        inputs: model.inputs.iter().map(tensor).collect(),
        outputs: model.outputs.iter().map(tensor).collect(),
        memory_bytes: layout.memory_bytes(),
        output_area: layout.output_area,
        config: serde_json::to_value(&model.configuration).unwrap_or_default(),
    }
}

/// A tensor's shape for the model, with -1 for what requests choose.
fn model_dims(tensor: &Tensor) -> Vec<i64> {
    let mut dims: Vec<i64> = tensor.model_shape().iter().map(|&length| length as i64).collect();
    tensor.model_variable_dims().iter().for_each(|&dim| dims[dim] = -1);
    dims
}
