//! Symphony's Figures 4 and 5: the worked example of its section 3.3 as Gantt charts. The simulator's tests hold the
//! same schedules to the paper's text.

use chart::{Axis, Chart, Mark, Panel, Series, Slice};
use scheduler::Policy;
use sim::examples::{self, Schedule};

use crate::{
    context::legend_of,
    figure::Figure,
    table::{Table, cell},
};

pub(crate) const FIG4: Figure = Figure {
    name: "fig4",
    title: "Symphony, Figure 4: deferred scheduling staggers the GPUs",
    shows: "l(b) = b + 5, SLO 12, three GPUs, a request every 0.75 time units. A box is a batch with its size, a \
            circle an arrival.",
    remarks: &[
        "As in the paper: batches of four, 3 time units apart, GPUs in turn, nothing dropped. At 11.25 GPU 1 ends its \
         first batch at the very instant its second one is due; comparisons are inclusive.",
        SAME,
    ],
    draw: |_| {
        let schedules = examples::DEFERRED.map(|policy| (policy, examples::figure_4(policy)));
        Ok(drawing("Symphony, Figure 4: deferred scheduling staggers the GPUs", &schedules))
    },
};

pub(crate) const FIG5: Figure = Figure {
    name: "fig5",
    title: "Symphony, Figure 5: reaction to three missing requests",
    shows: "The same, but requests 13 to 15 do not come. Eager scheduling (top) is shown from 11.25 on, when the GPUs \
            end the batches of Figure 4; a cross is a request that was dropped.",
    remarks: &[
        "As in the paper: under eager scheduling R16 runs alone at 11.25, batches shrink, and R35, R37, R38 are \
         dropped, with others after them; under deferred scheduling the GPUs wait, and are staggered again.",
        "At 17.25 two GPUs become free at once; we take the smaller id, the paper the other. Sizes and times are the \
         same.",
        SAME,
    ],
    draw: |_| {
        let [target, prefix] = examples::DEFERRED.map(|policy| (policy, examples::figure_5b(policy)));
        let schedules = [(Policy::Eager, examples::figure_5a()), target, prefix];
        Ok(drawing("Symphony, Figure 5: reaction to three missing requests", &schedules))
    },
};

const SAME: &str = "Both ways to gather a batch give the same schedule here: the target of `deferred:target` is one, \
                    the largest batch that a GPU of its own can run twice within the SLO, so no head is given up.";
const UNTIL: f64 = 41.0;

fn drawing(title: &str, schedules: &[(Policy, Schedule)]) -> (Chart, Table) {
    let mut table = Table::new(&["policy", "event", "GPU", "size or request", "start", "end"]);
    let mut panels = Vec::new();
    for (policy, schedule) in schedules {
        let policy = policy.to_string();
        for batch in &schedule.batches {
            let (gpu, size) = (batch.gpu.to_string(), batch.size.to_string());
            table.push([policy.clone(), "batch".into(), gpu, size, cell(batch.start), cell(batch.end)]);
        }
        for &request in &schedule.dropped {
            let at = cell(examples::arrival(request));
            table.push([policy.clone(), "drop".into(), String::new(), request.to_string(), at, String::new()]);
        }
        panels.push(panel(&policy, schedule));
    }
    (Chart { panel: (940, 250), ..Chart::new(title, 1, panels) }, table)
}

fn panel(policy: &str, schedule: &Schedule) -> Panel {
    let boxes = schedule.batches.iter().filter(|batch| batch.end < UNTIL).map(|batch| Slice {
        row: 3 - batch.gpu as usize,
        x: (batch.start, batch.end),
        text: batch.size.to_string(),
        look: if batch.size >= 4 { 1 } else { 5 },
    });
    let (mut served, mut dropped) = (Vec::new(), Vec::new());
    for &request in schedule.requests.iter().filter(|&&request| examples::arrival(request) < UNTIL) {
        let list = if schedule.dropped.contains(&request) { &mut dropped } else { &mut served };
        list.push((examples::arrival(request), 3.5));
    }
    let series = |name: &str, look, points| Series { name: name.to_owned(), mark: Mark::Points, look, points };
    Panel {
        title: legend_of(policy),
        x: Axis::new("time (units)", (0.0, UNTIL)),
        y: Axis::named("", ["GPU 3", "GPU 2", "GPU 1", "arrivals"]),
        series: vec![series("a request that is served", 0, served), series("one that is dropped", 3, dropped)],
        boxes: boxes.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::Context;

    fn context() -> Context {
        let bar = indicatif::ProgressBar::hidden();
        Context { budget_minutes: 1.0, seed: 1, out: std::path::PathBuf::new(), bar }
    }

    #[test]
    fn a_box_for_each_batch_and_a_mark_for_each_request() {
        let (chart, table) = (FIG5.draw)(&context()).unwrap();
        let [eager, target, deferred] = &chart.panels[..] else { panic!("three panels") };
        assert_eq!((eager.boxes[0].x, eager.boxes[0].text.as_str()), ((11.25, 17.25), "1"));
        assert!(deferred.boxes.iter().all(|slice| slice.text == "4"));
        let missing = |panel: &Panel| !panel.series[0].points.iter().any(|&(at, _)| (9.0..11.25).contains(&at));
        assert!(missing(eager) && missing(target) && missing(deferred));
        assert!(eager.series[1].points.contains(&(examples::arrival(35), 3.5)) && deferred.series[1].points.is_empty());
        assert_eq!(table.rows[0].join(" "), "eager batch 1 1 11.25 17.25");
    }
}
