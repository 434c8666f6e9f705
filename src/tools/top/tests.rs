use proptest::prelude::*;
use proto::{Span, Timestamp};
use ratatui::{Terminal, backend::TestBackend};
use scheduler::status::{
    AdviceRow, BackendRow, ClusterPage, Counts, FrontendRow, GpuRow, ModelRow, RanRow, SchedulerRow, WeightsRow,
};

use super::{
    state::View,
    traffic::{self, Rates},
    *,
};

fn at(ms: i64) -> Timestamp {
    Timestamp::ZERO + Span::from_millis(ms)
}

fn gpu(index: usize, state: &str, ran: Option<RanRow>) -> GpuRow {
    GpuRow { index, id: 7, state: state.to_owned(), models: 2, weights_bytes: None, ran }
}

fn ran(busy: f64, model: &str, batch: u32) -> Option<RanRow> {
    Some(RanRow { busy, model: Some(model.to_owned()), batch: Some(batch) })
}

fn backend(name: &str, gpus: Vec<GpuRow>) -> BackendRow {
    BackendRow {
        name: name.to_owned(),
        id: 12,
        state: "serving".to_owned(),
        obeys: true,
        address: Some("10.0.0.3:40000".to_owned()),
        path: None,
        links: 1,
        sub_cluster: None,
        gpus,
        models: 2,
        safe_to_remove: false,
        only_here: 2,
        only_here_first: vec!["digits".to_owned()],
        weights: WeightsRow { gpu_bytes: 0, gpu_bytes_used: 0, host_bytes: 0, host_bytes_used: 0, loads: 0, failed: 0 },
    }
}

fn cluster(is_primary: bool, backends: Vec<BackendRow>) -> Box<ClusterPage> {
    let row = |address: &str, state: &str| SchedulerRow { address: address.to_owned(), state: state.to_owned() };
    let (gpus, reason) = (2, "work for 2.1 GPUs, and 0.7 to spare".to_owned());
    Box::new(ClusterPage {
        page: 0,
        pages: 1,
        age_ms: 150.0,
        scheduler: "rack7".to_owned(),
        arm: "soft".to_owned(),
        is_primary,
        epoch: "3.0".to_owned(),
        schedulers: vec![row("10.0.0.1:7400", "primary"), row("10.0.0.2:7400", "unreachable")],
        counts: Counts { backends: 2, gpus: 3, models: 4, models_hosted: 2, gpus_serving: 2, ..Counts::default() },
        advice: AdviceRow { gpus, gpus_needed: Some(3), reason, ..AdviceRow::default() },
        frontends: vec![FrontendRow {
            name: "door".to_owned(),
            id: 3,
            state: "drained".to_owned(),
            obeys: false,
            address: None,
            path: None,
        }],
        backends,
        models: vec![hosted("digits", 2), hosted("idle", 1)],
    })
}

fn hosted(name: &str, gpus: u32) -> ModelRow {
    ModelRow { name: name.to_owned(), version: "1".to_owned(), backends: 1, gpus, ..ModelRow::default() }
}

fn two_backends() -> Vec<BackendRow> {
    let b = backend("rack9", vec![gpu(0, "serving", ran(0.25, "digits", 3)), gpu(1, "unusable", None)]);
    vec![b, backend("rack8", vec![gpu(0, "serving", ran(1.0, "resnet50", 16))])]
}

const TRAFFIC: &str = r#"{"page":0,"pages":1,"frontend":"door","window_ms":4000,"models":2,"asked":2,
    "all":{"requests":120.5,"good":110.0,"late":0.5,"missed":10.5,"dropped":{"deadline":10.0},"p50_ms":4.25,
        "p99_ms":61.0,"batch":3.5},
    "rows":[
        {"name":"digits","version":"1","objective_ms":50.0,"requests":100.0,"good":100.0,"late":0.0,"missed":0.0,
            "dropped":{},"p50_ms":3.0,"p99_ms":12.0,"batch":4.0},
        {"name":"resnet50","version":"3","objective_ms":null,"requests":20.5,"good":10.0,"late":0.5,"missed":10.5,
            "dropped":{"deadline":9.0,"queue_full":1.0},"p50_ms":9.0,"p99_ms":100.4,"batch":null}]}"#;

fn traffic() -> TrafficPage {
    serde_json::from_str(TRAFFIC).unwrap()
}

fn state() -> State {
    State::new(&["s:1".to_owned(), "s:2".to_owned()], &["f:1".to_owned(), "f:2".to_owned()])
}

/// A state that has been told of everything.
fn told() -> State {
    let mut state = state();
    state.handle_news(at(1_000), News::Cluster(0, Ok(cluster(true, two_backends()))));
    state.handle_news(at(1_000), News::Traffic(0, Ok(traffic())));
    state
}

/// What a terminal of 80 x 24 shows.
fn shown(state: &mut State, now: Timestamp) -> Vec<String> {
    drawn(state, now, (80, 24))
}

fn drawn(state: &mut State, now: Timestamp, (width, height): (u16, u16)) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    state.handle_size(draw::fit(height));
    terminal.draw(|frame| draw::draw(frame, (state, now), true)).unwrap();
    let buffer = terminal.backend().buffer();
    let line = |y: u16| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    (0..height).map(line).collect()
}

#[test]
fn gpus_are_lanes_with_what_they_ran() {
    let lines = shown(&mut told(), at(1_350));
    assert_eq!(lines[0], "downbeat top  0.5 s ago, the primary, epoch 3.0: rack7");
    assert_eq!(lines[1], "GPUs 2/3  backends 0/2  frontends 0/0  models 2 of 4");
    assert_eq!(lines[2], "3 GPUs needed, 2 in use: work for 2.1 GPUs, and 0.7 to spare");
    assert_eq!(lines[3], "120 req/s, 91.3 % in time, p50 4.2 ms p99 61.0 ms, 10.0 dropped/s (deadline)");
    assert_eq!(lines[4], "[GPUs] models  members    by name");
    assert_eq!(lines[5], "BACKEND           GPU STATE    BUSY               MODEL                    BATCH");
    assert_eq!(lines[6], "rack8             0   serving  ████████████ 100 % resnet50                 16");
    assert_eq!(lines[7], "rack9             0   serving  ███░░░░░░░░░  25 % digits                   3");
    assert_eq!(lines[8], "rack9             1   unusable not told           -                        -");
    assert_eq!(
        (lines[9].as_str(), lines[23].as_str()),
        ("", "q quit   tab view   ←→ order   ↑↓ PgUp PgDn Home End scroll")
    );
}

#[test]
fn models_and_members_are_the_next_views_and_orders_change_rows() {
    let mut state = told();
    state.handle_key(Key::NextView);
    let lines = shown(&mut state, at(1_350));
    assert_eq!(lines[4], " GPUs [models] members    by rate");
    assert_eq!(lines[5], "MODEL                GPUS REQ/S  IN TIME P50     P99     OBJECTIVE BATCH DROPS/S");
    assert_eq!(lines[6], "digits               2    100    100 %   3.0 ms  12.0 ms 50.0 ms   4.0   -");
    assert_eq!(lines[7], "resnet50 v3          -    20.5   48.8 %  9.0 ms  100 ms  none      -     10.0");
    assert_eq!(lines[8], "idle                 1    -      -       -       -       -         -     -");
    state.handle_key(Key::NextOrder);
    let lines = shown(&mut state, at(1_350));
    assert!(lines[4].ends_with("by missed") && lines[6].starts_with("resnet50 v3 "), "{lines:#?}");
    state.handle_key(Key::PreviousOrder);
    state.handle_key(Key::PreviousOrder);
    assert!(shown(&mut state, at(1_350))[4].ends_with("by name"));
    state.handle_key(Key::NextView);
    let lines = shown(&mut state, at(1_350));
    assert_eq!(lines[6], "10.0.0.1:7400        scheduler primary     10.0.0.1:7400          -");
    assert_eq!(lines[7], "10.0.0.2:7400        scheduler unreachable 10.0.0.2:7400          -");
    assert_eq!(lines[8], "door                 frontend  drained     -                      does not obey");
    assert_eq!(lines[9], "rack9                backend   serving     10.0.0.3:40000         2 only here");
    state.handle_key(Key::NextView);
    assert!(shown(&mut state, at(1_350))[4].starts_with("[GPUs]"));
    state.handle_key(Key::PreviousView);
    assert!(shown(&mut state, at(1_350))[4].contains("[members]"));
    assert!(state.handle_key(Key::Quit));
}

#[test]
fn what_a_stopped_scheduler_told_last_stays_with_its_age() {
    let mut state = told();
    state.handle_news(at(14_000), News::Cluster(0, Err("Connection refused (os error 111)".to_owned())));
    let lines = shown(&mut state, at(14_000));
    assert_eq!(lines[0], "downbeat top  13 s ago, the primary, epoch 3.0: rack7");
    assert!(lines[6].starts_with("rack8"), "{lines:#?}");
    assert_eq!(lines[23], "silent for 13 s: s:1: Connection refused (os error 111)");
    // A standby that answers is better than a primary of long ago, and a primary that does better than both.
    state.handle_news(at(14_100), News::Cluster(1, Ok(cluster(false, Vec::new()))));
    let lines = shown(&mut state, at(14_200));
    assert_eq!(lines[0], "downbeat top  0.2 s ago, not the primary, epoch 3.0: rack7");
    assert_eq!(lines[6], "none is known");
    state.handle_news(at(14_150), News::Cluster(0, Ok(cluster(true, two_backends()))));
    let lines = shown(&mut state, at(14_300));
    assert!(lines[0].contains(" ago, the primary, epoch"), "{lines:#?}");
    assert!(lines[23].starts_with("q quit"), "{lines:#?}");
}

#[test]
fn nothing_is_shown_before_anybody_answers_and_why_not() {
    let mut state = state();
    let lines = shown(&mut state, at(0));
    assert_eq!(lines[0], "downbeat top  no scheduler has answered yet");
    assert_eq!((lines[3].as_str(), lines[6].as_str()), ("no rates yet", "none is known"));
    state.handle_news(at(0), News::Traffic(1, Err("no answer".to_owned())));
    state.handle_news(at(0), News::Cluster(0, Err("expected ip:port".to_owned())));
    assert_eq!(shown(&mut state, at(5_000))[23], "silent (and 1 more): s:1: expected ip:port");
}

#[test]
fn frontends_are_summed_and_those_that_are_silent_left_out() {
    let mut state = told();
    state.handle_news(at(1_000), News::Traffic(1, Ok(traffic())));
    let rate = |state: &State| state.total().unwrap().requests;
    assert_eq!(rate(&state), 241.0);
    state.handle_news(at(8_000), News::Traffic(1, Ok(traffic())));
    assert_eq!(rate(&state), 120.5);
    // If nobody answers it is as it was.
    state.handle_news(at(60_000), News::Traffic(1, Err("no answer".to_owned())));
    assert_eq!(rate(&state), 241.0);
}

#[test]
fn pages_of_one_frontend_count_each_model_once() {
    let (mut first, mut second) = (traffic(), traffic());
    second.rows[0].name = "third".to_owned();
    assert!(first.goes_on());
    first.append(second);
    let names: Vec<_> = first.rows.iter().map(|row| row.name.as_str()).collect();
    assert_eq!(names, ["digits", "resnet50", "third"]);
    first.rows[2].rates.requests = 0.0;
    assert!(!first.goes_on());
}

#[test]
fn names_do_nothing_to_the_terminal() {
    let mut state = state();
    let evil = "\u{1b}[2J\u{7}r\u{202e}\n\"x\"";
    let mut page = cluster(true, vec![backend(evil, vec![gpu(0, "serving", ran(0.5, evil, 1))])]);
    (page.scheduler, page.advice.reason, page.models[0].name) = (evil.to_owned(), evil.to_owned(), evil.to_owned());
    let json = serde_json::to_string(&page).unwrap();
    state.handle_news(at(0), News::Cluster(0, page::decoded(&json).map_err(|error| super::told(&error))));
    let one = TRAFFIC.replace("digits", r"\u001b[2J").replace("deadline", r"\u009b2J");
    state.handle_news(at(0), News::Traffic(0, page::decoded(&one).map_err(|error| super::told(&error))));
    for _ in View::ALL {
        let lines = drawn(&mut state, at(0), (200, 24));
        assert!(lines.iter().flat_map(|line| line.chars()).all(|c| !c.is_control() && c != '\u{202e}'), "{lines:#?}");
        assert!(lines[0].ends_with(r#"epoch 3.0: \u{1b}[2J\u{7}r\u{202e}\n"x""#), "{lines:#?}");
        assert!(lines[3].contains(r"(\u{9b}2J)") && lines[6].contains(r"\u{1b}[2J") || state.view() == View::Members);
        state.handle_key(Key::NextView);
    }
}

#[test]
fn numbers_that_are_none_sort_last_and_draw_an_empty_bar() {
    let mut state = state();
    let gpus = [f64::NAN, 0.25, f64::INFINITY, 0.5].into_iter().enumerate();
    let gpus = gpus.map(|(index, busy)| gpu(index, "serving", ran(busy, "m", 1))).collect();
    state.handle_key(Key::NextOrder);
    state.handle_news(at(0), News::Cluster(0, Ok(cluster(true, vec![backend("b", gpus)]))));
    let order: Vec<_> = (0..4).map(|row| state.lane(row).unwrap().1.index).collect();
    assert_eq!(order, [3, 1, 0, 2]);
    assert!(shown(&mut state, at(0))[8].contains("░░░░░░░░░░░░   0 %"));
}

#[test]
fn rows_scroll_as_far_as_there_are_any_whatever_the_size() {
    let mut state = state();
    let gpus = (0..40).map(|index| gpu(index, "serving", ran(0.5, "m", 1))).collect();
    state.handle_news(at(0), News::Cluster(0, Ok(cluster(true, vec![backend("b", gpus)]))));
    let first = |state: &mut State| shown(state, at(0))[6].split_whitespace().nth(1).unwrap().to_owned();
    assert_eq!(first(&mut state), "0");
    // 17 rows fit.
    for (key, expected) in [
        (Key::Scroll(1), "1"),
        (Key::PageDown, "18"),
        (Key::PageDown, "23"),
        (Key::Scroll(isize::MAX), "23"),
        (Key::Scroll(-1), "22"),
        (Key::PageUp, "5"),
        (Key::Scroll(isize::MIN), "0"),
    ] {
        state.handle_key(key);
        assert_eq!(first(&mut state), expected, "{key:?}");
    }
    for size in [(1, 1), (20, 5), (80, 6), (300, 100)] {
        for _ in View::ALL {
            drawn(&mut state, at(0), size);
            state.handle_key(Key::NextView);
        }
    }
}

/// What the views are to show, put together anew from all that was told.
#[derive(Debug, Default)]
struct Naive {
    gpus: Vec<(String, usize, f64)>,
    models: Vec<(String, Option<u32>, Option<f64>)>,
}

impl Naive {
    fn sorted<T: Clone>(rows: &[T], comes_first: impl Fn(&T, &T) -> bool) -> Vec<T> {
        let (mut left, mut sorted) = (rows.to_vec(), Vec::new());
        while !left.is_empty() {
            let least = (1..left.len()).fold(0, |least, i| if comes_first(&left[i], &left[least]) { i } else { least });
            sorted.push(left.remove(least));
        }
        sorted
    }
}

proptest! {
    #[test]
    fn each_view_is_a_window_of_all_rows_as_they_are_sorted(
        gpus in prop::collection::vec(("[a-c]", 0_u8..4), 0..60),
        hosted_by in prop::collection::btree_map("[a-e]{1,2}", 0_u32..9, 0..30),
        rates in prop::collection::btree_map("[a-e]{1,2}", 0_u16..5, 0..30),
        keys in prop::collection::vec(0..9_usize, 0..40),
        height in 1_u16..40,
    ) {
        let mut state = state();
        let mut naive = Naive::default();
        let mut backends = Vec::new();
        for (place, (name, busy)) in gpus.iter().enumerate() {
            let busy = f64::from(*busy) / 4.0;
            backends.push(backend(name, vec![gpu(place, "serving", ran(busy, "m", 1))]));
            naive.gpus.push((name.clone(), place, busy));
        }
        let mut page = cluster(true, backends);
        page.models = hosted_by.iter().map(|(name, gpus)| hosted(name, *gpus)).collect();
        let mut told = TrafficPage { window_ms: 1, ..TrafficPage::default() };
        for (name, rate) in &rates {
            let rates = Rates { requests: f64::from(*rate), ..Rates::default() };
            let (name, version) = (name.clone(), "1".to_owned());
            told.rows.push(traffic::Row { name, version, rates, ..traffic::Row::default() });
        }
        let names: std::collections::BTreeSet<&String> = hosted_by.keys().chain(rates.keys()).collect();
        for name in names {
            let rate = rates.get(name).map(|rate| f64::from(*rate));
            naive.models.push((name.clone(), hosted_by.get(name).copied(), rate));
        }
        let fit = draw::fit(height);
        let all = [Key::NextView, Key::PreviousView, Key::NextOrder, Key::PreviousOrder, Key::PageUp, Key::PageDown];
        let scrolls = [1, -3, isize::MAX].map(Key::Scroll);
        let keys: Vec<Key> = keys.iter().map(|key| *all.iter().chain(&scrolls).nth(*key).unwrap()).collect();
        // What is told may come before keys, or after.
        let (before, after) = keys.split_at(keys.len() / 2);
        state.handle_size(fit);
        for key in before {
            state.handle_key(*key);
        }
        state.handle_news(at(0), News::Cluster(0, Ok(page)));
        state.handle_news(at(0), News::Traffic(0, Ok(told)));
        for key in after {
            state.handle_key(*key);
        }

        let is_busy_first = state.order() == "busy";
        let gpus = Naive::sorted(&naive.gpus, |one, other| match is_busy_first && one.2 != other.2 {
            true => one.2 > other.2,
            false => (&one.0, one.1) < (&other.0, other.1),
        });
        let by_rate = state.order() == "rate";
        let models = Naive::sorted(&naive.models, |one, other| match by_rate && one.2 != other.2 {
            true => one.2 > other.2,
            false => one.0 < other.0,
        });
        let first = state.scrolled();
        match state.view() {
            View::Gpus => {
                let found: Vec<_> = (first..first + fit).map_while(|row| state.lane(row)).collect();
                let found: Vec<_> = found.iter().map(|(of, gpu)| (of.name.clone(), gpu.index)).collect();
                let expected = gpus.iter().skip(first).take(fit).map(|gpu| (gpu.0.clone(), gpu.1));
                prop_assert_eq!(found, expected.collect::<Vec<_>>());
                prop_assert!(first <= gpus.len().saturating_sub(fit));
            }
            // Nothing was missed and no quantile told: but for rates, names alone count.
            View::Models if state.order() != "missed" => {
                let found: Vec<_> = (first..first + fit).map_while(|row| state.model(row)).collect();
                let rate = |model: &state::Model| model.rates.as_ref().map(|rates| rates.requests);
                let found: Vec<_> = found.iter().map(|model| (model.name.clone(), model.gpus, rate(model))).collect();
                prop_assert_eq!(found, models.iter().skip(first).take(fit).cloned().collect::<Vec<_>>());
            }
            View::Models | View::Members => {}
        }
        let lines = drawn(&mut state, at(0), (80, height));
        prop_assert_eq!(lines.len(), usize::from(height));
    }
}
