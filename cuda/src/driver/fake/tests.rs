//! Each rule is insisted on: what breaks it panics, and says which.

use super::*;

const ONE: usize = PAGE_BYTES as usize;

/// A GPU with one page behind addresses.
fn with_page() -> (Arc<Fake>, Address, Page) {
    let fake = Fake::new(4, 0);
    let (at, page) = (fake.reserve(2 * PAGE_BYTES).unwrap(), fake.create_page().unwrap());
    fake.map(at, &[page]).unwrap();
    (fake, at, page)
}

fn plan(arena_bytes: usize) -> Arc<Plan> {
    let precision = lowering::plan::Precision::Fp32;
    Arc::new(Plan { batch: 1, precision, inputs: vec![], outputs: vec![], faults: None, steps: vec![], arena_bytes })
}

fn pinned(fake: &Fake, bytes: usize) -> Region {
    let region = Region::allocate(bytes).unwrap();
    fake.pin(&region).unwrap();
    region
}

fn finish(fake: &Fake, stream: Stream) {
    let event = fake.create_event(false).unwrap();
    fake.record(event, stream).unwrap();
    fake.synchronize(event).unwrap();
    fake.destroy_event(event);
}

#[test]
fn nothing_happens_before_somebody_waits_and_then_in_an_order_that_the_seed_decides() {
    let orders = (0..20).map(|seed| {
        let fake = Fake::new(1, seed);
        let (at, page) = (fake.reserve(PAGE_BYTES).unwrap(), fake.create_page().unwrap());
        fake.map(at, &[page]).unwrap();
        let (from, to) = (pinned(&fake, 2), pinned(&fake, 1));
        from.write(0, &[1, 2]);
        // Nothing says which of the two is last.
        fake.copy_in(Stream::Inputs, at, (&from, 0), 1).unwrap();
        fake.copy_in(Stream::Loads, at, (&from, 1), 1).unwrap();
        from.write(0, &[3]);
        [Stream::Inputs, Stream::Loads].into_iter().for_each(|stream| finish(&fake, stream));
        fake.copy_out(Stream::Outputs, (&to, 0), at, 1).unwrap();
        finish(&fake, Stream::Outputs);
        let mut seen = [0];
        to.read(0, &mut seen);
        [&from, &to].into_iter().for_each(|region| fake.unpin(region));
        fake.unmap(at, 1).unwrap();
        fake.destroy_page(page);
        fake.release(at, PAGE_BYTES);
        seen[0]
    });
    let orders = orders.collect::<std::collections::BTreeSet<_>>();
    assert_eq!(orders, [2, 3].into());
}

#[test]
fn a_call_fails_when_it_is_told_to() {
    let fake = Fake::new(1, 0);
    fake.fail(1);
    assert!(fake.will_fail());
    let at = fake.reserve(PAGE_BYTES).unwrap();
    assert_eq!(fake.create_page(), Err(DriverError("create_page failed: it was told to".to_owned())));
    let page = fake.create_page().unwrap();
    assert_eq!(fake.create_page(), Err(DriverError("create_page failed: out of memory".to_owned())));
    assert_eq!(fake.calls(), [("create_page", 3), ("reserve", 1)].into());
    assert!(!fake.will_fail());
    fake.destroy_page(page);
    fake.release(at, PAGE_BYTES);
}

#[test]
#[should_panic(expected = "not given back: 1 reservations, 1 pages, 1 maps")]
fn a_leak_shows() {
    drop(with_page());
}

#[test]
#[should_panic(expected = "a page is mapped at one address at most")]
fn a_page_is_mapped_once() {
    let (fake, at, page) = with_page();
    let _ = fake.map(at.plus(PAGE_BYTES), &[page]);
}

#[test]
#[should_panic(expected = "pages are mapped at reserved addresses")]
fn a_page_is_mapped_where_addresses_are_reserved() {
    let (fake, at, _) = with_page();
    let page = fake.create_page().unwrap();
    let _ = fake.map(at.plus(2 * PAGE_BYTES), &[page]);
}

#[test]
#[should_panic(expected = "a page is given back when it is not mapped")]
fn a_mapped_page_is_not_given_back() {
    let (fake, _, page) = with_page();
    fake.destroy_page(page);
}

#[test]
#[should_panic(expected = "addresses are released when nothing is mapped there")]
fn mapped_addresses_are_not_released() {
    let (fake, at, _) = with_page();
    fake.release(at, 2 * PAGE_BYTES);
}

#[test]
#[should_panic(expected = "work reaches only what is mapped")]
fn work_stays_on_pages() {
    let (fake, at, _) = with_page();
    let _ = fake.clear(Stream::Execute, at, ONE + 1);
}

#[test]
#[should_panic(expected = "seen done")]
fn a_page_stays_while_work_may_use_it() {
    let (fake, at, _) = with_page();
    fake.clear(Stream::Execute, at, 1).unwrap();
    // Of another stream, and not of this one.
    finish(&fake, Stream::Loads);
    let _ = fake.unmap(at, 1);
}

/// What an event that is waited for marks is done when what waits for it is.
#[test]
fn events_tell_of_other_streams() {
    let (fake, at, page) = with_page();
    fake.clear(Stream::Execute, at, 1).unwrap();
    let event = fake.create_event(false).unwrap();
    fake.record(event, Stream::Execute).unwrap();
    fake.wait(Stream::Outputs, event).unwrap();
    finish(&fake, Stream::Outputs);
    fake.unmap(at, 1).unwrap();
    fake.destroy_page(page);
    fake.release(at, 2 * PAGE_BYTES);
    fake.destroy_event(event);
}

#[test]
#[should_panic(expected = "host memory of copies is pinned")]
fn copies_are_from_pinned_memory() {
    let (fake, at, _) = with_page();
    let _ = fake.copy_in(Stream::Inputs, at, (&Region::allocate(8).unwrap(), 0), 8);
}

#[test]
#[should_panic(expected = "copies stay inside host memory")]
fn copies_are_inside_pinned_memory() {
    let (fake, at, _) = with_page();
    let _ = fake.copy_in(Stream::Inputs, at, (&pinned(&fake, 8), 1), 8);
}

#[test]
#[should_panic(expected = "stays pinned until they have been seen done")]
fn memory_stays_pinned_while_it_is_copied() {
    let (fake, at, _) = with_page();
    let region = pinned(&fake, 8);
    fake.copy_in(Stream::Inputs, at, (&region, 0), 8).unwrap();
    fake.unpin(&region);
}

#[test]
#[should_panic(expected = "host memory is pinned once")]
fn memory_is_pinned_once() {
    let fake = Fake::new(1, 0);
    let region = pinned(&fake, 8);
    let _ = fake.pin(&region);
}

#[test]
#[should_panic(expected = "the arena is mapped for as many bytes as the plan needs")]
fn a_plan_has_its_arena() {
    let (fake, at, _) = with_page();
    let _ = fake.prepare(&plan(ONE + 1), Bases { arena: at, weights: at });
}

#[test]
fn preparing_loses_what_was_in_the_arena() {
    let (fake, at, page) = with_page();
    fake.clear(Stream::Execute, at, 8).unwrap();
    let prepared = fake.prepare(&plan(8), Bases { arena: at, weights: Address(0) }).unwrap();
    let region = pinned(&fake, 8);
    fake.copy_out(Stream::Execute, (&region, 0), at, 8).unwrap();
    finish(&fake, Stream::Execute);
    let mut seen = [0; 8];
    region.read(0, &mut seen);
    assert_eq!(seen, [0xff; 8]);
    fake.forget(prepared);
    fake.unpin(&region);
    fake.unmap(at, 1).unwrap();
    fake.destroy_page(page);
    fake.release(at, 2 * PAGE_BYTES);
}

#[test]
#[should_panic(expected = "work reaches only what is mapped")]
fn a_plan_runs_with_its_weights_only() {
    let (fake, at, page) = with_page();
    let other = fake.create_page().unwrap();
    fake.map(at.plus(PAGE_BYTES), &[other]).unwrap();
    let prepared = fake.prepare(&plan(8), Bases { arena: at, weights: at.plus(PAGE_BYTES) }).unwrap();
    fake.unmap(at.plus(PAGE_BYTES), 1).unwrap();
    assert_ne!(page, other);
    let _ = fake.enqueue(prepared);
}

#[test]
#[should_panic(expected = "a prepared plan is given back when nothing runs that uses it")]
fn a_plan_stays_while_it_runs() {
    let (fake, at, _) = with_page();
    let prepared = fake.prepare(&plan(8), Bases { arena: at, weights: Address(0) }).unwrap();
    fake.enqueue(prepared).unwrap();
    fake.forget(prepared);
}

/// A graph of a plan, and the plan.
fn captured(fake: &Fake, at: Address) -> (Graph, Prepared) {
    let prepared = fake.prepare(&plan(8), Bases { arena: at, weights: Address(0) }).unwrap();
    fake.begin_capture().unwrap();
    fake.enqueue(prepared).unwrap();
    (fake.end_capture().unwrap(), prepared)
}

#[test]
#[should_panic(expected = "a graph is given back when it does not run")]
fn a_graph_stays_while_it_runs() {
    let (fake, at, _) = with_page();
    let (graph, _) = captured(&fake, at);
    fake.launch(graph).unwrap();
    fake.destroy_graph(graph);
}

#[test]
#[should_panic(expected = "a prepared plan is given back after its graphs")]
fn a_plan_outlives_its_graphs() {
    let (fake, at, _) = with_page();
    let (_, prepared) = captured(&fake, at);
    fake.forget(prepared);
}

#[test]
#[should_panic(expected = "while a thread captures, it does nothing else")]
fn nothing_is_allocated_in_a_capture() {
    let fake = Fake::new(1, 0);
    fake.begin_capture().unwrap();
    let _ = fake.create_page();
}

#[test]
#[should_panic(expected = "while a thread captures, it does nothing else")]
fn nothing_is_waited_for_in_a_capture() {
    let fake = Fake::new(1, 0);
    let event = fake.create_event(false).unwrap();
    fake.begin_capture().unwrap();
    let _ = fake.synchronize(event);
}

#[test]
#[should_panic(expected = "this cannot be captured")]
fn host_memory_is_not_copied_in_a_capture() {
    let (fake, at, _) = with_page();
    let region = pinned(&fake, 8);
    fake.begin_capture().unwrap();
    let _ = fake.copy_in(Stream::Execute, at, (&region, 0), 8);
}

#[test]
#[should_panic(expected = "another thread captures this stream")]
#[allow(clippy::disallowed_methods, reason = "another thread comes in")]
fn nobody_else_uses_a_stream_that_is_captured() {
    let (fake, at, _) = with_page();
    fake.begin_capture().unwrap();
    let other = thread::scope(|scope| scope.spawn(|| fake.clear(Stream::Execute, at, 1)).join());
    std::panic::resume_unwind(other.unwrap_err());
}

#[test]
#[allow(clippy::disallowed_methods, reason = "another thread comes in")]
fn other_threads_load_while_one_captures() {
    let fake = Fake::new(1, 0);
    fake.begin_capture().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (at, page) = (fake.reserve(PAGE_BYTES).unwrap(), fake.create_page().unwrap());
            fake.map(at, &[page]).unwrap();
            fake.clear(Stream::Loads, at, 1).unwrap();
            finish(&fake, Stream::Loads);
            fake.unmap(at, 1).unwrap();
            fake.destroy_page(page);
            fake.release(at, PAGE_BYTES);
        });
    });
    let graph = fake.end_capture().unwrap();
    fake.destroy_graph(graph);
}
