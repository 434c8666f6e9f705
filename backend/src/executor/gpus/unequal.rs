//! Models whose requests choose lengths: tasks are dealt to runs as on the CPU ([`Groups`]), each of which is padded to
//! lengths that the GPU is prepared for ([`Rungs`]), and its outputs are cut back. Padding needs the host's hands, so
//! tensors pass through memory that belongs to the model, pinned once, and inputs do not go ahead.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use cuda::{Hosted, Part, PinnedRegion, Slot};
use lowering::Plan;
use repository::{BatchLengths, Batching, DataType, GeneratedKind, Model};
use transport::Region;

use super::{ExecutorError, INDEX_OUT_OF_RANGE, TaskError, devices::Device, rungs::Rungs};
use crate::executor::onnx::{Group, Groups, Output, RunGroups, TakeResults, tensor::Tensor};

/// Such a model, and room for its runs.
pub(super) struct Unequal {
    groups: Groups,
    rungs: Rungs,
    forms: Vec<Ports>,
    /// For each GPU.
    rooms: BTreeMap<usize, Mutex<PinnedRegion>>,
    /// The inputs of any run have so many bytes at most; its outputs are behind them.
    inputs_bytes_max: usize,
    bytes: usize,
}

/// The tensors of one form.
struct Ports {
    /// Bytes of each input of a task.
    inputs: Vec<usize>,
    /// Type and shape of each output; the first length is that of the batch if the model has one.
    outputs: Vec<(DataType, Vec<usize>)>,
    /// Bytes of all outputs of a task.
    output_bytes: usize,
}

impl Unequal {
    /// The forms of a model and its plans, in the order of forms and of their batch sizes.
    ///
    /// # Errors
    /// If a plan does not have the tensors that the configuration and the form say.
    pub(super) fn new(
        groups: Groups,
        rungs: Rungs,
        plans: &[Vec<std::sync::Arc<Plan>>],
    ) -> Result<Self, ExecutorError> {
        let mut forms = Vec::new();
        let (mut inputs_bytes_max, mut outputs_bytes_max) = (0, 0);
        for (form, plans) in rungs.forms().iter().zip(plans) {
            let ports = Ports::of(&groups, &form.lengths, &plans[0])?;
            let largest = form.sizes.last().copied().unwrap_or(1);
            inputs_bytes_max = inputs_bytes_max.max(largest * ports.inputs.iter().sum::<usize>());
            outputs_bytes_max = outputs_bytes_max.max(largest * ports.output_bytes);
            forms.push(ports);
        }
        let bytes = (inputs_bytes_max + outputs_bytes_max).max(1);
        Ok(Self { groups, rungs, forms, rooms: BTreeMap::new(), inputs_bytes_max, bytes })
    }

    pub(super) fn rungs(&self) -> &Rungs {
        &self.rungs
    }

    /// Makes room for runs on a GPU.
    ///
    /// # Errors
    /// If the host has no memory for it, or it cannot be pinned.
    pub(super) fn make_room(&mut self, gpu: usize, device: &Device) -> Result<(), ExecutorError> {
        let region = Region::allocate(self.bytes)
            .map_err(|error| ExecutorError(format!("memory for a run of {} bytes: {error}", self.bytes)))?;
        self.rooms.insert(gpu, Mutex::new(device.gpu.pin(&region)?));
        Ok(())
    }

    /// Runs a batch of records; yields the tasks without output.
    ///
    /// # Errors
    /// If the GPU fails a run: all are lost, then.
    pub(super) fn run(
        &self,
        (hosted, gpu): (&Hosted, usize),
        slot: Slot,
        tensors: (&[u8], &mut [u8]),
    ) -> Result<Vec<TaskError>, ExecutorError> {
        let room = self.rooms[&gpu].lock().unwrap_or_else(PoisonError::into_inner);
        let mut runs = Runs { model: self, on: (hosted, slot), region: room.region(), lost: None };
        let failed = self.groups.execute(tensors, &self.rungs, &mut runs);
        match runs.lost {
            Some(error) => Err(error),
            None => Ok(failed),
        }
    }

    fn run_group(
        &self,
        (hosted, slot): (&Hosted, Slot),
        (form, tasks): (usize, usize),
        tensors: &[Tensor],
        region: &Region,
    ) -> Result<RunOnGpu, ExecutorError> {
        let ports = &self.forms[form];
        let inputs = in_turn(tensors, &ports.inputs, tasks);
        region.write(0, &inputs);
        hosted.stage_in(cuda::Form(form), slot, &[Part { region, offset: 0, bytes: inputs.len() }])?;
        let (offset, bytes) = (self.inputs_bytes_max, tasks * ports.output_bytes);
        let ran = hosted.run_in(cuda::Form(form), slot, tasks, &[Part { region, offset, bytes }])?;
        let mut outputs = vec![0; bytes];
        region.read(offset, &mut outputs);
        let failed = ran.faults.into_iter().map(|task| (task, INDEX_OUT_OF_RANGE.to_owned())).collect();
        let is_batched = self.groups.is_batched;
        Ok(RunOnGpu { outputs: ports.outputs(&outputs, (tasks, is_batched)), failed })
    }
}

/// The runs of a batch.
struct Runs<'a> {
    model: &'a Unequal,
    on: (&'a Hosted, Slot),
    region: &'a Region,
    /// Why the GPU has failed one: all are lost, then.
    lost: Option<ExecutorError>,
}

/// What one gave: outputs, and the tasks of the group that have none.
struct RunOnGpu {
    outputs: Vec<Tensor>,
    failed: Vec<(usize, String)>,
}

impl RunGroups for Runs<'_> {
    fn run(
        &mut self,
        group: &Group<'_>,
        tensors: Vec<Tensor>,
        take: &mut TakeResults<'_>,
    ) -> Result<(), ExecutorError> {
        if self.is_over() {
            return Err(ExecutorError("the GPU has failed another run of this batch".to_owned()));
        }
        let lengths = &group.lengths;
        let form = self.model.rungs.form(lengths).ok_or_else(|| {
            ExecutorError(format!("lengths {lengths:?} are none that executor = \"cuda\" runs, which begin at 1"))
        })?;
        let ran = self.model.run_group(self.on, (form, group.tasks.len()), &tensors, self.region);
        let RunOnGpu { outputs, failed } = ran.inspect_err(|error| self.lost = Some(error.clone()))?;
        take(&outputs.iter().map(Output::of).collect::<Vec<_>>(), &failed)
    }

    fn is_over(&self) -> bool {
        self.lost.is_some()
    }
}

impl Ports {
    fn of(groups: &Groups, lengths: &[usize], plan: &Plan) -> Result<Self, ExecutorError> {
        let inputs: Vec<usize> = plan.inputs.iter().map(|port| port.bytes() / plan.batch).collect();
        let elements = |input: usize| groups.shape_with(input, lengths).iter().product::<usize>();
        let given = groups.inputs.iter().enumerate().map(|(input, tensor)| elements(input) * tensor.datatype.bytes());
        let masks = groups.batching.generated.iter().zip(&groups.binding.generated).map(|(mask, datatype)| {
            let lengths = groups.binding.inputs[mask.source].iter().map(|&(_, length)| lengths[length]);
            lengths.product::<usize>() * datatype.bytes()
        });
        let expected: Vec<usize> = given.chain(masks).collect();
        if inputs != expected {
            return Err(ExecutorError(format!(
                "its inputs have {inputs:?} bytes for a task of lengths {lengths:?}, expected {expected:?} as \
                 config.pbtxt says"
            )));
        }
        let shapes = plan.outputs.iter().zip(&groups.outputs);
        let outputs: Vec<(DataType, Vec<usize>)> =
            shapes.map(|(port, tensor)| (tensor.datatype, port.shape.clone())).collect();
        let bytes = |(datatype, shape): &(DataType, Vec<usize>)| {
            shape.iter().product::<usize>() * datatype.bytes() / plan.batch
        };
        let found: Vec<usize> = plan.outputs.iter().map(|port| port.bytes() / plan.batch).collect();
        let expected: Vec<usize> = outputs.iter().map(bytes).collect();
        let has_rows = |(_, shape): &(DataType, Vec<usize>)| !groups.is_batched || shape.first() == Some(&plan.batch);
        if found != expected || !outputs.iter().all(has_rows) {
            return Err(ExecutorError(format!(
                "its outputs have {found:?} bytes for a task of lengths {lengths:?}, expected {expected:?} as \
                 config.pbtxt says, and a row for each task"
            )));
        }
        Ok(Self { inputs, output_bytes: found.iter().sum(), outputs })
    }

    /// Tensors out of the tasks' outputs, which lie one after another, each with all its tensors.
    fn outputs(&self, bytes: &[u8], (tasks, is_batched): (usize, bool)) -> Vec<Tensor> {
        let mut before = 0;
        let mut made = Vec::new();
        for (datatype, shape) in &self.outputs {
            let mut shape = shape.clone();
            if is_batched {
                shape[0] = tasks;
            }
            let mut tensor = Tensor::zeros(*datatype, &shape);
            let own = tensor.bytes().len() / tasks;
            for (task, into) in tensor.bytes_mut().chunks_exact_mut(own.max(1)).enumerate() {
                into.copy_from_slice(&bytes[task * self.output_bytes + before..][..own]);
            }
            before += own;
            made.push(tensor);
        }
        made
    }
}

/// Tasks one after another, each with its row of all tensors, of so many bytes each.
fn in_turn(tensors: &[Tensor], bytes: &[usize], tasks: usize) -> Vec<u8> {
    let mut joined = Vec::with_capacity(tasks * bytes.iter().sum::<usize>());
    for task in 0..tasks {
        for (tensor, &bytes) in tensors.iter().zip(bytes) {
            joined.extend_from_slice(&tensor.bytes()[task * bytes..][..bytes]);
        }
    }
    joined
}

/// That a configuration whose requests choose sizes asks for nothing that only the CPU does; says what it asks for.
pub(super) fn check(model: &Model, batching: &Batching) -> Result<(), String> {
    let tensors = || model.inputs.iter().chain(&model.outputs);
    if let Some(text) = tensors().find(|tensor| tensor.datatype == DataType::Bytes) {
        return Err(format!("{} has strings", text.name));
    }
    if let Some(optional) = model.inputs.iter().find(|tensor| tensor.is_optional()) {
        return Err(format!("requests may leave {} out", optional.name));
    }
    let is_mask = |kind: GeneratedKind| kind == GeneratedKind::Mask;
    if batching.is_joined() || !batching.generated.iter().all(|generated| is_mask(generated.kind)) {
        return Err("tensors are joined, or inputs made by batch_input".to_owned());
    }
    let chosen = |tensor: &&repository::Tensor| tensor.variable.is_some();
    if let Some(output) = model.outputs.iter().find(chosen).filter(|_| !model.inputs.iter().any(|it| chosen(&it))) {
        return Err(format!("the size of {} follows from what is computed", output.name));
    }
    if batching.lengths == BatchLengths::Equal {
        let name = tensors().find(chosen).map_or("", |tensor| &tensor.name);
        return Err(format!(
            "the size of {name} is a request's choice, and nothing says that tasks may be padded (parameters: \
             batch_lengths \"padded\" or \"bucketed:64,256\", and mask_inputs or a mask of the clients' if the model \
             must know what is padding)"
        ));
    }
    Ok(())
}
