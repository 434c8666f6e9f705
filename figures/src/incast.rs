//! Symphony's Figure 17 (appendix B): how long each object of an incast takes, by READ and by TCP. Measured on this
//! machine, unlike all other figures.

use bench::{Tail, incast};
use chart::{Axis, Chart, Mark, Panel, Series};
use transport::LocalPath;

use crate::{
    context::Context,
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const INCAST: Figure = Figure {
    name: "incast",
    title: "Symphony, Figure 17: one reader pulls 8 objects of 150 KB from each of 8 servers",
    shows: "Above: all 64 objects asked for at once, round after round; below: one after another, paced at 4 Gbit/s, \
            which is far from saturation. The time from when an object was to be asked for to its last byte; every \
            byte is checked. Nines are digits of the quantile: 2 is the 99th percentile, 4 the 99.99th.",
    remarks: &[
        "Measured within the machine that made the figure, with its processors between everything: `ring` and `udp` \
         are soft-RoCE in user space, by rings in shared memory and over loopback; `tcp` is one pipelined connection \
         for each server.",
        "The paper's cluster (56 Gbit/s InfiniBand): an object within 24 us, 33 us at the 99.99th percentile; by TCP \
         3,034 us at the median and 12 times that at the 99.99th percentile.",
        "How long a process waits for a processor decides the tail here, not the network.",
    ],
    draw,
};

/// What they are called, what carries objects, and how packets go there.
const CARRIERS: [(&str, &str, LocalPath); 3] =
    [("ring", "soft", LocalPath::Ring), ("udp", "soft", LocalPath::Udp), ("tcp", "tcp", LocalPath::Ring)];
/// Rounds that take about a minute on two cores, by two of them and at both paces.
const ROUNDS_PER_MINUTE: f64 = 1_000.0;
/// Beyond, a quantile is a single object.
const NINES_MAX: f64 = 4.0;

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let rounds = (context.budget_minutes * ROUNDS_PER_MINUTE).ceil().max(20.0) as u64;
    let header = [
        "by",
        "pace (Gbit/s)",
        "p50 (us)",
        "p99 (us)",
        "p99.9 (us)",
        "p99.99 (us)",
        "max (us)",
        "round p50 (us)",
        "round p99 (us)",
        "goodput (Gbit/s)",
    ];
    let mut table = Table::new(&header);
    table.note("rounds", rounds.to_string());
    let mut panels = Vec::new();
    context.bar.set_length(2 * CARRIERS.len() as u64);
    for pace_gbps in [None, Some(4.0)] {
        let mut series = Vec::new();
        for (look, (name, arm, path)) in CARRIERS.into_iter().enumerate() {
            let arm = arm.parse().expect("a constant");
            let args = incast::Args { arm, path, rounds, pace_gbps, ..incast::Args::default() };
            let measured = incast::measure(&args)?;
            context.bar.inc(1);
            let Tail { p50, p99, p999, p9999, max } = measured.object_us;
            let pace = pace_gbps.map_or("none".to_owned(), |gbps| gbps.to_string());
            let round = measured.round_us;
            let numbers = [p50, p99, p999, p9999, max, round.p50, round.p99, measured.goodput_gbps].map(cell);
            let [p50, p99, p999, p9999, max, round_p50, round_p99, goodput] = numbers;
            table.push([name.to_owned(), pace, p50, p99, p999, p9999, max, round_p50, round_p99, goodput]);
            let at = |nines: f64| measured.objects_ns.value_at_quantile(1.0 - 10f64.powf(-nines)) as f64 / 1e3;
            let points = (0..=80).map(|step| f64::from(step) / 80.0 * NINES_MAX).map(|nines| (nines, at(nines)));
            series.push(Series { name: name.to_owned(), mark: Mark::Curve, look, points: points.collect() });
        }
        let longest = series.iter().flat_map(|series| series.points.iter().map(|point| point.1));
        panels.push(Panel {
            title: pace_gbps.map_or("all at once".to_owned(), |gbps| format!("paced at {gbps} Gbit/s")),
            x: Axis::new("nines of the quantile", (0.0, NINES_MAX)),
            y: Axis::up_to("time of an object (us)", longest),
            series,
            boxes: Vec::new(),
        });
    }
    Ok((Chart::new(INCAST.title, 1, panels), table))
}
