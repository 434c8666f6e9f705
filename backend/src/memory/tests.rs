use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const GPU: GpuId = GpuId(7);
const PAGES: u32 = 10;
/// A copy from host memory.
const DONE: Option<Span> = Some(Span::ZERO);

fn at(ms: i64) -> Timestamp {
    Timestamp::ZERO + Span::from_millis(ms)
}

/// Three models of 6, 4 and 3 pages, which take as many milliseconds, and one without weights.
fn memory() -> Memory {
    let mut memory = Memory::new(PAGES);
    for (model, pages) in [(0, 6), (1, 4), (2, 3), (3, 0)] {
        let weights = Weights::new(pages, Span::from_millis(pages.into()));
        memory.handle_model(at(0), ModelId(model), Some(Hosted { weights, is_pinned: false }));
    }
    assert_eq!(asked(&mut memory, 0, GPU), []);
    memory
}

/// Models that it has when it is named, if it says so at once.
fn asked(memory: &mut Memory, ms: i64, gpu: GpuId) -> Vec<ModelId> {
    memory.handle_asked(at(ms), gpu);
    memory.poll_answer().expect("nothing is pinned").into_iter().map(|resident| resident.model).collect()
}

fn order(model: u32, (earliest, latest): (i64, i64)) -> LoadOrder {
    let (theirs, model) = (ModelId(100 + model), Some(ModelId(model)));
    LoadOrder { gpu: GPU, theirs, model, earliest: at(earliest), latest: at(latest) }
}

fn actions(memory: &mut Memory) -> Vec<MemoryAction> {
    std::iter::from_fn(|| memory.poll_action()).collect()
}

fn copy(model: u32, ms: i64) -> MemoryAction {
    MemoryAction::Copy { model: ModelId(model), takes: Span::from_millis(ms) }
}

fn free(model: u32) -> MemoryAction {
    MemoryAction::Free { model: ModelId(model) }
}

fn loaded(model: u32, started: i64, finished: i64) -> MemoryAction {
    let outcome = WeightsOutcome::Loaded { started_at: at(started), finished_at: at(finished), read: Span::ZERO };
    MemoryAction::Report { gpu: GPU, model: ModelId(100 + model), outcome }
}

fn failed(model: u32, ms: i64) -> MemoryAction {
    MemoryAction::Report {
        gpu: GPU,
        model: ModelId(100 + model),
        outcome: WeightsOutcome::Failed { failed_at: at(ms) },
    }
}

/// Has model 0 in memory.
fn with_model() -> Memory {
    let mut memory = memory();
    memory.handle_load(at(1), order(0, (2, 9)));
    assert_eq!((actions(&mut memory), memory.poll_timeout()), (vec![], at(2)));
    memory.handle_timeout(at(2));
    assert_eq!((actions(&mut memory), memory.poll_timeout()), (vec![copy(0, 6)], Timestamp::NEVER));
    memory.handle_copied(at(8), DONE);
    assert_eq!(actions(&mut memory), [loaded(0, 2, 8)]);
    memory
}

#[test]
fn loads_begin_in_their_windows_one_after_another_in_the_order_of_these() {
    let mut memory = with_model();
    assert!(memory.handle_run(ModelId(0)) && memory.handle_run(ModelId(3)) && !memory.handle_run(ModelId(1)));
    memory.handle_ran(at(8));
    memory.handle_unload(at(8), GPU, ModelId(0));
    memory.handle_load(at(8), order(2, (10, 20)));
    memory.handle_load(at(8), order(1, (9, 20)));
    memory.handle_timeout(at(11));
    assert_eq!(actions(&mut memory), [free(0), copy(1, 4)]);
    memory.handle_copied(at(15), DONE);
    assert_eq!(actions(&mut memory), [loaded(1, 11, 15), copy(2, 3)]);
    let WeightsTally { loads, failed, evictions, absent, busy, pages, pages_used, .. } = memory.tally();
    assert_eq!((loads, failed, evictions, absent, pages, pages_used), (2, 0, 1, 1, 10, 7));
    assert_eq!(busy, Span::from_millis(6 + 4));
}

#[test]
fn what_cannot_begin_by_the_end_of_its_window_fails() {
    let mut memory = with_model();
    // Room for model 1, and then for none of model 2.
    memory.handle_load(at(8), order(1, (8, 9)));
    memory.handle_load(at(8), order(2, (8, 11)));
    assert_eq!(actions(&mut memory), [copy(1, 4)]);
    memory.handle_copied(at(10), None);
    assert_eq!(actions(&mut memory), [failed(1, 10), copy(2, 3)]);
    memory.handle_load(at(10), order(1, (10, 12)));
    assert_eq!(memory.poll_timeout(), at(12) + Span(1));
    memory.handle_timeout(at(13));
    assert_eq!(actions(&mut memory), [failed(1, 13)]);
}

#[test]
fn what_makes_room_may_come_later_by_another_way() {
    let mut memory = with_model();
    memory.handle_load(at(8), order(0, (8, 12)));
    memory.handle_load(at(8), order(2, (9, 12)));
    assert_eq!(actions(&mut memory), [], "model 0 is still there");
    memory.handle_timeout(at(9));
    assert_eq!(actions(&mut memory), [copy(2, 3)]);
    memory.handle_unload(at(10), GPU, ModelId(0));
    memory.handle_copied(at(12), DONE);
    assert_eq!(actions(&mut memory), [free(0), loaded(2, 9, 12), copy(0, 6)]);
}

#[test]
fn weights_stay_while_a_batch_runs_with_them() {
    let mut memory = with_model();
    assert!(memory.handle_run(ModelId(0)));
    memory.handle_unload(at(9), GPU, ModelId(0));
    memory.handle_load(at(9), order(0, (9, 20)));
    assert!(actions(&mut memory).is_empty() && !memory.handle_run(ModelId(0)), "it is about to go");
    memory.handle_ran(at(11));
    assert_eq!(actions(&mut memory), [free(0), copy(0, 6)]);
}

#[test]
fn orders_by_another_name_do_not_count_and_what_was_under_way_is_void() {
    let mut memory = with_model();
    memory.handle_load(at(8), order(1, (8, 20)));
    memory.handle_load(at(8), order(2, (8, 20)));
    assert_eq!(actions(&mut memory), [copy(1, 4)]);
    let next = GpuId(8);
    assert_eq!(asked(&mut memory, 9, next), [ModelId(0)]);
    memory.handle_unload(at(9), GPU, ModelId(0));
    memory.handle_load(at(9), order(2, (9, 20)));
    assert_eq!(actions(&mut memory), []);
    memory.handle_copied(at(12), DONE);
    assert_eq!(actions(&mut memory), [free(1)]);
    assert!(!memory.handle_run(ModelId(1)) && memory.handle_run(ModelId(0)));
    memory.handle_load(at(13), LoadOrder { gpu: next, ..order(1, (13, 20)) });
    assert_eq!(actions(&mut memory), [copy(1, 4)], "its room was given back");
    memory.forget_orders();
    memory.handle_copied(at(17), DONE);
    assert!(actions(&mut memory).is_empty(), "nobody is told");
    assert_eq!(asked(&mut memory, 18, GPU), [ModelId(0), ModelId(1)], "but it is there");
}

#[test]
fn a_model_that_is_not_hosted_any_more_leaves_nothing() {
    let mut memory = with_model();
    memory.handle_load(at(8), order(1, (8, 20)));
    memory.handle_load(at(8), order(2, (8, 20)));
    assert_eq!(actions(&mut memory), [copy(1, 4)]);
    for model in [0, 1, 2] {
        memory.handle_model(at(9), ModelId(model), None);
    }
    assert_eq!(actions(&mut memory), [free(0), failed(2, 9)]);
    memory.handle_copied(at(12), DONE);
    assert_eq!((actions(&mut memory), memory.tally().pages_used), (vec![free(1), failed(1, 12)], 0));
    memory.handle_load(at(13), order(0, (13, 20)));
    memory.handle_load(at(13), LoadOrder { model: None, ..order(2, (13, 20)) });
    assert_eq!(actions(&mut memory), [failed(0, 13), failed(2, 13)]);
}

/// A memory of 10 pages with model 4 of 5 pages, which is pinned.
#[test]
fn what_is_pinned_comes_first_and_stays() {
    let mut memory = with_model();
    let hosted = Hosted { weights: Weights::new(5, Span::from_millis(5)), is_pinned: true };
    assert!(memory.handle_run(ModelId(0)));
    memory.handle_model(at(9), ModelId(4), Some(hosted));
    assert_eq!((memory.claims(), actions(&mut memory)), ((5, 6), vec![]), "its room is in use");
    memory.handle_asked(at(9), GPU);
    memory.handle_load(at(9), order(2, (9, 20)));
    assert_eq!((memory.poll_answer(), actions(&mut memory)), (None, vec![]));
    memory.handle_ran(at(10));
    assert_eq!(actions(&mut memory), [free(0), copy(4, 5)]);
    memory.handle_copied(at(15), DONE);
    assert_eq!(actions(&mut memory), [copy(2, 3)], "what was ordered comes behind it");
    assert_eq!(memory.poll_answer(), Some(vec![ResidentModel { model: ModelId(4), is_pinned: true }]));
    assert_eq!(memory.poll_answer(), None, "once");
    memory.handle_unload(at(16), GPU, ModelId(4));
    assert!(memory.handle_run(ModelId(4)), "nobody unloads it");
    memory.handle_ran(at(16));
    memory.handle_model(at(17), ModelId(4), None);
    assert_eq!(actions(&mut memory), [free(4)]);
}

#[test]
fn what_is_pinned_and_cannot_be_copied_is_tried_again_under_the_next_name() {
    let mut memory = memory();
    let hosted = Hosted { weights: Weights::new(5, Span::from_millis(5)), is_pinned: true };
    memory.forget_orders();
    memory.handle_model(at(1), ModelId(4), Some(hosted));
    assert_eq!(actions(&mut memory), [], "nobody plans with it yet");
    memory.handle_asked(at(1), GPU);
    assert_eq!(actions(&mut memory), [copy(4, 5)]);
    memory.handle_copied(at(2), None);
    assert_eq!((memory.poll_answer(), actions(&mut memory)), (Some(vec![]), vec![]));
    // As any other one, until then.
    memory.handle_load(at(2), order(4, (2, 9)));
    assert_eq!(actions(&mut memory), [copy(4, 5)]);
    memory.handle_copied(at(7), DONE);
    memory.handle_unload(at(8), GPU, ModelId(4));
    assert_eq!(actions(&mut memory), [loaded(4, 2, 7), free(4)]);
    memory.handle_asked(at(9), GpuId(8));
    assert_eq!(actions(&mut memory), [copy(4, 5)]);
}

#[derive(Debug, Clone)]
enum Event {
    Load { gpu: u32, model: u32, earliest: i64, window: i64 },
    Unload { gpu: u32, model: u32 },
    Asked { gpu: u32 },
    Forget,
    Host { model: u32, pages: Option<u32> },
    Run { model: u32 },
    Ran,
    TakenBack,
    Copied(bool),
    Timeout,
}

fn event() -> impl Strategy<Value = Event> {
    let (gpu, model) = (0u32..2, 0u32..6);
    prop_oneof![
        4 => (gpu.clone(), model.clone(), 0i64..6, -1i64..6)
            .prop_map(|(gpu, model, earliest, window)| Event::Load { gpu, model, earliest, window }),
        3 => (gpu.clone(), model.clone()).prop_map(|(gpu, model)| Event::Unload { gpu, model }),
        1 => gpu.prop_map(|gpu| Event::Asked { gpu }),
        1 => Just(Event::Forget),
        1 => (model.clone(), proptest::option::of(0u32..12)).prop_map(|(model, pages)| Event::Host { model, pages }),
        2 => model.prop_map(|model| Event::Run { model }),
        2 => Just(Event::Ran),
        1 => Just(Event::TakenBack),
        3 => any::<bool>().prop_map(Event::Copied),
        3 => Just(Event::Timeout),
    ]
}

/// What follows from what a memory says alone: one copy at a time, an answer for each order, room for all.
#[derive(Default)]
struct Oracle {
    /// Orders that are to be answered, by name and model.
    open: Vec<(GpuId, ModelId)>,
    copying: Option<ModelId>,
    /// What the driver holds.
    held: BTreeSet<ModelId>,
    /// What was said to stay.
    stays: BTreeSet<ModelId>,
}

proptest! {
    /// Whatever the scheduler says, pages add up, no model is there twice, no two copies are made at once, each order
    /// of the present name is answered once and no other, and what runs stays.
    #[test]
    fn nothing_that_is_ordered_breaks_it(events in proptest::collection::vec((event(), 0i64..3), 0..120)) {
        let mut memory = memory();
        let mut oracle = Oracle::default();
        let (mut now, mut runs) = (0, VecDeque::new());
        for (event, passes) in events {
            now += passes;
            match event {
                Event::Load { gpu, model, earliest, window } => {
                    let window = (now + earliest, now + earliest + window);
                    let order = LoadOrder { gpu: GpuId(7 + gpu), ..order(model, window) };
                    if memory.name() == Some(order.gpu) {
                        oracle.open.push((order.gpu, order.theirs));
                    }
                    memory.handle_load(at(now), order);
                }
                Event::Unload { gpu, model } => memory.handle_unload(at(now), GpuId(7 + gpu), ModelId(model)),
                Event::Asked { gpu } => {
                    oracle.open.clear();
                    memory.handle_asked(at(now), GpuId(7 + gpu));
                }
                Event::Forget => {
                    oracle.open.clear();
                    memory.forget_orders();
                }
                Event::Host { model, pages } => {
                    let is_pinned = model == 4;
                    let hosted = |pages| Hosted { weights: Weights::new(pages, Span(1)), is_pinned };
                    memory.handle_model(at(now), ModelId(model), pages.map(hosted));
                    oracle.stays.remove(&ModelId(model));
                }
                Event::Run { model } if runs.len() < 2 => {
                    let model = ModelId(model);
                    let can_run = memory.can_run(model);
                    prop_assert_eq!(memory.handle_run(model), can_run);
                    runs.extend(can_run.then(|| (model, oracle.held.contains(&model))));
                }
                Event::Ran => {
                    runs.pop_front();
                    memory.handle_ran(at(now));
                }
                Event::TakenBack => {
                    runs.pop_back();
                    memory.handle_taken_back(at(now));
                }
                Event::Copied(is_done) if oracle.copying.is_some() => {
                    let model = oracle.copying.take();
                    prop_assert!(!is_done || oracle.held.insert(model.unwrap()), "{model:?} is there already");
                    memory.handle_copied(at(now), is_done.then_some(Span::ZERO));
                }
                Event::Timeout if memory.poll_timeout() <= at(now) => memory.handle_timeout(at(now)),
                Event::Run { .. } | Event::Copied(_) | Event::Timeout => {}
            }
            for action in actions(&mut memory) {
                match action {
                    MemoryAction::Copy { model, .. } => prop_assert!(oracle.copying.replace(model).is_none()),
                    MemoryAction::Free { model } => prop_assert!(oracle.held.remove(&model)),
                    MemoryAction::Report { gpu, model, .. } => {
                        let place = oracle.open.iter().position(|open| *open == (gpu, model));
                        prop_assert!(place.is_some(), "{model:?} was not ordered, or was answered before");
                        oracle.open.remove(place.unwrap());
                    }
                }
            }
            for ResidentModel { model, is_pinned } in memory.poll_answer().into_iter().flatten() {
                prop_assert!(memory.copies.contains_key(&model) && (!is_pinned || model == ModelId(4)));
                oracle.stays.extend(is_pinned.then_some(model));
            }
            prop_assert!(oracle.stays.is_subset(&oracle.held), "what is pinned stays");
            prop_assert!(oracle.held.iter().eq(memory.copies.keys()));
            let held = memory.copies.values().map(|copy| copy.pages).sum::<u32>();
            let coming = memory.copying.map_or(0, |copying| copying.pages);
            prop_assert_eq!(held + coming + memory.pages_free, PAGES);
            prop_assert!(memory.copying.is_none_or(|copying| !memory.copies.contains_key(&copying.model)));
            prop_assert_eq!(memory.copying.map(|copying| copying.model), oracle.copying);
            let waiting: BTreeSet<_> = memory.waiting.iter().map(|(model, _)| *model).collect();
            prop_assert_eq!(waiting.len(), memory.waiting.len());
            let copied = memory.copying.is_some_and(|copying| copying.order.is_some());
            prop_assert_eq!(memory.waiting.len() + usize::from(copied), oracle.open.len());
            for (model, _) in runs.iter().filter(|(_, has_weights)| *has_weights) {
                prop_assert!(oracle.held.contains(model), "{model:?} runs");
            }
            prop_assert!(memory.poll_timeout() > memory.looked_at, "it would be called again and again");
        }
    }
}
