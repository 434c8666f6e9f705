//! A program that is asked for what its model's configuration lacks, when the configuration is read (Triton's
//! `auto_complete_config`). It is started for that, with the same limits as one that runs batches, and ended when it
//! has answered: within its `start_timeout_ms`, in a line.

use std::sync::Arc;

use proto::backend_to_program::{CompleteTold, FromProgram, PROTOCOL, ToProgram};
use repository::Question;
use serde_json::Value;

use super::{
    Metrics, Programs, excerpt,
    keeper::{Keeper, absolute},
};

impl Programs {
    /// Has programs asked for what configurations lack, in all repositories that this process reads from now on.
    pub fn complete_configurations(self) {
        repository::ask_programs_with(move |question| self.ask(question));
    }

    /// What a program says to `question`: parts of a configuration, in JSON.
    ///
    /// # Errors
    /// If it cannot be started, refuses, breaks the protocol, or does not answer in time; in one line.
    fn ask(&self, question: &Question<'_>) -> Result<Value, String> {
        let failed = |error| format!("its program cannot be started: {error}");
        let program = absolute(question.program).map_err(failed)?;
        let told = ToProgram::Complete(Box::new(CompleteTold {
            protocol: PROTOCOL,
            name: question.name.to_owned(),
            version: question.version.to_owned(),
            folder: program.folder.display().to_string(),
            file: program.file().display().to_string(),
            config: serde_json::to_value(question.configuration).unwrap_or_default(),
        }));
        // It runs no batch, so it has nothing to count.
        let metrics = Arc::new(Metrics::default().of_model());
        let keeper = Keeper::new(question.name, &program, &told, (0, &metrics), self).map_err(failed)?;
        match keeper.ask()? {
            FromProgram::Config(config) => Ok(config),
            FromProgram::Refused(reason) => Err(excerpt(&reason)),
            other => {
                let said = excerpt(&serde_json::to_string(&other).unwrap_or_default());
                Err(format!("it said {said}, expected a configuration"))
            }
        }
    }
}
