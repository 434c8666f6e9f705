//! How a backend's models ask other models: through a frontend in the backend's own process, which joins the cluster
//! beside the backend, over the same network and with the same secret. It serves no clients.
#![allow(clippy::disallowed_methods)] // Has threads, and waits in real time.

use std::{
    future::pending,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    thread,
};

use anyhow::Result;
use backend::calls::{Answered, Callee, Question, Tensor, UnderWay};
use frontend::{Client, Infer, InferError, Inferred, InputTensor, rope::Rope};
use proto::member_name::MEMBER_NAME_BYTES_MAX;
use tokio::{
    runtime::{Builder, Handle},
    task::AbortHandle,
};
use transport::{NetworkConfig, OwnAddress};

/// What its name ends in.
const NAME: &str = "-calls";

/// A frontend that starts when it is needed.
#[derive(Debug)]
pub(crate) struct Asking {
    config: Mutex<Option<frontend::Config>>,
    /// Once it runs, or why it does not.
    frontend: Arc<OnceLock<Result<Frontend, String>>>,
}

/// Shared by all questions.
#[derive(Clone)]
struct Frontend {
    client: Client,
    /// Of the thread that waits for answers.
    questions: Handle,
}

impl Asking {
    /// Beside this backend.
    pub(crate) fn of(config: &backend::config::Config) -> Result<Arc<Self>> {
        let schedulers = config.scheduler_list()?;
        let backend::config::Config { repository, load_files, network, .. } = config;
        let config = frontend::Config {
            schedulers: schedulers.clone(),
            load_files: load_files.clone(),
            network: beside(network),
            ..frontend::Config::new(schedulers[0].clone(), "", repository)
        };
        Ok(Arc::new(Self { config: Mutex::new(Some(config)), frontend: Arc::default() }))
    }
}

/// Starts a frontend, says how that went, and then waits for answers for ever.
fn run(config: frontend::Config, told: &OnceLock<Result<Frontend, String>>) {
    let started = || {
        let runtime = Builder::new_current_thread().build().map_err(|error| error.to_string())?;
        let client = ensembles::client::start(config).map_err(|error| error.to_string())?;
        Ok((client, runtime))
    };
    match started() {
        Ok((client, runtime)) => {
            let _ = told.set(Ok(Frontend { client, questions: runtime.handle().clone() }));
            runtime.block_on(pending::<()>());
        }
        Err(error) => {
            tracing::error!("models cannot call others: {error}");
            let _ = told.set(Err(error));
        }
    }
}

/// The network of another member in a backend's process: its name and its port are its own.
fn beside(network: &NetworkConfig) -> NetworkConfig {
    let mut name = network.member_name();
    name.truncate(name.floor_char_boundary(MEMBER_NAME_BYTES_MAX - NAME.len()));
    let address = network.address.as_ref().map(|address| match address {
        OwnAddress::At(address) => OwnAddress::At(address.with_port(0)),
        OwnAddress::Auto(_) => OwnAddress::Auto(Some(0)),
    });
    NetworkConfig { name: Some(name + NAME), address, shared_address: false, ..network.clone() }
}

impl Callee for Asking {
    /// Names may not be there yet, and a repository may be large: nobody waits for that.
    fn prepare(&self) {
        let Some(config) = self.config.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        let told = Arc::clone(&self.frontend);
        let spawned = thread::Builder::new().name("calls".to_owned()).spawn(move || run(config, &told));
        if let Err(error) = spawned {
            let _ = self.frontend.set(Err(format!("found no thread for them: {error}")));
        }
    }

    fn ask(&self, question: Question, answered: Answered) -> UnderWay {
        let Frontend { client, questions } = match self.frontend.get() {
            Some(Ok(frontend)) => frontend.clone(),
            Some(Err(error)) => {
                answered(Err(format!("models cannot call others: {error}")));
                return Box::new(());
            }
            None => {
                answered(Err("the backend is about to start: models cannot call others yet".to_owned()));
                return Box::new(());
            }
        };
        let Question { model, version, inputs, objective } = question;
        let inputs = inputs.into_iter().map(|Tensor { name, datatype, shape, data }| InputTensor {
            name,
            datatype,
            shape,
            data: Rope::from(data),
        });
        let infer = Infer { model, version, inputs: inputs.collect(), slo: objective };
        let task = questions.spawn(async move { answered(client.infer(infer).await.map(tensors).map_err(text)) });
        Box::new(Withdrawn(task.abort_handle()))
    }
}

fn tensors(inferred: Inferred) -> Vec<Tensor> {
    let outputs = inferred.outputs.into_iter();
    outputs
        .map(|output| Tensor { name: output.name, datatype: output.datatype, shape: output.shape, data: output.data })
        .collect()
}

fn text(error: InferError) -> String {
    error.to_string()
}

/// Withdraws a question when it is dropped.
struct Withdrawn(AbortHandle);

impl Drop for Withdrawn {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl std::fmt::Debug for Frontend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Frontend")
    }
}
