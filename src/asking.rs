//! How a backend's models ask other models: through a frontend in the backend's own process, which joins the cluster
//! beside the backend, over the same network and with the same secret. It serves no clients.
#![allow(clippy::disallowed_methods)] // Has threads, and waits in real time.

use std::{
    future::pending,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    thread,
};

use anyhow::{Context, Result};
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
    /// Of the thread that waits for answers.
    questions: Handle,
    /// Once it runs, or why it does not.
    client: Arc<OnceLock<Result<Shared, String>>>,
}

/// Shared by all questions.
#[derive(Clone)]
struct Shared(Client);

impl Asking {
    /// Beside this backend.
    pub(crate) fn of(config: &backend::config::Config) -> Result<Arc<Self>> {
        let backend::config::Config { repository, load_files, network, .. } = config;
        let config = frontend::Config {
            schedulers: config.scheduler_list()?,
            load_files: load_files.clone(),
            network: beside(network),
            ..frontend::Config::new("127.0.0.1:0".parse::<std::net::SocketAddr>()?, "", repository)
        };
        let runtime = Builder::new_current_thread().build()?;
        let questions = runtime.handle().clone();
        let thread = thread::Builder::new().name("calls".to_owned());
        thread.spawn(move || runtime.block_on(pending::<()>())).context("a thread for calls")?;
        Ok(Arc::new(Self { config: Mutex::new(Some(config)), questions, client: Arc::default() }))
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
        let client = Arc::clone(&self.client);
        self.questions.spawn_blocking(move || {
            let started = ensembles::client::start(config);
            if let Err(error) = &started {
                tracing::error!("models cannot call others: {error}");
            }
            let _ = client.set(started.map(Shared).map_err(|error| error.to_string()));
        });
    }

    fn ask(&self, question: Question, answered: Answered) -> UnderWay {
        let client = match self.client.get() {
            Some(Ok(Shared(client))) => client.clone(),
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
        let task = self.questions.spawn(async move { answered(client.infer(infer).await.map(tensors).map_err(text)) });
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

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a frontend")
    }
}
