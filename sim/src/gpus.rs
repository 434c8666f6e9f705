//! Emulated GPUs: each runs its batches in turn, one at a time, each for l(b) give or take what the workload says.
//!
//! A batch starts once its time has come and the one before it has ended; one that cannot start within its window is
//! rejected (Clockwork, section 4.4). A GPU can be told to kill what runs, and it can die.
//!
//! A GPU keeps its own time: what is noticed late, because a thread in real time woke late, happened when it was due.

use std::collections::VecDeque;

use proto::{GpuId, Span, Timestamp};
use scheduler::{Batch, indexed_heap::IndexedHeap};

use crate::arrivals::Request;

/// What a GPU has to tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuEvent {
    /// A batch ran to its end.
    Finished {
        /// The batch.
        batch: Batch<Request>,
        /// When it started.
        started_at: Timestamp,
        /// When it ended.
        finished_at: Timestamp,
    },
    /// A batch could not start within its window.
    Rejected {
        /// The batch.
        batch: Batch<Request>,
        /// When that was clear.
        rejected_at: Timestamp,
    },
}

/// All GPUs, by place: a GPU that comes back has a new id, and the place of the one that died.
#[derive(Debug)]
pub struct Gpus {
    places: Vec<Place>,
    /// By place: when a batch ends, or the next one is to start.
    timers: IndexedHeap,
    events: VecDeque<GpuEvent>,
}

#[derive(Debug, Default)]
struct Place {
    /// With the instants they came at, in that order; the first one runs if `running` says so.
    batches: VecDeque<(Timestamp, Batch<Request>)>,
    running: Option<Running>,
    /// When the last batch that ran ended.
    idle_since: Timestamp,
}

#[derive(Debug, Clone, Copy)]
struct Running {
    started_at: Timestamp,
    ends_at: Timestamp,
}

impl Gpus {
    /// So many idle GPUs.
    #[must_use]
    pub fn new(places: usize) -> Self {
        Self {
            places: (0..places).map(|_| Place::default()).collect(),
            timers: IndexedHeap::default(),
            events: VecDeque::new(),
        }
    }

    /// Where a GPU stands.
    #[must_use]
    pub fn place(&self, gpu: GpuId) -> usize {
        gpu.0 as usize % self.places.len()
    }

    /// A batch for the GPU that it names. `duration` tells how long a batch runs that starts then.
    pub fn handle_batch(
        &mut self,
        now: Timestamp,
        batch: Batch<Request>,
        duration: &mut dyn FnMut(Timestamp, &Batch<Request>) -> Span,
    ) {
        let place = self.place(batch.gpu);
        self.places[place].batches.push_back((now, batch));
        self.advance(now, place, duration);
    }

    /// Ends and starts what is due.
    pub fn handle_timeout(&mut self, now: Timestamp, duration: &mut dyn FnMut(Timestamp, &Batch<Request>) -> Span) {
        while let Some((at, place)) = self.timers.peek()
            && at <= now
        {
            self.advance(now, place as usize, duration);
        }
    }

    /// When [`Self::handle_timeout`] must be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.timers.peek().map(|(at, _)| at)
    }

    /// When the first GPU has run all that it was given, if each batch takes its `latency`.
    #[must_use]
    pub fn frees_at(&self, now: Timestamp, latency: &dyn Fn(&Batch<Request>) -> Span) -> Timestamp {
        let of_place = |place: &Place| {
            let (running, mut free_at) = (usize::from(place.running.is_some()), place.idle_since.max(now));
            free_at = place.running.map_or(free_at, |running| running.ends_at);
            place.batches.iter().skip(running).fold(free_at, |at, (_, batch)| at.max(batch.exec_at) + latency(batch))
        };
        self.places.iter().map(of_place).min().unwrap_or(Timestamp::NEVER)
    }

    /// What happened next.
    pub fn poll_event(&mut self) -> Option<GpuEvent> {
        self.events.pop_front()
    }

    /// Kills what a GPU runs, or is about to run. Returns the batch with its start, if there is one.
    pub fn handle_preempt(&mut self, now: Timestamp, gpu: GpuId) -> Option<(Batch<Request>, Option<Timestamp>)> {
        let place = self.place(gpu);
        let (_, batch) = self.places[place].batches.pop_front()?;
        self.timers.remove(place as u32);
        self.places[place].idle_since = now;
        Some((batch, self.places[place].running.take().map(|running| running.started_at)))
    }

    /// A GPU dies. Returns its batches, with the start of that which ran.
    pub fn handle_failure(&mut self, gpu: GpuId) -> Vec<(Batch<Request>, Option<Timestamp>)> {
        let place = self.place(gpu);
        self.timers.remove(place as u32);
        let mut started_at = self.places[place].running.take().map(|running| running.started_at);
        // The GPU that takes its place has run nothing.
        self.places[place].idle_since = Timestamp::ZERO;
        self.places[place].batches.drain(..).map(|(_, batch)| (batch, started_at.take())).collect()
    }

    /// Ends the batch that runs if it is time, then starts the next one if it is time.
    fn advance(&mut self, now: Timestamp, index: usize, duration: &mut dyn FnMut(Timestamp, &Batch<Request>) -> Span) {
        let place = &mut self.places[index];
        if let Some(Running { started_at, ends_at: finished_at }) =
            place.running.filter(|running| running.ends_at <= now)
        {
            place.running = None;
            place.idle_since = finished_at;
            let (_, batch) = place.batches.pop_front().expect("it ran");
            self.events.push_back(GpuEvent::Finished { batch, started_at, finished_at });
        }
        while place.running.is_none()
            && let Some((came_at, batch)) = place.batches.front()
            && batch.exec_at <= now
        {
            let started_at = batch.exec_at.max(*came_at).max(place.idle_since);
            if started_at <= batch.latest {
                place.running = Some(Running { started_at, ends_at: started_at + duration(started_at, batch) });
            } else {
                let (_, batch) = place.batches.pop_front().expect("it is in front");
                self.events.push_back(GpuEvent::Rejected { batch, rejected_at: started_at });
            }
        }
        match (place.running, place.batches.front()) {
            (Some(running), _) => self.timers.set(index as u32, running.ends_at),
            (None, Some((_, batch))) => self.timers.set(index as u32, batch.exec_at),
            (None, None) => self.timers.remove(index as u32),
        }
    }
}

#[cfg(test)]
mod tests {
    use proto::{ModelId, TaskId};
    use scheduler::task_queue::Queued;

    use super::*;

    fn batch(task: u64, exec_at: i64, latest: i64) -> Batch<Request> {
        let key = Queued {
            id: TaskId(task),
            deadline: Timestamp(latest + 10),
            queued_at: Timestamp(0),
            priority: 0,
            application: 0,
            length: 0,
        };
        let (exec_at, latest) = (Timestamp(exec_at), Timestamp(latest));
        let request = Request::new(Timestamp(0), ModelId(0), 0);
        Batch {
            model: ModelId(0),
            gpu: GpuId(3),
            due_at: exec_at,
            timer_at: exec_at,
            exec_at,
            latest,
            execution: Span(10),
            tasks: vec![(key, request)],
        }
    }

    fn finished(batch: Batch<Request>, started_at: i64, finished_at: i64) -> Option<GpuEvent> {
        Some(GpuEvent::Finished { batch, started_at: Timestamp(started_at), finished_at: Timestamp(finished_at) })
    }

    #[test]
    fn batches_run_in_turn_within_their_windows() {
        let mut gpus = Gpus::new(2);
        let ten = &mut |_: Timestamp, _: &Batch<Request>| Span(10);
        gpus.handle_batch(Timestamp(0), batch(1, 5, 9), ten);
        gpus.handle_batch(Timestamp(0), batch(2, 6, 15), ten);
        gpus.handle_batch(Timestamp(0), batch(3, 6, 20), ten);
        gpus.handle_batch(Timestamp(0), batch(4, 6, 30), ten);
        let mut events = Vec::new();
        while let Some(at) = gpus.poll_timeout() {
            gpus.handle_timeout(at, ten);
            events.extend(std::iter::from_fn(|| gpus.poll_event()));
        }
        let expected = [
            finished(batch(1, 5, 9), 5, 15).unwrap(),
            finished(batch(2, 6, 15), 15, 25).unwrap(),
            GpuEvent::Rejected { batch: batch(3, 6, 20), rejected_at: Timestamp(25) },
            finished(batch(4, 6, 30), 25, 35).unwrap(),
        ];
        assert_eq!(events, expected);
    }

    #[test]
    fn what_is_noticed_late_happened_when_it_was_due() {
        let mut gpus = Gpus::new(1);
        let ten = &mut |_: Timestamp, _: &Batch<Request>| Span(10);
        gpus.handle_batch(Timestamp(0), batch(1, 5, 9), ten);
        gpus.handle_batch(Timestamp(0), batch(2, 5, 15), ten);
        // Both should have run by now; the third comes late itself.
        gpus.handle_timeout(Timestamp(40), ten);
        gpus.handle_batch(Timestamp(40), batch(3, 30, 50), ten);
        gpus.handle_timeout(Timestamp(50), ten);
        let events: Vec<_> = std::iter::from_fn(|| gpus.poll_event()).collect();
        let expected = [
            finished(batch(1, 5, 9), 5, 15).unwrap(),
            finished(batch(2, 5, 15), 15, 25).unwrap(),
            finished(batch(3, 30, 50), 40, 50).unwrap(),
        ];
        assert_eq!(events, expected);
    }

    #[test]
    fn a_killed_batch_makes_room_and_a_dead_gpu_gives_all_back() {
        let mut gpus = Gpus::new(2);
        let ten = &mut |_: Timestamp, _: &Batch<Request>| Span(10);
        assert_eq!(gpus.handle_preempt(Timestamp(0), GpuId(3)), None);
        gpus.handle_batch(Timestamp(0), batch(1, 0, 9), ten);
        assert_eq!(gpus.handle_preempt(Timestamp(1), GpuId(3)), Some((batch(1, 0, 9), Some(Timestamp(0)))));
        // One that is still waiting for its time is not run before the one that replaces it.
        gpus.handle_batch(Timestamp(1), batch(5, 3, 9), ten);
        assert_eq!(gpus.handle_preempt(Timestamp(2), GpuId(3)), Some((batch(5, 3, 9), None)));
        gpus.handle_batch(Timestamp(4), batch(2, 4, 9), ten);
        gpus.handle_timeout(Timestamp(14), ten);
        assert_eq!(gpus.poll_event(), finished(batch(2, 4, 9), 4, 14));
        gpus.handle_batch(Timestamp(20), batch(3, 20, 29), ten);
        gpus.handle_batch(Timestamp(20), batch(4, 30, 39), ten);
        let lost = [(batch(3, 20, 29), Some(Timestamp(20))), (batch(4, 30, 39), None)];
        assert_eq!(gpus.handle_failure(GpuId(3)), lost);
        assert_eq!(gpus.poll_timeout(), None);
    }
}
