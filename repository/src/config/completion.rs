//! What a configuration leaves out, as its model's ONNX file has it (Triton's auto-completion).
//!
//! It is written into the parsed message, so that what follows checks one whole configuration, wherever a part of it
//! came from; errors about what came from the file name the file.

use std::path::Path;

use prost_reflect::{DynamicMessage, Value};
use proto::LatencyProfile;

use super::{PROCESS, PYTHON, variable::is_ragged};
use crate::{
    config::file::{ConfigFile, MODEL_CONFIG, ONNX_FILE, data_types, dims, get, is_onnx, text},
    error::RepositoryError,
    model::ONNX,
    onnx::{self, Signature},
};

/// `max_batch_size` of a model whose file allows any. Triton takes 4; here the objective bounds batches anyway.
const MAX_BATCH_DEFAULT: usize = 32;
const _: () = assert!(MAX_BATCH_DEFAULT <= LatencyProfile::MAX_BATCH);

impl ConfigFile<'_> {
    /// Completes the configuration of a model that has a file, if it lacks anything that the file says, and that of one
    /// that a program runs, if it lacks tensors.
    pub(super) fn complete(&mut self) -> Result<(), RepositoryError> {
        let mut executor = self.executor_name();
        if executor.is_empty() && self.is_python() {
            self.message.set_field_by_name("backend", Value::String(PYTHON.to_owned()));
            executor = PYTHON.to_owned();
        }
        if [PYTHON, PROCESS].contains(&executor.as_str()) {
            return if ["input", "output"].iter().any(|key| self.lacks_tensors(key)) { self.ask() } else { Ok(()) };
        }
        if !executor.is_empty() && !is_onnx(&executor) {
            return Ok(());
        }
        let lacks_batch = !self.says_batch && get(&self.message, "max_batch_size").as_i32() == Some(0);
        let lacks_tensors = ["input", "output"].map(|key| self.lacks_tensors(key));
        if !executor.is_empty() && !lacks_batch && lacks_tensors == [false; 2] {
            return Ok(());
        }
        let file = self.model_file(ONNX_FILE)?;
        if executor.is_empty() {
            self.message.set_field_by_name("backend", Value::String(ONNX.to_owned()));
        }
        if !lacks_batch && lacks_tensors == [false; 2] {
            return Ok(());
        }
        let signature = Signature::read(&file)?;
        let keys = signature.outputs.iter().filter_map(|output| Some((output.name.clone(), output.keys.clone()?)));
        self.keys = keys.collect();
        self.has_free_rows = signature.has_free_rows();
        if lacks_batch && self.has_batch_dimension(&signature, &self.generated_names()?) {
            self.message.set_field_by_name("max_batch_size", Value::I32(MAX_BATCH_DEFAULT as i32));
        }
        for (key, values, is_lacking) in
            [("input", &signature.inputs, lacks_tensors[0]), ("output", &signature.outputs, lacks_tensors[1])]
        {
            if is_lacking {
                self.complete_tensors(key, values, &file)?;
            }
        }
        Ok(())
    }

    /// Whether the first dimension of the file's tensors is the batch, though `max_batch_size` does not say so: it can
    /// be, and no `dims` name it. What is joined has none, and inputs that are made for each run have what it gives.
    fn has_batch_dimension(&self, signature: &Signature, generated: &[String]) -> bool {
        let is_whole = |key: &str, values: &[onnx::Value]| {
            let tensors = get(&self.message, key);
            let mut tensors = tensors.as_list().unwrap_or_default().iter().filter_map(Value::as_message);
            tensors.any(|tensor| {
                let value = values.iter().find(|value| value.name == text(tensor, "name"));
                let rank = value.and_then(|value| value.shape.as_ref()).map(Vec::len);
                let dims = match get(tensor, "reshape").as_message() {
                    Some(reshape) if tensor.has_field_by_name("reshape") => dims(reshape, "shape"),
                    _ => dims(tensor, "dims"),
                };
                is_ragged(tensor) || !lacks_dims(tensor) && rank == Some(dims.len())
            })
        };
        signature.is_batched(generated)
            && !is_whole("input", &signature.inputs)
            && !is_whole("output", &signature.outputs)
    }

    fn lacks_tensors(&self, key: &str) -> bool {
        let tensors = get(&self.message, key);
        let tensors = tensors.as_list().unwrap_or_default();
        tensors.is_empty()
            || tensors.iter().filter_map(Value::as_message).any(|tensor| lacks_type(tensor) || lacks_dims(tensor))
    }

    /// Names all tensors of the file if the configuration names none, and completes those that it names.
    fn complete_tensors(&mut self, key: &str, values: &[onnx::Value], file: &Path) -> Result<(), RepositoryError> {
        let is_batched = get(&self.message, "max_batch_size").as_i32() != Some(0);
        let field = MODEL_CONFIG.get_field_by_name(key).expect("the schema declares it");
        let kind = field.kind();
        let tensor = kind.as_message().expect("the schema says message");
        let named = |value: &onnx::Value| {
            let mut message = DynamicMessage::new(tensor.clone());
            message.set_field_by_name("name", Value::String(value.name.clone()));
            message
        };
        let configured = get(&self.message, key);
        let configured = configured.as_list().unwrap_or_default().iter().filter_map(Value::as_message).cloned();
        let mut tensors: Vec<DynamicMessage> = configured.collect();
        if tensors.is_empty() {
            let generated = if key == "input" { self.generated_names()? } else { Vec::new() };
            tensors = values.iter().filter(|value| !generated.contains(&value.name)).map(named).collect();
        }
        if let Some(at) = tensors.iter().position(|tensor| is_ragged(tensor) && lacks_dims(tensor)) {
            let expected = "those of one request: the file has those of all of a batch, as allow_ragged_batch says";
            return Err(self.error(&format!("{key}[{at}].dims"), "none", expected));
        }
        let has_free_rows = !is_batched && key == "output" && self.has_free_rows;
        for tensor in &mut tensors {
            let name = text(tensor, "name");
            let Some(value) = values.iter().find(|value| value.name == name) else {
                let known: Vec<&str> = values.iter().map(|value| value.name.as_str()).collect();
                let expected = format!("one of the model file's: {}", known.join(", "));
                return Err(self.error(&format!("{key}.name"), format_args!("\"{name}\""), expected));
            };
            if key == "output" && !is_batched && lacks_dims(tensor) {
                self.free_ranks.insert(name.clone());
            }
            let is_scalar = complete_tensor(tensor, value, (is_batched, has_free_rows))
                .map_err(|cause| RepositoryError(format!("{}: {key} '{name}': {cause}", file.display())))?;
            if is_scalar {
                self.scalars.insert(name);
            }
        }
        self.message.set_field(&field, Value::List(tensors.into_iter().map(Value::Message).collect()));
        Ok(())
    }
}

fn lacks_type(tensor: &DynamicMessage) -> bool {
    get(tensor, "data_type").as_enum_number() == Some(0)
}

fn lacks_dims(tensor: &DynamicMessage) -> bool {
    get(tensor, "dims").as_list().is_some_and(<[Value]>::is_empty)
}

/// Completes a tensor; yields whether one row of it has no dimension, as the file says. Where inputs have any number of
/// rows, an output with one in the file was noted for the example that it was exported with.
fn complete_tensor(
    tensor: &mut DynamicMessage,
    value: &onnx::Value,
    (is_batched, has_free_rows): (bool, bool),
) -> Result<bool, String> {
    if lacks_type(tensor) {
        let known = value.datatype.zip(data_types());
        let number = known.and_then(|(datatype, types)| types.get_value_by_name(&datatype.config_name()));
        let number = number.ok_or(
            "data_type: found none that the protocol has, expected BOOL, [U]INT8 to 64, FP16 to 64, BF16 or \
                    STRING",
        )?;
        tensor.set_field_by_name("data_type", Value::EnumNumber(number.number()));
    }
    if lacks_dims(tensor) {
        let mut dims = value.task_dims(is_batched).map_err(|found| {
            let batch = if is_batched { "a batch dimension and then " } else { "" };
            format!("dims: found shape {found}, expected {batch}any; or say dims in config.pbtxt")
        })?;
        if dims.contains(&0) {
            return Err(format!("dims: found shape {}, expected lengths above 0", value.shown_shape()));
        }
        if has_free_rows && let Some(first @ 1) = dims.first_mut() {
            *first = -1;
        }
        let is_scalar = dims.is_empty();
        tensor.set_field_by_name("dims", Value::List(dims.into_iter().map(Value::I64).collect()));
        return Ok(is_scalar);
    }
    Ok(false)
}
