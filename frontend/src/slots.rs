//! Step 2: slots in the registered arena. A slot holds one task's input, to be READ by a backend, and has room for
//! its answer, to be written by one.
//!
//! The arena is cut into equal blocks. A block belongs to one size class while any of its slots is leased and then
//! goes back to the pool, so the arena follows the mix of models without being divided beforehand. A slot's life:
//! free, leased to one task, free again. Nothing here decides when a lease may end; that is `tasks`' affair
//! (ARCHITECTURE.md, invariant 3: not while a READ or WRITE to it can still arrive).

use std::collections::BTreeSet;

use proto::{SlotDescriptor, TaskId, backend_to_frontend::ANSWER_HEADER_BYTES, slot::ImmediateData};
use thiserror::Error;

/// Inputs and answers start on cache lines.
const ALIGNMENT: usize = 64;
/// Room for the text of a failure, even if the outputs are smaller.
const FAILURE_TEXT_BYTES: usize = 176;
/// Slots of the largest class that a block holds; more of them waste less at a block's end.
const LARGEST_PER_BLOCK: usize = 4;

/// What a task of one model needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotSize {
    /// Bytes of its inputs.
    pub input_bytes: u32,
    /// Bytes of its answer, header included.
    pub answer_bytes_max: u32,
}

impl SlotSize {
    /// What a task with inputs and outputs of these sizes needs.
    ///
    /// # Panics
    /// If either is 4 GiB or more; a model repository refuses such models.
    #[must_use]
    pub fn new(input_bytes: usize, output_bytes: usize) -> Self {
        let answer = ANSWER_HEADER_BYTES + output_bytes.max(FAILURE_TEXT_BYTES);
        let fits = |bytes: usize| u32::try_from(bytes).expect("tensors of a model are below 4 GiB together");
        Self { input_bytes: fits(input_bytes), answer_bytes_max: fits(answer) }
    }

    fn input_room(self) -> usize {
        (self.input_bytes as usize).next_multiple_of(ALIGNMENT)
    }

    /// Bytes of its class's slots: rounded up by at most an eighth, so that similar models share a class.
    fn class_bytes(self) -> usize {
        let bytes = self.input_room() + self.answer_bytes_max as usize;
        bytes.next_multiple_of((bytes.next_power_of_two() / 16).max(ALIGNMENT))
    }
}

/// The right to a slot. It cannot be copied, and only [`Slots::release`] ends it.
#[derive(Debug, PartialEq, Eq)]
pub struct Lease {
    descriptor: SlotDescriptor,
    generation: u32,
}

impl Lease {
    /// Where the task's bytes lie.
    #[must_use]
    pub fn descriptor(&self) -> SlotDescriptor {
        self.descriptor
    }
}

/// Why an arena cannot be laid out.
#[derive(Debug, PartialEq, Eq, Error)]
#[error(
    "arena_bytes: found {found}, expected at least {least}: one block of {block} bytes for each of {classes} sizes"
)]
pub struct ArenaTooSmall {
    found: usize,
    least: usize,
    block: usize,
    classes: usize,
}

/// All slots of a frontend.
#[derive(Debug)]
pub struct Slots {
    block_bytes: usize,
    /// Slot ids that a block takes up, whatever its class.
    ids_per_block: usize,
    classes: Vec<Class>,
    blocks: Vec<Block>,
    unassigned: BTreeSet<usize>,
    /// By slot id.
    states: Vec<State>,
    leased: usize,
}

#[derive(Debug)]
struct Class {
    slot_bytes: usize,
    slots_per_block: usize,
    /// Its blocks that have a free slot. The lowest is used first, so that the others empty.
    open: BTreeSet<usize>,
}

#[derive(Debug, Default)]
struct Block {
    class: usize,
    /// Free slots, as indexes in the block.
    free: Vec<usize>,
}

#[derive(Debug, Clone, Copy, Default)]
struct State {
    generation: u32,
    owner: Option<TaskId>,
}

impl Slots {
    /// Lays out an arena of `arena_bytes` for tasks of these sizes.
    ///
    /// # Errors
    /// If it cannot hold one block for each size class.
    pub fn new(arena_bytes: usize, sizes: &[SlotSize]) -> Result<Self, ArenaTooSmall> {
        let class_bytes: BTreeSet<usize> = sizes.iter().map(|size| size.class_bytes()).collect();
        let (Some(&smallest), Some(&largest)) = (class_bytes.first(), class_bytes.last()) else {
            return Ok(Self::empty());
        };
        // Slot ids are 20 bits, so blocks are at least a share of that of the arena.
        let block_bytes = (largest * LARGEST_PER_BLOCK).max(arena_bytes / (ImmediateData::SLOTS_MAX as usize / 16));
        let block_bytes = block_bytes.next_multiple_of(ALIGNMENT);
        let blocks = arena_bytes / block_bytes;
        let classes = class_bytes.len();
        if blocks < classes {
            return Err(ArenaTooSmall {
                found: arena_bytes,
                least: classes * block_bytes,
                block: block_bytes,
                classes,
            });
        }
        let ids_per_block = (ImmediateData::SLOTS_MAX as usize / blocks).min(block_bytes / smallest);
        let class = |&slot_bytes: &usize| Class {
            slot_bytes,
            slots_per_block: (block_bytes / slot_bytes).min(ids_per_block),
            open: BTreeSet::new(),
        };
        Ok(Self {
            block_bytes,
            ids_per_block,
            classes: class_bytes.iter().map(class).collect(),
            blocks: std::iter::repeat_with(Block::default).take(blocks).collect(),
            unassigned: (0..blocks).collect(),
            states: vec![State::default(); blocks * ids_per_block],
            leased: 0,
        })
    }

    fn empty() -> Self {
        Self {
            block_bytes: ALIGNMENT,
            ids_per_block: 1,
            classes: Vec::new(),
            blocks: Vec::new(),
            unassigned: BTreeSet::new(),
            states: Vec::new(),
            leased: 0,
        }
    }

    /// Whether a task of this size has room in any slot.
    #[must_use]
    pub fn fits(&self, size: SlotSize) -> bool {
        self.classes.last().is_some_and(|largest| size.class_bytes() <= largest.slot_bytes)
    }

    /// Leases a slot to `owner`: of its own class, or, as its model has come later, the next larger one. `None` if the
    /// arena is full.
    ///
    /// # Panics
    /// If it does not fit.
    pub fn lease(&mut self, size: SlotSize, owner: TaskId) -> Option<Lease> {
        let class_bytes = size.class_bytes();
        let class_index = self.classes.partition_point(|class| class.slot_bytes < class_bytes);
        let class = &mut self.classes[class_index];
        let block_index = match class.open.first() {
            Some(&block) => block,
            None => {
                let block = self.unassigned.pop_first()?;
                self.blocks[block] = Block { class: class_index, free: (0..class.slots_per_block).rev().collect() };
                class.open.insert(block);
                block
            }
        };
        let block = &mut self.blocks[block_index];
        let index = block.free.pop().expect("an open block has a free slot");
        if block.free.is_empty() {
            class.open.remove(&block_index);
        }
        self.leased += 1;
        let id = block_index * self.ids_per_block + index;
        let state = &mut self.states[id];
        state.generation = state.generation.wrapping_add(1);
        state.owner = Some(owner);
        let input_offset = block_index * self.block_bytes + index * class.slot_bytes;
        let descriptor = SlotDescriptor {
            slot: u32::try_from(id).expect("slot ids are 20 bits"),
            input_offset: input_offset as u64,
            input_bytes: size.input_bytes,
            answer_offset: (input_offset + size.input_room()) as u64,
            answer_bytes_max: size.answer_bytes_max,
        };
        Some(Lease { descriptor, generation: state.generation })
    }

    /// Whose slot this is; `None` if it is free or does not exist.
    #[must_use]
    pub fn owner(&self, slot: u32) -> Option<TaskId> {
        self.states.get(slot as usize)?.owner
    }

    /// Ends a lease: the slot may be leased again at once.
    ///
    /// # Panics
    /// If the lease is not of the slot's present generation: our own bug.
    pub fn release(&mut self, lease: Lease) {
        let id = lease.descriptor.slot as usize;
        let state = &mut self.states[id];
        assert!(
            state.generation == lease.generation && state.owner.is_some(),
            "slot {id} is not leased in generation {}",
            lease.generation
        );
        state.owner = None;
        self.leased -= 1;
        let (block_index, index) = (id / self.ids_per_block, id % self.ids_per_block);
        let block = &mut self.blocks[block_index];
        block.free.push(index);
        let class = &mut self.classes[block.class];
        if block.free.len() == class.slots_per_block {
            class.open.remove(&block_index);
            self.unassigned.insert(block_index);
        } else {
            class.open.insert(block_index);
        }
    }

    /// Slots leased now.
    #[must_use]
    pub fn leased(&self) -> usize {
        self.leased
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proto::FrontendId;

    fn size(input: usize, output: usize) -> SlotSize {
        SlotSize::new(input, output)
    }

    fn task(sequence: u64) -> TaskId {
        TaskId::new(FrontendId(1), sequence)
    }

    /// The naive oracle: every lease is a pair of byte ranges, compared with all others.
    #[derive(Default)]
    struct Oracle {
        held: Vec<Lease>,
    }

    impl Oracle {
        fn ranges(lease: &Lease) -> [(u64, u64); 2] {
            let d = lease.descriptor();
            [
                (d.input_offset, d.input_offset + u64::from(d.input_bytes)),
                (d.answer_offset, d.answer_offset + u64::from(d.answer_bytes_max)),
            ]
        }

        fn check_new(&self, lease: &Lease, arena: u64) {
            let [input, answer] = Self::ranges(lease);
            assert!(input.1 <= answer.0 && answer.1 <= arena, "{lease:?} leaves its place");
            for other in &self.held {
                assert_ne!(other.descriptor().slot, lease.descriptor().slot, "leased twice");
                for (a, b) in Self::ranges(other).into_iter().flat_map(|a| [(a, input), (a, answer)]) {
                    assert!(a.1 <= b.0 || b.1 <= a.0, "{lease:?} overlaps {other:?}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn leases_never_overlap_and_all_room_comes_back(
            steps in proptest::collection::vec((any::<bool>(), 0usize..4, any::<prop::sample::Index>()), 1..400),
        ) {
            // The last one's model comes after the arena was laid out.
            let sizes = [size(150_528, 16), size(268_203, 16), size(256, 40), size(5_000, 16)];
            let arena = 4_400_000;
            let mut slots = Slots::new(arena, &sizes[..3]).unwrap();
            prop_assert!(sizes.iter().all(|size| slots.fits(*size)) && !slots.fits(size(300_000, 16)));
            let mut oracle = Oracle::default();
            for (sequence, (lease, class, pick)) in steps.into_iter().enumerate() {
                if lease {
                    if let Some(lease) = slots.lease(sizes[class], task(sequence as u64)) {
                        oracle.check_new(&lease, arena as u64);
                        prop_assert_eq!(slots.owner(lease.descriptor().slot), Some(task(sequence as u64)));
                        oracle.held.push(lease);
                    }
                } else if !oracle.held.is_empty() {
                    let lease = oracle.held.swap_remove(pick.index(oracle.held.len()));
                    let slot = lease.descriptor().slot;
                    slots.release(lease);
                    prop_assert_eq!(slots.owner(slot), None);
                }
                prop_assert_eq!(slots.leased(), oracle.held.len());
            }
            oracle.held.drain(..).for_each(|lease| slots.release(lease));
            prop_assert_eq!(slots.unassigned.len(), slots.blocks.len(), "a block without leases belongs to nobody");
        }
    }

    #[test]
    fn a_full_arena_refuses_and_serves_again_after_a_release() {
        let small = size(900, 0);
        let mut slots = Slots::new(16 * 1024, &[small]).unwrap();
        let mut leases: Vec<Lease> = (0..).map_while(|sequence| slots.lease(small, task(sequence))).collect();
        assert!(leases.len() >= 12, "{} slots of {} bytes in 16 KiB", leases.len(), small.class_bytes());
        slots.release(leases.pop().unwrap());
        assert!(slots.lease(small, task(99)).is_some() && slots.lease(small, task(100)).is_none());
    }

    #[test]
    fn blocks_move_between_classes() {
        let (small, large) = (size(100, 0), size(100_000, 0));
        let mut slots = Slots::new(2_000_000, &[small, large]).unwrap();
        let all = |slots: &mut Slots, size| -> Vec<Lease> { (0..).map_while(|n| slots.lease(size, task(n))).collect() };
        let large_alone = all(&mut slots, large);
        assert!(slots.lease(small, task(0)).is_none());
        let count = large_alone.len();
        large_alone.into_iter().for_each(|lease| slots.release(lease));
        let small_alone = all(&mut slots, small);
        small_alone.into_iter().for_each(|lease| slots.release(lease));
        assert_eq!(all(&mut slots, large).len(), count);
    }

    #[test]
    #[should_panic(expected = "is not leased in generation")]
    fn a_lease_of_an_earlier_generation_is_our_own_bug() {
        let small = size(100, 0);
        let mut slots = Slots::new(1 << 16, &[small]).unwrap();
        let first = slots.lease(small, task(1)).unwrap();
        let copy = Lease { ..first };
        slots.release(first);
        slots.lease(small, task(2)).unwrap();
        slots.release(copy);
    }

    #[test]
    fn slot_ids_stay_within_their_20_bits() {
        let small = size(1, 1);
        let slots = Slots::new(64 << 30, &[small]).unwrap();
        assert!(slots.states.len() <= ImmediateData::SLOTS_MAX as usize);
    }

    #[test]
    fn an_arena_that_is_too_small_says_how_much_is_needed() {
        let error = Slots::new(100_000, &[size(150_528, 16), size(268_203, 16)]).unwrap_err().to_string();
        assert!(error.starts_with("arena_bytes: found 100000, expected at least 2"), "{error}");
    }
}
