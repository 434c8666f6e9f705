//! A sample of every message that roles exchange, and of all that is in them: every variant of every enum, options
//! with and without a value, collections with and without elements. Values differ from field to field, so that two
//! fields that trade places show.

use zerocopy::IntoBytes;

use crate::{
    backend_to_frontend::*, backend_to_scheduler::*, brought::*, clock::ClockReply, draining::*, epoch::*,
    frontend_to_scheduler::*, hello::*, ids::*, link_pass::*, predictions::*, profile::*, request_times::*,
    scheduler_to_backend::*, scheduler_to_frontend::*, scheduler_to_scheduler::*, slot::*, stages::*, time::*,
    weights::*,
};

/// The golden file as this build has it.
pub(super) fn golden() -> String {
    let mut lines = String::new();
    struct_lines(&mut lines);
    enum_lines(&mut lines);
    in_place_lines(&mut lines);
    lines
}

/// Something of which there are samples.
trait Sample: Sized {
    /// At least one.
    fn samples(values: &mut Values) -> Vec<Self>;

    /// Of the type, and of the variant if it has any.
    fn name(&self) -> &'static str {
        std::any::type_name::<Self>()
    }
}

/// Values no two of which are alike; the same ones in each run.
#[derive(Default)]
struct Values {
    drawn: u64,
}

impl Values {
    /// SplitMix64.
    fn draw(&mut self) -> u64 {
        self.drawn += 1;
        let mut value = self.drawn.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    /// The sample of a field in this round; there are as many rounds as the field with the most samples needs.
    fn pick<T: Sample>(&mut self, round: usize, rounds: &mut usize) -> T {
        let mut all = T::samples(self);
        *rounds = all.len().max(*rounds);
        all.swap_remove(round % all.len())
    }

    fn build<T>(&mut self, one: impl Fn(&mut Self, usize, &mut usize) -> T) -> Vec<T> {
        let (mut all, mut rounds) = (Vec::new(), 1);
        while all.len() < rounds {
            let next = one(self, all.len(), &mut rounds);
            all.push(next);
        }
        all
    }
}

macro_rules! integers {
    ($($name:ident)*) => {$(
        impl Sample for $name {
            fn samples(values: &mut Values) -> Vec<Self> {
                vec![values.draw() as Self]
            }
        }
    )*};
}
integers!(u8 u16 u32 u64 i64);

impl Sample for bool {
    fn samples(_: &mut Values) -> Vec<Self> {
        vec![false, true]
    }
}

impl Sample for f64 {
    fn samples(values: &mut Values) -> Vec<Self> {
        vec![(values.draw() >> 40) as f64 / 1024.0]
    }
}

impl Sample for String {
    fn samples(values: &mut Values) -> Vec<Self> {
        vec![format!("text {:x}", values.draw() >> 48)]
    }
}

impl<T: Sample> Sample for Option<T> {
    fn samples(values: &mut Values) -> Vec<Self> {
        [None].into_iter().chain(T::samples(values).into_iter().map(Some)).collect()
    }
}

impl<T: Sample> Sample for Vec<T> {
    fn samples(values: &mut Values) -> Vec<Self> {
        let all = (0..2).flat_map(|_| T::samples(values)).collect();
        vec![all, Self::new()]
    }
}

impl<T: Sample> Sample for Box<T> {
    fn samples(values: &mut Values) -> Vec<Self> {
        T::samples(values).into_iter().map(Self::new).collect()
    }
}

impl<T: Sample, const N: usize> Sample for [T; N] {
    fn samples(values: &mut Values) -> Vec<Self> {
        values.build(|values, round, rounds| std::array::from_fn(|_| values.pick(round, rounds)))
    }
}

impl<A: Sample, B: Sample> Sample for (A, B) {
    fn samples(values: &mut Values) -> Vec<Self> {
        values.build(|values, round, rounds| (values.pick(round, rounds), values.pick(round, rounds)))
    }
}

impl Sample for LatencyProfile {
    fn samples(_: &mut Values) -> Vec<Self> {
        vec![Self::from_table([1_000, 1_500, 2_250].map(Span).to_vec()).expect("it does not decrease")]
    }
}

/// A field that is added does not compile until it is named here.
macro_rules! structs {
    ($lines:ident: $($name:ident { $($field:tt),* })*) => {
        $(impl Sample for $name {
            fn samples(values: &mut Values) -> Vec<Self> {
                values.build(|values, round, rounds| Self { $($field: values.pick(round, rounds)),* })
            }

            fn name(&self) -> &'static str {
                stringify!($name)
            }
        })*

        fn $lines(lines: &mut String) {
            $(add::<$name>(lines);)*
        }
    };
}

/// A variant that is added does not compile until it is named here, with its fields.
macro_rules! enums {
    ($lines:ident: $($name:ident { $($variant:ident { $($field:tt),* })* })*) => {
        $(impl Sample for $name {
            fn samples(values: &mut Values) -> Vec<Self> {
                let mut all = Vec::new();
                $(all.extend(values.build(|_values, _round, _rounds| {
                    Self::$variant { $($field: _values.pick(_round, _rounds)),* }
                }));)*
                all
            }

            fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant { .. } => concat!(stringify!($name), "::", stringify!($variant)),)*
                }
            }
        })*

        fn $lines(lines: &mut String) {
            $(add::<$name>(lines);)*
        }
    };
}

/// Values begin anew with each type, so that a change shows in the lines of those that it touches.
fn add<T>(lines: &mut String)
where
    T: Sample + wincode::SchemaWrite<wincode::config::DefaultConfig, Src = T>,
{
    for sample in T::samples(&mut Values::default()) {
        let encoded = wincode::serialize(&sample).expect("encoding into memory cannot fail");
        add_line(lines, sample.name(), &encoded);
    }
}

fn add_line(lines: &mut String, name: &str, encoded: &[u8]) {
    let digits: String = encoded.iter().map(|byte| format!("{byte:02x}")).collect();
    *lines += &format!("{name} {digits}\n");
}

structs! { struct_lines:
    Timestamp { 0 }
    Span { 0 }
    FrontendId { 0 }
    BackendId { 0 }
    GpuId { 0 }
    ModelId { 0 }
    Application { 0 }
    ModelThreadId { 0 }
    PlanId { 0 }
    LinkId { 0 }
    LinkPass { 0 }
    LoadId { 0 }
    ChangeId { 0 }
    TaskId { 0 }
    Epoch { number, scheduler }
    Era { 0 }
    Claim { era, epoch }
    Standing { token, obeys }
    Weights { pages, load, read }
    WeightsTally {
        loads, reads, failed, evictions, absent, busy, pages, pages_used, host_pages, host_pages_used
    }
    FilesDigest { 0 }
    Brought { config, files }
    BatchCost { fixed, per_task_ppm }
    SlotDescriptor { slot, input_offset, input_bytes, answer_offset, answer_bytes_max, key }
    SchedulerStamps { queued_at, due_at, granted_at }
    ClockReply { sent_at, received_at, replied_at }
    ErrorHistogram { counts, longer, sum }
    ErrorSides { over, under }
    ActionErrors { actions, duration, completion }
    PredictionErrors { infer, load }
    AloneTimes { samples, quantiles }
    LengthTimes { shortest, longest, times }
    RequestTimes { cost, applications, lengths }
    MemberHello { member, pass }
    ModelThreads { addresses, pass }
    FrontendHello { name, link_address, known_as, standing }
    FrontendWelcome { frontend, model_threads, claim }
    BackendHello { name, gpus, memory_pages, models, more, known_as, standing, is_auto }
    BackendWelcome { backend, models, model_threads, claim }
    ModelOffer { name, version, profile, input_bytes, gpu_indexes, weights, cost, queue_max, is_guest }
    Undelivered { task, link }
    ResidentModel { model, is_pinned }
    SchedulerLoad { queued, batches, gpus, members, obeying, settled, cold, weights, predictions }
    NetworkTimes { ctrl, data, resp }
    PlannedTask { task, attempt, slot, stamps }
    BatchPlan { plan, gpu_index, model, exec_at, latest, tasks, sample }
    PeerHello { rank, name, schedulers, claim }
    PeerWelcome { claim, heartbeat_address, heartbeat_rkey }
    LearnedNetwork { ctrl, resp }
    LearnedModel { name, version, factors, data, averages }
    LearnedFactor { backend, gpu_index, thousandths }
    LearnedAverages { arrivals, gap_ns, hosts, slo_ns, hurried_part, classes }
    LearnedClass { tasks, lost_part }
    HandedOver { epoch, took }
    DrainRequest { kind, name, is_drained, is_forced }
    DrainAnswer { id, only_there, is_moving }
    LinkHello { backend, frontend, link, epoch, pass }
    LinkWelcome { arena_address, arena_bytes, arena_rkey, guards_offset, guards_rkey }
}

enums! { enum_lines:
    SchedulerHello { Frontend { 0 } Backend { 0 } Member { 0 } Peer { 0 } HandOver {} Drain { 0 } }
    MemberKind { Frontend {} Backend {} }
    Member { Frontend { 0 } Backend { 0 } }
    ModelChange { Load {} Unload {} }
    FrontendToControl {
        ClockRequest { sent_at, resp }
        ChangeModel { change, to, name, brought }
        Link { backend, link }
        Obeys { epoch }
        Misses { misses }
        PageRead {}
        Refuses { backend }
        Drained { is_drained }
    }
    FrontendToModelThread {
        Cancel { task, model }
        Submit { task, model, deadline, priority, application, is_first, slot }
        Open { task, model, deadline, priority, application, attempt, slot }
        AllOpen {}
        Fenced { backend, unanswered }
    }
    PlanOutcome {
        Executed { started_at, finished_at }
        WindowMissed { rejected_at }
        Abandoned { abandoned_at }
    }
    WeightsOutcome { Loaded { started_at, finished_at, read } Failed { failed_at } }
    LoadOutcome { Ready { offer, is_last } NotPlaced {} Failed { 0 } Ensemble {} }
    BackendToControl {
        Linked { frontend, link }
        Unlinked { frontend }
        Usable { gpu_index, is_usable }
        Leaving { within }
        Loaded { load, outcome }
        NotLoaded { name, version, reason }
        Offers { models }
        Unloaded { model }
        Resident { gpu, models, is_last }
        InHostMemory { models, is_there }
        WeightsMissing { gpu }
        Weights { 0 }
        Unfinished { plan, gpu_index, model, frees_at, tasks }
        Inherited { 0 }
        Obeys { epoch }
        Misses { misses }
        ClockRequest { sent_at }
        Measured { model, profile, cost }
        Drained { is_drained }
        Assigned { sub_cluster }
    }
    BackendToModelThread {
        WeightsLoaded { gpu, model, outcome }
        RanAlone { plan, took }
        Cancelled { plan, task }
        InputLate { plan, task }
        Answered { plan, undelivered }
        PlanDone { plan, outcome, undelivered, arrived_at, fetched_at }
    }
    DropReason {
        Deadline {} QueueFull {} NoBackend {} Cancelled {} Unloaded {} BackendLost {} ColdStart {} InputLate {}
    }
    ModelState { Serving {} Loading {} Unloading {} Unloaded {} }
    SchedulerToFrontend {
        Dropped { task, reason }
        Answered { backend, tasks }
        Clock { 0 }
        Load { 0 }
        RequestTimes { model, times }
        Leaving {}
        Takeover { epoch }
        AskPrimary {}
        Fence { backend, link, tasks }
        Model { model, name, version, gpus, least_latency, batching, network, model_thread }
        ModelState { name, state, loads, brought }
        NotLoaded { name, version, reason }
        ModelChanged { change, refused }
        PageEnd {}
        Drain { is_drained }
    }
    SchedulerToBackend {
        FrontendLeft { frontend }
        Clock { 0 }
        FrontendJoined { frontend, link_address, pass }
        Offered { models }
        Load { load, name, brought, is_placed }
        Host { load, version, model }
        Discard { load }
        Unload { model }
        AskResident { gpu_index, gpu }
        LoadWeights { gpu, model, earliest, latest }
        UnloadWeights { gpu, model }
        Cancel { plan, task }
        Dismissed {}
        Takeover { epoch }
        AskPrimary {}
        Plan { 0 }
        Drain { is_drained }
        Assign { sub_cluster }
    }
    SchedulerToScheduler {
        ClockRequest { sent_at }
        Clock { 0 }
        Claim { 0 }
        AskHandOver {}
        LearnedNetwork { 0 }
        LearnedModel { 0 }
        HandOver {}
    }
}

// What RDMA writes and reads in place is no message, but a peer of another opinion would misread it all the same.

macro_rules! in_place {
    ($($name:ident { $($field:ident),* })*) => {$(
        impl Sample for $name {
            fn samples(values: &mut Values) -> Vec<Self> {
                values.build(|values, round, rounds| Self { $($field: values.pick(round, rounds)),* })
            }
        }
    )*};
}
in_place! {
    AnswerStamps {
        queued_at_ns, due_at_ns, granted_at_ns, planned_at_ns, fetched_at_ns, exec_at_ns, started_at_ns, finished_at_ns
    }
    AnswerHeader { task, status, payload_bytes, attempt, batch_size, gpu, tasks, stamps }
    ImmediateData { slot, attempt }
}

impl Sample for AnswerStatus {
    fn samples(_: &mut Values) -> Vec<Self> {
        let all = vec![Self::Done, Self::WindowMissed, Self::Failed];
        all.iter().for_each(|status| match status {
            Self::Done | Self::WindowMissed | Self::Failed => {}
        });
        all
    }
}

fn in_place_lines(lines: &mut String) {
    let mut values = Values::default();
    for header in AnswerHeader::samples(&mut values) {
        add_line(lines, "AnswerHeader", header.as_bytes());
    }
    for ImmediateData { slot, attempt } in ImmediateData::samples(&mut values) {
        let immediate = ImmediateData { slot: slot % ImmediateData::SLOTS_MAX, attempt }.pack();
        add_line(lines, "ImmediateData", &immediate.to_le_bytes());
    }
    for slot in SlotDescriptor::samples(&mut values) {
        let slot = SlotDescriptor { slot: slot.slot % ImmediateData::SLOTS_MAX, ..slot };
        add_line(lines, "guarded", &slot.guarded().slot.to_le_bytes());
    }
    let guards = [guard_word(TaskId(values.draw())), GUARD_EMPTY];
    guards.iter().for_each(|word| add_line(lines, "guard", &word.to_le_bytes()));
}
