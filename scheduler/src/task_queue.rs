//! Step 4: a model's queue of tasks, nearest deadline first. Those without an objective are in another one, where they
//! are in the order of their arrival.
//!
//! One model mostly has one SLO, so deadlines arrive in order and the queue is a ring; a task that is out of order is
//! put in its place by a binary search. What policies look at (deadline, arrival) and what only rides along (payload)
//! stand in two rings, so that a policy's scan stays within few cache lines and knows nothing of the payload's type.

use std::{collections::VecDeque, ops::Range};

use proto::{ids::TaskId, time::Timestamp};

use crate::task::Task;

/// What policies see of a queued task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Queued {
    /// The task.
    pub id: TaskId,
    /// As [`Task::deadline`](crate::Task::deadline).
    pub deadline: Timestamp,
    /// When the ModelThread took it in.
    pub queued_at: Timestamp,
    /// As [`Task::priority`](crate::Task::priority).
    pub priority: u8,
    /// As [`Task::application`](crate::Task::application).
    pub application: u8,
    /// As [`Task::length`](crate::Task::length).
    pub length: u32,
}

impl Queued {
    /// A task that is queued now, and its payload.
    pub(crate) fn of<P>(now: Timestamp, task: Task<P>) -> (Self, P) {
        let Task { id, deadline, priority, application, length, payload } = task;
        (Self { id, deadline, queued_at: now, priority, application, length }, payload)
    }

    /// The task as it came, with its payload.
    pub(crate) fn with<P>(self, payload: P) -> Task<P> {
        let Self { id, deadline, priority, application, length, .. } = self;
        Task { id, deadline, priority, application, length, payload }
    }
}

/// Tasks by deadline; those with the same deadline in the order of their arrival.
#[derive(Debug)]
pub struct TaskQueue<P> {
    keys: VecDeque<Queued>,
    payloads: VecDeque<P>,
    length_max: usize,
    /// The smallest and the largest priority of the tasks that came since the queue was empty.
    priorities: (u8, u8),
}

impl<P> TaskQueue<P> {
    /// An empty queue that holds at most `length_max` tasks.
    #[must_use]
    pub fn new(length_max: usize) -> Self {
        Self { keys: VecDeque::new(), payloads: VecDeque::new(), length_max, priorities: (0, 0) }
    }

    /// Queues a task.
    ///
    /// # Errors
    /// Gives the payload back if the queue is full.
    pub fn push(&mut self, key: Queued, payload: P) -> Result<(), P> {
        if self.keys.len() >= self.length_max {
            return Err(payload);
        }
        let (least, most) = if self.keys.is_empty() { (key.priority, key.priority) } else { self.priorities };
        self.priorities = (least.min(key.priority), most.max(key.priority));
        if self.keys.back().is_none_or(|last| last.deadline <= key.deadline) {
            self.keys.push_back(key);
            self.payloads.push_back(payload);
        } else {
            let position = self.keys.partition_point(|other| other.deadline <= key.deadline);
            self.keys.insert(position, key);
            self.payloads.insert(position, payload);
        }
        Ok(())
    }

    /// Takes the first task out.
    pub fn pop(&mut self) -> Option<(Queued, P)> {
        Some((self.keys.pop_front()?, self.payloads.pop_front()?))
    }

    /// Takes a run of tasks out.
    ///
    /// # Panics
    /// If the queue is shorter.
    pub fn take(&mut self, tasks: Range<usize>) -> Vec<(Queued, P)> {
        let keys = self.keys.drain(tasks.clone());
        keys.zip(self.payloads.drain(tasks)).collect()
    }

    /// Whether tasks may wait that are not equally important.
    #[must_use]
    pub fn has_priorities(&self) -> bool {
        self.priorities.0 < self.priorities.1
    }

    /// How many tasks of this priority wait. A scan only where others of another one may wait, too.
    #[must_use]
    pub fn length_of(&self, priority: u8) -> usize {
        match self.priorities {
            (least, most) if least == most => {
                if least == priority {
                    self.keys.len()
                } else {
                    0
                }
            }
            _ => self.keys.iter().filter(|key| key.priority == priority).count(),
        }
    }

    /// Takes out the least important task if it is less important than `priority`; the one with the farthest deadline,
    /// as if it had come last. A scan: for queues that are full.
    pub fn take_below(&mut self, priority: u8) -> Option<(Queued, P)> {
        if priority >= self.priorities.1 {
            return None;
        }
        let least = (0..self.keys.len()).max_by_key(|&at| (self.keys[at].priority, at))?;
        if self.keys[least].priority <= priority {
            return None;
        }
        Some((self.keys.remove(least)?, self.payloads.remove(least)?))
    }

    /// Takes out the `size` most important tasks from the `skip`-th on, of equally important ones those with the
    /// nearest deadlines. They come in the order of their deadlines.
    ///
    /// # Panics
    /// If the queue is shorter.
    pub fn take_best(&mut self, skip: usize, size: usize) -> Vec<(Queued, P)> {
        let mut best: Vec<usize> = (skip..self.keys.len()).collect();
        best.sort_by_key(|&at| self.keys[at].priority);
        best.truncate(size);
        best.sort_unstable();
        let mut taken = Vec::with_capacity(size);
        // From the back, so that positions before stay what they are.
        while let Some(at) = best.pop() {
            let key = self.keys.remove(at).expect("it was found there");
            taken.push((key, self.payloads.remove(at).expect("both rings are of one length")));
        }
        taken.reverse();
        taken
    }

    /// Takes the task named `id` out. A scan: hang-ups are rare, an index would cost every task.
    pub fn remove(&mut self, id: TaskId) -> Option<(Queued, P)> {
        let position = self.keys.iter().position(|key| key.id == id)?;
        Some((self.keys.remove(position)?, self.payloads.remove(position)?))
    }

    /// Keeps only tasks that `keep` wants. True if any was thrown away.
    pub fn retain(&mut self, keep: impl Fn(&Queued) -> bool) -> bool {
        let before = self.keys.len();
        let mut keys = self.keys.iter();
        self.payloads.retain(|_| keep(keys.next().expect("both rings are of one length")));
        self.keys.retain(keep);
        self.keys.len() < before
    }

    /// What policies see, nearest deadline first.
    #[must_use]
    pub fn keys(&self) -> &VecDeque<Queued> {
        &self.keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Step {
        Push(i64, u8),
        Pop,
        TakeBelow(u8),
        TakeBest(usize, usize),
        Take(usize, usize),
        Remove(u64),
        KeepEvery(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0i64..20, 0u8..3).prop_map(|(deadline, priority)| Step::Push(deadline, priority)),
            1 => (0u8..3).prop_map(Step::TakeBelow),
            1 => (0usize..6, 0usize..6).prop_map(|(skip, size)| Step::TakeBest(skip, size)),
            2 => Just(Step::Pop),
            1 => (0usize..6, 0usize..6).prop_map(|(skip, size)| Step::Take(skip, size)),
            1 => (0u64..60).prop_map(Step::Remove),
            1 => (2u64..5).prop_map(Step::KeepEvery),
        ]
    }

    proptest! {
        /// The oracle is a list that is stably sorted after every push.
        #[test]
        fn behaves_like_a_sorted_list(steps in proptest::collection::vec(step(), 0..120), length_max in 1usize..20) {
            let mut queue = TaskQueue::new(length_max);
            let mut oracle: Vec<(Queued, u64)> = Vec::new();
            for (serial, step) in (0u64..).zip(steps) {
                match step {
                    Step::Push(deadline, priority) => {
                        let key = Queued {
                            id: TaskId(serial),
                            deadline: Timestamp(deadline),
                            queued_at: Timestamp(serial as i64),
                            priority,
                            application: 0,
                        length: 0,
                        };
                        let accepted = queue.push(key, serial).is_ok();
                        prop_assert_eq!(accepted, oracle.len() < length_max);
                        if accepted {
                            oracle.push((key, serial));
                            oracle.sort_by_key(|(key, _)| key.deadline);
                        }
                    }
                    Step::Pop => {
                        let first = (!oracle.is_empty()).then(|| oracle.remove(0));
                        prop_assert_eq!(queue.pop(), first);
                    }
                    Step::Take(skip, size) => {
                        let skip = skip.min(oracle.len());
                        let tasks = skip..(skip + size).min(oracle.len());
                        prop_assert_eq!(queue.take(tasks.clone()), oracle.drain(tasks).collect::<Vec<_>>());
                    }
                    Step::TakeBelow(priority) => {
                        let least = oracle.iter().map(|(key, _)| key.priority).max().filter(|&least| least > priority);
                        let position = oracle.iter().rposition(|(key, _)| Some(key.priority) == least);
                        prop_assert_eq!(queue.take_below(priority), position.map(|position| oracle.remove(position)));
                    }
                    Step::TakeBest(skip, size) => {
                        let skip = skip.min(oracle.len());
                        let size = size.min(oracle.len() - skip);
                        let mut best = oracle[skip..].to_vec();
                        best.sort_by_key(|(key, _)| key.priority);
                        best.truncate(size);
                        best.sort_by_key(|(key, serial)| (key.deadline, *serial));
                        oracle.retain(|task| !best.contains(task));
                        prop_assert_eq!(queue.take_best(skip, size), best);
                    }
                    Step::Remove(id) => {
                        let position = oracle.iter().position(|(key, _)| key.id == TaskId(id));
                        prop_assert_eq!(queue.remove(TaskId(id)), position.map(|position| oracle.remove(position)));
                    }
                    Step::KeepEvery(nth) => {
                        let before = oracle.len();
                        oracle.retain(|(key, _)| key.id.0 % nth == 0);
                        prop_assert_eq!(queue.retain(|key| key.id.0 % nth == 0), oracle.len() < before);
                    }
                }
                for priority in 0..4 {
                    let of_it = oracle.iter().filter(|(key, _)| key.priority == priority).count();
                    prop_assert_eq!(queue.length_of(priority), of_it);
                }
                let is_mixed = oracle.iter().any(|(key, _)| key.priority != oracle[0].0.priority);
                prop_assert!(queue.has_priorities() || !is_mixed);
                prop_assert!(queue.keys().iter().eq(oracle.iter().map(|(key, _)| key)));
            }
        }
    }
}
