//! When the GPUs of a sub-cluster become free: a tournament tree over GPUs in the order of their ids.
//!
//! Answers in O(log G) the two questions of matchmaking: which is the smallest id that is free by an instant
//! (Symphony, Algorithm 1, line 19), and which GPU frees first (Figure 18, `get_earliest`).

use proto::Timestamp;

/// Free times by position. A position that must not be used is at [`Timestamp::NEVER`].
#[derive(Debug, Clone)]
pub struct FreeTimes {
    /// A complete binary tree: the root at 1, the children of `n` at `2n` and `2n + 1`; each node is the minimum below.
    tree: Vec<Timestamp>,
}

impl FreeTimes {
    /// All given free times, in the order of GPU ids.
    #[must_use]
    pub fn new(free_at: impl ExactSizeIterator<Item = Timestamp>) -> Self {
        let leaves = free_at.len().next_power_of_two();
        let mut tree = vec![Timestamp::NEVER; 2 * leaves];
        for (leaf, at) in tree[leaves..].iter_mut().zip(free_at) {
            *leaf = at;
        }
        for node in (1..leaves).rev() {
            tree[node] = tree[2 * node].min(tree[2 * node + 1]);
        }
        Self { tree }
    }

    /// Moves the free time at `position`.
    pub fn set(&mut self, position: usize, free_at: Timestamp) {
        let mut node = self.tree.len() / 2 + position;
        self.tree[node] = free_at;
        while node > 1 {
            node /= 2;
            let minimum = self.tree[2 * node].min(self.tree[2 * node + 1]);
            if self.tree[node] == minimum {
                return;
            }
            self.tree[node] = minimum;
        }
    }

    /// The smallest position that is free at or before `by`.
    #[must_use]
    pub fn first_free_by(&self, by: Timestamp) -> Option<(usize, Timestamp)> {
        if self.tree[1] > by || self.tree[1] == Timestamp::NEVER {
            return None;
        }
        let mut node = 1;
        while node < self.tree.len() / 2 {
            node *= 2;
            if self.tree[node] > by {
                node += 1;
            }
        }
        Some((node - self.tree.len() / 2, self.tree[node]))
    }

    /// The largest position that is free at or before `by`, and is to be used at all.
    #[must_use]
    pub fn last_free_by(&self, by: Timestamp) -> Option<(usize, Timestamp)> {
        let by = by.min(Timestamp(Timestamp::NEVER.0 - 1));
        if self.tree[1] > by {
            return None;
        }
        let mut node = 1;
        while node < self.tree.len() / 2 {
            node = 2 * node + 1;
            if self.tree[node] > by {
                node -= 1;
            }
        }
        Some((node - self.tree.len() / 2, self.tree[node]))
    }

    /// As [`Self::earliest`], of the positions below `limit`.
    #[must_use]
    pub fn earliest_below(&self, limit: usize) -> Option<(usize, Timestamp)> {
        let leaves = self.tree.len() / 2;
        let (mut from, mut to, mut first) = (leaves, leaves + limit.min(leaves), Timestamp::NEVER);
        // What covers them is at most two nodes of each level.
        while from < to {
            if from % 2 == 1 {
                first = first.min(self.tree[from]);
                from += 1;
            }
            if to % 2 == 1 {
                to -= 1;
                first = first.min(self.tree[to]);
            }
            (from, to) = (from / 2, to / 2);
        }
        if first == Timestamp::NEVER { None } else { self.first_free_by(first) }
    }

    /// The position that frees first; the smaller one of two that free at once. `None` if no free time is known.
    #[must_use]
    pub fn earliest(&self) -> Option<(usize, Timestamp)> {
        self.first_free_by(self.tree[1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn instant() -> impl Strategy<Value = Timestamp> {
        prop_oneof![4 => (0i64..30).prop_map(Timestamp), 1 => Just(Timestamp::NEVER)]
    }

    proptest! {
        /// The oracle scans a list.
        #[test]
        fn behaves_like_a_list_that_is_scanned(
            mut list in proptest::collection::vec(instant(), 1..20),
            moves in proptest::collection::vec((0usize..20, instant(), 0i64..31), 0..60),
        ) {
            let mut free = FreeTimes::new(list.iter().copied());
            for (position, at, by) in moves {
                let position = position % list.len();
                free.set(position, at);
                list[position] = at;
                let known = || list.iter().copied().enumerate().filter(|&(_, at)| at != Timestamp::NEVER);
                prop_assert_eq!(free.first_free_by(Timestamp(by)), known().find(|&(_, at)| at <= Timestamp(by)));
                let last = known().rfind(|&(_, at)| at <= Timestamp(by));
                prop_assert_eq!(free.last_free_by(Timestamp(by)), last);
                prop_assert_eq!(free.last_free_by(Timestamp::NEVER), known().next_back());
                let below = known().filter(|&(place, _)| place as i64 * 2 < by).min_by_key(|&(place, at)| (at, place));
                prop_assert_eq!(free.earliest_below((by as usize).div_ceil(2)), below);
                prop_assert_eq!(free.earliest(), known().min_by_key(|&(position, at)| (at, position)));
            }
        }
    }
}
