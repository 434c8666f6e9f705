//! How ONNX Runtime runs the models that it does.

use std::{fmt, num::NonZero, path::PathBuf, str::FromStr, thread::available_parallelism};

use repository::Precision;
use serde::{Deserialize, Serialize};

use super::{GpuName, Gpus};
use crate::error::{BackendError, ExecutorError};

/// Threads of one batch: more than processors have cores.
pub const THREADS_MAX: usize = 256;

/// The table `onnxruntime` of the configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OnnxRuntime {
    /// Its library. Without the key, what the environment's `ORT_DYLIB_PATH` names, or else the newest that is found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub library: Option<PathBuf>,
    /// Threads that a batch is computed on, 1 to [`THREADS_MAX`]; the GPU's own is one of them. Without the key, a
    /// GPU's share of the cores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// What computes.
    pub provider: Provider,
}

/// What ONNX Runtime calls an execution provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Provider {
    /// The host's processor.
    #[default]
    Cpu,
    /// NVIDIA GPUs, for what the library can compute there; it computes the rest on the CPU.
    Cuda,
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        })
    }
}

impl FromStr for Provider {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Cpu, Self::Cuda].into_iter().find(|known| known.to_string() == text).ok_or("expected cpu or cuda")
    }
}

/// What a model is loaded for: a session for each GPU that hosts it, or for each thread that stands for one.
#[derive(Debug, Clone)]
pub struct Sessions {
    /// As configured.
    pub settings: OnnxRuntime,
    /// The GPU's index in the configuration, and the device that it is, unless the CPU computes.
    pub gpus: Vec<(usize, Option<i32>)>,
    /// Threads of each session.
    pub threads: usize,
    /// How a GPU multiplies numbers of type FP32.
    pub precision: Precision,
}

impl OnnxRuntime {
    /// Whether its values can be.
    ///
    /// # Errors
    /// If not.
    pub fn check(&self) -> Result<(), BackendError> {
        match self.threads {
            Some(threads) if !(1..=THREADS_MAX).contains(&threads) => {
                let text = format!("onnxruntime.threads: found {threads}, expected 1 to {THREADS_MAX}");
                Err(BackendError::Config(text))
            }
            _ => Ok(()),
        }
    }

    /// The sessions of a model on these of a backend's GPUs.
    ///
    /// # Errors
    /// If the library cannot tell which GPU is meant.
    pub fn sessions(&self, names: &Gpus, indexes: &[u32], precision: Precision) -> Result<Sessions, ExecutorError> {
        let names = names.names();
        let device = |index: u32| match (self.provider, names.get(index as usize)) {
            (Provider::Cpu, _) => Ok(None),
            (Provider::Cuda, Some(GpuName::Number(number))) => match i32::try_from(*number) {
                Ok(number) => Ok(Some(number)),
                // Without a device it would be the CPU that computes.
                Err(_) => Err(ExecutorError(format!(
                    "gpus: found {number}, expected at most {}, as onnxruntime.provider = \"cuda\" counts GPUs",
                    i32::MAX
                ))),
            },
            (Provider::Cuda, name) => Err(ExecutorError(format!(
                "gpus: found {}, expected numbers, as onnxruntime.provider = \"cuda\" counts GPUs",
                name.map_or_else(|| index.to_string(), ToString::to_string)
            ))),
        };
        let gpus = indexes.iter().map(|&index| Ok((index as usize, device(index)?)));
        let gpus = gpus.collect::<Result<_, ExecutorError>>()?;
        let cores = available_parallelism().map_or(1, NonZero::get);
        let threads = self.threads.unwrap_or_else(|| share(cores, names.len()));
        Ok(Sessions { settings: self.clone(), gpus, threads, precision })
    }
}

/// Threads for each of so many GPUs.
fn share(cores: usize, gpus: usize) -> usize {
    (cores / gpus.max(1)).clamp(1, THREADS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(text: &str) -> Result<OnnxRuntime, String> {
        let settings: OnnxRuntime = toml::from_str(text).map_err(|error| error.message().to_owned())?;
        settings.check().map_err(|error| error.to_string())?;
        let again: OnnxRuntime = toml::from_str(&toml::to_string(&settings).unwrap()).unwrap();
        assert_eq!(again, settings);
        Ok(settings)
    }

    #[test]
    fn every_key_is_optional_and_checked() {
        assert_eq!(settings(""), Ok(OnnxRuntime::default()));
        let all = settings("library = '/opt/libonnxruntime.so.1'\nthreads = 4\nprovider = 'cuda'");
        let library = Some("/opt/libonnxruntime.so.1".into());
        assert_eq!(all, Ok(OnnxRuntime { library, threads: Some(4), provider: Provider::Cuda }));
        assert_eq!(settings("threads = 0"), Err("onnxruntime.threads: found 0, expected 1 to 256".into()));
        assert!(settings("threads = 257").is_err());
        assert!(settings("provider = 'tensorrt'").unwrap_err().contains("expected `cpu` or `cuda`"));
        assert!(settings("thread = 1").unwrap_err().contains("unknown field `thread`"));
    }

    #[test]
    fn threads_are_a_gpus_share_of_the_cores_unless_they_are_configured() {
        assert_eq!([(8, 1), (8, 3), (2, 4), (1024, 1)].map(|(cores, gpus)| share(cores, gpus)), [8, 2, 1, 256]);
        let of = |settings: OnnxRuntime| settings.sessions(&Gpus::Count(64), &[0], Precision::Fp32).unwrap().threads;
        assert_eq!(of(OnnxRuntime { threads: Some(3), ..OnnxRuntime::default() }), 3);
    }

    #[test]
    fn sessions_have_the_devices_that_gpus_are() {
        let on = |provider, gpus: Gpus| {
            let settings = OnnxRuntime { provider, ..OnnxRuntime::default() };
            let sessions = settings.sessions(&gpus, &[0, 2], Precision::Tf32);
            sessions.map(|sessions| sessions.gpus).map_err(|error| error.to_string())
        };
        assert_eq!(on(Provider::Cpu, Gpus::Count(3)), Ok(vec![(0, None), (2, None)]));
        assert_eq!(on(Provider::Cuda, Gpus::Count(3)), Ok(vec![(0, Some(0)), (2, Some(2))]));
        let named = |last: GpuName| Gpus::Named(vec![GpuName::Number(5), GpuName::Number(1), last]);
        assert_eq!(on(Provider::Cuda, named(GpuName::Number(7))), Ok(vec![(0, Some(5)), (2, Some(7))]));
        let error = on(Provider::Cuda, named(GpuName::Uuid("GPU-5a".into()))).unwrap_err();
        assert!(error.starts_with("gpus: found GPU-5a, expected numbers"), "{error}");
        assert!(on(Provider::Cpu, named(GpuName::Uuid("GPU-5a".into()))).is_ok());
        let error = on(Provider::Cuda, named(GpuName::Number(1 << 31))).unwrap_err();
        assert!(error.starts_with("gpus: found 2147483648, expected at most 2147483647"), "{error}");
        assert!(on(Provider::Cpu, named(GpuName::Number(1 << 31))).is_ok());
    }
}
