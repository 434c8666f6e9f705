//! Symphony's Figure 13: how the scheduler scales with threads, and goodput with GPUs.

use std::{num::NonZero, thread};

use bench::scheduler;
use chart::{Axis, Chart, Mark, Panel, Series};

use crate::{
    context::{
        Context, GOODPUT, POLICIES, Search, axis_of, legend_of, look_of, note_rivals, policy, rate_of, transposed,
        workload,
    },
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const FIG13: Figure = Figure {
    name: "fig13",
    title: "Symphony, Figure 13: scalability",
    shows: "Left: requests a second that the scheduler's real threads plan, as `downbeat bench scheduler` measures it \
            (no network, emulated GPUs, DenseNet121 with an SLO of 100 ms, 100 models). Right: goodput of twenty \
            ResNet50 (1.053, 5.072) with an SLO of 100 ms over the number of GPUs, simulated.",
    remarks: &[
        "The left panel depends on the machine. Each ModelThread has a core of its own, and \
         the RankThread another: where they must share, each turn finds more to do at once, which raises this rate, \
         and requests wait for it.",
        "The paper reports 12 million requests a second on 32 cores, and goodput that grows linearly with GPUs. \
         Clockwork's own limit, locks in its implementation, is not reproduced.",
    ],
    draw,
};

const GPUS: [u32; 6] = [8, 16, 32, 64, 128, 256];
const SECONDS: f64 = 3.0;

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table = Table::new(&["panel", "series", "ModelThreads or GPUs", "rate (r/s)"]);
    let (cores, throughput) = scalability(context, &mut table);
    let copies = |gpus: u32| {
        let text = format!(
            "gpus = {gpus}\n[[model]]\nname = \"ResNet50\"\ncount = 20\nalpha_ms = 1.053\nbeta_ms = 5.072\nslo_ms = \
             100\n"
        );
        workload("20 x ResNet50", &text)
    };
    let searches: Vec<_> = POLICIES
        .iter()
        .flat_map(|name| GPUS.map(|gpus| Search { workload: copies(gpus), policy: policy(name) }))
        .collect();
    let rates: Vec<_> = context.goodputs(&searches, &mut table)?.iter().map(rate_of).collect();
    note_rivals(&mut table, &GOODPUT, &POLICIES, &transposed(&rates, GPUS.len()));
    let mut goodput = Vec::new();
    for (name, rates) in POLICIES.iter().zip(rates.chunks(GPUS.len())) {
        for (gpus, rate) in GPUS.iter().zip(rates) {
            table.push(["right".into(), (*name).into(), gpus.to_string(), cell(*rate)]);
        }
        let points = GPUS.iter().map(|&gpus| f64::from(gpus)).zip(rates.iter().copied()).collect();
        goodput.push(Series { name: legend_of(name), mark: Mark::Line, look: look_of(name), points });
    }
    let left = Panel {
        title: format!("scheduler threads ({cores} cores)"),
        x: Axis::new("ModelThreads", (0.0, throughput[0].points.len() as f64 + 1.0)),
        y: axis_of("planned (million r/s)", &throughput),
        series: throughput,
        boxes: Vec::new(),
    };
    let right = Panel {
        title: "goodput".to_owned(),
        x: Axis::new("GPUs", (0.0, 265.0)),
        y: axis_of("goodput (r/s)", &goodput),
        series: goodput,
        boxes: Vec::new(),
    };
    Ok((Chart::new(FIG13.title, 2, vec![left, right]), table))
}

/// The cores of this machine, and the measured rates by GPUs in the pool.
fn scalability(context: &Context, table: &mut Table) -> (usize, Vec<Series>) {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let mut throughput = Vec::new();
    for (gpus, look) in [(1000, 4), (4000, 5)] {
        let mut points = Vec::new();
        for threads in 1..cores.max(2) as u32 {
            let setup = scheduler::Setup {
                model_threads: threads,
                models: 100.max(threads),
                gpus,
                rate_rps: None,
                seconds: SECONDS,
                polling: scheduler::Polling::Spin,
            };
            context.bar.set_message(format!("{threads} ModelThreads"));
            let rate_rps = scheduler::measure(setup, &mut |_| ()).planned_rps;
            points.push((f64::from(threads), rate_rps / 1e6));
            table.push(["left".into(), format!("{gpus} GPUs"), threads.to_string(), cell(rate_rps)]);
        }
        throughput.push(Series { name: format!("{gpus} GPUs in the pool"), mark: Mark::Line, look, points });
    }
    table.note("finding", format!("The left panel was measured on {cores} cores."));
    (cores, throughput)
}
