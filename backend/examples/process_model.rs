//! A program that runs a model over the protocol of docs/process.md: each output is the sum of its task's input,
//! FP32 in
//! and out. It uses the shared memory as a file; whoever wants views of it maps it.
//!
//! ```text
//! backend: "process" max_batch_size: 64
//! input { name: "x" data_type: TYPE_FP32 dims: 16 } output { name: "sum" data_type: TYPE_FP32 dims: 1 }
//! parameters { key: "program" value { string_value: "./process_model" } }
//! ```

use std::{
    env,
    error::Error,
    fs::File,
    io::{BufRead as _, BufReader, Write as _},
    os::{
        fd::{FromRawFd as _, OwnedFd},
        unix::{fs::FileExt as _, net::UnixStream},
    },
};

use serde_json::{Value, json};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The number of a descriptor that the backend has opened for this program.
fn descriptor(name: &str) -> Result<i32> {
    let found = env::var(name).map_err(|_| format!("{name} is not set; backends start this program"))?;
    Ok(found.parse()?)
}

/// A number in a message.
fn number(of: &Value, key: &str) -> Result<u64> {
    Ok(of[key].as_u64().ok_or_else(|| format!("{key} is missing in {of}"))?)
}

fn say(control: &mut UnixStream, message: &Value) -> Result<()> {
    Ok(writeln!(control, "{message}")?)
}

/// What this model takes and gives is as its configuration has it, or it cannot be served.
fn check(model: &Value) -> Result<()> {
    for kind in ["inputs", "outputs"] {
        let tensors = model[kind].as_array().map(Vec::as_slice).unwrap_or_default();
        let [tensor] = tensors else { return Err(format!("{kind}: found {}, expected one", tensors.len()).into()) };
        if tensor["datatype"] != "FP32" {
            return Err(format!("{kind}: found {}, expected FP32", tensor["datatype"]).into());
        }
    }
    if model["outputs"][0]["shape"] != json!([1]) {
        return Err("outputs: expected shape [1]".into());
    }
    let dims = model["inputs"][0]["shape"].as_array().map(Vec::as_slice).unwrap_or_default();
    match dims.contains(&json!(-1)) {
        true => Err("inputs: expected dims of one size".into()),
        false => Ok(()),
    }
}

/// Sums the rows of a batch, which is one group as long as `dims` are of one size. Yields the outputs of all its tasks.
fn run(batch: &Value, memory: &File, output_offset: u64) -> Result<Value> {
    let group = &batch["groups"][0];
    let (tasks, input) = (number(group, "tasks")?, &group["inputs"][0]);
    let mut bytes = vec![0; number(input, "bytes")? as usize];
    memory.read_exact_at(&mut bytes, number(input, "offset")?)?;
    let values: Vec<f32> = bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
    let sums = values.chunks(values.len() / tasks as usize).map(|row| row.iter().sum::<f32>());
    let outputs: Vec<u8> = sums.flat_map(f32::to_le_bytes).collect();
    memory.write_all_at(&outputs, output_offset)?;
    let placed = json!({ "datatype": "FP32", "shape": [tasks, 1], "offset": output_offset, "bytes": outputs.len() });
    Ok(json!({ "tasks": tasks, "outputs": [placed] }))
}

fn main() -> Result<()> {
    // SAFETY: the backend has opened it for this program, and nobody else here takes it.
    let control = unsafe { OwnedFd::from_raw_fd(descriptor("DOWNBEAT_CONTROL_FD")?) };
    let mut control = UnixStream::from(control);
    let path = format!("/proc/self/fd/{}", descriptor("DOWNBEAT_MEMORY_FD")?);
    let memory = File::options().read(true).write(true).open(path)?;
    let mut lines = BufReader::new(control.try_clone()?).lines();
    let Some(first) = lines.next().transpose()? else { return Ok(()) };
    let model = &serde_json::from_str::<Value>(&first)?["model"];
    if model.is_null() {
        return say(&mut control, &json!({ "refused": "say input and output in config.pbtxt" }));
    }
    if let Err(reason) = check(model) {
        return say(&mut control, &json!({ "refused": reason.to_string() }));
    }
    let output_offset = number(&model["output_area"], "offset")?;
    say(&mut control, &json!({ "ready": { "protocol": 2 } }))?;
    // The end of the lines is the end of the model.
    for line in lines {
        let batch = &serde_json::from_str::<Value>(&line?)?["batch"];
        let id = number(batch, "id")?;
        let answer = match run(batch, &memory, output_offset) {
            Ok(answered) => json!({ "done": { "id": id, "groups": [answered] } }),
            Err(reason) => json!({ "failed": { "id": id, "reason": reason.to_string() } }),
        };
        say(&mut control, &answer)?;
    }
    Ok(())
}
