//! What all cases came to.

use std::{collections::BTreeMap, fmt::Write as _};

use crate::{arms::Arm, cases::Case, judge::Verdict};

const HEAD: &str = "\
# Operators

What runs ONNX models here, by ONNX's own tests of those who run them (PyPI's `onnx`, so nobody here wrote them):
`onnx` is rten, the engine that is embedded, on the CPU; `cuda` is a plan for GPUs, computed on the CPU by what says
what each of its steps means; `onnxruntime` is ONNX Runtime's library on the CPU. Each test is asked as it is, and once
more with all inputs but the first as weights, as exporters write axes, kernels and scales. Allowed are a thousandth of
each number, as ONNX has it, 1e-6, where ONNX has 1e-7, and, as where sums cancel out rounding alone is more than that,
a hundred-thousandth of a tensor's largest number, and one step where a case quantises. In FP16 it is a hundredth of
each and of the largest (it has no 10,003 beside 10,000, and nothing above 65,504: what is wrong there is that). Tests
of sequences, and of types that the protocol does not have, are left out.

This page is made by `tests/onnx/run --update`, and `tests/onnx/run` checks that it is still true.

";

const KINDS: &str = "\
\n## By what users bring

Cases that passed, of all, beside ONNX Runtime in Python: networks quantised by its own tools (static, INT8 and UINT8,
for each tensor or channel, as QDQ and as operators), `ai.onnx.ml` with two and with more classes, recurrent layers
with a free batch, Resize by sizes, Squeeze without axes, If, functions, RandomNormalLike, FP16, and files that users
brought (`stranger`). Allowed are a ten-thousandth of each number and 1e-5, one step of the last scale where a network
is quantised (of what ONNX Runtime computes as it is, or of what it does when it takes operators together), and 1e-2 in
FP16. What did not pass was refused when it was loaded, unless it is named below.

";

/// How many cases ended in which way.
type Counts = BTreeMap<Verdict, usize>;

/// What is known of the cases that have been judged.
#[derive(Debug, Default)]
pub(crate) struct Page {
    /// Cases whose tensors no client can send.
    pub(crate) skipped: usize,
    all: BTreeMap<Arm, Counts>,
    /// Of cases with one operator.
    operators: BTreeMap<String, BTreeMap<Arm, Counts>>,
    /// Of kinds that users bring.
    kinds: BTreeMap<String, BTreeMap<Arm, Counts>>,
    /// What was loaded and did not pass.
    bad: BTreeMap<(Arm, Verdict), Vec<String>>,
}

impl Page {
    pub(crate) fn add(&mut self, case: &Case, arm: Arm, verdict: Verdict) {
        let count = |arms: &mut BTreeMap<Arm, Counts>| {
            *arms.entry(arm).or_default().entry(verdict).or_default() += 1;
        };
        let operators = case.operators();
        if let Some(kind) = case.kind() {
            count(self.kinds.entry(kind.to_owned()).or_default());
        } else {
            count(&mut self.all);
            if let (Some(operator), 1) = (operators.first(), operators.len()) {
                count(self.operators.entry((*operator).to_owned()).or_default());
            }
        }
        if [Verdict::Failed, Verdict::Wrong].contains(&verdict) {
            self.bad.entry((arm, verdict)).or_default().push(case.name.clone());
        }
    }

    /// A line for each arm.
    pub(crate) fn summary(&self) -> String {
        self.all.iter().fold(String::new(), |mut text, (arm, counts)| {
            let [passed, refused, failed, wrong] = every(counts);
            let _ = writeln!(
                text,
                "{}: {passed} passed, {refused} refused, {failed} failed, {wrong} wrong, {} skipped",
                arm.name(),
                self.skipped
            );
            text
        })
    }

    /// All of it.
    pub(crate) fn markdown(&self) -> String {
        let mut text = HEAD.to_owned();
        text.push_str(
            "| executor | passed | refused when loaded | failed when run | wrong |\n\
             | --- | --- | --- | --- | --- |\n",
        );
        for (arm, counts) in &self.all {
            let [passed, refused, failed, wrong] = every(counts);
            let _ = writeln!(text, "| `{}` | {passed} | {refused} | {failed} | {wrong} |", arm.name());
        }
        if !self.kinds.is_empty() {
            text.push_str(KINDS);
            table(&mut text, "kind", &self.kinds);
        }
        text.push_str("\n## By operator\n\nCases of one operator that passed, of all.\n\n");
        table(&mut text, "operator", &self.operators);
        text.push_str("\n## What was loaded and did not pass\n\n");
        for ((arm, verdict), cases) in &self.bad {
            let _ = writeln!(text, "- `{}`, {}: {}", arm.name(), verdict.name(), cases.join(", "));
        }
        text
    }
}

/// A row for each of these, with what passed for each arm.
fn table(text: &mut String, of: &str, rows: &BTreeMap<String, BTreeMap<Arm, Counts>>) {
    let _ = write!(text, "| {of} |");
    Arm::ALL.iter().for_each(|arm| text.push_str(&format!(" `{}` |", arm.name())));
    text.push_str("\n| --- | --- | --- | --- | --- |\n");
    for (name, arms) in rows {
        let cell = |arm| {
            let counts = every(arms.get(&arm).unwrap_or(&Counts::new()));
            format!("{} of {}", counts[0], counts.iter().sum::<usize>())
        };
        let cells = Arm::ALL.map(cell).join(" | ");
        let _ = writeln!(text, "| {name} | {cells} |");
    }
}

fn every(counts: &Counts) -> [usize; 4] {
    [Verdict::Passed, Verdict::Refused, Verdict::Failed, Verdict::Wrong]
        .map(|verdict| counts.get(&verdict).copied().unwrap_or_default())
}
