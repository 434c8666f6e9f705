//! What the executor that runs models by ONNX Runtime costs beside ONNX Runtime alone: the same file, session options
//! and threads, with tensors that are in memory, in pairs of runs one after the other.
//!
//! ```text
//! cargo run --release -p backend --example executors -- [--json] [--threads N] FOLDER..
//! ```
//!
//! Each folder is that of a model whose tensors have fixed sizes. `bench/executors` gets real ones and calls this.
#![allow(clippy::disallowed_methods)] // It measures, by the clock.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use backend::{
    config::{Gpus, OnnxRuntime},
    executor::{self, Executor, Programs},
};
use ort::{
    session::{Session, SessionInputValue},
    value::TensorRef,
};
use repository::{DataType, Model, Processor, cell};
use serde_json::json;

type Error = Box<dyn std::error::Error>;

/// Tasks of a batch.
const BATCHES: [usize; 3] = [1, 4, 8];
/// Pairs of runs whose median counts, of each batch.
const PAIRS: usize = 9;
/// How many times as fast it is at least.
const RATIO_MIN: f64 = 0.95;
/// Runs that are not counted.
const WARM_UP: usize = 3;
/// A run that is shorter than this is repeated until it is not.
const LEAST: Duration = Duration::from_millis(50);

/// What a batch takes, and how many times as fast as ONNX Runtime alone that is.
struct Measured {
    batch: usize,
    alone: Duration,
    executor: Duration,
    ratio: f64,
}

fn main() -> Result<(), Error> {
    let (mut is_json, mut threads, mut folders) = (false, 1, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => is_json = true,
            "--threads" => threads = arguments.next().ok_or("--threads: found nothing, expected a number")?.parse()?,
            _ => folders.push(PathBuf::from(argument)),
        }
    }
    let settings = OnnxRuntime { threads: Some(threads), ..OnnxRuntime::default() };
    let library = executor::onnxruntime_library(&settings, executor::python_package().as_deref())?;
    let (mut models, mut slow) = (Vec::new(), Vec::new());
    for folder in &folders {
        let model = repository::load_model(folder)?;
        let measured = measure(&model, &settings)?;
        if !is_json {
            for Measured { batch, alone, executor, ratio } in &measured {
                println!(
                    "{} x {batch}: alone {alone:.2?}, executor {executor:.2?}, {ratio:.3} times as fast",
                    model.name
                );
            }
        }
        let below = measured.iter().filter(|size| size.ratio < RATIO_MIN);
        slow.extend(below.map(|size| format!("{} x {}: {:.3}", model.name, size.batch, size.ratio)));
        let sizes = measured.iter().map(|size| {
            let ms = |span: Duration| span.as_secs_f64() * 1e3;
            json!({
                "batch": size.batch, "alone_ms": ms(size.alone), "executor_ms": ms(size.executor), "ratio": size.ratio,
            })
        });
        models.push(json!({ "model": model.name, "sizes": sizes.collect::<Vec<_>>() }));
    }
    if is_json {
        println!("{}", json!({ "library": library.path, "threads": threads, "pairs": PAIRS, "models": models }));
    }
    match slow.is_empty() {
        true => Ok(()),
        false => Err(format!("found {}, expected at least {RATIO_MIN}", slow.join(", ")).into()),
    }
}

fn measure(model: &Model, settings: &OnnxRuntime) -> Result<Vec<Measured>, Error> {
    let mut model = model.clone();
    let repository::Executor::Onnx { wanted, .. } = &mut model.executor else {
        return Err(format!("{} is no ONNX model", model.name).into());
    };
    wanted.processor = Some(Processor::Onnxruntime);
    let is_fixed = !cell::is_record(&model.inputs) && !cell::is_record(&model.outputs);
    let is_float = model.inputs.iter().all(|input| input.datatype == DataType::Fp32);
    if !is_fixed || !is_float {
        return Err(format!("{}: expected inputs of FP32, and tensors of fixed sizes", model.name).into());
    }
    let executor = executor::load(&model, (&[0], &Gpus::Count(1)), settings, &Programs::default())?;
    let mut session = executor::onnxruntime_session(&model, settings)?;
    BATCHES.iter().map(|&batch| pairs(&model, executor.as_ref(), &mut session, batch)).collect()
}

fn pairs(model: &Model, executor: &dyn Executor, session: &mut Session, batch: usize) -> Result<Measured, Error> {
    let tensors: Vec<(Vec<usize>, Vec<f32>)> = (model.inputs.iter())
        .map(|input| {
            let numbers = (0..batch * input.elements()).map(|at| (at % 255) as f32 / 255.0).collect();
            let shape: Vec<usize> = [batch].into_iter().chain(input.model_shape().iter().copied()).collect();
            (shape, numbers)
        })
        .collect();
    // Task by task, as they come.
    let task = |task: usize| {
        let of_task = tensors.iter().zip(&model.inputs).flat_map(move |((_, numbers), input)| {
            numbers[task * input.elements()..][..input.elements()].iter().flat_map(|number| number.to_le_bytes())
        });
        of_task.collect::<Vec<u8>>()
    };
    let inputs: Vec<u8> = (0..batch).flat_map(task).collect();
    let mut outputs = vec![0; batch * model.output_bytes()];
    let mut by_executor = || match executor.execute(&inputs, &mut outputs) {
        Ok(failed) if failed.is_empty() => Ok(()),
        Ok(failed) => Err(Error::from(failed[0].reason.clone())),
        Err(error) => Err(error.into()),
    };
    let mut by_session = || -> Result<(), Error> {
        let values = tensors.iter().zip(&model.inputs).map(|((shape, numbers), input)| {
            let value = TensorRef::from_array_view((&shape[..], &numbers[..]))?;
            Ok((input.name.clone(), SessionInputValue::from(value)))
        });
        let outputs = session.run(values.collect::<ort::Result<Vec<_>>>()?)?;
        // They are there; whoever wants them reads them where they are.
        std::hint::black_box(outputs.len());
        Ok(())
    };
    for _ in 0..WARM_UP {
        by_session()?;
        by_executor()?;
    }
    let mut found = Vec::new();
    for pair in 0..PAIRS {
        // Whichever comes first has the caches as another left them.
        let (alone, executor) = if pair % 2 == 0 {
            let alone = time(&mut by_session)?;
            (alone, time(&mut by_executor)?)
        } else {
            let executor = time(&mut by_executor)?;
            (time(&mut by_session)?, executor)
        };
        found.push((alone.as_secs_f64() / executor.as_secs_f64(), alone, executor));
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (ratio, alone, executor) = found[PAIRS / 2];
    Ok(Measured { batch, alone, executor, ratio })
}

/// What one run takes.
fn time(run: &mut dyn FnMut() -> Result<(), Error>) -> Result<Duration, Error> {
    let started = Instant::now();
    let mut runs = 0;
    while runs == 0 || started.elapsed() < LEAST {
        run()?;
        runs += 1;
    }
    Ok(started.elapsed() / runs)
}
