//! Symphony's Figure 6: what deferral gains over starting at once, and over waiting for a fixed time.

use chart::{Axis, Chart, Mark, Panel, Series};

use crate::{
    context::{
        AUTHORS, BESIDE, Context, GOODPUT, SYMPHONY, Search, axis_of, beside, legend_of, look_of, note_rivals, policy,
        rate_of, workload,
    },
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const FIG6: Figure = Figure {
    name: "fig6",
    title: "Symphony, Figure 6: against eager scheduling and against timeouts",
    shows: "Goodput relative to `deferred:target`, Symphony as evaluated. Left: ten models with alpha = 1 ms and the \
            beta of the axis, an SLO of 2 l(8), on 32 GPUs. Right: a timeout of the axis' part of each model's SLO; \
            one ResNet50 with an SLO of 50 ms on 8 GPUs, and the 37 models of the A100 zoo on 64 GPUs.",
    remarks: &[
        "As in the paper: without a batching effect (beta/alpha = 1) eager is as good, and falls behind as it grows; a \
         well chosen timeout comes close to deferral. Unlike in the paper that holds for the mix, too, where short \
         timeouts do as well as eager scheduling.",
        "`downbeat` gains most where batches are of middling size, and next to nothing at strong batching.",
        "From half the SLO on some model of the zoo has no time left to run even alone, so goodput is zero.",
        "The paper does not give its ResNet50's profile for the right panel; Table 2's is used.",
    ],
    draw,
};

const COMPARED: [&str; 5] = [SYMPHONY, "deferred", "eager", "downbeat", AUTHORS];
/// In the right panel; a timeout of zero is `eager`.
const BESIDE_TIMEOUTS: [&str; 4] = [SYMPHONY, "downbeat", "deferred", AUTHORS];
const TIMEOUTS: [f64; 10] = [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0];

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table =
        Table::new(&["workload", "policy", "goodput (r/s)", "of deferred:target (%)", BESIDE[0], BESIDE[1], BESIDE[2]]);
    let betas: Vec<_> = (1..=15).step_by(2).collect();
    let synthetic = |beta: &i32| {
        let slo = 2 * (8 + beta);
        workload(
            &format!("beta {beta} ms"),
            &format!(
                "gpus = 32\n[[model]]\nname = \"m\"\ncount = 10\nalpha_ms = 1\nbeta_ms = {beta}\nslo_ms = {slo}\n"
            ),
        )
    };
    let left = betas.iter().flat_map(|beta| COMPARED.map(|name| (synthetic(beta), name.to_owned())));
    let single = "gpus = 8\n[[model]]\nname = \"ResNet50\"\nalpha_ms = 1.053\nbeta_ms = 5.072\nslo_ms = 50\n";
    let mixes = [
        workload("ResNet50, 8 GPUs", single),
        workload("zoo A100, 64 GPUs", "gpus = 64\n[[model]]\nzoo = \"symphony-zoo-a100.csv\"\n"),
    ];
    let timeouts = TIMEOUTS.map(|percent| format!("timeout:{percent}%"));
    let names: Vec<_> = BESIDE_TIMEOUTS.map(str::to_owned).into_iter().chain(timeouts).collect();
    let right = mixes.iter().flat_map(|mix| names.iter().map(|name| (mix.clone(), name.clone())));
    let searches: Vec<_> =
        left.chain(right).map(|(workload, name)| Search { workload, policy: policy(&name) }).collect();
    let found = context.goodputs(&searches, &mut table)?;
    let rates: Vec<_> = found.iter().map(rate_of).collect();
    for ((search, report), (rate, reference)) in searches.iter().zip(&found).zip(relative(&searches, &rates)) {
        let [p50, p9999, worst] = beside(report);
        let (name, policy) = (search.workload.name.replace(',', ";"), search.policy.to_string());
        table.push([name, policy, cell(rate), cell(100.0 * rate / reference), p50, p9999, worst]);
    }
    let split = betas.len() * COMPARED.len();
    note_rivals(&mut table, &GOODPUT, &COMPARED, &rates[..split]);
    let with_eager = [&BESIDE_TIMEOUTS[..], &["eager"]].concat();
    let at_zero = rates[split..].chunks(names.len()).flat_map(|rates| &rates[..with_eager.len()]).copied();
    note_rivals(&mut table, &GOODPUT, &with_eager, &at_zero.collect::<Vec<_>>());
    Ok((Chart::new(FIG6.title, 2, vec![by_beta(&betas, &rates[..split]), by_timeout(&mixes, &rates[split..])]), table))
}

/// Each search's rate and that of [`SYMPHONY`] on the same workload, which comes first.
fn relative<'a>(searches: &'a [Search], rates: &'a [f64]) -> impl Iterator<Item = (f64, f64)> + 'a {
    let mut reference = 0.0;
    searches.iter().zip(rates).map(move |(search, rate)| {
        if search.policy == policy(SYMPHONY) {
            reference = *rate;
        }
        (*rate, reference)
    })
}

fn by_beta(betas: &[i32], rates: &[f64]) -> Panel {
    let mut series = Vec::new();
    for (index, name) in COMPARED.into_iter().enumerate().skip(1) {
        let points = betas
            .iter()
            .zip(rates.chunks(COMPARED.len()))
            .map(|(beta, rates)| (f64::from(*beta), 100.0 * rates[index] / rates[0]));
        series.push(Series { name: legend_of(name), mark: Mark::Line, look: look_of(name), points: points.collect() });
    }
    series.push(parity(16.0));
    let y = axis_of("goodput (% of deferred:target)", &series);
    Panel {
        title: "(a) batching effect".into(),
        x: Axis::new("beta / alpha", (0.0, 16.0)),
        y,
        series,
        boxes: Vec::new(),
    }
}

fn by_timeout(mixes: &[sim::Workload], rates: &[f64]) -> Panel {
    let mut series = Vec::new();
    for ((mix, rates), (look, levels)) in
        mixes.iter().zip(rates.chunks(TIMEOUTS.len() + BESIDE_TIMEOUTS.len())).zip([(4, [0, 2, 8]), (5, [6, 3, 1])])
    {
        let points = TIMEOUTS
            .iter()
            .zip(&rates[BESIDE_TIMEOUTS.len()..])
            .map(|(timeout, rate)| (*timeout, 100.0 * rate / rates[0]))
            .collect();
        series.push(Series { name: format!("timeout: {}", mix.name), mark: Mark::Line, look, points });
        for ((name, rate), look) in BESIDE_TIMEOUTS.iter().zip(rates).skip(1).zip(levels) {
            let (name, level) = (format!("{name}: {}", mix.name), 100.0 * rate / rates[0]);
            series.push(Series { name, mark: Mark::Dashed, look, points: vec![(0.0, level), (95.0, level)] });
        }
    }
    series.push(parity(95.0));
    let y = axis_of("goodput (% of deferred:target)", &series);
    let x = Axis::new("timeout (% of the SLO)", (0.0, 95.0));
    Panel { title: "(b) timeouts".into(), x, y, series, boxes: Vec::new() }
}

fn parity(until: f64) -> Series {
    let points = vec![(0.0, 100.0), (until, 100.0)];
    Series { name: legend_of(SYMPHONY), mark: Mark::Dashed, look: look_of(SYMPHONY), points }
}
