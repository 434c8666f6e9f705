//! The load of one frontend, from the thread that calls.
//!
//! This is a driver: it reads the clock and waits.
#![allow(clippy::disallowed_methods)]

use std::{
    cell::RefCell,
    io,
    rc::Rc,
    time::{Duration, Instant},
};

use bench::nanoseconds;
use bytes::Bytes;
use frontend::{Client, Infer, InferError, Inferred, InputTensor};
use hdrhistogram::Histogram;
use load::{Instants, Pacer, Rate};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use repository::{DataType, emulated::digest};
use sim::workload::ArrivalProcess;
use tokio::{runtime::LocalOptions, task::JoinSet};

use super::report::{INPUT, Load, Pace, Tally};

/// Different requests, used in turn. A prime, so that no slot gets the same bytes in every turn.
const REQUESTS: usize = 61;

/// Sends a load and yields what came of it, once all of it has ended.
///
/// # Errors
/// If the event loop cannot be set up.
pub(super) fn generate(client: &Client, load: &Load) -> io::Result<Tally> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build_local(LocalOptions::default())?;
    let sender = Rc::new(Sender::new(client.clone(), load));
    runtime.block_on(async {
        let mut requests = JoinSet::new();
        match load.pace {
            Pace::Closed(count) => {
                (0..count).for_each(|lane| drop(requests.spawn_local(Rc::clone(&sender).one_after_another(lane))));
            }
            Pace::Open(rate_rps) => {
                let random = ChaCha8Rng::seed_from_u64(load.seed);
                let pacer = Pacer::new()?;
                let instants = Instants::new(ArrivalProcess::Poisson, Rate::constant(rate_rps), random);
                for (index, at) in instants.enumerate() {
                    let due = sender.began + at;
                    if due >= sender.until {
                        break;
                    }
                    pacer.wait_until(due).await;
                    while requests.try_join_next().is_some() {}
                    let sender = Rc::clone(&sender);
                    requests.spawn_local(async move { sender.send(index, due).await });
                }
            }
        }
        requests.join_all().await;
        io::Result::Ok(())
    })?;
    let sender = Rc::into_inner(sender).expect("all requests have ended");
    let mut tally = sender.tally.into_inner();
    let latency = sender.latency.into_inner();
    tally.latencies_ns =
        latency.iter_recorded().map(|step| (step.value_iterated_to(), step.count_at_value())).collect();
    Ok(tally)
}

struct Sender {
    client: Client,
    models: Vec<String>,
    rows: usize,
    bytes: usize,
    slo: Duration,
    requests: Vec<Request>,
    began: Instant,
    /// The measured span.
    from: Instant,
    until: Instant,
    tally: RefCell<Tally>,
    latency: RefCell<Histogram<u64>>,
}

/// The inputs of all rows, and what is to come back.
struct Request {
    inputs: Bytes,
    outputs: Vec<u8>,
}

impl Request {
    fn new(rows: usize, bytes: usize, random: &mut ChaCha8Rng) -> Self {
        let mut inputs = vec![0; rows * bytes];
        random.fill_bytes(&mut inputs);
        let outputs = inputs.chunks_exact(bytes).flat_map(|row| digest(row).map(u64::to_le_bytes).concat()).collect();
        Self { inputs: inputs.into(), outputs }
    }
}

impl Sender {
    fn new(client: Client, load: &Load) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(load.seed);
        random.set_stream(1);
        let requests = (0..REQUESTS).map(|_| Request::new(load.rows, load.bytes, &mut random)).collect();
        let began = Instant::now();
        let from = began + Duration::from_secs_f64(load.warm_up);
        Self {
            client,
            models: load.models.clone(),
            rows: load.rows,
            bytes: load.bytes,
            slo: Duration::from_nanos(load.slo_ns),
            requests,
            began,
            from,
            until: from + Duration::from_secs_f64(load.seconds),
            tally: RefCell::default(),
            latency: RefCell::new(nanoseconds()),
        }
    }

    /// One lane of a closed loop.
    async fn one_after_another(self: Rc<Self>, lane: usize) {
        let mut index = lane;
        loop {
            let now = Instant::now();
            if now >= self.until {
                return;
            }
            self.send(index, now).await;
            index += 1;
        }
    }

    /// Sends the request of this index, which was due at this instant, and counts how it ends.
    async fn send(&self, index: usize, due: Instant) {
        let request = &self.requests[index % REQUESTS];
        let input = InputTensor {
            name: INPUT.to_owned(),
            datatype: DataType::Uint8,
            shape: vec![self.rows, self.bytes],
            data: request.inputs.clone().into(),
        };
        let model = self.models[index % self.models.len()].clone();
        let result = self.client.infer(Infer { model, version: None, inputs: vec![input], slo: None }).await;
        self.count(request, due, result);
    }

    fn count(&self, request: &Request, due: Instant, result: Result<Inferred, InferError>) {
        let now = Instant::now();
        let rows = self.rows as u64;
        let mut tally = self.tally.borrow_mut();
        let counts = due >= self.from && due < self.until;
        tally.tasks_sent += if counts { rows } else { 0 };
        let inferred = match result {
            Ok(inferred) => inferred,
            Err(error) => {
                *tally.tasks_failed.entry(error.to_string()).or_default() += rows;
                return;
            }
        };
        let wrong = wrong_rows(&request.outputs, &inferred);
        if wrong > 0 {
            tally.tasks_wrong += wrong;
            return;
        }
        if now >= self.from && now < self.until {
            tally.tasks_answered += rows;
        }
        if counts {
            let took = now - due;
            tally.tasks_on_time += if took <= self.slo { rows } else { 0 };
            tally.requests += 1;
            tally.batch_sizes += u64::from(inferred.timing.batch_size);
            self.latency.borrow_mut().record(took.as_nanos() as u64).expect("the histogram resizes");
        }
    }
}

/// Rows whose answer is not the digest of their input; all of them if there are more or fewer.
fn wrong_rows(expected: &[u8], found: &Inferred) -> u64 {
    const ROW: usize = repository::emulated::OUTPUT_ELEMENTS * size_of::<u64>();
    match &found.outputs[..] {
        [output] if *output.data == *expected => 0,
        [output] if output.data.len() == expected.len() => {
            let rows = output.data.chunks_exact(ROW).zip(expected.chunks_exact(ROW));
            rows.filter(|(found, expected)| found != expected).count() as u64
        }
        _ => (expected.len() / ROW) as u64,
    }
}
