//! Requests that are mirrored (`selection: "shadow"`): once the first step has answered, the others are asked the same
//! without an objective, so that nobody's deadline suffers. What they answer is compared, counted and thrown away.
//!
//! What is mirrored is bounded in number, bytes and time. What finds no room is not mirrored, which is counted too.
#![allow(clippy::disallowed_methods)] // Waits in real time.

use std::{cell::Cell, rc::Rc};

use bytes::Bytes;
use ensembles::{
    Ended, Selected, Step,
    selection::{Choice, combine::Outputs},
    vote::Order,
};
use frontend::{InferError, desk::Desk, request::Place, rope::Rope, tasks::Timing};
use proto::{Application, Span, Wait};
use repository::Model;

use super::{Service, inference::Between};
use crate::{
    budget::{Account, Charge},
    metrics::{Compared, ShadowOutcome, Took},
    pool::{AT_ONCE_BYTES_MAX, Pool},
    record::Record,
};

/// Shadows that are asked at a time.
const UNDER_WAY_MAX: usize = 64;
/// Bytes of what they are asked, and answer.
const BYTES_MAX: usize = 32 << 20;
/// A shadow that has not answered after so long is not waited for.
const WAIT_MAX: Span = Wait::Shadow.bound();

/// Shadows that are asked now.
pub(super) struct Shadows {
    /// Theirs: what is mirrored takes no client's share of anything.
    account: Account,
    under_way: Rc<Cell<usize>>,
}

/// A request that is to be mirrored once it is answered.
pub(super) struct Mirrored {
    model: (usize, Rc<Model>),
    application: Application,
    members: Vec<usize>,
    inputs: Vec<(Place, Rope)>,
    /// What these keep in memory at most.
    bytes: usize,
}

/// Who asks shadows, and counts what becomes of them.
#[derive(Clone)]
pub(super) struct Means {
    pub(super) desk: Rc<Desk>,
    pub(super) record: Rc<Record>,
    pub(super) pool: Pool,
}

/// One of those that are under way.
struct UnderWay(Rc<Cell<usize>>);

/// What the first step has answered.
#[derive(Clone)]
struct Main {
    prediction: Vec<Bytes>,
    rows: usize,
    took: Option<Took>,
}

impl UnderWay {
    fn begin(count: &Rc<Cell<usize>>) -> Option<Self> {
        let is_free = count.get() < UNDER_WAY_MAX;
        is_free.then(|| {
            count.set(count.get() + 1);
            Self(Rc::clone(count))
        })
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Mirrored {
    /// A request for the ensemble of this face, if whom it asks says that it is to be.
    pub(super) fn of(
        choice: Option<&Choice>,
        (index, face): (usize, &Rc<Model>),
        application: Application,
        inputs: &[(Place, Rope)],
        charge: &Charge,
    ) -> Option<Self> {
        let members = choice.filter(|choice| !choice.mirrored.is_empty())?.mirrored.clone();
        let (inputs, bytes) = (inputs.to_vec(), charge.held());
        Some(Self { model: (index, Rc::clone(face)), application, members, inputs, bytes })
    }

    /// One that asks this shadow alone.
    fn request(&self, member: usize, charge: &Charge, pool: &Pool) -> ensembles::Request {
        let (index, face) = &self.model;
        let weights = vec![1.0; face.ensemble().map_or(0, |graph| graph.steps.len())];
        let (members, order, mirrored) = (vec![member], Order::AtOnce, Vec::new());
        ensembles::Request {
            model: (*index, Rc::clone(face)),
            inputs: self.inputs.clone(),
            wanted: vec![true; face.outputs.len()],
            slo: Span::ENDLESS,
            waited: Span::ZERO,
            priority: 0,
            application: self.application,
            client: Some(charge.account().id().into()),
            room: Box::new(Between(charge.clone(), pool.clone())),
            known: None,
            choice: Some(Choice { request: 0, members, order, weights, probability: 1.0, mirrored }),
            allow_default: false,
            is_counted: false,
        }
    }
}

impl Shadows {
    /// None yet.
    pub(super) fn new() -> Self {
        Self { account: Account::of_nobody(BYTES_MAX), under_way: Rc::default() }
    }

    /// A request has been answered by its first step: its shadows are asked, as far as there is room.
    pub(super) fn begin(
        &self,
        means: &Means,
        mirrored: Mirrored,
        (rows, steps, selected): (usize, &[Step], &Selected),
    ) {
        let Some(prediction) = selected.predictions.first().and_then(Option::clone) else { return };
        let main = Main { prediction, rows, took: took(steps) };
        let charge = self.account.charge();
        let bytes = mirrored.bytes + main.prediction.iter().map(Bytes::len).sum::<usize>();
        let has_room = charge.grow(bytes).is_ok();
        let ask = |member: usize| {
            let place = UnderWay::begin(&self.under_way).filter(|_| has_room).ok_or(ShadowOutcome::Skipped)?;
            let pending = ensembles::submit(&means.desk, mirrored.request(member, &charge, &means.pool));
            pending.map(|pending| (place, pending)).map_err(|error| outcome_of(&error))
        };
        for &member in &mirrored.members {
            let (means, main, charge) = (means.clone(), main.clone(), charge.clone());
            let (index, face) = (mirrored.model.0, Rc::clone(&mirrored.model.1));
            match ask(member) {
                Err(outcome) => means.count((index, &face), member, Compared::of(outcome)),
                Ok((place, pending)) => drop(tokio::task::spawn_local(async move {
                    let _place = place;
                    let compared = match tokio::time::timeout(WAIT_MAX.to_duration(), pending.wait()).await {
                        Ok(ended) => compare(&face, member, main, ended, (&charge, &means.pool)).await,
                        Err(_) => {
                            Wait::Shadow.note_reached();
                            Compared::of(ShadowOutcome::Late)
                        }
                    };
                    means.count((index, &face), member, compared);
                })),
            }
        }
    }
}

impl Service {
    pub(super) fn means(&self) -> Means {
        let Self { desk, record, pool, .. } = self;
        Means { desk: Rc::clone(desk), record: Rc::clone(record), pool: pool.clone() }
    }
}

impl Means {
    /// Unless the ensemble has been loaded anew: its members are others then.
    fn count(&self, (index, face): (usize, &Rc<Model>), member: usize, compared: Compared) {
        if self.desk.with_core(|core| Rc::ptr_eq(&core.models().get(index).model, face)) {
            self.record.handle_shadow(index, member, compared);
        }
    }
}

/// What became of a shadow that has ended; much is compared in the pool.
async fn compare(face: &Model, member: usize, main: Main, ended: Ended, means: (&Charge, &Pool)) -> Compared {
    let (charge, pool) = means;
    let Ended { result, steps, selected } = ended;
    if let Err(error) = &result {
        return Compared::of(outcome_of(error));
    }
    let prediction = selected.and_then(|mut selected| selected.predictions.get_mut(member)?.take());
    let selection = face.ensemble().and_then(|graph| graph.selection.as_ref());
    let (Some(prediction), Some(selection)) = (prediction, selection) else {
        return Compared::of(ShadowOutcome::Failed);
    };
    let outputs = Outputs::of(selection, &face.outputs, main.rows, &vec![true; face.outputs.len()]);
    let Main { prediction: expected, took: of_main, .. } = main;
    let held = charge.clone();
    let agree = move || {
        let _held = held;
        outputs.agree(&expected, &prediction)
    };
    let bytes: usize = face.outputs.iter().map(|output| output.bytes() * main.rows).sum();
    let agree = if bytes <= AT_ONCE_BYTES_MAX { Ok(agree()) } else { pool.run(charge, agree).await };
    let outcome = match agree {
        Ok(true) => ShadowOutcome::Agreed,
        Ok(false) => ShadowOutcome::Disagreed,
        Err(_) => ShadowOutcome::Skipped,
    };
    Compared { outcome, took: of_main.zip(took(&steps)) }
}

/// Where the time of the only step went, unless its answer was known already.
fn took(steps: &[Step]) -> Option<Took> {
    let timing = steps.first()?.ended.as_ref()?.as_ref().ok()?;
    let Timing { admitted_at, answered_at, stamps, .. } = timing;
    let execution = Span(stamps.finished_at_ns - stamps.started_at_ns);
    (!timing.is_of_cache()).then_some(Took { total: *answered_at - *admitted_at, execution })
}

fn outcome_of(error: &InferError) -> ShadowOutcome {
    match error.cause() {
        InferError::ArenaFull { .. } | InferError::ArenaShare { .. } | InferError::MemoryFull(_) => {
            ShadowOutcome::Skipped
        }
        _ => ShadowOutcome::Failed,
    }
}
