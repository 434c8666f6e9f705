//! Symphony's Figure 11: SLO, popularity and arrival process.

use chart::{Axis, Chart, Mark, Panel, Series};

use crate::{
    context::{
        BESIDE, Context, GOODPUT, POLICIES, Search, axis_of, beside, legend_of, look_of, note_rivals, policy, rate_of,
        workload,
    },
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const FIG11: Figure = Figure {
    name: "fig11",
    title: "Symphony, Figure 11: SLO, popularity and arrivals",
    shows: "Goodput of twenty ResNet50 (1.053, 5.072) on 32 GPUs. Models are asked for equally often, or as Zipf(0.9); \
            requests arrive as a Poisson process, or in bursts, Gamma(0.05).",
    remarks: &[
        "As in the paper: the tighter the SLO, the more deferral gains; with loose ones all batches are large and the \
         policies come together.",
        "Bursts of a shape of 0.05 bring dozens of requests at one instant: waiting for more gains nothing, and a GPU \
         that was left idle is missed. That is the one setting where `eager` beats `deferred` here.",
    ],
    draw,
};

const SETTINGS: [(&str, &str, &str); 4] = [
    ("equal; Poisson", "\"equal\"", "{ process = \"poisson\" }"),
    ("Zipf(0.9); Poisson", "{ zipf = 0.9 }", "{ process = \"poisson\" }"),
    ("equal; Gamma(0.05)", "\"equal\"", "{ process = \"gamma\", shape = 0.05 }"),
    ("Zipf(0.9); Gamma(0.05)", "{ zipf = 0.9 }", "{ process = \"gamma\", shape = 0.05 }"),
];
const SLOS_MS: [f64; 8] = [15.0, 20.0, 25.0, 30.0, 40.0, 50.0, 75.0, 100.0];

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table = Table::new(&["workload", "SLO (ms)", "policy", "goodput (r/s)", BESIDE[0], BESIDE[1], BESIDE[2]]);
    let mut searches = Vec::new();
    for (name, popularity, arrivals) in SETTINGS {
        for slo_ms in SLOS_MS {
            let text = format!(
                "gpus = 32\npopularity = {popularity}\narrivals = {arrivals}\n[[model]]\nname = \"ResNet50\"\ncount = \
                 20\n\
                 alpha_ms = 1.053\nbeta_ms = 5.072\nslo_ms = {slo_ms}\n"
            );
            searches.extend(
                POLICIES.map(|policy_name| Search { workload: workload(name, &text), policy: policy(policy_name) }),
            );
        }
    }
    let found = context.goodputs(&searches, &mut table)?;
    let mut besides = found.iter().map(beside);
    let rates: Vec<_> = found.iter().map(rate_of).collect();
    note_rivals(&mut table, &GOODPUT, &POLICIES, &rates);
    let mut panels = Vec::new();
    for ((name, ..), rates) in SETTINGS.iter().zip(rates.chunks(SLOS_MS.len() * POLICIES.len())) {
        let mut series: Vec<_> = POLICIES
            .iter()
            .map(|policy| Series {
                name: legend_of(policy),
                mark: Mark::Line,
                look: look_of(policy),
                points: Vec::new(),
            })
            .collect();
        for (slo_ms, rates) in SLOS_MS.iter().zip(rates.chunks(POLICIES.len())) {
            for ((policy, rate), series) in POLICIES.iter().zip(rates).zip(&mut series) {
                series.points.push((*slo_ms, *rate));
                let [p50, p9999, worst] = besides.next().expect("one for each search");
                table.push([(*name).into(), cell(*slo_ms), (*policy).into(), cell(*rate), p50, p9999, worst]);
            }
        }
        let y = axis_of("goodput (r/s)", &series);
        panels.push(Panel {
            title: (*name).to_owned(),
            x: Axis::new("SLO (ms)", (0.0, 105.0)),
            y,
            series,
            boxes: Vec::new(),
        });
    }
    Ok((Chart::new(FIG11.title, 2, panels), table))
}
