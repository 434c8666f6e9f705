//! The lengths that a GPU is prepared for where requests choose some. Each length of the model has a ladder, and tasks
//! are padded to its next rung: 1, 2, 4, 8, 16, 24, 32, 48, 64, .. and the longest, or the bounds of `batch_lengths:
//! bucketed`. What a rung of each ladder makes together is a *form*, if any task can have it; for each there are plans
//! of a few batch sizes, as far as a run may have so many elements (`batch_elements_max`). All of that is known, and
//! bounded, when the model is loaded.

use repository::BatchLengths;

use crate::{
    error::ExecutorError,
    executor::{
        few_sizes,
        onnx::{Groups, Rounding},
    },
};

/// Plans of one model, of all forms and batch sizes together. Each is prepared, run, captured and measured before the
/// model serves, and keeps a graph in the GPU's memory.
const PLANS_MAX: usize = 512;
/// From here on the middles between powers of two are rungs, too.
const MIDDLES_FROM: usize = 16;

/// The forms of a model.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rungs {
    /// For each length of the model its rungs, ascending.
    ladders: Vec<Vec<usize>>,
    /// In the order of their lengths.
    forms: Vec<Form>,
}

/// A rung of each ladder.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Form {
    pub(super) lengths: Vec<usize>,
    /// Batch sizes, ascending; the last is the largest of a run.
    pub(super) sizes: Vec<usize>,
}

impl Rungs {
    /// # Errors
    /// If there would be too many plans, or none; what to write says so.
    pub(super) fn of(groups: &Groups, batch_max: usize) -> Result<Self, ExecutorError> {
        let ladders: Vec<Vec<usize>> = (0..groups.binding.lengths.len()).map(|length| ladder(groups, length)).collect();
        let found = groups.binding.lengths.iter().zip(&ladders);
        let found: Vec<String> = found.map(|(length, ladder)| format!("{} of {length}", ladder.len())).collect();
        let found = found.join(", ");
        // Two of many rungs are too many to go through.
        let combinations = ladders.iter().map(Vec::len).fold(1, usize::saturating_mul);
        if combinations > PLANS_MAX {
            return Err(too_many(&found, &format!("{combinations} combinations, each with plans of several sizes")));
        }
        let mut forms = Vec::new();
        combine((groups, &ladders), batch_max, &mut Vec::new(), &mut forms);
        match forms.iter().map(|form: &Form| form.sizes.len()).sum::<usize>() {
            0 => Err(ExecutorError(format!(
                "found no request that max_bytes leaves room for, expected some of the lengths that executor = \
                 \"cuda\" prepares ({found}): raise max_bytes"
            ))),
            1..=PLANS_MAX => Ok(Self { ladders, forms }),
            plans => Err(too_many(&found, &format!("{plans} plans with the batch sizes"))),
        }
    }

    pub(super) fn forms(&self) -> &[Form] {
        &self.forms
    }

    /// The index of the form of exactly these lengths.
    pub(super) fn form(&self, lengths: &[usize]) -> Option<usize> {
        self.forms.binary_search_by(|form| form.lengths[..].cmp(lengths)).ok()
    }
}

impl Rounding for Rungs {
    fn round(&self, lengths: &[usize]) -> Vec<usize> {
        let next = |(&length, ladder): (&usize, &Vec<usize>)| match length {
            0 => 0,
            _ => ladder.get(ladder.partition_point(|&rung| rung < length)).copied().unwrap_or(length),
        };
        lengths.iter().zip(&self.ladders).map(next).collect()
    }

    fn has(&self, lengths: &[usize]) -> bool {
        self.form(lengths).is_some()
    }
}

fn too_many(found: &str, made: &str) -> ExecutorError {
    ExecutorError(format!(
        "the lengths that executor = \"cuda\" prepares ({found}) make {made}, expected at most {PLANS_MAX} plans: name \
         fewer with parameters: batch_lengths \"bucketed:64,256\", or lower max_dims or max_batch_size"
    ))
}

/// Adds the forms that begin with these lengths.
fn combine(
    (groups, ladders): (&Groups, &[Vec<usize>]),
    batch_max: usize,
    lengths: &mut Vec<usize>,
    forms: &mut Vec<Form>,
) {
    let Some(ladder) = ladders.get(lengths.len()) else {
        // The smallest task that is padded to this form.
        let least: Vec<usize> = lengths.iter().zip(ladders).map(|(&rung, ladder)| above(ladder, rung)).collect();
        if accepts(groups, &least) {
            let fit = groups.batching.elements_max / groups.elements(lengths).max(1);
            forms.push(Form { lengths: lengths.clone(), sizes: few_sizes(fit.clamp(1, batch_max)) });
        }
        return;
    };
    for &rung in ladder {
        lengths.push(rung);
        combine((groups, ladders), batch_max, lengths, forms);
        lengths.pop();
    }
}

/// The least length that is padded to this rung.
fn above(ladder: &[usize], rung: usize) -> usize {
    ladder.iter().rev().find(|&&other| other < rung).map_or(1, |before| before + 1)
}

fn ladder(groups: &Groups, length: usize) -> Vec<usize> {
    if let BatchLengths::Bucketed(bounds) = &groups.batching.lengths {
        return bounds.clone();
    }
    rungs(longest(groups, length))
}

fn rungs(longest: usize) -> Vec<usize> {
    let mut rungs = few_sizes(longest);
    rungs.retain(|&rung| rung.is_power_of_two() || rung >= MIDDLES_FROM || rung == longest);
    rungs
}

/// The longest that a length may be while all others are one.
fn longest(groups: &Groups, length: usize) -> usize {
    let fits = |candidate: usize| {
        let mut lengths = vec![1; groups.binding.lengths.len()];
        lengths[length] = candidate;
        accepts(groups, &lengths)
    };
    let (mut fit, mut over) = (1, 2);
    while fits(over) {
        (fit, over) = (over, over.saturating_mul(2));
    }
    while over - fit > 1 {
        let middle = fit + (over - fit) / 2;
        if fits(middle) {
            fit = middle;
        } else {
            over = middle;
        }
    }
    fit
}

/// Whether a request may choose these lengths.
fn accepts(groups: &Groups, lengths: &[usize]) -> bool {
    groups.inputs.iter().zip(&groups.binding.inputs).all(|(tensor, axes)| {
        let mut shape = tensor.shape.clone();
        let dims = tensor.variable.iter().flat_map(|variable| &variable.dims);
        dims.zip(axes).for_each(|(&dim, &(_, length))| shape[dim] = lengths[length]);
        tensor.accepts(&shape)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ladders_are_powers_of_two_with_middles_where_they_save_much() {
        assert_eq!(rungs(1), [1]);
        assert_eq!(rungs(6), [1, 2, 4, 6]);
        assert_eq!(rungs(100), [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]);
        for longest in 1..1000 {
            let rungs = rungs(longest);
            assert!(rungs.is_sorted_by(|one, other| one < other) && rungs.last() == Some(&longest));
            let least = |rung: usize| above(&rungs, rung);
            assert!(rungs.iter().all(|&rung| rung < 2 * least(rung)), "{longest}: none is padded to twice its own");
        }
    }
}
