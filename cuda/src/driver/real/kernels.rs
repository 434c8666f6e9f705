//! Our own kernels on a GPU: [`crate::kernels`] says what is launched, and this module loads it and launches it.
//!
//! This module has `unsafe` because modules, functions and parameters are raw pointers to libcuda.

use std::{ffi::CString, ptr};

use cudarc::driver::sys::{self, CUfunction, CUmodule, CUstream};
use lowering::Step;

use super::check;
use crate::{
    driver::{Bases, DriverError},
    kernels::{self, KERNELS, MODULES},
};

/// All kernels, loaded into the context that was current. It must be current, too, where this is dropped.
#[derive(Debug)]
pub(super) struct Kernels {
    modules: Vec<Module>,
    /// As [`KERNELS`].
    functions: Vec<Function>,
}

#[derive(Debug)]
struct Module(CUmodule);

#[derive(Debug, Clone, Copy)]
struct Function(CUfunction);

// SAFETY: libcuda takes these handles from any thread whose context is the one that they are of.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}
// SAFETY: as above.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// A launch with all its parameters; valid as long as the [`Kernels`] it is of.
#[derive(Debug)]
pub(super) struct Launch {
    function: Function,
    call: crate::kernels::Call,
}

impl Kernels {
    /// Compiles all kernels for the GPU whose context is current, and puts them there: none is loaded later, when a
    /// stream may be captured.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn load() -> Result<Self, DriverError> {
        let mut loaded = Self { modules: Vec::new(), functions: Vec::new() };
        for (name, ptx) in MODULES {
            let image = CString::new(ptx).expect("PTX is text");
            let mut module = ptr::null_mut();
            // SAFETY: the image is a string that ends with a zero, and is read during the call only.
            let result = unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) };
            check::cuda(&format!("cuModuleLoadData of {name}.ptx"), result)?;
            loaded.modules.push(Module(module));
        }
        for (name, module) in KERNELS {
            let function = function(&loaded.modules[module], name)?;
            loaded.functions.push(function);
        }
        Ok(loaded)
    }

    /// What runs a step.
    ///
    /// # Errors
    /// If none of our kernels can.
    pub(super) fn prepare(&self, step: &Step, faults: Option<usize>, at: Bases) -> Result<Vec<Launch>, DriverError> {
        let launch = |call: crate::kernels::Call| {
            let index = KERNELS.iter().position(|(name, _)| *name == call.kernel).expect("calls are of known kernels");
            Launch { function: self.functions[index], call }
        };
        Ok(kernels::calls(step, faults, at)?.into_iter().map(launch).collect())
    }
}

fn function(module: &Module, name: &str) -> Result<Function, DriverError> {
    let text = CString::new(name).expect("names are text");
    let mut function = ptr::null_mut();
    // SAFETY: the module is loaded, and the name ends with a zero.
    let result = unsafe { sys::cuModuleGetFunction(&raw mut function, module.0, text.as_ptr()) };
    check::cuda(&format!("cuModuleGetFunction of {name}"), result)?;
    // SAFETY: the function is one of a loaded module.
    check::cuda(&format!("cuFuncLoad of {name}"), unsafe { sys::cuFuncLoad(function) })?;
    Ok(Function(function))
}

impl Drop for Kernels {
    fn drop(&mut self) {
        for module in &self.modules {
            // SAFETY: it was loaded, and nothing that was launched from it runs when a driver is dropped. What it
            // returns tells of a context that has failed before, and is nothing that could be mended here.
            let _ = unsafe { sys::cuModuleUnload(module.0) };
        }
    }
}

impl Launch {
    /// Puts it on a stream of the context that its kernels were loaded into.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn enqueue(&self, stream: CUstream) -> Result<(), DriverError> {
        let mut parameters = [self.call.parameters.as_ptr().cast_mut().cast()];
        // SAFETY: the function takes one parameter, and it has as many bytes as are there (a test holds both against
        // each other); they are read during the call only.
        let result = unsafe {
            sys::cuLaunchKernel(
                self.function.0,
                self.call.grid,
                1,
                1,
                self.call.threads,
                1,
                1,
                0,
                stream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check::cuda(&format!("cuLaunchKernel of {}", self.call.kernel), result)
    }
}
