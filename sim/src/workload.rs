//! The workload file: which models are asked for how often, on how many GPUs.
//!
//! What is read here has been checked: every error is one line that names the key, what was found and what was
//! expected.

use std::{fs, path::Path, sync::Arc};

use proto::{LatencyProfile, ProfileError, Span, Timestamp};
use scheduler::{Estimates, NetworkBudget, Weights, task::PAGE_BYTES};
use serde::Deserialize;
use thiserror::Error;

use crate::{
    arrivals::Request,
    dynamic::{self, Dynamic},
    faults::{DEVIATIONS_MAX, Faults, Slowdown},
    functions::{Assignment, FUNCTIONS_MAX, MinuteShares},
};

mod class;
pub mod graph;
mod raw;

pub use class::Class;
use graph::Graph;

/// Models that a workload may have, copies included.
pub const MODELS_MAX: usize = 100_000;
/// GPUs that a workload may have.
pub const GPUS_MAX: u32 = 1_000_000;
/// Longest simulated span in seconds: a day.
pub const SECONDS_MAX: f64 = 86_400.0;
/// Largest `faults.gpu_slowdown`.
const SLOWDOWN_MAX: f64 = 100.0;
/// The least and the largest `gpu_kinds.factor`.
const FACTORS: (f64, f64) = (0.01, 100.0);
/// Kinds of GPUs besides those that run l(b) as it is given; all have profiles of their own in the scheduler.
const GPU_KINDS_MAX: usize = Estimates::KINDS_MAX - 1;
/// Classes that a model may have.
const CLASSES_MAX: usize = 100;
/// Longest SLO, latency or network budget in milliseconds: an hour.
const TIME_MAX_MS: f64 = 3_600_000.0;

/// A checked workload.
#[derive(Debug, Clone)]
pub struct Workload {
    /// The file's name without its directories and extension.
    pub name: String,
    /// GPUs; each hosts all models.
    pub gpus: u32,
    /// Kinds of GPUs, in the order of their places; all counts make `gpus`. One, with the factor 1, if all are alike.
    pub gpu_kinds: Vec<GpuKind>,
    /// Simulated span; its first tenth warms up and is not counted.
    pub seconds: f64,
    /// How requests arrive.
    pub arrivals: ArrivalProcess,
    /// What the scheduler plans with.
    pub network: NetworkBudget,
    /// What the way of an answer back to the client may cost; deadlines on the GPU are this much earlier.
    pub response: Span,
    /// What goes wrong.
    pub faults: Faults,
    /// If GPUs hold but a part of all weights.
    pub memory: Option<Memory>,
    /// What a GPU's memory holds, if the file says so, whether all weights fit or not.
    pub gpu_bytes: Option<u64>,
    /// Rates by the minute, in place of the models' shares and `arrivals`.
    pub functions: Option<Arc<MinuteShares>>,
    /// The scheduler plans with what executions take, as its own configuration's key of this name says.
    pub reestimate: bool,
    /// At least one.
    pub models: Vec<Model>,
    /// Where there are some, all requests are theirs, and a model's share is how many of them ask it.
    pub graphs: Vec<Graph>,
}

/// Each GPU's memory for weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Pages of [`PAGE_BYTES`].
    pub pages: u32,
    /// Pages of host memory, which each GPU has for itself, if they hold but a part of all weights.
    pub host_pages: Option<u32>,
}

/// GPUs that are equally fast.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GpuKind {
    /// How many; at least 1.
    pub count: u32,
    /// What they take for a batch, as a part of the l(b) of the file.
    pub factor: f64,
}

/// A model of a workload.
#[derive(Debug, Clone)]
pub struct Model {
    /// Unique in the workload.
    pub name: String,
    /// l(b) of the slowest kind of GPU, up to the largest batch that can meet the longest SLO there.
    pub profile: LatencyProfile,
    /// l(b) of each kind of GPU, in their order, up to the largest batch that can meet the longest SLO there.
    pub offers: Vec<LatencyProfile>,
    /// What its clients ask for; at least one, with the nearest SLO first.
    pub classes: Vec<Class>,
    /// Its part of the aggregate rate; all parts make 1. None, if it has `clients` and other models have not.
    pub share: f64,
    /// What GPU time is worth to its owner, if that is not what the policy says: for policies that have a price.
    pub gpu_price: Option<f64>,
    /// What its weights take.
    pub weights: Weights,
    /// What it takes wherever it is hosted, which placements ask for. Simulations have no part of a GPU for it.
    pub footprint: Footprint,
    /// Clients that each ask again when they are answered; if there are any, nobody else asks for it.
    pub clients: u32,
    /// If its requests take unequal times; then `profile` is the mean, and each class an application.
    pub dynamic: Option<Dynamic>,
}

/// What a model takes of the memory of each GPU that hosts it, whether all models fit there or not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Its weights; 0 if nothing is known of them.
    pub static_bytes: u64,
    /// What a batch takes besides while it runs: of measured zoos the tensors of sixteen requests.
    pub dynamic_bytes: u64,
}

/// How the requests of each model arrive.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(tag = "process", rename_all = "lowercase", deny_unknown_fields)]
pub enum ArrivalProcess {
    /// Exponential gaps.
    Poisson,
    /// Gamma-distributed gaps; the smaller the shape, the burstier (Symphony, section 3.4.2). Shape 1 is Poisson.
    Gamma {
        /// Above 0.
        shape: f64,
    },
    /// Equal gaps.
    Uniform,
}

/// Why a workload was refused.
#[derive(Debug, Error)]
pub enum WorkloadError {
    /// The file, or its zoo, cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// Not TOML, a key that is unknown or missing, or a value of another type.
    #[error("{path}, line {line}: {message}")]
    Syntax {
        /// The file.
        path: String,
        /// From 1.
        line: usize,
        /// What the parser expected.
        message: String,
    },
    /// A value out of its range, or keys that do not go together.
    #[error("{path}: {key}: {problem}")]
    Value {
        /// The file.
        path: String,
        /// The key, with its model if it has one.
        key: String,
        /// What was found and what was expected.
        problem: String,
    },
}

impl Workload {
    /// Reads and checks a workload file; a zoo is looked for beside it, then among the built-in ones.
    ///
    /// # Errors
    /// If a file cannot be read or anything in it is not as expected.
    pub fn read(path: &Path) -> Result<Self, WorkloadError> {
        let name = path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
        let directory = path.parent().unwrap_or(Path::new("."));
        Self::parse(&read_text(path)?, &name, &path.display().to_string(), directory)
    }

    /// Checks the text of a workload file. `path` stands in errors; zoos are looked for in `directory`.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn parse(text: &str, name: &str, path: &str, directory: &Path) -> Result<Self, WorkloadError> {
        let file: raw::File = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count());
            let message = error.message().replace('\n', " ");
            WorkloadError::Syntax { path: path.to_owned(), line, message }
        })?;
        checks::Checks { path, directory }.workload(file, name)
    }

    /// What clients ask for, by name: the graphs, if there are any, otherwise the models.
    pub fn asked(&self) -> impl Iterator<Item = (&str, &[Class])> {
        let graphs = self.graphs.iter().map(|graph| (graph.name.as_str(), &graph.class[..]));
        let models = if self.graphs.is_empty() { &self.models[..] } else { &[] };
        graphs.chain(models.iter().map(|model| (model.name.as_str(), &model.classes[..])))
    }

    /// When a request's task must have ended on its GPU.
    #[must_use]
    pub fn deadline(&self, request: Request) -> Timestamp {
        request.arrived_at + self.models[request.model.0 as usize].classes[request.class as usize].slo - self.response
    }

    /// The same on another number of GPUs, of its only kind.
    ///
    /// # Panics
    /// If its GPUs are not all alike.
    #[must_use]
    pub fn on(&self, gpus: u32) -> Self {
        let &[kind] = &self.gpu_kinds[..] else { panic!("{} has several kinds of GPUs", self.name) };
        Self { gpus, gpu_kinds: vec![GpuKind { count: gpus, ..kind }], ..self.clone() }
    }

    /// Whether batches of a model take unequal times, so that they end when they end.
    #[must_use]
    pub fn is_dynamic(&self) -> bool {
        self.models.iter().any(|model| model.dynamic.is_some())
    }

    /// The position in `gpu_kinds` of the GPU at a place.
    ///
    /// # Panics
    /// If there is no such place.
    #[must_use]
    pub fn kind_of(&self, place: u32) -> usize {
        let ends = self.gpu_kinds.iter().scan(0, |end, kind| {
            *end += kind.count;
            Some(*end)
        });
        ends.take_while(|&end| end <= place).count()
    }

    /// The highest aggregate rate in requests per second that the GPUs could serve if every batch were the largest and
    /// every kind of GPU served all models alike.
    #[must_use]
    pub fn capacity_rps(&self) -> f64 {
        let of_kind = |(index, kind): (usize, &GpuKind)| {
            let gpu_seconds_per_request = |model: &Model| {
                let profile = &model.offers[index];
                let of_batch = |batch| profile.latency(batch).as_secs_f64() / batch as f64;
                model.share * (1..=profile.max_batch()).map(of_batch).fold(f64::INFINITY, f64::min)
            };
            f64::from(kind.count) / self.models.iter().map(gpu_seconds_per_request).sum::<f64>()
        };
        self.gpu_kinds.iter().enumerate().map(of_kind).sum()
    }
}

/// Of megabytes that have been checked.
fn bytes_of(mb: f64) -> u64 {
    (mb * 1e6).round() as u64
}

fn read_text(path: &Path) -> Result<String, WorkloadError> {
    fs::read_to_string(path).map_err(|source| WorkloadError::Read { path: path.display().to_string(), source })
}

/// From the file as written to a checked workload.
mod checks {
    use super::*;

    mod classes;
    mod graphs;

    /// Zoos that need no file.
    const BUILT_IN_ZOOS: [(&str, &str); 3] = [
        ("clockwork-zoo-v100.csv", include_str!("../data/clockwork-zoo-v100.csv")),
        ("symphony-zoo-1080ti.csv", include_str!("../data/symphony-zoo-1080ti.csv")),
        ("symphony-zoo-a100.csv", include_str!("../data/symphony-zoo-a100.csv")),
    ];
    const ZOO_COLUMNS: [&str; 4] = ["model", "alpha_ms", "beta_ms", "slo_ms"];

    pub(super) struct Checks<'a> {
        pub path: &'a str,
        pub directory: &'a Path,
    }

    /// Of a zoo with measured batches (Clockwork, appendix A): the batch sizes, and the columns beside them.
    const MEASURED: [(f64, &str); 5] =
        [(1.0, "b1_ms"), (2.0, "b2_ms"), (4.0, "b4_ms"), (8.0, "b8_ms"), (16.0, "b16_ms")];

    /// What every model is held against.
    struct Terms {
        /// Bytes a second from host memory to a GPU's, and the pages there.
        pcie_bytes_per_s: Option<f64>,
        pages: Option<u32>,
        /// Bytes a second from disk, and the pages of host memory.
        disk: Option<(f64, u32)>,
        /// What the network takes of an SLO at least.
        overhead: Span,
        gpu_kinds: Vec<GpuKind>,
    }

    type Result<T> = std::result::Result<T, WorkloadError>;

    impl Checks<'_> {
        fn fail<T>(&self, key: impl Into<String>, problem: impl Into<String>) -> Result<T> {
            Err(WorkloadError::Value { path: self.path.to_owned(), key: key.into(), problem: problem.into() })
        }

        fn range(&self, key: &str, found: f64, min: f64, max: f64) -> Result<f64> {
            if (min..=max).contains(&found) {
                return Ok(found);
            }
            self.fail(key, format!("expected a number from {min} to {max}, found {found}"))
        }

        fn above_zero(&self, key: &str, found: f64, max: f64) -> Result<f64> {
            if found > 0.0 && found <= max {
                return Ok(found);
            }
            self.fail(key, format!("expected a number above 0 and at most {max}, found {found}"))
        }

        pub(super) fn workload(&self, mut file: raw::File, name: &str) -> Result<Workload> {
            if !(1..=GPUS_MAX).contains(&file.gpus) {
                return self.fail("gpus", format!("expected 1 to {GPUS_MAX}, found {}", file.gpus));
            }
            self.above_zero("seconds", file.seconds, SECONDS_MAX)?;
            if let ArrivalProcess::Gamma { shape } = file.arrivals {
                self.range("arrivals.shape", shape, 0.001, 1000.0)?;
            }
            let micros =
                |key, found| self.range(key, found, 0.0, TIME_MAX_MS * 1e3).map(|us| Span::from_millis_f64(us / 1e3));
            let network = NetworkBudget {
                ctrl: micros("network.ctrl_us", file.network.ctrl_us)?,
                data_per_task: micros("network.data_us_per_request", file.network.data_us_per_request)?,
                // Timers of the simulator are never late.
                jitter: Span::ZERO,
            };
            let response = micros("network.resp_us", file.network.resp_us)?;
            let memory = file.memory.as_ref().map(|raw| self.memory(raw)).transpose()?;
            let host_pages = memory.and_then(|memory| memory.host_pages);
            let terms = Terms {
                pcie_bytes_per_s: file.memory.as_ref().and_then(|raw| raw.pcie_gbps).map(|gbps| gbps * 1e9 / 8.0),
                pages: memory.map(|memory| memory.pages),
                disk: file.memory.as_ref().and_then(|raw| raw.disk_gbps).map(|gbps| gbps * 1e9 / 8.0).zip(host_pages),
                overhead: network.delay(1) + response,
                gpu_kinds: self.gpu_kinds(&file.gpu_kinds, file.gpus)?,
            };

            self.set_objectives(&file.graphs, &mut file.models)?;
            let mut models = Vec::new();
            let mut shares = Vec::new();
            for model in &file.models {
                let first = models.len();
                self.add_models(model, &terms, &mut models)?;
                shares.extend(models[first..].iter().map(|_| model.share));
            }
            if models.is_empty() {
                return self.fail("[[model]]", "expected at least one, found none");
            }
            let mut names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
            names.sort_unstable();
            if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
                return self.fail("name", format!("expected unique names, found {:?} twice", twice[0]));
            }
            self.set_shares(&mut models, &shares, file.popularity)?;
            // Where all fit, all are there.
            let pages: u64 = models.iter().map(|model| u64::from(model.weights.pages)).sum();
            let memory = memory.filter(|memory| pages > u64::from(memory.pages));
            if memory.is_none() {
                models.iter_mut().for_each(|model| model.weights = Weights::default());
            }
            let functions =
                file.functions.as_ref().map(|raw| self.functions(raw, file.seconds, &models)).transpose()?;
            if let Some(functions) = &functions {
                for (index, model) in models.iter_mut().enumerate() {
                    model.share = functions.mean_share(index);
                }
            }
            if functions.is_some() && !file.graphs.is_empty() {
                return self.fail("functions", "expected none where there are graphs");
            }
            let graphs = self.graphs(&file.graphs, &mut models)?;
            Ok(Workload {
                name: name.to_owned(),
                gpus: file.gpus,
                gpu_kinds: terms.gpu_kinds,
                seconds: file.seconds,
                arrivals: file.arrivals,
                network,
                response,
                faults: self.faults(&file.faults, file.gpus)?,
                memory,
                gpu_bytes: file.memory.as_ref().map(|raw| bytes_of(raw.gpu_mb)),
                functions: functions.map(Arc::new),
                reestimate: file.reestimate,
                models,
                graphs,
            })
        }

        fn memory(&self, raw: &raw::Memory) -> Result<Memory> {
            let pages = |mb: f64| (mb * 1e6 / PAGE_BYTES as f64) as u32;
            let mb = self.above_zero("memory.gpu_mb", raw.gpu_mb, 1e9)?;
            for (key, gbps) in [("memory.pcie_gbps", raw.pcie_gbps), ("memory.disk_gbps", raw.disk_gbps)] {
                if let Some(gbps) = gbps {
                    self.above_zero(key, gbps, 1e6)?;
                }
            }
            let host_pages = match (raw.host_mb, raw.disk_gbps) {
                (Some(mb), Some(_)) => Some(pages(self.above_zero("memory.host_mb", mb, 1e9)?)),
                (None, None) => None,
                _ => return self.fail("memory", "expected both host_mb and disk_gbps, or neither"),
            };
            Ok(Memory { pages: pages(mb), host_pages })
        }

        /// What a model's weights take; nothing if the file says nothing.
        fn weights(&self, name: &str, mb: Option<f64>, load_ms: Option<f64>, terms: &Terms) -> Result<Weights> {
            let key = |key: &str| format!("model {name:?}: {key}");
            let (Some(mb), Some(pages_max)) = (mb, terms.pages) else {
                return match (mb.or(load_ms), terms.pages) {
                    (None, None) => Ok(Weights::default()),
                    (None, Some(_)) => self.fail(key("weights_mb"), "expected one beside [memory], found none"),
                    (Some(_), _) => self.fail(key("weights_mb"), "expected [memory] and weights_mb, or neither"),
                };
            };
            let bytes = self.above_zero(&key("weights_mb"), mb, 1e9)? * 1e6;
            let pages = (bytes / PAGE_BYTES as f64).ceil() as u32;
            if pages > pages_max {
                let problem = format!("expected at most the {pages_max} pages of a GPU, found {pages}");
                return self.fail(key("weights_mb"), problem);
            }
            let load = match (load_ms, terms.pcie_bytes_per_s) {
                (Some(ms), _) => Span::from_millis_f64(self.above_zero(&key("load_ms"), ms, TIME_MAX_MS)?),
                (None, Some(rate)) => Span::from_secs_f64(bytes / rate),
                (None, None) => return self.fail(key("load_ms"), "expected it, or memory.pcie_gbps, found neither"),
            };
            if let Some((_, host_pages)) = terms.disk
                && pages > host_pages
            {
                let problem = format!("expected at most the {host_pages} pages of memory.host_mb, found {pages}");
                return self.fail(key("weights_mb"), problem);
            }
            let read = terms.disk.map_or(Span::ZERO, |(rate, _)| Span::from_secs_f64(bytes / rate));
            Ok(Weights { pages, load, read })
        }

        fn dynamic_bytes(&self, name: &str, model: &raw::Model) -> Result<Option<u64>> {
            let checked = |mb| self.range(&format!("model {name:?}: dynamic_mb"), mb, 0.0, 1e9).map(bytes_of);
            model.dynamic_mb.map(checked).transpose()
        }

        fn functions(&self, raw: &raw::Functions, seconds: f64, models: &[Model]) -> Result<MinuteShares> {
            let cost = |index: usize| {
                let profile = &models[index].profile;
                profile.latency(profile.max_batch()).as_nanos() / profile.max_batch() as i64
            };
            let mut cheapest: Vec<usize> = (0..models.len()).collect();
            cheapest.sort_by_key(|&index| cost(index));
            let is_lucky = raw.assignment == raw::HotModels::Lucky;
            let assignment = Assignment { models: cheapest, is_lucky, seed: raw.seed };
            match (&raw.rates, raw.count) {
                (Some(file), None) => {
                    let text = read_text(&self.directory.join(file))?;
                    MinuteShares::parse(&text, &assignment)
                        .or_else(|problem| self.fail(format!("functions.rates {file:?}"), problem))
                }
                (None, Some(count)) => {
                    if !(1..=FUNCTIONS_MAX).contains(&count) {
                        return self.fail("functions.count", format!("expected 1 to {FUNCTIONS_MAX}, found {count}"));
                    }
                    let minutes = raw.minutes.unwrap_or((seconds / 60.0).ceil() as usize);
                    if !(1..=1440).contains(&minutes) {
                        return self.fail("functions.minutes", format!("expected 1 to 1440, found {minutes}"));
                    }
                    Ok(MinuteShares::synthetic(count, minutes, &assignment))
                }
                _ => self.fail("functions", "expected either count or rates"),
            }
        }

        /// Those of the file, and what is left.
        fn gpu_kinds(&self, raw: &[raw::GpuKind], gpus: u32) -> Result<Vec<GpuKind>> {
            if raw.len() > GPU_KINDS_MAX {
                return self.fail("gpu_kinds", format!("expected at most {GPU_KINDS_MAX}, found {}", raw.len()));
            }
            let (mut kinds, mut left) = (Vec::new(), gpus);
            for &raw::GpuKind { count, factor } in raw {
                self.range("gpu_kinds.factor", factor, FACTORS.0, FACTORS.1)?;
                if !(1..=left).contains(&count) {
                    let problem = format!(
                        "expected at least 1 each and at most {gpus} in all, found {count} where {left} are left"
                    );
                    return self.fail("gpu_kinds.count", problem);
                }
                left -= count;
                kinds.push(GpuKind { count, factor });
            }
            kinds.extend((left > 0).then_some(GpuKind { count: left, factor: 1.0 }));
            Ok(kinds)
        }

        fn faults(&self, raw: &raw::Faults, gpus: u32) -> Result<Faults> {
            // Below 1 / DEVIATIONS_MAX every execution takes some time.
            let jitter_max = (1.0 / DEVIATIONS_MAX * 10.0).floor() / 10.0;
            let execution_jitter = self.range("faults.execution_jitter", raw.execution_jitter, 0.0, jitter_max)?;
            let load_jitter = self.range("faults.load_jitter", raw.load_jitter, 0.0, jitter_max)?;
            let seconds = |key, found| self.range(key, found, 0.001, SECONDS_MAX).map(Span::from_secs_f64);
            let (up_mean, down_mean) = match (raw.gpu_up_s, raw.gpu_down_s) {
                (None, None) => (Span::ZERO, Span::ZERO),
                (Some(up), Some(down)) => (seconds("faults.gpu_up_s", up)?, seconds("faults.gpu_down_s", down)?),
                _ => return self.fail("faults", "expected both gpu_up_s and gpu_down_s, or neither"),
            };
            Ok(Faults { execution_jitter, load_jitter, slowdown: self.slowdown(raw, gpus)?, up_mean, down_mean })
        }

        fn slowdown(&self, raw: &raw::Faults, gpus: u32) -> Result<Option<Slowdown>> {
            let Some(factor) = raw.gpu_slowdown else {
                if raw.slow_from_s.is_some() || raw.slow_gpus.is_some() {
                    return self.fail("faults", "expected gpu_slowdown beside slow_from_s and slow_gpus");
                }
                return Ok(None);
            };
            let factor = self.range("faults.gpu_slowdown", factor, 1.0, SLOWDOWN_MAX)?;
            let from_s = self.range("faults.slow_from_s", raw.slow_from_s.unwrap_or(0.0), 0.0, SECONDS_MAX)?;
            let slow = raw.slow_gpus.unwrap_or(gpus);
            if !(1..=gpus).contains(&slow) {
                return self.fail("faults.slow_gpus", format!("expected 1 to {gpus}, found {slow}"));
            }
            Ok(Some(Slowdown { factor, from: Timestamp::ZERO + Span::from_secs_f64(from_s), gpus: slow }))
        }

        fn add_models(&self, model: &raw::Model, terms: &Terms, models: &mut Vec<Model>) -> Result<()> {
            let key =
                format!("model {:?}: gpu_price", model.name.as_ref().or(model.zoo.as_ref()).map_or("", String::as_str));
            let gpu_price = model.gpu_price.map(|price| self.range(&key, price, 0.0, f64::INFINITY)).transpose()?;
            let first = models.len();
            self.add_unpriced(model, terms, models)?;
            models[first..].iter_mut().for_each(|model| model.gpu_price = gpu_price);
            Ok(())
        }

        fn add_unpriced(&self, model: &raw::Model, terms: &Terms, models: &mut Vec<Model>) -> Result<()> {
            if let Some(zoo) = &model.zoo {
                let alone = model.name.is_none()
                    && model.alpha_ms.is_none()
                    && model.beta_ms.is_none()
                    && model.latency_ms.is_none()
                    && model.classes.is_none()
                    && model.weights_mb.is_none()
                    && model.load_ms.is_none();
                if !alone {
                    let problem = "brings name and latency of its models; expected no name, alpha_ms, beta_ms, \
                                   latency_ms, classes, weights_mb or load_ms beside it";
                    return self.fail("zoo", problem);
                }
                return self.add_zoo(zoo, model, terms, models);
            }
            let Some(name) = &model.name else {
                return self
                    .fail(format!("[[model]] number {}", models.len() + 1), "expected `name` or `zoo`, found neither");
            };
            let count = model.count.unwrap_or(1);
            if count == 0 || models.len() + count > MODELS_MAX {
                let problem = format!("expected 1 to {MODELS_MAX} models in all, found {count} here");
                return self.fail(format!("model {name:?}: count"), problem);
            }
            let checked = match (&model.latency_ms, model.alpha_ms, model.beta_ms, &model.cost, &model.applications) {
                (Some(table), None, None, None, None) => {
                    self.table_model(name, table, self.classes(name, model)?, model.max_batch, terms)?
                }
                (None, Some(alpha), Some(beta), None, None) => {
                    self.linear_model(name, alpha, beta, self.classes(name, model)?, model.max_batch, terms)?
                }
                (None, None, None, Some(cost), Some(applications)) => {
                    self.dynamic_model(name, cost, applications, model, terms)?
                }
                _ => {
                    let problem = "expected both alpha_ms and beta_ms, or latency_ms alone, or both cost and \
                                   applications";
                    return self.fail(format!("model {name:?}"), problem);
                }
            };
            let weights = self.weights(name, model.weights_mb, model.load_ms, terms)?;
            let footprint = Footprint {
                static_bytes: bytes_of(model.weights_mb.unwrap_or(0.0)),
                dynamic_bytes: self.dynamic_bytes(name, model)?.unwrap_or(0),
            };
            let checked = Model { weights, footprint, clients: model.clients.unwrap_or(0), ..checked };
            if model.count.is_none() {
                models.push(checked);
            } else {
                models.extend((1..=count).map(|copy| Model { name: format!("{name}-{copy}"), ..checked.clone() }));
            }
            Ok(())
        }

        fn add_zoo(&self, zoo: &str, beside: &raw::Model, terms: &Terms, models: &mut Vec<Model>) -> Result<()> {
            let file = self.directory.join(zoo);
            let built_in = BUILT_IN_ZOOS.iter().find(|(name, _)| *name == zoo);
            let text = match built_in {
                Some((_, text)) if !file.exists() => (*text).to_owned(),
                _ => read_text(&file)?,
            };
            if text.lines().next().is_some_and(|header| header.contains(MEASURED[0].1)) {
                return self.add_measured_zoo(zoo, &text, beside, terms, models);
            }
            if beside.slo_ms.is_some() || beside.background || beside.count.is_some() {
                let problem = "brings SLOs, too; expected no slo_ms, background or count beside it";
                return self.fail(format!("zoo {zoo:?}"), problem);
            }
            let mut lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
            let header: Vec<&str> =
                lines.next().map_or(Vec::new(), |(_, line)| line.split(',').map(str::trim).collect());
            let mut columns = [0; 4];
            for (index, column) in columns.iter_mut().zip(ZOO_COLUMNS) {
                match header.iter().position(|&found| found == column) {
                    Some(position) => *index = position,
                    None => {
                        let problem = format!("expected a column `{column}`, found `{}`", header.join(","));
                        return self.fail(format!("zoo {zoo:?}"), problem);
                    }
                }
            }
            for (number, line) in lines {
                let cells: Vec<&str> = line.split(',').map(str::trim).collect();
                let cell = |index: usize| -> Result<&str> {
                    cells.get(columns[index]).copied().map_or_else(
                        || self.fail(format!("zoo {zoo:?}, line {number}"), format!("has no `{}`", ZOO_COLUMNS[index])),
                        Ok,
                    )
                };
                let value = |index: usize| -> Result<f64> {
                    let text = cell(index)?;
                    text.parse().or_else(|_| {
                        let key = format!("zoo {zoo:?}, line {number}: {}", ZOO_COLUMNS[index]);
                        self.fail(key, format!("expected a number, found {text:?}"))
                    })
                };
                if models.len() >= MODELS_MAX {
                    return self.fail(format!("zoo {zoo:?}"), format!("expected at most {MODELS_MAX} models in all"));
                }
                let name = cell(0)?;
                let slo_ms = self.above_zero(&format!("model {name:?}: slo_ms"), value(3)?, TIME_MAX_MS)?;
                let classes = vec![Class { slo: Span::from_millis_f64(slo_ms), share: 1.0 }];
                let model = self.linear_model(name, value(1)?, value(2)?, classes, beside.max_batch, terms)?;
                let dynamic_bytes = self.dynamic_bytes(name, beside)?.unwrap_or(0);
                models.push(Model { footprint: Footprint { static_bytes: 0, dynamic_bytes }, ..model });
            }
            Ok(())
        }

        /// Measured batches, linear between them, with weights where memory is short; the objective and the number of
        /// copies stand beside the zoo.
        fn add_measured_zoo(
            &self,
            zoo: &str,
            text: &str,
            beside: &raw::Model,
            terms: &Terms,
            models: &mut Vec<Model>,
        ) -> Result<()> {
            let Some(slo_ms) = beside.slo_ms else {
                return self.fail(format!("zoo {zoo:?}"), "brings no SLOs; expected slo_ms beside it");
            };
            self.above_zero("slo_ms", slo_ms, TIME_MAX_MS)?;
            let header: Vec<&str> = text.lines().next().unwrap_or("").split(',').map(str::trim).collect();
            for (number, line) in (2..).zip(text.lines().skip(1)).filter(|(_, line)| !line.trim().is_empty()) {
                let cells: Vec<&str> = line.split(',').map(str::trim).collect();
                let cell = |column: &str| {
                    let index = header.iter().position(|&found| found == column);
                    index.and_then(|index| cells.get(index)).copied().map_or_else(
                        || self.fail(format!("zoo {zoo:?}, line {number}"), format!("has no `{column}`")),
                        Ok,
                    )
                };
                let value = |column: &str| {
                    let text = cell(column)?;
                    text.parse::<f64>().or_else(|_| {
                        let problem = format!("expected a number, found {text:?}");
                        self.fail(format!("zoo {zoo:?}, line {number}: {column}"), problem)
                    })
                };
                let name = cell("model")?;
                let mut table = Vec::new();
                for pair in MEASURED.windows(2) {
                    let ((low, from), (high, to)) = (pair[0], pair[1]);
                    let (from, to) = (value(from)?, value(to)?);
                    let steps = (low as usize)..(high as usize) + usize::from(high == 16.0);
                    table.extend(steps.map(|batch| from + (to - from) * (batch as f64 - low) / (high - low)));
                }
                let classes = vec![Class { slo: Span::from_millis_f64(slo_ms), share: 1.0 }];
                let model = self.table_model(name, &table, classes, beside.max_batch, terms)?;
                let weights = match terms.pages {
                    Some(_) => self.weights(name, Some(value("weights_mb")?), Some(value("transfer_ms")?), terms)?,
                    None => Weights::default(),
                };
                let known = |column: &str| match header.contains(&column) {
                    true => self.range(&format!("zoo {zoo:?}, line {number}: {column}"), value(column)?, 0.0, 1e9),
                    false => Ok(0.0),
                };
                let tensors_mb = 16.0 * (known("input_kb")? + known("output_kb")?) / 1e3;
                let footprint = Footprint {
                    static_bytes: bytes_of(known("weights_mb")?),
                    dynamic_bytes: self.dynamic_bytes(name, beside)?.unwrap_or_else(|| bytes_of(tensors_mb)),
                };
                let model = Model { weights, footprint, clients: beside.clients.unwrap_or(0), ..model };
                match beside.count {
                    None => models.push(model),
                    Some(count) => {
                        models
                            .extend((1..=count).map(|copy| Model { name: format!("{name}-{copy}"), ..model.clone() }));
                    }
                }
                if models.len() > MODELS_MAX {
                    return self.fail(format!("zoo {zoo:?}"), format!("expected at most {MODELS_MAX} models in all"));
                }
            }
            Ok(())
        }

        /// l(b) is the mean of random batches; each application is a class.
        fn dynamic_model(
            &self,
            name: &str,
            cost: &dynamic::raw::Cost,
            applications: &[dynamic::raw::Application],
            model: &raw::Model,
            terms: &Terms,
        ) -> Result<Model> {
            let key = |key: &str| format!("model {name:?}: {key}");
            if model.clients.is_some() {
                return self.fail(key("clients"), "expected none beside applications");
            }
            let (dynamic, shares) = dynamic::check(cost, applications, self.directory)
                .or_else(|(refused, problem)| self.fail(key(refused), problem))?;
            let works = dynamic.works(shares.iter().copied());
            let slo = match (model.slo_ms, model.slo_x_p99, &model.classes) {
                (Some(slo_ms), None, None) => {
                    Span::from_millis_f64(self.above_zero(&key("slo_ms"), slo_ms, TIME_MAX_MS)?)
                }
                (None, Some(times), None) => {
                    let p99 = dynamic.alone(works[works.len() * 99 / 100]).as_millis_f64();
                    Span::from_millis_f64(p99 * self.range(&key("slo_x_p99"), times, 0.01, 1000.0)?)
                }
                _ => return self.fail(key("slo_ms"), "expected it or slo_x_p99 beside applications, and no classes"),
            };
            let max_batch = model.max_batch.unwrap_or(LatencyProfile::MAX_BATCH);
            if !(1..=LatencyProfile::MAX_BATCH).contains(&max_batch) {
                let problem = format!("expected 1 to {}, found {max_batch}", LatencyProfile::MAX_BATCH);
                return self.fail(key("max_batch"), problem);
            }
            let classes = shares.into_iter().map(|share| Class { slo, share }).collect();
            let checked = self.model(name, dynamic.profile(&works, max_batch), classes, max_batch, terms)?;
            Ok(Model { dynamic: Some(dynamic), ..checked })
        }

        fn linear_model(
            &self,
            name: &str,
            alpha_ms: f64,
            beta_ms: f64,
            classes: Vec<Class>,
            max_batch: Option<usize>,
            terms: &Terms,
        ) -> Result<Model> {
            self.range(&format!("model {name:?}: alpha_ms"), alpha_ms, 0.0, TIME_MAX_MS)?;
            self.range(&format!("model {name:?}: beta_ms"), beta_ms, 0.0, TIME_MAX_MS)?;
            let bound = LatencyProfile::MAX_BATCH;
            let profile = LatencyProfile::linear(alpha_ms, beta_ms, bound);
            self.model(name, profile, classes, max_batch.unwrap_or(bound), terms)
        }

        fn table_model(
            &self,
            name: &str,
            latency_ms: &[f64],
            classes: Vec<Class>,
            max_batch: Option<usize>,
            terms: &Terms,
        ) -> Result<Model> {
            let table = latency_ms.iter().copied().map(Span::from_millis_f64).collect();
            let profile = LatencyProfile::from_table(table);
            self.model(name, profile, classes, max_batch.unwrap_or(latency_ms.len()), terms)
        }

        /// Checks the SLOs and cuts the profile off at the largest batch that can meet the longest of them.
        fn model(
            &self,
            name: &str,
            profile: std::result::Result<LatencyProfile, ProfileError>,
            classes: Vec<Class>,
            max_batch: usize,
            terms: &Terms,
        ) -> Result<Model> {
            let key = |key: &str| format!("model {name:?}: {key}");
            let profile = profile.or_else(|error| self.fail(key("l(b)"), error.to_string()))?;
            if !(1..=profile.max_batch()).contains(&max_batch) {
                return self
                    .fail(key("max_batch"), format!("expected 1 to {}, found {max_batch}", profile.max_batch()));
            }
            let overhead = terms.overhead;
            let (nearest, farthest) = (classes[0].slo, classes[classes.len() - 1].slo);
            let mut offers = Vec::new();
            for kind in &terms.gpu_kinds {
                let scaled = profile.scaled(kind.factor);
                if scaled.largest_batch_within(nearest - overhead) == 0 {
                    let problem = format!(
                        "expected at least l(1) = {} and the network budget of {overhead}, found {nearest}: no request \
                         could be on time",
                        scaled.latency(1)
                    );
                    return self.fail(key("slo_ms"), problem);
                }
                offers.push(scaled.up_to(scaled.largest_batch_within(farthest - overhead).min(max_batch)));
            }
            let slowest = offers[1..].iter().fold(offers[0].clone(), |slowest, other| slowest.slowest(other));
            Ok(Model {
                name: name.to_owned(),
                profile: slowest,
                offers,
                classes,
                share: 0.0,
                gpu_price: None,
                weights: Weights::default(),
                footprint: Footprint::default(),
                clients: 0,
                dynamic: None,
            })
        }

        fn set_shares(&self, models: &mut [Model], shares: &[Option<f64>], popularity: raw::Popularity) -> Result<()> {
            let given = shares.iter().flatten().count();
            match popularity {
                _ if given > 0 && given < shares.len() => {
                    return self.fail(
                        "share",
                        format!("expected for every model or for none, found for {given} of {}", shares.len()),
                    );
                }
                raw::Popularity::Zipf(_) if given > 0 => {
                    return self.fail("popularity", "expected no zipf when models have a share");
                }
                raw::Popularity::Zipf(shape) => {
                    self.range("popularity.zipf", shape, 0.0, 10.0)?;
                    for (rank, model) in models.iter_mut().enumerate() {
                        model.share = ((rank + 1) as f64).powf(-shape);
                    }
                }
                raw::Popularity::Equal => {
                    for (model, share) in models.iter_mut().zip(shares) {
                        model.share =
                            self.above_zero(&format!("model {:?}: share", model.name), share.unwrap_or(1.0), 1e9)?;
                    }
                }
            }
            // Clients that ask when they are answered have no rate.
            if models.iter().any(|model| model.clients == 0) {
                models.iter_mut().filter(|model| model.clients > 0).for_each(|model| model.share = 0.0);
            }
            let sum: f64 = models.iter().map(|model| model.share).sum();
            for model in models {
                model.share /= sum;
            }
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests;
