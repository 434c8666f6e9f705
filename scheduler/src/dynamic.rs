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

use std::{cmp::Reverse, collections::BTreeMap};

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
/// A window whose median differs by more than this part from that of the one before shows that inputs have changed:
/// what was before it is forgotten.
const SHIFT: f64 = 0.25;
/// Into so many steps the time of a batch is divided. Each is an instant at which a waiting request's score changes its
/// form, for each batch size.
const BINS: usize = 12;
/// Classes of an application and a length; of more, those with the fewest samples count as of their length.
const NARROW_MAX: usize = 64;
/// What is said to have taken longer took so long.
const ALONE_MAX: Span = Span::from_millis(24 * 3_600_000);
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
}

impl Works {
    fn handle(&mut self, sample: Sample, cost: &BatchCost) {
        if self.window.len() == WINDOW {
            let median = |samples: &mut Vec<Sample>| {
                let middle = samples.len() / 2;
                let (_, sample, _) = samples.select_nth_unstable_by_key(middle, |sample| sample.alone);
                cost.work(sample.alone).as_nanos() as f64
            };
            let now = median(&mut self.window);
            let has_shifted = !self.before.is_empty() && (median(&mut self.before) / now.max(1.0) - 1.0).abs() > SHIFT;
            let window = std::mem::replace(&mut self.window, Vec::with_capacity(WINDOW));
            self.before = if has_shifted { Vec::new() } else { window };
        }
        self.window.push(sample);
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
    }
}

/// Requests that are planned alike: of an application, of a length, or of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Class {
    application: Option<u8>,
    bucket: Option<Bucket>,
}

impl Class {
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

    /// The least and the greatest.
    fn ends(&self) -> Option<(Span, Span)> {
        Some((*self.0.first()?, *self.0.last()?))
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

impl BatchTimes {
    /// Always this.
    #[must_use]
    pub fn constant(time: Span) -> Self {
        // A step must have a width for a score to rise in.
        let from = time - Span((time.as_nanos() / 100).max(1));
        let seen = Seen { bins: vec![Bin { from, to: time, part: 1.0 }], mean: time };
        Self { mean: time, classes: Vec::new(), pooled: seen }
    }

    /// As a class sees it; one that is unknown as all together do.
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
        Self { cost, applications: BTreeMap::new(), lengths: None, known: Vec::new() }
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
        if let Some((lengths, _)) = &mut self.lengths {
            sample.bucket = Bucket::of(length);
            lengths.handle_alone(sample, &self.cost);
        }
        self.applications.entry(application).or_default().handle(sample, &self.cost);
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
        lengths.handle_batch(longest, self.cost.longest_alone(size, took), &self.cost);
        true
    }

    /// What the largest work of these requests is on average: that of those whose class's is the largest. `None` if
    /// nothing is known of one.
    fn largest_work(&self, requests: &[(u8, u32)]) -> Option<Span> {
        let (mut largest, mut count): (Option<&Known>, usize) = (None, 0);
        for &(application, length) in requests {
            let class = self.class(application, length);
            let known = self.find(class)?;
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

    /// What requests of a class take is not known any more; where it was not, that of no request is.
    pub fn forget(&mut self, class: Class) {
        let is_known = self.find(class).is_some();
        match (&mut self.lengths, class) {
            (_, Class { application: Some(application), bucket: None }) if is_known => {
                self.applications.remove(&application);
            }
            (Some((lengths, _)), Class { bucket: Some(bucket), .. }) if is_known => {
                let is_other = |sample: &Sample| sample.bucket.map(|bucket| lengths.known(bucket)) != Some(bucket);
                self.applications.values_mut().for_each(|works| works.retain(is_other));
                lengths.remove(bucket);
            }
            (lengths, _) => {
                self.applications.clear();
                lengths.iter_mut().for_each(|(lengths, _)| *lengths = Lengths::default());
            }
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
        let sum: i64 = times.iter().map(|&alone| self.cost.work(alone).as_nanos()).sum();
        let mean = sum as f64 / times.len().max(1) as f64;
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
        let of_application = Class::of(application);
        let Some(((lengths, _), bucket)) = self.lengths.as_ref().zip(bucket) else { return of_application };
        let bucket = Some(lengths.known(bucket));
        let narrower = [Class { application: Some(application), bucket }, Class { application: None, bucket }];
        narrower.into_iter().find(|&class| self.find(class).is_some()).unwrap_or(of_application)
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
            (None, None) => Vec::new(),
            (None, Some(bucket)) => lengths.into_iter().flat_map(|lengths| lengths.times(bucket)).collect(),
            (Some(application), bucket) => {
                let samples = self.applications.get(&application).into_iter().flat_map(Works::samples);
                let samples = samples.filter(|sample| bucket.is_none() || known(sample.bucket) == bucket);
                samples.map(|sample| sample.alone).collect()
            }
        }
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
        let ends = all.ends()?;
        let times = |&size: &usize| {
            let latency = |work| self.cost.latency(size, work) + on_top(size);
            let seen = |own: &Distribution| self.seen((own, &all), size, latency);
            if ends.0 == ends.1 && owns.iter().all(|(_, own)| own.ends() == Some(ends)) {
                return BatchTimes::constant(latency(ends.1));
            }
            let mean = latency(largest_of(&all.0, size));
            let classes = owns.iter().map(|(class, own)| (*class, seen(own))).collect();
            BatchTimes { mean, classes, pooled: seen(&all) }
        };
        Some(sizes.iter().map(times).collect())
    }

    /// Equation 8 where one request's class is known, and the others are of any.
    fn seen(&self, (own, all): (&Distribution, &Distribution), size: usize, latency: impl Fn(Span) -> Span) -> Seen {
        let ((shortest, longest), others) = (own.ends().expect("it has samples"), all.ends().expect("it has samples"));
        let (shortest, longest) = match &self.lengths {
            // The same steps for all applications.
            None => others,
            // Short requests would all be in the first step of those that reach to the longest.
            Some(_) if size == 1 => (shortest, longest),
            Some(_) => (shortest.max(others.0), longest.max(others.1)),
        };
        if shortest == longest {
            return BatchTimes::constant(latency(longest)).pooled;
        }
        let edge = |index: usize| shortest + Span(((longest - shortest).as_nanos() * index as i64) / BINS as i64);
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
    }

    /// What batches of any of the model's requests take but for one in a hundred, for sizes from 1 to `max_batch`;
    /// `None` if nothing is known.
    #[must_use]
    pub fn longest(&self, max_batch: usize) -> Option<Vec<Span>> {
        let alone = self.applications.values().flat_map(Works::samples).map(|sample| sample.alone);
        // Of some lengths only batches have told.
        let lengths = self.lengths.iter().map(|(lengths, _)| lengths);
        let of_batches = lengths.flat_map(|lengths| lengths.buckets().flat_map(|bucket| lengths.of_batches(bucket)));
        let all = Distribution::new(alone.chain(of_batches).map(|alone| self.cost.work(alone)));
        let last = all.0.len().checked_sub(1)?;
        let of = |size: usize| {
            // All k are at most this.
            let part = CERTAIN_PART.powf(1.0 / size as f64);
            let rank = (part * all.0.len() as f64).ceil() as usize;
            self.cost.latency(size, all.0[rank.saturating_sub(1).min(last)]).max(Span(1))
        };
        Some((1..=max_batch).map(of).collect())
    }

    /// Which classes had better share batches of about this size: groups by the mean work of their requests,
    /// ascending, as are the classes of each.
    ///
    /// A request of work w in a batch that is padded to w' costs `c1 (w' - w)` more than among its like; a batch of its
    /// own costs c0, and the first request's work, once more. So they share it if the first is less than its share of
    /// the second.
    #[must_use]
    pub fn groups(&self, batch: f64) -> Vec<Vec<Class>> {
        let mut by_mean: Vec<(f64, Class)> = self.known.iter().map(|known| (known.mean, known.class)).collect();
        by_mean.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
        let BatchCost { fixed, per_task } = self.cost;
        let mut groups: Vec<Vec<(f64, Class)>> = Vec::new();
        for (work, class) in by_mean {
            let shares = groups.last().is_some_and(|group| {
                let (shortest, _) = group[0];
                per_task * (work - shortest) * batch < fixed.as_nanos() as f64 + (1.0 - per_task) * shortest
            });
            if !shares {
                groups.push(Vec::new());
            }
            groups.last_mut().expect("one was pushed").push((work, class));
        }
        let classes = |group: Vec<(f64, Class)>| group.into_iter().map(|(_, class)| class).collect();
        groups.into_iter().map(classes).collect()
    }
}

#[cfg(test)]
mod tests;
