//! Which backends are used and which frontends are served: no batch is sent to where its inputs cannot be read from,
//! and a backend that cannot reach a frontend must not swallow its tasks.
//!
//! Every backend that is used is linked to every frontend that is served. While a link is missing, one of its two ends
//! stays out: the one that misses the larger part of the others; of equals the backend, so that requests wait longer
//! rather than fail. So a frontend that nobody reaches costs only itself, a backend that reaches nobody likewise, and a
//! frontend that breaks its links on purpose keeps out no larger part of the backends than it is of the frontends.
//!
//! A member that has just joined is not to blame yet: it is waited for, and nobody is kept out for its sake.

use std::collections::{BTreeMap, BTreeSet};

use proto::{BackendId, FrontendId};

/// One side's members, and which of them count: those in the set already, and those that had their time to link.
pub(super) type Members<Id> = BTreeMap<Id, bool>;

/// Who takes part.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Reach {
    pub(super) backends: BTreeSet<BackendId>,
    pub(super) frontends: BTreeSet<FrontendId>,
}

impl Reach {
    /// Decides. O(F B) while no link is missing, and that for each member that stays out.
    pub(super) fn of(
        backends: &Members<BackendId>,
        frontends: &Members<FrontendId>,
        is_linked: impl Fn(BackendId, FrontendId) -> bool,
    ) -> Self {
        let mut reach = Self {
            backends: backends.iter().filter_map(|(id, counts)| counts.then_some(*id)).collect(),
            frontends: frontends.iter().filter_map(|(id, counts)| counts.then_some(*id)).collect(),
        };
        while let Some(blamed) = reach.most_missing(&is_linked) {
            match blamed {
                Blamed::Backend(backend) => reach.backends.remove(&backend),
                Blamed::Frontend(frontend) => reach.frontends.remove(&frontend),
            };
        }
        // Who was blamed first may not be missed any more, and newcomers may have linked to everybody. Backends first:
        // a newcomer on the other side is served once it is linked to these, too.
        for &backend in backends.keys() {
            if reach.frontends.iter().all(|&frontend| is_linked(backend, frontend)) {
                reach.backends.insert(backend);
            }
        }
        for &frontend in frontends.keys() {
            if reach.backends.iter().all(|&backend| is_linked(backend, frontend)) {
                reach.frontends.insert(frontend);
            }
        }
        reach
    }

    fn most_missing(&self, is_linked: &impl Fn(BackendId, FrontendId) -> bool) -> Option<Blamed> {
        let (mut by_backend, mut by_frontend) = (BTreeMap::new(), BTreeMap::new());
        for &backend in &self.backends {
            for &frontend in self.frontends.iter().filter(|frontend| !is_linked(backend, **frontend)) {
                *by_backend.entry(backend).or_insert(0u64) += 1;
                *by_frontend.entry(frontend).or_insert(0u64) += 1;
            }
        }
        // Of equals the youngest, whose id is the largest.
        let (&backend, &missing_frontends) = by_backend.iter().max_by_key(|(id, missing)| (**missing, **id))?;
        let (&frontend, &missing_backends) = by_frontend.iter().max_by_key(|(id, missing)| (**missing, **id))?;
        // missing_backends / backends > missing_frontends / frontends, without a division.
        let is_frontend =
            missing_backends * self.frontends.len() as u64 > missing_frontends * self.backends.len() as u64;
        Some(if is_frontend { Blamed::Frontend(frontend) } else { Blamed::Backend(backend) })
    }
}

enum Blamed {
    Backend(BackendId),
    Frontend(FrontendId),
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn reach(backends: &[bool], frontends: &[bool], missing: &[(u32, u32)]) -> (Vec<u32>, Vec<u32>) {
        let backends = (0..).zip(backends).map(|(id, counts)| (BackendId(id), *counts)).collect();
        let frontends = (0..).zip(frontends).map(|(id, counts)| (FrontendId(id), *counts)).collect();
        let reach = Reach::of(&backends, &frontends, |backend, frontend| !missing.contains(&(backend.0, frontend.0)));
        (reach.backends.iter().map(|id| id.0).collect(), reach.frontends.iter().map(|id| id.0).collect())
    }

    #[test]
    fn the_end_that_misses_more_stays_out() {
        // One of two backends is cut off from the only frontend.
        assert_eq!(reach(&[true; 2], &[true], &[(0, 0)]), (vec![1], vec![0]));
        // ... from one of two frontends: requests rather wait longer than fail.
        assert_eq!(reach(&[true; 2], &[true; 2], &[(0, 1)]), (vec![1], vec![0, 1]));
        // A frontend that nobody reaches.
        assert_eq!(reach(&[true; 3], &[true; 2], &[(0, 1), (1, 1), (2, 1)]), (vec![0, 1, 2], vec![0]));
        // One that breaks half of its links keeps nobody out among three.
        assert_eq!(reach(&[true; 4], &[true; 3], &[(0, 1), (1, 1)]), (vec![0, 1, 2, 3], vec![0, 2]));
    }

    #[test]
    fn newcomers_are_waited_for() {
        assert_eq!(reach(&[true, false], &[true], &[(1, 0)]), (vec![0], vec![0]));
        assert_eq!(reach(&[true], &[true, false], &[(0, 1)]), (vec![0], vec![0]));
        assert_eq!(reach(&[true, false], &[true, false], &[]), (vec![0, 1], vec![0, 1]));
        // Two that come at once need not have met yet.
        assert_eq!(reach(&[true, false], &[true, false], &[(1, 1)]), (vec![0, 1], vec![0]));
    }

    proptest! {
        /// Everybody in reaches everybody in, and nobody more could be in.
        #[test]
        fn it_is_whole_and_cannot_be_larger(
            backends in proptest::collection::vec(any::<bool>(), 0..6),
            frontends in proptest::collection::vec(any::<bool>(), 0..6),
            missing in proptest::collection::vec((0u32..6, 0u32..6), 0..14),
        ) {
            let (used, served) = reach(&backends, &frontends, &missing);
            let is_linked = |backend: u32, frontend: u32| !missing.contains(&(backend, frontend));
            prop_assert!(used.iter().all(|&backend| served.iter().all(|&frontend| is_linked(backend, frontend))));
            for backend in (0..backends.len() as u32).filter(|id| !used.contains(id)) {
                prop_assert!(served.iter().any(|&frontend| !is_linked(backend, frontend)));
            }
            for frontend in (0..frontends.len() as u32).filter(|id| !served.contains(id)) {
                prop_assert!(used.iter().any(|&backend| !is_linked(backend, frontend)));
            }
        }
    }
}
