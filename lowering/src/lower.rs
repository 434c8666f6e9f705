//! A model as plans, one for each batch size, and for each of a few lengths where requests choose some.
//!
//! The graph is tract's, typed and decluttered, with a symbol for the batch and for each such length. For each plan
//! symbols get their numbers and what has become constant is folded; then one walk ([`walk`]) makes steps of the nodes.
//! Elementwise operators stay expressions until somebody needs them in memory, products and convolutions wait for
//! biases, sums and ReLU, and reshapes and transpositions are views, so tensors lie as their producers have them:
//! images as NHWC. Products of one tensor with several constants are one ([`siblings`]).
//! At last each tensor gets its place in the arena ([`crate::arena`]).

use tract_onnx::{prelude::*, tract_core::ops::source::TypedSource};

pub use error::{LowerError, OPERATORS};

use crate::{
    arena,
    lower::stored::{Base, Stored},
    plan::{Lowered, Plan, Port, Precision, Type},
};
use expression::{Expression, Lazy};
use image::Image;
use layout::Layout;
use tensors::Builder;
use walk::{Value, Walk};

mod attention;
mod deconvolution;
mod elementwise;
mod error;
mod expression;
mod image;
mod images;
mod joints;
mod layout;
mod patterns;
mod pending;
mod products;
mod response;
mod rows;
mod shapes;
mod siblings;
mod stored;
mod tensors;
mod walk;

/// Plans that share their weights, made one after another.
pub struct Lowering {
    precision: Precision,
    image: Image,
    plans: Vec<Plan>,
}

impl Lowering {
    /// Without a plan.
    #[must_use]
    pub fn new(precision: Precision) -> Self {
        Self { precision, image: Image::default(), plans: Vec::new() }
    }

    /// Lowers a decluttered graph for a batch of so many tasks, at least 1, where its symbols are these numbers.
    ///
    /// # Errors
    /// If the graph has operators that there are no kernels for, lengths that are no numbers once its symbols are, or
    /// weights that do not fit the precision. All is as it was before, then.
    pub fn add(&mut self, graph: &TypedModel, batch: usize, symbols: &[(Symbol, usize)]) -> Result<(), LowerError> {
        assert!(batch > 0, "a batch has tasks");
        let graph = concrete(graph, symbols).map_err(unsound)?;
        let (image, how) = (&mut self.image, (self.precision, batch));
        let before = image.bytes.len();
        let plan = plan(&graph, image, how).or_else(|error| {
            image.cut(before);
            // Some lengths are numbers only once all is simplified, which is slow and turns dimensions of one about.
            let simplified = graph.into_decluttered().map_err(unsound)?;
            plan(&simplified, image, how).map_err(|_| error)
        });
        self.plans.push(plan.inspect_err(|_| image.cut(before))?);
        Ok(())
    }

    /// The plans in the order in which they were added, and what they read.
    #[must_use]
    pub fn finish(self) -> Lowered {
        Lowered { weights: self.image.bytes, plans: self.plans }
    }
}

/// Lowers a decluttered graph for batches of these sizes, each at least 1. `batch` is the symbol of their length;
/// without one, the graph is for one size alone.
///
/// # Errors
/// If the graph has operators that there are no kernels for, lengths that are no numbers once the batch is one, or
/// weights that do not fit `precision`.
pub fn lower(
    graph: &TypedModel,
    batch: Option<&Symbol>,
    sizes: &[usize],
    precision: Precision,
) -> Result<Lowered, LowerError> {
    let mut sizes = sizes.to_vec();
    assert!(!sizes.contains(&0), "a batch has tasks");
    sizes.sort_unstable();
    sizes.dedup();
    let mut lowering = Lowering::new(precision);
    for size in sizes {
        let symbols: Vec<_> = batch.map(|batch| (batch.clone(), size)).into_iter().collect();
        lowering.add(graph, size, &symbols)?;
    }
    Ok(lowering.finish())
}

/// The graph where symbols are numbers.
fn concrete(graph: &TypedModel, symbols: &[(Symbol, usize)]) -> TractResult<TypedModel> {
    if symbols.is_empty() {
        return Ok(graph.clone());
    }
    let numbers = symbols.iter().map(|(symbol, number)| (symbol.clone(), number.to_dim())).collect();
    let mut graph = graph.set_symbols(&numbers)?;
    graph.prop_consts()?;
    Ok(graph)
}

fn unsound(cause: TractError) -> LowerError {
    LowerError::Graph(format!("{cause:#}"))
}

fn plan(graph: &TypedModel, image: &mut Image, (precision, batch): (Precision, usize)) -> Result<Plan, LowerError> {
    let mut walk = Walk::new(graph, Builder::new(image, precision, batch))?;
    let mut inputs = Vec::new();
    for &outlet in &graph.inputs {
        inputs.push(input(&mut walk, outlet)?);
    }
    walk.run()?;
    let mut outputs = Vec::new();
    for (index, &outlet) in graph.outputs.iter().enumerate() {
        outputs.push(output(&mut walk, outlet, index)?);
    }
    let mut builder = walk.builder;
    builder.join()?;
    let faults = builder.has_faults.then(|| {
        let Base::Buffer(index, _) = builder.allocate(batch, Type::I32) else { unreachable!("buffers are buffers") };
        (builder.buffers[index].is_input, builder.buffers[index].is_output) = (true, true);
        index
    });
    let lives = arena::lives(&builder.steps, &builder.buffers);
    let assignment = arena::assign(&lives, &builder.buffers);
    arena::relocate(&mut builder.steps, &builder.buffers, &assignment);
    let placed = |mut ports: Vec<(Port, usize)>| -> Vec<Port> {
        ports.iter_mut().for_each(|(port, buffer)| port.offset = assignment.offsets[*buffer]);
        ports.into_iter().map(|(port, _)| port).collect()
    };
    Ok(Plan {
        batch,
        precision,
        inputs: placed(inputs),
        outputs: placed(outputs),
        faults: faults.map(|buffer| assignment.offsets[buffer]),
        steps: builder.steps,
        arena_bytes: assignment.bytes,
    })
}

/// A port's type, which is the model's own.
fn port_type(name: &str, found: DatumType) -> Result<Type, LowerError> {
    Ok(match found {
        DatumType::F32 => Type::F32,
        DatumType::F16 => Type::F16,
        DatumType::I64 | DatumType::TDim => Type::I64,
        DatumType::I32 => Type::I32,
        DatumType::U8 => Type::U8,
        DatumType::Bool => Type::Bool,
        other => return Err(LowerError::Type { tensor: name.to_owned(), found: format!("{other:?}") }),
    })
}

/// An input, with the number of its buffer.
fn input(walk: &mut Walk<'_>, outlet: OutletId) -> Result<(Port, usize), LowerError> {
    let node = walk.graph.node(outlet.node);
    debug_assert!(node.op_is::<TypedSource>(), "inputs are sources");
    let (name, shape) = (node.name.clone(), walk.shape_of(outlet)?);
    let ty = port_type(&name, walk.fact(outlet)?.datum_type)?;
    let layout = Layout::dense(&shape);
    let base = walk.builder.allocate(layout.elements(), ty);
    let buffer = made_port(&mut walk.builder, &base, true);
    walk.insert(outlet, Stored { base, ty, layout });
    Ok((Port { name, offset: 0, ty, shape }, buffer))
}

/// An output, with the number of its buffer: what its last step writes, if that is as clients get it, or a copy.
fn output(walk: &mut Walk<'_>, outlet: OutletId, index: usize) -> Result<(Port, usize), LowerError> {
    let node = walk.graph.node(outlet.node);
    let name = walk.graph.outlet_label(outlet).unwrap_or(&node.name).to_owned();
    let shape = walk.shape_of(outlet)?;
    let ty = port_type(&name, walk.fact(outlet)?.datum_type)?;
    walk.builder.node = (name.clone(), format!("output {index}"));
    let order: Vec<usize> = (0..shape.len()).collect();
    let lazy = match walk.take(outlet)? {
        Value::Lazy(lazy) => lazy,
        Value::Stored(stored) => Lazy::leaf(stored),
        Value::Pending(pending) => {
            let stored = pending.flush(&mut walk.builder)?;
            walk.insert(outlet, stored.clone());
            Lazy::leaf(stored)
        }
    };
    let own = match &*lazy.expression {
        Expression::Leaf(stored) => whole(&walk.builder, stored, &order, ty),
        _ => None,
    };
    let base = match own {
        Some(base) => base,
        None => walk.builder.store(&lazy, &order, ty)?.base,
    };
    let buffer = made_port(&mut walk.builder, &base, false);
    Ok((Port { name, offset: 0, ty, shape }, buffer))
}

/// The buffer that a tensor takes alone, as a port has it.
fn whole(builder: &Builder<'_>, stored: &Stored, order: &[usize], ty: Type) -> Option<Base> {
    let Base::Buffer(index, _) = stored.base else { return None };
    let buffer = builder.buffers[index];
    let fits = stored.ty == ty
        && stored.layout.is_packed(order)
        && stored.layout.offset == 0
        && buffer.bytes == stored.layout.elements() * ty.bytes()
        && !buffer.is_input
        && !buffer.is_output;
    fits.then(|| stored.base.clone())
}

fn made_port(builder: &mut Builder<'_>, base: &Base, is_input: bool) -> usize {
    let Base::Buffer(index, _) = *base else { unreachable!("ports are buffers") };
    let buffer = &mut builder.buffers[index];
    (buffer.is_input, buffer.is_output) = (buffer.is_input || is_input, buffer.is_output || !is_input);
    index
}

#[cfg(test)]
mod tests;
