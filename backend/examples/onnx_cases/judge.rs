//! Loads a case's model as a backend does, asks it, and compares.

use std::{
    fs, iter,
    panic::{AssertUnwindSafe, catch_unwind},
};

use backend::executor::{Executor, rows};
use repository::{DataType, Model, Tensor, cell};

use crate::{
    arms::Arm,
    cases::{Case, Request, Value},
};

/// What is allowed however small a number is: beside numbers near 1, as those that a sigmoid adds to, FP32 has no finer
/// steps than a tenth of that.
const ABSOLUTE: f64 = 1e-6;

/// How a case ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    Passed,
    /// It was not loaded.
    Refused,
    /// It was, and was answered with an error.
    Failed,
    /// It was, and was answered with something else than what must come out, or what ran it panicked.
    Wrong,
}

impl Verdict {
    /// As it is printed.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Wrong => "wrong",
        }
    }
}

/// How far numbers may be off.
#[derive(Debug, Clone, Copy)]
struct Tolerance {
    /// This part of each.
    relative: f64,
    /// This part of the largest.
    rounding: f64,
    /// This much, however small they are.
    absolute: f64,
    /// Of whole numbers of eight bits: so many steps.
    steps: u8,
}

impl Tolerance {
    fn of(case: &Case, arm: Arm) -> Self {
        // Where a number lies between two steps, rounding decides.
        let quantises = ["QuantizeLinear", "DynamicQuantizeLinear"].iter().any(|name| case.operators().contains(name));
        let steps = u8::from(quantises);
        match case.tolerance.filter(|_| arm != Arm::CudaHalf) {
            Some([relative, absolute]) => Self { relative, rounding: 0.0, absolute, steps },
            None => {
                let [relative, rounding] = arm.tolerance();
                Self { relative, rounding, absolute: ABSOLUTE, steps }
            }
        }
    }
}

/// How a case ends for an arm, and why if it does not pass.
pub(crate) fn judge(case: &Case, arm: Arm) -> Result<(), (Verdict, String)> {
    let folder = tempfile::tempdir().expect("a folder for a model");
    let version = folder.path().join("m/1");
    let file = version.join("model.onnx");
    fs::create_dir_all(&version).expect("room for a model");
    fs::write(&file, &case.file).expect("room for a model");
    fs::write(folder.path().join("m/config.pbtxt"), &case.config).expect("room for a model");
    let refused = |why: String| (Verdict::Refused, why);
    let model = repository::load_model(&folder.path().join("m")).map_err(|error| refused(error.to_string()))?;
    let panicked = |when| (Verdict::Wrong, format!("panicked while it {when}"));
    let executor = catch_unwind(AssertUnwindSafe(|| arm.load(&model, &file)));
    let executor = executor.map_err(|_| panicked("was loaded"))?.map_err(refused)?;
    let tolerance = Tolerance::of(case, arm);
    let ask = |(index, [inputs, expected]): (usize, &Request)| {
        let found = answers(&model, executor.as_ref(), inputs)?;
        let mut may = iter::once(expected)
            .chain(case.unfused.get(index))
            .map(|may| judge_answers(&model, &found, may, tolerance));
        let first = may.next().expect("there is one");
        first.or_else(|wrong| may.next().unwrap_or(Err(wrong)))
    };
    let ask_all = || case.requests.iter().enumerate().try_for_each(ask);
    catch_unwind(AssertUnwindSafe(ask_all)).map_err(|_| panicked("ran"))?
}

/// Of each task what came out, as backends push it.
struct Answers {
    tasks: usize,
    outputs: Vec<u8>,
}

/// Runs a model as a backend does.
fn answers(model: &Model, executor: &dyn Executor, inputs: &[Value]) -> Result<Answers, (Verdict, String)> {
    let failed = |why| (Verdict::Failed, why);
    let tasks = if model.is_batched { inputs.first().map_or(0, |input| input.shape[0]) } else { 1 };
    let records = records(model, inputs, tasks).map_err(failed)?;
    if tasks > 1 && !executor.is_apart() {
        let (first, _) = cell::split_first(&model.inputs, &records).expect("there are some");
        let why = rows::why_apart(model, first, &mut |inputs, outputs| executor.run_once(inputs, outputs));
        if why.is_some() {
            executor.run_apart();
        }
    }
    let mut outputs = vec![0; tasks * cell::bytes_max(&model.outputs)];
    let errors = executor.execute(&records, &mut outputs).map_err(|error| failed(error.to_string()))?;
    errors.first().map_or(Ok(Answers { tasks, outputs }), |error| Err(failed(error.reason.clone())))
}

/// Compares.
fn judge_answers(
    model: &Model,
    Answers { tasks, outputs }: &Answers,
    expected: &[Value],
    tolerance: Tolerance,
) -> Result<(), (Verdict, String)> {
    let wrong = |what: String| (Verdict::Wrong, what);
    // Each has as much room as it may take.
    let room = cell::bytes_max(&model.outputs);
    for (task, own) in outputs.chunks_exact(room).enumerate() {
        let (own, _) = cell::split_first(&model.outputs, own).ok_or_else(|| wrong("torn outputs".into()))?;
        let found = cell::read(&model.outputs, own).map_err(|error| wrong(error.to_string()))?;
        for (tensor, (found, expected)) in iter::zip(&model.outputs, iter::zip(found, expected)) {
            let found = found.ok_or_else(|| "found none".to_owned());
            let expected = if model.is_batched { expected.row(task, *tasks) } else { expected.clone() };
            let compared = found.and_then(|found| compare(tensor, &found, &expected, tolerance));
            compared.map_err(|what| wrong(format!("{}: {what}", tensor.name)))?;
        }
    }
    Ok(())
}

/// Tasks as backends have them.
fn records(model: &Model, inputs: &[Value], tasks: usize) -> Result<Vec<u8>, String> {
    let mut records = Vec::new();
    for task in 0..tasks {
        let rows = inputs.iter().map(|value| if model.is_batched { value.row(task, tasks) } else { value.clone() });
        let rows: Vec<Value> = rows.collect();
        let cells = iter::zip(&model.inputs, &rows).map(|(tensor, value)| {
            let shape = tensor.client_shape_of(&value.shape).unwrap_or_else(|| value.shape.clone());
            Some(cell::Cell { shape, data: &value.data })
        });
        let mut record = vec![0; cell::bytes_max(&model.inputs)];
        let bytes = cell::write(&model.inputs, &cells.collect::<Vec<_>>(), &mut record);
        record.truncate(bytes.map_err(|error| error.to_string())?);
        records.extend(record);
    }
    Ok(records)
}

fn compare(
    tensor: &Tensor,
    found: &cell::Cell<'_>,
    expected: &Value,
    Tolerance { relative, rounding, absolute, steps }: Tolerance,
) -> Result<(), String> {
    // NumPy has no BF16, so ONNX's tests have its bits.
    let are_bits = (tensor.datatype, expected.datatype) == (DataType::Bf16, DataType::Uint16);
    if tensor.datatype != expected.datatype && !are_bits {
        return Err(format!("found {}, expected {}", tensor.datatype, expected.datatype));
    }
    // The shape that its model gives.
    let shape = tensor.model_shape_of(&found.shape);
    if shape != expected.shape {
        return Err(format!("found shape {shape:?}, expected {:?}", expected.shape));
    }
    let numbers = |data: &[u8]| -> Option<Vec<f64>> {
        Some(match tensor.datatype {
            DataType::Fp16 => data.as_chunks().0.iter().map(|bytes| half::f16::from_le_bytes(*bytes).into()).collect(),
            DataType::Bf16 => data.as_chunks().0.iter().map(|bytes| half::bf16::from_le_bytes(*bytes).into()).collect(),
            DataType::Fp32 => data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes).into()).collect(),
            DataType::Fp64 => data.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect(),
            _ => return None,
        })
    };
    let (Some(found_numbers), Some(expected_numbers)) = (numbers(found.data), numbers(&expected.data)) else {
        let is_step = |(found, expected): (&u8, &u8)| match tensor.datatype {
            DataType::Int8 => found.cast_signed().abs_diff(expected.cast_signed()) <= steps,
            _ => found.abs_diff(*expected) <= steps,
        };
        let is_close = match tensor.datatype {
            DataType::Uint8 | DataType::Int8 => {
                found.data.len() == expected.data.len() && iter::zip(found.data, &expected.data).all(is_step)
            }
            _ => found.data == expected.data,
        };
        return if is_close { Ok(()) } else { Err("found other elements".to_owned()) };
    };
    let finite = expected_numbers.iter().filter(|number| number.is_finite());
    let largest = finite.fold(0.0, |largest: f64, number| largest.max(number.abs()));
    let is_close = |(found, expected): (f64, f64)| {
        found == expected
            || (found.is_nan() && expected.is_nan())
            || (found - expected).abs() <= absolute + rounding * largest + relative * expected.abs()
    };
    let mut pairs = iter::zip(found_numbers, expected_numbers);
    let differs = pairs.find(|&pair| !is_close(pair));
    differs.map_or(Ok(()), |(found, expected)| Err(format!("found {found}, expected {expected}")))
}
