//! What every plan must keep to, whatever it computes.

use std::collections::HashSet;

use super::*;
use crate::{
    extents::Extent,
    plan::{ALIGNMENT, CODE_MAX, DIMS_MAX, INPUTS_MAX, Place, View},
};

fn all_bytes(extents: &[Extent]) -> Vec<usize> {
    let range = |extent: &Extent| match extent.place {
        Place::Arena(at) => at..at + extent.bytes,
        Place::Weights(_) => 0..0,
    };
    extents.iter().flat_map(range).collect()
}

/// The bytes of the arena that a view of a pointwise step has, and no others.
fn bytes_of(view: &View, shape: &[usize]) -> Vec<usize> {
    let Place::Arena(at) = view.base.place else { return Vec::new() };
    let layout = Layout { shape: shape.to_vec(), strides: view.strides.clone(), offset: 0 };
    let bytes = view.base.ty.bytes();
    layout
        .places()
        .into_iter()
        .flat_map(|place| {
            let start = usize::try_from(at as i64 + place * bytes as i64).unwrap();
            start..start + bytes
        })
        .collect()
}

fn read_bytes(step: &Step) -> Vec<usize> {
    match step {
        Step::Pointwise(step) => step.inputs.iter().flat_map(|view| bytes_of(view, &step.shape)).collect(),
        step => all_bytes(&step.reads()),
    }
}

fn written_bytes(step: &Step) -> Vec<usize> {
    match step {
        Step::Pointwise(step) => bytes_of(&step.output, &step.shape),
        // Of rows that are a part of longer ones, only these.
        Step::Matmul(step) => {
            let output = step.output;
            let shape = [step.batches, step.m, step.n];
            let strides = vec![output.batch_stride as i64, output.row_stride as i64, 1];
            bytes_of(&View { base: output.base, strides }, &shape)
        }
        step => all_bytes(&step.writes()),
    }
}

/// That each byte is written before it is read, that no step writes what it reads elsewhere, that ports are left alone,
/// and that steps keep to their limits.
pub(super) fn check(plan: &Plan, weights: &[u8]) {
    let mut is_written = vec![false; plan.arena_bytes];
    let ports = |ports: &[Port]| ports.iter().map(|port| port.offset..port.offset + port.bytes()).collect::<Vec<_>>();
    for input in ports(&plan.inputs) {
        is_written[input].fill(true);
    }
    for (index, step) in plan.steps.iter().enumerate() {
        for read in step.reads() {
            if let Place::Weights(at) = read.place {
                assert!(at + read.bytes <= weights.len(), "step {index} reads past the weights");
            }
        }
        for byte in read_bytes(step) {
            assert!(is_written[byte], "step {index} reads what nobody wrote: {step:?}");
        }
        let reads: HashSet<usize> = read_bytes(step).into_iter().collect();
        for byte in written_bytes(step) {
            assert!(!reads.contains(&byte), "step {index} writes what it reads: {step:?}");
            let is_fault = plan.faults.is_some_and(|at| (at..at + 4 * plan.batch).contains(&byte));
            assert!(!is_fault, "step {index} writes faults");
            is_written[byte] = true;
        }
        if let Step::Pointwise(step) = step {
            assert!((1..=DIMS_MAX).contains(&step.shape.len()) && step.inputs.len() <= INPUTS_MAX);
            assert!(step.code.len() <= CODE_MAX && !step.code.is_empty());
        }
    }
    for output in ports(&plan.outputs) {
        assert!(is_written[output].iter().all(|&byte| byte), "an output is not written");
    }
    let all: Vec<_> = plan.inputs.iter().chain(&plan.outputs).collect();
    assert!(all.iter().all(|port| port.offset % ALIGNMENT == 0), "ports are aligned");
}
