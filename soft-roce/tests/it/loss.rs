//! What a lost packet costs, in virtual time: a single one a probe's delay at most, one percent of all at most a third
//! of the throughput.

use std::time::Duration;

use crate::common::{LATENCY, Pair};
use soft_roce::{
    Access, Operation, PathMtu, QueuePairConfig, RecvRequest, Remote, Segment, SendRequest, Status, Timestamp,
};

const BYTES: u32 = 153_600;
/// 16.8 ms: everything here must end long before.
const ACK_TIMEOUT: u8 = 12;
/// The least delay of a probe.
const PROBE_DELAY: Duration = Duration::from_millis(1);

struct World {
    pair: Pair,
    near: Segment,
    far: Segment,
    remote: Remote,
}

impl World {
    fn new(seed: u64, path_mtu: PathMtu) -> Self {
        let config = QueuePairConfig { ack_timeout: ACK_TIMEOUT, ..QueuePairConfig::default() };
        let mut pair = Pair::new(seed, config, path_mtu);
        let near = pair.register(0, vec![1; BYTES as usize], Access::ALL).1;
        let far = pair.register(1, vec![2; BYTES as usize], Access::ALL).1;
        let segment = |lkey| Segment { lkey, offset: 0, bytes: BYTES };
        let remote = Remote { address: far.address, rkey: far.rkey };
        Self { pair, near: segment(near.lkey), far: segment(far.lkey), remote }
    }

    /// Posts one request, with a receive for it.
    fn post(&mut self, operation: Operation) {
        let pair = &mut self.pair;
        if matches!(operation, Operation::Send { .. } | Operation::WriteWithImmediate { .. }) {
            pair.ends[1].post_recv(pair.queue_pairs[1], RecvRequest { id: 0, segment: self.far }).expect("room");
        }
        pair.ends[0].post_send(pair.queue_pairs[0], SendRequest::new(0, operation)).expect("room");
    }

    /// How long the posted requests take, all of them.
    fn finish(&mut self, requests: usize) -> Duration {
        let begin = self.pair.now;
        while self.pair.completions[0].len() < requests {
            assert!(self.pair.step(), "everything comes to an end");
        }
        assert!(self.pair.completions[0].drain(..).all(|done| done.status == Status::Success));
        since(self.pair.now, begin)
    }

    fn operations(&self, bytes: u32) -> [Operation; 5] {
        let (local, remote) = (Segment { bytes, ..self.near }, self.remote);
        [
            Operation::Send { local },
            Operation::Write { local, remote },
            Operation::WriteWithImmediate { local, remote, immediate: 1 },
            Operation::Read { local, remote },
            Operation::FetchAdd { local: Segment { bytes: 8, ..local }, remote, add: 1 },
        ]
    }
}

fn since(later: Timestamp, earlier: Timestamp) -> Duration {
    Duration::from_nanos(later.0 - earlier.0)
}

/// Every operation, with each packet of its exchange lost once: first, last, acknowledgement, response.
#[test]
fn any_single_packet_is_repaired_within_a_probes_delay() {
    let sizes = [8, 600, 20_000].map(|bytes| (bytes, PathMtu::Mtu1024));
    for (bytes, mtu) in sizes.into_iter().chain([(BYTES, PathMtu::Mtu57344)]) {
        for kind in 0..5 {
            let mut lost = 0;
            loop {
                let mut world = World::new(lost, mtu);
                // The round trip must be known.
                world.post(Operation::Write { local: Segment { bytes: 8, ..world.near }, remote: world.remote });
                world.finish(1);
                world.pair.faults.lost = Some(world.pair.carried + lost);
                let (operation, before) = (world.operations(bytes)[kind], world.pair.carried);
                world.post(operation);
                let took = world.finish(1);
                assert!(took <= PROBE_DELAY + LATENCY * 10, "{operation:?} without packet {lost}: {took:?}");
                assert_eq!(world.pair.ends[0].counters().retransmits_timeout, 0);
                if world.pair.carried - before <= lost {
                    break;
                }
                lost += 1;
            }
            assert!(lost >= 2, "a request and an answer at least");
        }
    }
}

/// Latencies of READs one after another, in order of length.
fn read_latencies(loss: u32, count: usize) -> Vec<Duration> {
    let mut world = World::new(7, PathMtu::Mtu4096);
    (world.pair.faults.loss, world.pair.faults.byte_nanos) = (loss, 0.8);
    let read = Operation::Read { local: world.near, remote: world.remote };
    let mut latencies: Vec<_> = std::iter::repeat_with(|| {
        world.post(read);
        world.finish(1)
    })
    .take(count)
    .collect();
    latencies.sort_unstable();
    latencies
}

#[test]
fn one_percent_loss_leaves_the_tail_of_a_read_below_5_ms() {
    let latencies = read_latencies(10, 5_000);
    let p999 = latencies[latencies.len() * 999 / 1_000];
    println!("p50 {:?} p99 {:?} p99.9 {p999:?}", latencies[2_500], latencies[4_950]);
    assert!(p999 < Duration::from_millis(5), "{p999:?}");
}

/// Bytes a second of 150 KB operations, eight at once, over a wire of 10 Gbit/s.
fn throughput(read: bool, loss: u32) -> f64 {
    const OPERATIONS: usize = 2_000;
    let mut world = World::new(9, PathMtu::Mtu4096);
    (world.pair.faults.loss, world.pair.faults.byte_nanos) = (loss, 0.8);
    let (local, remote) = (world.near, world.remote);
    let operation = if read { Operation::Read { local, remote } } else { Operation::Write { local, remote } };
    let (begin, mut posted, mut done) = (world.pair.now, 0, 0);
    while done < OPERATIONS {
        while posted < OPERATIONS.min(done + 8) {
            world.post(operation);
            posted += 1;
        }
        assert!(world.pair.step(), "everything comes to an end");
        done += world.pair.completions[0].drain(..).filter(|done| done.status == Status::Success).count();
    }
    done as f64 * f64::from(BYTES) / since(world.pair.now, begin).as_secs_f64()
}

#[test]
fn one_percent_loss_costs_at_most_a_third_of_the_throughput() {
    for read in [true, false] {
        let (clean, lossy) = (throughput(read, 0), throughput(read, 10));
        println!("{:.2} and {:.2} Gbit/s", clean * 8e-9, lossy * 8e-9);
        assert!(lossy > clean * 2.0 / 3.0, "{lossy:.3e} of {clean:.3e} bytes a second");
    }
}
