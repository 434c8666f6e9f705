//! `status`: what a scheduler knows of its cluster, for people or as JSON.

use std::{
    fmt::Write as _,
    io::Write as _,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow, ensure};
use scheduler::{
    config::Config,
    status::{AdviceRow, BackendRow, ClusterPage, PATH, WeightsRow},
};

use crate::{config_file::read_config, page};

/// Arguments of `status`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A scheduler's `admin.http`; of several the primary's answer is shown
    #[arg(long, value_name = "ADDRESS", required_unless_present = "config")]
    scheduler: Vec<String>,
    /// A scheduler's configuration file (TOML), which has its `admin.http`
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// One JSON object on stdout
    #[arg(long)]
    json: bool,
    /// All models, too
    #[arg(long)]
    models: bool,
}

/// Where it is told.
const WHOSE: &str = "a scheduler's `admin.http`";
/// Pages that are read: as many as have all models that a scheduler takes.
const PAGES_MAX: usize = 128;

/// Asks, and prints what was answered.
pub(crate) fn run(args: &Args) -> Result<()> {
    let (schedulers, _) = schedulers(&args.scheduler, args.config.as_deref())?;
    let text = if args.json {
        page::plain_json(&serde_json::to_string(&ask_all(&schedulers, page::exact)?)?) + "\n"
    } else {
        table(&ask_all(&schedulers, page::decoded)?, args.models)
    };
    // A reader that has seen enough (`| head`) is no error.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

/// Where schedulers tell of their cluster, if one is in this file: of that, too.
pub(crate) fn schedulers(named: &[String], file: Option<&Path>) -> Result<(Vec<String>, Option<Config>)> {
    let mut schedulers = named.to_vec();
    let Some(file) = file else { return Ok((schedulers, None)) };
    let config: Config = read_config(file)?;
    let expected = "expected `http = \"ADDRESS\"`, where the scheduler tells of its cluster";
    let admin = config.admin.as_ref();
    let admin = admin.ok_or_else(|| anyhow!("--config: {}: admin: not found, {expected}", file.display()))?;
    schedulers.push(admin.http.to_string());
    Ok((schedulers, Some(config)))
}

/// How a page is made of an answer's body.
type Decode = fn(&str) -> Result<ClusterPage>;

/// What the primary answers, or else the first that does.
pub(crate) fn ask_all(schedulers: &[String], decode: Decode) -> Result<ClusterPage> {
    let (mut other, mut failed) = (None, None);
    for scheduler in schedulers {
        match whole(scheduler, decode).with_context(|| format!("scheduler {scheduler}")) {
            Ok(cluster) if cluster.is_primary => return Ok(cluster),
            Ok(cluster) => other = other.or(Some(cluster)),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    other.ok_or_else(|| failed.unwrap_or_else(|| anyhow!("--scheduler: found none, expected an address")))
}

/// All pages of a scheduler as one.
pub(crate) fn whole(scheduler: &str, decode: Decode) -> Result<ClusterPage> {
    let page = |number| decode(&page::of(scheduler, &format!("{PATH}?page={number}"), WHOSE)?);
    let mut cluster = page(0)?;
    ensure!(cluster.pages <= PAGES_MAX, "found {} pages, expected at most {PAGES_MAX}", cluster.pages);
    for number in 1..cluster.pages {
        let mut more = page(number)?;
        cluster.frontends.append(&mut more.frontends);
        cluster.backends.append(&mut more.backends);
        cluster.models.append(&mut more.models);
    }
    cluster.pages = 1;
    Ok(cluster)
}

fn table(cluster: &ClusterPage, with_models: bool) -> String {
    let ClusterPage { counts, scheduler, epoch, arm, .. } = cluster;
    let standing = if cluster.is_primary { "the primary" } else { "not the primary" };
    let mut text = format!("{scheduler}, {standing}, arm {arm}: epoch {epoch}, {:.1} s ago\n", cluster.age_ms / 1e3);
    for row in &cluster.schedulers {
        let _ = writeln!(text, "scheduler {} {}", row.address, row.state);
    }
    let _ = writeln!(
        text,
        "{} frontends, {} backends, {} GPUs, {} of {} models hosted",
        counts.frontends, counts.backends, counts.gpus, counts.models_hosted, counts.models
    );
    text += &advice(&cluster.advice);
    let header = ["ROLE", "NAME", "ID", "STATE", "ADDRESS", "PATH", "GPUS", "MODELS", "WEIGHTS", "SAFE TO REMOVE"];
    // Only where the scheduler places models.
    let is_placed = cluster.backends.iter().any(|row| row.sub_cluster.is_some());
    let placed = |name: &str| is_placed.then(|| name.to_owned());
    let sub_cluster = |at: Option<u16>| is_placed.then(|| at.map_or_else(|| "-".to_owned(), |at| at.to_string()));
    let mut rows = vec![header.map(str::to_owned).into_iter().chain(placed("SUB-CLUSTER")).collect::<Vec<_>>()];
    let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    for row in &cluster.frontends {
        let (address, path) = (or_none(&row.address), or_none(&row.path));
        let id = row.id.to_string();
        rows.push(vec!["frontend".to_owned(), row.name.clone(), id, row.state.clone(), address, path]);
    }
    for row in &cluster.backends {
        let serving = row.gpus.iter().filter(|gpu| gpu.state == "serving").count();
        let row_of = vec![
            "backend".to_owned(),
            row.name.clone(),
            row.id.to_string(),
            row.state.clone(),
            or_none(&row.address),
            or_none(&row.path),
            format!("{serving}/{}", row.gpus.len()),
            row.models.to_string(),
            weights(row.weights),
            safety(row),
        ];
        rows.push(row_of.into_iter().chain(sub_cluster(row.sub_cluster)).collect());
    }
    text += &aligned(&rows);
    if with_models {
        let header = ["MODEL", "VERSION", "BACKENDS", "GPUS", "REQUESTS/S"];
        let mut rows = vec![header.map(str::to_owned).into_iter().chain(placed("SUB-CLUSTER")).collect::<Vec<_>>()];
        for row in &cluster.models {
            let (backends, gpus, rate) =
                (row.backends.to_string(), row.gpus.to_string(), format!("{:.1}", row.rate_rps));
            let cells = vec![row.name.clone(), row.version.clone(), backends, gpus, rate];
            rows.push(cells.into_iter().chain(sub_cluster(row.sub_cluster)).collect());
        }
        text += &format!("\n{}", aligned(&rows));
    }
    text
}

/// How many GPUs are needed, and an empty line.
fn advice(advice: &AdviceRow) -> String {
    let AdviceRow { gpus, reason, busy, bad, .. } = advice;
    let needed = advice.gpus_needed.map_or_else(|| "?".to_owned(), |needed| needed.to_string());
    let (busy, bad) = (100.0 * busy, 100.0 * bad);
    format!("{needed} GPUs needed, {gpus} in use ({busy:.0} % busy, {bad:.1} % of tasks lost): {reason}\n\n")
}

fn safety(backend: &BackendRow) -> String {
    if backend.safe_to_remove {
        return "yes".to_owned();
    }
    let (first, count) = (backend.only_here_first.join(", "), backend.only_here);
    let more = if count > backend.only_here_first.len() { ", .." } else { "" };
    format!("no: only here {count} ({first}{more})")
}

fn weights(weights: WeightsRow) -> String {
    if weights.gpu_bytes == 0 {
        return "all there".to_owned();
    }
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    format!("{:.1} of {:.1} GiB", gib(weights.gpu_bytes_used), gib(weights.gpu_bytes))
}

/// Columns as wide as what is in them.
fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or_default()).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use scheduler::status::{Counts, GpuRow, ModelRow, SchedulerRow};

    use super::*;

    fn cluster() -> ClusterPage {
        let gpu = |index, state: &str| GpuRow {
            index,
            id: 7,
            state: state.to_owned(),
            models: 2,
            weights_bytes: None,
            ran: None,
        };
        let backend = BackendRow {
            name: "gpus".to_owned(),
            id: 12,
            state: "serving".to_owned(),
            obeys: true,
            address: Some("10.0.0.3:40000".to_owned()),
            path: None,
            links: 1,
            sub_cluster: None,
            gpus: vec![gpu(0, "serving"), gpu(1, "unusable")],
            models: 2,
            safe_to_remove: false,
            only_here: 4,
            only_here_first: vec!["a".to_owned(), "b".to_owned()],
            weights: WeightsRow {
                gpu_bytes: 8 << 30,
                gpu_bytes_used: 3 << 30,
                host_bytes: 0,
                host_bytes_used: 0,
                loads: 0,
                failed: 0,
            },
        };
        let models = vec![ModelRow {
            name: "a".to_owned(),
            version: "1".to_owned(),
            backends: 1,
            gpus: 2,
            ..ModelRow::default()
        }];
        ClusterPage {
            page: 0,
            pages: 1,
            age_ms: 149.0,
            scheduler: "rack7".to_owned(),
            arm: "soft".to_owned(),
            is_primary: true,
            epoch: "3.0".to_owned(),
            schedulers: vec![SchedulerRow { address: "10.0.0.1:7400".to_owned(), state: "primary".to_owned() }],
            counts: Counts { backends: 1, gpus: 2, models: 2, models_hosted: 2, ..Counts::default() },
            advice: AdviceRow {
                gpus: 1,
                gpus_needed: Some(3),
                reason: "it is so".to_owned(),
                busy: 0.75,
                bad: 0.125,
                ..AdviceRow::default()
            },
            frontends: Vec::new(),
            backends: vec![backend],
            models,
        }
    }

    #[test]
    fn people_get_a_table() {
        let text = table(&cluster(), true);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "rack7, the primary, arm soft: epoch 3.0, 0.1 s ago");
        assert_eq!(lines[1], "scheduler 10.0.0.1:7400 primary");
        let expected = "backend  gpus  12  serving  10.0.0.3:40000  -     1/2   2       3.0 of 8.0 GiB  no: only here";
        assert_eq!(lines[3], "3 GPUs needed, 1 in use (75 % busy, 12.5 % of tasks lost): it is so");
        assert_eq!(lines[6], format!("{expected} 4 (a, b, ..)"), "{text}");
        assert_eq!(lines.last(), Some(&"a      1        1         2     0.0"), "{text}");
    }

    #[test]
    fn sub_clusters_have_a_column_where_there_are_any() {
        let mut cluster = cluster();
        (cluster.backends[0].sub_cluster, cluster.models[0].rate_rps) = (Some(3), 12.25);
        let text = table(&cluster, true);
        assert!(text.contains("SAFE TO REMOVE              SUB-CLUSTER\n"), "{text}");
        assert!(text.contains("no: only here 4 (a, b, ..)  3\n"), "{text}");
        // A model that moves is in none.
        assert!(text.ends_with("a      1        1         2     12.2        -\n"), "{text}");
    }

    #[test]
    fn what_is_not_known_is_a_question_mark() {
        let told = advice(&AdviceRow { reason: "a window has to pass".to_owned(), ..AdviceRow::default() });
        assert_eq!(told, "? GPUs needed, 0 in use (0 % busy, 0.0 % of tasks lost): a window has to pass\n\n");
    }

    #[test]
    fn answers_are_read_or_refused_in_one_line() {
        let json = serde_json::to_string(&cluster()).unwrap();
        let read = |answer: &str| page::body(answer, PATH, WHOSE).and_then(|body| page::decoded::<ClusterPage>(&body));
        assert_eq!(read(&format!("HTTP/1.1 200 OK\r\na: b\r\n\r\n{json}")).unwrap(), cluster());
        let wrong = |answer: &str| read(answer).unwrap_err().to_string();
        assert!(wrong("HTTP/1.1 404 Not Found\r\n\r\n").contains("expected a scheduler's `admin.http`"));
        assert_eq!(wrong("HTTP/1.1 400 Bad Request\r\n\r\ntry again\n"), "try again");
        assert_eq!(wrong("SSH-2.0\r\n"), "found no answer in HTTP");
        assert_eq!(wrong("HTTP/1.1 200 OK\r\n\r\n{}"), "its answer is of another version");
    }

    #[test]
    fn names_do_nothing_to_the_terminal_and_break_no_line() {
        let mut found = cluster();
        let evil = "\u{1b}[2J\u{9b}2J\u{7}\nbackend  x".to_owned();
        found.backends[0].name = evil.clone();
        found.backends[0].only_here_first[0] = evil.clone();
        found.models[0].name = evil.clone();
        found.scheduler = evil.clone();
        found.advice.reason = evil;
        let json = serde_json::to_string(&found).unwrap();
        let text = table(&page::decoded(&json).unwrap(), true);
        assert!(text.lines().all(|line| !line.contains(char::is_control)), "{text:?}");
        assert_eq!(text.lines().count(), table(&cluster(), true).lines().count());
        assert!(text.starts_with(r"\u{1b}[2J\u{9b}2J\u{7}\nbackend  x, the primary, "), "{text}");
        assert_eq!(page::exact::<ClusterPage>(&page::plain_json(&json)).unwrap(), found);
    }
}
