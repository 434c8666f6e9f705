use proptest::prelude::*;

use super::*;

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|&(label, value)| (label.to_owned(), value.to_owned())).collect()
}

fn family(name: &str, kind: MetricKind) -> MetricChange {
    MetricChange::Family { name: name.to_owned(), description: format!("About {name}"), kind }
}

fn metric(family: &str, pairs: &[(&str, &str)], buckets: &[f64]) -> MetricChange {
    MetricChange::Metric { family: family.to_owned(), labels: labels(pairs), buckets: buckets.to_vec() }
}

fn value(family: &str, pairs: &[(&str, &str)], value: f64) -> MetricValue {
    MetricValue { family: family.to_owned(), labels: labels(pairs), value }
}

/// All of the page but how many changes were refused.
fn page(registry: &Registry) -> String {
    let text = registry.text();
    text.split_once("# HELP downbeat_program_metrics_refused_total").unwrap().0.to_owned()
}

#[test]
fn a_page_has_what_programs_count_in_prometheus_words() {
    let mut registry = Registry::new(100);
    let owner = registry.handle_begin();
    let mut change = |change| registry.handle_change(owner, &change).unwrap();
    change(family("requests_latency_ns", MetricKind::Counter));
    change(metric("requests_latency_ns", &[("version", "1"), ("model", "a\"b")], &[]));
    let of = [("model", "a\"b"), ("version", "1")];
    assert_eq!(change(MetricChange::Increment(value("requests_latency_ns", &of, 2.5))), Some(2.5));
    assert_eq!(change(metric("requests_latency_ns", &of, &[])), Some(2.5), "it is there already");
    change(family("free", MetricKind::Gauge));
    change(metric("free", &[], &[]));
    change(MetricChange::Set(value("free", &[], 7.0)));
    assert_eq!(change(MetricChange::Increment(value("free", &[], -8.0))), Some(-1.0));
    change(family("sizes", MetricKind::Histogram));
    change(metric("sizes", &[("of", "rows")], &[1.0, 4.0]));
    for seen in [0.5, 1.0, 3.0, 100.0] {
        assert_eq!(change(MetricChange::Observe(value("sizes", &[("of", "rows")], seen))), None);
    }
    let expected = "\
        # HELP free About free\n# TYPE free gauge\nfree -1\n\
        # HELP requests_latency_ns About requests_latency_ns\n# TYPE requests_latency_ns counter\n\
        requests_latency_ns{model=\"a\\\"b\",version=\"1\"} 2.5\n\
        # HELP sizes About sizes\n# TYPE sizes histogram\n\
        sizes_bucket{of=\"rows\",le=\"1\"} 2\nsizes_bucket{of=\"rows\",le=\"4\"} 3\n\
        sizes_bucket{of=\"rows\",le=\"+Inf\"} 4\n\
        sizes_sum{of=\"rows\"} 104.5\nsizes_count{of=\"rows\"} 4\n";
    assert_eq!(page(&registry), expected);
}

#[test]
fn what_would_spoil_the_page_is_refused_by_name_and_counted() {
    use MetricKind::{Counter, Gauge, Histogram};
    let mut registry = Registry::new(40);
    let owner = registry.handle_begin();
    for good in [family("a", Counter), metric("a", &[], &[]), family("h", Histogram), metric("h", &[], &[1.0])] {
        registry.handle_change(owner, &good).unwrap();
    }
    let before = page(&registry);
    let long = "x".repeat(NAME_BYTES_MAX + 1);
    let longer = "x".repeat(LABELS_BYTES_MAX);
    let described = MetricChange::Family { name: "d".into(), description: "x".repeat(513), kind: Counter };
    let many: Vec<f64> = (0..40).map(f64::from).collect();
    let wrong = [
        (family("", Counter), "metric family: found \"\", expected letters"),
        (family("9", Counter), "metric family: found \"9\", expected letters"),
        (family("a b", Counter), "expected letters, digits and _"),
        (family("a\n# TYPE", Counter), "found \"a\\n# TYPE\""),
        (family(&long, Counter), "at most 128 bytes"),
        (
            family("downbeat_ready", Gauge),
            "metric family downbeat_ready: expected another name: downbeat_, nv_, process_ are",
        ),
        (family("nv_gpu_utilization", Gauge), "are the server's own"),
        (family("a", Gauge), "metric family a: found kind gauge, expected counter, which"),
        (family("h_sum", Counter), "metric family h_sum: expected another name: h_sum would be two metrics"),
        (described, "metric family d: description: found 513 bytes, expected at most 512"),
        (metric("none", &[], &[]), "metric family none: found none"),
        (metric("a", &[("__name__", "x")], &[]), "label: found \"__name__\""),
        (metric("a", &[("a:b", "x")], &[]), "label: found \"a:b\""),
        (metric("h", &[("le", "1")], &[1.0]), "label: found \"le\""),
        (metric("a", &[("l", &longer)], &[]), "metric family a: labels: found 1025 bytes, expected at most 1024"),
        (
            metric("a", &[("l", "x")], &[1.0]),
            "metric family a: buckets: found [1.0], expected them of a histogram only",
        ),
        (metric("h", &[("l", "x")], &[]), "metric family h: buckets: found [], expected at least one"),
        (metric("h", &[("l", "x")], &[2.0, 2.0]), "expected ascending bounds"),
        (
            metric("h", &[("l", "x")], &many),
            "metric family h: found 50 lines of programs' metrics with it, expected at most 40 (program_metrics)",
        ),
        (MetricChange::Increment(value("a", &[], -1.0)), "metric family a: found a negative increment of a counter"),
        (MetricChange::Set(value("a", &[], 1.0)), "metric family a: found a set of a counter, expected it of a gauge"),
        (MetricChange::Observe(value("a", &[], 1.0)), "found an observation of a counter"),
        (MetricChange::Increment(value("h", &[], 1.0)), "found an increment of a histogram, expected that it observes"),
        (MetricChange::Increment(value("a", &[("l", "y")], 1.0)), "metric family a: found no metric with these labels"),
    ];
    let count = wrong.len();
    for (change, expected) in wrong {
        let error = registry.handle_change(owner, &change).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}, expected {expected}");
    }
    assert_eq!(page(&registry), before);
    assert!(registry.text().ends_with(&format!("downbeat_program_metrics_refused_total {count}\n")));
    // A histogram whose lines another family is.
    registry.handle_change(owner, &family("g_count", Counter)).unwrap();
    let error = registry.handle_change(owner, &family("g", Histogram)).unwrap_err().to_string();
    assert_eq!(
        error,
        "metric family g: expected another name: g_count would be two metrics, one of them a histogram's"
    );
}

#[test]
fn where_none_are_kept_all_are_taken() {
    let mut registry = Registry::default();
    let owner = registry.handle_begin();
    for change in [family("a", MetricKind::Counter), MetricChange::Set(value("none", &[], 1.0))] {
        assert_eq!(registry.handle_change(owner, &change), Ok(None));
    }
    assert_eq!(page(&registry), "");
}

#[test]
fn what_models_share_goes_with_the_last_of_them() {
    let mut registry = Registry::new(3);
    let [one, other] = [registry.handle_begin(), registry.handle_begin()];
    for (owner, model) in [(one, "one"), (other, "other")] {
        registry.handle_change(owner, &family("rows", MetricKind::Counter)).unwrap();
        registry.handle_change(owner, &metric("rows", &[("model", model)], &[])).unwrap();
    }
    registry.handle_change(other, &MetricChange::Increment(value("rows", &[("model", "other")], 3.0))).unwrap();
    assert!(registry.handle_change(other, &metric("rows", &[], &[])).is_err(), "there is no room");
    registry.handle_end(one);
    assert_eq!(page(&registry), "# HELP rows About rows\n# TYPE rows counter\nrows{model=\"other\"} 3\n");
    registry.handle_change(other, &metric("rows", &[], &[])).unwrap();
    registry.handle_end(other);
    assert_eq!((page(&registry).as_str(), registry.lines), ("", 0));
}

/// What a test does at random.
#[derive(Debug, Clone)]
enum Step {
    Begin,
    End(usize),
    Change(usize, MetricChange),
}

fn step() -> impl Strategy<Value = Step> {
    let kind = prop_oneof![Just(MetricKind::Counter), Just(MetricKind::Gauge), Just(MetricKind::Histogram)];
    let name = prop_oneof![Just("a"), Just("a_sum"), Just("b"), Just("nv_x"), Just("9")];
    let label = prop_oneof![Just(vec![]), Just(vec![("l", "1")]), Just(vec![("le", "2")])];
    let buckets = prop_oneof![Just(vec![]), Just(vec![1.0, 2.0])];
    let change = (0..5, name, kind, label, buckets, -3..9i32).prop_map(|(what, name, kind, pairs, buckets, by)| {
        let of = value(name, &pairs, f64::from(by));
        match what {
            0 => family(name, kind),
            1 => metric(name, &pairs, &buckets),
            2 => MetricChange::Increment(of),
            3 => MetricChange::Set(of),
            _ => MetricChange::Observe(of),
        }
    });
    prop_oneof![
        1 => Just(Step::Begin),
        1 => (0..4usize).prop_map(Step::End),
        12 => (0..4usize, change).prop_map(|(owner, change)| Step::Change(owner, change)),
    ]
}

/// Lines that are bounded: each family has another one for its help.
fn lines_of(page: &str) -> usize {
    page.lines().filter(|line| !line.starts_with("# HELP")).count()
}

proptest! {
    /// However programs come, go and change what they count: the page has no more lines than it may, each name one
    /// kind, each series one line, and numbers are the sums of what was taken.
    #[test]
    fn pages_stay_whole(steps in proptest::collection::vec(step(), 0..120), lines_max in 1..14usize) {
        let mut registry = Registry::new(lines_max);
        let mut owners = vec![registry.handle_begin()];
        let mut sums: BTreeMap<(String, Labels), f64> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Begin => owners.push(registry.handle_begin()),
                Step::End(at) if at < owners.len() && owners.len() > 1 => registry.handle_end(owners.swap_remove(at)),
                Step::End(_) => {}
                Step::Change(at, change) => {
                    let made = registry.handle_change(owners[at % owners.len()], &change);
                    match (change, made) {
                        (MetricChange::Increment(by), Ok(now)) => {
                            let sum = sums.entry((by.family, by.labels)).or_default();
                            *sum += by.value;
                            prop_assert_eq!(now, Some(*sum));
                        }
                        (MetricChange::Set(to), Ok(now)) => {
                            prop_assert_eq!(now, Some(to.value));
                            sums.insert((to.family, to.labels), to.value);
                        }
                        _ => {}
                    }
                }
            }
            let kept = |family: &String, labels: &Labels| {
                registry.families.get(family).is_some_and(|family| family.metrics.contains_key(labels))
            };
            sums.retain(|(family, labels), _| kept(family, labels));
            let text = page(&registry);
            prop_assert!(lines_of(&text) <= lines_max && registry.lines == lines_of(&text), "{}", text);
            let mut series: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
            series.iter_mut().for_each(|line| *line = line.rsplit_once(' ').unwrap().0);
            let count = series.len();
            series.sort_unstable();
            series.dedup();
            prop_assert_eq!(series.len(), count, "{}", text);
        }
    }
}
