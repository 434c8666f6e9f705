//! What a configuration leaves out, as the program that runs the model has it (Triton's `auto_complete_config`):
//! tensors, `max_batch_size`, `dynamic_batching`.
//!
//! Reading a repository starts no process. Whoever can start programs says so, once for its process; where nobody does,
//! a model whose configuration lacks tensors is refused.

use std::sync::OnceLock;

use prost_reflect::DynamicMessage;
use proto::Span;
use serde_json::Value;

use super::Configuration;
use crate::{
    config::file::{ConfigFile, MODEL_CONFIG},
    error::RepositoryError,
    program::Program,
};

/// Fields that are taken from an answer. The others are the configuration's alone.
const TAKEN: [&str; 5] = ["max_batch_size", "input", "output", "dynamic_batching", "model_transaction_policy"];

/// A model about which its program is asked.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// The model's name.
    pub name: &'a str,
    /// Its version.
    pub version: &'a str,
    /// Whom to ask.
    pub program: &'a Program,
    /// What is known so far.
    pub configuration: &'a Configuration,
}

/// Asks a program: yields parts of a configuration in JSON, or in one line why there are none.
type Ask = dyn Fn(&Question<'_>) -> Result<Value, String> + Send + Sync;

static ASK: OnceLock<Box<Ask>> = OnceLock::new();

/// Says how programs are asked for what configurations lack, in all repositories that this process reads from now on.
/// The first one to say so is heard.
pub fn ask_programs_with(ask: impl Fn(&Question<'_>) -> Result<Value, String> + Send + Sync + 'static) {
    // Another one would do the same: there is one way to start programs.
    let _ = ASK.set(Box::new(ask));
}

impl ConfigFile<'_> {
    /// Takes what the program says of its model; then the whole is checked as if it had been written.
    pub(super) fn ask(&mut self) -> Result<(), RepositoryError> {
        let (name, executor) = (self.name()?, self.executor_name());
        let program = self.program(&executor)?;
        let folder = self.folder.join(&self.version);
        let failed = |reason: String| {
            let lacking = "its configuration has no input or output, or one without data_type or dims";
            RepositoryError(format!("{}: {lacking}, and the model cannot say it: {reason}", folder.display()))
        };
        let Some(ask) = ASK.get() else { return Err(failed("nothing here can start its program".to_owned())) };
        let configuration = Configuration::completed(self.told_message(&name), Span::ENDLESS);
        let question =
            Question { name: &name, version: &self.version, program: &program, configuration: &configuration };
        let answer = ask(&question).map_err(failed)?;
        let answer = DynamicMessage::deserialize(MODEL_CONFIG.clone(), answer)
            .map_err(|error| failed(format!("{error}; expected a ModelConfig in JSON").replace('\n', " ")))?;
        for field in TAKEN.into_iter().filter_map(|key| MODEL_CONFIG.get_field_by_name(key)) {
            if answer.has_field(&field) {
                self.message.set_field(&field, answer.get_field(&field).into_owned());
            }
        }
        if !self.path.is_file() {
            // Nothing else was written, so what is wrong is the program's.
            self.path = folder;
        }
        self.check_fields()
    }
}
