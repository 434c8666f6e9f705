use proto::{ModelThreadId, scheduler_to_frontend::DropReason};

use super::*;
use crate::snapshot::{BackendShown, MemberState, Snapshot};

fn at(ms: i64) -> Timestamp {
    Timestamp::ZERO + Span::from_millis(ms)
}

/// One backend and two models are known by their names.
fn board() -> Board {
    let board = Board::default();
    let backend = BackendShown {
        id: 7,
        name: "rack\"7".to_owned(),
        at: None,
        state: MemberState::Serving,
        obeys: true,
        sub_cluster: None,
        links: 1,
        weights: Default::default(),
        gpus: Vec::new(),
    };
    let models = vec![("digits".to_owned(), "1".to_owned()), ("bert".to_owned(), "3".to_owned())];
    board.publisher().turn(at(0), |_| (Snapshot { backends: vec![backend], ..Snapshot::default() }, models));
    board
}

fn events_of(page: &str) -> Vec<Value> {
    let page: Value = serde_json::from_str(page).unwrap();
    page["traceEvents"].as_array().unwrap().clone()
}

#[test]
fn each_batch_is_a_slice_of_its_gpu_and_each_load_one_beside_it() {
    let history = History::new(2);
    let (mut first, mut second) = (history.recorder(ModelThreadId(0)), history.recorder(ModelThreadId(1)));
    let lane = |backend, gpu| Lane { backend: BackendId(backend), gpu };
    let batch = |model, tasks, (from, to)| Event::Batch {
        model: ModelId(model),
        tasks,
        window: Some((at(1_000), at(1_008))),
        started_at: at(from),
        finished_at: at(to),
    };
    first.note(at(1_010), lane(7, 1), batch(0, 3, (1_001, 1_004)));
    second.note(at(1_010), lane(7, 1), batch(1, 2, (1_004, 1_009)));
    second.note(at(1_010), lane(9, 0), batch(2, 1, (1_000, 1_001)));
    let load = Event::Load { model: ModelId(1), started_at: at(990), finished_at: at(1_002) };
    second.note(at(1_010), lane(7, 1), load);
    let missed = Event::Missed { model: ModelId(0), tasks: 4, window: None, at: at(1_010) };
    first.note(at(1_010), lane(7, 1), missed);
    first.note_dropped(at(1_011), ModelId(0), DropReason::Deadline);

    let trace = Trace::new(history, board());
    let events = events_of(&trace.page(at(1_500), "").unwrap());
    let named: Vec<_> = events.iter().filter(|event| event["ph"] == "M").map(|event| &event["args"]["name"]).collect();
    let rows = ["GPU 1", "GPU 1, weights", "GPU 0"];
    assert_eq!(named, [&["scheduler", "tasks dropped", "backend rack\"7", "backend 9"][..], &rows].concat());
    let told = |event: &Value| {
        let [pid, tid, ts, dur] = ["pid", "tid", "ts", "dur"].map(|key| event[key].as_f64());
        (event["name"].as_str().unwrap().to_owned(), [pid.unwrap(), tid.unwrap(), ts.unwrap()], dur)
    };
    let others: Vec<_> = events.iter().filter(|event| event["ph"] != "M").map(told).collect();
    let expected = [
        ("bert version 3", [1.0, 3.0, 990e3], Some(12e3)),
        ("digits x3", [1.0, 2.0, 1_001e3], Some(3e3)),
        ("bert version 3 x2", [1.0, 2.0, 1_004e3], Some(5e3)),
        ("digits x4 not executed", [1.0, 2.0, 1_010e3], None),
        ("model 2 x1", [2.0, 0.0, 1_000e3], Some(1e3)),
        ("digits", [0.0, 0.0, 1_011e3], None),
    ];
    assert_eq!(others, expected.map(|(name, place, dur)| (name.to_owned(), place, dur)));
    let args = &events.iter().find(|event| event["name"] == "digits x3").unwrap()["args"];
    assert_eq!(args, &json!({"model": "digits", "batch": 3, "exec_at_us": 1e6, "latest_us": 1_008e3}));
    // What ended before is not in it, and a part of a second is none.
    assert_eq!(events_of(&trace.page(at(2_005), "seconds=1").unwrap()).iter().filter(|of| of["ph"] != "M").count(), 3);
    let wrong = |query| trace.page(at(2_005), query).unwrap_err();
    assert_eq!(wrong("seconds=0"), "seconds: found 0, expected 1 to 10");
    assert_eq!(wrong("seconds=11"), "seconds: found 11, expected 1 to 10");
    assert_eq!(wrong("seconds=0.5"), "seconds: found `0.5`, expected a number");
}

#[test]
fn of_too_many_events_the_newest_are_told() {
    let lane = Lane { backend: BackendId(7), gpu: 0 };
    let missed = |ms| Event::Missed { model: ModelId(0), tasks: 1, window: None, at: at(ms) };
    let half = EVENTS_MAX as i64 / 2;
    let mut events: Vec<_> = (0..=half).map(|ms| (lane, missed(2 * ms))).collect();
    let dropped = |ms| Dropped { model: ModelId(0), reason: DropReason::Deadline, at: at(ms) };
    let mut drops: Vec<_> = (0..=half).map(|ms| dropped(2 * ms + 1)).collect();
    cut(&mut events, &mut drops);
    assert_eq!((events[0].1.ended_at(), drops[0].at, events.len() + drops.len()), (at(2), at(3), EVENTS_MAX));
    let kept = (events.clone(), drops.clone());
    cut(&mut events, &mut drops);
    assert_eq!((events, drops), kept);
}
