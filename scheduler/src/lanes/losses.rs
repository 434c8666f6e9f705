//! What each application of a dynamic model loses, and what its requests weigh for it.
//!
//! A GPU that has too much to do serves most requests if it serves the short ones, and then an application whose
//! requests take long is served hardly ever. So a request weighs the more the larger a part its application has lost
//! of late: `e^(STEEPNESS d)`, where d is that part less the mean of all applications' parts. What is served by
//! weight and time is a compromise between as many requests as possible and as large a part of each application's.
//!
//! An application is new with the mean of all. Requests whose client asks for less than what they take alone are not
//! counted: else whoever asks for the impossible would have the GPU. Weights are bounded ([`EXPONENT_MAX`]), so that
//! whoever sends too much takes a bounded part from others.

use std::collections::BTreeMap;

use crate::dynamic::APPLICATIONS_MAX;

/// The weight of a request in its application's lost part.
const REQUEST_WEIGHT: f64 = 0.01;
/// How fast weights grow with lost parts. With 8 the worst application of Orloj's settings is worse off than under
/// `clockwork` in more of them, with 12 fewer requests are served than under `orloj` in more of them.
const STEEPNESS: f64 = 10.0;
/// The exponent of the greatest weight, 7.4, and of the least with a minus.
const EXPONENT_MAX: f64 = 2.0;

/// One model's.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// Parts by application, each from 0 to 1.
    lost: BTreeMap<u8, f64>,
}

impl Losses {
    /// A request has come to its end, and is late with this probability; 1: it was given up.
    pub(super) fn handle_ended(&mut self, application: u8, late: f64) {
        let mean = self.mean();
        let lost = self.lost.entry(known(application)).or_insert(mean);
        *lost += REQUEST_WEIGHT * (late - *lost);
    }

    /// What a request of an application weighs; 1 on average, about.
    pub(super) fn weight(&self, application: u8) -> f64 {
        let mean = self.mean();
        let lost = self.lost.get(&known(application)).copied().unwrap_or(mean);
        (STEEPNESS * (lost - mean)).clamp(-EXPONENT_MAX, EXPONENT_MAX).exp()
    }

    fn mean(&self) -> f64 {
        self.lost.values().sum::<f64>() / self.lost.len().max(1) as f64
    }
}

/// The number that an application counts under.
fn known(application: u8) -> u8 {
    application.min(APPLICATIONS_MAX as u8 - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The oracle keeps all that ended, and weighs each by how long ago that was.
        #[test]
        fn a_weight_follows_what_an_application_lost_less_what_all_did(
            ended in prop::collection::vec((any::<u8>(), 0.0f64..=1.0), 0..300),
        ) {
            let mut losses = Losses::default();
            let mut all: BTreeMap<u8, (f64, Vec<f64>)> = BTreeMap::new();
            let part = |(first, late): &(f64, Vec<f64>)| {
                let keeps = |count: usize| (1.0 - REQUEST_WEIGHT).powi(count as i32);
                let weighed = late.iter().rev().enumerate().map(|(age, late)| REQUEST_WEIGHT * keeps(age) * late);
                first * keeps(late.len()) + weighed.sum::<f64>()
            };
            let mean = |all: &BTreeMap<u8, _>| all.values().map(part).sum::<f64>() / all.len().max(1) as f64;
            for (application, late) in ended {
                losses.handle_ended(application, late);
                let first = mean(&all);
                let known = usize::from(application).min(APPLICATIONS_MAX - 1) as u8;
                all.entry(known).or_insert((first, Vec::new())).1.push(late);
            }
            for application in 0..=255 {
                let known = usize::from(application).min(APPLICATIONS_MAX - 1) as u8;
                let worse = all.get(&known).map_or(0.0, |ended| part(ended) - mean(&all));
                let most = EXPONENT_MAX.exp();
                let expected = (STEEPNESS * worse).exp().clamp(1.0 / most, most);
                let found = losses.weight(application);
                prop_assert!((found / expected - 1.0).abs() < 1e-9, "{}: {} {}", application, found, expected);
            }
            prop_assert!(losses.lost.len() <= APPLICATIONS_MAX);
        }
    }
}
