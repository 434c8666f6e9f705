//! An ONNX file is tried once in a process of its own before a backend loads it: engines are libraries, and there are
//! files that end them. The process is this same binary, started anew and bounded in time and memory; it reads the
//! model, loads it and runs it once. If it ends in any other way than by saying what came of that, the file is refused
//! by name, and nothing else has noticed.
//!
//! That a file could be tried is remembered ([`Note`]), so that the next start does not try it again. GPUs of our own
//! are not tried: their plans hold no code but ours.
#![allow(clippy::disallowed_methods)] // Processes, threads and their time.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    num::NonZero,
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, ExitStatus, Stdio},
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, available_parallelism},
    time::{Duration, Instant},
};

use repository::{Model, Precision, Processor, Source};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Resource, Rlimit, Signal, getppid, set_parent_process_death_signal, setrlimit},
};
use serde::{Deserialize, Serialize};
use transport::{Clock, Memory};

use super::{
    profile,
    remembered::{Note, Of},
    turns::{Trials, Turns},
};
use crate::{
    config::{Config, GpuName, Gpus, OnnxRuntime, Placed},
    error::ExecutorError,
    executor::{self, Programs, process::THIS_BINARY},
};

/// The word that makes this binary try a model.
const WORD: &str = "try-model";
/// What a file may take on each core, whatever its size; what loops takes all of it.
const SPAN: Duration = Duration::from_secs(30);
/// How many times as long that may last on a host that has others to run; what waits for ever takes all of it.
const BUSY: u32 = 4;
/// A slow disk's, beyond that.
const BYTES_PER_SECOND: u64 = 50_000_000;
/// Files that are tried at once.
const AT_ONCE_MAX: usize = 2;
/// What the process says: a reason is shorter.
const ANSWER_BYTES_MAX: usize = 1 << 16;

/// Whether this binary is one that tries models: that of a test is not.
static CAN_TRY: AtomicBool = AtomicBool::new(false);

/// Where a model's configuration is from: the folder that has its own in it, and what takes the place of its
/// `config.pbtxt`, if anything does.
#[derive(Debug, Clone, Copy)]
pub(super) struct Origin<'a> {
    pub(super) root: &'a Path,
    pub(super) config: Option<&'a str>,
}

/// What the process is told, on its stdin.
#[derive(Debug, Serialize, Deserialize)]
struct Order {
    root: PathBuf,
    config: Option<String>,
    name: String,
    version: String,
    processor: Processor,
    precision: Precision,
    onnxruntime: OnnxRuntime,
    gpu: GpuName,
    memory_bytes: Option<u64>,
    /// What all its threads may compute.
    cpu_s: u64,
    /// The backend's process.
    parent: i32,
}

/// What the process says: why the file cannot be loaded, if so.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    refused: Option<String>,
}

/// Tries a model, if this process was started for that: what `main` does first, while there is one thread. Otherwise
/// there is nothing to be done.
#[must_use]
pub fn try_if_asked() -> Option<ExitCode> {
    if std::env::args().nth(1).as_deref() != Some(WORD) {
        CAN_TRY.store(true, Ordering::Relaxed);
        return None;
    }
    let order = io::read_to_string(io::stdin()).ok().and_then(|text| serde_json::from_str::<Order>(&text).ok());
    let Some(order) = order else {
        eprintln!("downbeat: {WORD} is for backends, which try models by it");
        return Some(ExitCode::from(2));
    };
    if let Err(error) = enter(&order) {
        eprintln!("{error}");
        return Some(ExitCode::FAILURE);
    }
    let answer = Answer { refused: try_model(&order).err().map(|error| error.to_string()) };
    let text = serde_json::to_string(&answer).expect("plain data");
    let written = io::stdout().write_all(text.as_bytes());
    Some(if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Bounds this process, and ties it to the backend.
fn enter(order: &Order) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have ended before the line above; then another process has adopted this one.
    if getppid().is_none_or(|found| found.as_raw_nonzero().get() != order.parent) {
        return Err(io::Error::other("the backend is gone"));
    }
    // Where memory runs out, this process is the one to end.
    let _ = fs::write("/proc/self/oom_score_adj", "1000");
    let limit = |resource, most| setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) });
    limit(Resource::Core, 0)?;
    // Not its addresses, of which CUDA reserves far more than it touches.
    order.memory_bytes.map_or(Ok(()), |bytes| limit(Resource::Data, bytes))?;
    limit(Resource::Cpu, order.cpu_s)?;
    Ok(())
}

fn try_model(order: &Order) -> Result<(), ExecutorError> {
    let failed = |error: &dyn std::fmt::Display| ExecutorError(error.to_string());
    let source = Source::repository(&order.root);
    let versions = repository::load_named(&source, &order.name, order.config.as_deref());
    let mut versions = versions.map_err(|error| failed(&error))?.into_iter();
    let model = versions.find(|model| model.version == order.version);
    let mut model = model.ok_or_else(|| failed(&format_args!("model {}: it has changed", order.name)))?;
    if let repository::Executor::Onnx { wanted, .. } = &mut model.executor {
        (wanted.processor, wanted.precision) = (Some(order.processor), Some(order.precision));
    }
    let gpus = Gpus::Named(vec![order.gpu.clone()]);
    let executor = executor::load(&model, (&[0], &gpus), &order.onnxruntime, &Programs::default())?;
    // Whether it can be run at all is told to whoever loads it.
    let (turns, execute) =
        (Turns::default(), &mut |inputs: &[u8], outputs: &mut [u8]| executor.execute(inputs, outputs));
    let mut trials = Trials::new(&turns, Clock::start());
    if let Ok(sample) = profile::sample(&model, execute, &mut trials) {
        drop(execute(&sample, &mut vec![0; model.output_bytes()]));
    }
    Ok(())
}

/// Tries what a backend is to load, a few at once, and yields why some may not be loaded.
pub(super) fn all(config: &Config, models: &[Placed]) -> Vec<Result<(), ExecutorError>> {
    let results: Vec<OnceLock<Result<(), ExecutorError>>> = models.iter().map(|_| OnceLock::new()).collect();
    let (next, origin) = (AtomicUsize::new(0), Origin { root: &config.repository, config: None });
    let work = || {
        while let Some((placed, result)) = models.iter().zip(&results).nth(next.fetch_add(1, Ordering::Relaxed)) {
            result.get_or_init(|| one(config, &placed.model, origin));
        }
    };
    thread::scope(|threads| (0..AT_ONCE_MAX.min(models.len())).for_each(|_| drop(threads.spawn(work))));
    results.into_iter().map(|result| result.into_inner().unwrap_or(Ok(()))).collect()
}

/// Tries a model that is to be loaded, unless that is known to be no risk.
///
/// # Errors
/// If it cannot be loaded, or ends what tries it.
pub(super) fn one(config: &Config, model: &Model, origin: Origin<'_>) -> Result<(), ExecutorError> {
    let repository::Executor::Onnx { file, wanted, .. } = &model.executor else { return Ok(()) };
    let processor = wanted.processor.unwrap_or_default();
    if !CAN_TRY.load(Ordering::Relaxed) || processor == Processor::Cuda {
        return Ok(());
    }
    let mut settings = config.onnxruntime.clone();
    if processor == Processor::Onnxruntime {
        // The same that this process has loaded.
        settings.library = Some(executor::onnxruntime_library(&settings, None)?.path);
    }
    let tried = Note::of_trial(Of { model, file, processor, settings: &settings }, origin.config);
    if tried.as_ref().is_some_and(Note::is_there) {
        return Ok(());
    }
    let bytes = fs::metadata(file).map_or(0, |found| found.len()).max(model.weights.bytes.unwrap_or(0));
    let span = SPAN + Duration::from_secs(bytes / BYTES_PER_SECOND);
    let order = Order {
        root: origin.root.to_owned(),
        config: origin.config.map(str::to_owned),
        name: model.name.clone(),
        version: model.version.clone(),
        processor,
        precision: wanted.precision.unwrap_or_default(),
        onnxruntime: settings,
        gpu: config.gpus.names().into_iter().next().unwrap_or(GpuName::Number(0)),
        memory_bytes: Memory::here().map(|memory| memory.total_bytes),
        cpu_s: span.as_secs() * available_parallelism().map_or(1, NonZero::get) as u64,
        parent: rustix::process::getpid().as_raw_nonzero().get(),
    };
    let engine = if processor == Processor::Onnxruntime { "ONNX Runtime" } else { "the embedded engine" };
    let ended = |how: String| {
        let (name, file) = (&model.name, file.display());
        ExecutorError(format!("model {name}: {file}: {engine} {how} when it tried the file in a process of its own"))
    };
    match ask(&order, span * BUSY).map_err(ended)?.refused {
        Some(reason) => Err(ExecutorError(reason)),
        None => {
            tried.iter().for_each(|tried| tried.write(&()));
            Ok(())
        }
    }
}

/// What the process says.
///
/// # Errors
/// How it ended otherwise.
fn ask(order: &Order, span: Duration) -> Result<Answer, String> {
    let mut command = Command::new(THIS_BINARY);
    command.arg(WORD).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| format!("cannot be started: {error}"))?;
    let said = hear(&mut child, order, Instant::now() + span);
    if said.is_none() {
        // It may have ended by now.
        let _ = child.kill();
    }
    let status = child.wait().map_err(|error| format!("is lost: {error}"))?;
    let said = said.ok_or_else(|| format!("did not end within {} s", span.as_secs()))?;
    serde_json::from_slice(&said).map_err(|_| how(status))
}

/// All that it says, unless that takes too long.
fn hear(child: &mut Child, order: &Order, until: Instant) -> Option<Vec<u8>> {
    let text = serde_json::to_string(order).expect("plain data");
    let (stdin, mut stdout) = (child.stdin.take()?, child.stdout.take()?);
    // A pipe has room for it, and who does not read it says nothing.
    let _ = { stdin }.write_all(text.as_bytes());
    let mut said = Vec::new();
    loop {
        let left = until.checked_duration_since(Instant::now())?;
        let timeout = Timespec::try_from(left).ok()?;
        match poll(&mut [PollFd::new(&stdout, PollFlags::IN)], Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => continue,
            Ok(_) => {}
            Err(_) => return None,
        }
        let mut bytes = [0; 4096];
        match stdout.read(&mut bytes) {
            Ok(0) => return Some(said),
            Ok(count) if said.len() + count <= ANSWER_BYTES_MAX => said.extend_from_slice(&bytes[..count]),
            _ => return None,
        }
    }
}

fn how(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was ended by signal {signal} ({})", signal_name(signal)),
        (None, code) => format!("ended with exit code {}", code.unwrap_or_default()),
    }
}

fn signal_name(signal: i32) -> &'static str {
    match Signal::from_named_raw(signal) {
        Some(Signal::SEGV) => "SIGSEGV",
        Some(Signal::ABORT) => "SIGABRT",
        Some(Signal::BUS) => "SIGBUS",
        Some(Signal::ILL) => "SIGILL",
        Some(Signal::FPE) => "SIGFPE",
        Some(Signal::KILL) => "SIGKILL, as where memory or time to compute runs out",
        _ => "unexpected",
    }
}
