//! How much of the arena each client may hold, so that one cannot take all of it however few requests it sends: a
//! client may hold at most [`SHARE_OF_FREE`] times what nobody holds, as of what requests hold in other memory
//! (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998).
//!
//! A block belongs to one size class while any of its slots is leased, so a single slot keeps all of it from tasks of
//! other sizes. Whoever is alone in a block holds the block; where there are several, each holds its slots. A slot that
//! takes several blocks counts as those, in the first.

use std::collections::BTreeMap;

/// A client of this frontend's, so far as it can tell them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Client(pub u64);

/// How much a client may hold, as a multiple of what nobody holds.
pub const SHARE_OF_FREE: usize = 4;

/// What clients hold of an arena.
#[derive(Debug)]
pub(super) struct Shares {
    block_bytes: usize,
    bytes: usize,
    held: usize,
    /// Of clients that hold anything; requests that are nobody's hold as one that may hold all.
    clients: BTreeMap<Option<Client>, usize>,
    /// Bytes of leased slots in each block, by whose they are.
    blocks: Vec<BTreeMap<Option<Client>, usize>>,
}

impl Shares {
    pub(super) fn new(blocks: usize, block_bytes: usize) -> Self {
        let (bytes, clients) = (blocks * block_bytes, BTreeMap::new());
        Self { block_bytes, bytes, held: 0, clients, blocks: vec![BTreeMap::new(); blocks] }
    }

    pub(super) fn holds_any(&self, client: Option<Client>) -> bool {
        self.of(client) > 0
    }

    /// Whether a client may take so many bytes more of a block, and then holds them; always, unless its share counts.
    pub(super) fn take(&mut self, client: Option<Client>, block: usize, bytes: usize, in_share: bool) -> bool {
        let before = self.of(client);
        self.change(block, |holders| *holders.entry(client).or_default() += bytes);
        let after = self.of(client);
        // Who holds nothing takes what there is, and who alone has a block has paid for all of its slots.
        let may = !in_share
            || client.is_none()
            || before == 0
            || after <= before
            || after <= (self.bytes - self.held) * SHARE_OF_FREE;
        if !may {
            self.give_back(client, block, bytes);
        }
        may
    }

    /// It holds so much less.
    pub(super) fn give_back(&mut self, client: Option<Client>, block: usize, bytes: usize) {
        self.change(block, |holders| {
            let held = holders.get_mut(&client).expect("what is given back was taken");
            *held -= bytes;
            if *held == 0 {
                holders.remove(&client);
            }
        });
    }

    fn of(&self, client: Option<Client>) -> usize {
        self.clients.get(&client).copied().unwrap_or(0)
    }

    fn change(&mut self, block: usize, change: impl FnOnce(&mut BTreeMap<Option<Client>, usize>)) {
        let Self { block_bytes, held, clients, blocks, .. } = self;
        let holders = &mut blocks[block];
        for (client, bytes) in charges(*block_bytes, holders) {
            *held -= bytes;
            let of_client = clients.get_mut(&client).expect("it holds something");
            *of_client -= bytes;
            if *of_client == 0 {
                clients.remove(&client);
            }
        }
        change(holders);
        for (client, bytes) in charges(*block_bytes, holders) {
            *held += bytes;
            *clients.entry(client).or_default() += bytes;
        }
    }
}

/// What those who have slots in a block hold of it.
fn charges(
    block_bytes: usize,
    holders: &BTreeMap<Option<Client>, usize>,
) -> impl Iterator<Item = (Option<Client>, usize)> {
    let is_alone = holders.len() == 1;
    holders.iter().map(move |(&client, &bytes)| (client, if is_alone { block_bytes.max(bytes) } else { bytes }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const A: Option<Client> = Some(Client(1));
    const B: Option<Client> = Some(Client(2));

    #[test]
    fn one_client_leaves_a_fifth_and_who_comes_finds_room() {
        let mut shares = Shares::new(20, 100);
        let blocks: Vec<usize> = (0..20).filter(|&block| shares.take(A, block, 1, true)).collect();
        assert_eq!(blocks.len(), 16, "one slot has a block");
        assert!((0..99).all(|_| shares.take(A, 3, 1, true)), "whose other slots cost nothing more");
        assert!(shares.take(B, 16, 50, true) && shares.take(B, 16, 50, true));
        assert!(!shares.take(A, 17, 1, true), "what is left is less than a quarter of what it holds");
        assert!(
            shares.take(None, 17, 100, true) && shares.take(None, 18, 100, true) && shares.take(None, 19, 100, true)
        );
        assert!(shares.take(B, 15, 1, true), "a block of which A holds one slot only from then on");
        blocks.into_iter().for_each(|block| shares.give_back(A, block, 1));
        assert!(shares.take(B, 0, 100, true));
    }

    #[test]
    fn those_who_share_a_block_hold_their_slots() {
        let mut shares = Shares::new(10, 100);
        assert!(shares.take(A, 0, 10, true) && shares.take(B, 0, 20, true));
        assert_eq!((shares.of(A), shares.of(B), shares.held), (10, 20, 30));
        shares.give_back(A, 0, 10);
        assert_eq!((shares.of(A), shares.of(B), shares.held), (0, 100, 100));
    }

    proptest! {
        /// Against sums over all blocks. However small the arena is, who holds nothing gets what is free.
        #[test]
        fn what_is_held_is_the_sum_over_blocks(
            steps in proptest::collection::vec((any::<bool>(), 0u64..4, 0usize..5, 1usize..30), 0..80),
        ) {
            let mut shares = Shares::new(5, 100);
            let mut taken: Vec<(Option<Client>, usize, usize)> = Vec::new();
            for (takes, client, block, bytes) in steps {
                let client = (client > 0).then_some(Client(client));
                let used: usize = taken.iter().filter(|other| other.1 == block).map(|other| other.2).sum();
                if takes && used + bytes <= 100 {
                    let is_new = !taken.iter().any(|other| other.0 == client);
                    let may = shares.take(client, block, bytes, true);
                    prop_assert!(may || (client.is_some() && !is_new));
                    taken.extend(may.then_some((client, block, bytes)));
                } else if !taken.is_empty() {
                    let (client, block, bytes) = taken.swap_remove(bytes % taken.len());
                    shares.give_back(client, block, bytes);
                }
                let mut expected: BTreeMap<Option<Client>, usize> = BTreeMap::new();
                for block in 0..5 {
                    let mut holders: BTreeMap<Option<Client>, usize> = BTreeMap::new();
                    taken.iter().filter(|other| other.1 == block).for_each(|&(client, _, bytes)| {
                        *holders.entry(client).or_default() += bytes;
                    });
                    let is_alone = holders.len() == 1;
                    for (client, bytes) in holders {
                        *expected.entry(client).or_default() += if is_alone { 100 } else { bytes };
                    }
                }
                prop_assert_eq!(shares.held, expected.values().sum::<usize>());
                prop_assert_eq!(&shares.clients, &expected);
            }
        }
    }
}
