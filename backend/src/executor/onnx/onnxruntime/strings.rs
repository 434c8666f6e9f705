//! Strings as a tensor of ONNX Runtime's. `ort` makes such tensors of C strings, which end at their first NUL; clients
//! send strings with any bytes.

use std::{ptr, slice};

use ort::{
    AsPointer as _, Error,
    memory::Allocator,
    value::{DynTensor, TensorElementType},
};

/// As many strings as the shape has elements.
pub(super) fn tensor(shape: &[usize], strings: &[String]) -> ort::Result<DynTensor> {
    assert_eq!(strings.len(), shape.iter().product::<usize>(), "it has other strings than elements");
    let mut tensor = DynTensor::new(&Allocator::default(), TensorElementType::String, shape)?;
    for (at, string) in strings.iter().enumerate() {
        let mut buffer = ptr::null_mut();
        // SAFETY: The tensor has strings, `at` is one of its elements, and nobody else has the tensor. The library
        // makes that string as long as asked, and says where its bytes are, which stay there until it is written again.
        unsafe {
            let write = ort::api().GetResizedStringTensorElementBuffer;
            Error::result_from_status(write(tensor.ptr_mut(), at, string.len(), &raw mut buffer))?;
            slice::from_raw_parts_mut(buffer.cast::<u8>(), string.len()).copy_from_slice(string.as_bytes());
        }
    }
    Ok(tensor)
}
