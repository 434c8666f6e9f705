//! What runs models here.

use std::{path::Path, sync::Arc};

use backend::{
    config::{Config, Gpus, OnnxRuntime},
    error::ExecutorError,
    executor::{self, Executor, OnGpus, Programs, gpus::Devices},
};
use cuda::Fake;
use repository::{Batching, Model, Precision, Processor};

/// Pages of the GPU that is none: VGG-19 has room.
const PAGES: usize = 110;
const PAGES_OF_WEIGHTS: f64 = 64.0;

/// What runs models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Arm {
    Onnx,
    Cuda,
    /// The same in FP16.
    CudaHalf,
    Onnxruntime,
}

impl Arm {
    /// All of them.
    pub(crate) const ALL: [Self; 4] = [Self::Onnx, Self::Cuda, Self::CudaHalf, Self::Onnxruntime];

    /// As `executor`, and `precision` if it matters, name it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Onnx => "onnx",
            Self::Cuda => "cuda",
            Self::CudaHalf => "cuda fp16",
            Self::Onnxruntime => "onnxruntime",
        }
    }

    /// Those that there are on this machine.
    pub(crate) fn here() -> Vec<Self> {
        let has_onnxruntime = executor::onnxruntime_library(&OnnxRuntime::default(), None).is_ok();
        let is_here = |arm: &Self| match arm {
            Self::Onnx => true,
            Self::Cuda | Self::CudaHalf => cfg!(feature = "cuda"),
            Self::Onnxruntime => has_onnxruntime,
        };
        Self::ALL.into_iter().filter(is_here).collect()
    }

    /// How far its answers may be off: this share of a number, and, as where a sum's terms cancel out it is as far off
    /// as they were rounded, this share of the tensor's largest number. The first is what ONNX's own runner allows.
    pub(crate) fn tolerance(self) -> [f64; 2] {
        match self {
            Self::Onnx | Self::Cuda | Self::Onnxruntime => [1e-3, 1e-5],
            Self::CudaHalf => [1e-2, 1e-2],
        }
    }

    pub(crate) fn load(self, model: &Model, file: &Path) -> Result<Arc<dyn Executor>, String> {
        let mut model = model.clone();
        let repository::Executor::Onnx { batching, wanted, .. } = &mut model.executor else {
            return Err("not an ONNX model".to_owned());
        };
        let batching = batching.clone();
        wanted.processor = Some(match self {
            Self::Onnxruntime => Processor::Onnxruntime,
            Self::Onnx | Self::Cuda | Self::CudaHalf => Processor::Cpu,
        });
        let loaded = match self {
            Self::Cuda => on_gpu(&model, (file, &batching, Precision::Fp32)),
            Self::CudaHalf => on_gpu(&model, (file, &batching, Precision::Fp16)),
            Self::Onnx | Self::Onnxruntime => {
                executor::load(&model, (&[0], &Gpus::Count(1)), &OnnxRuntime::default(), &Programs::default())
            }
        };
        loaded.map_err(|error| error.to_string())
    }
}

fn on_gpu(model: &Model, how: (&Path, &Batching, Precision)) -> Result<Arc<dyn Executor>, ExecutorError> {
    Ok(Arc::new(OnGpus::load(model, how, &[0], &a_gpu())?))
}

fn a_gpu() -> Arc<Devices> {
    let config: Config = toml::from_str(&format!(
        "scheduler = '127.0.0.1:7000'\nsecret = 'known to the cluster'\nrepository = 'models'\ngpus = 1\n\
         share_gpu = true\ngpu_memory_mb = {}\n",
        PAGES_OF_WEIGHTS * 16.777_216
    ))
    .expect("these are its keys");
    let open = |_: &str| Ok(Fake::new(PAGES, 1) as Arc<dyn cuda::Driver>);
    Devices::new(&config, Box::new(open), crossbeam_channel::unbounded().0).expect("these keys go together")
}
