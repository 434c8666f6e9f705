//! When the requests of each model arrive: random gaps from one seed, or listed instants.

use std::sync::Arc;

use proto::{ModelId, Span, Timestamp};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Exp1, Gamma};
use scheduler::indexed_heap::IndexedHeap;

use crate::{
    dynamic::Dynamic,
    functions::MinuteShares,
    workload::{ArrivalProcess, Class, Workload, graph::StepOf},
};

// Streams of the run's seed; those of arrivals count from 0.
const WORK_STREAM: u64 = 1 << 32;
const LENGTH_STREAM: u64 = 1 << 33;

/// The gaps between arrivals of a process, as multiples of their mean.
#[derive(Debug, Clone)]
pub enum Gaps {
    /// Of a Poisson process.
    Exponential,
    /// The smaller the shape, the burstier.
    Gamma(Gamma<f64>),
    /// All alike.
    Equal,
}

impl Gaps {
    /// # Panics
    /// If a shape is not above 0.
    #[must_use]
    pub fn new(process: ArrivalProcess) -> Self {
        match process {
            ArrivalProcess::Poisson => Self::Exponential,
            ArrivalProcess::Gamma { shape } => Self::Gamma(Gamma::new(shape, 1.0 / shape).expect("a shape is above 0")),
            ArrivalProcess::Uniform => Self::Equal,
        }
    }

    /// The next gap; its mean is 1.
    pub fn sample(&self, random: &mut impl Rng) -> f64 {
        match self {
            Self::Exponential => Exp1.sample(random),
            Self::Gamma(gamma) => gamma.sample(random),
            Self::Equal => 1.0,
        }
    }
}

/// The instants of a Poisson process in seconds, from one of a seed's streams.
pub fn poisson(rate_rps: f64, seed: u64, stream: u64) -> impl Iterator<Item = f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    let mut at = 0.0;
    std::iter::from_fn(move || {
        let gap: f64 = Exp1.sample(&mut rng);
        at += gap / rate_rps;
        Some(at)
    })
}

/// Numbers from 0 to 1, 1 excluded, from one of a seed's streams.
pub fn uniform(seed: u64, stream: u64) -> impl Iterator<Item = f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    std::iter::from_fn(move || Some(rng.random()))
}

/// A request, as it rides along with its task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Request {
    /// When it arrived; its objective counts from here, whatever becomes of its task.
    pub arrived_at: Timestamp,
    /// The model that it is for.
    pub model: ModelId,
    /// Its class: an index into the model's.
    pub class: u32,
    /// Of a dynamic model: what its batch takes by it ([`scheduler::dynamic::BatchCost`]).
    pub work: Span,
    /// Of a dynamic model whose lengths tell that: how long it is, in bytes; otherwise 0.
    pub length: u32,
    /// If its task is a step of a graph's request. A graph's own request has the graph's number for its model's.
    pub step: Option<StepOf>,
}

impl Request {
    /// One whose time is its model's.
    #[must_use]
    pub const fn new(arrived_at: Timestamp, model: ModelId, class: u32) -> Self {
        Self { arrived_at, model, class, work: Span::ZERO, length: 0, step: None }
    }
}

/// The arrivals of all classes of all models, in the order of time; at the same instant in the order of models and
/// classes.
#[derive(Debug)]
pub struct Arrivals {
    streams: Vec<Stream>,
    /// By stream: its next arrival.
    next: IndexedHeap,
    end: Timestamp,
}

/// The requests of one class of one model.
#[derive(Debug)]
struct Stream {
    model: ModelId,
    class: u32,
    instants: Instants,
    works: Option<Box<Works>>,
}

/// What a dynamic model's requests take.
#[derive(Debug)]
struct Works {
    dynamic: Dynamic,
    rng: ChaCha8Rng,
    lengths: ChaCha8Rng,
}

#[derive(Debug)]
enum Instants {
    Random { gaps: Gaps, mean_gap_ns: f64, rng: Box<ChaCha8Rng>, last: Timestamp },
    Uniform { gap_ns: f64, offset_ns: f64, count: u64 },
    ByMinute(Box<ByMinute>),
    Listed(std::vec::IntoIter<Timestamp>),
}

/// A Poisson process whose rate is another one each minute.
#[derive(Debug)]
struct ByMinute {
    functions: Arc<MinuteShares>,
    model: usize,
    /// Of all models in an average minute.
    rate_rps: f64,
    rng: ChaCha8Rng,
    last: Timestamp,
    end: Timestamp,
}

impl ByMinute {
    fn next(&mut self) -> Option<Timestamp> {
        const MINUTE: Span = Span::from_millis(60_000);
        loop {
            if self.last >= self.end {
                return None;
            }
            let minute = (self.last - Timestamp::ZERO).as_nanos() / MINUTE.as_nanos();
            let turn = Timestamp::ZERO + MINUTE * (minute + 1);
            let rate_rps = self.rate_rps * self.functions.share(self.model, minute as usize);
            let gap: f64 = Exp1.sample(&mut self.rng);
            let gap = Span::from_secs_f64((gap / rate_rps.max(1e-12)).min(1e6));
            // It has no memory, so it begins anew where the rate is another one.
            if self.last + gap >= turn {
                self.last = turn;
                continue;
            }
            self.last += gap.max(Span(1));
            return Some(self.last);
        }
    }
}

impl Instants {
    fn next(&mut self) -> Option<Timestamp> {
        match self {
            Self::Random { gaps, mean_gap_ns, rng, last } => {
                *last += Span((gaps.sample(rng.as_mut()) * *mean_gap_ns).round() as i64);
                Some(*last)
            }
            Self::Uniform { gap_ns, offset_ns, count } => {
                let at = Timestamp((*count as f64 * *gap_ns + *offset_ns).round() as i64);
                *count += 1;
                Some(at)
            }
            Self::ByMinute(minutes) => minutes.next(),
            Self::Listed(instants) => instants.next(),
        }
    }
}

impl Arrivals {
    /// Arrivals of an aggregate of `rate_rps` requests a second before `end`. Each class of each model has its own
    /// stream of random numbers; uniform arrivals of several are staggered.
    ///
    /// # Panics
    /// If `rate_rps` is not above 0.
    #[must_use]
    pub fn random(workload: &Workload, rate_rps: f64, seed: u64, end: Timestamp) -> Self {
        assert!(rate_rps > 0.0, "a rate must be above 0, found {rate_rps}");
        let count: usize = workload.asked().map(|(_, classes)| classes.len()).sum();
        let instants = |index: usize, share: f64| {
            let mean_gap_ns = 1e9 / (rate_rps * share);
            if workload.arrivals == ArrivalProcess::Uniform {
                let offset_ns = mean_gap_ns * index as f64 / count as f64;
                return Instants::Uniform { gap_ns: mean_gap_ns, offset_ns, count: 0 };
            }
            let gaps = Gaps::new(workload.arrivals);
            let mut rng = Box::new(ChaCha8Rng::seed_from_u64(seed));
            rng.set_stream(index as u64);
            Instants::Random { gaps, mean_gap_ns, rng, last: Timestamp::ZERO }
        };
        let mut streams = Vec::with_capacity(count);
        for (id, graph) in (0..).zip(&workload.graphs) {
            let instants = instants(streams.len(), graph.share);
            streams.push(Stream { model: ModelId(id), class: 0, instants, works: None });
        }
        // Where there are graphs, all requests are theirs.
        let models = if workload.graphs.is_empty() { &workload.models[..] } else { &[] };
        for (id, model) in (0..).zip(models) {
            if model.clients > 0 {
                continue;
            }
            for (class, Class { share, .. }) in (0..).zip(&model.classes) {
                let instants = match &workload.functions {
                    None => instants(streams.len(), model.share * share),
                    Some(functions) => {
                        let mut rng = ChaCha8Rng::seed_from_u64(seed);
                        rng.set_stream(streams.len() as u64);
                        let (functions, model) = (Arc::clone(functions), id as usize);
                        let (rate_rps, last) = (rate_rps * share, Timestamp::ZERO);
                        Instants::ByMinute(Box::new(ByMinute { functions, model, rate_rps, rng, last, end }))
                    }
                };
                let works = model.dynamic.as_ref().map(|dynamic| {
                    let rng = |first: u64| {
                        let mut rng = ChaCha8Rng::seed_from_u64(seed);
                        rng.set_stream(first + streams.len() as u64);
                        rng
                    };
                    let (rng, lengths) = (rng(WORK_STREAM), rng(LENGTH_STREAM));
                    Box::new(Works { dynamic: dynamic.clone(), rng, lengths })
                });
                streams.push(Stream { model: ModelId(id), class, instants, works });
            }
        }
        Self::new(streams, end)
    }

    /// The given instants of each model, ascending; all requests are of its first class.
    #[must_use]
    pub fn listed(instants: Vec<Vec<Timestamp>>) -> Self {
        let of_model = |(id, list): (u32, Vec<_>)| Stream {
            model: ModelId(id),
            class: 0,
            instants: Instants::Listed(list.into_iter()),
            works: None,
        };
        Self::new((0..).zip(instants).map(of_model).collect(), Timestamp::NEVER)
    }

    fn new(streams: Vec<Stream>, end: Timestamp) -> Self {
        let mut arrivals = Self { streams, next: IndexedHeap::default(), end };
        for stream in 0..arrivals.streams.len() {
            arrivals.advance(stream as u32);
        }
        arrivals
    }

    /// When the next request arrives; `None` after the last.
    #[must_use]
    pub fn peek(&self) -> Option<Timestamp> {
        self.next.peek().map(|(at, _)| at)
    }

    /// The next request.
    pub fn pop(&mut self) -> Option<Request> {
        let (arrived_at, index) = self.next.peek()?;
        self.advance(index);
        let Stream { model, class, works, .. } = &mut self.streams[index as usize];
        let sampled = works.as_mut().map(|works| {
            let work = works.dynamic.sample(*class as usize, &mut works.rng);
            (work, works.dynamic.length(work, &mut works.lengths))
        });
        let (work, length) = sampled.unwrap_or((Span::ZERO, 0));
        Some(Request { work, length, ..Request::new(arrived_at, *model, *class) })
    }

    fn advance(&mut self, index: u32) {
        match self.streams[index as usize].instants.next().filter(|&at| at < self.end) {
            Some(at) => self.next.set(index, at),
            None => self.next.remove(index),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn workload(arrivals: &str) -> Workload {
        let text = format!(
            "gpus = 1\narrivals = {arrivals}\n[[model]]\nname = \"m\"\ncount = 2\nalpha_ms = 1\nbeta_ms = 5\nslo_ms = \
             20"
        );
        Workload::parse(&text, "test", "test", Path::new(".")).unwrap()
    }

    fn all(arrivals: &str, seed: u64) -> Vec<(Timestamp, u32)> {
        let mut arrivals = Arrivals::random(&workload(arrivals), 2000.0, seed, Timestamp(100_000_000_000));
        std::iter::from_fn(|| arrivals.pop()).map(|request| (request.arrived_at, request.model.0)).collect()
    }

    #[test]
    fn gaps_have_the_mean_and_the_variance_of_their_process() {
        // Gamma(k) gaps have a squared coefficient of variation of 1 / k.
        for (process, shape, mean_within) in [
            ("{ process = \"poisson\" }", 1.0, 0.02),
            ("{ process = \"gamma\", shape = 4 }", 4.0, 0.02),
            ("{ process = \"gamma\", shape = 0.05 }", 0.05, 0.1),
        ] {
            let arrivals = all(process, 7);
            assert!(arrivals.is_sorted());
            let of_model: Vec<f64> =
                arrivals.iter().filter(|&&(_, model)| model == 1).map(|(at, _)| at.as_nanos() as f64 / 1e6).collect();
            let gaps: Vec<f64> = of_model.windows(2).map(|pair| pair[1] - pair[0]).collect();
            let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
            let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
            assert!((mean - 1.0).abs() < mean_within, "{process}: mean {mean} ms");
            assert!((variance / mean.powi(2) * shape - 1.0).abs() < 0.15, "{process}: variance {variance}");
        }
    }

    #[test]
    fn one_seed_gives_one_history_and_models_are_independent() {
        let process = "{ process = \"poisson\" }";
        assert_eq!(all(process, 1), all(process, 1));
        assert_ne!(all(process, 1), all(process, 2));
        let times = |model| all(process, 1).into_iter().filter(move |&(_, other)| other == model).map(|(at, _)| at);
        assert_ne!(times(0).next(), times(1).next());
    }

    #[test]
    fn classes_arrive_in_proportion_to_their_shares() {
        let text = "gpus = 1\n[[model]]\nname = \"m\"\nlatency_ms = [1]\n\
                    classes = [{ slo_ms = 20, share = 1 }, { slo_ms = 30, share = 3 }]";
        let workload = Workload::parse(text, "test", "test", Path::new(".")).unwrap();
        let mut arrivals = Arrivals::random(&workload, 2000.0, 3, Timestamp(100_000_000_000));
        let requests: Vec<_> = std::iter::from_fn(|| arrivals.pop()).collect();
        assert!(requests.is_sorted_by_key(|request| request.arrived_at));
        let part = requests.iter().filter(|request| request.class == 1).count() as f64 / requests.len() as f64;
        assert!((part - 0.75).abs() < 0.01, "{part}");
        assert!((requests.len() as f64 / 200_000.0 - 1.0).abs() < 0.02, "{}", requests.len());
    }

    #[test]
    fn uniform_arrivals_are_staggered() {
        let first: Vec<_> = all("{ process = \"uniform\" }", 0).into_iter().take(4).collect();
        let expected = [(0, 0), (500_000, 1), (1_000_000, 0), (1_500_000, 1)];
        assert_eq!(first, expected.map(|(at, model)| (Timestamp(at), model)));
    }
}
