//! Dynamic models: what a batch takes depends on its requests (Orloj, sections 3.2 and 4.2).
//!
//! A batch of k requests takes `c0 + c1 k max l_r` there: all are padded to the longest. What a request takes is not
//! known before it has run, but the times of its application's earlier ones are; of those the batch's time is the
//! largest order statistic.
//!
//! The times that a profiler has are those of requests alone, which the equation does not give for k = 1. So what is
//! above c0 is called a request's work here, and a batch takes `c0 + (1 + c1 (k - 1)) max work`: the same for large
//! batches, and what was measured for one.

use std::collections::BTreeMap;

use proto::Span;

/// Applications of a model that are told apart; requests of any more count as of the last one.
pub const APPLICATIONS_MAX: usize = 32;
/// Samples of an application's window; the window before it counts, too.
const WINDOW: usize = 512;
/// A window whose median differs by more than this part from that of the one before shows that inputs have changed:
/// what was before it is forgotten.
const SHIFT: f64 = 0.25;
/// Into so many steps the time of a batch is divided. Each is an instant at which a waiting request's score changes its
/// form, for each batch size.
const BINS: usize = 12;

/// What a batch of unequal requests takes (Orloj, equation 3).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchCost {
    /// c0: in any case.
    pub fixed: Span,
    /// c1: what each further request adds, as a part of the longest one's work; above 0 and at most 1.
    pub per_task: f64,
}

impl From<proto::BatchCost> for BatchCost {
    fn from(proto::BatchCost { fixed, per_task_ppm }: proto::BatchCost) -> Self {
        Self { fixed, per_task: f64::from(per_task_ppm) / f64::from(proto::BatchCost::PER_TASK_MAX) }
    }
}

impl BatchCost {
    /// What so many requests take of which the longest has this much work.
    #[must_use]
    pub fn latency(&self, batch: usize, longest: Span) -> Span {
        let times = 1.0 + self.per_task * (batch as f64 - 1.0);
        self.fixed + Span((times * longest.as_nanos() as f64).round() as i64)
    }

    /// The work of a request that took this long alone.
    #[must_use]
    pub fn work(&self, alone: Span) -> Span {
        (alone - self.fixed).max(Span::ZERO)
    }
}

/// The mean of the largest of k samples, drawn from the given ones, which are ascending (Orloj, equations 5 and 6).
///
/// # Panics
/// If there are none.
#[must_use]
pub fn largest_of(samples: &[Span], k: usize) -> Span {
    assert!(!samples.is_empty(), "a distribution has samples");
    let below = |rank: usize| (rank as f64 / samples.len() as f64).powi(k as i32);
    let mean: f64 =
        (0..).zip(samples).map(|(rank, sample)| sample.as_nanos() as f64 * (below(rank + 1) - below(rank))).sum();
    Span(mean.round() as i64)
}

/// The work of an application's requests, as sampled. It follows changes: two windows are kept, and one where the
/// input has shifted.
#[derive(Debug, Default)]
struct Works {
    window: Vec<Span>,
    before: Vec<Span>,
}

impl Works {
    fn handle(&mut self, work: Span) {
        if self.window.len() == WINDOW {
            let median = |samples: &mut Vec<Span>| {
                let middle = samples.len() / 2;
                samples.select_nth_unstable(middle).1.as_nanos() as f64
            };
            let now = median(&mut self.window);
            let has_shifted = !self.before.is_empty() && (median(&mut self.before) / now.max(1.0) - 1.0).abs() > SHIFT;
            let window = std::mem::replace(&mut self.window, Vec::with_capacity(WINDOW));
            self.before = if has_shifted { Vec::new() } else { window };
        }
        self.window.push(work);
    }

    fn samples(&self) -> impl Iterator<Item = Span> + '_ {
        self.before.iter().chain(&self.window).copied()
    }
}

/// A distribution function by its samples.
#[derive(Debug)]
struct Distribution(Vec<Span>);

impl Distribution {
    fn new(samples: impl Iterator<Item = Span>) -> Self {
        let mut samples: Vec<Span> = samples.collect();
        samples.sort_unstable();
        Self(samples)
    }

    /// The part that is at most this.
    fn at(&self, work: Span) -> f64 {
        self.0.partition_point(|&sample| sample <= work) as f64 / self.0.len() as f64
    }
}

/// A part of a batch's time, as a request of it sees it: `[from, to)` with this probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bin {
    /// The shortest.
    pub from: Span,
    /// The longest.
    pub to: Span,
    /// Above 0; all parts of a batch make 1.
    pub part: f64,
}

/// What a batch of one size takes.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchTimes {
    /// Whoever is in it (section 4.3).
    pub mean: Span,
    /// By application of one of its requests, where the others may be of any.
    applications: Vec<(u8, Seen)>,
    /// As a request of any application sees it.
    pooled: Seen,
}

/// A batch's time, as an application's requests see it.
#[derive(Debug, Clone, PartialEq)]
pub struct Seen {
    /// Its steps, ascending.
    pub bins: Vec<Bin>,
    /// Its mean.
    pub mean: Span,
}

impl BatchTimes {
    /// Always this.
    #[must_use]
    pub fn constant(time: Span) -> Self {
        // A step must have a width for a score to rise in.
        let from = time - Span((time.as_nanos() / 100).max(1));
        let seen = Seen { bins: vec![Bin { from, to: time, part: 1.0 }], mean: time };
        Self { mean: time, applications: Vec::new(), pooled: seen }
    }

    /// As an application sees it; one that is unknown as all together do.
    #[must_use]
    pub fn of(&self, application: u8) -> &Seen {
        let known = self.applications.iter().find(|(known, _)| *known == application);
        known.map_or(&self.pooled, |(_, seen)| seen)
    }
}

/// What is known of a dynamic model's requests.
#[derive(Debug)]
pub struct DynamicTimes {
    cost: BatchCost,
    /// By application.
    applications: BTreeMap<u8, Works>,
}

impl DynamicTimes {
    /// Of no request yet.
    #[must_use]
    pub fn new(cost: BatchCost) -> Self {
        Self { cost, applications: BTreeMap::new() }
    }

    /// A request that was executed alone took so long.
    pub fn handle_alone(&mut self, application: u8, alone: Span) {
        let application = application.min(APPLICATIONS_MAX as u8 - 1);
        self.applications.entry(application).or_default().handle(self.cost.work(alone));
    }

    /// What batches of some applications' requests take, by size, with what comes on top of it (the way of a plan and
    /// of the inputs); `None` if nothing is known of them.
    #[must_use]
    pub fn batches(
        &self,
        applications: &[u8],
        sizes: &[usize],
        on_top: impl Fn(usize) -> Span,
    ) -> Option<Vec<BatchTimes>> {
        let works: Vec<(u8, &Works)> =
            applications.iter().filter_map(|&known| Some((known, self.applications.get(&known)?))).collect();
        let all = Distribution::new(works.iter().flat_map(|(_, works)| works.samples()));
        let (&shortest, &longest) = (all.0.first()?, all.0.last()?);
        let edge = |index: usize| shortest + Span(((longest - shortest).as_nanos() * index as i64) / BINS as i64);
        let owns: Vec<(u8, Distribution)> =
            works.iter().map(|&(known, works)| (known, Distribution::new(works.samples()))).collect();
        let times = |&size: &usize| {
            let latency = |work| self.cost.latency(size, work) + on_top(size);
            if shortest == longest {
                return BatchTimes::constant(latency(longest));
            }
            // Equation 8 where one request's application is known, and the others are of any.
            let seen = |own: &Distribution| {
                let below = |work: Span| own.at(work) * all.at(work).powi(size as i32 - 1);
                let (mut bins, mut mean) = (Vec::new(), 0.0);
                let mut from = (latency(edge(0)), 0.0);
                for index in 1..=BINS {
                    let to = (latency(edge(index)), below(edge(index)));
                    let part = to.1 - from.1;
                    if part > 0.0 {
                        bins.push(Bin { from: from.0, to: to.0, part });
                        mean += part * 0.5 * (from.0.as_nanos() + to.0.as_nanos()) as f64;
                    }
                    from = to;
                }
                Seen { bins, mean: Span(mean.round() as i64) }
            };
            let mean = latency(largest_of(&all.0, size));
            let applications = owns.iter().map(|(known, own)| (*known, seen(own))).collect();
            BatchTimes { mean, applications, pooled: seen(&all) }
        };
        Some(sizes.iter().map(times).collect())
    }

    /// All that something is known of.
    #[must_use]
    pub fn applications(&self) -> Vec<u8> {
        self.applications.keys().copied().collect()
    }
}

impl DynamicTimes {
    /// Which applications had better share batches of about this size: groups by the mean work of their requests,
    /// ascending, as are the applications of each.
    ///
    /// A request of work w in a batch that is padded to w' costs `c1 (w' - w)` more than among its like; a batch of its
    /// own costs c0, and the first request's work, once more. So they share it if the first is less than its share of
    /// the second.
    #[must_use]
    pub fn groups(&self, batch: f64) -> Vec<Vec<u8>> {
        let mean = |works: &Works| {
            let sum: i64 = works.samples().map(Span::as_nanos).sum();
            sum as f64 / works.samples().count().max(1) as f64
        };
        let mut by_mean: Vec<(f64, u8)> =
            self.applications.iter().map(|(&application, works)| (mean(works), application)).collect();
        by_mean.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
        let BatchCost { fixed, per_task } = self.cost;
        let mut groups: Vec<Vec<(f64, u8)>> = Vec::new();
        for (work, application) in by_mean {
            let shares = groups.last().is_some_and(|group| {
                let (shortest, _) = group[0];
                per_task * (work - shortest) * batch < fixed.as_nanos() as f64 + (1.0 - per_task) * shortest
            });
            if !shares {
                groups.push(Vec::new());
            }
            groups.last_mut().expect("one was pushed").push((work, application));
        }
        let applications = |group: Vec<(f64, u8)>| group.into_iter().map(|(_, application)| application).collect();
        groups.into_iter().map(applications).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: BatchCost = BatchCost { fixed: Span::from_millis(2), per_task: 0.5 };

    fn ms(span: Span) -> f64 {
        span.as_millis_f64()
    }

    #[test]
    fn a_batch_is_padded_to_its_longest_request() {
        assert_eq!(COST.latency(4, Span::from_millis(10)), Span::from_millis(27));
        assert_eq!(COST.work(Span::from_millis(7)), Span::from_millis(5));
        assert_eq!(COST.work(Span::from_millis(1)), Span::ZERO);
    }

    /// Of uniform samples from 0 to 1 the largest of k is k / (k + 1) on average.
    #[test]
    fn the_largest_of_k_is_an_order_statistic() {
        let samples: Vec<Span> = (0..=1000).map(|step| Span::from_micros(step * 1000)).collect();
        for k in [1, 2, 4, 16] {
            let expected = 1000.0 * k as f64 / (k as f64 + 1.0);
            assert!((ms(largest_of(&samples, k)) / expected - 1.0).abs() < 2e-3, "{k}: {}", largest_of(&samples, k));
        }
    }

    #[test]
    fn an_application_of_short_requests_still_sees_the_long_ones_of_others_in_its_batch() {
        let mut times = DynamicTimes::new(COST);
        assert_eq!(times.batches(&[0], &[1], |_| Span::ZERO), None);
        for step in 0..100 {
            times.handle_alone(0, Span::from_millis_f64(2.0 + 10.0 + f64::from(step) / 100.0));
            times.handle_alone(2, Span::from_millis_f64(2.0 + 100.0 + f64::from(step) / 100.0));
        }
        let batches = times.batches(&times.applications(), &[1, 2], |_| Span::ZERO).unwrap();
        let parts = |bins: &[Bin]| bins.iter().map(|bin| bin.part).sum::<f64>();
        for batch in &batches {
            assert!(batch.applications.iter().all(|(_, seen)| (parts(&seen.bins) - 1.0).abs() < 1e-9));
        }
        // Alone they are short; of two, half are with a long one.
        assert!(ms(batches[0].of(0).mean) < 20.0 && ms(batches[0].of(2).mean) > 95.0);
        assert!((ms(batches[1].of(0).mean) - (2.0 + 1.5 * (10.5 + 100.5) / 2.0)).abs() < 8.0);
        assert!((ms(batches[1].mean) - (2.0 + 1.5 * (10.5 * 0.25 + 100.5 * 0.75))).abs() < 2.0);
        // Nothing is known of application 9 but that it is of this model.
        assert!((ms(batches[0].of(9).mean) - (2.0 + (10.5 + 100.5) / 2.0)).abs() < 5.0);
        let short = times.batches(&[0], &[2], |_| Span::ZERO).unwrap();
        assert!(ms(short[0].mean) < 18.0, "{}", short[0].mean);
    }

    #[test]
    fn applications_share_batches_where_padding_is_cheaper_than_another_batch() {
        let groups = |fixed, batch| {
            let mut times = DynamicTimes::new(BatchCost { fixed: Span::from_millis(fixed), per_task: 1.0 });
            for (application, work) in [(3, 100), (0, 20), (1, 25)] {
                times.handle_alone(application, Span::from_millis(fixed + work));
            }
            times.groups(batch)
        };
        assert_eq!(groups(1, 4.0), [vec![0], vec![1], vec![3]]);
        // Four in a batch of 25 instead of 20 ms cost 20 ms.
        assert_eq!(groups(21, 4.0), [vec![0, 1], vec![3]]);
        assert_eq!(groups(400, 4.0), [vec![0, 1, 3]]);
    }

    #[test]
    fn what_was_before_a_shift_is_forgotten() {
        let mut works = Works::default();
        (0..3 * WINDOW).for_each(|_| works.handle(Span::from_millis(10)));
        assert_eq!(works.samples().count(), 2 * WINDOW);
        (0..=WINDOW).for_each(|_| works.handle(Span::from_millis(20)));
        assert!(works.samples().all(|work| work == Span::from_millis(20)), "{}", works.samples().count());
    }
}
