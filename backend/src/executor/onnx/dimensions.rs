//! INT64 in graphs: what ONNX calls so may be symbolic lengths for tract, above all whatever is cast to that type.

use tract_onnx::tract_core::{internal::*, ops::cast::Cast};

/// Keeps all bits of numbers that tract takes for lengths.
pub(super) fn keep_numbers(graph: &mut TypedModel) -> TractResult<()> {
    for index in 0..graph.nodes.len() {
        let node = &graph.nodes[index];
        if node.op_as::<Cast>().is_some_and(|cast| cast.to == TDim::datum_type())
            && graph.outlet_fact(node.inputs[0])?.datum_type.is_number()
        {
            graph.nodes[index].op = Box::new(ToLength);
        }
    }
    Ok(())
}

/// Gives outputs back as numbers.
pub(super) fn give_numbers(graph: &mut TypedModel) -> TractResult<()> {
    let mut outlets = graph.outputs.clone();
    for (index, outlet) in outlets.iter_mut().enumerate() {
        if graph.outlet_fact(*outlet)?.datum_type == TDim::datum_type() {
            let cast = Cast { to: DatumType::I64 };
            *outlet = graph.wire_node(format!("output-{index}.int64"), cast, &[*outlet])?[0];
        }
    }
    graph.select_output_outlets(&outlets)
}

/// Numbers as lengths. tract's own cast (0.23) goes through 32 bits.
#[derive(Debug, Clone, Hash, PartialEq, Eq)]
struct ToLength;

impl Op for ToLength {
    fn name(&self) -> StaticName {
        "ToLength".into()
    }

    op_as_typed_op!();
}

impl EvalOp for ToLength {
    op_out_of_plan!();

    fn eval(&self, _: &EvalContext<'_>, inputs: TVec<TValue>) -> TractResult<TVec<TValue>> {
        let numbers = args_1!(inputs);
        Ok(tvec!(lengths(&numbers)?.into_tvalue()))
    }
}

fn lengths(numbers: &Tensor) -> TractResult<Tensor> {
    let numbers = numbers.cast_to::<i64>()?;
    Ok(numbers.to_plain_array_view::<i64>()?.mapv(TDim::from).into_tensor())
}

impl TypedOp for ToLength {
    fn output_facts(&self, inputs: &[&TypedFact]) -> TractResult<TVec<TypedFact>> {
        // What tract's own knows of its outputs helps it to know the shapes that follow; but for the values.
        let mut facts = Cast { to: TDim::datum_type() }.output_facts(inputs)?;
        if let Some(uniform) = &inputs[0].uniform {
            facts[0].uniform = Some(lengths(uniform)?.into());
        }
        Ok(facts)
    }

    fn axes_mapping(&self, inputs: &[&TypedFact], outputs: &[&TypedFact]) -> TractResult<AxesMapping> {
        AxesMapping::natural(inputs, outputs)
    }

    as_op!();
}
