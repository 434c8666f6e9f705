//! What each step of a plan means: it is computed here on the CPU, naively.
//!
//! Tests of the lowering and of kernels compare with it, and the driver that has no GPU runs plans by it. Numbers are
//! binary32 in between (sums are wider), and rounded to a tensor's type when they are stored. A plan that breaks a rule
//! of [`crate::plan`] panics: it is a bug of who made it.

mod images;
mod memory;
mod pointwise;
mod products;
mod rows;
#[cfg(test)]
mod tests;

pub use memory::Memory;

use crate::plan::{Plan, Step};

/// Clears the plan's faults and runs all its steps.
pub fn run(plan: &Plan, memory: &mut Memory<'_>) {
    if let Some(faults) = plan.faults {
        memory.arena[faults..faults + 4 * plan.batch].fill(0);
    }
    for step in &plan.steps {
        run_step(step, plan.faults, memory);
    }
}

/// Runs one step of a plan whose faults lie at `faults` of the arena.
pub fn run_step(step: &Step, faults: Option<usize>, memory: &mut Memory<'_>) {
    match step {
        Step::Conv(step) => products::conv(step, memory),
        Step::Matmul(step) => products::matmul(step, memory),
        Step::Pointwise(step) => pointwise::pointwise(step, memory),
        Step::Reduce(step) => rows::reduce(step, memory),
        Step::Softmax(step) => rows::softmax(step, memory),
        Step::Norm(step) => rows::norm(step, memory),
        Step::Attention(step) => products::attention(step, memory),
        Step::Pool(step) => images::pool(step, memory),
        Step::Gather(step) => rows::gather(step, faults, memory),
        Step::Resize(step) => images::resize(step, memory),
    }
}
