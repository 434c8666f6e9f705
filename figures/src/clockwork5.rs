//! Clockwork's Figure 5 (its section 6.1): goodput against the objective, for copies of one model on one GPU.

use chart::{Axis, Chart, Mark, Panel, Series};

use crate::{
    context::{
        BESIDE, Context, GOODPUT, POLICIES, Search, axis_of, beside, legend_of, look_of, note_rivals, policy, rate_of,
        workload,
    },
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const CLOCKWORK5: Figure = Figure {
    name: "clockwork5",
    title: "Clockwork, Figure 5: 15 copies of ResNet50 on one V100",
    shows: "Goodput over the objective. Dashed: the 800 r/s that the paper's text gives for Clockwork and INFaaS at \
            500 ms, and the most that batches of 16 allow. Below 100 ms only Clockwork still served in the paper.",
    remarks: &[
        "The profile is the row of the paper's appendix whose batch of 16 takes the 20 ms that its text names \
         (resnet50_v1s), linear between the batch sizes given there; as in the paper no batch is larger.",
        "The paper's load is 16 clients for each model that ask again when they are answered. Here requests arrive \
         independently of the answers (Poisson), and the rate is searched at which every copy keeps its objective for \
         99 % of its requests: what the cluster can promise, not what it does when it is asked for too much.",
        "`deferred` and `deferred:target` are unfit for fifteen models on one GPU: when two models become due \
         together, one batch waits for the other's whole execution, which is longer than the window of a small batch, \
         so one in a hundred is soon lost at any load. The search, which takes it that a lower rate is no harder, then \
         ends near zero. Deferral wants about as many GPUs as models (Symphony's Table 1 begins there). `downbeat` \
         holds nothing back where few GPUs serve many models, and serves as much as `eager` or a little more.",
        "All weights are in GPU memory from the start, as in that experiment; nothing is loaded or unloaded.",
    ],
    draw,
};

/// Milliseconds of a batch of so many (Clockwork, appendix A, resnet50_v1s).
pub(crate) const LATENCIES_MS: [(f64, f64); 5] = [(1.0, 3.04), (2.0, 4.47), (4.0, 6.99), (8.0, 11.66), (16.0, 20.39)];
pub(crate) const SLOS_MS: [f64; 9] = [10.0, 15.0, 25.0, 35.0, 50.0, 100.0, 150.0, 250.0, 500.0];
pub(crate) const COPIES: usize = 15;
/// In the paper's text.
const REPORTED_RPS: f64 = 800.0;

/// l(b) for b = 1, 2, ... 16.
pub(crate) fn latencies_ms() -> Vec<f64> {
    let at = |batch: f64| {
        let pair = LATENCIES_MS.windows(2).find(|pair| batch <= pair[1].0).expect("at most the largest batch");
        let ((low, from), (high, to)) = (pair[0], pair[1]);
        from + (to - from) * (batch - low) / (high - low)
    };
    (1..=16).map(|batch| at(f64::from(batch))).collect()
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table = Table::new(&["SLO (ms)", "policy", "goodput (r/s)", "mean batch", BESIDE[0], BESIDE[1], BESIDE[2]]);
    let copies = |slo_ms: f64| {
        let latencies = latencies_ms();
        let text = format!(
            "gpus = 1\n[[model]]\nname = \"ResNet50\"\ncount = {COPIES}\nlatency_ms = {latencies:?}\nslo_ms = \
             {slo_ms}\n"
        );
        workload("15 x ResNet50", &text)
    };
    let search = |slo_ms, name| Search { workload: copies(slo_ms), policy: policy(name) };
    let searches: Vec<_> = SLOS_MS.iter().flat_map(|&slo_ms| POLICIES.map(|name| search(slo_ms, name))).collect();
    let found = context.goodputs(&searches, &mut table)?;
    note_rivals(&mut table, &GOODPUT, &POLICIES, &found.iter().map(rate_of).collect::<Vec<_>>());
    let line =
        |name: &&str| Series { name: legend_of(name), mark: Mark::Line, look: look_of(name), points: Vec::new() };
    let mut series: Vec<_> = POLICIES.iter().map(line).collect();
    for (slo_ms, reports) in SLOS_MS.iter().zip(found.chunks(POLICIES.len())) {
        for ((name, report), series) in POLICIES.iter().zip(reports).zip(&mut series) {
            series.points.push((*slo_ms, rate_of(report)));
            let batch = report.as_ref().map_or(0.0, |report| report.batch_mean);
            let [p50, p9999, worst] = beside(report);
            table.push([cell(*slo_ms), (*name).into(), cell(rate_of(report)), cell(batch), p50, p9999, worst]);
        }
    }
    let (_, largest_ms) = LATENCIES_MS[LATENCIES_MS.len() - 1];
    for (name, rate, look) in
        [("paper, at 500 ms", REPORTED_RPS, chart::GREY), ("batches of 16", 16_000.0 / largest_ms, chart::BOUND)]
    {
        series.push(Series { name: name.into(), mark: Mark::Dashed, look, points: vec![(0.0, rate), (510.0, rate)] });
    }
    let x = Axis::new("objective (ms)", (0.0, 510.0));
    let panel = Panel { title: String::new(), x, y: axis_of("goodput (r/s)", &series), series, boxes: Vec::new() };
    Ok((Chart { panel: (760, 360), ..Chart::new(CLOCKWORK5.title, 1, vec![panel]) }, table))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_pass_through_the_published_ones() {
        let latencies = latencies_ms();
        assert_eq!(latencies.len(), 16);
        for (batch, latency_ms) in LATENCIES_MS {
            assert!((latencies[batch as usize - 1] - latency_ms).abs() < 1e-9);
        }
        assert!((latencies[2] - (4.47 + 6.99) / 2.0).abs() < 1e-9 && latencies.is_sorted());
    }
}
