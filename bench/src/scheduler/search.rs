//! The search for the highest rate that the scheduler keeps up with: bisection, each rate tried a few times.
//!
//! A rate that fails is tried again, as an operating system that takes a core away for some milliseconds breaks any
//! bound on waits; it counts as kept if one try meets the criterion in full. Nothing is subtracted from what a try
//! measured.

/// The search ends when its bounds are this close, as a part of the first upper one.
pub(crate) const RESOLUTION: f64 = 0.04;
/// How often a rate is tried before it counts as too high.
pub(crate) const TRIES_MAX: u32 = 3;

/// What a search found.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Found<M> {
    /// The try at the highest rate that met the criterion; `None` if none did.
    pub kept: Option<M>,
    /// The last try at the lowest rate that did not meet it; `None` if every rate did.
    pub refused: Option<M>,
}

/// Tries a rate until it is kept, a few times; the last try.
pub(crate) fn attempt<M>(mut measure: impl FnMut() -> M, is_kept: impl Fn(&M) -> bool) -> M {
    let mut last = measure();
    for _ in 1..TRIES_MAX {
        if is_kept(&last) {
            break;
        }
        last = measure();
    }
    last
}

/// Searches rates from 0 to `upper_rps`, both excluded. `measure` is given a rate and what part of the search is done
/// at least, from 0 to 1.
pub(crate) fn search<M>(
    upper_rps: f64,
    mut measure: impl FnMut(f64, f64) -> M,
    is_kept: impl Fn(&M) -> bool,
) -> Found<M> {
    let mut found = Found { kept: None, refused: None };
    let mut bounds = (0.0, upper_rps);
    let width = |bounds: (f64, f64)| (bounds.1 - bounds.0) / upper_rps;
    while width(bounds) > RESOLUTION {
        let rate_rps = f64::midpoint(bounds.0, bounds.1);
        let done = width(bounds).log2() / RESOLUTION.log2();
        let last = attempt(|| measure(rate_rps, done), &is_kept);
        if is_kept(&last) {
            bounds.0 = rate_rps;
            found.kept = Some(last);
        } else {
            bounds.1 = rate_rps;
            found.refused = Some(last);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A machine with a limit, which fails some tries below it, but never all of one rate.
        #[test]
        fn finds_the_limit_of_a_machine_that_sometimes_stalls(
            upper_rps in 1.0f64..1e8,
            part in 0.0f64..1.5,
            stalls in proptest::collection::vec(0..TRIES_MAX, 32),
        ) {
            let limit = part * upper_rps;
            let mut stalls = stalls.into_iter().cycle();
            let mut tries = Vec::<f64>::new();
            let mut stalls_left = 0;
            let mut done_before = 0.0;
            let found = search(
                upper_rps,
                |rate_rps, done| {
                    assert!((done_before..=1.0).contains(&done), "{done} after {done_before}");
                    done_before = done;
                    if tries.last() == Some(&rate_rps) {
                        stalls_left = u32::saturating_sub(stalls_left, 1);
                    } else {
                        stalls_left = stalls.next().expect("endless");
                    }
                    tries.push(rate_rps);
                    (rate_rps, rate_rps <= limit && stalls_left == 0)
                },
                |&(_, is_kept)| is_kept,
            );
            let kept = found.kept.map_or(0.0, |(rate_rps, _)| rate_rps);
            let refused = found.refused.map_or(upper_rps, |(rate_rps, _)| rate_rps);
            prop_assert!(kept <= limit && (refused > limit || refused == upper_rps));
            prop_assert!(refused - kept <= RESOLUTION * upper_rps * (1.0 + 1e-9), "{kept} to {refused}");
            let most = (1.0 / RESOLUTION).log2().ceil() as usize * TRIES_MAX as usize;
            prop_assert!(tries.len() <= most, "{} tries", tries.len());
        }
    }

    #[test]
    fn tries_a_rate_that_fails_so_often_and_a_rate_that_is_kept_once() {
        let mut tries = Vec::new();
        let found = search(
            100.0,
            |rate_rps, _| {
                tries.push(rate_rps);
                rate_rps
            },
            |&rate_rps| rate_rps < 60.0,
        );
        assert_eq!(tries, [50.0, 75.0, 75.0, 75.0, 62.5, 62.5, 62.5, 56.25, 59.375]);
        assert_eq!(found, Found { kept: Some(59.375), refused: Some(62.5) });
    }
}
