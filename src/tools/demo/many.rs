//! `demo --models`: more models than the GPUs' memory holds, all alike and emulated. Some are popular and most are
//! rare, so weights come and go while requests are served.

use std::{collections::BTreeMap, fs, str::FromStr, thread, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use load::{Arrivals, Expected, Input, Stream, Tally, tables};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use repository::DataType;

use super::{Args, Failed, READY_TIMEOUT, random_http, send};
use crate::tools::{
    cluster::{BackendLayout, Cluster, Layout},
    supervisor::{Logs, Restarts, private_folder},
};

/// Models that one demo has: as many as Clockwork's largest experiment (section 6.3), and some more.
const MODELS_MAX: u32 = 5_000;
const GPUS: u32 = 2;
/// Requests a second, unless told otherwise: nearly all of them could be cold.
const RATE_RPS: f64 = 100.0;
/// A picture is small: what is shown is memory, not the network.
const INPUT: (&str, [usize; 3]) = ("image", [3, 32, 32]);
/// Requests of one group that differ, used in turn.
const INPUTS: usize = 1024;
/// Members' counts are this old at most: they are told with each reading of the scheduler's clock.
const METRICS_AGE: Duration = Duration::from_millis(1_500);

/// All models: ResNet50's latency (Symphony, table 2), weights and load (Clockwork, appendix A), and Clockwork's
/// objective.
const CONFIG: &str = r#"# Written by `downbeat demo --models`.
backend: "emulated"
max_batch_size: 16
input [ { name: "image" data_type: TYPE_UINT8 dims: [ 3, 32, 32 ] } ]
output [ { name: "digest" data_type: TYPE_UINT64 dims: [ 2 ] } ]
parameters { key: "slo_ms" value: { string_value: "100" } }
parameters { key: "alpha_ms" value: { string_value: "1.053" } }
parameters { key: "beta_ms" value: { string_value: "5.072" } }
parameters { key: "weights_mb" value: { string_value: "102.3" } }
parameters { key: "load_ms" value: { string_value: "8.33" } }
"#;

/// A size such as `2GiB` or `500MB`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Size {
    pub(super) bytes: f64,
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let units = [("MB", 1e6), ("GB", 1e9), ("MiB", 1_048_576.0), ("GiB", 1_073_741_824.0)];
        let unit = units.iter().find(|(name, _)| *name == unit).map(|(_, bytes)| bytes);
        match (number.trim().parse::<f64>(), unit) {
            (Ok(number), Some(unit)) if number > 0.0 && number.is_finite() => Ok(Self { bytes: number * unit }),
            _ => Err("expected a number above 0 with MB, GB, MiB or GiB, such as 2GiB".to_owned()),
        }
    }
}

/// Models of about the same popularity.
struct Group {
    name: &'static str,
    /// By rank, the most popular first.
    ranks: std::ops::Range<u32>,
}

/// Runs the demo.
pub(super) fn run(args: &Args, models: u32, memory: Size) -> Result<()> {
    ensure!((10..=MODELS_MAX).contains(&models), "--models must be 10 to {MODELS_MAX}, found {models}");
    ensure!(args.kill.is_none(), "--kill scheduler: expected a demo without --models");
    let rate_rps = args.rate.unwrap_or(RATE_RPS);
    let folder = private_folder()?;
    let repository = folder.path().join("models");
    let name = |rank: u32| format!("resnet50_{rank:04}");
    for rank in 0..models {
        let folder = repository.join(name(rank));
        fs::create_dir_all(&folder).and_then(|()| fs::write(folder.join("config.pbtxt"), CONFIG))?;
    }
    let hosted = BackendLayout::new(GPUS, (0..models).map(name).collect());
    let layout = Layout {
        http: vec![random_http()],
        grpc: vec![],
        repository: Some(repository),
        schedulers: args.schedulers,
        policy: args.policy.clone(),
        arm: args.arm.clone(),
        faults: args.fault.unwrap_or_default(),
        backend: vec![BackendLayout {
            gpu_memory_mb: Some(memory.bytes / 1e6),
            host_memory_mb: args.host_memory.map(|memory| memory.bytes / 1e6),
            ..hosted
        }],
        ..Layout::default()
    };
    let groups = groups(models);
    let streams = streams(&groups, rate_rps, args.seed, name);

    eprintln!("starting {GPUS} GPUs that host {models} models, and hold a part of them ({})", args.policy);
    let cluster = Cluster::start(folder, layout, Logs::Files, Restarts::Killed)?;
    cluster.wait_until_ready(READY_TIMEOUT).map_err(|error| Failed::new(&error))?;
    let tallies = send(&cluster, "load", args.seconds, args.seed, &streams)?;
    thread::sleep(METRICS_AGE);
    let counts = Counts::parse(&load::metrics(cluster.http())?);
    cluster.check().map_err(|error| Failed::new(&error))?;
    drop(cluster);

    let names: Vec<String> = streams.iter().map(|stream| stream.model.clone()).collect();
    let total = Tally::total(Duration::from_secs_f64(args.seconds), &tallies);
    let named = names.iter().map(String::as_str).zip(&tallies).chain([("all", &total)]);
    let reports: Vec<_> = named.map(|(name, tally)| tally.report(name, args.seconds)).collect();
    println!("{}\n\nWeights\n{}", tables::models(&reports), counts.table(args.seconds)?);
    super::judge_answers(&names, &tallies)?;
    let loads = counts.of("downbeat_weights_loads_total")?;
    if loads == 0.0 {
        bail!(Failed("no weights were loaded".to_owned()));
    }
    println!("every answer was right and every request accounted for");
    Ok(())
}

/// A fiftieth of the models are popular, and four fifths are rare.
fn groups(models: u32) -> [Group; 3] {
    let (popular, rare) = ((models / 50).max(1), models / 5);
    [
        Group { name: "popular", ranks: 0..popular },
        Group { name: "usual", ranks: popular..rare },
        Group { name: "rare", ranks: rare..models },
    ]
}

/// How often a model is asked for, compared with the most popular one: Zipf's law.
fn popularity(rank: u32) -> f64 {
    1.0 / f64::from(rank + 1)
}

/// One stream for each group.
fn streams(groups: &[Group], rate_rps: f64, seed: u64, name: impl Fn(u32) -> String) -> Vec<Stream> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let share = |group: &Group| group.ranks.clone().map(popularity).sum::<f64>();
    let all: f64 = groups.iter().map(share).sum();
    let stream = |group: &Group| {
        let inputs = (0..INPUTS).map(|_| input(&mut random).for_model(name(draw(group, &mut random))));
        Stream {
            model: format!("{} {} models", group.ranks.len(), group.name),
            inputs: inputs.collect::<Vec<_>>().into(),
            arrivals: Arrivals::poisson(rate_rps * share(group) / all),
            slo_ms: 100.0,
        }
    };
    groups.iter().map(stream).collect()
}

/// A model of the group, by its popularity.
fn draw(group: &Group, random: &mut impl Rng) -> u32 {
    let mut left = random.random::<f64>() * group.ranks.clone().map(popularity).sum::<f64>();
    let reached = |rank: &u32| {
        left -= popularity(*rank);
        left <= 0.0
    };
    group.ranks.clone().find(reached).unwrap_or(group.ranks.end - 1)
}

fn input(random: &mut impl Rng) -> Input {
    let (name, shape) = INPUT;
    let mut data = vec![0; shape.iter().product()];
    random.fill_bytes(&mut data);
    Input::new(name, DataType::Uint8, &shape, &data, None, Expected::digest(&data))
}

/// What the frontend counts, without labels.
struct Counts(BTreeMap<String, f64>);

impl Counts {
    fn parse(metrics: &str) -> Self {
        let lines = metrics.lines().filter_map(|line| line.split_once(' '));
        Self(lines.filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?))).collect())
    }

    fn of(&self, name: &str) -> Result<f64> {
        self.0.get(name).copied().with_context(|| format!("the frontend's metrics have no {name}"))
    }

    fn table(&self, seconds: f64) -> Result<impl std::fmt::Display + use<>> {
        let header =
            ["cold starts", "loads", "from disk", "failed loads", "evictions", "absent", "pages in use", "PCIe in use"];
        let count = |name: &str| Ok::<_, anyhow::Error>(format!("{:.0}", self.of(name)?));
        let pages = (count("downbeat_weights_pages_used")?, count("downbeat_weights_pages")?);
        let busy = self.of("downbeat_pcie_busy_seconds_total")? / (seconds * f64::from(GPUS));
        let row = [
            count("downbeat_cold_starts_total")?,
            count("downbeat_weights_loads_total")?,
            count("downbeat_weights_disk_loads_total")?,
            count("downbeat_weights_failed_total")?,
            count("downbeat_weights_evictions_total")?,
            count("downbeat_weights_absent_total")?,
            format!("{} of {}", pages.0, pages.1),
            format!("{:.1} %", busy * 100.0),
        ];
        Ok(cli::table(header, [row]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        let bytes = |text: &str| text.parse::<Size>().map(|size| size.bytes);
        assert_eq!(bytes("2GiB"), Ok(2_147_483_648.0));
        assert_eq!(bytes("500MB"), Ok(5e8));
        for wrong in ["", "2", "GiB", "-1GiB", "infGB", "2TB", "0MB", "nanGB"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_model_is_in_one_group_and_is_asked_for_by_its_popularity() {
        let groups = groups(500);
        let ranks: Vec<u32> = groups.iter().flat_map(|group| group.ranks.clone()).collect();
        assert_eq!(ranks, (0..500).collect::<Vec<_>>());
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let mut drawn = [0; 10];
        (0..10_000).for_each(|_| drawn[draw(&groups[0], &mut random) as usize] += 1);
        assert!(drawn[0] > 2 * drawn[3] && drawn[9] > 0, "{drawn:?}");
    }

    #[test]
    fn counts_without_labels_are_read() {
        let counts = Counts::parse("# HELP a b\n# TYPE a counter\na 3\nb{model=\"m\"} 4\nc 0.5\n");
        assert_eq!((counts.of("a").unwrap(), counts.of("c").unwrap()), (3.0, 0.5));
        assert!(counts.of("b").is_err());
    }
}
