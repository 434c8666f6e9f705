//! The constants of the policy `downbeat`, the same for all workloads.
//!
//! At 2 % below goodput none decides much: changed by a fifth it does no harm (`sim/tests/sensitivity.rs`).
//! They can be set for experiments, as in `downbeat:reserve=1.5,gpu_price=4`.

use std::fmt;

/// The constants of [`Policy::Downbeat`](super::Policy::Downbeat).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tuning {
    /// Weight of the newest task in the part of a model's tasks that is lost. It looks back on twenty thousand, of
    /// which 1 % are two hundred: that tells a loss from luck.
    pub task_weight: f64,
    /// The same in the part that was lost of late, which says whether more is asked for than can be served: it looks
    /// back on two thousand.
    pub late_weight: f64,
    /// Weight of the newest in the average gap between arrivals, and of the newest batch in averages of its SLOs, once
    /// there were as many: they look back on two hundred.
    pub gap_weight: f64,
    /// What counts as a little:
    /// - what a model loses above it is not held against other models, as perhaps its objective cannot be met;
    /// - by how much an SLO is below the mean before its tasks are in a hurry, and how many of them, or of the others,
    ///   make a class;
    /// - the part of what the losses look back on that a new model is taken to have served already.
    pub little: f64,
    /// A batch's target leaves time for so many of the intervals at which GPUs that run such batches free.
    pub reserve: f64,
    /// Batches beyond which larger ones save less than this part of a task's GPU time are not aimed at.
    pub saving: f64,
    /// So many milliseconds earlier has a model its turn for each per cent of its tasks that it loses. It is a time,
    /// not a part of the SLO: what helps a model is how many others it passes.
    pub urgency_ms: f64,
    /// Milliseconds of a request's latency that a millisecond of GPU time is worth: from 0 to infinity.
    pub gpu_price: f64,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            task_weight: 0.00005,
            late_weight: 0.0005,
            gap_weight: 0.005,
            little: 0.05,
            reserve: 1.1,
            saving: 0.03,
            urgency_ms: 20.0,
            gpu_price: 0.0,
        }
    }
}

impl Tuning {
    /// The constants' names, as they are written; beside them there is the price.
    pub const NAMES: [&'static str; 7] =
        ["task_weight", "late_weight", "gap_weight", "little", "reserve", "saving", "urgency_ms"];
    const PRICE: &'static str = "gpu_price";

    /// One of them, and the most that it can be; all but the price are above zero.
    fn constant(&mut self, name: &str) -> Option<(&mut f64, f64)> {
        Some(match name {
            "task_weight" => (&mut self.task_weight, 1.0),
            "little" => (&mut self.little, 1.0),
            "late_weight" => (&mut self.late_weight, 1.0),
            "gap_weight" => (&mut self.gap_weight, 1.0),
            "reserve" => (&mut self.reserve, 1000.0),
            "saving" => (&mut self.saving, 1.0),
            "urgency_ms" => (&mut self.urgency_ms, 1000.0),
            Self::PRICE => (&mut self.gpu_price, f64::INFINITY),
            _ => return None,
        })
    }

    /// The same with one constant times a factor; as it is if there is no such constant.
    #[must_use]
    pub fn scaled(mut self, name: &str, factor: f64) -> Self {
        if let Some((constant, _)) = self.constant(name) {
            *constant *= factor;
        }
        self
    }

    /// Reads `NAME=VALUE,..`; what is not named stays as it is by default.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let (mut tuning, mut named) = (Self::default(), Vec::new());
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or_else(|| part.to_owned())?;
            if named.contains(&name) {
                return Err(format!("{part} (named twice)"));
            }
            named.push(name);
            let (constant, max) = tuning.constant(name).ok_or_else(|| part.to_owned())?;
            let within = |value: &f64| (*value > 0.0 || name == Self::PRICE && *value == 0.0) && *value <= max;
            *constant = value.parse().ok().filter(within).ok_or_else(|| format!("{part} (at most {max})"))?;
        }
        Ok(tuning)
    }
}

impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut tuning, mut usual, mut mark) = (*self, Self::default(), "");
        for name in Self::NAMES.into_iter().chain([Self::PRICE]) {
            let Some(((value, _), (usual, _))) = tuning.constant(name).zip(usual.constant(name)) else { continue };
            if value != usual {
                write!(f, "{mark}{name}={value}")?;
                mark = ",";
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tuning_reads_as_it_is_written() {
        for name in Tuning::NAMES {
            let tuning = Tuning::default().scaled(name, 0.8);
            assert_ne!(tuning, Tuning::default(), "{name}");
            assert_eq!(Tuning::parse(&tuning.to_string()), Ok(tuning));
        }
        let tuning = Tuning::default().scaled("reserve", 1.2).scaled("little", 2.0);
        assert_eq!(tuning.to_string(), "little=0.1,reserve=1.32");
        assert_eq!(Tuning::parse("reserve=1.32,little=0.1"), Ok(tuning));
    }

    #[test]
    fn a_bad_constant_is_named() {
        let error = |text: &str| Tuning::parse(text).unwrap_err();
        assert_eq!(error("reserve=9,size=3"), "size=3");
        assert_eq!((error("reserve"), error("")), ("reserve".to_owned(), String::new()));
        assert_eq!(error("reserve=9,reserve=8"), "reserve=8 (named twice)");
        assert_eq!("downbeat:reserve=1.1".parse(), Ok(crate::Policy::Downbeat), "as it is anyway");
        for bad in ["0", "-1", "NaN", "inf", "1.5", "x"] {
            assert_eq!(error(&format!("little={bad}")), format!("little={bad} (at most 1)"));
        }
        for bad in ["-1", "NaN", "-inf", "x"] {
            assert_eq!(error(&format!("gpu_price={bad}")), format!("gpu_price={bad} (at most inf)"));
        }
        assert_eq!(Tuning::parse("gpu_price=inf").map(|tuning| tuning.gpu_price), Ok(f64::INFINITY));
    }
}
