//! Step 1: a request is checked against its model, whatever form it came in.

use proto::Span;
use repository::{DataType, Model, SLO_MAX, Tensor};

use crate::{
    error::{InferError, invalid},
    models::excerpt,
    rope::Rope,
    tasks::CheckedRequest,
};

/// One input as a client in this process gives it.
#[derive(Debug, Clone)]
pub struct InputTensor {
    /// As in the model's configuration.
    pub name: String,
    /// As in the model's configuration.
    pub datatype: DataType,
    /// The batch dimension if the model has one, then the dimensions of its configuration.
    pub shape: Vec<usize>,
    /// Elements in row-major order, little-endian.
    pub data: Rope,
}

/// Checks inputs against a model and puts them into its order. The priority is the model's.
///
/// # Errors
/// [`InferError::Invalid`], which names the field, what was found and what was expected.
pub fn check(model: &Model, index: usize, inputs: Vec<InputTensor>, slo: Span) -> Result<CheckedRequest, InferError> {
    let mut ordered: Vec<Option<Rope>> = vec![None; model.inputs.len()];
    let mut rows = None;
    for input in inputs {
        let tensor = known_input(model, &input.name, input.datatype.name())?;
        let found = check_shape(model, tensor, &input.shape)?;
        if *rows.get_or_insert(found) != found {
            let expected = format!("{}, as in the inputs before", rows.unwrap_or_default());
            return Err(invalid(&format!("inputs['{}'].shape[0]", tensor.name), found, expected));
        }
        let expected = found * tensor.bytes();
        if input.data.len() != expected {
            // As Triton says it.
            let (elements, datatype) = (expected / tensor.datatype.bytes(), tensor.datatype);
            return Err(InferError::Invalid(format!(
                "input byte size mismatch for input '{}' for model '{}'. Expected {expected}, got {} (expected \
                 {elements} elements of {datatype})",
                tensor.name,
                model.name,
                input.data.len()
            )));
        }
        let place = model.inputs.iter().position(|other| other.name == tensor.name).expect("the tensor is the model's");
        if ordered[place].replace(input.data).is_some() {
            return Err(invalid("inputs", format_args!("'{}' twice", tensor.name), "each input once"));
        }
    }
    if ordered.iter().any(Option::is_none) {
        return Err(missing_inputs(model, &ordered));
    }
    let rows = rows.expect("a model has at least one input");
    let (inputs, priority) = (ordered.into_iter().flatten().collect(), model.priorities.of(0));
    Ok(CheckedRequest { model: index, rows, inputs, slo, waited: Span::ZERO, priority })
}

/// Says which inputs are there and which are not, as Triton does.
fn missing_inputs(model: &Model, given: &[Option<Rope>]) -> InferError {
    let names = |is_given: bool| {
        let all = model.inputs.iter().zip(given).filter(|(_, data)| data.is_some() == is_given);
        all.map(|(tensor, _)| format!("'{}'", tensor.name)).collect::<Vec<_>>().join(",")
    };
    InferError::Invalid(format!(
        "expected {} inputs but got {} inputs for model '{}'. Got input(s) [{}], but missing required input(s) [{}]. \
         Please provide all required input(s).",
        given.len(),
        given.iter().flatten().count(),
        model.name,
        names(true),
        names(false)
    ))
}

/// A latency objective in microseconds, as clients send it.
///
/// # Errors
/// If it is negative or longer than [`SLO_MAX`].
pub fn slo_from_micros(micros: i64) -> Result<Span, InferError> {
    let micros_max = SLO_MAX.0 / 1000;
    if !(1..=micros_max).contains(&micros) {
        let expected = format!("microseconds, above 0 and at most {micros_max}");
        return Err(invalid("parameters.timeout", micros, expected));
    }
    Ok(Span::from_micros(micros))
}

/// The input of a model that a client names.
///
/// # Errors
/// [`InferError::Invalid`], if there is none of this name and type.
pub fn known_input<'m>(model: &'m Model, name: &str, datatype: &str) -> Result<&'m Tensor, InferError> {
    let Some(tensor) = model.inputs.iter().find(|tensor| tensor.name == name) else {
        return Err(unknown_name("inputs", name, &model.inputs));
    };
    if datatype != tensor.datatype.name() {
        return Err(invalid(
            &format!("inputs['{name}'].datatype"),
            format_args!("'{}'", excerpt(datatype)),
            format_args!("'{}'", tensor.datatype),
        ));
    }
    Ok(tensor)
}

/// The rows of a shape `[rows, ..]`; one of that of a model without batches.
///
/// # Errors
/// [`InferError::Invalid`], if it is not the tensor's, or the rows are none or too many.
pub fn check_shape(model: &Model, tensor: &Tensor, shape: &[usize]) -> Result<usize, InferError> {
    let (rows, rest) = match shape {
        [rows, rest @ ..] if model.is_batched => (*rows, rest),
        _ => (1, shape),
    };
    if rest == tensor.shape && (1..=model.rows_max).contains(&rows) {
        return Ok(rows);
    }
    let dims: Vec<String> = tensor.shape.iter().map(ToString::to_string).collect();
    let expected = match model.is_batched {
        true => format!("[n, {}] with n from 1 to {}", dims.join(", "), model.rows_max),
        false => format!("[{}]", dims.join(", ")),
    };
    Err(invalid(&format!("inputs['{}'].shape", tensor.name), excerpt(&format!("{shape:?}")), expected))
}

/// What to say of a name that is not among these tensors'.
#[must_use]
pub fn unknown_name(field: &str, name: &str, known: &[Tensor]) -> InferError {
    let names: Vec<&str> = known.iter().map(|tensor| tensor.name.as_str()).collect();
    invalid(
        &format!("{field}[].name"),
        format_args!("'{}'", excerpt(name)),
        format_args!("one of: {}", names.join(", ")),
    )
}
