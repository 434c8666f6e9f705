//! A network that is slower than the configured one is planned with (Symphony, section 5.6), and refuses nobody.

use proto::{BatchCost, scheduler_to_frontend::NetworkTimes};

use super::*;

/// Between two requests, so that a window of ten seconds has the samples that it needs.
const STEP: Span = Span::from_micros(4_500);

/// A frontend and a backend, whose only GPU takes a millisecond for each request.
struct Bench {
    cluster: Cluster,
    frontend: FrontendId,
    backend: BackendId,
    now: Timestamp,
    requests: u64,
    /// The last that the frontend was told: the least latency, and the network.
    told: Option<(Span, NetworkTimes)>,
}

impl Bench {
    fn new() -> Self {
        Self::with(|_| {})
    }

    /// With a model that differs.
    fn with(change: impl FnOnce(&mut ModelOffer)) -> Self {
        let mut cluster = scheduler(&ClusterConfig { policy: Policy::Eager, reestimate: false, ..config() });
        let now = Timestamp(0);
        let frontend = cluster.handle_frontend_joined(now, FrontendHello::new("f:1")).unwrap().frontend;
        let mut hello = offer(1);
        hello.models[0].profile = hello.models[0].profile.scaled(1.0 / 6.0);
        change(&mut hello.models[0]);
        let backend = add_backend(&mut cluster, now, hello).backend;
        let linked = BackendToControl::Linked { frontend, link: LinkId(1) };
        cluster.handle_backend_message(now, Port::Control, backend, linked).unwrap();
        let mut bench = Self { cluster, frontend, backend, now, requests: 0, told: None };
        bench.take();
        bench
    }

    /// Whatever comes out now; yields what became of a request.
    fn take(&mut self) -> Option<Result<BatchPlan, DropReason>> {
        self.cluster.handle_timeout(self.now);
        let mut found = None;
        for output in drain(&mut self.cluster) {
            match output {
                ClusterOutput::ToBackend(_, _, SchedulerToBackend::Plan(plan)) => found = Some(Ok(plan)),
                ClusterOutput::ToFrontend(_, _, SchedulerToFrontend::Dropped { reason, .. }) => {
                    found = Some(Err(reason));
                }
                ClusterOutput::ToFrontend(_, _, SchedulerToFrontend::Model { least_latency, network, .. }) => {
                    self.told = Some((least_latency, network));
                }
                _ => {}
            }
        }
        found
    }

    /// Submits a request, whose input may be decoded late.
    fn request(&mut self, slo: Span, is_guarded: bool) -> Result<BatchPlan, DropReason> {
        self.request_with(slo, |slot| if is_guarded { slot.guarded() } else { slot })
    }

    /// Submits a request whose slot differs.
    fn request_with(
        &mut self,
        slo: Span,
        change: impl FnOnce(SlotDescriptor) -> SlotDescriptor,
    ) -> Result<BatchPlan, DropReason> {
        self.now += STEP;
        self.requests += 1;
        let mut task = submit(self.frontend, self.requests, self.now + slo);
        if let FrontendToModelThread::Submit { slot, .. } = &mut task {
            *slot = change(*slot);
        }
        self.cluster.handle_frontend_message(self.now, Port::Control, self.frontend, task).unwrap();
        self.take().expect("its GPU is idle")
    }

    /// What comes of a plan whose way, and whose inputs' way, took so long. `misses` its window or runs.
    fn end(&mut self, plan: &BatchPlan, (ctrl, data): (Span, Span), misses: bool) {
        let (arrived_at, ends_at) = (self.now + ctrl, self.now + Span::from_millis(4));
        let outcome = if misses {
            PlanOutcome::WindowMissed { rejected_at: arrived_at + data }
        } else {
            PlanOutcome::Executed { started_at: ends_at - Span::from_millis(1), finished_at: ends_at }
        };
        let fetched_at = if misses { arrived_at } else { arrived_at + data };
        let (plan, undelivered) = (plan.plan, vec![]);
        let done = BackendToModelThread::PlanDone { plan, outcome, undelivered, arrived_at, fetched_at };
        self.cluster.handle_backend_message(ends_at, Port::Control, self.backend, done).unwrap();
        let answered = BackendToModelThread::Answered { plan, undelivered: vec![] };
        self.cluster.handle_backend_message(ends_at, Port::Control, self.backend, answered).unwrap();
    }

    /// Serves requests of 25 ms for so many seconds.
    fn serve(&mut self, seconds: i64, network: (Span, Span), (is_guarded, misses): (bool, bool)) {
        let until = self.now + Span::from_millis(seconds * 1_000);
        while self.now < until {
            let plan = self.request(Span::from_millis(25), is_guarded).expect("it has time");
            self.end(&plan, network, misses);
        }
    }

    /// From now to the start of the next batch of one request: delay(1) as it is planned with.
    fn delay(&mut self) -> Span {
        let plan = self.request(Span::from_millis(25), false).unwrap();
        let delay = plan.exec_at - self.now;
        self.end(&plan, (Span::ZERO, Span::ZERO), false);
        delay
    }
}

const CONFIGURED: Span = Span::from_micros(320);

#[test]
fn a_slower_network_is_planned_with_until_it_is_fast_again() {
    for misses in [false, true] {
        let mut bench = Bench::new();
        assert_eq!(bench.delay(), CONFIGURED);
        let slow = (Span::from_millis(2), Span::from_millis(1));
        bench.serve(15, slow, (false, misses));
        assert_eq!(bench.delay(), CONFIGURED, "it may be a stall");
        bench.serve(10, slow, (false, misses));
        let delay = bench.delay();
        assert!(delay >= Span::from_millis(3) && delay < Span::from_micros(3_300), "{delay}, {misses}");
        let (least, network) = bench.told.expect("the frontend was told");
        assert_eq!(network.ctrl + network.data, delay);
        // l(1), what is configured of the way there, and the way back.
        assert_eq!(least, Span::from_micros(1_000 + 320 + 1_000));
        bench.serve(25, (Span::from_micros(50), Span::from_micros(5)), (false, false));
        assert!(bench.delay() < Span::from_micros(62));
    }
}

/// As planned a request takes 3 + 1 + 1 ms, as configured 2.32.
#[test]
fn a_slower_network_refuses_no_request_that_the_configured_one_would_let_be_met() {
    let mut bench = Bench::new();
    bench.serve(30, (Span::from_millis(2), Span::from_millis(1)), (false, false));
    let plan = bench.request(Span::from_millis(3), false).expect("it may be lucky");
    // What the configured network leaves: 3 - 2.32 ms.
    let spare = plan.latest - plan.exec_at;
    assert_eq!(spare, Span::from_micros(680));
    bench.end(&plan, (Span::from_millis(2), Span::from_millis(1)), false);
    assert_eq!(bench.request(Span::from_micros(2_310), false).unwrap_err(), DropReason::Deadline);
}

/// While nothing is served nothing is measured: what was measured before must not hold for ever.
#[test]
fn a_network_that_was_slow_is_forgotten_while_nobody_asks() {
    let mut bench = Bench::new();
    bench.serve(30, (Span::from_millis(3), Span::ZERO), (false, false));
    assert!(bench.delay() > Span::from_millis(3));
    bench.now += Span::from_millis(60_000);
    bench.delay();
    assert_eq!(bench.delay(), CONFIGURED);
}

#[test]
fn inputs_that_frontends_decode_late_are_not_the_networks_fault() {
    let mut bench = Bench::new();
    bench.serve(30, (Span::from_micros(100), Span::from_millis(3)), (true, false));
    assert!(bench.delay() <= CONFIGURED);
}

/// What a backend says is bounded by when it says it.
#[test]
fn nothing_took_longer_than_since_it_was_sent() {
    let mut bench = Bench::new();
    bench.serve(30, (Span::from_millis(60_000), Span::from_millis(60_000)), (false, false));
    // Each plan was reported done after 4 ms.
    assert!(bench.delay() < Span::from_micros(8_800));
}

/// Of a model that allows 16 MB and is asked about kilobytes no batch waits as if it read 16 MB, and no request is
/// refused as if it had; a large one among them has its time.
#[test]
fn reads_are_planned_with_what_requests_have_where_they_choose_it() {
    let unequal = |model: &mut ModelOffer| {
        model.input_bytes = 16_000_000;
        model.cost = Some(BatchCost { fixed: Span::from_micros(10), per_task_ppm: 500_000 });
    };
    let mut bench = Bench::with(unequal);
    let mut delay = |bytes: u32| {
        let plan = bench.request_with(Span::from_millis(25), |slot| SlotDescriptor { input_bytes: bytes, ..slot });
        let plan = plan.expect("it has time");
        let delay = plan.exec_at - bench.now;
        bench.end(&plan, (Span::ZERO, Span::ZERO), false);
        delay - Span::from_micros(310)
    };
    assert_eq!(delay(1_000), Span(1_024));
    assert_eq!(delay(10_000_000), Span::from_millis(16));
    assert_eq!(delay(1_000), Span::from_millis(16), "it may come again");
    let (least, _) = bench.told.expect("the frontend was told");
    assert_eq!(least, Span::from_micros(1_000 + 310 + 1_000));
    bench.now += Span::from_millis(30_000);
    let plan = bench.request_with(Span::from_millis(25), |slot| SlotDescriptor { input_bytes: 1_000, ..slot }).unwrap();
    assert_eq!(plan.exec_at - bench.now, Span(311_024));
}
