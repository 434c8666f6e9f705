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

/// Which tensor of its model an input stands for. Nothing is known of its elements yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Index among the model's inputs.
    pub input: usize,
    /// As the client says: the batch dimension if the model has one, then the others.
    pub shape: Vec<usize>,
    /// The batch dimension; 1 of a model that has none.
    pub rows: usize,
}

/// The inputs of a model that a request's stand for, each once.
#[derive(Debug)]
pub struct Places<'m> {
    model: &'m Model,
    /// By index among the model's inputs.
    is_taken: Vec<bool>,
}

impl<'m> Places<'m> {
    /// None is taken.
    #[must_use]
    pub fn of(model: &'m Model) -> Self {
        Self { model, is_taken: vec![false; model.inputs.len()] }
    }

    /// Takes the place of an input of this name, type and shape.
    ///
    /// # Errors
    /// [`InferError::Invalid`], which names the field, what was found and what was expected.
    pub fn take(&mut self, name: &str, datatype: &str, shape: Vec<usize>) -> Result<Place, InferError> {
        let input = known_input(self.model, name, datatype)?;
        if std::mem::replace(&mut self.is_taken[input], true) {
            return Err(invalid("inputs", format_args!("'{name}' twice"), "each input once"));
        }
        let rows = check_shape(self.model, &self.model.inputs[input], &shape)?;
        Ok(Place { input, shape, rows })
    }

    /// Whether all are taken that a request needs.
    ///
    /// # Errors
    /// [`InferError::Invalid`], which names those that are and those that are not.
    pub fn check_complete(&self) -> Result<(), InferError> {
        let Self { model, is_taken } = self;
        if model.inputs.iter().zip(is_taken).any(|(tensor, is_taken)| !is_taken && !tensor.is_optional()) {
            return Err(missing_inputs(model, is_taken));
        }
        Ok(())
    }
}

/// Checks inputs against a model and puts them into its order. The priority is the model's.
///
/// # Errors
/// [`InferError::Invalid`], which names the field, what was found and what was expected.
pub fn check(model: &Model, index: usize, inputs: Vec<InputTensor>, slo: Span) -> Result<CheckedRequest, InferError> {
    let mut places = Places::of(model);
    let place = |InputTensor { name, datatype, shape, data }| Ok((places.take(&name, datatype.name(), shape)?, data));
    let placed = inputs.into_iter().map(place).collect::<Result<_, InferError>>()?;
    places.check_complete()?;
    check_placed(model, index, placed, slo)
}

/// The same of inputs with their places, which were [taken](Places::take) from the same model, and are
/// [all](Places::check_complete).
///
/// # Errors
/// [`InferError::Invalid`], which names the field, what was found and what was expected.
pub fn check_placed(
    model: &Model,
    index: usize,
    inputs: Vec<(Place, Rope)>,
    slo: Span,
) -> Result<CheckedRequest, InferError> {
    let mut ordered: Vec<Option<(Given, Vec<usize>)>> = vec![None; model.inputs.len()];
    let has_records = cell::is_record(&model.inputs);
    let mut rows = None;
    for (Place { input, mut shape, rows: found }, data) in inputs {
        let tensor = &model.inputs[input];
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
        ordered[input] = Some((Given { shape, data }, ends));
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
fn missing_inputs(model: &Model, given: &[bool]) -> InferError {
    let names = |is_wanted: &dyn Fn(&Tensor, bool) -> bool| {
        let all = model.inputs.iter().zip(given).filter(|(tensor, is_given)| is_wanted(tensor, **is_given));
        all.map(|(tensor, _)| format!("'{}'", tensor.name)).collect::<Vec<_>>().join(",")
    };
    let expected = match model.inputs.iter().filter(|tensor| !tensor.is_optional()).count() {
        required if required < given.len() => format!("number of inputs between {required} and {}", given.len()),
        _ => format!("{} inputs", given.len()),
    };
    InferError::Invalid(format!(
        "expected {expected} but got {} inputs for model '{}'. Got input(s) [{}], but missing required input(s) [{}]. \
         Please provide all required input(s).",
        given.iter().filter(|is_given| **is_given).count(),
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

/// The input of a model that a client names, by its index.
///
/// # Errors
/// [`InferError::Invalid`], if there is none of this name and type.
fn known_input(model: &Model, name: &str, datatype: &str) -> Result<usize, InferError> {
    let Some(input) = model.inputs.iter().position(|tensor| tensor.name == name) else {
        return Err(unknown_name("inputs", name, &model.inputs));
    };
    let tensor = &model.inputs[input];
    if datatype != tensor.datatype.name() {
        return Err(invalid(
            &format!("inputs['{name}'].datatype"),
            format_args!("'{}'", excerpt(datatype)),
            format_args!("'{}'", tensor.datatype),
        ));
    }
    Ok(input)
}

/// The rows of a shape `[rows, ..]`; one of that of a model without batches.
///
/// # Errors
/// [`InferError::Invalid`], if it is not the tensor's, or the rows are none or too many.
fn check_shape(model: &Model, tensor: &Tensor, shape: &[usize]) -> Result<usize, InferError> {
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
