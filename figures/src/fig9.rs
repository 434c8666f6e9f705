//! Symphony's Figure 9: goodput on mixes of many models.

use chart::{Axis, Chart, Mark, Panel, Series};
use sim::Workload;

use crate::{
    context::{
        BESIDE, Context, GOODPUT, POLICIES, SYMPHONY, Search, axis_of, beside, legend_of, look_of, note_rivals, policy,
        rate_of, workload,
    },
    figure::{Figure, FigureError},
    table::{Table, cell},
};

pub(crate) const FIG9: Figure = Figure {
    name: "fig9",
    title: "Symphony, Figure 9: goodput on mixes of models, 64 GPUs",
    shows: "The zoos of the paper's Tables 3 and 4, equally popular. Strong: only models with beta/alpha > 2; weak: \
            only those with beta/alpha < 2.",
    remarks: &[
        "The paper's text: Symphony reaches 2.0 to 2.4 times the baselines on all models; on strong ones 3.5 times \
         (1080Ti) and 5.7 times (A100); on weak ones 23 % and 10 % more. Its baselines carried limits of their \
         implementations, which a re-implementation of their policies in one simulator has not: expect smaller factors \
         here.",
        "Eager scheduling, which the paper does not list, comes within a few per cent of deferral: with 64 GPUs for 37 \
         models of very different objectives there is nearly always one that can start.",
        "Goodput asks every single model to be within 1 %, so on a mix one tight model decides.",
    ],
    draw,
};

const ZOOS: [(&str, &str); 2] = [("1080Ti", "symphony-zoo-1080ti.csv"), ("A100", "symphony-zoo-a100.csv")];
const SETTINGS: [&str; 3] = ["mixed", "strong", "weak"];

fn draw(context: &Context) -> Result<(Chart, Table), FigureError> {
    let mut table = Table::new(&[
        "GPU",
        "models",
        "policy",
        "goodput (r/s)",
        "of deferred:target (%)",
        BESIDE[0],
        BESIDE[1],
        BESIDE[2],
    ]);
    let mut searches = Vec::new();
    for (_, zoo) in ZOOS {
        for setting in SETTINGS {
            searches.extend(POLICIES.map(|name| Search { workload: mix(zoo, setting), policy: policy(name) }));
        }
    }
    let found = context.goodputs(&searches, &mut table)?;
    let mut besides = found.iter().map(beside);
    let rates: Vec<_> = found.iter().map(rate_of).collect();
    note_rivals(&mut table, &GOODPUT, &POLICIES, &rates);
    let mut panels = Vec::new();
    for ((gpu, _), rates) in ZOOS.iter().zip(rates.chunks(SETTINGS.len() * POLICIES.len())) {
        for (setting, rates) in SETTINGS.iter().zip(rates.chunks(POLICIES.len())) {
            let reference = POLICIES.iter().position(|&name| name == SYMPHONY).map_or(0.0, |index| rates[index]);
            for (name, rate) in POLICIES.iter().zip(rates) {
                let [p50, p9999, worst] = besides.next().expect("one for each search");
                table.push([
                    (*gpu).into(),
                    (*setting).into(),
                    (*name).into(),
                    cell(*rate),
                    cell(100.0 * rate / reference),
                    p50,
                    p9999,
                    worst,
                ]);
            }
        }
        let mut series = Vec::new();
        for (place, name) in POLICIES.iter().enumerate() {
            let points =
                (0..SETTINGS.len()).map(|group| (group as f64, rates[group * POLICIES.len() + place])).collect();
            let mark = Mark::Bar { place, places: POLICIES.len() };
            series.push(Series { name: legend_of(name), mark, look: look_of(name), points });
        }
        let y = axis_of("goodput (r/s)", &series);
        panels.push(Panel { title: (*gpu).to_owned(), x: Axis::named("", SETTINGS), y, series, boxes: Vec::new() });
    }
    Ok((Chart { panel: (940, 290), ..Chart::new(FIG9.title, 1, panels) }, table))
}

/// The models of a zoo that belong to the setting.
fn mix(zoo: &str, setting: &str) -> Workload {
    let mut workload = workload(setting, &format!("gpus = 64\n[[model]]\nzoo = \"{zoo}\"\n"));
    workload.models.retain(|model| {
        let (one, two) = (model.profile.latency(1).as_millis_f64(), model.profile.latency(2).as_millis_f64());
        let (alpha, beta) = (two - one, 2.0 * one - two);
        match setting {
            "strong" => beta > 2.0 * alpha,
            "weak" => beta < 2.0 * alpha,
            _ => true,
        }
    });
    let count = workload.models.len() as f64;
    for model in &mut workload.models {
        model.share = 1.0 / count;
    }
    workload
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strong_and_weak_models_make_the_zoo() {
        for (_, zoo) in ZOOS {
            let count = |setting| mix(zoo, setting).models.len();
            assert_eq!(count("strong") + count("weak"), count("mixed"));
        }
        // Symphony, Table 3: from MobileNet on (2.369) the last strong one is VGG16 (2.116).
        assert!(mix(ZOOS[0].1, "strong").models.iter().any(|model| model.name == "VGG16"));
        assert!(mix(ZOOS[0].1, "weak").models.iter().any(|model| model.name == "EfficientNetB2"));
    }
}
