//! An ONNX model on a real GPU: how long it takes for batches of some sizes, and whether its outputs are right. Prints
//! a JSON object for each size; the exit code is 1 if outputs are wrong, and 2 if nothing could be run.
//!
//! ```text
//! cargo run --release -p cuda --example model -- FILE [--precision fp32|tf32|fp16] [--batches 1,8,32] [--runs 1000]
//!     [--check] [--inputs FILE --outputs FILE]
//! ```
//!
//! `--check` compares with the interpreter, which is slow. The files hold the tensors of the last size one after
//! another as they lie in memory: what another framework was given, and what it made of it.

// The host's time is measured, too.
#![allow(clippy::disallowed_methods)]

use std::{error::Error, process::ExitCode, sync::Arc, time::Instant};

use cuda::{
    Driver, DriverError,
    driver::{
        Address, Bases, Graph, Page, Stream,
        real::{Cuda, GpuName},
    },
};
use half::f16;
use lowering::{
    Lowered, Plan, Port, Precision, Type,
    interpret::{self, Memory},
    lower,
};
use proto::weights::PAGE_BYTES;
use tract_onnx::{
    prelude::*,
    tract_hir::infer::{GenericFactoid, ShapeFactoid},
};
use transport::Region;

#[derive(Debug)]
struct Arguments {
    file: String,
    precision: Precision,
    batches: Vec<usize>,
    runs: usize,
    is_checked: bool,
    inputs: Option<Vec<u8>>,
    outputs: Option<Vec<u8>>,
}

impl Arguments {
    fn parse() -> Result<Self, Box<dyn Error>> {
        let mut words = std::env::args().skip(1);
        let mut parsed = Self {
            file: words.next().ok_or("expected an ONNX file")?,
            precision: Precision::Fp16,
            batches: vec![1, 8],
            runs: 1000,
            is_checked: false,
            inputs: None,
            outputs: None,
        };
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("expected a value behind {word}"));
            match word.as_str() {
                "--precision" => parsed.precision = precision(&value()?)?,
                "--batches" => parsed.batches = value()?.split(',').map(str::parse).collect::<Result<_, _>>()?,
                "--runs" => parsed.runs = value()?.parse()?,
                "--check" => parsed.is_checked = true,
                "--inputs" => parsed.inputs = Some(std::fs::read(value()?)?),
                "--outputs" => parsed.outputs = Some(std::fs::read(value()?)?),
                other => return Err(format!("{other} is no option").into()),
            }
        }
        Ok(parsed)
    }

    /// What binary16 and TF32 may be off by, of the largest number.
    fn tolerance(&self) -> f64 {
        match self.precision {
            Precision::Fp32 => 1e-4,
            Precision::Tf32 | Precision::Fp16 => 3e-2,
        }
    }
}

fn precision(name: &str) -> Result<Precision, String> {
    match name {
        "fp32" => Ok(Precision::Fp32),
        "tf32" => Ok(Precision::Tf32),
        "fp16" => Ok(Precision::Fp16),
        other => Err(format!("{other} is no precision: give fp32, tf32 or fp16")),
    }
}

pub(crate) fn main() -> ExitCode {
    match Arguments::parse().and_then(|arguments| run(&arguments)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

/// Whether all outputs were right.
fn run(arguments: &Arguments) -> Result<bool, Box<dyn Error>> {
    let (graph, batch) = read(&arguments.file)?;
    let from = Instant::now();
    let lowered = lower(&graph, Some(&batch), &arguments.batches, arguments.precision)?;
    let mib = lowered.weights.len() >> 20;
    println!("{{\"lowered_ms\": {}, \"weights_mib\": {mib}}}", from.elapsed().as_millis());
    let gpu = Loaded::new(&lowered)?;
    let mut is_right = true;
    for (index, plan) in lowered.plans.iter().enumerate() {
        let is_last = index + 1 == lowered.plans.len();
        let given = arguments.inputs.as_ref().filter(|_| is_last);
        let inputs = match given {
            Some(bytes) => split(&plan.inputs, bytes)?,
            None => plan.inputs.iter().map(random).collect(),
        };
        let outputs = gpu.measure(plan, &inputs, arguments.runs)?;
        if let Some(wanted) = arguments.outputs.as_ref().filter(|_| is_last && given.is_some()) {
            is_right &= agrees("file", plan, &outputs, &split(&plan.outputs, wanted)?, arguments.tolerance());
        }
        if arguments.is_checked {
            let wanted = interpreted(plan, &lowered.weights, &inputs);
            is_right &= agrees("interpreter", plan, &outputs, &wanted, arguments.tolerance());
        }
    }
    Ok(is_right)
}

/// The graph, with the first dimension of each input as its batch.
fn read(file: &str) -> TractResult<(TypedModel, Symbol)> {
    let mut graph = tract_onnx::onnx().with_ignore_value_info(true).model_for_path(file)?;
    let batch = graph.symbols.sym("batch");
    for index in 0..graph.inputs.len() {
        let mut fact = graph.input_fact(index)?.clone();
        let rest = fact.shape.dims().skip(1).cloned().collect::<Vec<_>>();
        let first = GenericFactoid::Only(TDim::from(batch.clone()));
        fact.shape = ShapeFactoid::closed(std::iter::once(first).chain(rest).collect());
        graph.set_input_fact(index, fact)?;
    }
    for index in 0..graph.outputs.len() {
        graph.set_output_fact(index, InferenceFact::default())?;
    }
    Ok((graph.into_typed()?.into_decluttered()?, batch))
}

/// The bytes of ports that lie one after another.
fn split(ports: &[Port], bytes: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    let needed: usize = ports.iter().map(Port::bytes).sum();
    if bytes.len() != needed {
        return Err(format!("a file of {} bytes, not {needed}", bytes.len()));
    }
    let mut rest = bytes;
    Ok(ports
        .iter()
        .map(|port| {
            let (own, others) = rest.split_at(port.bytes());
            rest = others;
            own.to_vec()
        })
        .collect())
}

/// Numbers between 0 and 1, or indexes below 100.
fn random(port: &Port) -> Vec<u8> {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    let elements = port.bytes() / port.ty.bytes();
    let mut bytes = Vec::with_capacity(port.bytes());
    for _ in 0..elements {
        let value = next();
        match port.ty {
            Type::F32 => bytes.extend(value.to_le_bytes()),
            Type::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
            Type::I64 => bytes.extend(((value * 100.0) as i64).to_le_bytes()),
            Type::I32 => bytes.extend(((value * 100.0) as i32).to_le_bytes()),
            Type::U8 => bytes.push((value * 100.0) as u8),
            Type::Bool => bytes.push(u8::from(value < 0.5)),
        }
    }
    bytes
}

fn interpreted(plan: &Plan, weights: &[u8], inputs: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut arena = vec![0; plan.arena_bytes];
    for (port, bytes) in plan.inputs.iter().zip(inputs) {
        arena[port.offset..][..bytes.len()].copy_from_slice(bytes);
    }
    interpret::run(plan, &mut Memory { arena: &mut arena, weights });
    plan.outputs.iter().map(|port| arena[port.offset..][..port.bytes()].to_vec()).collect()
}

fn agrees(with: &str, plan: &Plan, got: &[Vec<u8>], wanted: &[Vec<u8>], tolerance: f64) -> bool {
    plan.outputs.iter().zip(got.iter().zip(wanted)).fold(true, |all, (port, (got, wanted))| {
        let (got, wanted) = (numbers(got, port.ty), numbers(wanted, port.ty));
        let scale = wanted.iter().fold(1e-6_f64, |most, value| most.max(value.abs()));
        let worst = got.iter().zip(&wanted).map(|(a, b)| (a - b).abs() / scale).fold(0.0, f64::max);
        // What is no number is greater than nothing.
        let is_right = got.iter().all(|value| value.is_finite()) && worst <= tolerance;
        let (batch, name) = (plan.batch, &port.name);
        println!(
            "{{\"batch\": {batch}, \"output\": {name:?}, \"compared_with\": {with:?}, \"worst_error\": {worst:.2e}, \
             \"is_right\": {is_right}}}"
        );
        all && is_right
    })
}

fn numbers(bytes: &[u8], ty: Type) -> Vec<f64> {
    let each = bytes.chunks_exact(ty.bytes());
    match ty {
        Type::F32 => each.map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect(),
        Type::F16 => each.map(|b| f16::from_le_bytes(b.try_into().unwrap()).to_f64()).collect(),
        Type::I64 => each.map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64).collect(),
        Type::I32 => each.map(|b| i32::from_le_bytes(b.try_into().unwrap()).into()).collect(),
        Type::U8 | Type::Bool => bytes.iter().map(|&byte| byte.into()).collect(),
    }
}

/// Of runs of a graph, in microseconds, ascending.
#[derive(Default)]
struct Times {
    /// Between what the GPU stamps before it and behind it.
    gpu: Vec<f64>,
    /// The call that launches it.
    launch: Vec<f64>,
    /// What the host waits for it beyond the GPU's time.
    beside: Vec<f64>,
}

fn at(us: &[f64], part: f64) -> f64 {
    us.get((us.len() as f64 * part) as usize).copied().unwrap_or(f64::NAN)
}

/// A GPU with a model's weights, and an arena.
struct Loaded {
    cuda: Cuda,
    bases: Bases,
    ranges: Vec<(Address, Vec<Page>)>,
    host: Region,
}

impl Loaded {
    fn new(lowered: &Lowered) -> Result<Self, Box<dyn Error>> {
        let cuda = Cuda::open(&GpuName::Index(0))?;
        let host = Region::allocate(PAGE_BYTES as usize)?;
        cuda.pin(&host)?;
        let bases = Bases { arena: Address(0), weights: Address(0) };
        let mut loaded = Self { cuda, bases, ranges: Vec::new(), host };
        let arena_bytes = lowered.plans.iter().map(|plan| plan.arena_bytes).max().unwrap_or(0);
        loaded.bases.arena = loaded.place(arena_bytes)?;
        loaded.bases.weights = loaded.place(lowered.weights.len())?;
        loaded.write(loaded.bases.weights, &lowered.weights)?;
        Ok(loaded)
    }

    fn place(&mut self, bytes: usize) -> Result<Address, DriverError> {
        let count = (bytes as u64).div_ceil(PAGE_BYTES).max(1);
        let at = self.cuda.reserve(count * PAGE_BYTES)?;
        let pages: Vec<Page> = (0..count).map(|_| self.cuda.create_page()).collect::<Result<_, _>>()?;
        self.cuda.map(at, &pages)?;
        self.ranges.push((at, pages));
        Ok(at)
    }

    fn finish(&self) -> Result<(), DriverError> {
        let event = self.cuda.create_event(false)?;
        self.cuda.record(event, Stream::Execute)?;
        self.cuda.synchronize(event)?;
        self.cuda.destroy_event(event);
        Ok(())
    }

    fn write(&self, at: Address, bytes: &[u8]) -> Result<(), DriverError> {
        for (i, chunk) in bytes.chunks(self.host.len()).enumerate() {
            self.host.write(0, chunk);
            let to = at.plus((i * self.host.len()) as u64);
            self.cuda.copy_in(Stream::Execute, to, (&self.host, 0), chunk.len())?;
            self.finish()?;
        }
        Ok(())
    }

    fn read(&self, at: Address, bytes: usize) -> Result<Vec<u8>, DriverError> {
        let mut read = vec![0; bytes];
        for (i, chunk) in read.chunks_mut(self.host.len()).enumerate() {
            let from = at.plus((i * self.host.len()) as u64);
            self.cuda.copy_out(Stream::Execute, (&self.host, 0), from, chunk.len())?;
            self.finish()?;
            self.host.read(0, chunk);
        }
        Ok(read)
    }

    fn write_inputs(&self, plan: &Plan, inputs: &[Vec<u8>]) -> Result<(), DriverError> {
        let mut ports = plan.inputs.iter().zip(inputs);
        ports.try_for_each(|(port, bytes)| self.write(self.bases.arena.plus(port.offset as u64), bytes))
    }

    /// The outputs of one run, when it has been run many times.
    fn measure(&self, plan: &Plan, inputs: &[Vec<u8>], runs: usize) -> Result<Vec<Vec<u8>>, DriverError> {
        let cuda = &self.cuda;
        let from = Instant::now();
        let prepared = cuda.prepare(&Arc::new(plan.clone()), self.bases)?;
        let prepare_ms = from.elapsed().as_millis();
        let from = Instant::now();
        cuda.begin_capture()?;
        let put = cuda.enqueue(prepared);
        let graph = cuda.end_capture()?;
        put?;
        let capture_us = from.elapsed().as_micros();
        let times = self.time(graph, runs)?;
        // A plan may write over its inputs.
        self.write_inputs(plan, inputs)?;
        cuda.launch(graph)?;
        let outputs = plan.outputs.iter();
        let outputs = outputs.map(|port| self.read(self.bases.arena.plus(port.offset as u64), port.bytes()));
        let outputs = outputs.collect::<Result<_, _>>()?;
        let Times { gpu, launch, beside } = &times;
        println!(
            "{{\"batch\": {}, \"steps\": {}, \"arena_mib\": {}, \"prepare_ms\": {prepare_ms}, \
             \"capture_us\": {capture_us}, \"median_us\": {:.1}, \"p99_us\": {:.1}, \"p9999_us\": {:.1}, \
             \"launch_us\": {:.1}, \"launch_p99_us\": {:.1}, \"beside_us\": {:.1}}}",
            plan.batch,
            plan.steps.len(),
            plan.arena_bytes >> 20,
            at(gpu, 0.5),
            at(gpu, 0.99),
            at(gpu, 0.9999),
            at(launch, 0.5),
            at(launch, 0.99),
            at(beside, 0.5)
        );
        cuda.destroy_graph(graph);
        cuda.forget(prepared);
        Ok(outputs)
    }

    /// Runs a graph so many times, one after another.
    fn time(&self, graph: Graph, runs: usize) -> Result<Times, DriverError> {
        let cuda = &self.cuda;
        let (start, end) = (cuda.create_event(true)?, cuda.create_event(true)?);
        let mut times = Times::default();
        for _ in 0..runs {
            cuda.record(start, Stream::Execute)?;
            let from = Instant::now();
            cuda.launch(graph)?;
            let launch = from.elapsed().as_nanos() as f64;
            cuda.record(end, Stream::Execute)?;
            cuda.synchronize(end)?;
            let whole = from.elapsed().as_nanos() as f64;
            let gpu = cuda.elapsed(start, end)?.as_nanos() as f64;
            times.gpu.push(gpu / 1e3);
            times.launch.push(launch / 1e3);
            times.beside.push((whole - gpu) / 1e3);
        }
        [&mut times.gpu, &mut times.launch, &mut times.beside].into_iter().for_each(|us| us.sort_by(f64::total_cmp));
        cuda.destroy_event(start);
        cuda.destroy_event(end);
        Ok(times)
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        for (at, pages) in std::mem::take(&mut self.ranges) {
            if let Err(error) = self.cuda.unmap(at, pages.len()) {
                eprintln!("{error}");
            }
            self.cuda.release(at, pages.len() as u64 * PAGE_BYTES);
            pages.into_iter().for_each(|page| self.cuda.destroy_page(page));
        }
        self.cuda.unpin(&self.host);
    }
}
