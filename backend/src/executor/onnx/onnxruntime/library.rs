//! ONNX Runtime's library, which is loaded when the first model asks for it, and stays: one for the whole process.

use std::{
    env,
    error::Error as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use ort::{
    LoadDynamicError,
    environment::Environment,
    ep::{CUDA, ExecutionProvider as _},
    logging::LogLevel,
};

use crate::{error::ExecutorError, executor::onnx::source::one_line};

/// Names its path, where no configuration does.
const PATH_VARIABLE: &str = "ORT_DYLIB_PATH";

/// What the library is called where packages of a system have it.
const NAMES: [&str; 2] = ["libonnxruntime.so.1", "libonnxruntime.so"];

/// What was loaded, and from where.
static LOADED: Mutex<Option<(PathBuf, Environment)>> = Mutex::new(None);

/// The library, loaded from `path` or from where it is usually found, unless it has been already.
///
/// # Errors
/// If it cannot be found or is too old: says where it was looked for, and what brings it.
pub(super) fn environment(path: Option<&Path>) -> Result<Environment, ExecutorError> {
    load(path).map(|(_, environment)| environment)
}

/// Where it is and what it was built for, for people.
///
/// # Errors
/// As [`environment`].
pub(in crate::executor) fn describe(path: Option<&Path>) -> Result<String, ExecutorError> {
    let (path, _) = load(path)?;
    let providers = if has_cuda() { "for the CPU and for CUDA" } else { "for the CPU" };
    Ok(format!("{}, {providers}", path.display()))
}

/// Whether the library that was loaded has a provider for NVIDIA's GPUs.
pub(super) fn has_cuda() -> bool {
    CUDA::is_available().unwrap_or(false)
}

fn load(path: Option<&Path>) -> Result<(PathBuf, Environment), ExecutorError> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(loaded) = &*loaded {
        return Ok(loaded.clone());
    }
    let mut reasons = Vec::new();
    for candidate in candidates(path) {
        match ort::init_from(&candidate) {
            Ok(builder) => {
                let log = |_: LogLevel, category: &str, _: &str, place: &str, message: &str| {
                    // What fails is told to whoever asked; clients could fill logs with it.
                    tracing::debug!(category, place, "ONNX Runtime: {message}");
                };
                let built = builder.with_telemetry(false).with_logger(Arc::new(log)).build();
                let environment = built.map_err(|error| {
                    ExecutorError(format!("ONNX Runtime, {}: {}", candidate.display(), one_line(&error)))
                })?;
                environment.set_log_level(LogLevel::Warning);
                return Ok(loaded.insert((candidate, environment)).clone());
            }
            Err(error) => reasons.push(reason(&error)),
        }
    }
    Err(ExecutorError(format!(
        "ONNX Runtime's library cannot be loaded: {}; name it by onnxruntime.library in the backend's file or by \
         {PATH_VARIABLE}: PyPI's onnxruntime has it as capi/libonnxruntime.so.1.*, onnxruntime-gpu with CUDA",
        reasons.join("; ")
    )))
}

/// Why a file was not loaded: the system's word, which names the file, where there is one.
fn reason(error: &LoadDynamicError) -> String {
    let cause = match error {
        LoadDynamicError::Dlopen { error, .. } => error.source(),
        _ => None,
    };
    cause.map_or_else(|| one_line(&error), |cause| one_line(&cause))
}

/// Where to look for it: one place if that was said, or else by its names, beside this program and where the system
/// looks for libraries.
fn candidates(path: Option<&Path>) -> Vec<PathBuf> {
    let named = path.map(Path::to_owned).or_else(|| {
        let path = env::var_os(PATH_VARIABLE).filter(|path| !path.is_empty());
        path.map(PathBuf::from)
    });
    match named {
        // Not relative to this program's folder, as the loader would have it.
        Some(path) => vec![std::path::absolute(&path).unwrap_or(path)],
        None => NAMES.map(PathBuf::from).to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_was_named_is_the_only_place() {
        let here = env::current_dir().unwrap();
        assert_eq!(candidates(Some(Path::new("lib/x.so"))), [here.join("lib/x.so")]);
        assert_eq!(candidates(Some(Path::new("/x.so"))), [PathBuf::from("/x.so")]);
    }

    #[test]
    fn what_is_no_library_is_refused_in_one_line() {
        // Another test may have loaded the real one by now, which stays.
        if LOADED.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            return;
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        for path in [Path::new("/no/such/libonnxruntime.so"), file.path()] {
            let Err(ExecutorError(error)) = environment(Some(path)) else { continue };
            let (path, start) = (path.display(), "ONNX Runtime's library cannot be loaded");
            assert!(error.starts_with(&format!("{start}: {path}: ")) && !error.contains('\n'), "{error}");
            assert!(error.contains("onnxruntime.library") && error.contains(PATH_VARIABLE), "{error}");
        }
    }
}
