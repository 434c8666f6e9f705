//! The simulator's workload file: any text is a workload or an error of one line.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Err(error) = sim::Workload::parse(text, "name", "path", Path::new("/nowhere")) {
        assert_eq!(error.to_string().lines().count(), 1, "{error}");
    }
});
