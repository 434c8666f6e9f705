//! `downbeat place`: which sub-cluster should host which model, and what moves there would win: of a workload, or of a
//! cluster that serves, whose primary is asked. It changes none. Part of the driver: a connection, and a clock, if a
//! search is given a time.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use clap::{ArgGroup, Args as ClapArgs};
use cli::{CommandError, positive, table, within};
use indicatif::{ProgressBar, ProgressStyle};
use placement::{Model, Pin, Placement, Plan, Problem, RATE_MAX_RPS, SUB_CLUSTERS_MAX, Score, Search};
use scheduler::status::ModelRow;
use serde::Deserialize;
use serde_json::json;
use sim::Workload;

use crate::{page, status};

/// Find which sub-cluster should host which model.
#[derive(Debug, ClapArgs)]
#[command(group(ArgGroup::new("output").required(true).args(["dry_run", "json"])))]
#[command(group(ArgGroup::new("what").required(true).args(["workload", "scheduler", "config"])))]
#[command(group(ArgGroup::new("now").args(["from", "scheduler", "config"])))]
pub(crate) struct Args {
    /// Workload file (TOML): its models' shares and memory; `memory.gpu_mb` is what a sub-cluster's GPUs hold.
    #[arg(long, value_name = "FILE")]
    workload: Option<PathBuf>,
    /// A scheduler's `admin.http`: what its cluster serves is placed; of several the primary is asked.
    #[arg(long, value_name = "ADDRESS")]
    scheduler: Vec<String>,
    /// A scheduler's configuration file (TOML), which has its `admin.http`, and its `[placement]` instead of flags.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Sub-clusters. Every GPU of one hosts all of its models. By default those that a cluster's backends are in.
    #[arg(long, required_unless_present_any = ["scheduler", "config"])]
    partitions: Option<usize>,
    /// Print what would be moved and what that wins; nothing is changed anywhere.
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object, which --from reads, instead of tables.
    #[arg(long)]
    json: bool,
    /// The placement that is there now: what --json printed.
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Models that may be moved at most; new ones do not count.
    #[arg(long, requires = "now")]
    max_moves: Option<u32>,
    /// A model that must be in one sub-cluster; any number of them.
    #[arg(long, value_name = "MODEL=SUB-CLUSTER")]
    pin: Vec<String>,
    /// Aggregate request rate per second of a workload.
    #[arg(long, default_value_t = 1000.0, conflicts_with_all = ["scheduler", "config"])]
    rate: f64,
    /// Requests per second that a sub-cluster takes at most.
    #[arg(long)]
    rate_max: Option<f64>,
    /// What an imbalance of memory weighs beside one of rates; 1 by default.
    #[arg(long)]
    memory_weight: Option<f64>,
    /// Seed of the search.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Steps of the search: equal seeds and steps give equal placements.
    #[arg(long, default_value_t = 2_000_000)]
    steps: u64,
    /// Search for so long instead: what comes of it depends on the machine.
    #[arg(long, conflicts_with = "steps")]
    seconds: Option<f64>,
}

/// Steps between two looks at the clock.
const TURN: u64 = 10_000;
/// Most steps, and seconds, of a search.
const STEPS_MAX: f64 = 1e12;
const SECONDS_MAX: f64 = 3_600.0;
/// What errors of the search name, and what stands for it here.
const NAMES: [(&str, &str); 5] = [
    ("rate_max_rps", "--rate-max"),
    ("memory_max_bytes", "memory.gpu_mb"),
    ("disruption_max", "--max-moves"),
    ("sub_clusters", "--partitions"),
    ("memory_weight", "--memory-weight"),
];

/// Runs the command and prints its result on stdout, its progress on stderr.
///
/// # Errors
/// On bad input (exit code 2), and if no placement was found (1).
pub(super) fn run(args: &Args) -> Result<(), CommandError> {
    let asked = asked(args)?;
    let problem = &asked.problem;
    // What is read from a file has its keys.
    let names = if args.config.is_some() { &[][..] } else { &NAMES };
    let named = |error: placement::PlacementError| {
        names.iter().fold(error.to_string(), |text, (field, flag)| text.replace(field, flag))
    };
    let mut search = Search::new(problem, args.seed).map_err(|error| CommandError::Failed(named(error)))?;
    look(args, &mut search)?;
    let found = search.best().map_err(|error| CommandError::Found(named(error)))?;
    let is_now = args.from.is_some() || problem.models.iter().any(|model| model.former.is_some());
    let plan = is_now.then(|| search.plan(&found.sub_clusters));
    if args.json {
        println!("{}", as_json(args, &asked, &found, plan.as_ref(), search.steps()));
    } else {
        let in_turn: Vec<usize> = (0..problem.models.len()).map(|model| model % problem.sub_clusters).collect();
        let before = plan.as_ref().map_or_else(|| ("in turn", search.score(&in_turn)), |plan| ("now", plan.before));
        print!("{}", as_text(&asked, &found, plan.as_ref(), before));
    }
    Ok(())
}

/// What is to be placed, and where.
struct Asked {
    problem: Problem,
    /// What a cluster calls the problem's sub-clusters, where some have no backend. By default they count from 0.
    names: Vec<u16>,
}

impl Asked {
    fn name(&self, sub_cluster: usize) -> usize {
        self.names.get(sub_cluster).map_or(sub_cluster, |&name| name.into())
    }
}

/// What a workload or a cluster asks for, and flags besides.
fn asked(args: &Args) -> Result<Asked, CommandError> {
    let mut asked = match &args.workload {
        Some(file) => {
            let problem = of_workload(args, &bench::goodput::read_workload(file)?)?;
            Asked { problem, names: Vec::new() }
        }
        None => of_cluster(args)?,
    };
    let problem = &mut asked.problem;
    if let Some(rate) = args.rate_max {
        problem.rate_max_rps = Some(positive("--rate-max", rate, RATE_MAX_RPS)?);
    }
    problem.memory_weight = args.memory_weight.unwrap_or(problem.memory_weight);
    problem.disruption_max = args.max_moves.map(f64::from).or(problem.disruption_max);
    let pins = args.pin.iter().map(|text| pin(text, &asked.names));
    problem.pins.extend(pins.collect::<Result<Vec<_>, _>>()?);
    Ok(asked)
}

fn of_workload(args: &Args, workload: &Workload) -> Result<Problem, CommandError> {
    let rate_rps = positive("--rate", args.rate, RATE_MAX_RPS)?;
    let sub_clusters = args.partitions.unwrap_or_default();
    let former = args.from.as_ref().map(|path| former(path)).transpose()?.unwrap_or_default();
    let model = |model: &sim::workload::Model| Model {
        name: model.name.clone(),
        rate_rps: rate_rps * model.share,
        static_bytes: model.footprint.static_bytes,
        dynamic_bytes: model.footprint.dynamic_bytes,
        move_cost: 1.0,
        // Where there are fewer sub-clusters now, what was in the others is homeless.
        former: former.get(&model.name).copied().filter(|&at| at < sub_clusters),
    };
    let models = workload.models.iter().map(model).collect();
    Ok(Problem { memory_max_bytes: workload.gpu_bytes, ..Problem::new(sub_clusters, models) })
}

fn of_cluster(args: &Args) -> Result<Asked, CommandError> {
    let failed = |error: anyhow::Error| CommandError::Failed(format!("{error:#}"));
    let (schedulers, config) = status::schedulers(&args.scheduler, args.config.as_deref()).map_err(failed)?;
    let cluster = status::ask_all(&schedulers, page::decoded).map_err(failed)?;
    let config = config.and_then(|config| config.placement).map(|placement| placement.checked()).transpose();
    let config = config.map_err(|error| CommandError::Failed(error.to_string()))?;
    let seated: BTreeSet<u16> = cluster.backends.iter().filter_map(|backend| backend.sub_cluster).collect();
    let are_seated = !seated.is_empty();
    let names: Vec<u16> = match (args.partitions, &config) {
        (Some(count), _) => {
            within("--partitions", count as f64, 1.0, SUB_CLUSTERS_MAX as f64)?;
            (0..count as u16).collect()
        }
        (None, _) if are_seated => seated.into_iter().collect(),
        (None, Some(config)) => (0..config.sub_clusters).collect(),
        (None, None) => {
            let expected = "how many sub-clusters there are to be, as no backend is in one";
            return Err(CommandError::flag("--partitions", expected, "none"));
        }
    };
    let models = served(&cluster.models, are_seated, &names);
    let problem = match config {
        None => Problem::new(names.len(), models).with_idle_models(),
        Some(config) => {
            config.pins_in_vain(&models).iter().for_each(|error| eprintln!("{error}; the other models are placed"));
            config.problem(&names, models).map_err(|error| CommandError::Failed(error.to_string()))?
        }
    };
    Ok(Asked { problem, names })
}

/// Models that are hosted, in all their versions, with what is asked of them and where they are. Where backends are in
/// sub-clusters, what only others host is not there to be placed.
fn served(rows: &[ModelRow], are_seated: bool, names: &[u16]) -> Vec<Model> {
    let mut models: BTreeMap<&str, Model> = BTreeMap::new();
    for row in rows.iter().filter(|row| if are_seated { row.backends_placed > 0 } else { row.backends > 0 }) {
        let former = row.sub_cluster.and_then(|at| names.iter().position(|&name| name == at));
        let (name, rate_rps, static_bytes) = (row.name.clone(), row.rate_rps, row.weights_bytes);
        let found = Model { name, rate_rps, static_bytes, dynamic_bytes: 0, move_cost: 1.0, former };
        match models.entry(&row.name) {
            Entry::Vacant(entry) => drop(entry.insert(found)),
            Entry::Occupied(mut entry) => {
                let model = entry.get_mut();
                model.rate_rps += found.rate_rps;
                model.static_bytes += found.static_bytes;
                model.former = model.former.filter(|_| model.former == found.former);
            }
        }
    }
    models.into_values().collect()
}

/// A model's pin. Without `names` sub-clusters count from 0.
fn pin(text: &str, names: &[u16]) -> Result<Pin, CommandError> {
    let parts = text.rsplit_once('=').and_then(|(model, at)| Some((model.to_owned(), at.parse::<usize>().ok()?)));
    let wrong = || CommandError::flag("--pin", "MODEL=SUB-CLUSTER, such as resnet50=3", text);
    let (model, at) = parts.ok_or_else(wrong)?;
    let found = || names.iter().position(|&name| usize::from(name) == at);
    let sub_cluster = if names.is_empty() { Some(at) } else { found() };
    let expected = "a sub-cluster that has a backend";
    let sub_cluster = sub_cluster.ok_or_else(|| CommandError::flag("--pin", expected, text))?;
    Ok(Pin { model, sub_cluster })
}

/// The sub-cluster of each model of a file that `--json` has printed.
fn former(path: &Path) -> Result<BTreeMap<String, usize>, CommandError> {
    #[derive(Deserialize)]
    struct File {
        models: Vec<Placed>,
    }
    #[derive(Deserialize)]
    struct Placed {
        name: String,
        sub_cluster: usize,
    }
    let wrong = |error: &dyn std::fmt::Display| {
        CommandError::flag("--from", "a file that `place --json` has printed", format!("{}: {error}", path.display()))
    };
    let text = fs::read_to_string(path).map_err(|error| wrong(&error))?;
    let file: File = serde_json::from_str(&text).map_err(|error| wrong(&error))?;
    Ok(file.models.into_iter().map(|model| (model.name, model.sub_cluster)).collect())
}

/// Searches until the steps are made, the time is over, or nothing better can be there.
#[allow(clippy::disallowed_methods, reason = "--seconds are the machine's")]
fn look(args: &Args, search: &mut Search) -> Result<(), CommandError> {
    within("--steps", args.steps as f64, 0.0, STEPS_MAX)?;
    let seconds = args.seconds.map(|seconds| positive("--seconds", seconds, SECONDS_MAX)).transpose()?;
    let span = seconds.map(Duration::from_secs_f64);
    let began = Instant::now();
    let bar = ProgressBar::new(span.map_or(args.steps, |span| span.as_millis() as u64));
    let style = ProgressStyle::with_template("searching [{bar:40}] {percent} %");
    bar.set_style(style.expect("a constant template").progress_chars("=> "));
    loop {
        let (left, done) = match span {
            Some(span) => (if began.elapsed() < span { TURN } else { 0 }, began.elapsed().as_millis() as u64),
            None => (TURN.min(args.steps - search.steps()), search.steps()),
        };
        bar.set_position(done);
        if left == 0 || !search.poll(left) {
            break;
        }
    }
    bar.finish_and_clear();
    Ok(())
}

fn as_json(args: &Args, asked: &Asked, found: &Placement, plan: Option<&Plan>, steps: u64) -> String {
    let problem = &asked.problem;
    let model = |(model, at): (&Model, &usize)| {
        json!({
            "name": model.name, "rate_rps": model.rate_rps, "static_bytes": model.static_bytes,
            "dynamic_bytes": model.dynamic_bytes, "former": model.former.map(|at| asked.name(at)),
            "sub_cluster": asked.name(*at),
        })
    };
    let moves = plan.iter().flat_map(|plan| &plan.moves).map(|step| {
        json!({
            "model": problem.models[step.model].name, "from": asked.name(step.from), "to": asked.name(step.to),
            "objective": step.after.objective,
        })
    });
    json!({
        "seed": args.seed, "steps": steps, "sub_clusters": problem.sub_clusters, "rate_max_rps": problem.rate_max_rps,
        "memory_max_bytes": problem.memory_max_bytes, "memory_weight": problem.memory_weight,
        "max_moves": problem.disruption_max.map(|max| max as u64),
        "objective": found.score.objective, "bound": found.bound,
        "rate_imbalance": found.score.rate_imbalance, "memory_imbalance": found.score.memory_imbalance,
        "moves": moves.collect::<Vec<_>>(),
        "models": problem.models.iter().zip(&found.sub_clusters).map(model).collect::<Vec<_>>(),
    })
    .to_string()
}

/// Moves, sub-clusters, and what all wins.
fn as_text(asked: &Asked, found: &Placement, plan: Option<&Plan>, (name, before): (&str, Score)) -> String {
    let problem = &asked.problem;
    let mut text = String::new();
    let megabytes = |bytes: u64| format!("{:.1}", bytes as f64 / 1e6);
    if let Some(plan) = plan {
        let row = |step: &placement::Move| {
            let model = &problem.models[step.model];
            let cells =
                [asked.name(step.from).to_string(), asked.name(step.to).to_string(), format!("{:.3}", model.rate_rps)];
            let after = [megabytes(model.static_bytes), format!("{:.6}", step.after.objective)];
            [vec![model.name.clone()], cells.into(), after.into()].concat()
        };
        let header = ["move", "from", "to", "requests/s", "MB", "objective after it"];
        let _ = writeln!(text, "{}", table(header, plan.moves.iter().map(row)));
    }
    let row = |at: usize| {
        let here = || problem.models.iter().zip(&found.sub_clusters).filter(move |(_, there)| **there == at);
        let rate: f64 = here().map(|(model, _)| model.rate_rps).sum();
        let bytes = here().map(|(model, _)| model.static_bytes).sum();
        let dynamic = here().map(|(model, _)| model.dynamic_bytes).max().unwrap_or(0);
        [
            asked.name(at).to_string(),
            here().count().to_string(),
            format!("{rate:.3}"),
            megabytes(bytes),
            megabytes(dynamic),
        ]
    };
    let header = ["sub-cluster", "models", "requests/s", "weights (MB)", "largest batch (MB)"];
    let _ = writeln!(text, "{}", table(header, (0..problem.sub_clusters).map(row)));
    let row = |name: &str, score: Score| {
        let values = [score.rate_imbalance, score.memory_imbalance, score.objective];
        let over = if score.excess > 0.0 { format!("{:.1} %", 100.0 * score.excess) } else { "-".to_owned() };
        [vec![name.to_owned()], values.map(|value| format!("{value:.6}")).into(), vec![over]].concat()
    };
    let header = ["", "imbalance of rates", "of memory", "objective", "over limits"];
    let _ = writeln!(text, "{}", table(header, [row(name, before), row("as placed", found.score)]));
    let moves = plan.map_or_else(String::new, |plan| match problem.disruption_max {
        Some(max) => format!("{} of at most {max} moves; ", plan.moves.len()),
        None => format!("{} moves; ", plan.moves.len()),
    });
    let _ = writeln!(text, "{moves}no placement has an objective below {:.6}", found.bound);
    text
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    const WORKLOAD: &str = "gpus = 4\nmemory = { gpu_mb = 1000, pcie_gbps = 100 }\n[[model]]\nname = \"m\"\ncount = 8\n\
                            alpha_ms = 1\nbeta_ms = 5\nslo_ms = 25\nweights_mb = 300\n";

    fn args(words: &str) -> (tempfile::NamedTempFile, Args) {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), WORKLOAD).unwrap();
        let words = format!("place --json --workload {} {words}", file.path().display());
        let args = Line::try_parse_from(words.split(' ')).unwrap_or_else(|error| panic!("{error}")).args;
        (file, args)
    }

    #[test]
    fn what_cannot_be_is_refused_by_the_flag() {
        for (words, expected) in [
            ("--partitions 0", "--partitions: found 0, expected 1 to 4096"),
            ("--partitions 4 --rate 0", "--rate: expected a number above 0 and at most 100000000, found 0"),
            (
                "--partitions 4 --rate-max 200",
                "--rate-max: found 200 requests/s, expected at least 250 requests/s, the mean of 4 sub-clusters, or \
                 more of them",
            ),
            ("--partitions 4 --pin x", "--pin: expected MODEL=SUB-CLUSTER, such as resnet50=3, found x"),
            ("--partitions 4 --pin x=3", "pin of \"x\": found no such model, expected the name of a model"),
            (
                "--partitions 4 --pin m-1=0 --pin m-2=0 --pin m-3=0 --pin m-4=0",
                "pins: found 1200000000 bytes in sub-cluster 0, expected at most memory.gpu_mb, 1000000000 bytes",
            ),
            ("--partitions 4 --memory-weight NaN", "--memory-weight: found NaN, expected a number from 0 to 1000000"),
            (
                "--partitions 2",
                "memory.gpu_mb: found 1000000000 bytes, expected at least 1200000000 bytes, the mean of 2 \
                 sub-clusters, or more of them",
            ),
            ("--partitions 4 --seconds 0", "--seconds: expected a number above 0 and at most 3600, found 0"),
            (
                "--partitions 4 --from Cargo.toml",
                "--from: expected a file that `place --json` has printed, found Cargo.toml: expected value at line 1 \
                 column 2",
            ),
        ] {
            let (_file, args) = args(words);
            assert_eq!(run(&args).unwrap_err().to_string(), expected, "{words}");
        }
    }

    #[test]
    fn a_clusters_models_are_where_all_their_versions_are() {
        let row = |name: &str, version: &str, rate_rps, sub_cluster| ModelRow {
            name: name.to_owned(),
            version: version.to_owned(),
            backends: 1,
            rate_rps,
            weights_bytes: 3,
            backends_placed: 1,
            sub_cluster,
            ..ModelRow::default()
        };
        let fixed = ModelRow { backends_placed: 0, ..row("fixed", "1", 9.0, None) };
        let gone = ModelRow { backends: 0, backends_placed: 0, ..row("gone", "1", 9.0, None) };
        let rows = [row("a", "1", 100.0, Some(0)), row("a", "2", 50.0, Some(0)), row("b", "1", 1.0, Some(1))];
        let moves = [row("c", "1", 1.0, Some(0)), row("c", "2", 1.0, Some(1)), row("d", "1", 1.0, Some(7))];
        let rows = [&rows[..], &moves[..], &[fixed, gone]].concat();
        let told = |models: Vec<Model>| -> Vec<_> {
            models.into_iter().map(|of| (of.name, of.rate_rps, of.static_bytes, of.former)).collect()
        };
        let expected = [("a", 150.0, 6, Some(0)), ("b", 1.0, 3, Some(1)), ("c", 2.0, 6, None), ("d", 1.0, 3, None)];
        let mut expected = expected.map(|(name, rate, bytes, former)| (name.to_owned(), rate, bytes, former)).to_vec();
        assert_eq!(told(served(&rows, true, &[0, 1])), expected);
        expected.push(("fixed".to_owned(), 9.0, 3, None));
        assert_eq!(told(served(&rows, false, &[0, 1])), expected);
    }

    #[test]
    fn what_is_printed_as_json_is_what_is_there_now() {
        let (_file, args) = args("--partitions 4 --pin m-3=2");
        let asked = asked(&args).unwrap();
        let problem = &asked.problem;
        let found = Search::new(problem, args.seed).unwrap().best().unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), as_json(&args, &asked, &found, None, 0)).unwrap();
        let read = former(file.path()).unwrap();
        let all = problem.models.iter().zip(&found.sub_clusters);
        assert!(all.clone().all(|(model, at)| read.get(&model.name) == Some(at)) && read.len() == all.len());
        assert_eq!(read["m-3"], 2);
    }
}
