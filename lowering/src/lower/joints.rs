//! Concatenations that begin alike, as those of DenseNet do, each of which has all that was before and one part more:
//! they share the memory of the longest.

use std::collections::HashMap;

use tract_onnx::{prelude::*, tract_core::ops::array::TypedConcat};

use crate::lower::stored::Stored;

/// The concatenations of a graph.
#[derive(Debug, Default)]
pub(super) struct Joints {
    /// For each the longest that begins as it does.
    leaders: HashMap<usize, usize>,
    /// The memory of the longest ones, and how many parts are there.
    known: HashMap<usize, (Stored, usize)>,
}

impl Joints {
    pub(super) fn of(graph: &TypedModel) -> Self {
        let mut alike: HashMap<(usize, OutletId), Vec<usize>> = HashMap::new();
        for node in &graph.nodes {
            if let (Some(op), Some(&first)) = (node.op_as::<TypedConcat>(), node.inputs.first()) {
                alike.entry((op.axis, first)).or_default().push(node.id);
            }
        }
        let mut joints = Self::default();
        for ids in alike.values() {
            for &id in ids {
                let inputs = &graph.node(id).inputs;
                let begins = |other: &&usize| graph.node(**other).inputs.starts_with(inputs);
                let longest = ids.iter().filter(begins).max_by_key(|other| graph.node(**other).inputs.len());
                joints.leaders.insert(id, longest.copied().unwrap_or(id));
            }
        }
        joints
    }

    /// The longest concatenation that begins as this one.
    pub(super) fn leader(&self, node: usize) -> usize {
        self.leaders.get(&node).copied().unwrap_or(node)
    }

    /// Its memory, and how many of its parts are there.
    pub(super) fn known(&self, leader: usize) -> Option<(Stored, usize)> {
        self.known.get(&leader).cloned()
    }

    pub(super) fn remember(&mut self, leader: usize, stored: Stored, written: usize) {
        self.known.insert(leader, (stored, written));
    }
}
