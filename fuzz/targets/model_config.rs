//! A model's `config.pbtxt`: any text is a model or an error of one line.
#![no_main]

mod served;

use std::{fs, path::PathBuf, sync::LazyLock};

use libfuzzer_sys::fuzz_target;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(served::folder);

fuzz_target!(|text: &[u8]| {
    fs::write(FOLDER.join("config.pbtxt"), text).unwrap();
    if let Err(error) = repository::load_model(&FOLDER) {
        assert_eq!(error.to_string().lines().count(), 1, "{error}");
    }
});
