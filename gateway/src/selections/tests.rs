use std::sync::Arc;

use bytes::Bytes;
use repository::{DataType, Ensemble, Executor, Tensor};

use super::*;
use crate::{cache::Digester, config::MetricsConfig, testing};

const ME: Client = Client::Certificate([1; 16]);

/// An ensemble that learns, of three members whose rows are two numbers.
fn face(agreement: Agreement) -> Rc<Model> {
    let step = |name: &str| EnsembleStep { model: name.to_owned(), version: None, inputs: vec![], outputs: vec![] };
    let selection = Selection {
        policy: Policy::Exp4(repository::Learning { eta: 0.1, exploration: 0.0, window: 80 }),
        agreements: vec![agreement],
        defaults: None,
        confidence: 0.0,
        reply: Span::ZERO,
        seed: 0,
    };
    let graph = Ensemble {
        steps: ["a", "b", "c"].map(step).into(),
        tensors: vec!["y".to_owned()],
        outputs: vec![0],
        selection: Some(selection),
        nested: None,
    };
    let outputs = vec![Tensor::new("y", DataType::Fp32, vec![2])];
    Rc::new(Model { executor: Executor::Ensemble(Arc::new(graph)), ..testing::model("vote", vec![], outputs) })
}

fn floats(numbers: &[f32]) -> Option<Vec<Bytes>> {
    Some(vec![numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>().into()])
}

struct Bench {
    selections: Selections,
    record: Record,
    face: Rc<Model>,
}

impl Bench {
    fn new(agreement: Agreement, bytes_max: usize) -> Self {
        let selections = Selections::new(7, (bytes_max, Span::from_millis(1000)), 1 << 16);
        Self { selections, record: Record::new(MetricsConfig::default()), face: face(agreement) }
    }

    /// A request of two rows that was answered so; yields its ticket.
    fn answered(&self, now: i64, predictions: Vec<Option<Vec<Bytes>>>) -> Option<String> {
        Some(self.told(now, predictions, Some(0)).get("feedback")?.as_str().unwrap().to_owned())
    }

    /// What its reply says.
    fn told(&self, now: i64, predictions: Vec<Option<Vec<Bytes>>>, index: Option<usize>) -> Parameters {
        self.told_in((None, None), now, predictions, index)
    }

    /// The same of a request that names a context.
    fn told_in(
        &self,
        (context, question): (Option<&str>, Option<Question>),
        now: i64,
        predictions: Vec<Option<Vec<Bytes>>>,
        index: Option<usize>,
    ) -> Parameters {
        let context: Option<Arc<str>> = context.map(Into::into);
        let asker = (Timestamp(now * 1_000_000), ME, context.as_ref());
        let Chosen { choice, context } = self.selections.choose(&self.record, (0, &self.face), asker).unwrap();
        let (counted, confidence) = (vec![0], 1.0);
        let (is_doubted, is_default, in_vain) = (false, false, Vec::new());
        let selected = Selected { choice, predictions, counted, confidence, is_doubted, is_default, in_vain };
        let at = (Timestamp(now * 1_000_000), ME);
        self.selections.handle_ended(
            &self.record,
            at,
            (index, &self.face),
            (2, true),
            (&selected, Joining { context, question }),
        )
    }

    fn feedback(&self, now: i64, ticket: &str, data: &[f64]) -> String {
        let item = json!({ "request": ticket, "outputs": [{ "name": "y", "data": data }] });
        let body = [("feedback".to_owned(), json!([item]))].into_iter().collect();
        let (at, told) =
            ((Timestamp(now * 1_000_000), ME), Told::all_of(&body, |_| panic!("it has a ticket")).unwrap());
        let heard = self.selections.handle_feedback(&self.record, at, (0, &self.face), told).unwrap();
        heard[0].outcome.told().to_owned()
    }

    fn weights(&self) -> Vec<f64> {
        self.selections.state.borrow().learners[&0].learner.weights()
    }
}

fn predictions() -> Vec<Option<Vec<Bytes>>> {
    vec![floats(&[0.9, 0.1, 0.2, 0.8]), floats(&[0.1, 0.9, 0.2, 0.8]), None]
}

/// Softmax of minus a tenth of these losses.
fn expected(losses: [f64; 3]) -> Vec<f64> {
    let weights = losses.map(|loss| f64::exp(-0.1 * loss));
    weights.map(|weight| weight / weights.iter().sum::<f64>()).into()
}

fn are_near(one: &[f64], other: &[f64]) -> bool {
    one.iter().zip(other).all(|(one, other)| (one - other).abs() < 1e-12)
}

#[test]
fn a_loss_is_the_part_of_rows_that_were_wrong() {
    let bench = Bench::new(Agreement::Argmax, 1 << 16);
    let ticket = bench.answered(0, predictions()).unwrap();
    assert_eq!(ticket, "0000000000000007-0");
    assert_eq!(bench.feedback(1, &ticket, &[0.0, 1.0]), "counted");
    assert!(are_near(&bench.weights(), &expected([0.0, 0.5, 0.0])), "nothing is known of who was late");
    let bench = Bench::new(Agreement::Within(0.05), 1 << 16);
    let ticket = bench.answered(0, predictions()).unwrap();
    assert_eq!(bench.feedback(1, &ticket, &[0.0, 1.0]), "malformed", "two rows of two");
    assert_eq!(bench.feedback(1, &ticket, &[0.1, 0.9, 0.7, 0.3]), "counted");
    assert!(are_near(&bench.weights(), &expected([1.0, 0.5, 0.0])), "{:?}", bench.weights());
}

#[test]
fn what_waits_for_feedback_is_bounded_in_bytes_and_time() {
    let bench = Bench::new(Agreement::Within(0.1), 4096);
    let tickets: Vec<String> = (0..100).map(|now| bench.answered(now, predictions()).unwrap()).collect();
    let state = bench.selections.state.borrow();
    assert!(state.bytes <= 4096 && state.joins.len() > 3, "{} bytes, {}", state.bytes, state.joins.len());
    let sum: usize = state.joins.values().map(|join| join.bytes).sum();
    assert_eq!(state.bytes, sum);
    drop(state);
    assert_eq!(bench.feedback(100, &tickets[0], &[0.0; 4]), "late", "it made room");
    assert_eq!(bench.feedback(100, &tickets[99], &[0.0; 4]), "counted");
    assert_eq!(bench.feedback(1100, &tickets[98], &[0.0; 4]), "late");
    bench.answered(5000, predictions());
    assert_eq!(bench.selections.state.borrow().joins.len(), 1, "all others were too old");
    let off = Bench::new(Agreement::Argmax, 0);
    assert_eq!(off.answered(0, predictions()), None, "nothing waits");
}

#[test]
fn an_ensemble_that_is_loaded_anew_begins_anew() {
    let mut bench = Bench::new(Agreement::Argmax, 1 << 16);
    let ticket = bench.answered(0, predictions()).unwrap();
    assert_eq!(bench.feedback(0, &ticket, &[1.0, 1.0]), "counted");
    assert!(!are_near(&bench.weights(), &[1.0 / 3.0; 3]));
    let before = bench.answered(0, predictions()).unwrap();
    bench.face = face(Agreement::Argmax);
    assert_eq!(bench.feedback(0, &before, &[1.0, 1.0]), "unknown");
    bench.answered(0, predictions()).unwrap();
    assert!(are_near(&bench.weights(), &[1.0 / 3.0; 3]));
    // Who was asked before that is told who answered all the same.
    let told = bench.told(0, predictions(), None);
    assert_eq!((&told["members"], told.get("feedback")), (&json!("a"), None));
}

#[test]
fn feedback_of_a_context_is_that_contexts_alone() {
    let bench = Bench::new(Agreement::Argmax, 1 << 16);
    let weights = |context: &str| {
        let state = bench.selections.state.borrow();
        state.contexts.weights(&state.learners[&0].kind, &context.into()).unwrap()
    };
    let told = bench.told_in((Some("ann"), None), 0, predictions(), Some(0));
    assert_eq!(told["context_state"], json!("current"));
    bench.told_in((Some("bob"), None), 0, predictions(), Some(0));
    let ticket = told["feedback"].as_str().unwrap().to_owned();
    assert_eq!(bench.feedback(1, &ticket, &[0.0, 1.0]), "counted");
    assert_eq!(bench.feedback(1, &ticket, &[0.0, 1.0]), "repeated");
    assert!(are_near(&weights("ann"), &expected([0.0, 0.5, 0.0])), "{:?}", weights("ann"));
    assert!(are_near(&weights("bob"), &[1.0 / 3.0; 3]));
    bench.answered(0, predictions());
    assert!(are_near(&bench.weights(), &[1.0 / 3.0; 3]), "who names none has not learned it");
}

#[test]
fn where_contexts_have_no_room_all_are_answered_alike() {
    let mut bench = Bench::new(Agreement::Argmax, 1 << 16);
    bench.selections = Selections::new(7, (1 << 16, Span::from_millis(1000)), 0);
    let told = bench.told_in((Some("ann"), None), 0, predictions(), Some(0));
    assert_eq!(told["context_state"], json!("common"));
    assert_eq!(bench.feedback(1, told["feedback"].as_str().unwrap(), &[0.0, 1.0]), "counted");
    assert!(are_near(&bench.weights(), &expected([0.0, 0.5, 0.0])));
}

#[test]
fn feedback_by_inputs_is_for_the_latest_request_that_had_them() {
    let bench = Bench::new(Agreement::Argmax, 1 << 12);
    let digester = Digester::new([7; 16]);
    let [one, other] = [1, 2].map(|number| digester.question(&[number], &[], &[]));
    let ask = |now: i64, question| bench.told_in((None, Some(question)), now, predictions(), Some(0));
    let feedback = |now: i64, client: Client, question: Question, data: [f64; 2]| {
        let told = Told { which: Which::Inputs(Ok(question)), outputs: Ok(vec![("y".to_owned(), data.to_vec())]) };
        let at = (Timestamp(now * 1_000_000), client);
        let mut heard = bench.selections.handle_feedback(&bench.record, at, (0, &bench.face), vec![told]).unwrap();
        let Heard { request, outcome, error } = heard.remove(0);
        assert_eq!(error, None);
        (request, outcome.told())
    };
    assert_eq!(feedback(0, ME, one, [0.0, 1.0]), (String::new(), "unknown"));
    ask(0, one);
    let ticket = ask(0, one)["feedback"].as_str().unwrap().to_owned();
    assert_eq!(feedback(1, ME, other, [0.0, 1.0]), (String::new(), "unknown"));
    assert_eq!(feedback(1, Client::Certificate([2; 16]), one, [0.0, 1.0]).1, "unknown", "somebody else asked that");
    assert_eq!(feedback(1, ME, one, [0.0, 1.0]), (ticket.clone(), "counted"));
    assert_eq!(feedback(1, ME, one, [0.0, 1.0]), (ticket.clone(), "repeated"), "once, however often it is sent");
    assert_eq!(feedback(1, ME, one, [1.0, 1.0]).1, "contradictory");
    assert_eq!(bench.feedback(1, &ticket, &[0.0, 1.0]), "repeated", "of a ticket it is the same");
    assert!(are_near(&bench.weights(), &expected([0.0, 0.5, 0.0])));
    // What is forgotten leaves nothing behind.
    (0..100).for_each(|_| drop(ask(2, other)));
    let state = bench.selections.state.borrow();
    assert_eq!(state.asked.keys().collect::<Vec<_>>(), [&(ME, other)]);
    drop(state);
    assert_eq!(feedback(2, ME, one, [0.0, 1.0]).1, "unknown");
    assert_eq!(feedback(5_000, ME, other, [0.0, 1.0]).1, "late");
}
