//! Symphony's Figure 14: what network latency costs.

use chart::{Axis, Chart, Mark, Panel, Series};
use sim::Workload;

use crate::{
    Figure, FigureError,
    context::{Context, SYMPHONY, Search, axis_of, policy, rate_of},
    table::{Table, cell},
};

pub(crate) const FIG14: Figure = Figure {
    name: "fig14",
    title: "Symphony, Figure 14: goodput and network latency",
    shows: "Twenty ResNet50 (1.053, 5.072) on 32 GPUs under `deferred:target`, for four SLOs. The scheduler plans with \
            the latency of the axis between its decision and the start of a batch. Dashed: the 99.99th percentiles \
            that the paper measured, 33 us over RDMA, and 12 times a median of 3,034 us over TCP.",
    remarks: &[
        "As in the paper: within RDMA's range nothing is lost, within TCP's up to everything, the more the tighter the \
         SLO.",
        "Simulated: the latency is a constant that the scheduler knows; the paper's is a network's high percentile.",
    ],
    draw,
};

const SLOS_MS: [f64; 4] = [20.0, 25.0, 50.0, 100.0];
const RDMA_MS: [f64; 6] = [0.0, 0.01, 0.02, 0.03, 0.04, 0.05];
const TCP_MS: [f64; 10] = [0.0, 1.0, 2.0, 3.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0];

/// `None` if no request can meet its objective.
fn cluster(slo_ms: f64, latency_ms: f64) -> Option<Workload> {
    let text = format!(
        "gpus = 32\nnetwork = {{ ctrl_us = {} }}\n[[model]]\nname = \"ResNet50\"\ncount = 20\nalpha_ms = 1.053\n\
         beta_ms = 5.072\nslo_ms = {slo_ms}\n",
        1000.0 * latency_ms
    );
    Workload::parse(&text, "fig14", "fig14", std::path::Path::new(".")).ok()
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table = Table::new(&["range", "SLO (ms)", "latency (ms)", "goodput (r/s)"]);
    let ranges: [(&str, &[f64]); 2] = [("RDMA", &RDMA_MS), ("TCP", &TCP_MS)];
    let mut points = Vec::new();
    for (range, latencies) in ranges {
        points.extend(SLOS_MS.iter().flat_map(|&slo| latencies.iter().map(move |&latency| (range, slo, latency))));
    }
    let mut searches = Vec::new();
    for &(_, slo_ms, latency_ms) in &points {
        searches.extend(cluster(slo_ms, latency_ms).map(|workload| Search { workload, policy: policy(SYMPHONY) }));
    }
    let mut rates = context.goodputs(&searches, &mut table)?.into_iter();
    let mut panels = Vec::new();
    for (range, latencies) in ranges {
        let (unit, scale) = if range == "RDMA" { ("us", 1000.0) } else { ("ms", 1.0) };
        let mut series = Vec::new();
        for (look, slo_ms) in SLOS_MS.iter().enumerate() {
            let mut line = Vec::new();
            for latency_ms in latencies {
                let searched = cluster(*slo_ms, *latency_ms).and_then(|_| rates.next());
                let rate = searched.as_ref().map_or(0.0, rate_of);
                line.push((scale * latency_ms, rate));
                table.push([range.into(), cell(*slo_ms), latency_ms.to_string(), cell(rate)]);
            }
            series.push(Series { name: format!("SLO {slo_ms} ms"), mark: Mark::Line, look, points: line });
        }
        let y = axis_of("goodput (r/s)", &series);
        let tail = if range == "RDMA" { 33.0 } else { 12.0 * 3.034 };
        let points = vec![(tail, 0.0), (tail, y.range.1)];
        series.push(Series { name: "paper's p99.99".into(), mark: Mark::Dashed, look: chart::BOUND, points });
        let end = scale * latencies.last().copied().unwrap_or(1.0) * 1.02;
        let x = Axis::new(&format!("network latency ({unit})"), (0.0, end));
        panels.push(Panel { title: format!("within {range}'s range"), x, y, series, boxes: Vec::new() });
    }
    Ok((Chart::new(FIG14.title, 2, panels), table))
}
