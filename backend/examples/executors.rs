//! What the executor that runs models by ONNX Runtime costs beside ONNX Runtime alone: the same file, session options
//! and threads, with tensors that are in memory, in pairs of runs one after the other; and what a server that serves
//! them costs through HTTP, in the largest batch.
//!
//! ```text
//! cargo run --release -p backend --example executors -- [--json] [--threads N] [--server HOST:PORT] FOLDER..
//! ```
//!
//! Each folder is that of a model whose tensors have fixed sizes. `bench/executors` gets real ones and calls this.
#![allow(clippy::disallowed_methods)] // It measures, by the clock.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use backend::{
    config::{Gpus, OnnxRuntime},
    executor::{self, Programs},
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
/// A server that says nothing for so long is not waited for.
const PATIENCE: Duration = Duration::from_secs(30);
/// Batch that is asked for through HTTP, too.
const BATCH_OF_HTTP: usize = BATCHES[BATCHES.len() - 1];

/// What a batch takes, and how many times as fast as ONNX Runtime alone that is.
struct Measured {
    batch: usize,
    alone: Duration,
    other: Duration,
    ratio: f64,
}

/// A model, and ONNX Runtime's session of it.
struct Alone<'m> {
    model: &'m Model,
    session: Session,
}

fn main() -> Result<(), Error> {
    let (mut is_json, mut threads, mut server, mut folders) = (false, 1, None, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => is_json = true,
            "--threads" => threads = arguments.next().ok_or("--threads: found nothing, expected a number")?.parse()?,
            "--server" => server = Some(arguments.next().ok_or("--server: found nothing, expected HOST:PORT")?),
            _ => folders.push(PathBuf::from(argument)),
        }
    }
    let settings = OnnxRuntime { threads: Some(threads), ..OnnxRuntime::default() };
    let library = executor::onnxruntime_library(&settings, executor::python_package().as_deref())?;
    let (mut models, mut slow) = (Vec::new(), Vec::new());
    for folder in &folders {
        let model = onnx_model(folder)?;
        let mut alone = Alone { model: &model, session: executor::onnxruntime_session(&model, &settings)? };
        let sizes = of_executor(&mut alone, &settings)?;
        let through = server.as_deref().map(|server| through_http(&mut alone, server)).transpose()?;
        if !is_json {
            print(&model.name, "executor", &sizes);
            print(&model.name, "through HTTP", through.as_slice());
        }
        let below = sizes.iter().filter(|size| size.ratio < RATIO_MIN);
        slow.extend(below.map(|size| format!("{} x {}: {:.3}", model.name, size.batch, size.ratio)));
        let sizes: Vec<_> = sizes.iter().map(|size| to_json(size, "executor_ms")).collect();
        let through = through.map(|size| to_json(&size, "http_ms"));
        models.push(json!({ "model": model.name, "sizes": sizes, "http": through }));
    }
    if is_json {
        println!("{}", json!({ "library": library.path, "threads": threads, "pairs": PAIRS, "models": models }));
    }
    match slow.is_empty() {
        true => Ok(()),
        false => Err(format!("found {}, expected at least {RATIO_MIN}", slow.join(", ")).into()),
    }
}

fn print(model: &str, what: &str, sizes: &[Measured]) {
    for Measured { batch, alone, other, ratio } in sizes {
        println!("{model} x {batch}: alone {alone:.2?}, {what} {other:.2?}, {ratio:.3} times as fast");
    }
}

fn to_json(size: &Measured, other: &str) -> serde_json::Value {
    let ms = |span: Duration| span.as_secs_f64() * 1e3;
    json!({ "batch": size.batch, "alone_ms": ms(size.alone), other: ms(size.other), "ratio": size.ratio })
}

/// A model whose tensors have fixed sizes, to be run by ONNX Runtime.
fn onnx_model(folder: &Path) -> Result<Model, Error> {
    let mut model = repository::load_model(folder)?;
    let repository::Executor::Onnx { wanted, .. } = &mut model.executor else {
        return Err(format!("{} is no ONNX model", model.name).into());
    };
    wanted.processor = Some(Processor::Onnxruntime);
    let is_fixed = !cell::is_record(&model.inputs) && !cell::is_record(&model.outputs);
    let is_float = model.inputs.iter().all(|input| input.datatype == DataType::Fp32);
    if !is_fixed || !is_float {
        return Err(format!("{}: expected inputs of FP32, and tensors of fixed sizes", model.name).into());
    }
    Ok(model)
}

/// The executor beside ONNX Runtime alone, for each of [`BATCHES`].
fn of_executor(alone: &mut Alone<'_>, settings: &OnnxRuntime) -> Result<Vec<Measured>, Error> {
    let model = alone.model;
    let executor = executor::load(model, (&[0], &Gpus::Count(1)), settings, &Programs::default())?;
    let of_batch = |batch| {
        let tensors = tensors(model, batch);
        // Task by task, as they come.
        let task = |task: usize| {
            let of_task = tensors.iter().zip(&model.inputs).flat_map(move |((_, numbers), input)| {
                numbers[task * input.elements()..][..input.elements()].iter().flat_map(|number| number.to_le_bytes())
            });
            of_task.collect::<Vec<u8>>()
        };
        let inputs: Vec<u8> = (0..batch).flat_map(task).collect();
        let mut outputs = vec![0; batch * model.output_bytes()];
        let by_executor = || match executor.execute(&inputs, &mut outputs) {
            Ok(failed) if failed.is_empty() => Ok(()),
            Ok(failed) => Err(Error::from(failed[0].reason.clone())),
            Err(error) => Err(error.into()),
        };
        pairs(alone, batch, by_executor)
    };
    BATCHES.into_iter().map(of_batch).collect()
}

/// One client of a server that serves the model, beside ONNX Runtime alone: [`BATCH_OF_HTTP`] rows a request, as bytes.
fn through_http(alone: &mut Alone<'_>, server: &str) -> Result<Measured, Error> {
    let tensors = tensors(alone.model, BATCH_OF_HTTP);
    let inputs = tensors.iter().zip(&alone.model.inputs).map(|((shape, numbers), input)| {
        let parameters = json!({ "binary_data_size": size_of_val(&numbers[..]) });
        json!({ "name": input.name, "datatype": "FP32", "shape": shape, "parameters": parameters })
    });
    let head =
        json!({ "inputs": inputs.collect::<Vec<_>>(), "parameters": { "binary_data_output": true } }).to_string();
    let bytes = tensors.iter().flat_map(|(_, numbers)| numbers).flat_map(|number| number.to_le_bytes());
    let body: Vec<u8> = head.bytes().chain(bytes).collect();
    let mut request = format!(
        "POST /v2/models/{}/infer HTTP/1.1\r\nHost: {server}\r\nInference-Header-Content-Length: {}\r\n\
         Content-Length: {}\r\n\r\n",
        alone.model.name,
        head.len(),
        body.len()
    )
    .into_bytes();
    request.extend(body);
    let mut connection = BufReader::new(TcpStream::connect(server)?);
    connection.get_ref().set_nodelay(true)?;
    connection.get_ref().set_read_timeout(Some(PATIENCE))?;
    connection.get_ref().set_write_timeout(Some(PATIENCE))?;
    pairs(alone, BATCH_OF_HTTP, || {
        connection.get_mut().write_all(&request)?;
        answer(&mut connection)
    })
}

/// Reads an answer, and throws it away.
fn answer(connection: &mut BufReader<TcpStream>) -> Result<(), Error> {
    let mut lines = connection.by_ref().lines();
    let status = lines.next().ok_or("the server closed the connection")??;
    let mut length = 0;
    for line in lines {
        let line = line?.to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse()?;
        }
    }
    let mut body = vec![0; length];
    connection.read_exact(&mut body)?;
    match status.contains(" 200 ") {
        true => Ok(()),
        false => Err(format!("{status}: {}", String::from_utf8_lossy(&body)).into()),
    }
}

/// Shape and numbers of each input of a batch.
fn tensors(model: &Model, batch: usize) -> Vec<(Vec<usize>, Vec<f32>)> {
    let of_input = |input: &repository::Tensor| {
        let numbers = (0..batch * input.elements()).map(|at| (at % 255) as f32 / 255.0).collect();
        let shape = [batch].into_iter().chain(input.model_shape().iter().copied()).collect();
        (shape, numbers)
    };
    model.inputs.iter().map(of_input).collect()
}

/// The median of [`PAIRS`] runs of both.
fn pairs(alone: &mut Alone<'_>, batch: usize, mut other: impl FnMut() -> Result<(), Error>) -> Result<Measured, Error> {
    let tensors = tensors(alone.model, batch);
    let mut by_session = || -> Result<(), Error> {
        let values = tensors.iter().zip(&alone.model.inputs).map(|((shape, numbers), input)| {
            let value = TensorRef::from_array_view((&shape[..], &numbers[..]))?;
            Ok((input.name.clone(), SessionInputValue::from(value)))
        });
        let outputs = alone.session.run(values.collect::<ort::Result<Vec<_>>>()?)?;
        // They are there; whoever wants them reads them where they are.
        std::hint::black_box(outputs.len());
        Ok(())
    };
    for _ in 0..WARM_UP {
        by_session()?;
        other()?;
    }
    let mut found = Vec::new();
    for pair in 0..PAIRS {
        // Whichever comes first has the caches as another left them.
        let (alone, other) = if pair % 2 == 0 {
            let alone = time(&mut by_session)?;
            (alone, time(&mut other)?)
        } else {
            let other = time(&mut other)?;
            (time(&mut by_session)?, other)
        };
        found.push((alone.as_secs_f64() / other.as_secs_f64(), alone, other));
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (ratio, alone, other) = found[PAIRS / 2];
    Ok(Measured { batch, alone, other, ratio })
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
