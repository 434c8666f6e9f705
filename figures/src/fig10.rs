//! Symphony's Figure 10: the fewest GPUs that serve 15,000 requests a second.

use bench::goodput::BAD_RATE_MAX;
use chart::{Axis, Chart, Mark, Panel, Series};
use scheduler::Policy;
use sim::{Options, Workload, checker::Violation, cluster};

use crate::{
    context::{
        Context, GPUS_NEEDED, POLICIES, SYMPHONY, axis_of, legend_of, look_of, note_precision, note_rivals, policy,
        workload,
    },
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const FIG10: Figure = Figure {
    name: "fig10",
    title: "Symphony, Figure 10: GPUs needed for 15,000 requests a second (A100)",
    shows: "The fewest GPUs at which every model stays within 1 %: one ResNet50 with an SLO of 25 ms, and the 37 \
            models of the zoo.",
    remarks: &[
        "The paper's text: on one model Symphony saves 2 to 6 GPUs against Shepherd and Nexus, and Clockwork needs \
         more than twice as many; on the mix Nexus and Shepherd need 166 % and 90 % more, and Clockwork's \
         implementation cannot deliver the rate at all.",
    ],
    draw,
};

const RATE_RPS: f64 = 15_000.0;
/// More than this is not looked for.
const GPUS_MAX: u32 = 512;

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table = Table::new(&["workload", "policy", "GPUs", "more than deferred:target (%)"]);
    let single = "gpus = 1\n[[model]]\nname = \"ResNet50\"\nalpha_ms = 0.268\nbeta_ms = 5.172\nslo_ms = 25\n";
    let workloads = [
        workload("ResNet50", single),
        workload("37 mixed models", "gpus = 1\n[[model]]\nzoo = \"symphony-zoo-a100.csv\"\n"),
    ];
    let jobs: Vec<_> = workloads.iter().flat_map(|load| POLICIES.map(|name| (load, policy(name)))).collect();
    // A binary search tries as many counts as there are binary digits in the largest.
    let seconds = context.seconds(jobs.len() as f64 * f64::from(GPUS_MAX.ilog2()) * RATE_RPS);
    context.bar.inc_length(jobs.len() as u64);
    let found = context.parallel(&jobs, |(workload, policy)| fewest(workload, *policy, seconds, context.seed))?;
    note_precision(&mut table, seconds, RATE_RPS / 37.0);
    let needed: Vec<_> = found.iter().map(|gpus| gpus.map_or(f64::INFINITY, f64::from)).collect();
    note_rivals(&mut table, &GPUS_NEEDED, &POLICIES, &needed);
    let mut series: Vec<Series> = Vec::new();
    for (place, name) in POLICIES.iter().enumerate() {
        let points = (0..workloads.len())
            .filter_map(|group| Some((group as f64, f64::from(found[group * POLICIES.len() + place]?))));
        let mark = Mark::Bar { place, places: POLICIES.len() };
        series.push(Series { name: legend_of(name), mark, look: look_of(name), points: points.collect() });
    }
    for (workload, found) in workloads.iter().zip(found.chunks(POLICIES.len())) {
        let reference = POLICIES.iter().zip(found).find(|(name, _)| **name == SYMPHONY).and_then(|(_, gpus)| *gpus);
        for (name, gpus) in POLICIES.iter().zip(found) {
            let more =
                gpus.zip(reference).map(|(gpus, others)| cell(100.0 * (f64::from(gpus) / f64::from(others) - 1.0)));
            let gpus = gpus.map_or_else(|| format!("more than {GPUS_MAX}"), |gpus| gpus.to_string());
            table.push([workload.name.clone(), (*name).into(), gpus, more.unwrap_or_default()]);
        }
    }
    let x = Axis::named("", workloads.iter().map(|workload| workload.name.clone()));
    let panel = Panel { title: String::new(), x, y: axis_of("GPUs", &series), series, boxes: Vec::new() };
    Ok((Chart { panel: (760, 330), ..Chart::new(FIG10.title, 1, vec![panel]) }, table))
}

/// `None` if `GPUS_MAX` are too few.
fn fewest(workload: &Workload, policy: Policy, seconds: f64, seed: u64) -> Result<Option<u32>, Violation> {
    let is_enough = |gpus| {
        let workload = workload.on(gpus);
        if workload.capacity_rps() < RATE_RPS {
            return Ok(false);
        }
        let options = Options { policy, rate_rps: RATE_RPS, seconds, seed };
        let report = cluster::run(&workload, &options, &mut |_| (), &mut |_| ())?;
        Ok(report.models.iter().all(|model| model.worst_bad_rate() <= BAD_RATE_MAX))
    };
    let (mut few, mut enough) = (0, GPUS_MAX);
    if !is_enough(enough)? {
        return Ok(None);
    }
    while enough - few > 1 {
        let middle = u32::midpoint(few, enough);
        if is_enough(middle)? { enough = middle } else { few = middle }
    }
    Ok(Some(enough))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_the_gpus_that_uniform_arrivals_keep_busy() {
        // A GPU serves 100 requests a second, alone.
        let text = "gpus = 1\narrivals = { process = \"uniform\" }\n\
                    [[model]]\nname = \"m\"\nlatency_ms = [10]\nslo_ms = 15\n";
        let found = fewest(&workload("w", text), Policy::Eager, 0.3, 1).unwrap();
        assert_eq!((found, RATE_RPS / 100.0), (Some(150), 150.0));
    }
}
