//! `parameters: selection` and what goes with it: an ensemble whose steps are models of one task.

use std::fmt::Display;

use prost_reflect::MapKey;
use proto::Span;

use crate::{
    config::file::{ConfigFile, get},
    ensemble::EnsembleStep,
    error::RepositoryError,
    model::ENSEMBLE,
    selection::{Agreement, Learning, Policy, Selection, WEIGHTS},
    tensor::{DataType, Tensor},
};

/// The key that makes an ensemble one.
const SELECTION: &str = "selection";
/// Keys that mean something beside it, and for which policies; of no name: for all.
const KEYS: [(&str, &[&str]); 10] = [
    ("confidence", &[]),
    ("reply_ms", &[]),
    ("slo_ms", &[]),
    ("seed", &["exp3", "epsilon_greedy", "canary", "shadow"]),
    (WEIGHTS, &["weighted", "canary"]),
    ("mirrored", &["shadow"]),
    ("eta", &["exp3", "exp4"]),
    ("exploration", &["exp3"]),
    ("epsilon", &["epsilon_greedy"]),
    ("window", &["exp3", "exp4", "epsilon_greedy"]),
];
/// The same, followed by the name of an output.
const AGREEMENT: &str = "agreement:";
const DEFAULT: &str = "default:";
const POLICIES: &str = "\"static\", \"majority\", \"weighted\", \"exp3\", \"exp4\", \"epsilon_greedy\", \"cascade\", \
                        \"fallback\", \"canary\" or \"shadow\"";
const WINDOW_MAX: u64 = 1 << 32;

impl ConfigFile<'_> {
    /// Whether its steps are models of one task.
    pub(super) fn selects(&self) -> bool {
        self.executor_name() == ENSEMBLE && self.parameter(SELECTION).is_some()
    }

    /// How one answer is made of its steps' predictions, if they are models of one task; `None` if they are a graph.
    pub(super) fn selection(
        &self,
        steps: &[EnsembleStep],
        inputs: &[Tensor],
        (outputs, tensors): (&[Tensor], &[usize]),
    ) -> Result<Option<Selection>, RepositoryError> {
        let Some(name) = self.parameter(SELECTION) else { return Ok(None) };
        let policy = self.policy_of(&name, steps)?;
        self.check_keys(&policy, outputs)?;
        self.check_members_of_selection(steps, inputs.len(), tensors)?;
        self.check_sizes(outputs)?;
        let agreements = outputs.iter().map(|output| self.agreement(output)).collect::<Result<Vec<_>, _>>()?;
        if policy == Policy::Cascade && !agreements.contains(&Agreement::Argmax) {
            let expected = "\"argmax\" for some output: its largest element says how sure a step is";
            return Err(self.error("agreement", "none of \"argmax\"", expected));
        }
        let confidence = self.number("confidence", 0.0, "0 to 1", |number| (0.0..=1.0).contains(&number))?;
        if policy == Policy::Cascade && confidence == 0.0 {
            return Err(self.error("confidence", "none", "above 0 and at most 1, when no further step is asked"));
        }
        let reply = self.number("reply_ms", 1.0, "milliseconds, 0 to 1000", |ms| (0.0..=1e3).contains(&ms))?;
        let seed = self.parameter("seed").map(|found| {
            found.parse().map_err(|_| self.error("seed", format_args!("\"{found}\""), "a whole number of 64 bits"))
        });
        let seed = seed.transpose()?.unwrap_or_default();
        let defaults = self.defaults(outputs)?;
        Ok(Some(Selection { policy, agreements, defaults, confidence, reply: Span::from_millis_f64(reply), seed }))
    }

    fn policy_of(&self, name: &str, steps: &[EnsembleStep]) -> Result<Policy, RepositoryError> {
        let is_part = |number: f64| (0.0..=1.0).contains(&number);
        let learning = |default: Learning, exploration: &str| {
            let eta = self.number("eta", default.eta, "above 0 and at most 10", |eta| eta > 0.0 && eta <= 10.0)?;
            let exploration = self.number(exploration, default.exploration, "0 to 1", is_part)?;
            let expected = format!("a whole number of requests, 8 to {WINDOW_MAX}");
            let is_window = |found: f64| found.fract() == 0.0 && (8.0..=WINDOW_MAX as f64).contains(&found);
            let window = self.number("window", default.window as f64, &expected, is_window)? as u64;
            Ok(Learning { eta, exploration, window })
        };
        Ok(match name {
            "static" => Policy::Static,
            "majority" => Policy::Majority,
            "weighted" => Policy::Weighted(self.weights_of(steps.len())?),
            "exp3" => Policy::Exp3(learning(Learning::EXP3, "exploration")?),
            "exp4" => Policy::Exp4(learning(Learning::EXP4, "exploration")?),
            "epsilon_greedy" => Policy::EpsilonGreedy(learning(Learning::EPSILON_GREEDY, "epsilon")?),
            "cascade" => Policy::Cascade,
            "fallback" => Policy::Fallback,
            "canary" => Policy::Canary(self.weights_of(steps.len())?),
            "shadow" if steps.len() < 2 => {
                return Err(self.error(
                    "ensemble_scheduling.step",
                    1,
                    "at least 2: the one that answers, then shadows",
                ));
            }
            "shadow" => Policy::Shadow(self.number("mirrored", 1.0, "0 to 1", is_part)?),
            other => return Err(self.error(SELECTION, format_args!("\"{other}\""), POLICIES)),
        })
    }

    /// One for each step.
    fn weights_of(&self, count: usize) -> Result<Vec<f64>, RepositoryError> {
        let expected = format!("{count} numbers, one for each step: finite, none below 0, some above");
        let Some(found) = self.parameter(WEIGHTS) else { return Err(self.error(WEIGHTS, "none", expected)) };
        let wrong = || self.error(WEIGHTS, format_args!("\"{found}\""), &expected);
        let weights = numbers(&found).filter(|weights| weights.len() == count).ok_or_else(wrong)?;
        let sum: f64 = weights.iter().sum();
        let fits = weights.iter().all(|weight| *weight >= 0.0) && sum > 0.0 && sum.is_finite();
        fits.then_some(weights).ok_or_else(wrong)
    }

    /// Nothing is there that would mean nothing.
    fn check_keys(&self, policy: &Policy, outputs: &[Tensor]) -> Result<(), RepositoryError> {
        let parameters = get(&self.message, "parameters");
        for key in parameters.as_map().into_iter().flatten().map(|(key, _)| key) {
            let MapKey::String(key) = key else { continue };
            let of_output = [AGREEMENT, DEFAULT].into_iter().find_map(|prefix| key.strip_prefix(prefix));
            if let Some(output) = of_output
                && !outputs.iter().any(|tensor| tensor.name == output)
            {
                let names: Vec<&str> = outputs.iter().map(|tensor| tensor.name.as_str()).collect();
                return Err(self.error(key, "no such output", format_args!("one of: {}", names.join(", "))));
            }
            let policies = KEYS.iter().find(|(known, _)| known == key).map_or(&[][..], |(_, policies)| policies);
            if !policies.is_empty() && !policies.contains(&policy.name()) {
                let expected = format!("it for a selection of {} only", policies.join(", "));
                return Err(self.error(key, format_args!("it beside \"{}\"", policy.name()), expected));
            }
        }
        let cache = get(&self.message, "response_cache");
        if cache.as_message().is_some_and(|cache| get(cache, "enable").as_bool() == Some(true)) {
            let expected = "none: what is selected changes, and a kept answer says nothing of who gave it";
            return Err(self.error("response_cache", "it beside selection", expected));
        }
        Ok(())
    }

    /// All steps take inputs of the ensemble and make all of its outputs, which are these tensors.
    fn check_members_of_selection(
        &self,
        steps: &[EnsembleStep],
        inputs: usize,
        outputs: &[usize],
    ) -> Result<(), RepositoryError> {
        for (at, step) in steps.iter().enumerate() {
            let key = |key: &str| format!("ensemble_scheduling.step[{at}].{key}");
            if steps[..at].iter().any(|other| (&other.model, &other.version) == (&step.model, &step.version)) {
                return Err(self.error(&key("model_name"), format_args!("'{}' again", step.model), "another one"));
            }
            if let Some((input, _)) = step.inputs.iter().find(|(_, from)| *from >= inputs) {
                let expected = "an input of the ensemble: with selection no step takes what another makes";
                return Err(self.error(&key(&format!("input_map['{input}']")), "another tensor", expected));
            }
            let made: Vec<usize> = step.outputs.iter().map(|(_, to)| *to).collect();
            if made.len() != outputs.len() || !outputs.iter().all(|output| made.contains(output)) {
                let expected = "each output of the ensemble once, and nothing else: with selection all steps make them";
                return Err(self.error(&key("output_map"), format_args!("{} tensors", made.len()), expected));
            }
        }
        Ok(())
    }

    fn check_sizes(&self, outputs: &[Tensor]) -> Result<(), RepositoryError> {
        if let Some(output) = outputs.iter().find(|output| output.variable.is_some()) {
            let expected = "one size, and no strings: what is selected from is compared element by element";
            return Err(self.error(&format!("output '{}'", output.name), "a size that differs", expected));
        }
        Ok(())
    }

    fn agreement(&self, output: &Tensor) -> Result<Agreement, RepositoryError> {
        let key = format!("{AGREEMENT}{}", output.name);
        let Some(found) = self.parameter(&key) else { return Ok(Agreement::Equal) };
        let expected = "\"equal\", \"argmax\" or \"within EPS\" with a finite EPS of at least 0";
        let within = || {
            let eps: f64 = found.strip_prefix("within ")?.trim().parse().ok()?;
            (eps.is_finite() && eps >= 0.0).then_some(Agreement::Within(eps))
        };
        let agreement = match found.as_str() {
            "equal" => return Ok(Agreement::Equal),
            "argmax" => Agreement::Argmax,
            _ => within().ok_or_else(|| self.error(&key, format_args!("\"{found}\""), expected))?,
        };
        if matches!(output.datatype, DataType::Fp16 | DataType::Bf16 | DataType::Bool) {
            let found = format!("\"{found}\" for {}", output.datatype);
            return Err(self.error(&key, found, "\"equal\": its elements are not compared as numbers"));
        }
        Ok(agreement)
    }

    /// One row of each output, if some has one.
    fn defaults(&self, outputs: &[Tensor]) -> Result<Option<Vec<Vec<u8>>>, RepositoryError> {
        let key = |output: &Tensor| format!("{DEFAULT}{}", output.name);
        if !outputs.iter().any(|output| self.parameter(&key(output)).is_some()) {
            return Ok(None);
        }
        let one = |output: &Tensor| {
            let (key, elements) = (key(output), output.elements());
            let expected =
                format!("{elements} numbers of {}, or one for all, as for all other outputs", output.datatype);
            let Some(found) = self.parameter(&key) else { return Err(self.error(&key, "none", expected)) };
            let wrong = || self.error(&key, format_args!("\"{found}\""), &expected);
            let texts: Vec<&str> = found.split(',').map(str::trim).collect();
            let texts = match texts[..] {
                [all] => vec![all; elements],
                _ if texts.len() == elements => texts,
                _ => return Err(wrong()),
            };
            let row = texts.into_iter().map(|text| bytes_of(output.datatype, text)).collect::<Option<Vec<_>>>();
            row.map(|row| row.concat()).ok_or_else(wrong)
        };
        outputs.iter().map(one).collect::<Result<_, _>>().map(Some)
    }

    fn number(
        &self,
        key: &str,
        default: f64,
        expected: &(impl Display + ?Sized),
        fits: impl Fn(f64) -> bool,
    ) -> Result<f64, RepositoryError> {
        let Some(found) = self.parameter(key) else { return Ok(default) };
        let number = found.parse().ok().filter(|number| fits(*number));
        number.ok_or_else(|| self.error(key, format_args!("\"{found}\""), expected))
    }
}

/// Finite numbers with commas between them.
fn numbers(text: &str) -> Option<Vec<f64>> {
    let number = |text: &str| text.trim().parse::<f64>().ok().filter(|number| number.is_finite());
    text.split(',').map(number).collect()
}

/// An element as a tensor has it; `None` if it is none of that type, or not finite.
fn bytes_of(datatype: DataType, text: &str) -> Option<Vec<u8>> {
    macro_rules! whole {
        ($type:ty) => {
            text.parse::<$type>().ok().map(|number| number.to_le_bytes().to_vec())
        };
    }
    match datatype {
        DataType::Bool => text.parse::<bool>().ok().map(|flag| vec![u8::from(flag)]),
        DataType::Uint8 => whole!(u8),
        DataType::Uint16 => whole!(u16),
        DataType::Uint32 => whole!(u32),
        DataType::Uint64 => whole!(u64),
        DataType::Int8 => whole!(i8),
        DataType::Int16 => whole!(i16),
        DataType::Int32 => whole!(i32),
        DataType::Int64 => whole!(i64),
        DataType::Fp32 => text.parse::<f32>().ok().filter(|n| n.is_finite()).map(|n| n.to_le_bytes().to_vec()),
        DataType::Fp64 => text.parse::<f64>().ok().filter(|n| n.is_finite()).map(|n| n.to_le_bytes().to_vec()),
        DataType::Fp16 | DataType::Bf16 | DataType::Bytes => None,
    }
}

#[cfg(test)]
mod tests;
