//! Requests, and steps of ensembles, whose model's answers are kept: whether another was answered so, is being asked,
//! or has to be.

#![allow(clippy::disallowed_methods)] // Waits in real time.

use std::rc::Rc;

use ensembles::{Known, Turning};
use frontend::{
    InferError,
    core::Core,
    desk::Desk,
    request::Place,
    rope::Rope,
    slots::Client,
    tasks::{Reply, Timing},
};
use proto::{Application, BackendId, Span, Timestamp, scheduler_to_frontend::DropReason, stages::AnswerStamps};
use repository::Model;

use super::{Service, inference::Given};
use crate::{
    budget::Charge,
    cache::{Asking, Cache, Digester, Kept, Question, Turn},
    pool::Pool,
    protocol::Pictures,
    record::Record,
};

/// Bytes that the packet thread digests itself, which takes a fifth of a millisecond with VAES. The copy to a slot then
/// finds them in the processor's cache: a digest by another thread costs three times as much in all.
const DIGESTED_AT_ONCE_MAX: usize = 4 << 20;

/// Answers that are kept, and whoever counts who is answered by them.
#[derive(Clone)]
pub(super) struct Answers {
    desk: Rc<Desk>,
    record: Rc<Record>,
    cache: Rc<Cache>,
    digester: Digester,
    pool: Pool,
}

/// A client's turn to ask a model.
pub(super) struct ClientAsks {
    asking: Asking,
    /// In whose share of what is kept the answer will be.
    client: Client,
}

/// All that a model is asked with.
pub(super) struct Asked<'a> {
    model: (usize, &'a Model),
    application: Application,
    /// Which outputs are wanted of an ensemble, which answers these and nothing else.
    wanted: Vec<u64>,
    inputs: &'a [(Place, Rope)],
    pictures: &'a [Rope],
}

impl ClientAsks {
    pub(super) fn answered(self, reply: &Reply) {
        self.asking.answered(reply, self.client);
    }
}

impl Given {
    pub(super) fn asked(&self) -> Asked<'_> {
        let (index, model) = &self.model;
        let wanted = if model.ensemble().is_some() { self.terms.wanted_bits() } else { Vec::new() };
        let pictures = self.pictures.as_ref().map_or(&[][..], |Pictures { pictures, .. }| pictures);
        let (application, inputs) = (self.terms.application(), &self.inputs[..]);
        Asked { model: (*index, model), application, wanted, inputs, pictures }
    }
}

impl Service {
    pub(super) fn answers(&self) -> Answers {
        let Self { desk, record, cache, digester, pool, .. } = self;
        let (desk, record, cache) = (Rc::clone(desk), Rc::clone(record), Rc::clone(cache));
        Answers { desk, record, cache, digester: *digester, pool: pool.clone() }
    }
}

impl Answers {
    /// To steps of an ensemble, whose digests are charged so; if any answer is kept.
    pub(super) fn known_to(self, charge: &Charge) -> Option<Box<dyn Known>> {
        self.cache.is_on().then(|| Box::new(KnownToSteps(self, charge.clone())) as Box<dyn Known>)
    }

    /// What decides the answer to a request, if its model's answers are kept.
    ///
    /// # Errors
    /// If too much of its client waits for the pool.
    pub(super) async fn question(&self, asked: Asked<'_>, charge: &Charge) -> Result<Option<Question>, InferError> {
        let Asked { model: (index, model), application, wanted, inputs, pictures } = asked;
        if !model.configuration.caches_responses() || !self.cache.is_on() {
            return Ok(None);
        }
        let loads = |core: &Core| core.loads(core.models().get(index));
        let Some(loads) = self.desk.with_core(loads) else { return Ok(None) };
        let mut numbers = vec![index as u64, application.0.into()];
        numbers.extend(loads);
        numbers.extend(wanted);
        let bytes = inputs.iter().map(|(_, data)| data.len()).chain(pictures.iter().map(|data| data.len()));
        let digester = self.digester;
        if bytes.sum::<usize>() <= DIGESTED_AT_ONCE_MAX {
            return Ok(Some(digester.question(&numbers, inputs, pictures)));
        }
        let (inputs, pictures, held) = (inputs.to_vec(), pictures.to_vec(), charge.clone());
        let digest = move || {
            let _held = held;
            digester.question(&numbers, &inputs, &pictures)
        };
        self.pool.run(charge, digest).await.map(Some)
    }

    /// Waits until a question to the model at an index is answered, or it is its turn to be asked, which comes with how
    /// long that has taken, if there is an objective. What it waits for counts as its own deadline says: others who ask
    /// have earlier ones.
    ///
    /// # Errors
    /// If that passes meanwhile.
    pub(super) async fn turn(
        &self,
        (index, slo): (usize, Span),
        question: Question,
        charge: &Charge,
    ) -> Result<(Result<ClientAsks, Reply>, Span), InferError> {
        let arrived = self.desk.now();
        let asks = |asking| ClientAsks { asking, client: charge.account().id().into() };
        let until = if slo == Span::ENDLESS { Timestamp::NEVER } else { arrived + slo };
        let waiting = match self.cache.ask(question, until) {
            Turn::Ask(asking) => {
                self.record.handle_cache_miss(index, self.desk.now() - arrived);
                return Ok((Ok(asks(asking)), Span::ZERO));
            }
            Turn::Answered(kept) => return Ok((Err(self.answered(index, &kept, arrived, until)), Span::ZERO)),
            Turn::Wait(waiting) => waiting,
        };
        let counted = self.desk.count(index);
        let turn = match slo {
            Span::ENDLESS => Ok(waiting.wait().await),
            slo => tokio::time::timeout(slo.to_duration(), waiting.wait()).await,
        };
        let Ok(turn) = turn else {
            let error = InferError::Dropped(DropReason::Deadline);
            counted.end(&Err(error.clone()));
            return Err(error);
        };
        counted.leave();
        match turn {
            Turn::Answered(kept) => Ok((Err(self.answered(index, &kept, arrived, until)), Span::ZERO)),
            Turn::Ask(asking) => {
                let waited = self.desk.now() - arrived;
                self.record.handle_cache_miss(index, waited);
                Ok((Ok(asks(asking)), if slo == Span::ENDLESS { Span::ZERO } else { waited }))
            }
            Turn::Wait(_) => unreachable!("who has waited does not wait again"),
        }
    }

    /// The reply that a kept answer makes.
    fn answered(&self, index: usize, kept: &Kept, arrived: Timestamp, deadline: Timestamp) -> Reply {
        let answered_at = self.desk.now();
        let at = arrived.0;
        let stamps = AnswerStamps {
            queued_at_ns: at,
            due_at_ns: at,
            granted_at_ns: at,
            planned_at_ns: at,
            fetched_at_ns: at,
            exec_at_ns: at,
            started_at_ns: at,
            finished_at_ns: at,
        };
        let (backend, gpu, batch_size) = (BackendId(0), 0, Timing::OF_CACHE);
        let timing = Timing { admitted_at: arrived, deadline, stamps, answered_at, batch_size, backend, gpu };
        let (outputs, shapes, batches) = (kept.outputs(), kept.shapes(), Vec::new());
        self.record.handle_cache_hit(answered_at, index, &timing);
        Reply { outputs, shapes, rows: kept.rows, timing, batches, was_late: false }
    }
}

/// The same for steps of one ensemble's request.
struct KnownToSteps(Answers, Charge);

impl Known for KnownToSteps {
    fn turn(&self, question: ensembles::Question) -> Turning {
        let Self(answers, charge) = self;
        let (answers, charge) = (answers.clone(), charge.clone());
        Box::pin(async move {
            let ensembles::Question { model: (index, model), inputs, application, within } = question;
            let asked =
                Asked { model: (index, &model), application, wanted: Vec::new(), inputs: &inputs, pictures: &[] };
            let Some(question) = answers.question(asked, &charge).await? else {
                // It cannot be asked now, or is being loaded: what it answers is not kept.
                return Ok(ensembles::Turn::Ask(None));
            };
            Ok(match answers.turn((index, within), question, &charge).await?.0 {
                Ok(asking) => ensembles::Turn::Ask(Some(Box::new(asking))),
                Err(reply) => ensembles::Turn::Answered(reply),
            })
        })
    }
}

impl ensembles::Asking for ClientAsks {
    fn answered(self: Box<Self>, reply: &Reply) {
        Self::answered(*self, reply);
    }
}
