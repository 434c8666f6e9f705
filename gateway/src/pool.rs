//! Step 1: what clients sent is taken apart beside the thread that moves packets, if that may take more than about a
//! millisecond: large bodies are decompressed and parsed here, and all pictures decoded.
//!
//! A bounded number of threads serves one client after another, each in the order in which its requests came, so that
//! nobody waits for all that somebody else has sent. What waits is charged to its client (`budget`) and bounded for
//! each.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
};

use frontend::InferError;
use tokio::sync::oneshot;

use crate::budget::{AccountId, Charge};

/// What is smaller is taken apart at once: that takes less than being handed over twice, and not a millisecond.
pub const AT_ONCE_BYTES_MAX: usize = 64 << 10;
/// Of one client, for each thread.
const WAITING_PER_THREAD: usize = 16;

static THREADS: LazyLock<usize> =
    LazyLock::new(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));

/// Threads that take apart what clients sent.
#[derive(Debug, Clone)]
pub struct Pool(Arc<Mutex<Turns<oneshot::Sender<Turn>>>>);

/// The right to occupy a thread; dropping it passes it on.
#[derive(Debug)]
struct Turn(Option<Pool>);

/// Whose turn it is.
#[derive(Debug)]
struct Turns<W> {
    running: usize,
    running_max: usize,
    /// Of each client.
    waiting_max: usize,
    /// By client; none is empty.
    waiting: BTreeMap<AccountId, VecDeque<W>>,
    /// Clients of which something waits, next first.
    round: VecDeque<AccountId>,
}

impl Default for Pool {
    /// As many threads as there are cores.
    fn default() -> Self {
        Self::new(*THREADS, WAITING_PER_THREAD * *THREADS)
    }
}

impl Pool {
    fn new(running_max: usize, waiting_max: usize) -> Self {
        let (waiting, round) = (BTreeMap::new(), VecDeque::new());
        Self(Arc::new(Mutex::new(Turns { running: 0, running_max, waiting_max, waiting, round })))
    }

    /// Does this beside the caller's thread, when it is the turn of the client that is charged. Work that has begun
    /// goes on to its end even if nobody waits for it any more, so it must hold what it is charged.
    ///
    /// # Errors
    /// If too much of this client waits.
    pub async fn run<T: Send + 'static>(
        &self,
        charge: &Charge,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, InferError> {
        let turn = self.turn(charge.account().id()).await?;
        let work = move || {
            let _turn = turn;
            work()
        };
        let failed = |_| InferError::Invalid("the request cannot be used: its decoder failed".to_owned());
        tokio::task::spawn_blocking(work).await.map_err(failed)
    }

    /// Whether a thread has nothing to do: whoever comes now is served at once.
    #[must_use]
    pub fn is_free(&self) -> bool {
        let turns = self.lock();
        turns.running < turns.running_max
    }

    async fn turn(&self, client: AccountId) -> Result<Turn, InferError> {
        let (give, turn) = oneshot::channel();
        let (arrived, max) = {
            let mut turns = self.lock();
            (turns.handle_arrival(client, give), turns.waiting_max)
        };
        match arrived {
            Ok(None) => Ok(turn.await.expect("who waits gets a turn")),
            Ok(Some(_)) => Ok(Turn(Some(self.clone()))),
            Err(_) => Err(InferError::DecodersFull { waiting_max: max }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Turns<oneshot::Sender<Turn>>> {
        // Nothing in there panics halfway.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(pool) = self.0.take() else { return };
        loop {
            let next = pool.lock().handle_end();
            let Some(next) = next else { return };
            match next.send(Self(Some(pool.clone()))) {
                Ok(()) => return,
                // Who does not wait any more gives it back.
                Err(mut turn) => turn.0 = None,
            }
        }
    }
}

impl<W> Turns<W> {
    /// Somebody comes, and gets back what it came with if it is its turn.
    ///
    /// # Errors
    /// If too much of it waits.
    fn handle_arrival(&mut self, client: AccountId, waiter: W) -> Result<Option<W>, W> {
        if self.running < self.running_max {
            self.running += 1;
            return Ok(Some(waiter));
        }
        let waiting = self.waiting.entry(client).or_default();
        if waiting.len() >= self.waiting_max {
            return Err(waiter);
        }
        if waiting.is_empty() {
            self.round.push_back(client);
        }
        waiting.push_back(waiter);
        Ok(None)
    }

    /// A turn has ended: whose is the next?
    fn handle_end(&mut self) -> Option<W> {
        let Some(client) = self.round.pop_front() else {
            self.running -= 1;
            return None;
        };
        let waiting = self.waiting.get_mut(&client).expect("who is in the round waits");
        let next = waiting.pop_front();
        if waiting.is_empty() {
            self.waiting.remove(&client);
        } else {
            self.round.push_back(client);
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Budget;

    #[test]
    fn clients_take_turns_each_in_its_own_order() {
        let mut budget = Budget::new(100);
        let [a, b, c] = ["a", "b", "c"].map(|name| budget.account(name).id());
        let (waiting, round) = (BTreeMap::new(), VecDeque::new());
        let mut turns = Turns { running: 0, running_max: 2, waiting_max: 3, waiting, round };
        assert_eq!(turns.handle_arrival(a, "a1"), Ok(Some("a1")));
        assert_eq!(turns.handle_arrival(a, "a2"), Ok(Some("a2")));
        for (client, name) in [(a, "a3"), (a, "a4"), (a, "a5"), (b, "b1"), (b, "b2"), (c, "c1")] {
            assert_eq!(turns.handle_arrival(client, name), Ok(None));
        }
        assert_eq!(turns.handle_arrival(a, "a6"), Err("a6"), "three of it wait");
        let order: Vec<_> = std::iter::from_fn(|| turns.handle_end()).collect();
        assert_eq!(order, ["a3", "b1", "c1", "a4", "b2", "a5"]);
        assert_eq!((turns.running, turns.handle_end(), turns.running), (1, None, 0));
        assert!(turns.waiting.is_empty());
    }

    #[tokio::test]
    async fn a_turn_that_nobody_waits_for_is_passed_on() {
        let pool = Pool::new(1, 1);
        let mut budget = Budget::new(100);
        let [first, second] = [1, 2].map(|client| budget.account(client).charge());
        let held = pool.turn(first.account().id()).await.unwrap();
        let mut given_up = Box::pin(pool.run(&first, || unreachable!("nobody waits for it")));
        assert!(futures_poll(given_up.as_mut()).is_none());
        assert!(matches!(pool.run(&first, || ()).await, Err(InferError::DecodersFull { waiting_max: 1 })));
        let mut waits = Box::pin(pool.run(&second, || 7));
        assert!(futures_poll(waits.as_mut()).is_none());
        drop(given_up);
        drop(held);
        assert_eq!(waits.await, Ok(7));
        assert!(pool.run(&first, || panic!("a decoder's bug")).await.is_err());
        assert_eq!(pool.run(&first, || 8).await, Ok(8));
        assert_eq!(pool.lock().running, 0);
    }

    fn futures_poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Option<T> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match future.poll(&mut context) {
            std::task::Poll::Ready(value) => Some(value),
            std::task::Poll::Pending => None,
        }
    }
}
