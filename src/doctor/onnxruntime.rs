//! ONNX Runtime, which runs the models that ask for it.

use backend::{config::OnnxRuntime, executor};

use crate::doctor::finding::Finding;

/// This host's library, as a backend finds it whose file does not name one.
pub(super) fn here() -> Finding {
    check(executor::onnxruntime_library(&OnnxRuntime::default()))
}

fn check(library: Result<String, backend::error::ExecutorError>) -> Finding {
    let name = "ONNX Runtime";
    match library {
        Ok(found) => Finding::ok(name, found),
        Err(reason) => {
            let remedy = "executor = \"onnxruntime\" does not start without it (docs/configuration.md)";
            Finding::advice(name, reason.to_string(), remedy)
        }
    }
}

#[cfg(test)]
mod tests {
    use backend::error::ExecutorError;

    use super::*;
    use crate::doctor::finding::Level;

    #[test]
    fn a_library_that_is_missing_is_advice() {
        let level = |library: Result<&str, &str>| {
            let library = library.map(str::to_owned).map_err(|reason| ExecutorError(reason.to_owned()));
            let finding = check(library);
            (finding.level, finding.found)
        };
        assert_eq!(level(Ok("/opt/x.so, for the CPU")), (Level::Ok, "/opt/x.so, for the CPU".to_owned()));
        assert_eq!(level(Err("not found")), (Level::Advice, "not found".to_owned()));
    }
}
