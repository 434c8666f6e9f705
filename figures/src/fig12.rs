//! Symphony's Figure 12: how long requests wait for their batch to start.

use chart::{Axis, Chart, Mark, Panel, Series};

use crate::{
    context::{Context, GOODPUT, POLICIES, Search, legend_of, look_of, note_rivals, policy, rate_of},
    figure::{Figure, FigureError},
    table::{Table, cell},
    table2::MODELS,
};

pub(crate) const FIG12: Figure = Figure {
    name: "fig12",
    title: "Symphony, Figure 12: queueing delay",
    shows: "One model on eight GPUs, each policy at its own goodput: from the arrival of a request to the start of its \
            batch. The dashed line is half the SLO, which the paper names as Nexus's longest delay.",
    remarks: &[
        "Under deferral most of the delay is deliberate: a batch starts as late as its deadline allows. It is short \
         where batches are large, because execution takes the larger part of the SLO.",
        "Only requests that are answered count; those that are given up have waited in vain.",
    ],
    draw,
};

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let header = ["model", "policy", "rate (r/s)", "p10 (ms)", "median (ms)", "p90 (ms)", "p99 (ms)", "max (ms)"];
    let mut table = Table::new(&header);
    let search = |model: &crate::table2::Model, name| Search { workload: model.workload(), policy: policy(name) };
    let searches: Vec<_> = MODELS.iter().flat_map(|model| POLICIES.map(|name| search(model, name))).collect();
    let found = context.goodputs(&searches, &mut table)?;
    note_rivals(&mut table, &GOODPUT, &POLICIES, &found.iter().map(rate_of).collect::<Vec<_>>());
    let mut panels = Vec::new();
    for (model, reports) in MODELS.iter().zip(found.chunks(POLICIES.len())) {
        let mut series = Vec::new();
        for (name, report) in POLICIES.iter().zip(reports) {
            let Some(report) = report else { continue };
            let at = |quantile| report.queueing_us.value_at_quantile(quantile) as f64 / 1e3;
            let cells = [0.1, 0.5, 0.9, 0.99, 1.0].map(|quantile| cell(at(quantile)));
            let [p10, p50, p90, p99, max] = cells;
            table.push([model.name.into(), (*name).into(), cell(report.rate_rps), p10, p50, p90, p99, max]);
            let points = (0..=50).map(|step| f64::from(step) / 50.0).map(|part| (at(part), part)).collect();
            series.push(Series { name: legend_of(name), mark: Mark::Curve, look: look_of(name), points });
        }
        let points = vec![(model.slo_ms / 2.0, 0.0), (model.slo_ms / 2.0, 1.0)];
        series.push(Series { name: "half the SLO".to_owned(), mark: Mark::Dashed, look: chart::BOUND, points });
        panels.push(Panel {
            title: format!("{}, SLO {} ms", model.name, model.slo_ms),
            x: Axis::new("queueing delay (ms)", (0.0, model.slo_ms)),
            y: Axis::new("part of requests", (0.0, 1.0)),
            series,
            boxes: Vec::new(),
        });
    }
    Ok((Chart::new(FIG12.title, 2, panels), table))
}
