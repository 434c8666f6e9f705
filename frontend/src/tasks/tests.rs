use proptest::prelude::*;
use proto::{ModelId, scheduler_to_frontend::NetworkTimes};
use repository::{DataType, Model, Tensor, Variable};
use zerocopy::IntoBytes;

use super::*;
use crate::{
    arena::PlainArena,
    models::ModelTable,
    testing::{model, tensor},
};

mod claims;
mod later;

const ARENA: usize = 1 << 16;
const BACKEND: BackendId = BackendId(5);
const THREAD: ModelThreadId = ModelThreadId(4);
const SLO: Span = Span::from_millis(25);
/// Later than this nobody is submitted again.
const SUBMIT_BY: Timestamp = Timestamp(25_000_000 - 1);

/// Two inputs and two outputs, so that their order shows.
fn two_by_two() -> Model {
    let inputs = vec![tensor("a", DataType::Uint8, &[3]), tensor("b", DataType::Uint16, &[1])];
    model("two", inputs, vec![tensor("x", DataType::Uint8, &[2]), tensor("y", DataType::Uint8, &[1])])
}

/// A string and numbers, and the same back; and any number of numbers.
fn of_any_size() -> Model {
    let variable = |name: &str, datatype, bytes_max| {
        let variable = Variable { dims: vec![0], reshape_dims: vec![], bytes_max, is_optional: false, any_rank: false };
        Tensor { variable: Some(variable), ..tensor(name, datatype, &[9]) }
    };
    let tensors =
        |names: [&str; 2]| vec![variable(names[0], DataType::Bytes, 60), variable(names[1], DataType::Uint8, 9)];
    model("any", tensors(["s", "n"]), tensors(["t", "m"]))
}

struct Bench {
    models: ModelTable,
    tasks: Tasks,
    arena: PlainArena,
    /// Whose requests are admitted.
    client: Option<Client>,
}

impl Bench {
    fn new() -> Self {
        Self::of(two_by_two())
    }

    fn of(model: Model) -> Self {
        let models = ModelTable::new(vec![model]);
        let tasks = Tasks::new(ARENA, &[models.get(0).slot_size]).unwrap();
        Self { models, tasks, arena: PlainArena::new(ARENA), client: None }
    }

    /// Admits rows 0 .. `rows`: row r has a = [r, r, r] and b = r * 256 + 1.
    fn admit(&mut self, rows: usize) -> Result<RequestId, InferError> {
        self.admit_with(rows, inputs(rows))
    }

    fn admit_with(&mut self, rows: usize, inputs: Vec<Rope>) -> Result<RequestId, InferError> {
        self.admit_within(SLO, rows, inputs)
    }

    fn admit_within(&mut self, slo: Span, rows: usize, inputs: Vec<Rope>) -> Result<RequestId, InferError> {
        let request = CheckedRequest {
            model: 0,
            rows,
            inputs,
            slo,
            waited: Span::ZERO,
            priority: 2,
            application: proto::Application::NONE,
            client: self.client,
        };
        let offer = Offer {
            id: ModelId(3),
            model_thread: THREAD,
            gpus: 1,
            least_latency: Span(1),
            batching: Span(1),
            network: NetworkTimes::default(),
        };
        let at = AdmitInstants { now: Timestamp(0), scheduler_now: Timestamp(1_000) };
        self.tasks.admit(at, FrontendId(9), (self.models.get(0), offer), &request, &self.arena)
    }

    fn submitted(&mut self) -> Vec<(TaskId, SlotDescriptor)> {
        std::iter::from_fn(|| self.tasks.poll_message())
            .map(|(model_thread, message)| match message {
                FrontendToModelThread::Submit { task, model, deadline, priority, slot, .. } => {
                    assert_eq!((model_thread, model, priority), (THREAD, ModelId(3), 2));
                    assert_eq!(deadline, Timestamp(1_000) + SLO);
                    (task, slot)
                }
                other => panic!("found {other:?}, expected a submission"),
            })
            .collect()
    }

    /// A backend writes an answer and tells it.
    fn answer(&mut self, slot: SlotDescriptor, header: AnswerHeader, payload: &[u8]) {
        self.arena.write(slot.answer_offset as usize, header.as_bytes());
        self.arena.write(slot.answer_offset as usize + ANSWER_HEADER_BYTES, payload);
        let immediate = ImmediateData { slot: slot.number(), attempt: header.attempt }.pack();
        let bytes = (ANSWER_HEADER_BYTES + payload.len()) as u32;
        self.tasks.handle_immediate(Timestamp(2_000), BACKEND, immediate, bytes, &self.arena);
    }
}

fn inputs(rows: usize) -> Vec<Rope> {
    let a: Vec<u8> = (0..rows as u8).flat_map(|row| [row; 3]).collect();
    let b: Vec<u8> = (0..rows as u8).flat_map(|row| [1, row]).collect();
    vec![a.into(), b.into()]
}

fn done(task: TaskId, payload_bytes: u32) -> AnswerHeader {
    AnswerHeader {
        task: task.0,
        status: AnswerStatus::Done,
        payload_bytes,
        attempt: 0,
        batch_size: 2,
        gpu: 1,
        tasks: 1,
        stamps: AnswerStamps::default(),
    }
}

#[test]
fn rows_become_tasks_and_their_answers_join_in_the_order_of_rows() {
    let mut bench = Bench::new();
    let request = bench.admit(3).unwrap();
    let tasks = bench.submitted();
    for (row, (_, slot)) in tasks.iter().enumerate() {
        let row = row as u8;
        assert_eq!(bench.arena.bytes(slot.input_offset, slot.input_bytes), [row, row, row, 1, row]);
    }
    for row in [2, 0, 1u8] {
        assert_eq!(bench.tasks.poll_reply(), None);
        let (task, slot) = tasks[usize::from(row)];
        bench.answer(slot, done(task, 3), &[row, 10 + row, 20 + row]);
    }
    let (replied, reply) = bench.tasks.poll_reply().unwrap();
    let reply = reply.unwrap();
    assert_eq!((replied, reply.rows), (request, 3));
    assert_eq!(reply.outputs, [vec![0, 10, 1, 11, 2, 12], vec![20, 21, 22]]);
    assert_eq!((reply.timing.backend, reply.timing.gpu, reply.timing.batch_size), (BACKEND, 1, 2));
    assert_eq!((bench.tasks.outstanding(), bench.tasks.poll_timeout()), (0, None));
    assert_eq!(bench.tasks.poll_message(), None);
}

/// The records of two rows, as a request makes them.
fn records(bench: &Bench) -> Vec<Rope> {
    let input = |name: &str, datatype, shape: &[usize], data: &[u8]| crate::InputTensor {
        name: name.into(),
        datatype,
        shape: shape.to_vec(),
        data: data.to_vec().into(),
    };
    let inputs = vec![
        input("n", DataType::Uint8, &[2, 3], &[1, 2, 3, 4, 5, 6]),
        input("s", DataType::Bytes, &[2, 1], b"\x02\0\0\0ab\x09\0\0\0cdefghijk"),
    ];
    crate::request::check(&bench.models.get(0).model, 0, inputs, SLO).unwrap().inputs
}

#[test]
fn records_take_slots_of_their_own_length_and_come_back_as_tensors() {
    let mut bench = Bench::of(of_any_size());
    let records = records(&bench);
    bench.admit_with(2, records.clone()).unwrap();
    let tasks = bench.submitted();
    for ((_, slot), record) in tasks.iter().zip(&records) {
        assert_eq!((slot.input_bytes, record.len()), (40, 40), "that of the longer row");
        assert_eq!(bench.arena.bytes(slot.input_offset, slot.input_bytes), record.joined());
    }
    assert!(tasks[1].1.follows(&tasks[0].1));
    let payload = [records[0].joined(), records[1].joined()].concat();
    let (task, slot) = tasks[0];
    bench.answer(slot, AnswerHeader { tasks: 2, ..done(task, 80) }, &payload);
    let reply = bench.tasks.poll_reply().unwrap().1.unwrap();
    let model = &bench.models.get(0).model;
    assert_eq!([reply.shape(model, 0), reply.shape(model, 1)], [[2, 1], [2, 3]]);
    assert_eq!(&reply.outputs[0][..], b"\x02\0\0\0ab\x09\0\0\0cdefghijk");
    assert_eq!(&reply.outputs[1][..], [1, 2, 3, 4, 5, 6]);
    assert_eq!(bench.tasks.outstanding(), 0);
}

/// What a backend has changed of a record.
type Lie = fn(&mut Vec<u8>);

#[test]
fn answers_whose_records_lie_fail_their_request_and_free_its_slots() {
    let whole = |bench: &Bench| records(bench)[0].joined().to_vec();
    let lies: [(Lie, &str); 5] = [
        (|record| record[0] = 41, "its records are not within its 40 bytes"),
        (|record| record[0] = 3, "its records are not within its 40 bytes"),
        (|record| record.truncate(3), "its records are not within its 3 bytes"),
        (|record| record[4] = 255, "its output has a tensor 't': found the end of the record"),
        (|record| record.extend([1; 8]), "found 8 bytes behind its records"),
    ];
    for (lie, expected) in lies {
        let mut bench = Bench::of(of_any_size());
        let records = records(&bench)[..1].to_vec();
        bench.admit_with(1, records).unwrap();
        let (task, slot) = bench.submitted()[0];
        let mut payload = whole(&bench);
        lie(&mut payload);
        bench.answer(slot, done(task, payload.len() as u32), &payload);
        let error = bench.tasks.poll_reply().unwrap().1.unwrap_err().to_string();
        assert!(error.contains(expected), "`{error}`, `{expected}`");
        assert_eq!(bench.tasks.outstanding(), 0);
    }
}

#[test]
fn one_answer_ends_a_run_of_rows() {
    let mut bench = Bench::new();
    let request = bench.admit(4).unwrap();
    let tasks = bench.submitted();
    assert!(tasks.windows(2).all(|pair| pair[1].1.follows(&pair[0].1)));
    let (task, slot) = tasks[1];
    bench.answer(slot, AnswerHeader { tasks: 3, ..done(task, 9) }, &[1, 11, 21, 2, 12, 22, 3, 13, 23]);
    assert_eq!((bench.tasks.outstanding(), bench.tasks.poll_reply()), (1, None));
    let (task, slot) = tasks[0];
    bench.answer(slot, done(task, 3), &[0, 10, 20]);
    let (replied, reply) = bench.tasks.poll_reply().unwrap();
    assert_eq!(replied, request);
    assert_eq!(reply.unwrap().outputs, [vec![0, 10, 1, 11, 2, 12, 3, 13], vec![20, 21, 22, 23]]);
    assert_eq!((bench.tasks.outstanding(), bench.tasks.counters().answered), (0, 4));
}

#[test]
fn an_answer_for_more_than_was_leased_fails_those_that_were() {
    let failed = |tasks: u16, answered: Option<usize>| {
        let mut bench = Bench::new();
        bench.admit(3).unwrap();
        bench.admit(3).unwrap();
        let submitted = bench.submitted();
        if let Some(row) = answered {
            bench.answer(submitted[row].1, done(submitted[row].0, 3), &[0; 3]);
        }
        let (task, slot) = submitted[1];
        bench.answer(slot, AnswerHeader { tasks, ..done(task, 3) }, &[0; 3]);
        let error = bench.tasks.poll_reply().unwrap().1.unwrap_err().to_string();
        (bench.tasks.outstanding(), error.contains("which are not all there"))
    };
    assert_eq!(failed(0, None), (5, true));
    assert_eq!(failed(3, None), (4, true), "the next slot is of another request");
    assert_eq!(failed(2, Some(2)), (4, true), "the next task has its answer");
    assert_eq!(failed(u16::MAX, None), (4, true));
}

proptest! {
    /// Answers of random backends, right and wrong, against a list of tasks.
    #[test]
    fn every_task_ends_once_whatever_backends_say(
        rows in proptest::collection::vec(1usize..6, 1..5),
        fenced in proptest::collection::vec(any::<prop::sample::Index>(), 0..4),
        said in proptest::collection::vec(
            (any::<prop::sample::Index>(), 0u16..5, 0u16..2, prop::sample::select(vec![0u64, 0, 0, 1])), 0..30),
    ) {
        let mut bench = Bench::new();
        let mut request_of = Vec::new();
        for (request, &rows) in rows.iter().enumerate() {
            bench.admit(rows).unwrap();
            request_of.extend(vec![request; rows]);
        }
        let tasks = bench.submitted();
        // What the oracle knows of each task: its attempt while it has not ended.
        let mut open = vec![Some(0u16); tasks.len()];
        for pick in fenced {
            let row = pick.index(tasks.len());
            prop_assert_eq!(bench.tasks.handle_fenced(vec![tasks[row].0]), vec![tasks[row].0]);
            *open[row].as_mut().unwrap() += 1;
        }
        let mut stale = 0;
        for (pick, count, attempt, id_off) in said {
            let said = pick.index(tasks.len());
            let (task, slot) = tasks[said];
            let header = AnswerHeader { tasks: count, attempt, ..done(TaskId(task.0 + id_off), 3 * u32::from(count)) };
            bench.answer(slot, header, &vec![7; 3 * usize::from(count)]);
            if open[said] != Some(attempt) || id_off != 0 {
                stale += 1;
                continue;
            }
            // An answer of none is taken as one of the task that it names, and fails it.
            let rows = open.iter_mut().zip(&request_of).skip(said).take(usize::from(count.max(1)));
            for (row, _) in rows.take_while(|(row, request)| *request == &request_of[said] && **row == Some(attempt)) {
                *row = None;
            }
        }
        prop_assert_eq!(bench.tasks.counters().stale_answers, stale);
        let left = open.iter().filter(|attempt| attempt.is_some()).count();
        prop_assert_eq!(bench.tasks.outstanding(), left);
        let replies = std::iter::from_fn(|| bench.tasks.poll_reply()).count();
        for (row, attempt) in open.iter().enumerate().filter(|(_, attempt)| attempt.is_some()) {
            let header = AnswerHeader { attempt: attempt.unwrap(), ..done(tasks[row].0, 3) };
            bench.answer(tasks[row].1, header, &[7; 3]);
        }
        prop_assert_eq!(bench.tasks.outstanding(), 0);
        let late = std::iter::from_fn(|| bench.tasks.poll_reply()).count();
        prop_assert_eq!(replies + late, rows.len(), "each request is answered once");
    }
}

#[test]
fn a_failed_row_ends_the_request_once_and_cancels_the_others() {
    let mut bench = Bench::new();
    let request = bench.admit(3).unwrap();
    let tasks = bench.submitted();
    let (task, slot) = tasks[1];
    let reason = "no kernel";
    let header = AnswerHeader { status: AnswerStatus::Failed, ..done(task, reason.len() as u32) };
    bench.answer(slot, header, reason.as_bytes());
    assert_eq!(bench.tasks.poll_reply(), Some((request, Err(InferError::Failed(reason.to_owned())))));
    let cancelled: Vec<_> = std::iter::from_fn(|| bench.tasks.poll_message()).collect();
    let cancel = |task| (THREAD, FrontendToModelThread::Cancel { task, model: ModelId(3) });
    assert_eq!(cancelled, [cancel(tasks[0].0), cancel(tasks[2].0)]);
    assert_eq!(bench.tasks.outstanding(), 2, "cancelled tasks keep their slots until they end");
    bench.tasks.handle_dropped(Timestamp(0), tasks[0].0, DropReason::Cancelled);
    bench.answer(tasks[2].1, done(tasks[2].0, 3), &[0; 3]);
    assert_eq!((bench.tasks.outstanding(), bench.tasks.poll_reply()), (0, None));
}

/// A run's key opens its inputs and the places of its answers for as long as any of its tasks may be read or answered.
#[test]
fn a_key_opens_one_run_of_rows_until_the_last_of_them_has_ended() {
    let mut bench = Bench::new();
    bench.admit(3).unwrap();
    let tasks = bench.submitted();
    let (first, last) = (tasks[0].1, tasks[2].1);
    assert!(tasks.iter().all(|(_, slot)| slot.key == first.key && slot.key != SlotDescriptor::NO_KEY));
    let range = |from: u64, until: u64, bytes: u32| from as usize..until as usize + bytes as usize;
    let run = [
        range(first.input_offset, last.input_offset, last.input_bytes),
        range(first.answer_offset, last.answer_offset, last.answer_bytes_max),
    ];
    assert_eq!(bench.arena.opened(first.key), Some(run.clone()));
    for (task, slot) in &tasks[..2] {
        bench.answer(*slot, done(*task, 3), &[0; 3]);
    }
    // Another run, while a task of the first is on its second attempt.
    bench.admit(1).unwrap();
    let [(_, other)] = bench.submitted()[..] else { panic!("one row") };
    let two = tasks[2];
    assert_eq!(bench.tasks.handle_fenced(vec![two.0]), [two.0]);
    assert_eq!((bench.arena.opened(first.key), bench.arena.keys()), (Some(run), 2));
    assert_ne!(other.key, first.key);
    bench.answer(two.1, AnswerHeader { attempt: 1, ..done(two.0, 3) }, &[0; 3]);
    // What is leased next may lie where the first run did, whose key is void by then.
    bench.admit(3).unwrap();
    let again = bench.submitted()[0].1;
    assert_eq!((bench.arena.opened(first.key), bench.arena.keys()), (None, 2));
    assert!(again.key != first.key && bench.arena.opened(other.key).is_some());
    bench.tasks.abandon(&InferError::SchedulerLost);
    bench.tasks.release_abandoned();
    bench.admit(1).unwrap();
    assert_eq!(bench.arena.keys(), 1, "those of the former life are void");
}

#[test]
fn only_the_present_attempt_of_the_present_lease_is_an_answer() {
    let mut bench = Bench::new();
    bench.admit(1).unwrap();
    let (task, slot) = bench.submitted()[0];
    assert_eq!(bench.tasks.handle_fenced(vec![task, TaskId(77)]), [task]);
    bench.answer(slot, done(task, 3), &[0; 3]);
    bench.answer(slot, AnswerHeader { attempt: 1, ..done(TaskId(task.0 + 1), 3) }, &[0; 3]);
    bench.answer(SlotDescriptor { slot: slot.slot + 1, ..slot }, done(task, 3), &[0; 3]);
    assert_eq!((bench.tasks.counters().stale_answers, bench.tasks.poll_reply()), (3, None));
    bench.answer(slot, AnswerHeader { attempt: 1, ..done(task, 3) }, &[1, 2, 3]);
    assert!(bench.tasks.poll_reply().unwrap().1.is_ok());
    bench.answer(slot, AnswerHeader { attempt: 1, ..done(task, 3) }, &[1, 2, 3]);
    assert_eq!((bench.tasks.counters().stale_answers, bench.tasks.poll_reply()), (4, None));
}

#[test]
fn an_answer_that_does_not_fit_the_model_ends_the_task_with_an_error() {
    let error = |header: fn(TaskId) -> AnswerHeader, bytes: usize| {
        let mut bench = Bench::new();
        bench.admit(1).unwrap();
        let (task, slot) = bench.submitted()[0];
        bench.answer(slot, header(task), &vec![0; bytes]);
        assert_eq!(bench.tasks.outstanding(), 0);
        bench.tasks.poll_reply().unwrap().1.unwrap_err().to_string()
    };
    assert!(error(|task| done(task, 4), 4).contains("found 4 bytes of output, expected 3"));
    assert!(error(|task| done(task, 3), 2).contains("announces 3 bytes and 90 came"));
    let huge = |task| AnswerHeader { status: AnswerStatus::Failed, ..done(task, u32::MAX) };
    assert!(error(huge, 2).contains("announces 4294967295 bytes"));
    assert!(error(|task| AnswerHeader { status: AnswerStatus::WindowMissed, ..done(task, 0) }, 0).contains("in time"));

    let mut bench = Bench::new();
    bench.admit(1).unwrap();
    let (_, slot) = bench.submitted()[0];
    bench.arena.write(slot.answer_offset as usize, &[0xff; ANSWER_HEADER_BYTES]);
    let immediate = ImmediateData { slot: slot.slot, attempt: 0 }.pack();
    bench.tasks.handle_immediate(Timestamp(1), BACKEND, immediate, ANSWER_HEADER_BYTES as u32, &bench.arena);
    assert!(bench.tasks.poll_reply().unwrap().1.unwrap_err().to_string().contains("its status is unknown"));
}

#[test]
fn the_way_back_is_that_of_answers_with_output_since_the_last_look() {
    let mut bench = Bench::new();
    assert_eq!(bench.tasks.take_way_back(), Span::ZERO);
    bench.admit(2).unwrap();
    for ((task, slot), status) in bench.submitted().into_iter().zip([AnswerStatus::Done, AnswerStatus::WindowMissed]) {
        let mut header = AnswerHeader { status, ..done(task, 3) };
        // Of what did not run it is long, and does not count. Answers are taken in at 2 us.
        header.stamps.finished_at_ns = if status == AnswerStatus::Done { 1_500 } else { -1_000_000 };
        bench.answer(slot, header, &[0; 3]);
    }
    let took = bench.tasks.take_way_back();
    assert!((500..=562).contains(&took.0), "{took}");
    assert_eq!(bench.tasks.take_way_back(), Span::ZERO);
}

#[test]
fn a_full_arena_refuses_the_whole_request_and_keeps_nothing() {
    let mut bench = Bench::new();
    let admitted = (0..).take_while(|_| bench.admit(8).is_ok()).count();
    let outstanding = bench.tasks.outstanding();
    assert_eq!(outstanding, admitted * 8);
    assert!(matches!(bench.admit(8), Err(InferError::ArenaFull { .. })));
    assert_eq!(bench.tasks.outstanding(), outstanding);
    assert_eq!(bench.submitted().len(), outstanding);
}

#[test]
fn a_client_leaves_slots_to_others_and_gets_its_own_back() {
    let mut bench = Bench::new();
    bench.client = Some(Client(1));
    let held: Vec<RequestId> = std::iter::from_fn(|| bench.admit(8).ok()).collect();
    assert!(matches!(bench.admit(8), Err(InferError::ArenaShare { .. })));
    bench.client = Some(Client(2));
    bench.admit(8).unwrap();
    bench.client = None;
    assert!((0..).take_while(|_| bench.admit(8).is_ok()).count() > 0, "nobody's requests take what there is");
    assert!(matches!(bench.admit(8), Err(InferError::ArenaFull { .. })));
    assert!(held.len() > 1);
}

#[test]
fn a_request_without_any_word_is_given_up_and_its_slot_kept() {
    let mut bench = Bench::new();
    let request = bench.admit(1).unwrap();
    let (task, _) = bench.submitted()[0];
    let at = bench.tasks.poll_timeout().unwrap();
    assert_eq!(at, Timestamp(0) + SLO + WORD_WAIT);
    bench.tasks.handle_timeout(at - Span(1));
    assert_eq!(bench.tasks.poll_reply(), None);
    bench.tasks.handle_timeout(at);
    assert_eq!(bench.tasks.poll_reply(), Some((request, Err(InferError::NoAnswer { waited: WORD_WAIT }))));
    assert_eq!((bench.tasks.outstanding(), bench.tasks.poll_timeout()), (1, None));
    bench.tasks.handle_dropped(Timestamp(0), task, DropReason::Deadline);
    assert_eq!((bench.tasks.outstanding(), bench.tasks.poll_reply()), (0, None));
}

#[test]
fn without_an_objective_there_is_no_deadline_and_the_answer_is_waited_for_a_day() {
    let mut bench = Bench::new();
    let _ = bench.admit_within(Span::ENDLESS, 1, inputs(1)).unwrap();
    let Some((THREAD, FrontendToModelThread::Submit { deadline, .. })) = bench.tasks.poll_message() else {
        panic!("expected a task")
    };
    let given_up_at = Timestamp(0) + ENDLESS_MAX + WORD_WAIT;
    assert_eq!((deadline, bench.tasks.poll_timeout()), (Timestamp::NEVER, Some(given_up_at)));
}

#[test]
fn losing_the_scheduler_ends_requests_at_once_and_frees_slots_only_later() {
    let mut bench = Bench::new();
    let requests: Vec<_> = (0..3).map(|_| bench.admit(2).unwrap()).collect();
    bench.tasks.abandon(&InferError::SchedulerLost);
    let ended: Vec<_> = std::iter::from_fn(|| bench.tasks.poll_reply()).collect();
    let expected: Vec<_> = requests.into_iter().map(|request| (request, Err(InferError::SchedulerLost))).collect();
    assert_eq!((ended, bench.tasks.outstanding()), (expected, 6));
    bench.tasks.release_abandoned();
    assert_eq!((bench.tasks.outstanding(), bench.tasks.counters().abandoned), (0, 6));
    assert_eq!(bench.tasks.poll_message(), None, "nobody is left to tell");
}
