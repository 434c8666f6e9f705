//! What a cluster does at loads that it was not sized for: Symphony's Figure 2, and the two properties of its section
//! 3.5 that `downbeat` is held to, goodput stability (flat top) and GPU usage in proportion to the load.

use chart::{Axis, Chart, Mark, Panel, Series};

use crate::{
    context::{
        Context, GPU_TIME, IN_TIME, POLICIES, Run, Search, axis_of, legend_of, look_of, note_rivals, policy, rate_of,
        transposed, workload,
    },
    figure::{Figure, FigureError},
    table::{Table, cell},
    table2::MODELS,
};

pub(crate) const FIG2: Figure = Figure {
    name: "fig2",
    title: "Symphony, Figure 2: goodput and GPU usage while the offered load grows",
    shows: "Ten ResNet50 (1.053, 5.072) with an SLO of 100 ms on 24 GPUs. Left: requests answered in time a second. \
            Right: the part of all GPUs' time that is spent executing; the diamond is what the paper's text reports of \
            Symphony, 20 % at 3,000 r/s.",
    remarks: &[
        "The paper names ten ResNet models, not their profile; this one has its peak within the range of its drawing.",
        "As in the paper: eager policies occupy all GPUs with small batches long before the peak, deferred ones use \
         them in proportion to the load.",
        "The paper's Symphony has a flat top, as `deferred:target` has: heads that keep batches small are given up. \
         `deferred`, which is Algorithm 1 with the longest prefix, has none: section 3.2 allows both ways to gather \
         a batch, and section 5.4 says that Symphony keeps a desirable batch size.",
    ],
    draw: draw_fig2,
};

pub(crate) const FLAT_TOP: Figure = Figure {
    name: "flat-top",
    title: "Flat top: requests answered in time up to three times the peak load",
    shows: "Table 2's two models on eight GPUs. The load is relative to `downbeat`'s goodput.",
    remarks: &[
        "`downbeat` gives heads up as soon as they would make batches small, and stays at its peak in overload. \
         `deferred` takes the longest prefix that can still finish: the first task has little time left, so the batch \
         is small, so those behind it have little time left; it collapses. So does `eager`, with the same rule.",
        "`deferred:target`, Symphony as evaluated, is flat, too, from 1.3 times its own goodput on: at what batches \
         of its fixed target size leave of that, 0.87 and 0.79. In Figure 2, where batches are large, hardly anything \
         is lost.",
        "`symphony`, whose target follows the measured rate, is flat as `downbeat` is, within 1 %.",
        "Shepherd and Clockwork are flat, too: they run large batches and drop the rest. More than 100 % in overload \
         is no contradiction, since goodput allows only 1 % to be bad.",
        "The tests hold `downbeat` to it: at twice the peak load within 2 % of the peak.",
    ],
    draw: draw_flat_top,
};

pub(crate) const LOAD_PROPORTIONAL: Figure = Figure {
    name: "load-proportional",
    title: "Load-proportional: GPUs in use below the peak load",
    shows: "Left: the part of GPU time spent executing, which the paper's autoscaler goes by. Right: GPUs that run at \
            least one batch in a second, of all, under `downbeat` where `gpu_price` is infinite: what could be given \
            back for that second. Loads are relative to each policy's own goodput; the dashed black line is the load \
            + 10 %.",
    remarks: &[
        "At low loads eager policies keep GPUs busy with batches of one; deferral keeps batches large, so that load \
         takes little more GPU time than its part. `downbeat` does so for a price: unless somebody pays for GPUs, it \
         uses idle ones for lower latency, and keeps them nearly as busy as `eager` at low loads.",
        "A GPU counts as used in a second even if it runs one batch in it, and with eight GPUs a single burst wakes \
         several: the larger the cluster, the closer that count comes to the load.",
        "The tests hold `downbeat` to it where `gpu_price` is infinite: at p % of the peak load at most p + 10 % of \
         GPU time is spent.",
    ],
    draw: draw_load_proportional,
};

/// By default batches are held back only where that pays in latency or goodput.
const DEFERRING: &str = "downbeat:gpu_price=inf";

fn ten_resnets() -> sim::Workload {
    workload(
        "10 x ResNet50",
        "gpus = 24\n[[model]]\nname = \"ResNet50\"\ncount = 10\nalpha_ms = 1.053\nbeta_ms = 5.072\nslo_ms = 100\n",
    )
}

fn zoo() -> sim::Workload {
    workload("zoo A100", "gpus = 64\n[[model]]\nzoo = \"symphony-zoo-a100.csv\"\n")
}

/// Requests answered in time a second.
fn in_time_rps(report: &sim::Report) -> f64 {
    report.totals.offered_rps * report.totals.on_time_fraction
}

/// What each policy has left at the highest of the loads, of its best at any; both lists go through all loads of one
/// policy after the other.
fn note_flatness(table: &mut Table, loads: &[f64], in_time: &[f64]) {
    let left = POLICIES.iter().zip(in_time.chunks(loads.len())).map(|(name, in_time)| {
        let best = in_time.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        format!("`{name}` {:.1} %", 100.0 * in_time.last().copied().unwrap_or(0.0) / best)
    });
    let (most, left) = (loads.last().copied().unwrap_or(0.0), left.collect::<Vec<_>>().join(", "));
    table.note(
        "finding",
        format!("At {most:.0} r/s each answers in time, of the most that it does at any load: {left}"),
    );
}

fn draw_fig2(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table =
        Table::new(&["policy", "offered (r/s)", "in time (r/s)", "GPU busy (%)", "GPUs used (%)", "mean batch"]);
    let rates: Vec<_> = (1..=20).map(|step| 1500.0 * f64::from(step)).collect();
    let run = |name, rate_rps| Run { workload: ten_resnets(), policy: policy(name), rate_rps };
    let runs: Vec<_> = POLICIES.iter().flat_map(|name| rates.iter().map(|&rate| run(name, rate))).collect();
    let reports = context.runs(&runs, &mut table)?;
    let in_time: Vec<_> = reports.iter().map(in_time_rps).collect();
    note_rivals(&mut table, &IN_TIME, &POLICIES, &transposed(&in_time, rates.len()));
    note_flatness(&mut table, &rates, &in_time);
    let (mut goodput, mut busy) = (Vec::new(), Vec::new());
    for (name, reports) in POLICIES.iter().zip(reports.chunks(rates.len())) {
        let (mut in_time, mut executing) = (Vec::new(), Vec::new());
        for report in reports {
            let good = in_time_rps(report);
            in_time.push((report.rate_rps, good));
            executing.push((report.rate_rps, 100.0 * report.gpu_busy_fraction));
            table.push([
                (*name).into(),
                cell(report.rate_rps),
                cell(good),
                cell(100.0 * report.gpu_busy_fraction),
                cell(100.0 * report.gpus_used_mean / 24.0),
                cell(report.batch_mean),
            ]);
        }
        let series = |points| Series { name: legend_of(name), mark: Mark::Line, look: look_of(name), points };
        goodput.push(series(in_time));
        busy.push(series(executing));
    }
    let name = "paper, Symphony".to_owned();
    busy.push(Series {
        name,
        mark: Mark::Reported { place: 0, places: 1 },
        look: 0,
        points: vec![(3000.0 - 0.196, 20.0)],
    });
    let x = Axis::new("offered load (r/s)", (0.0, 31_000.0));
    let left = Panel {
        title: "goodput".to_owned(),
        x: x.clone(),
        y: axis_of("answered in time (r/s)", &goodput),
        series: goodput,
        boxes: Vec::new(),
    };
    let y = Axis::new("GPU time executing (%)", (0.0, 105.0));
    let right = Panel { title: "utilisation".to_owned(), x, y, series: busy, boxes: Vec::new() };
    Ok((Chart::new(FIG2.title, 2, vec![left, right]), table))
}

fn draw_flat_top(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table = Table::new(&["model", "policy", "load (% of peak)", "in time (% of peak)"]);
    let loads: Vec<_> = (2..=15).map(|step| 0.2 * f64::from(step)).collect();
    let search = |model: &crate::table2::Model| Search { workload: model.workload(), policy: policy("downbeat") };
    let peaks = context.goodputs(&MODELS.iter().map(search).collect::<Vec<_>>(), &mut Table::default())?;
    let peaks: Vec<_> = peaks.iter().map(rate_of).collect();
    let mut runs = Vec::new();
    for (model, peak) in MODELS.iter().zip(&peaks) {
        let run = |name, load: f64| Run { workload: model.workload(), policy: policy(name), rate_rps: load * peak };
        runs.extend(POLICIES.iter().flat_map(|name| loads.iter().map(move |&load| run(name, load))));
    }
    let reports = context.runs(&runs, &mut table)?;
    let in_time: Vec<_> = reports.iter().map(in_time_rps).collect();
    let settings = in_time.chunks(POLICIES.len() * loads.len()).flat_map(|rates| transposed(rates, loads.len()));
    note_rivals(&mut table, &IN_TIME, &POLICIES, &settings.collect::<Vec<_>>());
    let mut panels = Vec::new();
    for ((model, peak), reports) in MODELS.iter().zip(&peaks).zip(reports.chunks(POLICIES.len() * loads.len())) {
        let mut series = Vec::new();
        for (name, reports) in POLICIES.iter().zip(reports.chunks(loads.len())) {
            let mut points = Vec::new();
            for (load, report) in loads.iter().zip(reports) {
                let good = in_time_rps(report) / peak;
                points.push((100.0 * load, 100.0 * good));
                table.push([model.name.into(), (*name).into(), cell(100.0 * load), cell(100.0 * good)]);
            }
            series.push(Series { name: legend_of(name), mark: Mark::Line, look: look_of(name), points });
        }
        panels.push(Panel {
            title: format!("{}, peak {peak:.0} r/s", model.name),
            x: Axis::new("offered load (% of peak)", (0.0, 310.0)),
            y: axis_of("answered in time (% of peak)", &series),
            series,
            boxes: Vec::new(),
        });
    }
    Ok((Chart::new(FLAT_TOP.title, 2, panels), table))
}

fn draw_load_proportional(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table =
        Table::new(&["workload", "policy", "load (% of peak)", "GPU busy (%)", "GPUs used (%)", "late or dropped (%)"]);
    let loads: Vec<_> = (1..=10).map(|step| 0.1 * f64::from(step)).collect();
    let workloads = [MODELS[0].workload(), ten_resnets(), zoo()];
    let names = [&POLICIES[..], &[DEFERRING]].concat();
    let mut searches = Vec::new();
    for workload in &workloads {
        searches.extend(names.iter().map(|name| Search { workload: workload.clone(), policy: policy(name) }));
    }
    let peaks = context.goodputs(&searches, &mut Table::default())?;
    let runs: Vec<_> = searches
        .iter()
        .zip(&peaks)
        .flat_map(|(Search { workload, policy }, peak)| {
            let run = |load: &f64| {
                let rate_rps = (load * rate_of(peak)).max(1.0);
                Run { workload: workload.clone(), policy: *policy, rate_rps }
            };
            loads.iter().map(run).collect::<Vec<_>>()
        })
        .collect();
    let reports = context.runs(&runs, &mut table)?;
    let executing: Vec<_> = reports.iter().map(|report| report.gpu_busy_fraction).collect();
    let settings = executing.chunks(names.len() * loads.len()).flat_map(|part| transposed(part, loads.len()));
    note_rivals(&mut table, &GPU_TIME, &names, &settings.collect::<Vec<_>>());
    let (mut busy, mut used) = (Vec::new(), Vec::new());
    for ((index, search), reports) in searches.iter().enumerate().zip(reports.chunks(loads.len())) {
        let name = search.policy.to_string();
        let (mut executing, mut in_use) = (Vec::new(), Vec::new());
        for (load, report) in loads.iter().zip(reports) {
            let (load, share) = (100.0 * load, 100.0 * report.gpus_used_mean / f64::from(search.workload.gpus));
            executing.push((load, 100.0 * report.gpu_busy_fraction));
            in_use.push((load, share));
            table.push([
                search.workload.name.clone(),
                name.clone(),
                cell(load),
                cell(100.0 * report.gpu_busy_fraction),
                cell(share),
                cell(100.0 * report.totals.bad_rate()),
            ]);
        }
        let is_deferring = names[index % names.len()] == DEFERRING;
        if index < names.len() {
            let (mark, look) = match is_deferring {
                true => (Mark::Dashed, look_of("downbeat")),
                false => (Mark::Line, look_of(&name)),
            };
            busy.push(Series { name: legend_of(&name), mark, look, points: executing });
        }
        if is_deferring {
            let label = format!("used in a second: {}, {} GPUs", search.workload.name, search.workload.gpus);
            used.push(Series { name: label, mark: Mark::Line, look: 3 + index / names.len(), points: in_use });
        }
    }
    let bound = Series {
        name: "load + 10 %".into(),
        mark: Mark::Dashed,
        look: chart::BOUND,
        points: vec![(0.0, 10.0), (95.0, 105.0)],
    };
    let panel = |title: &str, label, mut series: Vec<Series>| {
        series.push(bound.clone());
        let (x, y) = (Axis::new("load (% of the policy's peak)", (0.0, 105.0)), Axis::new(label, (0.0, 105.0)));
        Panel { title: title.to_owned(), x, y, series, boxes: Vec::new() }
    };
    let panels = vec![
        panel("GPU time: ResNet50, SLO 25 ms, 8 GPUs", "GPU time executing (%)", busy),
        panel("GPUs in use: downbeat, gpu_price = inf", "GPUs used in a second (%)", used),
    ];
    Ok((Chart::new(LOAD_PROPORTIONAL.title, 2, panels), table))
}

#[cfg(test)]
mod tests {
    use sim::{Options, Report, cluster};

    use super::*;
    use crate::context::SYMPHONY;

    fn run(model: &crate::table2::Model, name: &str, rate_rps: f64) -> Report {
        let options = Options { policy: policy(name), rate_rps, seconds: 20.0, seed: 11 };
        cluster::run(&model.workload(), &options, &mut |_| (), &mut |_| ()).unwrap()
    }

    fn in_time_rps(model: &crate::table2::Model, name: &str, rate_rps: f64) -> f64 {
        super::in_time_rps(&run(model, name, rate_rps))
    }

    /// Loads near the goodput of `downbeat` on each model of Table 2.
    const PEAKS_RPS: [f64; 2] = [5450.0, 985.0];

    #[test]
    fn the_top_of_downbeat_is_flat() {
        for (model, peak_rps) in MODELS.iter().zip(PEAKS_RPS) {
            let peak = [0.9, 1.0, 1.1, 1.2, 1.5].map(|load| in_time_rps(model, "downbeat", load * peak_rps));
            let peak = peak.into_iter().fold(0.0, f64::max);
            let twice = in_time_rps(model, "downbeat", 2.0 * peak_rps);
            assert!(peak > peak_rps && twice >= 0.98 * peak, "{}: {twice} of {peak}", model.name);
            // The control: with prefix batches overload collapses.
            let collapsed = in_time_rps(model, "deferred", 2.0 * peak_rps);
            assert!(collapsed < 0.6 * peak, "{}: {collapsed} of {peak}", model.name);
        }
    }

    /// Symphony's Figure 2 is of what its evaluation ran.
    #[test]
    fn figure_2_has_a_flat_top_under_symphony_as_evaluated() {
        let in_time_rps = |name, rate_rps| {
            let options = Options { policy: policy(name), rate_rps, seconds: 3.0, seed: 11 };
            super::in_time_rps(&cluster::run(&ten_resnets(), &options, &mut |_| (), &mut |_| ()).unwrap())
        };
        let [peak, most] = [21_000.0, 30_000.0].map(|rate_rps| in_time_rps(SYMPHONY, rate_rps));
        assert!(peak > 20_000.0 && most > 0.95 * peak, "{most} of {peak}");
        // The control: so does Algorithm 1 with prefix batches not.
        let collapsed = in_time_rps("deferred", 30_000.0);
        assert!(collapsed < 0.6 * peak, "{collapsed} of {peak}");
    }

    #[test]
    fn gpu_time_is_in_proportion_to_the_load_where_it_is_all_that_counts() {
        for (model, peak_rps) in MODELS.iter().zip(PEAKS_RPS) {
            for load in [0.1, 0.3, 0.5, 0.7, 0.85] {
                let busy = run(model, DEFERRING, load * peak_rps).gpu_busy_fraction;
                assert!(busy <= load + 0.1, "{}: {busy} at {load}", model.name);
            }
            // The control: eager scheduling keeps all GPUs busy at half the load.
            assert!(run(model, "eager", 0.5 * peak_rps).gpu_busy_fraction > 0.8);
        }
    }
}
