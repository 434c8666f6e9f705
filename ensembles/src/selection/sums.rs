//! What members have lost, as sums that add up: requests so far, and losses by blocks of requests. Several may sum up
//! the same at once, each what it sees, and all come to the same whatever is added first.

use std::collections::BTreeMap;

/// Blocks of a window.
pub const BLOCKS: u64 = 8;

/// Requests and what members lost in them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sums {
    /// Requests.
    pub requests: u64,
    /// By the number of a block: by member the sum of its losses, and how many they are.
    pub blocks: BTreeMap<u64, Vec<(f64, u64)>>,
}

impl Sums {
    /// Adds what was seen elsewhere, or later.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        for (number, losses) in &other.blocks {
            let own = self.blocks.entry(*number).or_insert_with(|| vec![(0.0, 0); losses.len()]);
            for ((sum, count), (more, times)) in own.iter_mut().zip(losses) {
                *sum += more;
                *count += times;
            }
        }
    }

    /// The number of the first block that counts, where one is so many requests.
    #[must_use]
    pub fn oldest(&self, block: u64) -> u64 {
        (self.requests.saturating_sub(1) / block).saturating_sub(BLOCKS)
    }

    /// Forgets all before a block.
    pub fn forget(&mut self, oldest: u64) {
        while let Some(first) = self.blocks.first_entry()
            && *first.key() < oldest
        {
            first.remove();
        }
    }

    /// What each of so many members has lost since a block, and in how many answers.
    #[must_use]
    pub fn since(&self, oldest: u64, members: usize) -> Vec<(f64, u64)> {
        let mut losses = vec![(0.0, 0); members];
        for block in self.blocks.range(oldest..).map(|(_, block)| block) {
            for ((sum, count), (more, times)) in losses.iter_mut().zip(block) {
                *sum += more;
                *count += times;
            }
        }
        losses
    }

    /// How many losses they are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.blocks.values().flatten().map(|(_, count)| count).sum()
    }
}
