//! GPUs whose memory holds a part of what they host.

use proto::{
    GpuId,
    backend_to_scheduler::{ResidentModel, WeightsOutcome},
    weights::WeightsTally,
};

use super::*;

const WEIGHTS: Weights = Weights { pages: 6, load: Span::from_millis(8), read: Span::from_millis(50) };

fn hello() -> BackendHello {
    let models = ["m", "n"].map(|name| ModelOffer { weights: WEIGHTS, ..model_offer(1, name, 1) });
    BackendHello { memory_pages: Some(10), ..BackendHello::new(1, models.into()) }
}

struct Bench {
    cluster: Cluster,
    frontend: FrontendId,
    backend: BackendId,
    now: Timestamp,
}

impl Bench {
    /// One frontend linked to one backend, whose GPU has room for one of two models.
    fn new() -> Self {
        let (mut cluster, now) = (scheduler(&config()), Timestamp(0));
        let frontend = cluster.handle_frontend_joined(now, FrontendHello::new("f:1")).unwrap().frontend;
        let backend = add_backend(&mut cluster, now, hello()).backend;
        Self { cluster, frontend, backend, now }
    }

    fn tell(&mut self, message: impl Into<BackendToScheduler>) {
        self.cluster.handle_backend_message(self.now, Port::Control, self.backend, message).unwrap();
    }

    fn submit(&mut self, sequence: u64, model: u32, slo_ms: i64) {
        let deadline = self.now + Span::from_millis(slo_ms);
        let FrontendToModelThread::Submit { task, priority, slot, .. } = submit(self.frontend, sequence, deadline)
        else {
            unreachable!("that is what it makes")
        };
        let (model, is_first) = (ModelId(model), true);
        let submit = FrontendToModelThread::Submit {
            task,
            model,
            deadline,
            priority,
            application: proto::Application::NONE,
            is_first,
            slot,
        };
        self.cluster.handle_frontend_message(self.now, Port::Control, self.frontend, submit).unwrap();
    }

    /// What the backend is told, but for frontends that have joined.
    fn orders(&mut self) -> Vec<SchedulerToBackend> {
        let order = |output| match output {
            ClusterOutput::ToBackend(_, _, SchedulerToBackend::FrontendJoined { .. }) => None,
            ClusterOutput::ToBackend(_, _, order) => Some(order),
            _ => None,
        };
        drain(&mut self.cluster).into_iter().filter_map(order).collect()
    }

    /// Lets time pass until something is to be sent.
    fn next_outputs(&mut self) -> Vec<ClusterOutput> {
        loop {
            let outputs = drain(&mut self.cluster);
            if !outputs.is_empty() {
                return outputs;
            }
            self.now = self.cluster.poll_timeout().expect("a task waits").max(self.now);
            self.cluster.handle_timeout(self.now);
        }
    }

    /// Lets time pass until the backend is told something.
    fn next_orders(&mut self) -> Vec<SchedulerToBackend> {
        loop {
            let orders = self.orders();
            if !orders.is_empty() {
                return orders;
            }
            self.now = self.cluster.poll_timeout().expect("a task waits").max(self.now);
            self.cluster.handle_timeout(self.now);
        }
    }

    /// The backend is asked what is in memory, and answers.
    fn answers(&mut self, models: &[u32], pinned: &[u32]) -> GpuId {
        let orders = self.orders();
        let [SchedulerToBackend::AskResident { gpu_index: 0, gpu }] = orders[..] else { panic!("{orders:?}") };
        let resident = |&model: &u32| ResidentModel { model: ModelId(model), is_pinned: pinned.contains(&model) };
        let models = models.iter().map(resident).collect();
        self.tell(BackendToControl::Resident { gpu, models, is_last: true });
        gpu
    }

    /// In use, with these models in memory.
    fn with(resident: &[u32]) -> (Self, GpuId) {
        Self::pinning(resident, &[])
    }

    /// Of these, some that stay there.
    fn pinning(resident: &[u32], pinned: &[u32]) -> (Self, GpuId) {
        let mut bench = Self::new();
        bench.tell(BackendToControl::Linked { frontend: bench.frontend, link: LinkId(1) });
        let gpu = bench.answers(resident, pinned);
        (bench, gpu)
    }

    /// What the frontend is told when it asks.
    fn load(&mut self) -> SchedulerLoad {
        let request = FrontendToControl::ClockRequest { sent_at: Timestamp(0), resp: Span::ZERO };
        self.cluster.handle_frontend_message(self.now, Port::Control, self.frontend, request).unwrap();
        let mut loads = drain(&mut self.cluster).into_iter().filter_map(|output| match output {
            ClusterOutput::ToFrontend(_, _, SchedulerToFrontend::Load(load)) => Some(*load),
            _ => None,
        });
        loads.next_back().unwrap()
    }

    fn loaded(&mut self, gpu: GpuId, model: u32) {
        let (started_at, finished_at) = (self.now, self.now + WEIGHTS.load);
        self.now = finished_at;
        let outcome = WeightsOutcome::Loaded { started_at, finished_at, read: Span::ZERO };
        self.tell(BackendToModelThread::WeightsLoaded { gpu, model: ModelId(model), outcome });
    }
}

#[test]
fn weights_are_loaded_before_their_batch_and_others_make_room() {
    let (mut bench, gpu) = Bench::with(&[0]);
    bench.submit(0, 0, 25);
    assert!(matches!(bench.next_orders()[..], [SchedulerToBackend::Plan(_)]), "it is there");
    let (mut bench, gpu_again) = Bench::with(&[0]);
    assert_eq!(gpu, gpu_again);
    bench.submit(0, 1, 100);
    let orders = bench.next_orders();
    let [SchedulerToBackend::UnloadWeights { gpu: from, model }, SchedulerToBackend::LoadWeights { gpu: to, .. }] =
        orders[..]
    else {
        panic!("{orders:?}")
    };
    assert_eq!((from, model, to), (gpu, ModelId(0), gpu));
    bench.loaded(gpu, 1);
    let orders = bench.next_orders();
    assert!(matches!(&orders[..], [SchedulerToBackend::Plan(plan)] if plan.model == ModelId(1)), "{orders:?}");
}

#[test]
fn a_gpu_is_asked_once_it_is_used_and_what_does_not_fit_has_to_go() {
    let mut bench = Bench::new();
    assert!(bench.orders().is_empty(), "it reaches nobody yet");
    bench.tell(BackendToControl::Linked { frontend: bench.frontend, link: LinkId(1) });
    let gpu = bench.answers(&[1, 0, 9], &[]);
    let unload = |model| SchedulerToBackend::UnloadWeights { gpu, model: ModelId(model) };
    assert_eq!(bench.orders(), [unload(1), unload(9)]);
}

#[test]
fn a_gpu_whose_weights_are_missing_is_asked_again_under_another_name() {
    let (mut bench, gpu) = Bench::with(&[0]);
    bench.tell(BackendToControl::WeightsMissing { gpu });
    let renamed = bench.answers(&[], &[]);
    assert_ne!(renamed, gpu);
    bench.tell(BackendToControl::WeightsMissing { gpu });
    // Nor does what is said of the former one count.
    bench.loaded(gpu, 0);
    bench.submit(0, 0, 100);
    let orders = bench.next_orders();
    assert!(matches!(orders[..], [SchedulerToBackend::LoadWeights { gpu, .. }] if gpu == renamed), "{orders:?}");
}

#[test]
fn frontends_are_told_what_becomes_of_weights() {
    let (mut bench, _) = Bench::with(&[0]);
    let tally = WeightsTally { loads: 3, pages: 10, pages_used: 6, ..WeightsTally::default() };
    bench.tell(BackendToControl::Weights(tally));
    bench.submit(0, 1, 100);
    bench.next_orders();
    let told = bench.load();
    assert_eq!((told.cold, told.weights), (1, tally));
    bench.cluster.handle_disconnected(bench.now, Port::Control, Member::Backend(bench.backend), String::new());
    assert_eq!(bench.load().weights, WeightsTally { loads: 3, ..WeightsTally::default() });
}

/// Clockwork, section 6.5: a load that began a millisecond late and took one more than planned.
#[test]
fn frontends_are_told_how_far_loads_were_off() {
    let (mut bench, gpu) = Bench::with(&[]);
    bench.submit(0, 0, 100);
    let orders = bench.next_orders();
    let [SchedulerToBackend::LoadWeights { earliest, .. }] = orders[..] else { panic!("{orders:?}") };
    let ms = Span::from_millis;
    let (started_at, finished_at) = (earliest + ms(1), earliest + WEIGHTS.load + ms(2));
    bench.now = finished_at;
    let outcome = WeightsOutcome::Loaded { started_at, finished_at, read: Span::ZERO };
    for _ in 0..2 {
        // What is said twice counts once.
        bench.tell(BackendToModelThread::WeightsLoaded { gpu, model: ModelId(0), outcome });
    }
    let predictions = bench.load().predictions;
    let (duration, completion) = (predictions.load.duration.under, predictions.load.completion.under);
    assert_eq!((predictions.load.actions, duration.count(), completion.count()), (1, 1, 1));
    assert_eq!((duration.sum, completion.sum), (ms(1), ms(2)));
}

#[test]
fn memory_that_cannot_be_used_is_refused_with_the_reason() {
    let refuse = |policy, hello| {
        let config = ClusterConfig { policy, ..config() };
        scheduler(&config).handle_backend_joined(Timestamp(0), hello).unwrap_err().to_string()
    };
    let nexus = Policy::of_cluster("nexus").unwrap();
    assert!(refuse(nexus, hello()).contains("gpu_memory_mb: found memory that holds a part of all models"));
    let nothing = BackendHello { memory_pages: Some(0), ..hello() };
    assert!(refuse(Policy::Deferred, nothing).contains("the memory of a GPU has 0 pages, expected 1 to"));
    let little = BackendHello { memory_pages: Some(5), ..hello() };
    assert!(refuse(Policy::Deferred, little).contains("m takes 6 pages of a memory that has 5"));
    let mut slow = hello();
    slow.models[0].weights.load = Span::from_millis(-1);
    assert!(refuse(Policy::Deferred, slow).contains("to load, expected at most"));
}

/// Of what does not fit, what stays comes first; and nothing makes it go.
#[test]
fn what_backends_pin_stays() {
    let (mut bench, gpu) = Bench::pinning(&[0, 1], &[1]);
    assert_eq!(bench.orders(), [SchedulerToBackend::UnloadWeights { gpu, model: ModelId(0) }]);
    bench.submit(0, 0, 100);
    assert!(bench.next_outputs().iter().all(|output| !matches!(output, ClusterOutput::ToBackend(..))), "no room");
    bench.submit(1, 1, 100);
    assert!(matches!(bench.next_orders()[..], [SchedulerToBackend::Plan(_)]));
}

/// A load takes 8 ms from host memory and 58 from disk.
#[test]
fn a_load_from_disk_takes_longer_until_the_backend_says_that_it_does_not() {
    let (mut bench, gpu) = Bench::with(&[0]);
    let says = |models: &[u32], is_there| BackendToControl::InHostMemory {
        models: models.iter().copied().map(ModelId).collect(),
        is_there,
    };
    bench.tell(says(&[1, 99], false));
    bench.submit(0, 1, 60);
    assert!(bench.orders().is_empty(), "it is refused");
    bench.submit(1, 1, 100);
    assert!(matches!(bench.orders()[..], [_, SchedulerToBackend::LoadWeights { model: ModelId(1), .. }]));
    bench.now += Span::from_millis(58);
    bench.tell(says(&[0], false));
    let outcome = WeightsOutcome::Failed { failed_at: bench.now };
    bench.tell(BackendToModelThread::WeightsLoaded { gpu, model: ModelId(1), outcome });
    bench.submit(2, 0, 60);
    assert!(bench.orders().is_empty(), "both are on disk only");
    // It joins planners anew with what is known.
    bench.tell(BackendToControl::WeightsMissing { gpu });
    bench.answers(&[], &[]);
    bench.submit(3, 0, 60);
    assert!(bench.orders().is_empty());
    bench.tell(says(&[0], true));
    bench.submit(4, 0, 60);
    assert!(matches!(bench.orders()[..], [SchedulerToBackend::LoadWeights { model: ModelId(0), .. }]));
}
