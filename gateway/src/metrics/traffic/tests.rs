use prometheus::Registry;
use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::{
    config::MetricsConfig,
    metrics::{Stage, models::Models},
};

fn at(ms: i64) -> Timestamp {
    Timestamp::ZERO + Span::from_millis(ms)
}

fn with_models(count: usize) -> (Models, Traffic) {
    let models = Models::new(&Registry::new(), MetricsConfig::default());
    (0..count).for_each(|index| models.handle_model(index, &format!("m{index}"), "1"));
    let traffic = Traffic::new(models.told(), "door".to_owned());
    (models, traffic)
}

fn fail(models: &Models, index: usize, error: &frontend::InferError) {
    models.with(index, |known| known.counts().handle_failure(error));
}

fn never_met() -> frontend::InferError {
    frontend::InferError::NeverMet { model: "m".to_owned(), slo: Span(1), least: Span(2) }
}

fn asked(traffic: &Traffic, ms: i64, query: &str) -> Value {
    serde_json::from_str(&traffic.page(at(ms), query).unwrap()).unwrap()
}

fn names(page: &Value) -> Vec<&str> {
    page["rows"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect()
}

#[test]
fn rates_are_of_the_last_seconds_and_the_first_reading_has_none() {
    let (models, traffic) = with_models(3);
    models.handle_objective(0, Span::from_millis(25));
    models.handle_objective(1, Span::ENDLESS);
    fail(&models, 0, &frontend::InferError::NoScheduler);
    let first = asked(&traffic, 0, "");
    assert_eq!((first["window_ms"].as_u64(), first["all"]["requests"].as_f64()), (Some(0), Some(0.0)));
    assert_eq!((first["models"].as_u64(), first["asked"].as_u64()), (Some(3), Some(1)));
    for _ in 0..4 {
        fail(&models, 1, &frontend::InferError::NoScheduler);
    }
    fail(&models, 1, &never_met());
    assert_eq!(asked(&traffic, 999, "")["window_ms"], 0, "rates of less than a second are none");
    let page = asked(&traffic, 2_000, "");
    assert_eq!((names(&page), page["window_ms"].as_u64()), (vec!["m1", "m0", "m2"], Some(2_000)));
    let row = &page["rows"][0];
    assert_eq!(
        (row["requests"].as_f64(), row["missed"].as_f64(), row["good"].as_f64()),
        (Some(2.5), Some(2.0), Some(0.0))
    );
    assert_eq!(row["dropped"], serde_json::json!({ "no_scheduler": 2.0, "never_met": 0.5 }));
    assert!(row["objective_ms"].is_null() && row["p99_ms"].is_null() && row["batch"].is_null(), "{row}");
    assert_eq!((&page["rows"][1]["objective_ms"], &page["all"]["requests"]), (&25.0.into(), &2.5.into()));
    // Nobody has looked for long: what happened meanwhile is of no second.
    assert_eq!(asked(&traffic, 60_000, "")["window_ms"], 0);
    // Another version in its place is another model, all of whose requests are new.
    models.handle_model(1, "m1", "2");
    fail(&models, 1, &frontend::InferError::NoScheduler);
    assert_eq!(asked(&traffic, 61_000, "")["rows"][0]["requests"], 1.0);
}

#[test]
fn pages_are_small_ordered_and_of_what_matches() {
    let (models, traffic) = with_models(4_000);
    asked(&traffic, 0, "");
    fail(&models, 17, &frontend::InferError::NoScheduler);
    for _ in 0..2 {
        fail(&models, 3_999, &never_met());
    }
    let first = |query: &str| names(&asked(&traffic, 1_000, query))[0].to_owned();
    assert_eq!([first(""), first("order=missed"), first("order=name")], ["m3999", "m17", "m0"]);
    let page = asked(&traffic, 1_000, "match=M39&rows=10&page=11");
    assert_eq!((page["pages"].as_u64(), names(&page).len()), (Some(12), 1));
    let text = traffic.page(at(1_000), "rows=100").unwrap();
    assert!(text.len() < 32_000, "{} bytes", text.len());
    let wrong = |query| traffic.page(at(1_000), query).unwrap_err();
    assert_eq!(wrong("page=160"), "page: found 160, expected one below 160");
    assert_eq!(wrong("rows=101"), "rows: found 101, expected 1 to 100");
    assert_eq!(wrong("order=size"), "order: found `size`, expected one of rate, missed, name");
    assert_eq!(names(&asked(&traffic, 1_000, "match=nothing")), Vec::<&str>::new());
}

#[test]
fn quantiles_are_between_the_bounds_of_their_bucket() {
    let mut took = [0; DURATION_BOUNDS_NS.len() + 1];
    assert_eq!(quantile_ns(&took, 0.99), None);
    (took[0], took[1]) = (50, 50);
    assert_eq!(quantile_ns(&took, 0.5), Some(20_000.0));
    assert_eq!(quantile_ns(&took, 0.75), Some(30_000.0));
    took[DURATION_BOUNDS_NS.len()] = 900;
    assert_eq!(quantile_ns(&took, 0.99), Some(DURATION_BOUNDS_NS[19] as f64), "beyond the last bound it is not known");
}

proptest! {
    /// However requests and looks alternate: a page tells what was counted between two earlier looks, exactly, the
    /// later of them less than a second ago. Looks that count are 3.5 s apart at most: a window's half, twice, and two
    /// gaps.
    #[test]
    fn a_page_tells_what_was_counted_between_two_looks(
        steps in proptest::collection::vec((0..2_500i64, 0..5usize), 1..60),
    ) {
        let (models, traffic) = with_models(1);
        let (mut now, mut counted, mut looks) = (0, 0, Vec::new());
        for (after, requests) in steps {
            now += after;
            for _ in 0..requests {
                models.with(0, |known| known.counts().handle_stage(Stage::Receive, 1));
                fail(&models, 0, &frontend::InferError::NoScheduler);
            }
            counted += requests;
            looks.push((now, counted));
            let page = asked(&traffic, now, "");
            let window = page["window_ms"].as_i64().unwrap();
            let told = page["all"]["requests"].as_f64().unwrap() * window as f64 / 1e3;
            let is_between = |(since, before): &(i64, usize)| {
                let mut newest = looks.iter().filter(|(at, _)| at - since == window && now - at < 1_000);
                newest.any(|(_, count)| window == 0 || (told - (count - before) as f64).abs() < 0.02)
            };
            prop_assert!(looks.iter().any(is_between), "{now}: {window} {told} {looks:?}");
            prop_assert!(window < 9_500 && (window == 0 || window >= 1_000), "{window}");
        }
    }
}
