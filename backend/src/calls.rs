//! Models that ask other models while they run a batch: how others are asked, and who waits for whom.
//!
//! Such a model has no GPU's turn, which the models that it asks need: it runs on *lanes* of its own
//! ([`crate::config::Config::lanes`]). Still two models must not wait for each other, as each runs a batch at a time.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use proto::Span;
use repository::DataType;

/// Models that wait for each other at once, one for the next.
pub const DEPTH_MAX: usize = 8;

/// Asks models: whoever links this crate has a frontend for that.
pub trait Callee: fmt::Debug + Send + Sync {
    /// Questions are about to come.
    fn prepare(&self) {}

    /// Asks a model. `answered` is told what came of it, once and on any thread, unless what is yielded here is dropped
    /// before: then the question is not to be answered any more.
    fn ask(&self, question: Question, answered: Answered) -> UnderWay;
}

/// What is told of a question that ends.
pub type Answered = Box<dyn FnOnce(Result<Vec<Tensor>, String>) + Send>;

/// Withdraws a question when it is dropped.
pub type UnderWay = Box<dyn Send>;

/// What a model is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The model's, or ensemble's, name.
    pub model: String,
    /// Its version, if it is to be a certain one.
    pub version: Option<String>,
    /// All that it is given.
    pub inputs: Vec<Tensor>,
    /// The latency objective; the model's own if there is none.
    pub objective: Option<Span>,
}

/// A tensor that one model gives another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Of its elements.
    pub datatype: DataType,
    /// With the dimension for tasks, if the model that takes or gives it has one.
    pub shape: Vec<usize>,
    /// Elements in row-major order, little-endian; each string after its length as four bytes.
    pub data: Bytes,
}

/// Which models of a backend wait for which others, and how often.
#[derive(Debug, Clone, Default)]
pub(crate) struct Waits(Arc<Mutex<BTreeMap<String, BTreeMap<String, usize>>>>);

/// One model waits for another until this is dropped.
#[derive(Debug)]
pub(crate) struct Waiting {
    waits: Waits,
    caller: String,
    callee: String,
}

impl Waits {
    /// `caller` is about to wait for `callee`.
    ///
    /// # Errors
    /// If that waits for the caller already, or too many would wait one for the next.
    pub(crate) fn begin(&self, caller: &str, callee: &str) -> Result<Waiting, String> {
        let mut edges = self.lock();
        let is_waited_for = |model: &str| edges.get(model).into_iter().flat_map(BTreeMap::keys);
        // Whom the callee waits for, by how far that is; the graph has no cycle, but several ways to one model.
        let (mut behind, mut front) = (0, BTreeSet::from([callee]));
        while !front.is_empty() {
            if front.contains(caller) {
                return Err(format!("model {caller} calls {callee}, which waits for it: found a cycle, expected none"));
            }
            front = front.into_iter().flat_map(is_waited_for).map(String::as_str).collect();
            behind += 1;
        }
        // And who waits for the caller.
        let (mut ahead, mut front) = (0, BTreeSet::from([caller]));
        while !front.is_empty() {
            let waits_for_any =
                |callees: &BTreeMap<String, usize>| front.iter().any(|model| callees.contains_key(*model));
            let waiting = edges.iter().filter(|(_, callees)| waits_for_any(callees)).map(|(caller, _)| caller.as_str());
            front = waiting.collect();
            ahead += 1;
        }
        let depth = ahead + behind;
        if depth > DEPTH_MAX {
            return Err(format!(
                "model {caller} calls {callee}: found {depth} models that wait one for the next, expected at most \
                 {DEPTH_MAX}"
            ));
        }
        *edges.entry(caller.to_owned()).or_default().entry(callee.to_owned()).or_default() += 1;
        drop(edges);
        Ok(Waiting { waits: self.clone(), caller: caller.to_owned(), callee: callee.to_owned() })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, BTreeMap<String, usize>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut edges = self.waits.lock();
        let Some(callees) = edges.get_mut(&self.caller) else { return };
        if let Some(count) = callees.get_mut(&self.callee) {
            *count -= 1;
            if *count == 0 {
                callees.remove(&self.callee);
            }
        }
        if callees.is_empty() {
            edges.remove(&self.caller);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn who_waits_for_itself_is_refused_by_name() {
        let waits = Waits::default();
        let found = waits.begin("a", "a").unwrap_err();
        assert_eq!(found, "model a calls a, which waits for it: found a cycle, expected none");
        let first = waits.begin("a", "b").unwrap();
        let second = waits.begin("a", "b").unwrap();
        let _third = waits.begin("b", "c").unwrap();
        assert!(waits.begin("c", "a").unwrap_err().contains("model c calls a, which waits for it"));
        drop(first);
        assert!(waits.begin("c", "a").is_err(), "another call of a is under way");
        drop(second);
        waits.begin("c", "a").unwrap();
    }

    #[test]
    fn no_more_wait_one_for_the_next_than_may() {
        let waits = Waits::default();
        let names: Vec<String> = (0..=DEPTH_MAX).map(|depth| format!("m{depth}")).collect();
        // From the middle outwards.
        let mut order: Vec<usize> = (0..DEPTH_MAX).collect();
        order.swap(0, 4);
        let begin = |at: usize| waits.begin(&names[at], &names[at + 1]);
        let mut begun: Vec<Waiting> = order[..DEPTH_MAX - 1].iter().map(|&at| begin(at).unwrap()).collect();
        let found = begin(order[DEPTH_MAX - 1]).unwrap_err();
        assert!(found.contains("found 9 models that wait one for the next, expected at most 8"), "{found}");
        begun.pop();
        begin(order[DEPTH_MAX - 1]).unwrap();
    }

    proptest! {
        /// Whatever is let in has no cycle, and nothing is refused that would have none and be short enough.
        #[test]
        fn what_is_let_in_never_waits_for_itself(
            calls in proptest::collection::vec((0..6usize, 0..6usize, any::<bool>()), 0..40),
        ) {
            let (waits, names) = (Waits::default(), ["a", "b", "c", "d", "e", "f"]);
            let mut held: Vec<(usize, usize, Waiting)> = Vec::new();
            for (caller, callee, ends_one) in calls {
                if ends_one && !held.is_empty() {
                    held.remove(caller % held.len());
                }
                // Floyd and Warshall's way, over six models.
                let mut reaches = [[false; 6]; 6];
                held.iter().for_each(|&(from, to, _)| reaches[from][to] = true);
                for (via, from, to) in (0..216).map(|at| (at / 36, at / 6 % 6, at % 6)) {
                    reaches[from][to] |= reaches[from][via] && reaches[via][to];
                }
                let expected = caller != callee && !reaches[callee][caller];
                let found = waits.begin(names[caller], names[callee]);
                prop_assert_eq!(found.is_ok(), expected);
                held.extend(found.ok().map(|waiting| (caller, callee, waiting)));
            }
            held.clear();
            prop_assert!(waits.lock().is_empty());
        }
    }
}
