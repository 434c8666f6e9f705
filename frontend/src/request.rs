//! Step 1: a request is checked against its model, whatever form it came in.

use proto::{Application, Span};
use repository::{DataType, Model, SLO_MAX, Tensor, Variable, cell, elements};

use crate::{
    error::{InferError, invalid},
    models::excerpt,
    records::{self, Given, Misplaced},
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
    /// Elements in row-major order, little-endian; each string (BYTES) after its length as four bytes.
    pub data: Rope,
}

/// Checks inputs against a model and puts them into its order. The priority is the model's.
///
/// # Errors
/// [`InferError::Invalid`], which names the field, what was found and what was expected.
pub fn check(model: &Model, index: usize, inputs: Vec<InputTensor>, slo: Span) -> Result<CheckedRequest, InferError> {
    let mut ordered: Vec<Option<(Given, Vec<usize>)>> = vec![None; model.inputs.len()];
    let has_records = cell::is_record(&model.inputs);
    let mut rows = None;
    for input in inputs {
        let tensor = known_input(model, &input.name, input.datatype.name())?;
        let InputTensor { mut shape, data, .. } = input;
        let found = check_shape(model, tensor, &shape)?;
        if *rows.get_or_insert(found) != found {
            let expected = format!("{}, as in the inputs before", rows.unwrap_or_default());
            return Err(invalid(&format!("inputs['{}'].shape[0]", tensor.name), found, expected));
        }
        if model.is_batched {
            shape.remove(0);
        }
        let ends = match has_records {
            true => records::row_ends(tensor.datatype, &shape, found, &data),
            false => records::row_bytes(tensor.datatype, &shape, found, &data).map(|_| Vec::new()),
        };
        let ends = ends.map_err(|wrong| misplaced(model, tensor, data.len(), wrong))?;
        let place = model.inputs.iter().position(|other| other.name == tensor.name).expect("the tensor is the model's");
        if ordered[place].replace((Given { shape, data }, ends)).is_some() {
            return Err(invalid("inputs", format_args!("'{}' twice", tensor.name), "each input once"));
        }
    }
    if model.inputs.iter().zip(&ordered).any(|(tensor, given)| given.is_none() && !tensor.is_optional()) {
        return Err(missing_inputs(model, &ordered));
    }
    // Only a request of optional inputs can be without any.
    let rows = rows.unwrap_or(1);
    let inputs = match has_records {
        true => records::pack(&model.inputs, rows, ordered).map_err(|(tensor, bytes)| {
            let most = tensor.variable.as_ref().map_or(0, |variable| variable.bytes_max);
            let expected = format!("at most {most} (parameters: max_bytes)");
            invalid(&format!("inputs['{}'].data", tensor.name), format_args!("{bytes} bytes in a row"), expected)
        })?,
        false => ordered.into_iter().flatten().map(|(given, _)| given.data).collect(),
    };
    let priority = model.priorities.of(0);
    let (waited, application, client) = (Span::ZERO, Application::NONE, None);
    Ok(CheckedRequest { model: index, rows, inputs, slo, waited, priority, application, client })
}

/// Says what is wrong with an input's elements, as Triton does.
fn misplaced(model: &Model, tensor: &Tensor, got: usize, wrong: Misplaced) -> InferError {
    let (name, datatype) = (&tensor.name, tensor.datatype);
    let of = format!("for inference input '{name}' for model '{}'", model.name);
    InferError::Invalid(match wrong {
        Misplaced::Bytes { expected } => format!(
            "input byte size mismatch for input '{name}' for model '{}'. Expected {expected}, got {got} (expected {} \
             elements of {datatype})",
            model.name,
            expected / datatype.bytes()
        ),
        Misplaced::Length { left } => {
            format!("incomplete string length indicator {of}, expecting 4 bytes but only {left} bytes available")
        }
        Misplaced::String { length, left } => {
            format!("incomplete string data {of}, expecting string of length {length} but only {left} bytes available")
        }
        Misplaced::Fewer { found, expected } => format!("expected {expected} string elements {of}, got {found}"),
        Misplaced::More { expected } => {
            format!("unexpected number of string elements {} {of}, expecting {expected}", expected + 1)
        }
    })
}

/// Says which inputs are there and which are not, as Triton does.
fn missing_inputs<T>(model: &Model, given: &[Option<T>]) -> InferError {
    let names = |is_wanted: &dyn Fn(&Tensor, bool) -> bool| {
        let all = model.inputs.iter().zip(given).filter(|(tensor, data)| is_wanted(tensor, data.is_some()));
        all.map(|(tensor, _)| format!("'{}'", tensor.name)).collect::<Vec<_>>().join(",")
    };
    let expected = match model.inputs.iter().filter(|tensor| !tensor.is_optional()).count() {
        required if required < given.len() => format!("number of inputs between {required} and {}", given.len()),
        _ => format!("{} inputs", given.len()),
    };
    InferError::Invalid(format!(
        "expected {expected} but got {} inputs for model '{}'. Got input(s) [{}], but missing required input(s) [{}]. \
         Please provide all required input(s).",
        given.iter().flatten().count(),
        model.name,
        names(&|_, is_given| is_given),
        names(&|tensor, is_given| !is_given && !tensor.is_optional())
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
    if tensor.accepts(rest) && (1..=model.rows_max).contains(&rows) {
        return Ok(rows);
    }
    let dims: Vec<String> = tensor.dims().map(|dim| dim.to_string()).collect();
    let expected = match model.is_batched {
        true => format!("[n, {}] with n from 1 to {}", dims.join(", "), model.rows_max),
        false => format!("[{}]", dims.join(", ")),
    };
    // As Triton says it.
    let Some(count) = elements(shape) else {
        return Err(InferError::Invalid(format!(
            "shape {} for input '{}' causes total element count to exceed maximum size of {}",
            excerpt(&format!("{shape:?}")),
            tensor.name,
            usize::MAX
        )));
    };
    if count.checked_mul(tensor.datatype.bytes()).is_none() {
        return Err(InferError::Invalid(format!(
            "byte size overflow for input '{}': found shape {}, expected {expected}",
            tensor.name,
            excerpt(&format!("{shape:?}"))
        )));
    }
    let expected = match &tensor.variable {
        Some(Variable { dims, bytes_max, .. }) if !dims.is_empty() => {
            let longest = tensor.shape[dims[0]];
            format!("{expected}, each -1 at most {longest} and a row at most {bytes_max} bytes (max_dims, max_bytes)")
        }
        _ => expected,
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
