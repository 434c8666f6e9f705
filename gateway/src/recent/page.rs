//! The last requests for whoever looks after the frontend: `GET /debug/requests` at its `[admin] http`, a page of them
//! at a time, and one of them explained. What clients call their requests is theirs: no id is in it.

use std::cmp::Reverse;

use admin::Query;
use proto::Span;
use serde_json::{Value, json};

use super::{Ended, Recent};

/// Where it is told.
pub(crate) const PATH: &str = "/debug/requests";
/// Requests of one page, if the query does not say it, and at most.
const ROWS: usize = 20;
const ROWS_MAX: usize = 100;
const ORDERS: [&str; 3] = ["last", "slowest", "failed"];

impl Recent {
    /// The page that a query asks for, as JSON: `page`, `rows`, `match` (a part of a model's name) and `order`, of
    /// requests up to the number `until`; and `request`, the number of one that is to be explained.
    ///
    /// # Errors
    /// One line that says what was found and expected.
    pub(crate) fn page(&self, query: &str) -> Result<String, String> {
        let query = Query::of(query);
        let last = usize::try_from(self.ended).unwrap_or(usize::MAX);
        let number = |key, default| query.number(key, 0..=usize::MAX, default);
        let (page, rows) = (number("page", 0)?, query.number("rows", 1..=ROWS_MAX, ROWS)?);
        let (until, chosen) = (number("until", last)? as u64, number("request", 0)? as u64);
        let (order, matches) = (query.one_of("order", &ORDERS)?, query.part_of("match"));
        let is_asked_for = |ended: &&Ended| ended.number <= until && matches(&ended.model);
        let mut found: Vec<&Ended> = self.requests.iter().rev().filter(is_asked_for).collect();
        match ORDERS[order] {
            "slowest" => found.sort_by_key(|ended| Reverse(ended.took())),
            "failed" => found.retain(|ended| ended.outcome.is_err()),
            _ => {}
        }
        let pages = found.len().div_ceil(rows).max(1);
        if page >= pages {
            return Err(format!("page: found {page}, expected one below {pages}"));
        }
        let chosen = self.requests.iter().find(|ended| ended.number == chosen).map(|ended| {
            let mut explained = ended.explained();
            explained.as_object_mut().expect("it is one").remove("id");
            explained
        });
        let shown: Value = found.iter().skip(page * rows).take(rows).map(|ended| ended.row()).collect();
        let told = json!({
            "page": page, "pages": pages, "last": last, "requests": found.len(), "rows": shown, "chosen": chosen,
        });
        Ok(told.to_string() + "\n")
    }
}

impl Ended {
    /// From its first byte until it was answered; nothing if it was not.
    fn took(&self) -> Option<Span> {
        self.outcome.as_ref().ok().map(|(timing, ago)| timing.answered_at - timing.admitted_at + ago.began)
    }

    fn row(&self) -> Value {
        let (timing, error) = match &self.outcome {
            Ok((timing, _)) => (Some(timing), None),
            Err(error) => (None, Some(error)),
        };
        json!({
            "request": self.number,
            "model": &*self.model,
            "took_ms": self.took().map(Span::as_millis_f64),
            "batch": timing.filter(|timing| !timing.is_of_cache()).map(|timing| timing.batch_size),
            "in_time": timing.map(|timing| timing.answered_at <= timing.deadline),
            "error": error,
        })
    }
}

#[cfg(test)]
mod tests {
    use frontend::InferError;
    use proto::Timestamp;

    use super::*;
    use crate::recent::tests::{AGO, ME, ONE, timing};

    fn told(recent: &Recent, query: &str) -> Value {
        serde_json::from_str(&recent.page(query).unwrap()).unwrap()
    }

    fn numbers(page: &Value) -> Vec<u64> {
        page["rows"].as_array().unwrap().iter().map(|row| row["request"].as_u64().unwrap()).collect()
    }

    /// Five requests: the second one fails, the third one takes longest, and the last one is of another model.
    fn five() -> Recent {
        let mut recent = Recent::default();
        let slow = frontend::tasks::Timing { answered_at: Timestamp(90_000_000), ..timing() };
        let lost = InferError::NoScheduler;
        for (model, outcome) in [
            ("digits", Ok((timing(), AGO))),
            ("digits", Err(&lost)),
            ("digits", Ok((slow, AGO))),
            ("digits", Ok((timing(), AGO))),
            ("tokens", Ok((timing(), AGO))),
        ] {
            recent.push((ME, Some("a client's")), model, ONE, outcome, &[]);
        }
        recent
    }

    #[test]
    fn the_last_requests_come_page_by_page_in_the_order_that_is_asked_for() {
        let recent = five();
        for (query, expected) in [
            ("", vec![5, 4, 3, 2, 1]),
            ("rows=2&page=1", vec![3, 2]),
            ("until=3&rows=2", vec![3, 2]),
            ("order=slowest", vec![3, 5, 4, 1, 2]),
            ("order=failed", vec![2]),
            ("match=TOK", vec![5]),
            ("match=none", vec![]),
        ] {
            assert_eq!(numbers(&told(&recent, query)), expected, "{query}");
        }
        let page = told(&recent, "rows=2");
        assert_eq!((&page["pages"], &page["last"], &page["requests"]), (&json!(3), &json!(5), &json!(5)));
        assert_eq!(recent.page("page=1").unwrap_err(), "page: found 1, expected one below 1");
        assert_eq!(recent.page("order=x").unwrap_err(), "order: found `x`, expected one of last, slowest, failed");
        assert_eq!(numbers(&told(&Recent::default(), "")), [0; 0]);
    }

    #[test]
    fn rows_tell_what_became_of_each_and_nothing_that_is_the_clients() {
        let page = told(&five(), "request=3");
        let expected = json!({
            "request": 3, "model": "digits", "took_ms": 92.9995, "batch": 5, "in_time": false, "error": null,
        });
        assert_eq!(page["rows"][2], expected);
        assert!(page["rows"][3]["error"].as_str().unwrap().contains("no scheduler"), "{page}");
        assert_eq!((&page["chosen"]["request"], &page["chosen"]["batch"]["gpu"]), (&json!(3), &json!(1)));
        assert!(!page.to_string().contains("a client's"), "{page}");
        assert!(told(&five(), "request=6")["chosen"].is_null() && told(&five(), "")["chosen"].is_null());
    }
}
