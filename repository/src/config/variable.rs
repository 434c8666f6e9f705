//! Tensors whose size differs from request to request: what bounds them, since slots and staging memory have room for
//! the largest (`parameters: max_dims, max_bytes`).

use prost_reflect::{DynamicMessage, Value};
use proto::LatencyProfile;

use crate::{
    BatchLengths,
    config::file::{ConfigFile, dims, get},
    error::RepositoryError,
    tensor::{DataType, Tensor, Variable, elements},
};

/// Bytes of the elements of all tensors of a batch whose size requests choose, if the configuration bounds neither
/// their dimensions nor their bytes; all members must come to the same bounds, whatever memory they have.
const BATCH_BYTES_DEFAULT: usize = 512 << 20;
/// The part of each tensor in a row has at least (first) and at most (second) so many bytes.
const BYTES_DEFAULT: (usize, usize) = (4 << 20, 32 << 20);
/// The longest dimension, and the most bytes, that can be configured.
pub(super) const BOUND_MAX: usize = 1 << 30;

/// What a model's parameters say.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// `max_dims`: of every dimension that requests choose.
    dims: Option<usize>,
    /// `max_bytes`: of the elements of every tensor whose size they choose.
    bytes: Option<usize>,
    /// What it is if nobody says it.
    bytes_default: usize,
    /// The last bound of `batch_lengths`: of every dimension of an input that is padded to one.
    bucket: Option<usize>,
}

impl ConfigFile<'_> {
    pub(super) fn bounds(&self) -> Result<Bounds, RepositoryError> {
        let number = |key: &str, what: &str| {
            let Some(found) = self.parameter(key) else { return Ok(None) };
            let number = found.parse().ok().filter(|number| (1..=BOUND_MAX).contains(number));
            let expected = || self.error(key, format_args!("\"{found}\""), format_args!("{what}, 1 to {BOUND_MAX}"));
            number.ok_or_else(expected).map(Some)
        };
        let dims = number("max_dims", "the longest of any dimension that is -1")?;
        let bucket = match self.batch_lengths()? {
            BatchLengths::Bucketed(bounds) => bounds.last().copied(),
            BatchLengths::Equal | BatchLengths::Padded => None,
        };
        let bytes = number("max_bytes", "bytes of any tensor whose size requests choose")?;
        Ok(Bounds { dims, bytes, bytes_default: self.bytes_default(), bucket })
    }

    /// An equal part of a batch's memory for each row of each tensor whose size requests choose.
    fn bytes_default(&self) -> usize {
        let sides = ["input", "output"].map(|key| get(&self.message, key));
        let tensors = sides.iter().flat_map(|side| side.as_list().unwrap_or_default()).filter_map(Value::as_message);
        let tensors = tensors.filter(|tensor| dims(tensor, "dims").iter().any(|&dim| dim < 0)).count();
        let rows = get(&self.message, "max_batch_size").as_i32().unwrap_or_default();
        let rows = usize::try_from(rows).unwrap_or_default().clamp(1, LatencyProfile::MAX_BATCH);
        let (least, most) = BYTES_DEFAULT;
        (BATCH_BYTES_DEFAULT / (rows * tensors.max(1))).clamp(least, most)
    }

    /// The tensor with the dimensions that `message` gives it.
    pub(super) fn shaped(
        &self,
        (key, message): (&str, &DynamicMessage),
        (name, datatype): (String, DataType),
        bounds: Bounds,
    ) -> Result<Tensor, RepositoryError> {
        let found = dims(message, "dims");
        if found.is_empty() && !self.scalars.contains(&name) {
            return Err(self.error(&format!("{key}.dims"), "none", "at least one dimension (the batch is not one)"));
        }
        if let Some(dim) = found.iter().find(|&&dim| dim < 1 && dim != -1) {
            return Err(self.error(&format!("{key}.dims"), dim, "lengths above 0, or -1 for what requests choose"));
        }
        let reshape = message.has_field_by_name("reshape").then(|| {
            let reshape = get(message, "reshape");
            dims_of_reshape(&reshape)
        });
        let is_optional = key.starts_with("input") && is_set(message, "optional");
        let variable = positions(&found);
        if variable.is_empty() && !is_optional && datatype != DataType::Bytes {
            let shape = lengths(&found, 1);
            let tensor = Tensor::new(name, datatype, shape);
            return self.reshaped(key, tensor, reshape.as_deref());
        }
        let fixed = elements(&lengths(&found, 1)).and_then(|fixed| fixed.checked_mul(datatype.bytes()));
        let sized = fixed.filter(|_| variable.is_empty() && datatype != DataType::Bytes);
        let room = bounds.bytes.unwrap_or(bounds.bytes_default.max(sized.unwrap_or(0)));
        let unbounded = bounds.bytes.is_none() && bounds.dims.is_some() && datatype != DataType::Bytes;
        let room = if unbounded { BOUND_MAX } else { room };
        // One dimension alone may be as long as there is room for.
        let longest = fixed.and_then(|fixed| room.checked_div(fixed)).unwrap_or(0);
        if longest == 0 {
            let least = fixed.map_or_else(|| "less than can be counted".to_owned(), |fixed| format!("{fixed} or more"));
            let expected = format!("{least}, for the dimensions of {key} that are not -1");
            return Err(self.error("max_bytes", room, expected));
        }
        let bucket = bounds.bucket.filter(|_| key.starts_with("input") && !is_ragged(message));
        let longest = longest.min(bounds.dims.unwrap_or(longest)).min(bucket.unwrap_or(longest));
        let shape = lengths(&found, longest);
        let largest = elements(&shape).and_then(|elements| elements.checked_mul(datatype.bytes()));
        let bytes_max = if datatype == DataType::Bytes { room } else { room.min(largest.unwrap_or(room)) };
        let any_rank = self.free_ranks.contains(&name);
        let variable = Variable { dims: variable, reshape_dims: Vec::new(), bytes_max, is_optional, any_rank };
        let tensor = Tensor { variable: Some(variable), ..Tensor::new(name, datatype, shape) };
        self.reshaped(key, tensor, reshape.as_deref())
    }

    /// The same with the shape that the model itself has instead.
    fn reshaped(&self, key: &str, tensor: Tensor, reshape: Option<&[i64]>) -> Result<Tensor, RepositoryError> {
        let Some(found) = reshape else { return Ok(tensor) };
        let own: Vec<i64> = tensor.dims().collect();
        let at = positions(found);
        let fits = found.iter().all(|&length| length > 0 || length == -1)
            && at.len() == positions(&own).len()
            && elements(&lengths(found, 1)) == elements(&lengths(&own, 1));
        if !fits {
            let expected = format!("as many elements as dims {own:?} have");
            return Err(self.error(&format!("{key}.reshape.shape"), format_args!("{found:?}"), expected));
        }
        let mut reshape = lengths(found, 1);
        let variable = tensor.variable.map(|variable| {
            at.iter().zip(&variable.dims).for_each(|(&at, &dim)| reshape[at] = tensor.shape[dim]);
            Variable { reshape_dims: at, ..variable }
        });
        Ok(Tensor { reshape: Some(reshape), variable, ..tensor })
    }
}

/// Whether the tensors of a batch are joined instead of stacked.
pub(super) fn is_ragged(tensor: &DynamicMessage) -> bool {
    is_set(tensor, "allow_ragged_batch")
}

/// A flag of an input, which outputs do not have.
fn is_set(tensor: &DynamicMessage, flag: &str) -> bool {
    tensor.get_field_by_name(flag).is_some_and(|value| value.as_bool() == Some(true))
}

fn dims_of_reshape(reshape: &prost_reflect::Value) -> Vec<i64> {
    dims(reshape.as_message().expect("the schema says message"), "shape")
}

/// Which dimensions requests choose.
fn positions(dims: &[i64]) -> Vec<usize> {
    (0..dims.len()).filter(|&dim| dims[dim] < 0).collect()
}

/// The lengths, with another one for those that requests choose.
fn lengths(dims: &[i64], variable: usize) -> Vec<usize> {
    dims.iter().map(|&length| usize::try_from(length).unwrap_or(variable)).collect()
}
