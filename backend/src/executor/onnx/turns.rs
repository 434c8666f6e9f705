//! Executions that are under way, so that one which was given up can be ended.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::error::ExecutorError;

/// An execution: a batch, however many runs of the graph it takes.
pub(super) struct Turn {
    /// The GPU that it is for, or the thread that stands for one; `None` if it does not matter.
    pub(super) gpu: Option<usize>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_over: bool,
    /// Ends the run that is under way.
    end: Option<Box<dyn Fn() + Send>>,
}

impl Turn {
    /// Whether it was given up: no run begins any more.
    pub(super) fn is_over(&self) -> bool {
        lock(&self.state).is_over
    }

    /// Runs what `end` can end, from another thread.
    ///
    /// # Errors
    /// Those of `run`, or if the execution was given up.
    pub(super) fn run<T>(
        &self,
        end: impl Fn() + Send + 'static,
        run: impl FnOnce() -> Result<T, ExecutorError>,
    ) -> Result<T, ExecutorError> {
        let mut state = lock(&self.state);
        if state.is_over {
            return Err(ExecutorError("it was given up".to_owned()));
        }
        state.end = Some(Box::new(end));
        drop(state);
        let result = run();
        lock(&self.state).end = None;
        result
    }

    fn give_up(&self) {
        let mut state = lock(&self.state);
        state.is_over = true;
        if let Some(end) = &state.end {
            end();
        }
    }
}

/// The executions of a model.
#[derive(Default)]
pub(super) struct Turns(Mutex<Begun>);

#[derive(Default)]
struct Begun {
    count: u64,
    /// Those that have not ended, in the order of their begin.
    turns: BTreeMap<u64, Arc<Turn>>,
}

impl Turns {
    /// Executes something.
    pub(super) fn take<T>(&self, gpu: Option<usize>, execute: impl FnOnce(&Turn) -> T) -> T {
        let turn = Arc::new(Turn { gpu, state: Mutex::default() });
        let mut begun = lock(&self.0);
        begun.count += 1;
        let number = begun.count;
        begun.turns.insert(number, Arc::clone(&turn));
        drop(begun);
        let _ended = Ended(self, number);
        execute(&turn)
    }

    /// Gives up the execution for this GPU that has been under way for longest. Those for others go on: they are as
    /// old as their own batches.
    pub(super) fn interrupt(&self, gpu: usize) {
        let mut begun = lock(&self.0);
        let longest = begun.turns.iter().find(|(_, turn)| turn.gpu == Some(gpu)).map(|(&number, _)| number);
        let turn = longest.and_then(|number| begun.turns.remove(&number));
        drop(begun);
        if let Some(turn) = turn {
            turn.give_up();
        }
    }
}

/// Ends an execution, also if it panics.
struct Ended<'a>(&'a Turns, u64);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        lock(&self.0.0).turns.remove(&self.1);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        sync::atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    #[test]
    fn the_oldest_execution_of_a_gpu_is_ended_once_and_begins_nothing_more() {
        let (turns, ended) = (Turns::default(), Arc::new(AtomicUsize::new(0)));
        let run = |turn: &Turn| {
            let ended = Arc::clone(&ended);
            turn.run(
                move || {
                    ended.fetch_add(1, Ordering::Relaxed);
                },
                || {
                    turns.interrupt(1);
                    Ok(())
                },
            )
        };
        turns.interrupt(1);
        turns.take(Some(1), |oldest| {
            turns.take(Some(1), |other| {
                assert!(run(other).is_ok(), "it was the oldest that was given up");
                assert_eq!((oldest.is_over(), other.is_over(), ended.load(Ordering::Relaxed)), (true, false, 0));
                assert!(run(oldest).unwrap_err().to_string().contains("it was given up"));
                assert!(run(other).is_ok() && other.is_over(), "now it is the oldest");
                assert_eq!(ended.load(Ordering::Relaxed), 1);
            });
        });
        let elsewhere = turns.take(Some(0), |elsewhere| {
            turns.take(None, |nowhere| {
                turns.take(Some(1), |hangs| {
                    assert!(run(hangs).is_ok() && hangs.is_over());
                    [elsewhere.is_over(), nowhere.is_over()]
                })
            })
        });
        assert_eq!(elsewhere, [false; 2], "what another GPU executes goes on, though it is older");
        let panicked = catch_unwind(AssertUnwindSafe(|| turns.take(None, |_| panic!("as models do"))));
        assert!(panicked.is_err() && lock(&turns.0).turns.is_empty());
    }
}
