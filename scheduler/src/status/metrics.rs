//! The advice in Prometheus's text format.

use std::{collections::BTreeMap, fmt::Write as _};

use admin::label_value;

use super::{AdviceRow, Status, advice_row};

impl Status {
    /// What the primary knows of how many GPUs are needed; nothing at a scheduler that is not the primary, and no
    /// number of GPUs while that is not known, so that whoever scales by it leaves all as it is.
    #[must_use]
    pub fn metrics(&self) -> String {
        let told = &mut *self.told.borrow_mut();
        let Some((_, snapshot)) = self.board.newest(&mut told.models) else { return String::new() };
        if !snapshot.advice.is_primary {
            return String::new();
        }
        text(&advice_row(&snapshot.advice, &told.models))
    }
}

fn text(advice: &AdviceRow) -> String {
    let mut text = String::new();
    let mut tell = |name: &str, kind: &str, help: &str, value: &str| {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
    };
    if let Some(needed) = advice.gpus_needed {
        tell("downbeat_gpus_needed", "gauge", "How many GPUs all sub-clusters need", &needed.to_string());
    }
    let gauges = [
        ("downbeat_gpus_planned", "GPUs that plans go to", f64::from(advice.gpus)),
        ("downbeat_gpus_work", "GPUs that the tasks would keep busy at the price of GPUs", advice.work_gpus),
        ("downbeat_gpus_busy_ratio", "Part of GPUs' time in which tasks with an objective ran", advice.busy),
        ("downbeat_gpus_idle_ratio", "Part of GPUs' time in which none ran", advice.idle),
        ("downbeat_tasks_bad_ratio", "Tasks with an objective that are lost, of all", advice.bad),
    ];
    for (name, help, value) in gauges {
        tell(name, "gauge", help, &value.to_string());
    }
    let counters = [
        ("downbeat_tasks_in_time_total", "Tasks whose batch ended in time", advice.tasks_in_time),
        ("downbeat_tasks_lost_total", "Tasks that were given up or whose batch was late", advice.tasks_lost),
    ];
    for (name, help, value) in counters {
        tell(name, "counter", help, &value.to_string());
    }
    // Of two that are called alike the sum: no two lines of one name may be.
    let mut by_models: BTreeMap<String, (u32, Option<u32>)> = BTreeMap::new();
    for sub in &advice.sub_clusters {
        let more = if sub.models > sub.models_first.len() { ",.." } else { "" };
        let (gpus, needed) = by_models.entry(label_value(&sub.models_first.join(",")) + more).or_insert((0, Some(0)));
        *gpus += sub.gpus;
        *needed = needed.and_then(|needed| Some(needed + sub.gpus_needed?));
    }
    let gpus = by_models.iter().map(|(models, &(gpus, _))| (models, gpus));
    gauge_of_models(&mut text, "downbeat_subcluster_gpus_planned", "The same of GPUs that host the same models", gpus);
    let needed = by_models.iter().filter_map(|(models, &(_, needed))| Some((models, needed?)));
    gauge_of_models(&mut text, "downbeat_subcluster_gpus_needed", "How many are needed of them", needed);
    text
}

/// Nothing, if there is no value.
fn gauge_of_models<'a>(text: &mut String, name: &str, help: &str, values: impl Iterator<Item = (&'a String, u32)>) {
    let mut values = values.peekable();
    if values.peek().is_some() {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge");
    }
    for (models, value) in values {
        let _ = writeln!(text, "{name}{{models=\"{models}\"}} {value}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::SubClusterRow;

    #[test]
    fn a_number_that_is_not_known_is_not_told_and_no_line_comes_twice() {
        let sub = |models: usize, gpus, gpus_needed, first: &[&str]| SubClusterRow {
            models,
            models_first: first.iter().map(|&name| name.to_owned()).collect(),
            gpus,
            gpus_needed,
            reason: String::new(),
            bad: 0.0,
            work_gpus: 0.0,
        };
        let sub_clusters = vec![
            sub(5, 1, Some(2), &["a", "b", "c"]),
            sub(1, 4, None, &["d\"\\\n"]),
            sub(4, 2, Some(3), &["a", "b", "c"]),
        ];
        let advice = AdviceRow { gpus: 7, bad: 0.25, sub_clusters, ..AdviceRow::default() };
        let told = text(&advice);
        assert!(!told.contains("downbeat_gpus_needed"), "{told}");
        for line in [
            "downbeat_gpus_planned 7",
            "downbeat_tasks_bad_ratio 0.25",
            "downbeat_subcluster_gpus_planned{models=\"a,b,c,..\"} 3",
            "downbeat_subcluster_gpus_needed{models=\"a,b,c,..\"} 5",
            "downbeat_subcluster_gpus_planned{models=\"d\\\"\\\\\\n\"} 4",
        ] {
            assert!(told.lines().any(|told| told == line), "{line} in {told}");
        }
        assert_eq!(told.lines().filter(|line| line.starts_with("downbeat_subcluster_gpus_needed")).count(), 1);
        let known = text(&AdviceRow { gpus_needed: Some(9), ..advice });
        assert!(known.starts_with("# HELP downbeat_gpus_needed"), "{known}");
        assert!(known.contains("\ndownbeat_gpus_needed 9\n"), "{known}");
    }
}
