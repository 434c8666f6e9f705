//! Slots: where a task's input waits to be read and where its output is written, in a frontend's registered arena.

use wincode::{SchemaRead, SchemaWrite};

use crate::ids::TaskId;

/// Where a task's bytes lie in its frontend's arena, and what opens them. Offsets count from the arena's start, whose
/// address is told to a backend when it connects to the frontend, never to the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct SlotDescriptor {
    /// Assigned by the frontend; below [`ImmediateData::SLOTS_MAX`], and with [`Self::GUARDED`] added if its input may
    /// come later than the task.
    pub slot: u32,
    /// Where the input starts, in bytes.
    pub input_offset: u64,
    /// Length of the input in bytes: all input tensors of the model, in the order of its configuration.
    pub input_bytes: u32,
    /// Where the answer goes: an [`AnswerHeader`](crate::backend_to_frontend::AnswerHeader), then the output tensors
    /// in the order of the model's configuration.
    pub answer_offset: u64,
    /// Room for the answer in bytes, its header included.
    pub answer_bytes_max: u32,
    /// The remote key of the run of slots that this one was leased with: it lets their inputs be READ and their answers
    /// be WRITTEN, and is void before any of them is leased again. [`Self::NO_KEY`]: that of the link opens them.
    pub key: u32,
}

impl SlotDescriptor {
    /// A task may be submitted before its input is in its slot (Symphony, section 4.3: preprocessing overlaps the time
    /// in the queue). Its slot is then *guarded*: in the frontend's arena there is a word for each slot, which says
    /// whose input lies there ([`guard_word`]), and whoever wants to READ such an input READs that word before.
    pub const GUARDED: u32 = 1 << 31;

    /// No slot's key: on devices where a part of a region cannot have one of its own for a while.
    pub const NO_KEY: u32 = 0;

    /// The same, guarded.
    #[must_use]
    pub fn guarded(self) -> Self {
        Self { slot: self.slot | Self::GUARDED, ..self }
    }

    /// The slot, guarded or not.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.slot & !Self::GUARDED
    }

    /// Whether the slot's guard must be READ before its input.
    #[must_use]
    pub fn is_guarded(&self) -> bool {
        self.slot & Self::GUARDED != 0
    }

    /// Whether this slot was leased as the neighbour after `before`, for a task of the same sizes: one READ then
    /// reaches both inputs, and one WRITE both answers.
    #[must_use]
    pub fn follows(&self, before: &Self) -> bool {
        before.slot.checked_add(1) == Some(self.slot)
            && before.input_offset.checked_add(u64::from(before.input_bytes)) == Some(self.input_offset)
            && before.answer_offset.checked_add(u64::from(before.answer_bytes_max)) == Some(self.answer_offset)
            && (before.input_bytes, before.answer_bytes_max) == (self.input_bytes, self.answer_bytes_max)
            && before.key == self.key
    }
}

/// Bytes of a slot's guard.
pub const GUARD_BYTES: usize = size_of::<u64>();

/// What a guard says once the input of this task lies in its slot. No other task has it, and [`GUARD_EMPTY`] none.
#[must_use]
pub fn guard_word(task: TaskId) -> u64 {
    !task.0
}

/// What a guard says until then.
pub const GUARD_EMPTY: u64 = 0;

const _: () = assert!(SlotDescriptor::GUARDED >= ImmediateData::SLOTS_MAX);

/// The 32 bits that a WRITE_WITH_IMM carries: which slot is answered, of a run its first, and
/// for which attempt.
///
/// The attempt keeps a late answer of an earlier run from being taken for the answer (ARCHITECTURE.md, "When something
/// fails").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImmediateData {
    /// The answered slot.
    pub slot: u32,
    /// The attempt that is answered, modulo [`Self::ATTEMPTS`].
    pub attempt: u16,
}

impl ImmediateData {
    const SLOT_BITS: u32 = 20;
    /// Slots that one frontend can have.
    pub const SLOTS_MAX: u32 = 1 << Self::SLOT_BITS;
    /// Attempts that an immediate can tell apart.
    pub const ATTEMPTS: u16 = 1 << (32 - Self::SLOT_BITS);

    /// Packs both into an immediate: slot in the lower 20 bits, attempt in the upper 12.
    #[must_use]
    pub fn pack(self) -> u32 {
        debug_assert!(self.slot < Self::SLOTS_MAX, "slot {} needs more than 20 bits", self.slot);
        u32::from(self.attempt % Self::ATTEMPTS) << Self::SLOT_BITS | (self.slot & (Self::SLOTS_MAX - 1))
    }

    /// Unpacks an immediate; every value means something, so a check against the slot's lease must follow.
    #[must_use]
    pub fn unpack(immediate: u32) -> Self {
        Self { slot: immediate & (Self::SLOTS_MAX - 1), attempt: (immediate >> Self::SLOT_BITS) as u16 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every slot with attempts at each bit's border, and every attempt with slots at theirs: no bit of one is in the
    /// other's.
    #[test]
    fn every_slot_and_every_attempt_is_packed_apart() {
        let check = |slot: u32, attempt: u16| {
            let packed = ImmediateData { slot, attempt }.pack();
            assert_eq!(packed, slot + u32::from(attempt) * ImmediateData::SLOTS_MAX);
            assert_eq!(ImmediateData::unpack(packed), ImmediateData { slot, attempt });
        };
        let borders = |bits: u32| (0..bits).flat_map(|bit| [(1u32 << bit) - 1, 1 << bit]).chain([(1 << bits) - 1]);
        for slot in 0..ImmediateData::SLOTS_MAX {
            borders(12).for_each(|attempt| check(slot, attempt as u16));
        }
        for attempt in 0..ImmediateData::ATTEMPTS {
            borders(20).for_each(|slot| check(slot, attempt));
        }
        // Attempts count on, and mean what they are modulo that.
        assert_eq!(ImmediateData { slot: 7, attempt: 4096 + 3 }.pack(), ImmediateData { slot: 7, attempt: 3 }.pack());
    }

    #[test]
    fn a_guarded_slot_is_no_neighbour_of_one_that_is_not() {
        let slot = SlotDescriptor {
            slot: 7,
            input_offset: 0,
            input_bytes: 8,
            answer_offset: 64,
            answer_bytes_max: 128,
            key: 9,
        };
        let next = SlotDescriptor { slot: 8, input_offset: 8, answer_offset: 192, ..slot };
        assert!(!SlotDescriptor { key: 8, ..next }.follows(&slot), "it is of another lease");
        assert!(next.follows(&slot) && next.guarded().follows(&slot.guarded()));
        assert!(!next.guarded().follows(&slot) && !next.follows(&slot.guarded()));
        assert_eq!((next.guarded().number(), next.guarded().is_guarded(), next.is_guarded()), (8, true, false));
    }

    proptest! {
        #[test]
        fn immediates_round_trip(immediate: u32) {
            prop_assert_eq!(ImmediateData::unpack(immediate).pack(), immediate);
        }
    }
}
