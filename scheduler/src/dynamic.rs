//! Dynamic models: what a batch takes depends on its requests (Orloj, sections 3.2 and 4.2).
//!
//! A batch of k requests takes `c0 + c1 k max l_r` there: all are padded to the longest. What a request takes is not
//! known before it has run, but the times of its application's earlier ones are; of those the batch's time is the
//! largest order statistic.
//!
//! The times that a profiler has are those of requests alone, which the equation does not give for k = 1. So what is
//! above c0 is called a request's work here, and a batch takes `c0 + (1 + c1 (k - 1)) max work`: the same for large
//! batches, and what was measured for one.
//!
//! As published, a request's application is all that tells what it may take. Conditioned on lengths
//! ([`DynamicTimes::by_length`]), requests of an application fall into classes by how long they are
//! (`dynamic/lengths.rs`): each goes by the narrowest class that enough is known of, which is its application's of
//! its length, or its length's whatever the application, or else its application's. And c0 and c1 follow executions
//! (`dynamic/fit.rs`).

mod fit;
mod lengths;

use std::{cmp::Reverse, collections::BTreeMap, ops::Range};

use proto::{
    GpuId, Span,
    request_times::{AloneTimes, LengthTimes},
};

use fit::Fit;
pub use lengths::{BUCKETS_MAX, Bucket};
use lengths::{ENOUGH, Lengths};

/// Applications of a model that are told apart; requests of any more count as of the last one.
pub const APPLICATIONS_MAX: usize = proto::request_times::APPLICATIONS_MAX;
/// Samples of an application's window; the window before it counts, too.
const WINDOW: usize = 512;
/// From so many of its samples on, and then whenever there are twice as many, a window is compared with the one before.
const SHIFT_MIN: usize = 32;
/// Two samples of m and n are of different distributions if they differ by more than this times sqrt(1/m + 1/n)
/// anywhere: one comparison in a thousand is wrong (Kolmogorov and Smirnov).
const SHIFT: f64 = 1.95;
/// A sample that took so many times as long as all before, where those are so few, is rather a stall of its GPU than a
/// request of another kind: it counts once another one takes as long. It would make their mean so long that what is due
/// sooner is given up, nearly all of which would be in time.
const STALL_TIMES: i64 = 32;
const STALL_SAMPLES: Range<usize> = 8..256;
/// Into so many steps the time of a batch is divided. Each is an instant at which a waiting request's score changes its
/// form, for each batch size.
const BINS: usize = 12;
/// Of more requests that may be in a batch so many stand for all.
const POPULATION_MAX: usize = 2048;
/// Classes of an application and a length; of more, those with the fewest samples count as of their length.
const NARROW_MAX: usize = 64;
/// What is said to have taken longer took so long.
const ALONE_MAX: Span = Span::from_millis(3_600_000);
/// The weight of a batch in the mean of their sizes.
const BATCH_WEIGHT: f64 = 0.02;
/// A lane of its own also lets a batch start as late as its own requests allow: what padding costs counts so many
/// times.
const PADDING_TIMES: f64 = 1.5;
/// So many batches end within what is taken for the longest time.
const CERTAIN_PART: f64 = 0.99;

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

impl From<BatchCost> for proto::BatchCost {
    fn from(BatchCost { fixed, per_task }: BatchCost) -> Self {
        let ppm = per_task * f64::from(Self::PER_TASK_MAX);
        Self { fixed, per_task_ppm: ppm.clamp(1.0, f64::from(Self::PER_TASK_MAX)).round() as u32 }
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

    /// What the longest request of a batch would have taken alone.
    fn longest_alone(&self, batch: usize, took: Span) -> Span {
        let times = 1.0 + self.per_task * (batch as f64 - 1.0);
        self.fixed + Span((self.work(took).as_nanos() as f64 / times).round() as i64)
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

/// A request that ran alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sample {
    alone: Span,
    bucket: Option<Bucket>,
}

/// Requests that are alike, as sampled. They follow changes: two windows are kept, and one where the input has shifted.
#[derive(Debug, Clone, PartialEq, Default)]
struct Works {
    window: Vec<Sample>,
    before: Vec<Sample>,
    /// Perhaps a stall.
    aside: Option<Sample>,
}

impl Works {
    fn handle(&mut self, sample: Sample) {
        self.window.push(sample);
        let count = self.window.len();
        // What came before the shift may be in this window, too; the next one tells it from that.
        if count.is_power_of_two() && count >= SHIFT_MIN && has_shifted(&self.before, &self.window) {
            self.before.clear();
        }
        if count == WINDOW {
            self.before = std::mem::replace(&mut self.window, Vec::with_capacity(WINDOW));
        }
    }

    /// The same, unless it may be a stall. Yields the samples that count from now on.
    fn handle_alone(&mut self, sample: Sample) -> [Option<Sample>; 2] {
        let is_long = STALL_SAMPLES.contains(&self.len())
            && self.samples().all(|known| sample.alone > Span(STALL_TIMES * known.alone.0));
        let counted = match self.aside {
            None if is_long => {
                self.aside = Some(sample);
                [None, None]
            }
            Some(_) if is_long => [self.aside.take(), Some(sample)],
            _ => [Some(sample), None],
        };
        counted.into_iter().flatten().for_each(|sample| self.handle(sample));
        counted
    }

    fn samples(&self) -> impl Iterator<Item = Sample> + '_ {
        self.before.iter().chain(&self.window).copied()
    }

    fn len(&self) -> usize {
        self.before.len() + self.window.len()
    }

    fn retain(&mut self, keep: impl Fn(&Sample) -> bool) {
        self.window.retain(&keep);
        self.before.retain(&keep);
        self.aside = self.aside.filter(keep);
    }
}

/// Whether samples are of another distribution than those before: by the largest distance of what parts of both are at
/// most so long.
fn has_shifted(before: &[Sample], now: &[Sample]) -> bool {
    if before.is_empty() {
        return false;
    }
    let [before, now] = [before, now].map(|samples| Distribution::new(samples.iter().map(|sample| sample.alone)));
    let ends = before.0.iter().chain(&now.0);
    let distance = ends.map(|&alone| (before.at(alone) - now.at(alone)).abs()).fold(0.0, f64::max);
    distance > SHIFT * (1.0 / before.0.len() as f64 + 1.0 / now.0.len() as f64).sqrt()
}

/// Requests that are planned alike: of an application, of a length, or of both; or else any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Class {
    application: Option<u8>,
    bucket: Option<Bucket>,
}

impl Class {
    /// Whoever nothing else is known of.
    pub const ANY: Self = Self { application: None, bucket: None };

    /// Of an application, whatever their lengths.
    #[must_use]
    pub const fn of(application: u8) -> Self {
        Self { application: Some(application), bucket: None }
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

    /// No more than so many stand for all, each for as many.
    fn thinned(mut self, max: usize) -> Self {
        if self.0.len() > max {
            self.0 = (0..max).map(|step| self.0[(2 * step + 1) * self.0.len() / (2 * max)]).collect();
        }
        self
    }

    /// The least and the greatest.
    fn ends(&self) -> Option<(Span, Span)> {
        Some((*self.0.first()?, *self.0.last()?))
    }

    /// What such a part does not exceed (nearest rank); there are some.
    fn quantile(&self, part: f64) -> Span {
        let rank = (part * self.0.len() as f64).ceil() as usize;
        self.0[rank.clamp(1, self.0.len()) - 1]
    }

    /// The part that is at most this.
    fn at(&self, work: Span) -> f64 {
        self.0.partition_point(|&sample| sample <= work) as f64 / self.0.len() as f64
    }
}

/// The largest of so many requests of a distribution.
#[derive(Debug)]
struct Largest<'a> {
    all: &'a Distribution,
    count: i32,
    /// The sum of the works from each rank on, each times the probability that it is the largest.
    from: Vec<f64>,
}

impl<'a> Largest<'a> {
    fn new(all: &'a Distribution, count: usize) -> Self {
        let mut largest = Self { all, count: count as i32, from: vec![0.0; all.0.len() + 1] };
        for rank in (0..all.0.len()).rev() {
            let part = largest.below(rank + 1) - largest.below(rank);
            largest.from[rank] = largest.from[rank + 1] + part * all.0[rank].as_nanos() as f64;
        }
        largest
    }

    /// The probability that none is of this rank or a higher one.
    fn below(&self, rank: usize) -> f64 {
        (rank as f64 / self.all.0.len() as f64).powi(self.count)
    }

    /// The mean of what is longer, that or a request of another distribution.
    fn mean_beside(&self, own: &Distribution) -> Span {
        let mean = |&work: &Span| {
            let rank = self.all.0.partition_point(|&other| other <= work);
            self.below(rank) * work.as_nanos() as f64 + self.from[rank]
        };
        Span((own.0.iter().map(mean).sum::<f64>() / own.0.len() as f64).round() as i64)
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
    /// By the class of one of its requests, where the others may be of any; ascending.
    classes: Vec<(Class, Seen)>,
    /// As a request of any class sees it.
    pooled: Seen,
}

/// A batch's time, as requests of a class see it.
#[derive(Debug, Clone, PartialEq)]
pub struct Seen {
    /// Its steps, ascending.
    pub bins: Vec<Bin>,
    /// Its mean.
    pub mean: Span,
}

impl Seen {
    /// The probability that it takes longer than this; within a step all times are alike likely.
    #[must_use]
    pub fn late(&self, left: Span) -> f64 {
        let beyond = |bin: &Bin| {
            let width = (bin.to - bin.from).as_nanos() as f64;
            bin.part * ((bin.to - left).as_nanos() as f64 / width).clamp(0.0, 1.0)
        };
        self.bins.iter().map(beyond).sum::<f64>().clamp(0.0, 1.0)
    }
}

impl BatchTimes {
    /// Always this.
    #[must_use]
    pub fn constant(time: Span) -> Self {
        // A step must have a width for a score to rise in.
        let from = time - Span((time.as_nanos() / 100).max(1));
        let seen = Seen { bins: vec![Bin { from, to: time, part: 1.0 }], mean: time };
        Self { mean: time, classes: Vec::new(), pooled: seen }
    }

    /// Of these steps, whoever sees them.
    #[cfg(test)]
    pub(crate) fn of_bins(bins: Vec<Bin>, mean: Span) -> Self {
        Self { mean, classes: Vec::new(), pooled: Seen { bins, mean } }
    }

    /// As a class sees it; one that is unknown as all together do, in this lane.
    #[must_use]
    pub fn of(&self, class: Class) -> &Seen {
        let known = self.classes.binary_search_by_key(&class, |&(known, _)| known);
        known.map_or(&self.pooled, |index| &self.classes[index].1)
    }

    /// The least, whoever is in it.
    #[must_use]
    pub fn shortest(&self) -> Span {
        self.pooled.bins[0].from
    }
}

/// What is known of a dynamic model's requests.
#[derive(Debug, Clone, PartialEq)]
pub struct DynamicTimes {
    cost: BatchCost,
    /// By application.
    applications: BTreeMap<u8, Works>,
    /// If requests are told apart by their lengths, too.
    lengths: Option<(Lengths, Fit)>,
    /// Nothing of what is known is believed of requests that nothing else is known of: they are taken to be short.
    is_any_short: bool,
    /// Mean size of batches.
    batch_mean: f64,
    /// As of the last [`Self::settle`], by class, ascending.
    known: Vec<Known>,
}

/// What is known of a dynamic model's requests, for people to see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownTimes {
    /// c0 and c1, as they are planned with.
    pub cost: proto::BatchCost,
    /// By their numbers.
    pub applications: Vec<(u8, AloneTimes)>,
    /// Shortest first.
    pub lengths: Vec<LengthTimes>,
}

/// A class that something is known of.
#[derive(Debug, Clone, PartialEq)]
struct Known {
    class: Class,
    /// The mean work, in nanoseconds.
    mean: f64,
    /// See [`DynamicTimes::steps`].
    steps: Vec<Span>,
}

impl DynamicTimes {
    /// Of no request yet; they are told apart by their applications (Orloj).
    #[must_use]
    pub fn new(cost: BatchCost) -> Self {
        let (applications, known) = (BTreeMap::new(), Vec::new());
        Self { cost, applications, lengths: None, is_any_short: false, batch_mean: 1.0, known }
    }

    /// Of no request yet; they are told apart by their lengths, too, and c0 and c1 follow executions.
    #[must_use]
    pub fn by_length(cost: BatchCost) -> Self {
        Self { lengths: Some((Lengths::default(), Fit::new(cost))), ..Self::new(cost) }
    }

    /// Backends have measured another cost.
    pub fn handle_measured(&mut self, cost: BatchCost) {
        self.cost = cost;
        if let Some((_, fit)) = &mut self.lengths {
            fit.handle_measured(cost);
        }
    }

    /// A request that was executed alone took so long. Its length is in bytes; 0: it is not known.
    pub fn handle_alone(&mut self, application: u8, length: u32, alone: Span) {
        let application = application.min(APPLICATIONS_MAX as u8 - 1);
        let mut sample = Sample { alone: alone.clamp(Span(1), ALONE_MAX), bucket: None };
        if self.lengths.is_some() {
            sample.bucket = Bucket::of(length);
        }
        self.is_any_short &= self.applications.contains_key(&application);
        let counted = self.applications.entry(application).or_default().handle_alone(sample);
        if let Some((lengths, _)) = &mut self.lengths {
            counted.into_iter().flatten().for_each(|sample| lengths.handle_alone(sample));
        }
    }

    /// A batch of so many requests is about to run.
    pub fn handle_granted(&mut self, batch: usize) {
        self.batch_mean += BATCH_WEIGHT * (batch as f64 - self.batch_mean);
    }

    /// A GPU ran a batch of requests of these applications and lengths. False if that teaches nothing.
    pub fn handle_batch(&mut self, gpu: GpuId, requests: &[(u8, u32)], took: Span) -> bool {
        let longest = requests.iter().map(|&(_, length)| length).max().and_then(Bucket::of);
        let (size, took) = (requests.len(), took.clamp(Span(1), ALONE_MAX));
        let Some(longest) = longest.filter(|_| size > 1 && self.lengths.is_some()) else { return false };
        let work = self.largest_work(requests);
        let Some((lengths, fit)) = &mut self.lengths else { return false };
        if let Some(work) = work {
            fit.handle_batch(gpu, size, (self.cost.fixed + work).as_nanos() as f64, took);
        }
        lengths.handle_batch(longest, self.cost.longest_alone(size, took));
        true
    }

    /// What the largest work of these requests is on average: that of those whose class's is the largest. `None` if
    /// nothing is known of one.
    fn largest_work(&self, requests: &[(u8, u32)]) -> Option<Span> {
        let (mut largest, mut count): (Option<&Known>, usize) = (None, 0);
        for &(application, length) in requests {
            let class = self.class(application, length);
            let known = self.find(class).filter(|_| class != Class::ANY)?;
            match largest {
                Some(other) if other.mean > known.mean => {}
                Some(other) if other.class == known.class => count += 1,
                _ => (largest, count) = (Some(known), 1),
            }
        }
        largest.filter(|known| !known.steps.is_empty()).map(|known| largest_of(&known.steps, count))
    }

    /// The model is planned elsewhere from now on, where its backends have measured this cost. What batches cost beyond
    /// that stays until they have shown it there, too: its GPUs may be others.
    pub fn handle_moved(&mut self, measured: BatchCost) {
        match &mut self.lengths {
            Some((_, fit)) if fit.measured() == measured => fit.forget_gpus(),
            Some((_, fit)) => (self.cost, *fit) = (measured, Fit::new(measured)),
            None => self.cost = measured,
        }
    }

    /// Whether nothing is known of any request.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Applications have other numbers from now on: of each number's what that of its place is. Those that share one
    /// are one.
    pub fn renumber(&mut self, numbers: &[u8; APPLICATIONS_MAX]) {
        for (application, works) in std::mem::take(&mut self.applications) {
            let renumbered = self.applications.entry(numbers[usize::from(application)]).or_default();
            works.samples().for_each(|sample| renumbered.handle(sample));
        }
    }

    /// Whether [`Self::forget`] would change anything.
    #[must_use]
    pub fn believes(&self, class: Class) -> bool {
        class != Class::ANY || !self.is_any_short
    }

    /// What requests of a class take is not believed any more. Those that nothing else is known of ([`Class::ANY`]) are
    /// taken to be short, until an application is new: what is known of others stays, whoever asks for too much.
    pub fn forget(&mut self, class: Class) {
        match (&mut self.lengths, class) {
            (_, Class { application: Some(application), bucket: None }) => {
                self.applications.remove(&application);
            }
            (Some((lengths, _)), Class { bucket: Some(bucket), .. }) => {
                let is_other = |sample: &Sample| sample.bucket.map(|bucket| lengths.known(bucket)) != Some(bucket);
                self.applications.values_mut().for_each(|works| works.retain(is_other));
                lengths.remove(bucket);
            }
            _ => self.is_any_short = true,
        }
    }

    /// A GPU is gone.
    pub fn remove_gpu(&mut self, gpu: GpuId) {
        if let Some((_, fit)) = &mut self.lengths {
            fit.remove_gpu(gpu);
        }
    }

    /// What has come in so far counts from now on: c0, c1 and classes are found anew.
    pub fn settle(&mut self) {
        let mut classes: Vec<Class> = self.applications.keys().copied().map(Class::of).collect();
        if let Some((lengths, fit)) = &self.lengths {
            self.cost = fit.cost(self.cost);
            classes.extend(self.classes_of_lengths(lengths));
        }
        if self.is_any_short || !self.population_of_all().is_empty() {
            classes.push(Class::ANY);
        }
        classes.sort_unstable();
        self.known = classes.into_iter().map(|class| self.know(class)).collect();
    }

    /// Those that enough is known of, if lengths tell anything.
    fn classes_of_lengths(&self, lengths: &Lengths) -> Vec<Class> {
        let broad: Vec<_> =
            lengths.known_well().map(|bucket| Class { application: None, bucket: Some(bucket) }).collect();
        if broad.is_empty() {
            return broad;
        }
        let mut narrow: BTreeMap<Class, usize> = BTreeMap::new();
        for (&application, works) in &self.applications {
            for bucket in works.samples().filter_map(|sample| sample.bucket) {
                let class = Class { application: Some(application), bucket: Some(lengths.known(bucket)) };
                *narrow.entry(class).or_default() += 1;
            }
        }
        let mut narrow: Vec<(Class, usize)> = narrow.into_iter().filter(|(_, count)| *count >= ENOUGH).collect();
        narrow.sort_by_key(|&(class, count)| (Reverse(count), class));
        narrow.into_iter().take(NARROW_MAX).map(|(class, _)| class).chain(broad).collect()
    }

    fn know(&self, class: Class) -> Known {
        let times = self.times(class);
        let sum: f64 = times.iter().map(|&alone| self.cost.work(alone).as_nanos() as f64).sum();
        let mean = sum / times.len().max(1) as f64;
        let steps = match (&self.lengths, class) {
            (None, _) => Vec::new(),
            (Some((lengths, _)), Class { application: None, bucket: Some(bucket) }) => {
                self.steps(lengths.alone(bucket).collect())
            }
            (Some(_), _) => self.steps(times),
        };
        Known { class, mean, steps }
    }

    /// The work of requests that ran alone, in steps that are as likely as each other; none if they are too few.
    fn steps(&self, mut alone: Vec<Span>) -> Vec<Span> {
        alone.sort_unstable();
        let at = |step| self.cost.work(alone[(2 * step + 1) * alone.len() / (2 * ENOUGH)]);
        if alone.len() < ENOUGH { Vec::new() } else { (0..ENOUGH).map(at).collect() }
    }

    /// c0 and c1, as they are planned with.
    #[must_use]
    pub fn cost(&self) -> BatchCost {
        self.cost
    }

    /// The class of a request.
    #[must_use]
    pub fn class(&self, application: u8, length: u32) -> Class {
        self.class_of(application, Bucket::of(length))
    }

    fn class_of(&self, application: u8, bucket: Option<Bucket>) -> Class {
        let bucket = self.lengths.as_ref().zip(bucket).map(|((lengths, _), bucket)| lengths.known(bucket));
        let application = Some(application);
        let narrower = [Class { application, bucket }, Class { application: None, bucket }];
        let narrower = narrower.into_iter().filter(|_| bucket.is_some());
        narrower
            .chain([Class { application, bucket: None }])
            .find(|&class| self.find(class).is_some())
            .unwrap_or(Class::ANY)
    }

    /// What is known for people to see.
    #[must_use]
    pub fn known_times(&self) -> KnownTimes {
        let of = |class: Class| AloneTimes::of(self.times(class));
        let lengths = self.lengths.iter().flat_map(|(lengths, _)| lengths.buckets()).map(|bucket| LengthTimes {
            shortest: bucket.shortest(),
            longest: bucket.longest(),
            times: of(Class { application: None, bucket: Some(bucket) }),
        });
        KnownTimes {
            cost: self.cost.into(),
            applications: self.applications.keys().map(|&number| (number, of(Class::of(number)))).collect(),
            lengths: lengths.collect(),
        }
    }

    fn find(&self, class: Class) -> Option<&Known> {
        self.known.binary_search_by_key(&class, |known| known.class).ok().map(|index| &self.known[index])
    }

    /// All that something is known of, ascending.
    #[must_use]
    pub fn classes(&self) -> Vec<Class> {
        self.known.iter().map(|known| known.class).collect()
    }

    /// What requests of a class took alone, or would have.
    fn times(&self, class: Class) -> Vec<Span> {
        let lengths = self.lengths.as_ref().map(|(lengths, _)| lengths);
        let known = |bucket: Option<Bucket>| lengths.zip(bucket).map(|(lengths, bucket)| lengths.known(bucket));
        match (class.application, class.bucket) {
            (None, None) if self.is_any_short => vec![self.cost.fixed],
            (None, None) => self.population_of_all(),
            (None, Some(bucket)) => lengths.into_iter().flat_map(|lengths| lengths.times(bucket)).collect(),
            (Some(application), bucket) => {
                let samples = self.applications.get(&application).into_iter().flat_map(Works::samples);
                let samples = samples.filter(|sample| bucket.is_none() || known(sample.bucket) == bucket);
                samples.map(|sample| sample.alone).collect()
            }
        }
    }

    /// What requests take alone, of whichever class.
    fn population_of_all(&self) -> Vec<Span> {
        let alone = self.applications.values().flat_map(Works::samples).map(|sample| sample.alone);
        // Of some lengths only batches have told.
        let lengths = self.lengths.iter().map(|(lengths, _)| lengths);
        let of_batches = lengths.flat_map(|lengths| lengths.buckets().flat_map(|bucket| lengths.of_batches(bucket)));
        alone.chain(of_batches).collect()
    }

    /// What requests take alone of which each is of one of these classes.
    fn population(&self, classes: &[Class]) -> Vec<Span> {
        let samples = self.applications.iter().flat_map(|(&application, works)| {
            let is_of = move |sample: &Sample| classes.contains(&self.class_of(application, sample.bucket));
            works.samples().filter(is_of)
        });
        samples.map(|sample| sample.alone).collect()
    }

    /// What batches of some classes' requests take, by size, with what comes on top of it (the way of a plan and of the
    /// inputs); `None` if nothing is known of them.
    #[must_use]
    pub fn batches(
        &self,
        classes: &[Class],
        sizes: &[usize],
        on_top: impl Fn(usize) -> Span,
    ) -> Option<Vec<BatchTimes>> {
        let works = |alone: Vec<Span>| Distribution::new(alone.into_iter().map(|alone| self.cost.work(alone)));
        let mut owns: Vec<(Class, Distribution)> = classes
            .iter()
            .map(|&class| (class, works(self.times(class))))
            .filter(|(_, own)| !own.0.is_empty())
            .collect();
        owns.sort_by_key(|&(class, _)| class);
        let mut all = works(self.population(classes));
        if all.0.is_empty() {
            // Nothing but batches has told of these lengths, or all of the application's are of others.
            all = Distribution::new(owns.iter().flat_map(|(_, own)| own.0.iter().copied()));
        }
        let all = all.thinned(POPULATION_MAX);
        let ends = all.ends()?;
        let times = |&size: &usize| {
            let latency = |work| self.cost.latency(size, work) + on_top(size);
            let others = Largest::new(&all, size - 1);
            let seen = |own: &Distribution| self.seen(own, &others, latency);
            if ends.0 == ends.1 && owns.iter().all(|(_, own)| own.ends() == Some(ends)) {
                return BatchTimes::constant(latency(ends.1));
            }
            let mean = latency(largest_of(&all.0, size));
            let classes = owns.iter().map(|(class, own)| (*class, seen(own))).collect();
            BatchTimes { mean, classes, pooled: seen(&all) }
        };
        Some(sizes.iter().map(times).collect())
    }

    /// Equation 8 where one request's class is known, and the others are of any. The mean is exact: a step's middle is
    /// far from its samples' where one of them took very long. So the last step, which reaches to the longest, begins
    /// where hardly any batch takes longer.
    fn seen(&self, own: &Distribution, others: &Largest<'_>, latency: impl Fn(Span) -> Span) -> Seen {
        let (all, is_alone) = (others.all, others.count == 0);
        let certain = (own.quantile(CERTAIN_PART), all.quantile(CERTAIN_PART.powf(1.0 / f64::from(others.count + 1))));
        let ((shortest, longest), ends) = (own.ends().expect("it has samples"), all.ends().expect("it has samples"));
        let (shortest, certain, longest) = match &self.lengths {
            // The same steps for all applications.
            None => (ends.0, certain.1, ends.1),
            // Short requests would all be in the first step of those that reach to the longest.
            Some(_) if is_alone => (shortest, certain.0, longest),
            Some(_) => (shortest.max(ends.0), certain.0.max(certain.1), longest.max(ends.1)),
        };
        if shortest == longest {
            return BatchTimes::constant(latency(longest)).pooled;
        }
        let inner = |index: usize| shortest + Span((certain - shortest).as_nanos() * index as i64 / (BINS as i64 - 1));
        let edges = (1..BINS).map(inner).chain([longest]);
        let below = |work: Span| own.at(work) * others.below(all.0.partition_point(|&other| other <= work));
        let mut bins: Vec<Bin> = Vec::new();
        let mut from = (latency(shortest), 0.0);
        for edge in edges {
            let to = (latency(edge), below(edge));
            let part = to.1 - from.1;
            if part > 0.0 {
                // A step must have a width for a score to rise in.
                let narrowest = to.0 - Span((to.0.as_nanos() / 100).max(1));
                let from = if from.0 < to.0 { from.0 } else { narrowest };
                bins.push(Bin { from, to: to.0, part });
            }
            from = to;
        }
        Seen { bins, mean: latency(others.mean_beside(own)) }
    }

    /// What batches of any of the model's requests take but for one in a hundred, for sizes from 1 to `max_batch`;
    /// `None` if nothing is known.
    #[must_use]
    pub fn longest(&self, max_batch: usize) -> Option<Vec<Span>> {
        let all = Distribution::new(self.population_of_all().into_iter().map(|alone| self.cost.work(alone)));
        all.ends()?;
        let of = |size: usize| {
            // All k are at most this.
            self.cost.latency(size, all.quantile(CERTAIN_PART.powf(1.0 / size as f64))).max(Span(1))
        };
        Some((1..=max_batch).map(of).collect())
    }

    /// Which classes had better share batches of about the usual size: groups by the mean work of their requests,
    /// ascending, as are the classes of each but for [`Class::ANY`], which comes last in whichever it joins.
    ///
    /// A request of work w in a batch that is padded to w' costs `c1 (w' - w)` more than among its like; a batch of
    /// its own costs c0, and the first request's work, once more. So they share it if the first, [`PADDING_TIMES`]
    /// times, is less than its share of the second.
    #[must_use]
    pub fn groups(&self) -> Vec<Vec<Class>> {
        let is_any = |known: &&Known| known.class == Class::ANY;
        let mut by_mean: Vec<&Known> = self.known.iter().filter(|known| !is_any(known)).collect();
        by_mean.sort_by(|one, other| one.mean.total_cmp(&other.mean).then(one.class.cmp(&other.class)));
        let BatchCost { fixed, per_task } = self.cost;
        let joins = |group: &[&Known], known: &Known| {
            let shortest = group[0].mean;
            let padding = PADDING_TIMES * per_task * (known.mean - shortest) * self.batch_mean;
            shortest <= known.mean && padding < fixed.as_nanos() as f64 + (1.0 - per_task) * shortest
        };
        let mut groups: Vec<Vec<&Known>> = Vec::new();
        for known in by_mean {
            match groups.last_mut().filter(|group| joins(group, known)) {
                Some(group) => group.push(known),
                None => groups.push(vec![known]),
            }
        }
        // Where requests are told apart, nobody is divided for the sake of those that are not.
        if let Some(any) = self.known.iter().find(is_any) {
            match groups.iter().rposition(|group| joins(group, any)) {
                Some(group) => groups[group].push(any),
                None => {
                    let place = groups.partition_point(|group| group[0].mean < any.mean);
                    groups.insert(place, vec![any]);
                }
            }
        }
        groups.into_iter().map(|group| group.into_iter().map(|known| known.class).collect()).collect()
    }
}

#[cfg(test)]
mod tests;
