//! Step 8 on NVIDIA GPUs: an ONNX model, lowered to a plan for each of a few batch sizes ([`lowering`]) and registered
//! on each GPU that hosts it ([`cuda`]). Batches between those sizes take as long as the next one up.
//!
//! What is bound to the model's configuration is bound as for the CPU ([`super::onnx`]), so both refuse the same files
//! with the same words; what the CPU can do beyond that is refused here by name: tensors whose size requests choose,
//! strings, and inputs that are made for a whole batch.

mod devices;

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, PoisonError},
};

use cuda::{GpuError, Hosted, Part, Slot};
use lowering::{Lowered, Plan};
use proto::LatencyProfile;
use repository::{Batching, Model, Precision, cell};
use transport::Region;

use super::{Executor, ExecutorError, TaskError, few_sizes, onnx::Source};
pub use devices::{Devices, OpenDriver, real_driver};

/// A model on GPUs.
pub struct OnGpus {
    source: Source,
    sizes: Vec<usize>,
    precision: Precision,
    devices: Arc<Devices>,
    /// By the GPU's index in the backend's configuration; at least one.
    hosted: BTreeMap<usize, Hosted>,
    input_bytes: usize,
    output_bytes: usize,
}

impl From<GpuError> for ExecutorError {
    fn from(error: GpuError) -> Self {
        Self(error.to_string())
    }
}

impl OnGpus {
    /// Registers the model `file` on these of the backend's GPUs. Its weights are in host memory then, and not yet on
    /// the GPUs.
    ///
    /// # Errors
    /// If the file does not fit the configuration, has what no GPU computes here, or a GPU has no room for it or cannot
    /// be used; what the CPU could do says so.
    pub fn load(
        model: &Model,
        (file, batching, precision): (&Path, &Batching, Precision),
        gpu_indexes: &[u32],
        devices: &Arc<Devices>,
    ) -> Result<Self, ExecutorError> {
        check(model, batching)?;
        let source = Source::of(model, file, batching)?;
        let sizes = few_sizes(model.max_batch);
        let Lowered { weights, plans } = lower(&source, &sizes, precision)?;
        let plans: Vec<Arc<Plan>> = plans.into_iter().map(Arc::new).collect();
        check_ports(model, &plans[0])?;
        let image = cuda::image(&weights)?;
        drop(weights);
        let mut hosted = BTreeMap::new();
        for gpu in gpu_indexes.iter().map(|&index| index as usize) {
            let device = devices.gpu(gpu)?;
            let registered = device.gpu.register(&model.name, &plans, &image);
            let failed = |error| ExecutorError(format!("model {} on GPU {}: {error}", model.name, device.name));
            hosted.insert(gpu, registered.map_err(failed)?);
        }
        let (devices, input_bytes, output_bytes) = (Arc::clone(devices), model.input_bytes(), model.output_bytes());
        Ok(Self { source, sizes, precision, devices, hosted, input_bytes, output_bytes })
    }

    /// The GPUs that host it, by their index.
    pub fn gpus(&self) -> impl Iterator<Item = usize> {
        self.hosted.keys().copied()
    }

    /// Batch sizes that GPUs have been prepared for, ascending; others take as long as the next one up.
    #[must_use]
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Pages that its weights take in a GPU's memory.
    #[must_use]
    pub fn pages(&self) -> u32 {
        let pages = self.hosted.values().map(Hosted::weights_pages).max().unwrap_or(0);
        u32::try_from(pages).unwrap_or(u32::MAX)
    }

    /// The model on one of its GPUs.
    ///
    /// # Panics
    /// If that does not host it: batches go where they are hosted.
    #[must_use]
    pub fn on(&self, gpu: usize) -> &Hosted {
        &self.hosted[&gpu]
    }

    /// Runs the batch whose inputs were staged in a slot, and yields the tasks without output.
    ///
    /// # Errors
    /// As [`Hosted::run`].
    pub fn run(
        &self,
        gpu: usize,
        slot: Slot,
        tasks: usize,
        outputs: &[Part<'_>],
    ) -> Result<Vec<TaskError>, ExecutorError> {
        let ran = self.on(gpu).run(slot, tasks, outputs)?;
        let failed =
            |task| TaskError { task, reason: "execution failed: an input has an index out of range".to_owned() };
        Ok(ran.faults.into_iter().map(failed).collect())
    }

    /// Calls `run` with a function that runs a batch on a GPU: it takes the batch's size, with inputs and room for
    /// outputs in `region`, which is pinned there. Weights are there meanwhile.
    ///
    /// # Errors
    /// If they cannot be copied to it, memory cannot be pinned, or `run` fails.
    pub fn try_on<T>(
        &self,
        gpu: usize,
        region: &Region,
        run: impl FnOnce(&mut dyn FnMut(usize) -> Result<Vec<TaskError>, ExecutorError>) -> Result<T, ExecutorError>,
    ) -> Result<T, ExecutorError> {
        let hosted = self.on(gpu);
        let device = self.devices.gpu(gpu)?;
        let _turn = device.trial.lock().unwrap_or_else(PoisonError::into_inner);
        let _pinned = hosted.gpu().pin(region)?;
        let was_there = hosted.is_resident();
        hosted.load()?;
        let mut run_batch = |tasks: usize| {
            let (inputs_bytes, bytes) = (tasks * self.input_bytes, tasks * self.output_bytes);
            hosted.stage(Slot::TRIAL, &[Part { region, offset: 0, bytes: inputs_bytes }])?;
            self.run(gpu, Slot::TRIAL, tasks, &[Part { region, offset: inputs_bytes, bytes }])
        };
        let result = run(&mut run_batch);
        if !was_there {
            hosted.unload();
        }
        result
    }
}

impl Executor for OnGpus {
    /// On the first of its GPUs, through memory of its own: what serves goes from staging memory straight to a GPU.
    fn execute(&self, inputs: &[u8], outputs: &mut [u8]) -> Result<Vec<TaskError>, ExecutorError> {
        let gpu = self.gpus().next().expect("a model is hosted on one GPU at least");
        let tasks = inputs.len() / self.input_bytes;
        let region = Region::allocate(inputs.len() + outputs.len())
            .map_err(|error| ExecutorError(format!("memory for a batch of {tasks}: {error}")))?;
        region.write(0, inputs);
        let failed = self.try_on(gpu, &region, |run| run(tasks))?;
        region.read(inputs.len(), outputs);
        Ok(failed)
    }

    fn emulated_profile(&self) -> Option<&LatencyProfile> {
        None
    }

    fn on_gpus(&self) -> Option<&OnGpus> {
        Some(self)
    }

    fn holds_weights(&self) -> bool {
        true
    }

    fn release(&self) {
        self.hosted.values().for_each(Hosted::release);
    }

    fn read(&self) -> Result<(), ExecutorError> {
        if self.hosted.values().all(Hosted::is_in_host_memory) {
            return Ok(());
        }
        let image = cuda::image(&lower(&self.source, &self.sizes, self.precision)?.weights)?;
        self.hosted.values().try_for_each(|hosted| Ok(hosted.read(image.clone())?))
    }

    fn is_up(&self) -> bool {
        self.hosted.values().all(|hosted| hosted.gpu().is_up())
    }
}

/// That a configuration asks for nothing that only the CPU does.
fn check(model: &Model, batching: &Batching) -> Result<(), ExecutorError> {
    let tensors = || model.inputs.iter().chain(&model.outputs);
    let what = match tensors().find(|tensor| tensor.variable.is_some()) {
        Some(tensor) => format!("the size of {} is a request's choice", tensor.name),
        None if cell::is_record(&model.inputs) || cell::is_record(&model.outputs) || !batching.is_plain() => {
            "inputs are made for a whole batch, or tensors joined".to_owned()
        }
        None => return Ok(()),
    };
    Err(ExecutorError(format!(
        "model {}: {what}, which executor = \"cuda\" cannot do; give it parameters: executor \"onnx\", which runs it \
         on the CPU",
        model.name
    )))
}

/// That what a plan takes and gives is what clients send and get.
fn check_ports(model: &Model, plan: &Plan) -> Result<(), ExecutorError> {
    let sides = [("input", &plan.inputs, &model.inputs), ("output", &plan.outputs, &model.outputs)];
    for (side, ports, tensors) in sides {
        let found: Vec<usize> = ports.iter().map(|port| port.bytes() / plan.batch).collect();
        let expected: Vec<usize> = tensors.iter().map(repository::Tensor::bytes).collect();
        if found != expected {
            let name = &model.name;
            return Err(ExecutorError(format!(
                "model {name}: its {side}s have {found:?} bytes for each task, expected {expected:?} as config.pbtxt \
                 says"
            )));
        }
    }
    Ok(())
}

fn lower(source: &Source, sizes: &[usize], precision: Precision) -> Result<Lowered, ExecutorError> {
    let graph = source.decluttered()?;
    let batch = source.is_batched().then(|| graph.symbols.sym("batch"));
    let precision = match precision {
        Precision::Fp32 => lowering::plan::Precision::Fp32,
        Precision::Tf32 => lowering::plan::Precision::Tf32,
        Precision::Fp16 => lowering::plan::Precision::Fp16,
    };
    let lowered = lowering::lower(&graph, batch.as_ref(), sizes, precision);
    lowered.map_err(|error| {
        let else_ = "parameters: executor \"onnx\" runs it on the CPU";
        source.refused(&format_args!("executor = \"cuda\": {error}; {else_}"))
    })
}

#[cfg(test)]
mod tests;
