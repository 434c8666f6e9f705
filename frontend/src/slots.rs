//! Step 2: slots in the registered arena. A slot holds one task's input, to be READ by a backend, and has room for
//! its answer, to be written by one.
//!
//! The rows of a request get neighbouring slots where there are any: a *run*. Their inputs then lie one after another,
//! and so do the places of their answers, so that one READ and one WRITE serve them all. Their memory is one: none of
//! it is leased again before the last of them is free.
//!
//! A run has one key, by which backends reach its inputs and the places of its answers and nothing else. It opens while
//! any slot of the run is leased: what invariant 3 keeps from arriving later meets no void key either.
//!
//! Behind all blocks lie the slots' guards ([`proto::slot::guard_word`]), a word for each slot in the order of their
//! numbers, so that one READ gets those of a run.
//!
//! The arena is cut into equal blocks. A block belongs to one size class while any of its slots is leased and then
//! goes back to the pool, so the arena follows the mix of models without being divided beforehand. Classes come with
//! models; a slot of a model that came later may be larger than a block, and has several that follow each other. A
//! slot's life: free, leased to one task, free again, alone or with its neighbours. Nothing here decides when a lease
//! may end; that is `tasks`' affair (ARCHITECTURE.md, invariant 3: not while a READ or WRITE to it can still arrive).

mod bits;
mod shares;

use std::{collections::BTreeSet, ops::Range};

use proto::{
    SlotDescriptor, TaskId,
    backend_to_frontend::ANSWER_HEADER_BYTES,
    slot::{GUARD_BYTES, ImmediateData},
};
use thiserror::Error;

use crate::arena::Arena;
use bits::Bits;
use shares::Shares;
pub use shares::{Client, SHARE_OF_FREE};

/// Runs, and their answers, start on cache lines.
const ALIGNMENT: usize = 64;
/// Answers start on words, which are copied as a whole.
const ANSWER_ALIGNMENT: usize = 8;
/// Room for the text of a failure, even if the outputs are smaller.
const FAILURE_TEXT_BYTES: usize = 176;
/// Slots of the largest class that a block holds; more of them waste less at a block's end.
const LARGEST_PER_BLOCK: usize = 4;
/// Slots of the smallest class that a block holds, if the arena has room for enough such blocks: the longest run.
const SMALLEST_PER_BLOCK: usize = 256;
/// Blocks that there are at least for each class before blocks are made that large.
const BLOCKS_PER_CLASS: usize = 16;
/// Blocks that are looked at for a run before one is taken from the pool.
const BLOCKS_LOOKED_AT: usize = 4;
/// A slot of a model that comes later takes this part of the blocks at most.
const LATER_PART: usize = 4;
/// Blocks of an arena that was laid out for no model are those of one with slots of so many bytes.
const UNKNOWN_BYTES: usize = 1024;

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
        let answer = answer.next_multiple_of(ANSWER_ALIGNMENT);
        let fits = |bytes: usize| u32::try_from(bytes).expect("tensors of a model are below 4 GiB together");
        Self { input_bytes: fits(input_bytes), answer_bytes_max: fits(answer) }
    }

    /// The same for a task whose inputs have this many bytes, and no more than those.
    #[must_use]
    pub fn with_input(self, input_bytes: usize) -> Self {
        Self { input_bytes: self.input_bytes.min(input_bytes as u32), ..self }
    }

    /// What the inputs of a run take up.
    fn input_room(self, slots: usize) -> usize {
        (self.input_bytes as usize * slots).next_multiple_of(ALIGNMENT)
    }

    /// Bytes of its class's slots: rounded up by at most an eighth, so that similar models share a class.
    pub(crate) fn class_bytes(self) -> usize {
        let bytes = self.input_room(1) + self.answer_bytes_max as usize;
        bytes.next_multiple_of((bytes.next_power_of_two() / 16).max(ALIGNMENT))
    }
}

/// The right to a run of neighbouring slots. It cannot be copied; [`Slots::release`] ends it, slot by slot or as a
/// whole.
#[derive(Debug, PartialEq, Eq)]
pub struct Lease {
    first: SlotDescriptor,
    slots: usize,
    /// Slots that have not been released.
    held: usize,
    generation: u64,
    /// Whose it is, and the bytes that it has of its block.
    client: Option<Client>,
    bytes: usize,
}

impl Lease {
    /// Opens the run to backends that are told the key.
    pub fn open(&mut self, arena: &dyn Arena) {
        let SlotDescriptor { input_offset, input_bytes, answer_offset, answer_bytes_max, .. } = self.first;
        let range = |offset: u64, bytes: u32| offset as usize..offset as usize + bytes as usize * self.slots;
        self.first.key = arena.open(range(input_offset, input_bytes), range(answer_offset, answer_bytes_max));
    }

    /// Slots that were leased, one for each of the tasks that follow each other from the owner on.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Where the bytes of one of the tasks lie.
    ///
    /// # Panics
    /// If it has no slot here.
    #[must_use]
    pub fn descriptor(&self, index: usize) -> SlotDescriptor {
        assert!(index < self.slots, "slot {index} of a lease of {}", self.slots);
        let SlotDescriptor { slot, input_offset, input_bytes, answer_offset, answer_bytes_max, .. } = self.first;
        SlotDescriptor {
            slot: slot + index as u32,
            input_offset: input_offset + index as u64 * u64::from(input_bytes),
            answer_offset: answer_offset + index as u64 * u64::from(answer_bytes_max),
            ..self.first
        }
    }
}

/// Why there is no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoSlot {
    /// Every slot that it could be is leased.
    Full,
    /// The client holds as much of the arena as it may.
    Share,
}

/// Why an arena cannot be laid out.
#[derive(Debug, PartialEq, Eq, Error)]
#[error("arena_bytes: found {found}, expected at least {least}, for one task of the model with the largest tensors")]
pub struct ArenaTooSmall {
    found: usize,
    least: usize,
}

/// How an arena is cut into blocks.
#[derive(Debug)]
struct Layout {
    block_bytes: usize,
    /// Slot ids that a block takes up, whatever its class.
    ids_per_block: usize,
    /// Of a block with its slots' guards.
    guarded_bytes: usize,
    blocks: usize,
}

impl Layout {
    fn new(arena_bytes: usize, class_bytes: &BTreeSet<usize>, largest_per_block: usize) -> Self {
        let (Some(&smallest), Some(&largest)) = (class_bytes.first(), class_bytes.last()) else {
            unreachable!("there is a class")
        };
        // Slot ids are 20 bits, so blocks are at least a share of that of the arena.
        let for_runs = (smallest * SMALLEST_PER_BLOCK).min(arena_bytes / (BLOCKS_PER_CLASS * class_bytes.len()));
        let for_ids = arena_bytes / (ImmediateData::SLOTS_MAX as usize / 16);
        let block_bytes = (largest * largest_per_block).max(for_runs).max(for_ids).next_multiple_of(ALIGNMENT);
        let blocks_max = (arena_bytes / block_bytes).max(1);
        let ids_per_block = (ImmediateData::SLOTS_MAX as usize / blocks_max).min(block_bytes / smallest);
        let guarded_bytes = block_bytes + ids_per_block * GUARD_BYTES;
        Self { block_bytes, ids_per_block, guarded_bytes, blocks: arena_bytes / guarded_bytes }
    }

    /// With a block for each class, if the arena has room for so many; where it has not, blocks hold fewer of the
    /// largest, and then there are fewer classes.
    ///
    /// # Errors
    /// If it cannot hold one slot of the largest class.
    fn of_classes(arena_bytes: usize, class_bytes: &mut BTreeSet<usize>) -> Result<Self, ArenaTooSmall> {
        let mut largest_per_block = LARGEST_PER_BLOCK;
        loop {
            let layout = Self::new(arena_bytes, class_bytes, largest_per_block);
            if layout.blocks >= class_bytes.len() {
                return Ok(layout);
            }
            if largest_per_block > 1 {
                largest_per_block -= 1;
            } else if class_bytes.len() > 1 {
                class_bytes.pop_first();
            } else {
                return Err(ArenaTooSmall { found: arena_bytes, least: layout.guarded_bytes });
            }
        }
    }

    /// One at least, which takes several blocks if it is larger than one.
    fn slots_per_block(&self, slot_bytes: usize) -> usize {
        (self.block_bytes / slot_bytes).clamp(1, self.ids_per_block)
    }

    fn class(&self, slot_bytes: usize) -> Class {
        let blocks_per_slot = slot_bytes.div_ceil(self.block_bytes);
        let slots_per_block = self.slots_per_block(slot_bytes);
        Class { slot_bytes, slots_per_block, blocks_per_slot, open: BTreeSet::new() }
    }
}

/// Whether an arena has room for so many slots of each size, beside a block for each other class.
#[must_use]
pub fn has_room(arena_bytes: usize, wanted: &[(SlotSize, usize)]) -> bool {
    let mut class_bytes: BTreeSet<usize> = wanted.iter().map(|(size, _)| size.class_bytes()).collect();
    if class_bytes.is_empty() {
        return true;
    }
    let Ok(layout) = Layout::of_classes(arena_bytes, &mut class_bytes) else { return false };
    let blocks = layout.blocks + 1 - class_bytes.len();
    wanted.iter().all(|(size, slots)| {
        let class = class_bytes.range(size.class_bytes()..).next();
        class.is_some_and(|&slot_bytes| slots.div_ceil(layout.slots_per_block(slot_bytes)) <= blocks)
    })
}

/// All slots of a frontend.
#[derive(Debug)]
pub struct Slots {
    layout: Layout,
    classes: Vec<Class>,
    blocks: Vec<Block>,
    unassigned: BTreeSet<usize>,
    shares: Shares,
    /// By slot id.
    states: Vec<State>,
    leased: usize,
    /// Of the last lease of all.
    generation: u64,
    /// Keys of runs that are free.
    void: Vec<u32>,
}

#[derive(Debug)]
struct Class {
    slot_bytes: usize,
    slots_per_block: usize,
    /// That a slot takes; more than one where it is larger than a block, which then has one slot.
    blocks_per_slot: usize,
    /// Its blocks that have a free slot. The lowest is used first, so that the others empty.
    open: BTreeSet<usize>,
}

#[derive(Debug, Default)]
struct Block {
    class: usize,
    /// Free slots, by index in the block.
    free: Bits,
}

#[derive(Debug, Clone, Copy, Default)]
struct State {
    /// Of its last lease.
    generation: u64,
    owner: Option<TaskId>,
}

impl Slots {
    /// Lays out an arena of `arena_bytes` for tasks of these sizes: a class for each, or where there are too many, the
    /// slots of larger tasks for small ones.
    ///
    /// # Errors
    /// If it cannot hold one slot of the largest class.
    pub fn new(arena_bytes: usize, sizes: &[SlotSize]) -> Result<Self, ArenaTooSmall> {
        let mut class_bytes: BTreeSet<usize> = sizes.iter().map(|size| size.class_bytes()).collect();
        let layout = if class_bytes.is_empty() {
            Layout::new(arena_bytes, &BTreeSet::from([UNKNOWN_BYTES]), LARGEST_PER_BLOCK)
        } else {
            Layout::of_classes(arena_bytes, &mut class_bytes)?
        };
        let blocks = layout.blocks;
        Ok(Self {
            classes: class_bytes.iter().map(|&slot_bytes| layout.class(slot_bytes)).collect(),
            blocks: std::iter::repeat_with(Block::default).take(blocks).collect(),
            unassigned: (0..blocks).collect(),
            shares: Shares::new(blocks, layout.block_bytes),
            states: vec![State::default(); blocks * layout.ids_per_block],
            leased: 0,
            generation: 0,
            void: Vec::new(),
            layout,
        })
    }

    /// The largest slot that there can be for a model that comes later.
    #[must_use]
    pub fn largest_later(&self) -> usize {
        let largest = self.classes.last().map_or(0, |class| class.slot_bytes);
        largest.max(self.blocks.len() / LATER_PART * self.layout.block_bytes)
    }

    /// Makes a class for a model that comes later, if there is room for one. False if tasks of this size have no room
    /// in any slot.
    pub fn make_room(&mut self, size: SlotSize) -> bool {
        let class_bytes = size.class_bytes();
        let index = self.classes.partition_point(|class| class.slot_bytes < class_bytes);
        let is_known = self.classes.get(index).is_some_and(|class| class.slot_bytes == class_bytes);
        if !is_known && self.classes.len() < self.blocks.len() && class_bytes <= self.largest_later() {
            self.classes.insert(index, self.layout.class(class_bytes));
            self.blocks.iter_mut().filter(|block| block.class >= index).for_each(|block| block.class += 1);
        }
        index < self.classes.len()
    }

    /// Whether so many slots of this size are more than the arena has, however free it is.
    #[must_use]
    pub fn never_fit(&self, size: SlotSize, slots: usize) -> bool {
        let class_bytes = size.class_bytes();
        let class = self.classes.iter().find(|class| class.slot_bytes >= class_bytes);
        class.is_none_or(|class| self.blocks.len() / class.blocks_per_slot * class.slots_per_block < slots)
    }

    /// Whether a client holds any slot.
    #[must_use]
    pub fn holds_any(&self, client: Option<Client>) -> bool {
        self.shares.holds_any(client)
    }

    /// Leases neighbouring slots to `owner` and the tasks that follow it, as many as `wanted` if there are so many
    /// together, or else fewer: of their own class, or, as their model has come later, the next larger one. They are
    /// held by `client`, or by nobody whose share counts.
    ///
    /// # Errors
    /// If the arena is full, or the client holds its share of it.
    ///
    /// # Panics
    /// If they do not fit, or none is wanted.
    pub fn lease(
        &mut self,
        size: SlotSize,
        (owner, client): (TaskId, Option<Client>),
        wanted: usize,
    ) -> Result<Lease, NoSlot> {
        self.lease_within(size, (owner, client), wanted, true)
    }

    /// The same, or, where `in_share` does not hold, whatever the client holds already.
    ///
    /// # Errors
    /// As [`Self::lease`].
    ///
    /// # Panics
    /// As [`Self::lease`].
    pub fn lease_within(
        &mut self,
        size: SlotSize,
        (owner, client): (TaskId, Option<Client>),
        wanted: usize,
        in_share: bool,
    ) -> Result<Lease, NoSlot> {
        assert!(wanted > 0, "a lease of no slot");
        let class_bytes = size.class_bytes();
        let class_index = self.classes.partition_point(|class| class.slot_bytes < class_bytes);
        let (block_index, run) = self.find_run(class_index, wanted).ok_or(NoSlot::Full)?;
        let bytes = match self.classes[class_index] {
            Class { blocks_per_slot: 1, slot_bytes, .. } => slot_bytes * run.len(),
            Class { blocks_per_slot, .. } => blocks_per_slot * self.layout.block_bytes,
        };
        if !self.shares.take(client, block_index, bytes, in_share) {
            self.close_if_unused(block_index);
            return Err(NoSlot::Share);
        }
        let class = &mut self.classes[class_index];
        let block = &mut self.blocks[block_index];
        block.free.remove(run.clone());
        if block.free.is_empty() {
            class.open.remove(&block_index);
        }
        self.leased += run.len();
        let id = block_index * self.layout.ids_per_block + run.start;
        self.generation += 1;
        for (state, owner) in self.states[id..id + run.len()].iter_mut().zip(owner.0..) {
            *state = State { generation: self.generation, owner: Some(TaskId(owner)) };
        }
        let input_offset = block_index * self.layout.block_bytes + run.start * class.slot_bytes;
        let first = SlotDescriptor {
            slot: u32::try_from(id).expect("slot ids are 20 bits"),
            input_offset: input_offset as u64,
            input_bytes: size.input_bytes,
            answer_offset: (input_offset + size.input_room(run.len())) as u64,
            answer_bytes_max: size.answer_bytes_max,
            key: SlotDescriptor::NO_KEY,
        };
        Ok(Lease { first, slots: run.len(), held: run.len(), generation: self.generation, client, bytes })
    }

    /// Up to `wanted` free neighbours of a class, which has a new block if that makes the run longer.
    fn find_run(&mut self, class_index: usize, wanted: usize) -> Option<(usize, Range<usize>)> {
        let class = &mut self.classes[class_index];
        let mut longest: Option<(usize, Range<usize>)> = None;
        for &block in class.open.iter().take(BLOCKS_LOOKED_AT) {
            let run = self.blocks[block].free.first_run(wanted);
            if longest.as_ref().is_none_or(|(_, longest)| longest.len() < run.len()) {
                longest = Some((block, run));
            }
            if longest.as_ref().is_some_and(|(_, longest)| longest.len() == wanted) {
                return longest;
            }
        }
        let Some(block) = neighbours(&self.unassigned, class.blocks_per_slot) else { return longest };
        (block..block + class.blocks_per_slot).for_each(|taken| {
            self.unassigned.remove(&taken);
        });
        self.blocks[block] = Block { class: class_index, free: Bits::full(class.slots_per_block) };
        class.open.insert(block);
        Some((block, 0..wanted.min(class.slots_per_block)))
    }

    /// Has keys of runs that are free open nothing any more: before slots are leased again.
    pub fn close_void(&mut self, arena: &dyn Arena) {
        self.void.drain(..).for_each(|key| arena.close(key));
    }

    /// Where in the arena the guards are.
    #[must_use]
    pub fn guards_offset(&self) -> usize {
        self.blocks.len() * self.layout.block_bytes
    }

    /// Where the guard of a slot is.
    #[must_use]
    pub fn guard_offset(&self, slot: SlotDescriptor) -> usize {
        self.guards_offset() + slot.number() as usize * GUARD_BYTES
    }

    /// Whose slot this is; `None` if it is free or does not exist.
    #[must_use]
    pub fn owner(&self, slot: u32) -> Option<TaskId> {
        self.states.get(slot as usize)?.owner
    }

    /// Ends the lease of some slots, by their index in it: nobody owns them any more, and once that is so for all of
    /// the lease, they may be leased again.
    ///
    /// # Panics
    /// If one of them is not leased in the lease's generation: our own bug.
    pub fn release(&mut self, lease: &mut Lease, slots: Range<usize>) {
        let first = lease.first.slot as usize;
        let ids = first + slots.start..first + slots.end;
        for (id, state) in ids.clone().zip(&mut self.states[ids.clone()]) {
            let generation = lease.generation;
            assert!(
                state.generation == generation && state.owner.is_some(),
                "slot {id} is not leased in generation {generation}"
            );
            state.owner = None;
        }
        self.leased -= ids.len();
        lease.held -= ids.len();
        if lease.held > 0 {
            return;
        }
        self.void.extend(Some(lease.first.key).filter(|&key| key != SlotDescriptor::NO_KEY));
        let (block_index, start) = (first / self.layout.ids_per_block, first % self.layout.ids_per_block);
        let block = &mut self.blocks[block_index];
        block.free.insert(start..start + lease.slots);
        self.classes[block.class].open.insert(block_index);
        self.shares.give_back(lease.client, block_index, lease.bytes);
        self.close_if_unused(block_index);
    }

    /// An open block goes back to the pool if all of its slots are free.
    fn close_if_unused(&mut self, block_index: usize) {
        let block = &self.blocks[block_index];
        let class = &mut self.classes[block.class];
        if block.free.len() == class.slots_per_block {
            class.open.remove(&block_index);
            self.unassigned.extend(block_index..block_index + class.blocks_per_slot);
        }
    }

    /// Bytes of all blocks, and of those that have leased slots.
    #[must_use]
    pub fn bytes(&self) -> (usize, usize) {
        let used = self.blocks.len() - self.unassigned.len();
        (self.guards_offset(), used * self.layout.block_bytes)
    }

    /// Slots leased now.
    #[must_use]
    pub fn leased(&self) -> usize {
        self.leased
    }
}

/// The first of so many blocks that follow each other.
fn neighbours(blocks: &BTreeSet<usize>, wanted: usize) -> Option<usize> {
    let mut run = 0..0;
    blocks.iter().find_map(|&block| {
        run = if block == run.end { run.start..block + 1 } else { block..block + 1 };
        (run.len() == wanted).then_some(run.start)
    })
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

    /// One slot.
    fn lease_one(slots: &mut Slots, size: SlotSize, owner: TaskId) -> Option<Lease> {
        slots.lease(size, (owner, None), 1).ok()
    }

    /// The naive oracle: every leased slot is a pair of byte ranges, compared with all others.
    #[derive(Default)]
    struct Oracle {
        /// Leases, and which of their slots have not been released.
        held: Vec<(Lease, BTreeSet<usize>)>,
    }

    impl Oracle {
        fn ranges(d: SlotDescriptor) -> [(u64, u64); 2] {
            [
                (d.input_offset, d.input_offset + u64::from(d.input_bytes)),
                (d.answer_offset, d.answer_offset + u64::from(d.answer_bytes_max)),
            ]
        }

        fn descriptors(&self) -> impl Iterator<Item = SlotDescriptor> {
            self.held.iter().flat_map(|(lease, slots)| slots.iter().map(|&index| lease.descriptor(index)))
        }

        fn check_new(&self, lease: &Lease, guards: (u64, u64)) {
            let own: Vec<SlotDescriptor> = (0..lease.slots()).map(|index| lease.descriptor(index)).collect();
            assert!(own.windows(2).all(|pair| pair[1].follows(&pair[0])), "{lease:?} is no run");
            for (index, new) in own.iter().enumerate() {
                for other in self.descriptors().chain(own[..index].iter().copied()) {
                    assert_ne!(other.slot, new.slot, "leased twice");
                    for (a, b) in Self::ranges(other).into_iter().flat_map(|a| Self::ranges(*new).map(|b| (a, b))) {
                        assert!(a.1 <= b.0 || b.1 <= a.0, "{lease:?} overlaps {other:?}");
                    }
                }
                assert!(Self::ranges(*new).iter().all(|range| range.1 <= guards.0), "{lease:?} reaches the guards");
                let guard = guards.0 + (u64::from(new.slot) + 1) * GUARD_BYTES as u64;
                assert!(guard <= guards.1, "the guard of {lease:?} leaves the arena");
            }
        }

        fn leased(&self) -> usize {
            self.held.iter().map(|(_, slots)| slots.len()).sum()
        }
    }

    proptest! {
        /// A lone request of a model's own most rows was refused for ever where blocks did not divide it.
        #[test]
        fn where_an_arena_has_room_all_slots_of_any_size_can_be_leased_beside_one_of_each_other(
            wanted in proptest::collection::vec((1usize..40_000, 1usize..300), 1..6),
            arena in 1usize..64,
        ) {
            let wanted: Vec<_> = wanted.iter().map(|&(bytes, slots)| (size(bytes, 8), slots)).collect();
            let (arena_bytes, sizes) = (arena << 20, wanted.iter().map(|(size, _)| *size).collect::<Vec<_>>());
            if has_room(arena_bytes, &wanted) {
                for &(most, count) in &wanted {
                    let mut slots = Slots::new(arena_bytes, &sizes).unwrap();
                    for size in sizes.iter().filter(|size| size.class_bytes() != most.class_bytes()) {
                        slots.lease(*size, (TaskId(1), None), 1).unwrap();
                    }
                    let mut left = count;
                    while left > 0 {
                        left -= slots.lease(most, (TaskId(9), None), left).unwrap().slots();
                    }
                }
            }
        }

        #[test]
        fn leases_never_overlap_and_all_room_comes_back(
            steps in proptest::collection::vec(
                (any::<bool>(), 0usize..5, 1usize..40, any::<prop::sample::Index>(), any::<prop::sample::Index>()),
                1..300,
            ),
        ) {
            // Models of the last ones come after the arena was laid out; of one a task takes several blocks.
            let sizes = [size(150_528, 16), size(16_203, 16), size(256, 40), size(5_000, 16), size(900_000, 16)];
            let arena = 8_800_000;
            let mut slots = Slots::new(arena, &sizes[..3]).unwrap();
            prop_assert!(sizes.iter().all(|size| slots.make_room(*size)) && !slots.make_room(size(2_000_000, 16)));
            let mut oracle = Oracle::default();
            for (step, (lease, class, wanted, pick, part)) in steps.into_iter().enumerate() {
                let owner = task(1_000 * step as u64);
                if lease {
                    if let Ok(lease) = slots.lease(sizes[class], (owner, None), wanted) {
                        prop_assert!((1..=wanted).contains(&lease.slots()));
                        oracle.check_new(&lease, (slots.guards_offset() as u64, arena as u64));
                        for index in 0..lease.slots() {
                            let owner = TaskId(owner.0 + index as u64);
                            prop_assert_eq!(slots.owner(lease.descriptor(index).slot), Some(owner));
                        }
                        let all = (0..lease.slots()).collect();
                        oracle.held.push((lease, all));
                    }
                } else if !oracle.held.is_empty() {
                    // From some slot on, all neighbours that are still held.
                    let at = pick.index(oracle.held.len());
                    let (lease, held) = &mut oracle.held[at];
                    let start = *held.iter().nth(part.index(held.len())).unwrap();
                    let end = (start..).find(|index| !held.contains(index)).unwrap();
                    held.retain(|index| !(start..end).contains(index));
                    slots.release(lease, start..end);
                    for index in start..end {
                        prop_assert_eq!(slots.owner(lease.descriptor(index).slot), None);
                    }
                    if held.is_empty() {
                        oracle.held.swap_remove(at);
                    }
                }
                prop_assert_eq!(slots.leased(), oracle.leased());
            }
            for (mut lease, held) in oracle.held.drain(..) {
                held.into_iter().for_each(|index| slots.release(&mut lease, index..index + 1));
            }
            prop_assert_eq!(slots.unassigned.len(), slots.blocks.len(), "a block without leases belongs to nobody");
        }
    }

    #[test]
    fn rows_of_a_request_are_neighbours_as_long_as_there_are_any() {
        let small = size(16, 16);
        let mut slots = Slots::new(64 << 20, &[small, size(1 << 16, 16)]).unwrap();
        let leases: Vec<Lease> =
            (0..100).map(|request| slots.lease(small, (task(request * 64), None), 64).unwrap()).collect();
        assert!(leases.iter().all(|lease| lease.slots() == 64));
        // What is free between others is used once no block is.
        let mut slots = Slots::new(16 * 1024, &[small]).unwrap();
        let mut singles: Vec<Lease> = (0..).map_while(|n| lease_one(&mut slots, small, task(n))).collect();
        singles.iter_mut().skip(1).step_by(2).for_each(|lease| slots.release(lease, 0..1));
        assert_eq!(slots.lease(small, (task(999), None), 4).unwrap().slots(), 1);
    }

    #[test]
    fn a_full_arena_refuses_and_serves_again_after_a_release() {
        let small = size(900, 0);
        let mut slots = Slots::new(16 * 1024, &[small]).unwrap();
        let mut leases: Vec<Lease> = (0..).map_while(|n| lease_one(&mut slots, small, task(n))).collect();
        assert!(leases.len() >= 12, "{} slots of {} bytes in 16 KiB", leases.len(), small.class_bytes());
        slots.release(&mut leases.pop().unwrap(), 0..1);
        assert!(lease_one(&mut slots, small, task(99)).is_some());
        assert!(lease_one(&mut slots, small, task(100)).is_none());
    }

    #[test]
    fn blocks_move_between_classes() {
        let (small, large) = (size(100, 0), size(100_000, 0));
        let mut slots = Slots::new(2_000_000, &[small, large]).unwrap();
        let all =
            |slots: &mut Slots, size| -> Vec<Lease> { (0..).map_while(|n| lease_one(slots, size, task(n))).collect() };
        let mut large_alone = all(&mut slots, large);
        assert!(lease_one(&mut slots, small, task(0)).is_none());
        let count = large_alone.len();
        large_alone.iter_mut().for_each(|lease| slots.release(lease, 0..1));
        let mut small_alone = all(&mut slots, small);
        small_alone.iter_mut().for_each(|lease| slots.release(lease, 0..1));
        assert_eq!(all(&mut slots, large).len(), count);
    }

    #[test]
    #[should_panic(expected = "is not leased in generation")]
    fn a_lease_of_an_earlier_generation_is_our_own_bug() {
        let small = size(100, 0);
        let mut slots = Slots::new(1 << 16, &[small]).unwrap();
        let mut first = lease_one(&mut slots, small, task(1)).unwrap();
        slots.release(&mut first, 0..1);
        lease_one(&mut slots, small, task(2)).unwrap();
        slots.release(&mut first, 0..1);
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

    #[test]
    fn an_arena_with_room_for_few_large_slots_serves_small_tasks_from_them() {
        let sizes: Vec<SlotSize> = (0..40).map(|power| size(1000 + (power << 14), 16)).collect();
        let mut slots = Slots::new(3_000_000, &sizes).unwrap();
        let leases: Vec<Option<Lease>> =
            (0..).zip(&sizes).step_by(13).map(|(n, &size)| lease_one(&mut slots, size, task(n))).collect();
        assert!(leases.iter().all(Option::is_some), "{leases:?}");
        let last = Slots::new(700_000, &[sizes[0], sizes[39]]).unwrap();
        assert!(last.largest_later() >= sizes[39].class_bytes() && last.classes.len() == 1);
    }

    #[test]
    fn an_arena_without_models_has_room_for_those_that_come() {
        let mut slots = Slots::new(64 << 20, &[]).unwrap();
        let (image, small) = (size(12 << 20, 4_000), size(400, 40));
        assert!(slots.make_room(image) && slots.make_room(small) && !slots.make_room(size(17 << 20, 0)));
        assert_eq!(slots.classes.len(), 2);
        let lone = lease_one(&mut slots, small, task(1)).unwrap();
        let images: Vec<Lease> = (2..).map_while(|n| lease_one(&mut slots, image, task(n))).collect();
        assert_eq!(images.len(), 4, "of 13 MiB each");
        assert!(slots.never_fit(image, 5) && !slots.never_fit(image, 4));
        for mut lease in images.into_iter().chain([lone]) {
            slots.release(&mut lease, 0..1);
        }
        assert_eq!(slots.bytes().1, 0, "all blocks are free");
    }
}
