//! What became of the last requests, so that each can be explained: when it was queued, in which batch it ran, why
//! then, and where, and under which primaries.

mod page;

use std::{collections::VecDeque, rc::Rc};

use frontend::{InferError, excerpt, tasks::Timing};
use proto::{Epoch, Span, Timestamp};
use serde_json::{Value, json};

use crate::{access::Client, protocol};
pub(crate) use page::PATH;

/// Requests that are remembered: each with an id of at most [`protocol::ID_BYTES_MAX`] and an outcome of these, a few
/// megabytes in all; with all the steps that ensembles may have, twenty more.
const REQUESTS_MAX: usize = 4096;
/// Characters of an error that are remembered.
const ERROR_CHARS_MAX: usize = 256;

/// The last requests of a frontend.
#[derive(Debug, Default)]
pub struct Recent {
    requests: VecDeque<Ended>,
    ended: u64,
}

/// A request that has ended.
#[derive(Debug)]
struct Ended {
    /// Counts from 1.
    number: u64,
    /// Whose.
    client: Client,
    /// The client's own.
    id: Option<String>,
    model: Rc<str>,
    /// Obeyed when it was admitted, and when it ended.
    epochs: [Epoch; 2],
    outcome: Result<(Timing, ReceivedAgo), String>,
    /// Of an ensemble, in the order in which they were asked.
    steps: Box<[Step]>,
}

/// A step of a request for an ensemble.
#[derive(Debug)]
struct Step {
    model: Box<str>,
    /// After the request's arrival.
    asked: Span,
    until: Span,
    /// Nothing if it was cancelled.
    outcome: Option<Result<Timing, String>>,
}

/// How long before its admission a request came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceivedAgo {
    /// The first of it.
    pub began: Span,
    /// The last of it.
    pub ended: Span,
}

impl Recent {
    /// Remembers a client's request, with the epochs obeyed when it was admitted and when it ended, and the steps of
    /// one for an ensemble; yields its number.
    pub fn push(
        &mut self,
        (client, id): (Client, Option<&str>),
        model: &str,
        epochs: [Epoch; 2],
        outcome: Result<(Timing, ReceivedAgo), &InferError>,
        steps: &[ensembles::Step],
    ) -> u64 {
        if self.requests.len() == REQUESTS_MAX {
            self.requests.pop_front();
        }
        self.ended += 1;
        debug_assert!(id.is_none_or(|id| id.len() <= protocol::ID_BYTES_MAX));
        let (number, id) = (self.ended, id.map(str::to_owned));
        let steps = steps.iter().map(Step::of).collect();
        let outcome = outcome.map_err(shortened);
        self.requests.push_back(Ended { number, client, id, model: model.into(), epochs, outcome, steps });
        number
    }

    /// Explains the request of that number, or else the last one with that id, of those whose client and model whoever
    /// asks may see: any other is as if it had never been.
    ///
    /// # Errors
    /// If it is not known, or not any more.
    pub fn explain(&self, request: &str, may_see: impl Fn(Client, &str) -> bool) -> Result<Value, InferError> {
        let number = request.parse::<u64>().ok();
        let is_seen = |ended: &&Ended| may_see(ended.client, &ended.model);
        let by_number = || self.requests.iter().find(|ended| Some(ended.number) == number).filter(is_seen);
        let has_id = |ended: &&Ended| ended.id.as_deref() == Some(request);
        let by_id = || self.requests.iter().rev().filter(has_id).find(is_seen);
        let ended = by_number().or_else(by_id).ok_or_else(|| {
            let known = self
                .requests
                .front()
                .map_or("none yet".to_owned(), |first| format!("{} to {}", first.number, self.ended));
            let expected = format!("a number ({known}) or an id of the last {REQUESTS_MAX} requests that have ended");
            InferError::NotFound(format!("request: found '{}', expected {expected}", excerpt(request)))
        })?;
        Ok(ended.explained())
    }
}

impl Ended {
    fn explained(&self) -> Value {
        let (mut epochs, model) = (self.epochs.map(|epoch| epoch.to_string()).to_vec(), &*self.model);
        epochs.dedup();
        let mut explained = json!({ "request": self.number, "id": self.id, "model": model, "epochs": epochs });
        let fields = explained.as_object_mut().expect("it is one");
        match &self.outcome {
            Ok((timing, ago)) if timing.is_of_cache() => fields.extend(explain_kept(timing, *ago)),
            Ok((timing, ago)) => fields.extend(explain(timing, *ago)),
            Err(error) => fields.extend([("outcome".to_owned(), json!(error))]),
        }
        if !self.steps.is_empty() {
            if let Ok((timing, _)) = &self.outcome {
                let why = format!("its steps were asked as is said of each; its answer came {}", in_time(timing));
                fields.insert("why".to_owned(), json!(why));
            }
            fields.insert("steps".to_owned(), self.steps.iter().map(Step::explained).collect());
        }
        explained
    }
}

/// Of what no client has sent.
const AT_ONCE: ReceivedAgo = ReceivedAgo { began: Span::ZERO, ended: Span::ZERO };

impl Step {
    fn of(ensembles::Step { model, asked, until, ended }: &ensembles::Step) -> Self {
        let outcome = ended.as_ref().map(|ended| ended.as_ref().copied().map_err(shortened));
        Self { model: (*model.name).into(), asked: *asked, until: *until, outcome }
    }

    fn explained(&self) -> Value {
        let us = |span: Span| span.0 as f64 / 1e3;
        let until = (self.until != Span::ENDLESS).then(|| us(self.until));
        let asked = json!({ "asked": us(self.asked), "deadline": until });
        let mut explained = json!({ "model": self.model, "microseconds_since_arrival": asked });
        let fields = explained.as_object_mut().expect("it is one");
        match &self.outcome {
            Some(Ok(timing)) if timing.is_of_cache() => fields.extend(explain_kept(timing, AT_ONCE)),
            Some(Ok(timing)) => fields.extend(explain(timing, AT_ONCE)),
            Some(Err(error)) => fields.extend([("outcome".to_owned(), json!(error))]),
            None => fields.extend([("outcome".to_owned(), json!("cancelled, as nobody waited for it any more"))]),
        }
        explained
    }
}

fn shortened(error: &InferError) -> String {
    error.to_string().chars().take(ERROR_CHARS_MAX).collect()
}

/// How far from its deadline an answer came.
fn in_time(timing: &Timing) -> String {
    let ms = |ns: i64| ns as f64 / 1e6;
    match timing.deadline - timing.answered_at {
        Span::ENDLESS => "whenever that was, as it had no objective".to_owned(),
        left if left < Span::ZERO => format!("{:.3} ms after its deadline", ms(-left.0)),
        left => format!("{:.3} ms before its deadline", ms(left.0)),
    }
}

/// Of a request that was answered by what was kept.
fn explain_kept(timing: &Timing, ago: ReceivedAgo) -> impl Iterator<Item = (String, Value)> {
    let us = |span: Span| span.0 as f64 / 1e3;
    let took = timing.answered_at - timing.admitted_at;
    let why = format!("its answer was kept from an equal request (response_cache), and came {}", in_time(timing));
    let (began, received) = (us(took - ago.began), us(took - ago.ended));
    let deadline = (timing.deadline != Timestamp::NEVER).then(|| us(timing.deadline - timing.admitted_at));
    let instants = json!({ "arrived": began, "received": received, "answered": us(took), "deadline": deadline });
    [
        ("outcome", json!("answered")),
        ("source", json!("cache")),
        ("why", json!(why)),
        ("microseconds_since_admission", instants),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
}

fn explain(timing: &Timing, ago: ReceivedAgo) -> impl Iterator<Item = (String, Value)> {
    let stamps = &timing.stamps;
    let at_us = |ns: i64| (ns - timing.admitted_at.0) as f64 / 1e3;
    let ms = |ns: i64| ns as f64 / 1e6;
    let late = stamps.started_at_ns - stamps.exec_at_ns;
    let in_time = in_time(timing);
    let why = format!(
        "it was held back {:.3} ms, so that its batch grows, to {}, and waited {:.3} ms for a GPU; the plan was \
         to start at {:.3} ms, and GPU {} of backend {} started {:.3} ms {} that; its answer came {in_time}",
        ms(stamps.due_at_ns - stamps.queued_at_ns),
        timing.batch_size,
        ms(stamps.granted_at_ns - stamps.due_at_ns),
        ms(stamps.exec_at_ns - timing.admitted_at.0),
        timing.gpu,
        timing.backend.0,
        ms(late.abs()),
        if late < 0 { "before" } else { "after" },
    );
    let instants = json!({
        "arrived": at_us(timing.admitted_at.0 - ago.began.0),
        "received": at_us(timing.admitted_at.0 - ago.ended.0),
        "queued": at_us(stamps.queued_at_ns),
        "due": at_us(stamps.due_at_ns),
        "granted": at_us(stamps.granted_at_ns),
        "planned": at_us(stamps.planned_at_ns),
        "fetched": at_us(stamps.fetched_at_ns),
        "exec_at": at_us(stamps.exec_at_ns),
        "started": at_us(stamps.started_at_ns),
        "finished": at_us(stamps.finished_at_ns),
        "answered": at_us(timing.answered_at.0),
        "deadline": (timing.deadline != Timestamp::NEVER).then(|| at_us(timing.deadline.0)),
    });
    [
        ("outcome", json!("answered")),
        ("why", json!(why)),
        ("batch", json!({ "size": timing.batch_size, "backend": timing.backend.0, "gpu": timing.gpu })),
        ("microseconds_since_admission", instants),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
}

#[cfg(test)]
mod tests {
    use proto::{BackendId, stages::AnswerStamps};

    use super::*;

    pub(super) fn timing() -> Timing {
        let ms = |ms: i64| 1_000_000 * ms + 500;
        let stamps = AnswerStamps {
            queued_at_ns: ms(1),
            due_at_ns: ms(6),
            granted_at_ns: ms(9),
            planned_at_ns: ms(10),
            fetched_at_ns: ms(11),
            exec_at_ns: ms(12),
            started_at_ns: ms(13),
            finished_at_ns: ms(18),
        };
        Timing {
            admitted_at: Timestamp(500),
            deadline: Timestamp(ms(20)),
            stamps,
            answered_at: Timestamp(ms(19)),
            batch_size: 5,
            backend: BackendId(3),
            gpu: 1,
        }
    }

    pub(super) const AGO: ReceivedAgo = ReceivedAgo { began: Span(3_000_000), ended: Span(1_000_000) };

    fn epochs(admitted: (u32, u16), ended: (u32, u16)) -> [Epoch; 2] {
        [admitted, ended].map(|(number, scheduler)| Epoch { number, scheduler })
    }

    pub(super) const ME: Client = Client::Certificate([1; 16]);

    fn all(_: Client, _: &str) -> bool {
        true
    }

    pub(super) const ONE: [Epoch; 2] = [Epoch { number: 1, scheduler: 0 }; 2];

    #[test]
    fn a_request_is_explained_by_its_number_or_its_id() {
        let mut recent = Recent::default();
        let number = recent.push((ME, Some("mine")), "digits", ONE, Ok((timing(), AGO)), &[]);
        let explained = recent.explain(&number.to_string(), all).unwrap();
        assert_eq!(explained, recent.explain("mine", all).unwrap());
        let expected = "it was held back 5.000 ms, so that its batch grows, to 5, and waited 3.000 ms for a GPU; the \
                        plan was to start at 12.000 ms, and GPU 1 of backend 3 started 1.000 ms after that; its answer \
                        came 1.000 ms before its deadline";
        assert_eq!(explained["why"], expected);
        let at = |instant: &str| explained["microseconds_since_admission"][instant].as_f64().unwrap();
        assert_eq!(["arrived", "received", "queued", "answered"].map(at), [-3_000.0, -1_000.0, 1_000.0, 19_000.0]);
        let endless = Timing { deadline: Timestamp::NEVER, ..timing() };
        let number = recent.push((ME, None), "digits", ONE, Ok((endless, AGO)), &[]);
        let explained = recent.explain(&number.to_string(), all).unwrap();
        let why = explained["why"].as_str().unwrap();
        assert!(why.ends_with("its answer came whenever that was, as it had no objective"), "{why}");
        assert!(explained["microseconds_since_admission"]["deadline"].is_null());
        let failed = recent.push((ME, None), "digits", ONE, Err(&InferError::NoScheduler), &[]);
        assert!(
            recent.explain(&failed.to_string(), all).unwrap()["outcome"].as_str().unwrap().contains("no scheduler")
        );
    }

    #[test]
    fn the_epochs_that_a_request_lived_through_are_named_once_each() {
        let mut recent = Recent::default();
        let lost = InferError::SchedulerLost;
        for (lived, outcome, expected) in [
            (epochs((1, 0), (1, 0)), Ok((timing(), AGO)), json!(["1.0"])),
            (epochs((1, 0), (2, 1)), Ok((timing(), AGO)), json!(["1.0", "2.1"])),
            (epochs((2, 0), (2, 1)), Err(&lost), json!(["2.0", "2.1"])),
        ] {
            let number = recent.push((ME, None), "digits", lived, outcome, &[]);
            assert_eq!(recent.explain(&number.to_string(), all).unwrap()["epochs"], expected);
        }
    }

    /// Whoever could ask for one request could ask for all, by number.
    #[test]
    fn what_one_may_not_see_is_as_if_it_had_never_been() {
        let (mut recent, other) = (Recent::default(), Client::Certificate([2; 16]));
        let mine = recent.push((ME, Some("id")), "digits", ONE, Ok((timing(), AGO)), &[]);
        let theirs = recent.push((other, Some("id")), "digits", ONE, Ok((timing(), AGO)), &[]);
        let strings = recent.push((ME, Some("4711")), "strings", ONE, Ok((timing(), AGO)), &[]);
        let own = |request: &str| recent.explain(request, |client, model| client == ME && model == "digits");
        assert_eq!(own("id").unwrap()["request"], mine, "the last that may be seen");
        assert_eq!(all_of(&recent, "id"), theirs);
        let unknown = own("99").unwrap_err().to_string();
        for hidden in [theirs.to_string(), strings.to_string(), "4711".to_owned()] {
            assert_eq!(own(&hidden).unwrap_err().to_string(), unknown.replace("99", &hidden));
        }
    }

    fn all_of(recent: &Recent, request: &str) -> u64 {
        recent.explain(request, all).unwrap()["request"].as_u64().unwrap()
    }

    #[test]
    fn only_the_last_are_remembered() {
        let mut recent = Recent::default();
        (0..REQUESTS_MAX + 3).for_each(|_| {
            recent.push((ME, None), "digits", ONE, Ok((timing(), AGO)), &[]);
        });
        assert_eq!(recent.requests.len(), REQUESTS_MAX);
        let long = InferError::Failed("x".repeat(100_000));
        recent.push((ME, Some(&"i".repeat(protocol::ID_BYTES_MAX))), "digits", ONE, Err(&long), &[]);
        let kept = recent.requests.back().unwrap();
        assert_eq!(kept.outcome.as_ref().unwrap_err().len(), ERROR_CHARS_MAX);
        let error = recent.explain("3", all).unwrap_err().to_string();
        assert!(error.contains("5 to 4100"), "{error}");
        assert!(recent.explain("5", all).is_ok());
    }
}
