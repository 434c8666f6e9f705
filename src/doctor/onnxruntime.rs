//! What runs ONNX models that do not say it: ONNX Runtime, if it is found.

use backend::{
    config::OnnxRuntime,
    error::ExecutorError,
    executor::{self, Library},
};

use crate::doctor::finding::Finding;

/// This host's library, as `up` finds it.
pub(super) fn here() -> Finding {
    check(&executor::onnxruntime_library(&OnnxRuntime::default(), executor::python_package().as_deref()))
}

fn check(found: &Result<Library, ExecutorError>) -> Finding {
    let (name, (_, engine)) = ("ONNX models", executor::engine_of(found));
    match found {
        Ok(_) => Finding::ok(name, engine),
        Err(_) => Finding::advice(name, engine, "pip install onnxruntime runs all of them, and faster"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;

    #[test]
    fn a_library_that_is_missing_is_advice() {
        let finding = check(&Err(ExecutorError("none was found".to_owned())));
        let expected = "the embedded engine, as none was found";
        assert_eq!((finding.level, &*finding.found), (Level::Advice, expected));
    }
}
