//! What calls returned, as errors: the call, what its library says of it, and what to change where that is known.
//!
//! This module has `unsafe` because the libraries tell their texts as C strings.

use std::ffi::{CStr, c_char};

use cudarc::{
    cublaslt::sys::{self as lt, cublasStatus_t},
    cudnn::sys::{self as dnn, cudnnStatus_t},
    driver::sys::{self, CUresult},
};

use crate::DriverError;

/// An error if a call of libcuda's failed.
pub(super) fn cuda(call: &str, result: CUresult) -> Result<(), DriverError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = std::ptr::null();
    let mut text = std::ptr::null();
    // SAFETY: both write a pointer to a static string, or null for a number that they do not know.
    unsafe {
        let _ = sys::cuGetErrorName(result, &raw mut name);
        let _ = sys::cuGetErrorString(result, &raw mut text);
    }
    Err(DriverError(format!("{call}: {} ({}){}", string(text), string(name), advice(result))))
}

/// What an operator can do.
fn advice(result: CUresult) -> &'static str {
    match result {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => "; give this GPU fewer pages, or end what else uses its memory",
        CUresult::CUDA_ERROR_NO_DEVICE => "; is a GPU there, and allowed by CUDA_VISIBLE_DEVICES?",
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => "; the kernel's driver is not libcuda's: restart the host",
        _ => "",
    }
}

/// An error if a call of cuBLASLt's failed.
pub(super) fn blas(call: &str, status: cublasStatus_t) -> Result<(), DriverError> {
    if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    // SAFETY: it returns a static string.
    let text = unsafe { lt::cublasLtGetStatusString(status) };
    Err(DriverError(format!("{call}: {} ({status:?})", string(text))))
}

/// An error if a call of cuDNN's failed.
pub(super) fn dnn(call: &str, status: cudnnStatus_t) -> Result<(), DriverError> {
    if status == cudnnStatus_t::CUDNN_STATUS_SUCCESS {
        return Ok(());
    }
    let mut message = [0_u8; 256];
    // SAFETY: it writes at most so many bytes, the terminating zero included.
    unsafe { dnn::cudnnGetLastErrorString(message.as_mut_ptr().cast(), message.len()) };
    let message = CStr::from_bytes_until_nul(&message).map(CStr::to_string_lossy).unwrap_or_default();
    let message = message.lines().next().unwrap_or_default().trim();
    Err(DriverError(format!("{call}: {status:?}{}{message}", if message.is_empty() { "" } else { ": " })))
}

fn string(text: *const c_char) -> String {
    if text.is_null() {
        return "unknown error".to_owned();
    }
    // SAFETY: not null, so it is one of the libraries' static strings, which end with a zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
