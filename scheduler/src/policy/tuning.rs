//! The constants of the policy `downbeat`, the same for all workloads.
//!
//! None decides much: changed by a fifth, each leaves every published goodput within 1 % (`sim/tests/sensitivity.rs`).
//! They can be set for experiments, as in `downbeat:worth=7.2,spare=0.1`.

use std::fmt;

/// The constants of [`Policy::Downbeat`](super::Policy::Downbeat).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tuning {
    /// Weight of the newest batch in each average, once there were as many: they look back on about fifty.
    pub batch_weight: f64,
    /// Weight of the newest task in the part of a model's tasks that is lost. It looks back on twenty thousand, of
    /// which 1 % are two hundred: that tells a loss from luck.
    pub task_weight: f64,
    /// What counts as a little, or as a few:
    /// - lost tasks, of all: with more, a model has more to do than it can, and it gives up heads by what that gains;
    ///   what it loses above that is not held against other models either, as perhaps its objective cannot be met;
    /// - batches that wait for a GPU, of all: from there on windows open earlier by all of the slack;
    /// - what a task may take more of a GPU's time because its batch starts early;
    /// - the time until some GPU frees, in the slack of a model that keeps less than one busy;
    /// - by how much an SLO is below the mean before its tasks are in a hurry, and how many of them, or of the others,
    ///   make a class;
    /// - the part of what the losses look back on that a new model is taken to have served already.
    pub little: f64,
    /// The part of an SLO that a batch's target leaves unused: how much more a GPU may keep it waiting, or its tasks
    /// may take to come, than usual.
    pub spare: f64,
    /// Each task that a batch gains is worth so many heads, times the part of l(b) that does not grow with b. A batch
    /// that is too small wastes more than its own time: those after it start later, and are smaller for it.
    pub worth: f64,
    /// Where waits are rare, windows open earlier by this part of the gathering time. With all of it batches get so
    /// small that GPUs are busy, and candidates wait, at three quarters of the peak load.
    pub rare_waits: f64,
    /// Where memory is short, hundreds of models share a GPU, and most are asked for rarely: a batch that fewer tasks
    /// would join is not held back, as it would only meet others at its end.
    pub joiners: f64,
    /// So many milliseconds earlier has a model its turn for each per cent of its tasks that it loses. It is a time,
    /// not a part of the SLO: what helps a model is how many others it passes.
    pub urgency_ms: f64,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            batch_weight: 0.02,
            task_weight: 0.00005,
            little: 0.05,
            spare: 0.125,
            worth: 6.0,
            rare_waits: 0.5,
            joiners: 4.0,
            urgency_ms: 20.0,
        }
    }
}

impl Tuning {
    /// The constants' names, as they are written.
    pub const NAMES: [&'static str; 8] =
        ["batch_weight", "task_weight", "little", "spare", "worth", "rare_waits", "joiners", "urgency_ms"];

    /// One of them, and the most that it can be; all are above zero.
    fn constant(&mut self, name: &str) -> Option<(&mut f64, f64)> {
        Some(match name {
            "batch_weight" => (&mut self.batch_weight, 1.0),
            "task_weight" => (&mut self.task_weight, 1.0),
            "little" => (&mut self.little, 1.0),
            "spare" => (&mut self.spare, 1.0),
            "worth" => (&mut self.worth, 1000.0),
            "rare_waits" => (&mut self.rare_waits, 1.0),
            "joiners" => (&mut self.joiners, 1000.0),
            "urgency_ms" => (&mut self.urgency_ms, 1000.0),
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
            let within = |value: &f64| *value > 0.0 && *value <= max;
            *constant = value.parse().ok().filter(within).ok_or_else(|| format!("{part} (at most {max})"))?;
        }
        Ok(tuning)
    }
}

impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut tuning, mut usual, mut mark) = (*self, Self::default(), "");
        for name in Self::NAMES {
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
        let tuning = Tuning::default().scaled("worth", 1.5).scaled("little", 2.0);
        assert_eq!(tuning.to_string(), "little=0.1,worth=9");
        assert_eq!(Tuning::parse("worth=9,little=0.1"), Ok(tuning));
    }

    #[test]
    fn a_bad_constant_is_named() {
        let error = |text: &str| Tuning::parse(text).unwrap_err();
        assert_eq!(error("worth=9,size=3"), "size=3");
        assert_eq!((error("worth"), error("")), ("worth".to_owned(), String::new()));
        assert_eq!(error("worth=9,worth=8"), "worth=8 (named twice)");
        assert_eq!("downbeat:worth=6".parse(), Ok(crate::Policy::Downbeat), "as it is anyway");
        for bad in ["0", "-1", "NaN", "inf", "1.5", "x"] {
            assert_eq!(error(&format!("little={bad}")), format!("little={bad} (at most 1)"));
        }
    }
}
