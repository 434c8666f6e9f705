//! Step 1: what the requests of each client hold in memory, and of all of them: bodies as they come, what these become
//! when they are decompressed, parsed and decoded. It is charged before it is spent. No IO, no clock.
//!
//! One rule shares the whole among clients, whose number it need not know (Choudhury and Hahne, "Dynamic queue length
//! thresholds for shared-memory packet switches", 1998): a client may hold at most [`SHARE_OF_FREE`] times what is
//! free. Alone it gets four fifths of the whole; n that want all get equal shares, and as much as a quarter of one of
//! these stays free, so that somebody who holds nothing finds room while those who hold more find none.
//!
//! An [`Account`] is a client's, a [`Charge`] a request's, or one of its parts': dropping the last clone gives back
//! what it holds. Charges grow on the threads that decode, so counts are atomic; two that grow at the same instant may
//! both be refused what one of them could have had.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use frontend::slots::SHARE_OF_FREE;
use thiserror::Error;

/// Accounts that nobody uses are looked for when there are so many, and when there are twice as many as were left.
const ACCOUNTS_LOOKED_THROUGH: usize = 64;

/// There is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NoRoom {
    /// This client holds too much.
    #[error(
        "found {wanted} bytes beside the {held} that the requests of this client hold, expected less: it may hold {} \
         times what is free of bodies_bytes_max ({max}); send less at once",
        SHARE_OF_FREE
    )]
    Client {
        /// What it wanted in bytes.
        wanted: usize,
        /// What it held.
        held: usize,
        /// The whole.
        max: usize,
    },
    /// All clients together do.
    #[error(
        "found {wanted} bytes beside the {held} that all requests hold, which would exceed bodies_bytes_max ({max}); \
         send less at once"
    )]
    All {
        /// What was wanted in bytes.
        wanted: usize,
        /// What all held.
        held: usize,
        /// The whole.
        max: usize,
    },
}

/// The whole, and who has accounts.
#[derive(Debug)]
pub struct Budget<C> {
    whole: Arc<Whole>,
    accounts: BTreeMap<C, Account>,
    accounts_max: usize,
    next_account: u64,
}

/// Assigned by the budget when a client comes, again after a while without requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct AccountId(u64);

impl From<AccountId> for frontend::slots::Client {
    fn from(AccountId(number): AccountId) -> Self {
        Self(number)
    }
}

/// What one client's requests hold.
#[derive(Debug, Clone)]
pub struct Account(Arc<Held>);

/// What one request holds, or a part of it; given back when the last clone is dropped, or before.
#[derive(Debug, Clone)]
pub struct Charge(Arc<ChargeInner>);

#[derive(Debug)]
struct Whole {
    max: AtomicUsize,
    held: AtomicUsize,
    /// The most that was held since [`Budget::take_peak`].
    peak: AtomicUsize,
}

#[derive(Debug)]
struct Held {
    id: AccountId,
    whole: Arc<Whole>,
    held: AtomicUsize,
}

#[derive(Debug)]
struct ChargeInner {
    account: Account,
    held: AtomicUsize,
}

impl<C: Ord> Budget<C> {
    /// All clients together may hold so many bytes.
    #[must_use]
    pub fn new(max: usize) -> Self {
        let whole = Whole { max: AtomicUsize::new(max), held: AtomicUsize::new(0), peak: AtomicUsize::new(0) };
        let whole = Arc::new(whole);
        Self { whole, accounts: BTreeMap::new(), accounts_max: ACCOUNTS_LOOKED_THROUGH, next_account: 0 }
    }

    /// A client's account. There are at most twice as many as clients with requests, and a few.
    pub fn account(&mut self, client: C) -> Account {
        if let Some(account) = self.accounts.get(&client) {
            return account.clone();
        }
        if self.accounts.len() >= self.accounts_max {
            self.accounts.retain(|_, account| Arc::strong_count(&account.0) > 1);
            self.accounts_max = ACCOUNTS_LOOKED_THROUGH.max(2 * self.accounts.len());
        }
        self.next_account += 1;
        let (id, whole) = (AccountId(self.next_account), Arc::clone(&self.whole));
        let account = Account(Arc::new(Held { id, whole, held: AtomicUsize::new(0) }));
        self.accounts.insert(client, account.clone());
        account
    }

    /// All clients together may hold so many bytes from now on; who holds more gives back as before.
    pub fn set_max(&self, max: usize) {
        self.whole.max.store(max, Relaxed);
    }

    /// Bytes that all clients hold.
    #[must_use]
    pub fn held(&self) -> usize {
        self.whole.held.load(Relaxed)
    }

    /// The most that all clients held at once since the last call.
    #[must_use]
    pub fn take_peak(&self) -> usize {
        self.whole.peak.swap(self.held(), Relaxed)
    }
}

impl Account {
    /// Of what is no client's, whose numbers begin with 1: with a whole of its own.
    #[must_use]
    pub fn of_nobody(max: usize) -> Self {
        let whole = Arc::clone(&Budget::<()>::new(max).whole);
        Self(Arc::new(Held { id: AccountId(0), whole, held: AtomicUsize::new(0) }))
    }

    /// A charge that holds nothing yet.
    #[must_use]
    pub fn charge(&self) -> Charge {
        self.charge_of(0)
    }

    /// Tells clients apart.
    #[must_use]
    pub fn id(&self) -> AccountId {
        self.0.id
    }

    fn charge_of(&self, bytes: usize) -> Charge {
        Charge(Arc::new(ChargeInner { account: self.clone(), held: AtomicUsize::new(bytes) }))
    }

    fn take(&self, bytes: usize) -> Result<(), NoRoom> {
        let Held { whole, held, .. } = &*self.0;
        let own = held.fetch_add(bytes, Relaxed);
        let all = whole.held.fetch_add(bytes, Relaxed);
        let max = whole.max.load(Relaxed);
        let refused = match max.checked_sub(all.saturating_add(bytes)) {
            None => NoRoom::All { wanted: bytes, held: all, max },
            Some(free) if own.saturating_add(bytes) > free.saturating_mul(SHARE_OF_FREE) => {
                NoRoom::Client { wanted: bytes, held: own, max }
            }
            Some(_) => {
                whole.peak.fetch_max(all + bytes, Relaxed);
                return Ok(());
            }
        };
        self.give_back(bytes);
        Err(refused)
    }

    fn give_back(&self, bytes: usize) {
        self.0.held.fetch_sub(bytes, Relaxed);
        self.0.whole.held.fetch_sub(bytes, Relaxed);
    }
}

impl Charge {
    /// Holds more.
    ///
    /// # Errors
    /// If there is no room; what it held, it holds.
    pub fn grow(&self, bytes: usize) -> Result<(), NoRoom> {
        self.0.account.take(bytes)?;
        self.0.held.fetch_add(bytes, Relaxed);
        Ok(())
    }

    /// A charge of its own for something that is needed for a while beside what this one holds.
    ///
    /// # Errors
    /// If there is no room.
    pub fn beside(&self, bytes: usize) -> Result<Self, NoRoom> {
        self.0.account.take(bytes)?;
        Ok(self.0.account.charge_of(bytes))
    }

    /// A part of what it holds as a charge of its own.
    #[must_use]
    pub fn split(&self, bytes: usize) -> Self {
        let left = self.0.held.fetch_update(Relaxed, Relaxed, |held| held.checked_sub(bytes));
        assert!(left.is_ok(), "a part of {bytes} bytes is larger than the charge");
        self.0.account.charge_of(bytes)
    }

    /// Gives everything back: the bytes are in slots now.
    pub fn release(&self) {
        self.0.account.give_back(self.0.held.swap(0, Relaxed));
    }

    /// Bytes that it holds.
    #[must_use]
    pub fn held(&self) -> usize {
        self.0.held.load(Relaxed)
    }

    /// Whose it is.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.0.account
    }
}

impl Drop for ChargeInner {
    fn drop(&mut self) {
        self.account.give_back(*self.held.get_mut());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What each charge holds, added up anew for each question.
    #[derive(Default)]
    struct Naive(Vec<(u8, usize)>);

    impl Naive {
        fn held(&self, of: impl Fn(u8) -> bool) -> usize {
            self.0.iter().filter(|(client, _)| of(*client)).map(|(_, held)| held).sum()
        }

        fn has_room(&self, client: u8, bytes: usize, max: usize) -> bool {
            let all = self.held(|_| true) + bytes;
            all <= max && self.held(|other| other == client) + bytes <= 4 * (max - all)
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Open(u8),
        Grow(prop::sample::Index, usize),
        Beside(prop::sample::Index, usize),
        Split(prop::sample::Index, prop::sample::Index),
        Release(prop::sample::Index),
        Drop(prop::sample::Index),
    }

    fn step() -> impl Strategy<Value = Step> {
        let index = any::<prop::sample::Index>;
        prop_oneof![
            2 => (0..6u8).prop_map(Step::Open),
            6 => (index(), 0..400usize).prop_map(|(at, bytes)| Step::Grow(at, bytes)),
            2 => (index(), 0..400usize).prop_map(|(at, bytes)| Step::Beside(at, bytes)),
            1 => (index(), index()).prop_map(|(at, part)| Step::Split(at, part)),
            1 => index().prop_map(Step::Release),
            2 => index().prop_map(Step::Drop),
        ]
    }

    proptest! {
        #[test]
        fn it_is_as_generous_as_adding_up_says(steps in proptest::collection::vec(step(), 1..200)) {
            const MAX: usize = 1000;
            let mut budget = Budget::new(MAX);
            let (mut charges, mut naive) = (Vec::<Charge>::new(), Naive::default());
            for step in steps {
                match step {
                    Step::Open(client) => {
                        charges.push(budget.account(client).charge());
                        naive.0.push((client, 0));
                    }
                    _ if charges.is_empty() => {}
                    Step::Grow(at, bytes) => {
                        let at = at.index(charges.len());
                        let has_room = naive.has_room(naive.0[at].0, bytes, MAX);
                        prop_assert_eq!(charges[at].grow(bytes).is_ok(), has_room);
                        naive.0[at].1 += if has_room { bytes } else { 0 };
                    }
                    Step::Beside(at, bytes) => {
                        let at = at.index(charges.len());
                        let client = naive.0[at].0;
                        let has_room = naive.has_room(client, bytes, MAX);
                        let beside = charges[at].beside(bytes);
                        prop_assert_eq!(beside.is_ok(), has_room);
                        charges.extend(beside);
                        naive.0.extend(has_room.then_some((client, bytes)));
                    }
                    Step::Split(at, part) => {
                        let at = at.index(charges.len());
                        let part = part.index(naive.0[at].1 + 1);
                        charges.push(charges[at].split(part));
                        naive.0[at].1 -= part;
                        naive.0.push((naive.0[at].0, part));
                    }
                    Step::Release(at) => {
                        let at = at.index(charges.len());
                        charges[at].release();
                        naive.0[at].1 = 0;
                    }
                    Step::Drop(at) => {
                        let at = at.index(charges.len());
                        charges.swap_remove(at);
                        naive.0.swap_remove(at);
                    }
                }
                prop_assert_eq!(budget.held(), naive.held(|_| true));
                prop_assert!(charges.iter().zip(&naive.0).all(|(charge, (_, held))| charge.held() == *held));
            }
            charges.clear();
            prop_assert_eq!(budget.held(), 0);
        }
    }

    /// Takes by tens until it is refused.
    fn fill(account: &Account) -> Charge {
        let charge = account.charge();
        while charge.grow(10).is_ok() {}
        charge
    }

    #[test]
    fn one_alone_gets_most_and_who_comes_later_still_gets_room() {
        let mut budget = Budget::new(10_000);
        let [greedy, second, third] = [1, 2, 3].map(|client| budget.account(client));
        let all = fill(&greedy);
        assert_eq!(all.held(), 8000, "four fifths");
        assert_eq!(fill(&second).held(), 1600, "four fifths of what is left");
        let held = fill(&second);
        assert!(fill(&third).held() > 300);
        // Who holds more finds nothing before who holds less has as much.
        let part = all.split(4000);
        drop(part);
        assert!(greedy.charge().grow(10).is_ok());
        let more = fill(&second);
        assert!(held.held() + more.held() > 3500, "{} + {}", held.held(), more.held());
        let found = greedy.charge().grow(1000).unwrap_err();
        assert_eq!(found, NoRoom::Client { wanted: 1000, held: 4000, max: 10_000 });
        assert!(found.to_string().contains("bodies_bytes_max (10000)"), "{found}");
        assert!(matches!(third.charge().grow(9000), Err(NoRoom::All { wanted: 9000, .. })));
    }

    #[test]
    fn the_peak_is_what_was_held_at_once_since_it_was_asked_for() {
        let mut budget = Budget::new(1000);
        let charges = [1, 2].map(|client| budget.account(client).charge());
        charges.iter().for_each(|charge| charge.grow(100).unwrap());
        assert!(charges[0].grow(1000).is_err(), "what is refused was never held");
        charges[0].release();
        assert_eq!([budget.take_peak(), budget.take_peak()], [200, 100]);
        charges[0].grow(50).unwrap();
        drop(charges);
        assert_eq!([budget.take_peak(), budget.take_peak()], [150, 0]);
    }

    #[test]
    fn accounts_that_nobody_uses_go() {
        let mut budget = Budget::new(1 << 20);
        let held = budget.account(0).charge();
        held.grow(7).unwrap();
        for client in 1..10_000 {
            budget.account(client).charge().grow(1).unwrap();
        }
        assert!(budget.accounts.len() <= ACCOUNTS_LOOKED_THROUGH, "{}", budget.accounts.len());
        assert_eq!(budget.account(0).id(), held.account().id(), "one with a request stays");
        assert_eq!(budget.held(), 7);
    }
}
