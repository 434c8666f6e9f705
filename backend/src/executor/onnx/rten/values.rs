//! Tensors as rten has them. INT64 and BOOL are INT32 there, and FP16 is FP32: numbers that 32 bits do not hold are
//! errors of the requests that bring or would get them.

use half::f16;
use repository::DataType;
use rten::{Value, ValueOrView, ValueView};
use rten_tensor::{Tensor as Elements, prelude::*};

use crate::{error::ExecutorError, executor::onnx::tensor::Tensor};

/// As reasons call rten.
pub(super) const EMBEDDED: &str = "the embedded engine";

/// What has the rest.
pub(super) const ELSE: &str = "ONNX Runtime has it: pip install onnxruntime (executor \"auto\" takes it)";

/// Types that a model's inputs and outputs may have.
pub(super) const TYPES: [DataType; 7] =
    [DataType::Bool, DataType::Uint8, DataType::Int8, DataType::Int32, DataType::Int64, DataType::Fp16, DataType::Fp32];

/// An input; numbers of its own types stay where they are.
pub(super) fn value<'a>(name: &str, tensor: &'a Tensor) -> Result<ValueOrView<'a>, ExecutorError> {
    let shape = &tensor.shape[..];
    Ok(match tensor.datatype {
        DataType::Fp32 => view(shape, tensor.numbers::<f32>())?,
        DataType::Int32 => view(shape, tensor.numbers::<i32>())?,
        DataType::Uint8 => view(shape, tensor.numbers::<u8>())?,
        DataType::Int8 => view(shape, tensor.numbers::<i8>())?,
        DataType::Bool => owned(shape, tensor.bytes().iter().map(|&byte| i32::from(byte != 0)).collect::<Vec<_>>())?,
        DataType::Fp16 => {
            let halves = tensor.numbers::<u16>().iter().map(|&bits| f16::from_bits(bits).to_f32());
            owned(shape, halves.collect::<Vec<_>>())?
        }
        DataType::Int64 => {
            let narrow = |&number: &i64| i32::try_from(number).map_err(|_| beyond(&format!("input {name}"), number));
            owned(shape, tensor.numbers::<i64>().iter().map(narrow).collect::<Result<Vec<_>, _>>()?)?
        }
        other => return Err(lacks(&format!("input {name}"), other.name())),
    })
}

/// What the engine that is embedded does not have, ONNX Runtime may.
pub(super) fn lacks(what: &str, datatype: &str) -> ExecutorError {
    ExecutorError(format!("{what} is {datatype}, which {EMBEDDED} lacks; {ELSE}"))
}

fn beyond(what: &str, number: i64) -> ExecutorError {
    ExecutorError(format!(
        "{what} has {number}, expected {} to {}, as {EMBEDDED} computes INT64 in 32 bits; {ELSE}",
        i32::MIN,
        i32::MAX
    ))
}

fn view<'a, T>(shape: &[usize], numbers: &'a [T]) -> Result<ValueOrView<'a>, ExecutorError>
where
    ValueView<'a>: From<rten_tensor::TensorView<'a, T>>,
{
    ValueView::from_shape(shape, numbers).map(Into::into).map_err(|error| ExecutorError(error.to_string()))
}

fn owned<'a, T>(shape: &[usize], numbers: Vec<T>) -> Result<ValueOrView<'a>, ExecutorError>
where
    Value: From<Elements<T>>,
{
    Value::from_shape(shape, numbers).map(ValueOrView::Value).map_err(|error| ExecutorError(error.to_string()))
}

/// An output of this type.
pub(super) fn tensor(name: &str, datatype: DataType, value: Value) -> Result<Tensor, ExecutorError> {
    match (datatype, value) {
        (DataType::Fp32, Value::FloatTensor(found)) => Ok(copied(datatype, &found, f32::to_le_bytes)),
        (DataType::Fp16, Value::FloatTensor(found)) => {
            Ok(copied(datatype, &found, |number| f16::from_f32(number).to_le_bytes()))
        }
        (DataType::Int32, Value::Int32Tensor(found)) => Ok(copied(datatype, &found, i32::to_le_bytes)),
        (DataType::Bool, Value::Int32Tensor(found)) => Ok(copied(datatype, &found, |number| [u8::from(number != 0)])),
        (DataType::Int64, Value::Int32Tensor(found)) => {
            // What it casts to INT64 ends at these.
            let ends = found.iter().copied().find(|number| [i32::MIN, i32::MAX].contains(number));
            match ends {
                Some(number) => Err(beyond(&format!("output {name}"), i64::from(number))),
                None => Ok(copied(datatype, &found, |number| i64::from(number).to_le_bytes())),
            }
        }
        (DataType::Int8, Value::Int8Tensor(found)) => Ok(copied(datatype, &found, i8::to_le_bytes)),
        (DataType::Uint8, Value::UInt8Tensor(found)) => Ok(copied(datatype, &found, u8::to_le_bytes)),
        (_, found) => Err(ExecutorError(format!("output {name} came as {}, expected {datatype}", found.dtype()))),
    }
}

fn copied<T: Copy, const BYTES: usize>(
    datatype: DataType,
    found: &Elements<T>,
    bytes: impl Fn(T) -> [u8; BYTES],
) -> Tensor {
    let mut tensor = Tensor::zeros(datatype, found.shape());
    let into = tensor.bytes_mut().as_chunks_mut::<BYTES>().0;
    match found.data() {
        Some(numbers) => into.iter_mut().zip(numbers).for_each(|(into, &number)| *into = bytes(number)),
        None => into.iter_mut().zip(found.iter()).for_each(|(into, &number)| *into = bytes(number)),
    }
    tensor
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As it would come back from a graph that only passes it on.
    fn passed(tensor: &Tensor) -> Result<Tensor, String> {
        let value = value("x", tensor).map_err(|error| error.0)?;
        super::tensor("y", tensor.datatype, value.into_owned()).map_err(|error| error.0)
    }

    #[test]
    fn all_types_pass_and_numbers_beyond_32_bits_do_not() {
        for datatype in TYPES {
            let tensor = Tensor::of_numbers(datatype, &[3, 1], &[0.0, 1.0, 1.0]);
            assert_eq!(passed(&tensor), Ok(tensor), "{datatype}");
        }
        let most = Tensor::of_numbers(DataType::Int64, &[2], &[f64::from(i32::MAX) - 1.0, f64::from(i32::MIN) + 1.0]);
        assert_eq!(passed(&most), Ok(most));
        let error = passed(&Tensor::of_numbers(DataType::Int64, &[1], &[-5e9])).unwrap_err();
        assert!(error.starts_with("input x has -5000000000, expected -2147483648 to 2147483647"), "{error}");
        let error = passed(&Tensor::of_numbers(DataType::Int64, &[1], &[f64::from(i32::MAX)])).unwrap_err();
        assert!(error.starts_with("output y has 2147483647"), "{error}");
        let error = passed(&Tensor::of_numbers(DataType::Fp64, &[1], &[1.0])).unwrap_err();
        assert!(error.starts_with("input x is FP64, which the embedded engine lacks; ONNX Runtime has it"), "{error}");
    }
}
