//! Symphony's Figure 1: how large batches are.

use chart::{Axis, Chart, Mark, Panel, Series};

use crate::{
    context::{Context, GOODPUT, POLICIES, Search, legend_of, look_of, note_rivals, policy, rate_of},
    figure::{Figure, FigureError},
    table::{Table, cell},
    table2::{GPUS, MODELS},
};

pub(crate) const FIG1: Figure = Figure {
    name: "fig1",
    title: "Symphony, Figure 1: distribution of batch sizes",
    shows: "One model on eight GPUs, each policy at its own goodput: the part of batches that are at most so large. \
            The dashed line is the batch of a staggered execution (equations 1 and 2 of the paper).",
    remarks: &["The paper's medians are 1 and 1 for Clockwork, 6 and 2 for Nexus, 9 and 4 for Shepherd, 14 and 8 for \
         Symphony."],
    draw,
};

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table = Table::new(&["model", "policy", "rate (r/s)", "p10", "p25", "median", "p75", "p90", "mean"]);
    let search = |model: &crate::table2::Model, name| Search { workload: model.workload(), policy: policy(name) };
    let searches: Vec<_> = MODELS.iter().flat_map(|model| POLICIES.map(|name| search(model, name))).collect();
    let found = context.goodputs(&searches, &mut table)?;
    note_rivals(&mut table, &GOODPUT, &POLICIES, &found.iter().map(rate_of).collect::<Vec<_>>());
    let mut panels = Vec::new();
    for (model, reports) in MODELS.iter().zip(found.chunks(POLICIES.len())) {
        let mut series = Vec::new();
        for (name, report) in POLICIES.iter().zip(reports) {
            let Some(report) = report else { continue };
            let quantile = |part| cell(quantile(&report.batches, part));
            table.push([
                model.name.into(),
                (*name).into(),
                cell(report.rate_rps),
                quantile(0.1),
                quantile(0.25),
                quantile(0.5),
                quantile(0.75),
                quantile(0.9),
                cell(report.batch_mean),
            ]);
            let points = cumulative(&report.batches);
            series.push(Series { name: legend_of(name), mark: Mark::Line, look: look_of(name), points });
        }
        let (staggered, _) = model.bound(1.0 / GPUS);
        let points = vec![(staggered, 0.0), (staggered, 1.0)];
        let name = "staggered execution".to_owned();
        series.push(Series { name, mark: Mark::Dashed, look: chart::BOUND, points });
        let largest = series.iter().flat_map(|series| &series.points).map(|point| point.0);
        panels.push(Panel {
            title: format!("{}, SLO {} ms", model.name, model.slo_ms),
            x: Axis::up_to("batch size", largest),
            y: Axis::new("part of batches", (0.0, 1.0)),
            series,
            boxes: Vec::new(),
        });
    }
    Ok((Chart::new(FIG1.title, 2, panels), table))
}

/// The part of batches of at most each size, up to the largest.
fn cumulative(counts: &[u64]) -> Vec<(f64, f64)> {
    let total: u64 = counts.iter().sum();
    let largest = counts.iter().rposition(|&count| count > 0).map_or(0, |index| index + 1);
    let mut seen = 0;
    let part = |(size, count): (u32, &u64)| {
        seen += count;
        (f64::from(size), seen as f64 / total as f64)
    };
    (1..).zip(&counts[..largest]).map(part).collect()
}

/// The smallest size that this part of batches does not exceed.
fn quantile(counts: &[u64], part: f64) -> f64 {
    cumulative(counts).iter().find(|(_, cumulative)| *cumulative >= part).map_or(0.0, |(size, _)| *size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_counted_up() {
        let counts = [1, 0, 3, 0];
        assert_eq!(cumulative(&counts), [(1.0, 0.25), (2.0, 0.25), (3.0, 1.0)]);
        assert_eq!((quantile(&counts, 0.25), quantile(&counts, 0.5)), (1.0, 3.0));
    }
}
