//! The frontend inside another program: the same admission, slots and replies without HTTP.
#![allow(clippy::disallowed_methods)] // A driver: the core has a thread of its own.

use std::{pin::Pin, rc::Rc, sync::Arc, thread::JoinHandle};

use bytes::Bytes;
use proto::Span;
use repository::{DataType, Model};
use tokio::sync::{mpsc, oneshot};

use crate::{
    config::Config,
    desk::Desk,
    drive::{Frontend, FrontendError},
    error::InferError,
    request::{self, InputTensor},
    tasks::{Reply, Timing},
};

/// Calls that wait to be looked at by the frontend's thread; more of them make callers wait.
const CALLS_MAX: usize = 1024;

/// Answers a request on the frontend's thread.
pub type Answer = fn(Rc<Desk>, Infer) -> Pin<Box<dyn Future<Output = Result<Inferred, InferError>>>>;

/// A handle to a frontend that runs on a thread of its own. Cheap to clone; when the last clone is dropped, the thread
/// ends.
#[derive(Clone)]
pub struct Client {
    calls: mpsc::Sender<Call>,
    _thread: Arc<Thread>,
}

/// One request.
#[derive(Debug, Clone)]
pub struct Infer {
    /// The model's name.
    pub model: String,
    /// Its version; as the model's policy has it if `None`.
    pub version: Option<String>,
    /// All inputs of the model, in any order.
    pub inputs: Vec<InputTensor>,
    /// The latency objective; the model's own if `None`. `ENDLESS` if it has none.
    pub slo: Option<Span>,
}

/// One request's answer.
#[derive(Debug, Clone)]
pub struct Inferred {
    /// All outputs, in the order of the model's configuration.
    pub outputs: Vec<OutputTensor>,
    /// Where the time went.
    pub timing: Timing,
}

/// One output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputTensor {
    /// As in the model's configuration.
    pub name: String,
    /// As in the model's configuration.
    pub datatype: DataType,
    /// The batch dimension, then the dimensions of the model's configuration.
    pub shape: Vec<usize>,
    /// Elements in row-major order, little-endian.
    pub data: Bytes,
}

enum Call {
    Infer { infer: Infer, answer: oneshot::Sender<Result<Inferred, InferError>> },
    IsReady { model: String, answer: oneshot::Sender<Result<bool, InferError>> },
}

impl Client {
    /// Starts a frontend on its own thread.
    ///
    /// # Errors
    /// As [`Frontend::open`].
    pub fn start(config: Config) -> Result<Self, FrontendError> {
        Self::start_answering(config, |desk, infer| Box::pin(self::answer(desk, infer)))
    }

    /// The same, where requests are answered so: a crate above this one knows more than models.
    ///
    /// # Errors
    /// As [`Frontend::open`].
    pub fn start_answering(config: Config, answer: Answer) -> Result<Self, FrontendError> {
        let (calls, queue) = mpsc::channel(CALLS_MAX);
        let (opened, wait_opened) = crossbeam_channel::bounded(1);
        let thread = std::thread::Builder::new().name("frontend".to_owned()).spawn(move || {
            // A frontend belongs to the thread that opened it.
            let frontend = match Frontend::open(&config, Rc::new(())) {
                Ok(frontend) => frontend,
                Err(error) => return drop(opened.send(Err(error))),
            };
            let desk = frontend.desk();
            let _ = opened.send(Ok(()));
            if let Err(error) = frontend.run(take_calls(desk, queue, answer)) {
                tracing::error!("the frontend ended: {error}");
            }
        })?;
        wait_opened.recv().expect("the thread says how it went")?;
        Ok(Self { calls, _thread: Arc::new(Thread(Some(thread))) })
    }

    /// Sends a request and waits for its answer. Dropping the future cancels the request.
    ///
    /// # Errors
    /// Why there is no answer.
    pub async fn infer(&self, infer: Infer) -> Result<Inferred, InferError> {
        self.call(|answer| Call::Infer { infer, answer }).await
    }

    /// As [`Self::infer`], for threads without an async runtime.
    ///
    /// # Errors
    /// Why there is no answer.
    ///
    /// # Panics
    /// If called within an async runtime.
    pub fn infer_blocking(&self, infer: Infer) -> Result<Inferred, InferError> {
        let (answer, wait) = oneshot::channel();
        self.calls.blocking_send(Call::Infer { infer, answer }).map_err(|_| InferError::ShuttingDown)?;
        wait.blocking_recv().unwrap_or(Err(InferError::ShuttingDown))
    }

    /// Whether requests for a model can be taken.
    ///
    /// # Errors
    /// If there is no such model.
    pub async fn is_ready(&self, model: &str) -> Result<bool, InferError> {
        self.call(|answer| Call::IsReady { model: model.to_owned(), answer }).await
    }

    /// As [`Self::is_ready`], for threads without an async runtime.
    ///
    /// # Errors
    /// If there is no such model.
    ///
    /// # Panics
    /// If called within an async runtime.
    pub fn is_ready_blocking(&self, model: &str) -> Result<bool, InferError> {
        let (answer, wait) = oneshot::channel();
        let call = Call::IsReady { model: model.to_owned(), answer };
        self.calls.blocking_send(call).map_err(|_| InferError::ShuttingDown)?;
        wait.blocking_recv().unwrap_or(Err(InferError::ShuttingDown))
    }

    async fn call<T>(
        &self,
        call: impl FnOnce(oneshot::Sender<Result<T, InferError>>) -> Call,
    ) -> Result<T, InferError> {
        let (answer, wait) = oneshot::channel();
        self.calls.send(call(answer)).await.map_err(|_| InferError::ShuttingDown)?;
        wait.await.unwrap_or(Err(InferError::ShuttingDown))
    }
}

/// Takes calls until the last client is gone.
async fn take_calls(desk: Rc<Desk>, mut calls: mpsc::Receiver<Call>, by: Answer) {
    while let Some(call) = calls.recv().await {
        match call {
            Call::Infer { infer, mut answer } => {
                let desk = Rc::clone(&desk);
                tokio::task::spawn_local(async move {
                    tokio::select! {
                        result = by(desk, infer) => drop(answer.send(result)),
                        () = answer.closed() => {}
                    }
                });
            }
            Call::IsReady { model, answer } => drop(answer.send(desk.with_model(&model, None, |_, _, ready| ready))),
        }
    }
}

/// Answers a request of a model.
///
/// # Errors
/// Why there is no answer.
pub async fn answer(desk: Rc<Desk>, infer: Infer) -> Result<Inferred, InferError> {
    let Infer { model, version, inputs, slo } = infer;
    let (index, model) =
        desk.with_model(&model, version.as_deref(), |index, served, _| (index, Rc::clone(&served.model)))?;
    let checked = request::check(&model, index, inputs, objective(&model, slo)?)?;
    Ok(Inferred::of(&model, &desk.submit(&checked)?.wait().await?))
}

/// The objective of a request that asks for this one, or for the model's own.
///
/// # Errors
/// If it is none.
pub fn objective(model: &Model, asked: Option<Span>) -> Result<Span, InferError> {
    let own = || model.queue.objective(model.priorities.of(0), None, model.slo);
    match asked.unwrap_or_else(own) {
        Span::ENDLESS => Ok(Span::ENDLESS),
        slo => request::slo_from_micros(slo.0 / 1000),
    }
}

impl Inferred {
    /// A model's reply with the names of its outputs.
    #[must_use]
    pub fn of(model: &Model, reply: &Reply) -> Self {
        let outputs = model.outputs.iter().zip(&reply.outputs).enumerate();
        let outputs = outputs.map(|(index, (tensor, data))| OutputTensor {
            name: tensor.name.clone(),
            datatype: tensor.datatype,
            shape: reply.shape(model, index),
            data: data.clone(),
        });
        Self { outputs: outputs.collect(), timing: reply.timing }
    }
}

/// Waits for the thread's end, which follows from the end of the channel.
struct Thread(Option<JoinHandle<()>>);

impl Drop for Thread {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            let _ = thread.join();
        }
    }
}
