//! What the programs of models count, on other roles' pages (`[admin] also`): asked for when this role's page is, and
//! told on as one page. Series of the same name and labels are added, as if one process had counted them.
//!
//! Who is asked is not believed: it answers in time, in so many bytes, and only names that no role has go on.
#![allow(clippy::disallowed_methods)] // A driver: it asks over sockets.

use std::{collections::BTreeMap, fmt::Write as _};

use proto::{Span, Wait};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use crate::pages::{OWN_METRICS, header};

/// Roles that are asked: all of them, one after another, take less time than a scraper waits.
pub const ALSO_MAX: usize = 16;
/// How long each may take.
const ANSWER_TIMEOUT: Span = Wait::Also.bound();
/// Bytes of an answer.
const ANSWER_BYTES_MAX: u64 = 2 << 20;
/// It asks for the role's own metrics: those that it tells of others would come twice, or never if it asked here.
const QUESTION: &[u8] = b"GET /metrics?own HTTP/1.0\r\n\r\n";

/// Metrics of the programs of these roles, and which of these have answered.
pub(crate) async fn metrics_of(addresses: &[String]) -> String {
    let (mut sum, mut text) = (Sum::default(), String::new());
    let name = "downbeat_also_up";
    header(&mut text, name, "1 if what another role's programs count is told here, too (admin.also)", "gauge");
    for address in addresses {
        let answer = timeout(ANSWER_TIMEOUT.to_duration(), ask(address)).await;
        let answer = answer.unwrap_or_else(|_| {
            Wait::Also.note_reached();
            None
        });
        let _ = writeln!(text, "{name}{{address=\"{address}\"}} {}", u8::from(answer.is_some()));
        answer.iter().for_each(|answer| sum.add(answer));
    }
    text + &sum.text()
}

async fn ask(address: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    stream.write_all(QUESTION).await.ok()?;
    let mut answer = Vec::new();
    stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer).await.ok()?;
    let answer = String::from_utf8(answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let is_ok = head.split(' ').nth(1) == Some("200") && body.ends_with('\n');
    is_ok.then(|| body.to_owned())
}

/// Families of several pages as those of one.
#[derive(Debug, Default)]
struct Sum {
    /// By name.
    families: BTreeMap<String, Family>,
}

#[derive(Debug, Default)]
struct Family {
    help: String,
    kind: String,
    /// In the order in which they came, as a histogram's buckets must stay.
    series: Vec<(String, f64)>,
    /// Where a series is among these.
    places: BTreeMap<String, usize>,
}

impl Sum {
    /// Another page. A family that another page has as another kind is passed over.
    fn add(&mut self, page: &str) {
        let mut helps: BTreeMap<&str, &str> = BTreeMap::new();
        let mut present = None;
        for line in page.lines() {
            if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
                helps.insert(name, help);
            } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
                present = self.family(name, kind, helps.get(name).copied().unwrap_or_default()).then_some(name);
            } else if let Some((series, value)) = line.rsplit_once(' ') {
                let family =
                    present.filter(|name| series.starts_with(name)).and_then(|name| self.families.get_mut(name));
                if let (Some(family), Ok(value)) = (family, value.parse()) {
                    family.add(series, value);
                }
            }
        }
    }

    /// Whether there is such a family now, which no role has.
    fn family(&mut self, name: &str, kind: &str, help: &str) -> bool {
        let is_name = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b':'));
        if !is_name || OWN_METRICS.iter().any(|own| name.starts_with(own)) {
            return false;
        }
        let new = || Family { help: help.to_owned(), kind: kind.to_owned(), ..Family::default() };
        self.families.entry(name.to_owned()).or_insert_with(new).kind == kind
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (name, Family { help, kind, series, .. }) in &self.families {
            header(&mut text, name, help, kind);
            for (series, value) in series {
                let _ = match value {
                    value if value.is_infinite() => {
                        writeln!(text, "{series} {}Inf", if *value > 0.0 { '+' } else { '-' })
                    }
                    value => writeln!(text, "{series} {value}"),
                };
            }
        }
        text
    }
}

impl Family {
    fn add(&mut self, series: &str, value: f64) {
        match self.places.get(series) {
            Some(&at) => self.series[at].1 += value,
            None => {
                self.places.insert(series.to_owned(), self.series.len());
                self.series.push((series.to_owned(), value));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_what_programs_count_goes_on_and_the_same_is_added() {
        let mut sum = Sum::default();
        let one = "# HELP downbeat_live 1\n# TYPE downbeat_live gauge\ndownbeat_live 1\n\
            # HELP rows_total Rows, a b\n# TYPE rows_total counter\nrows_total{model=\"a b\"} 3\n\
            # HELP nv_x x\n# TYPE nv_x gauge\nnv_x 1\n";
        let other =
            "# HELP rows_total Others\n# TYPE rows_total counter\nrows_total{model=\"a b\"} 4.5\nrows_total 1\n";
        let wrong = "# HELP rows_total Rows\n# TYPE rows_total gauge\nrows_total 100\nrows_total\n\nx 1 2 3\n";
        [one, other, wrong, "garbage", ""].iter().for_each(|page| sum.add(page));
        let expected =
            "# HELP rows_total Rows, a b\n# TYPE rows_total counter\nrows_total{model=\"a b\"} 7.5\nrows_total 1\n";
        assert_eq!(sum.text(), expected);
    }

    #[test]
    fn a_role_that_takes_connections_and_is_silent_is_waited_for_no_longer_than_that_may_take() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap().to_string();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let reached = Wait::Also.reached();
        let text = runtime.block_on(metrics_of(std::slice::from_ref(&address)));
        assert!(text.ends_with(&format!("downbeat_also_up{{address=\"{address}\"}} 0\n")), "{text}");
        assert!(Wait::Also.reached() > reached);
    }

    proptest! {
        /// The naive way: every line of every page, by name and labels.
        #[test]
        fn sums_are_those_of_all_pages(pages in proptest::collection::vec(
            proptest::collection::vec((0..3usize, 0..3usize, 0..100u32), 0..12), 0..5)) {
            let mut sum = Sum::default();
            let mut naive: BTreeMap<String, f64> = BTreeMap::new();
            for page in &pages {
                let mut families: BTreeMap<usize, Vec<(usize, u32)>> = BTreeMap::new();
                for &(family, label, value) in page {
                    families.entry(family).or_default().push((label, value));
                }
                let mut text = String::new();
                for (family, series) in families {
                    header(&mut text, &format!("m{family}"), "help", "counter");
                    for (label, value) in series {
                        let series = format!("m{family}{{l=\"{label}\"}}");
                        let _ = writeln!(text, "{series} {value}");
                        *naive.entry(series).or_default() += f64::from(value);
                    }
                }
                sum.add(&text);
            }
            let text = sum.text();
            let found: BTreeMap<String, f64> = text.lines().filter(|line| !line.starts_with('#')).map(|line| {
                let (series, value) = line.rsplit_once(' ').unwrap();
                (series.to_owned(), value.parse().unwrap())
            }).collect();
            prop_assert_eq!(found, naive);
        }
    }
}
