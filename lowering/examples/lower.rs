//! Lowers an ONNX file whose inputs have a batch as their first dimension, and says what it becomes:
//! `cargo run --release -p lowering --example lower -- FILE [PRECISION [SIZE..]]`.
//! With `GRAPH`, `STEPS` or `CHECK` in the environment it prints the graph or the first plan's steps, or compares what
//! each plan computes with tract. Where requests choose lengths, `LENGTHS="length=16,other=32"` says them by the file's
//! names.

#![allow(clippy::disallowed_methods, reason = "it says how long it took")]

use std::{collections::BTreeMap, error::Error, time::Instant};

use lowering::{
    Plan, Port, Precision, Step,
    interpret::{self, Memory},
    lower::Lowering,
};
use tract_onnx::{prelude::*, tract_core::internal::ToDim};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().ok_or("expected an ONNX file, a precision, and batch sizes")?;
    let precision = match arguments.next().as_deref() {
        None | Some("fp32") => Precision::Fp32,
        Some("tf32") => Precision::Tf32,
        Some("fp16") => Precision::Fp16,
        Some(other) => return Err(format!("precision {other}, expected fp32, tf32 or fp16").into()),
    };
    let sizes: Vec<usize> = arguments.map(|size| size.parse()).collect::<Result<_, _>>()?;
    let sizes = if sizes.is_empty() { vec![1, 8] } else { sizes };
    let began = Instant::now();
    let (graph, batch) = read(&file)?;
    println!("read in {:.2} s: {} nodes", began.elapsed().as_secs_f64(), graph.nodes.len());
    if std::env::var_os("GRAPH").is_some() {
        println!("{graph}");
    }
    let began = Instant::now();
    let lengths = lengths(&graph)?;
    let mut lowering = Lowering::new(precision);
    for &size in &sizes {
        let symbols: Vec<_> = lengths.iter().cloned().chain([(batch.clone(), size)]).collect();
        lowering.add(&graph, size, &symbols)?;
    }
    let lowered = lowering.finish();
    println!("lowered in {:.2} s: {} MiB of weights", began.elapsed().as_secs_f64(), lowered.weights.len() >> 20);
    for plan in &lowered.plans {
        let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
        plan.steps.iter().for_each(|step| *kinds.entry(kind(step)).or_default() += 1);
        let arena = plan.arena_bytes as f64 / f64::from(1 << 20);
        println!("batch {}: {} steps {kinds:?}, an arena of {arena:.1} MiB", plan.batch, plan.steps.len());
    }
    if std::env::var_os("STEPS").is_some() {
        lowered.plans[0].steps.iter().for_each(|step| println!("{step:?}"));
    }
    if std::env::var_os("CHECK").is_some() {
        for plan in &lowered.plans {
            println!(
                "batch {}: {:?} of the largest number apart",
                plan.batch,
                check(&graph, (&batch, &lengths), plan, &lowered.weights)?
            );
        }
    }
    Ok(())
}

/// The lengths that the environment says.
fn lengths(graph: &TypedModel) -> Result<Vec<(Symbol, usize)>, Box<dyn Error>> {
    let text = std::env::var("LENGTHS").unwrap_or_default();
    let pairs = text.split(',').filter(|pair| !pair.is_empty());
    let length = |pair: &str| -> Result<(Symbol, usize), Box<dyn Error>> {
        let (name, number) = pair.split_once('=').ok_or("LENGTHS: expected name=number, separated by commas")?;
        Ok((graph.symbols.sym(name), number.parse()?))
    };
    pairs.map(length).collect()
}

/// The graph, with the first dimension of each input as its batch.
fn read(file: &str) -> TractResult<(TypedModel, Symbol)> {
    let mut graph = tract_onnx::onnx().with_ignore_value_info(true).model_for_path(file)?;
    let batch = graph.symbols.sym("batch");
    for index in 0..graph.inputs.len() {
        let mut fact = graph.input_fact(index)?.clone();
        let rest = fact.shape.dims().skip(1).cloned().collect::<Vec<_>>();
        let first = tract_onnx::tract_hir::infer::GenericFactoid::Only(TDim::from(batch.clone()));
        fact.shape = tract_onnx::tract_hir::infer::ShapeFactoid::closed(std::iter::once(first).chain(rest).collect());
        graph.set_input_fact(index, fact)?;
    }
    for index in 0..graph.outputs.len() {
        graph.set_output_fact(index, Default::default())?;
    }
    Ok((graph.into_typed()?.into_decluttered()?, batch))
}

/// How far each output is from what tract computes of the same made-up inputs.
fn check(
    graph: &TypedModel,
    (batch, lengths): (&Symbol, &[(Symbol, usize)]),
    plan: &Plan,
    weights: &[u8],
) -> TractResult<Vec<f32>> {
    let symbols = lengths.iter().cloned().chain([(batch.clone(), plan.batch)]);
    let subs = symbols.map(|(symbol, number)| (symbol, number.to_dim())).collect();
    let runnable = graph.set_symbols(&subs)?.into_optimized()?.into_runnable()?;
    let mut arena = vec![0; plan.arena_bytes];
    let mut inputs = tvec![];
    for (index, port) in plan.inputs.iter().enumerate() {
        let count = port.shape.iter().product::<usize>();
        let numbers: Vec<f32> = (0..count).map(|at| ((at * 7919 + index) % 1000) as f32 / 500.0 - 1.0).collect();
        let tensor = Tensor::from_shape(&port.shape, &numbers)?;
        // Indexes and masks are small.
        let small: Vec<f32> = (0..count).map(|at| if at * 7919 / 3 % 2 == index % 2 { 0.0 } else { 1.0 }).collect();
        let tensor = match graph.input_fact(index)?.datum_type {
            DatumType::F32 => tensor,
            other => Tensor::from_shape(&port.shape, &small)?.cast_to_dt(other)?.into_owned(),
        };
        arena[port.offset..][..port.bytes()].copy_from_slice(tensor.as_bytes());
        inputs.push(tensor.into_tvalue());
    }
    interpret::run(plan, &mut Memory { arena: &mut arena, weights });
    let expected = runnable.run(inputs)?;
    let distance = |(port, expected): (&Port, &TValue)| -> TractResult<f32> {
        let mut found = Tensor::zero_dt(expected.datum_type(), &port.shape)?;
        found.as_bytes_mut().copy_from_slice(&arena[port.offset..][..port.bytes()]);
        let (found, expected) = (found.cast_to::<f32>()?, expected.cast_to::<f32>()?);
        let (found, expected) = (found.try_as_plain_ram()?, expected.try_as_plain_ram()?);
        let (found, expected) = (found.as_slice::<f32>()?, expected.as_slice::<f32>()?);
        let largest = expected.iter().fold(f32::MIN_POSITIVE, |largest, it| largest.max(it.abs()));
        Ok(found.iter().zip(expected).fold(0.0, |most: f32, (a, b)| most.max((a - b).abs())) / largest)
    };
    plan.outputs.iter().zip(&expected).map(distance).collect()
}

fn kind(step: &Step) -> &'static str {
    match step {
        Step::Conv(_) => "conv",
        Step::Matmul(_) => "matmul",
        Step::Pointwise(_) => "pointwise",
        Step::Reduce(_) => "reduce",
        Step::Softmax(_) => "softmax",
        Step::Norm(_) => "norm",
        Step::Attention(_) => "attention",
        Step::Pool(_) => "pool",
        Step::Gather(_) => "gather",
        Step::Resize(_) => "resize",
    }
}
