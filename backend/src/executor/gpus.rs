//! Step 8 on NVIDIA GPUs: an ONNX model, lowered to a plan for each of a few batch sizes ([`lowering`]) and registered
//! on each GPU that hosts it ([`cuda`]). Batches between those sizes take as long as the next one up.
//!
//! What is bound to the model's configuration is bound as for the CPU ([`super::onnx`]), so both refuse the same files
//! with the same words; what the CPU can do beyond that is refused here by name: strings, tensors that may be left out,
//! and inputs that are made for a whole batch. Where requests choose lengths there are plans for a few of them
//! ([`rungs`]), and tasks are padded to those ([`unequal`]).

mod devices;
#[cfg(feature = "cuda")]
mod front;
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "what makes plans asks for them"))]
mod rungs;
mod unequal;

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, PoisonError},
};

use cuda::{GpuError, Hosted, Part, Slot};
use lowering::{Lowered, Plan};
use proto::{LatencyProfile, Span};
use repository::{Batching, Model, Precision, cell};
use transport::Region;

use super::onnx::{Groups, Source};
use crate::{
    error::{ExecutorError, TaskError},
    executor::{Executor, few_sizes},
    limits::MEASURED_LENGTH,
};
pub use devices::{Devices, OpenDriver, real_driver};
use rungs::Rungs;
use unequal::Unequal;

/// Why a task has no output whose indexes a plan cannot use.
const INDEX_OUT_OF_RANGE: &str = "execution failed: an input has an index out of range";

/// A model on GPUs.
pub struct OnGpus {
    source: Source,
    sizes: Vec<usize>,
    precision: Precision,
    devices: Arc<Devices>,
    /// By the GPU's index in the backend's configuration; at least one.
    hosted: BTreeMap<usize, Hosted>,
    model: Model,
    /// If requests choose lengths.
    unequal: Option<Unequal>,
}

impl From<GpuError> for ExecutorError {
    fn from(error: GpuError) -> Self {
        Self(error.to_string())
    }
}

impl OnGpus {
    /// [`Self::load_in_turns`], at once.
    ///
    /// # Errors
    /// As there.
    pub fn load(
        model: &Model,
        how: (&Path, &Batching, Precision),
        gpu_indexes: &[u32],
        devices: &Arc<Devices>,
    ) -> Result<Self, ExecutorError> {
        Self::load_in_turns(model, how, gpu_indexes, devices, &mut |_, _| {})
    }

    /// Registers the model `file` on these of the backend's GPUs. Its weights are in host memory then, and not yet on
    /// the GPUs. Before each run on a GPU `turn` is called with that, as [`cuda::Gpu::register_in_turns`] does.
    ///
    /// # Errors
    /// If the file does not fit the configuration, has what no GPU computes here, or a GPU has no room for it or cannot
    /// be used; what the CPU could do says so.
    pub fn load_in_turns(
        model: &Model,
        (file, batching, precision): (&Path, &Batching, Precision),
        gpu_indexes: &[u32],
        devices: &Arc<Devices>,
        turn: &mut dyn FnMut(usize, Option<Span>),
    ) -> Result<Self, ExecutorError> {
        check(model, batching)?;
        let source = Source::of(model, file, batching)?;
        let sizes = few_sizes(model.max_batch);
        let (Lowered { weights, plans }, groups) = lower(&source, &sizes, precision)?;
        let mut plans = plans.into_iter().map(Arc::new);
        let mut unequal = None;
        let forms: Vec<Vec<Arc<Plan>>> = match groups {
            Some((groups, rungs)) => {
                let forms = rungs.forms().iter().map(|form| plans.by_ref().take(form.sizes.len()).collect());
                let forms: Vec<_> = forms.collect();
                let refused = |error: ExecutorError| source.refused(&error);
                unequal = Some(Unequal::new(groups, rungs, &forms).map_err(refused)?);
                forms
            }
            None => vec![plans.collect()],
        };
        if unequal.is_none() {
            check_ports(model, &forms[0][0])?;
        }
        let forms: Vec<&[Arc<Plan>]> = forms.iter().map(Vec::as_slice).collect();
        let image = cuda::image(&weights)?;
        drop(weights);
        let mut hosted = BTreeMap::new();
        for gpu in gpu_indexes.iter().map(|&index| index as usize) {
            let device = devices.gpu(gpu)?;
            let mut turn = |took| turn(gpu, took);
            let registered = device.gpu.register_in_turns(&model.name, &forms, &image, &mut turn);
            let failed = |error| ExecutorError(format!("model {} on GPU {}: {error}", model.name, device.name));
            hosted.insert(gpu, registered.map_err(failed)?);
            if let Some(unequal) = &mut unequal {
                unequal.make_room(gpu, &device)?;
            }
        }
        let (devices, model) = (Arc::clone(devices), model.clone());
        Ok(Self { source, sizes, precision, devices, hosted, model, unequal })
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

    /// Whether inputs go from staging memory to a GPU as they lie, so also ahead of their batch ([`Self::run`]). They
    /// do not where requests choose lengths: [`Self::run_records`].
    #[must_use]
    pub fn takes_inputs_ahead(&self) -> bool {
        self.unequal.is_none()
    }

    /// What a batch of this size took at most of so large a share of runs when the model was registered, by the GPUs'
    /// own clocks; the slowest GPU's. Where requests choose lengths all tasks have a typical one.
    #[must_use]
    pub fn registered(&self, batch: usize, share: f64) -> Span {
        let form = self.typical_form();
        let took = |hosted: &Hosted| {
            let measured = hosted.measured_in(form);
            let largest = measured.last().map_or(1, |size| size.batch);
            let of = |batch: usize| {
                let size = measured.iter().find(|size| size.batch >= batch);
                size.filter(|_| batch > 0).map_or(Span::ZERO, |size| size.quantile(share))
            };
            // What is more than a run takes several.
            of(largest) * (batch / largest) as i64 + of(batch % largest)
        };
        self.hosted.values().map(took).max().unwrap_or(Span(1))
    }

    fn typical_form(&self) -> cuda::Form {
        let is_typical = |lengths: &[usize]| lengths.iter().all(|&length| length <= MEASURED_LENGTH);
        let forms = self.unequal.iter().flat_map(|unequal| unequal.rungs().forms());
        let typical = forms.enumerate().filter(|(_, form)| is_typical(&form.lengths));
        let longest = typical.max_by_key(|(_, form)| form.lengths.iter().product::<usize>());
        cuda::Form(longest.map_or(0, |(form, _)| form))
    }

    /// Runs a batch of a model that does not take inputs ahead: `inputs` and `outputs` as [`Executor::execute`] has
    /// them. The slot is one that nothing else is staged in.
    ///
    /// # Errors
    /// If the GPU fails it, or another kind of model is asked for it.
    pub fn run_records(
        &self,
        gpu: usize,
        slot: Slot,
        inputs: &[u8],
        outputs: &mut [u8],
    ) -> Result<Vec<TaskError>, ExecutorError> {
        let unequal = self.unequal.as_ref();
        let unequal = unequal.ok_or_else(|| ExecutorError(format!("{} has no records", self.model.name)))?;
        unequal.run((self.on(gpu), gpu), slot, (inputs, outputs))
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
        let failed = |task| TaskError { task, reason: INDEX_OUT_OF_RANGE.to_owned() };
        Ok(ran.faults.into_iter().map(failed).collect())
    }

    /// Calls `run` with a function that runs a batch on a GPU: it takes the batch's size, with inputs at the front of
    /// `region`, which is pinned there, and outputs at its end, so that those of larger batches stay. Weights are there
    /// meanwhile.
    ///
    /// # Errors
    /// If they cannot be copied to it, memory cannot be pinned, or `run` fails.
    pub fn try_on<T>(
        &self,
        gpu: usize,
        region: &Region,
        run: impl FnOnce(&mut dyn FnMut(usize) -> Result<Vec<TaskError>, ExecutorError>) -> Result<T, ExecutorError>,
    ) -> Result<T, ExecutorError> {
        let (input_bytes, output_bytes) = (self.model.input_bytes(), self.model.output_bytes());
        self.with_weights(gpu, |hosted| {
            let _pinned = hosted.gpu().pin(region)?;
            run(&mut |tasks: usize| {
                let (inputs_bytes, bytes) = (tasks * input_bytes, tasks * output_bytes);
                hosted.stage(Slot::TRIAL, &[Part { region, offset: 0, bytes: inputs_bytes }])?;
                self.run(gpu, Slot::TRIAL, tasks, &[Part { region, offset: region.len() - bytes, bytes }])
            })
        })
    }

    /// The same of a model that does not take inputs ahead: the function takes inputs and outputs as
    /// [`Executor::execute`] does.
    ///
    /// # Errors
    /// As [`Self::try_on`].
    pub fn try_records_on<T>(
        &self,
        gpu: usize,
        run: impl FnOnce(&mut crate::executor::Execute<'_>) -> Result<T, ExecutorError>,
    ) -> Result<T, ExecutorError> {
        self.with_weights(gpu, |_| run(&mut |inputs, outputs| self.run_records(gpu, Slot::TRIAL, inputs, outputs)))
    }

    /// One trial at a time, while weights are there.
    fn with_weights<T>(
        &self,
        gpu: usize,
        run: impl FnOnce(&Hosted) -> Result<T, ExecutorError>,
    ) -> Result<T, ExecutorError> {
        let hosted = self.on(gpu);
        let device = self.devices.gpu(gpu)?;
        let _turn = device.trial.lock().unwrap_or_else(PoisonError::into_inner);
        let was_there = hosted.is_resident();
        hosted.load()?;
        let result = run(hosted);
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
        if self.unequal.is_some() {
            return self.try_records_on(gpu, |execute| execute(inputs, outputs));
        }
        let tasks = inputs.len() / self.model.input_bytes().max(1);
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
        let image = cuda::image(&lower(&self.source, &self.sizes, self.precision)?.0.weights)?;
        self.hosted.values().try_for_each(|hosted| Ok(hosted.read(image.clone())?))
    }

    fn is_up(&self) -> bool {
        self.hosted.values().all(|hosted| hosted.gpu().is_up())
    }
}

/// That a configuration asks for nothing that only the CPU does.
fn check(model: &Model, batching: &Batching) -> Result<(), ExecutorError> {
    let what = if cell::is_record(&model.inputs) || cell::is_record(&model.outputs) {
        unequal::check(model, batching)
    } else if batching.is_plain() {
        Ok(())
    } else {
        Err("inputs are made for a whole batch, or tensors joined".to_owned())
    };
    what.map_err(|what| {
        ExecutorError(format!(
            "model {}: {what}, which executor = \"cuda\" cannot do; give it parameters: executor \"onnx\", which runs \
             it on the CPU",
            model.name
        ))
    })
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

/// What a model whose requests choose lengths has beside its plans, which are in the order of forms and of their sizes.
type Forms = Option<(Groups, Rungs)>;

#[cfg(feature = "cuda")]
use front::lower;

/// Files are lowered by what only builds with GPUs have.
#[cfg(not(feature = "cuda"))]
fn lower(source: &Source, _: &[usize], _: Precision) -> Result<(Lowered, Forms), ExecutorError> {
    Err(source.refused(&format_args!("executor = \"cuda\": {}", cuda::WITHOUT_GPUS)))
}

#[cfg(all(test, feature = "cuda"))]
pub(crate) mod tests;
