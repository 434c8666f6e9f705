//! Places for tensors: those that are needed at the same time lie apart, the others may share bytes.
//!
//! A tensor is needed from the first step that writes it to the last one that reads it; a model's inputs from before
//! the first step on, its outputs until after the last one. Largest first, each gets the smallest gap that it fits
//! in between those that it must not overlap.

use crate::{
    extents::Extent,
    plan::{ALIGNMENT, Place, Step},
};

/// A tensor's bytes, at an address that no other one has while a plan is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// The address. Buffers are in the order of theirs.
    pub start: usize,
    /// So many.
    pub bytes: usize,
    /// Whether it is there before the first step.
    pub is_input: bool,
    /// Whether it is needed after the last step.
    pub is_output: bool,
}

/// Where buffers lie in the arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// The offset of each buffer.
    pub offsets: Vec<usize>,
    /// What they take together.
    pub bytes: usize,
}

/// From which step to which one a buffer is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Life {
    /// The first step that writes it, or 0.
    pub first: usize,
    /// The last one that reads or writes it, or the number of steps.
    pub last: usize,
}

/// When each buffer is needed; `None` if never.
#[must_use]
pub fn lives(steps: &[Step], buffers: &[Buffer]) -> Vec<Option<Life>> {
    let mut lives: Vec<Option<Life>> = buffers
        .iter()
        .map(|buffer| {
            (buffer.is_input || buffer.is_output).then_some(Life {
                first: if buffer.is_input { 0 } else { steps.len() },
                last: if buffer.is_output { steps.len() } else { 0 },
            })
        })
        .collect();
    for (index, step) in steps.iter().enumerate() {
        for extent in step.reads().into_iter().chain(step.writes()) {
            let Some(buffer) = buffer_of(extent, buffers) else { continue };
            let life = lives[buffer].get_or_insert(Life { first: index, last: index });
            (life.first, life.last) = (life.first.min(index), life.last.max(index));
        }
    }
    lives
}

fn buffer_of(extent: Extent, buffers: &[Buffer]) -> Option<usize> {
    match extent.place {
        Place::Arena(at) => Some(buffers.partition_point(|buffer| buffer.start <= at) - 1),
        Place::Weights(_) => None,
    }
}

/// Gives each buffer its place.
#[must_use]
pub fn assign(lives: &[Option<Life>], buffers: &[Buffer]) -> Assignment {
    let mut order: Vec<usize> = (0..buffers.len()).filter(|&index| lives[index].is_some()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(buffers[index].bytes), index));
    let mut assignment = Assignment { offsets: vec![0; buffers.len()], bytes: 0 };
    let mut placed: Vec<usize> = Vec::new();
    for index in order {
        let mut taken: Vec<(usize, usize)> = placed
            .iter()
            .filter(|&&other| overlap(lives[index], lives[other]))
            .map(|&other| (assignment.offsets[other], assignment.offsets[other] + room(buffers[other])))
            .collect();
        taken.sort_unstable();
        let offset = best_fit(&taken, room(buffers[index]));
        assignment.offsets[index] = offset;
        assignment.bytes = assignment.bytes.max(offset + room(buffers[index]));
        placed.push(index);
    }
    assignment
}

fn room(buffer: Buffer) -> usize {
    buffer.bytes.max(1).next_multiple_of(ALIGNMENT)
}

fn overlap(a: Option<Life>, b: Option<Life>) -> bool {
    a.zip(b).is_some_and(|(a, b)| a.first <= b.last && b.first <= a.last)
}

/// The start of the smallest gap between what is taken, in order of starts, that holds so many bytes; or behind all.
fn best_fit(taken: &[(usize, usize)], bytes: usize) -> usize {
    let mut best: Option<(usize, usize)> = None;
    let mut end = 0;
    for &(start, until) in taken {
        if start >= end + bytes && best.is_none_or(|(gap, _)| start - end < gap) {
            best = Some((start - end, end));
        }
        end = end.max(until);
    }
    best.map_or(end, |(_, start)| start)
}

/// Moves all places of a plan's steps from buffers' addresses to the arena.
pub fn relocate(steps: &mut [Step], buffers: &[Buffer], assignment: &Assignment) {
    for place in steps.iter_mut().flat_map(Step::places_mut) {
        if let Place::Arena(at) = place {
            let buffer = buffers.partition_point(|buffer| buffer.start <= *at) - 1;
            *at = *at - buffers[buffer].start + assignment.offsets[buffer];
        }
    }
}

#[cfg(test)]
mod tests;
