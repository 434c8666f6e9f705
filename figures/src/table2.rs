//! Symphony's Table 2: how many requests a second one model on eight GPUs is served at, beside what can be had.

use chart::{Axis, Chart, Mark, Panel, Series};

use crate::{
    context::{BESIDE, Context, GOODPUT, POLICIES, Search, beside, look_of, note_rivals, policy, rate_of, workload},
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const TABLE2: Figure = Figure {
    name: "table2",
    title: "Symphony, Table 2: one model on eight GPUs",
    shows: "Goodput of each policy (bars) and of the system it stands for in the paper (diamonds). The dashed lines \
            are the paper's analysis: batches of GPUs that run in turn (`staggered`) and of GPUs that do not know of \
            each other.",
    remarks: &[
        "The analytical batch sizes and throughputs are computed here by the paper's equations (1) and (2), and agree \
         with its table.",
        "The paper's Symphony is `deferred:target`, which drops heads that keep batches below a target size. With the \
         longest prefix alone (`deferred`) it is metastable near its limit, and a single late start within a run ends \
         the search at a lower rate. `downbeat` sheds such a backlog at once.",
        "Clockwork's policy does far better here than its implementation did in the paper, and so does `eager`: \
         neither waits for a network, and both batch from one central queue.",
    ],
    draw,
};

/// A workload of the table.
pub(crate) struct Model {
    pub name: &'static str,
    pub alpha_ms: f64,
    pub beta_ms: f64,
    pub slo_ms: f64,
    /// The paper's throughputs without coordination and staggered, in requests a second.
    bounds: [f64; 2],
    /// What the paper measured, by our name of the policy.
    goodput: [(&'static str, f64); 4],
}

pub(crate) const GPUS: f64 = 8.0;

pub(crate) const MODELS: [Model; 2] = [
    Model {
        name: "ResNet50",
        alpha_ms: 1.053,
        beta_ms: 5.072,
        slo_ms: 25.0,
        bounds: [4501.0, 5839.0],
        goodput: [("deferred:target", 5264.0), ("clockwork", 1358.0), ("nexus", 4027.0), ("shepherd", 4445.0)],
    },
    Model {
        name: "InceptionResNetV2",
        alpha_ms: 5.090,
        beta_ms: 18.368,
        slo_ms: 70.0,
        bounds: [713.0, 1083.0],
        goodput: [("deferred:target", 926.0), ("clockwork", 458.0), ("nexus", 618.0), ("shepherd", 778.0)],
    },
];

impl Model {
    /// On eight GPUs.
    pub(crate) fn workload(&self) -> sim::Workload {
        let Self { name, alpha_ms, beta_ms, slo_ms, .. } = self;
        workload(
            name,
            &format!(
                "gpus = {GPUS}\n[[model]]\nname = \"{name}\"\nalpha_ms = {alpha_ms}\nbeta_ms = {beta_ms}\nslo_ms = \
                 {slo_ms}\n"
            ),
        )
    }

    /// Section 5.3: the largest batch when a request waits for `wait` executions at worst, and the throughput with it.
    pub(crate) fn bound(&self, wait: f64) -> (f64, f64) {
        let batch = ((self.slo_ms / (1.0 + wait) - self.beta_ms) / self.alpha_ms).floor();
        (batch, 1000.0 * GPUS * batch / (self.alpha_ms * batch + self.beta_ms))
    }

    fn reported(&self, policy: &str) -> Option<f64> {
        self.goodput.iter().find(|(name, _)| *name == policy).map(|(_, rate)| *rate)
    }
}

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table =
        Table::new(&["model", "policy", "batch", "goodput (r/s)", "paper (r/s)", BESIDE[0], BESIDE[1], BESIDE[2]]);
    let search = |model: &Model, name| Search { workload: model.workload(), policy: policy(name) };
    let searches: Vec<_> = MODELS.iter().flat_map(|model| POLICIES.map(|name| search(model, name))).collect();
    let found = context.goodputs(&searches, &mut table)?;
    note_rivals(&mut table, &GOODPUT, &POLICIES, &found.iter().map(rate_of).collect::<Vec<_>>());
    let mut panels = Vec::new();
    for (model, reports) in MODELS.iter().zip(found.chunks(POLICIES.len())) {
        let bounds = [("no coordination", model.bound(1.0)), ("staggered", model.bound(1.0 / GPUS))];
        for ((name, (batch, rate)), reported) in bounds.into_iter().zip(model.bounds) {
            table.push([
                model.name.into(),
                format!("bound: {name}"),
                cell(batch),
                cell(rate),
                cell(reported),
                String::new(),
                String::new(),
                String::new(),
            ]);
        }
        for (name, report) in POLICIES.iter().zip(reports) {
            let batch = report.as_ref().map_or(0.0, |report| report.batch_mean);
            let reported = model.reported(name).map_or_else(String::new, cell);
            let [p50, p9999, worst] = beside(report);
            table.push([
                model.name.into(),
                (*name).into(),
                cell(batch),
                cell(rate_of(report)),
                reported,
                p50,
                p9999,
                worst,
            ]);
        }
        panels.push(panel(model, reports.iter().map(rate_of).collect()));
    }
    Ok((Chart::new(TABLE2.title, 2, panels), table))
}

fn panel(model: &Model, rates: Vec<f64>) -> Panel {
    let mut series = Vec::new();
    for (index, (name, rate)) in POLICIES.iter().zip(&rates).enumerate() {
        let mark = Mark::Bar { place: 0, places: 1 };
        series.push(Series { name: String::new(), mark, look: look_of(name), points: vec![(index as f64, *rate)] });
    }
    let reported = POLICIES.iter().enumerate().filter_map(|(index, name)| Some((index as f64, model.reported(name)?)));
    let mark = Mark::Reported { place: 0, places: 1 };
    series.push(Series { name: "paper's measurement".to_owned(), mark, look: 0, points: reported.collect() });
    for (name, wait, look) in
        [("bound: staggered", 1.0 / GPUS, chart::BOUND), ("bound: no coordination", 1.0, chart::GREY)]
    {
        let (_, rate) = model.bound(wait);
        let points = vec![(0.0, rate), (POLICIES.len() as f64, rate)];
        series.push(Series { name: name.to_owned(), mark: Mark::Dashed, look, points });
    }
    Panel {
        title: format!("{}, SLO {} ms", model.name, model.slo_ms),
        x: Axis::named("", POLICIES),
        y: crate::context::axis_of("goodput (r/s)", &series),
        series,
        boxes: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bounds_are_those_of_the_paper() {
        let bounds = |model: &Model| [model.bound(1.0), model.bound(1.0 / GPUS)].map(|(b, rate)| (b, rate.round()));
        let [resnet, inception] = MODELS.map(|model| model.bounds);
        assert_eq!(bounds(&MODELS[0]), [(7.0, resnet[0]), (16.0, resnet[1])]);
        assert_eq!(bounds(&MODELS[1]), [(3.0, inception[0]), (8.0, inception[1])]);
    }
}
