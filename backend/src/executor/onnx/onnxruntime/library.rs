//! ONNX Runtime's library, which is loaded when the first model asks for it, and stays: one for the whole process.

use std::{
    error::Error as _,
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use ort::{
    LoadDynamicError,
    environment::Environment,
    ep::{CUDA, ExecutionProvider as _},
    logging::LogLevel,
};

use super::places::{Candidate, PATH_VARIABLE, Place, candidates};
use crate::{config::onnxruntime::OnnxRuntime, error::ExecutorError, executor::onnx::source::one_line};

/// What was loaded.
static LOADED: Mutex<Option<(Library, Environment)>> = Mutex::new(None);

/// A library that was loaded.
#[derive(Debug, Clone)]
pub struct Library {
    /// Where it is.
    pub path: PathBuf,
    place: Place,
    has_cuda: bool,
    /// Why others were not taken that were looked at before.
    skipped: Vec<String>,
}

/// For people: where it is, why it was looked for there, and what it was built for.
impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let providers = if self.has_cuda { "for the CPU and for CUDA" } else { "for the CPU" };
        write!(f, "{}, {}, {providers}", self.path.display(), self.place)?;
        self.skipped.iter().try_for_each(|skipped| write!(f, "; skipped: {skipped}"))
    }
}

/// The library, loaded from where `settings` name it, or from where it is usually found, unless it has been already.
///
/// # Errors
/// If it cannot be found or used: says what was looked at, and what brings it.
pub(super) fn environment(settings: &OnnxRuntime) -> Result<Environment, ExecutorError> {
    load(settings, None).map(|(_, environment)| environment)
}

/// The same, also from the folder of a Python's package: which it is.
///
/// # Errors
/// As [`environment`].
pub(in crate::executor) fn find(settings: &OnnxRuntime, package: Option<&Path>) -> Result<Library, ExecutorError> {
    load(settings, package).map(|(library, _)| library)
}

/// Whether the library that was loaded has a provider for NVIDIA's GPUs.
pub(super) fn has_cuda() -> bool {
    CUDA::is_available().unwrap_or(false)
}

fn load(settings: &OnnxRuntime, package: Option<&Path>) -> Result<(Library, Environment), ExecutorError> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(loaded) = &*loaded {
        return Ok(loaded.clone());
    }
    let mut skipped = Vec::new();
    for candidate in candidates(settings, package) {
        match candidate.refusal(settings.provider).map_or_else(|| open(&candidate), Err) {
            Ok(environment) => {
                let Candidate { path, place, .. } = candidate;
                let library = Library { path, place, has_cuda: has_cuda(), skipped };
                return Ok(loaded.insert((library, environment)).clone());
            }
            Err(reason) => skipped.push(reason),
        }
    }
    let found = if skipped.is_empty() { "none was found".to_owned() } else { skipped.join("; ") };
    Err(ExecutorError(format!(
        "ONNX Runtime's library cannot be loaded: {found}; `pip install onnxruntime` brings it for `up`, and a \
         backend's file names it by onnxruntime.library, or {PATH_VARIABLE} does: capi/libonnxruntime.so.1.* of that \
         package"
    )))
}

fn open(candidate: &Candidate) -> Result<Environment, String> {
    let builder = ort::init_from(&candidate.path).map_err(|error| reason(&error))?;
    let log = |_: LogLevel, category: &str, _: &str, place: &str, message: &str| {
        // What fails is told to whoever asked; clients could fill logs with it.
        tracing::debug!(category, place, "ONNX Runtime: {message}");
    };
    let built = builder.with_telemetry(false).with_logger(Arc::new(log)).build();
    let environment = built.map_err(|error| format!("{}: {}", candidate.path.display(), one_line(&error)))?;
    environment.set_log_level(LogLevel::Warning);
    Ok(environment)
}

/// Why a file was not loaded: the system's word, which names the file, where there is one.
fn reason(error: &LoadDynamicError) -> String {
    let cause = match error {
        LoadDynamicError::Dlopen { error, .. } => error.source(),
        _ => None,
    };
    cause.map_or_else(|| one_line(&error), |cause| one_line(&cause))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_library_is_refused_in_one_line() {
        // Another test may have loaded the real one by now, which stays.
        if LOADED.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            return;
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        for path in [Path::new("/no/such/libonnxruntime.so"), file.path()] {
            let settings = OnnxRuntime { library: Some(path.to_owned()), ..OnnxRuntime::default() };
            let Err(ExecutorError(error)) = environment(&settings) else { continue };
            let (path, start) = (path.display(), "ONNX Runtime's library cannot be loaded");
            assert!(error.starts_with(&format!("{start}: {path}: ")) && !error.contains('\n'), "{error}");
            assert!(error.contains("onnxruntime.library") && error.contains(PATH_VARIABLE), "{error}");
        }
    }
}
