//! What is answered: health in a word, metrics in Prometheus's text format.

use std::{fmt::Write as _, path::Path};

use hyper::StatusCode;
use proto::{Timestamp, WireVersion};

use crate::{network, process, ui, vitals::Vitals};

/// An answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Page {
    pub(crate) status: StatusCode,
    pub(crate) content_type: &'static str,
    /// Header fields besides those of all answers.
    pub(crate) fields: &'static [(&'static str, &'static str)],
    pub(crate) body: String,
}

impl Page {
    fn text(status: StatusCode, body: String) -> Self {
        Self { status, content_type: "text/plain; version=0.0.4; charset=utf-8", fields: &[], body }
    }

    fn json(body: String) -> Self {
        Self { status: StatusCode::OK, content_type: "application/json", fields: &[], body }
    }
}

/// What answers a query with JSON, or one line that says what is wrong with it.
type Json = Box<dyn Fn(Timestamp, &str) -> Result<String, String> + Send>;

/// What a role tells of itself.
pub struct Pages {
    role: &'static str,
    name: String,
    vitals: Vitals,
    /// Metrics of the role's own.
    more: Box<dyn Fn(Timestamp) -> String + Send>,
    /// Pages of the role's own, by their paths.
    own: Vec<(&'static str, Json)>,
}

impl Pages {
    /// Of a role that operators call `name`; `more` has metrics of its own, and must not wait for a thread that may
    /// stall.
    pub fn new(
        role: &'static str,
        name: impl Into<String>,
        vitals: Vitals,
        more: impl Fn(Timestamp) -> String + Send + 'static,
    ) -> Self {
        Self { role, name: name.into(), vitals, more: Box::new(more), own: Vec::new() }
    }

    /// With one more page of JSON, at this path. It gets the query, and must not wait for a thread that may stall.
    #[must_use]
    pub fn with_json(
        mut self,
        path: &'static str,
        json: impl Fn(Timestamp, &str) -> Result<String, String> + Send + 'static,
    ) -> Self {
        self.own.push((path, Box::new(json)));
        self
    }

    pub(crate) fn vitals(&self) -> &Vitals {
        &self.vitals
    }

    /// What is answered to a target: a path, and perhaps a query.
    ///
    /// # Errors
    /// What is there instead, if nothing is at that path.
    pub(crate) fn of(&self, now: Timestamp, target: &str) -> Result<Page, String> {
        let health = |health: Result<(), String>, not: &str| match health {
            Ok(()) => Page::text(StatusCode::OK, "ok\n".to_owned()),
            Err(why) => Page::text(StatusCode::SERVICE_UNAVAILABLE, format!("{not}: {why}\n")),
        };
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        if let Some((_, json)) = self.own.iter().find(|(own, _)| path == *own) {
            return Ok(match json(now, query) {
                Ok(body) => Page::json(body),
                Err(wrong) => Page::text(StatusCode::BAD_REQUEST, wrong + "\n"),
            });
        }
        match path {
            "/livez" => Ok(health(self.vitals.live(now), "stalled")),
            "/readyz" => Ok(health(self.vitals.ready(now), "not ready")),
            "/metrics" => Ok(Page::text(StatusCode::OK, self.metrics(now))),
            "/ui/state" => Ok(Page::json(self.state(now))),
            _ if path == ui::ELSEWHERE.0 => {
                let to = Page::text(StatusCode::PERMANENT_REDIRECT, String::new());
                Ok(Page { fields: ui::ELSEWHERE.1, ..to })
            }
            _ => match ui::file(path) {
                Some((content_type, text)) => {
                    Ok(Page { status: StatusCode::OK, content_type, fields: ui::FIELDS, body: text.to_owned() })
                }
                None => Err(self.what_is_here()),
            },
        }
    }

    fn what_is_here(&self) -> String {
        let all = ["/livez", "/readyz", "/metrics", "/ui"].into_iter().chain(self.own.iter().map(|(path, _)| *path));
        let all: Vec<&str> = all.collect();
        let (last, others) = all.split_last().expect("there are four at least");
        format!("only {} and {last} are here\n", others.join(", "))
    }

    /// Who this is, and why it is not well, for the page.
    fn state(&self, now: Timestamp) -> String {
        let (live, ready) = (self.vitals.live(now).err(), self.vitals.ready(now).err());
        let state = serde_json::json!({
            "role": self.role, "name": self.name, "version": env!("CARGO_PKG_VERSION"),
            "not_live": live, "not_ready": ready,
        });
        state.to_string() + "\n"
    }

    fn metrics(&self, now: Timestamp) -> String {
        let (vitals, mut text) = (&self.vitals, String::new());
        text.push_str(&about_process(self.role, &self.name));
        let flags = [
            ("downbeat_live", "1 if all threads move", vitals.live(now).is_ok()),
            ("downbeat_ready", "1 if it serves", vitals.ready(now).is_ok()),
        ];
        for (name, help, is_well) in flags {
            header(&mut text, name, help, "gauge");
            let _ = writeln!(text, "{name} {}", u8::from(is_well));
        }
        let name = "downbeat_thread_silence_seconds";
        header(&mut text, name, "How long ago a thread had a turn", "gauge");
        for (thread, silence) in vitals.silences(now) {
            let _ = writeln!(text, "{name}{{thread=\"{thread}\"}} {}", silence.as_millis_f64() / 1e3);
        }
        text.push_str(&network::metrics(&transport::traffic(), Path::new("/sys")));
        text.push_str(&(self.more)(now));
        text
    }
}

/// How the names of metrics begin that roles have; what programs of models count has other names.
pub const OWN_METRICS: [&str; 3] = ["downbeat_", "nv_", "process_"];

/// A text as Prometheus's format wants it in the value of a label.
#[must_use]
pub fn label_value(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Which release this process is, how operators call it, and what it takes of its host, in Prometheus's text format.
/// Names have no character that has to be escaped.
#[must_use]
pub fn about_process(role: &str, name: &str) -> String {
    let mut text = String::new();
    header(&mut text, "downbeat_build_info", "1: which release this is, and how operators call it", "gauge");
    let (version, wire) = (env!("CARGO_PKG_VERSION"), WireVersion::THIS);
    let labels = format!("version=\"{version}\",wire=\"{wire}\",role=\"{role}\",name=\"{name}\"");
    let _ = writeln!(text, "downbeat_build_info{{{labels}}} 1");
    text.push_str(&certificates(&transport::certificates_end()));
    text + &process::metrics()
}

/// When they end, by the keys that name their files.
fn certificates(ends: &[(String, i64)]) -> String {
    let (mut text, name) = (String::new(), "downbeat_certificate_ends_timestamp_seconds");
    if !ends.is_empty() {
        header(
            &mut text,
            name,
            "When the certificate ends that this key names, or one between it and its authority",
            "gauge",
        );
    }
    for (key, end) in ends {
        let _ = writeln!(text, "{name}{{key=\"{key}\"}} {end}");
    }
    text
}

pub(crate) fn header(text: &mut String, name: &str, help: &str, kind: &str) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

#[cfg(test)]
mod tests {
    use proto::Span;

    use super::*;

    #[test]
    fn pages_tell_health_and_metrics() {
        let vitals = Vitals::default();
        vitals.heart("model-0").beat(Timestamp::ZERO);
        vitals.set_ready(Ok(()));
        let pages = Pages::new("scheduler", "a-1", vitals, |_| "more 1\n".to_owned());
        let at = |ms| Timestamp::ZERO + Span::from_millis(ms);
        let told = |ms, target| pages.of(at(ms), target).map(|page| (page.status, page.body));
        let unavailable = StatusCode::SERVICE_UNAVAILABLE;
        assert_eq!(told(1_500, "/livez"), Ok((StatusCode::OK, "ok\n".to_owned())));
        let stalled = "thread model-0 has done nothing for 2.500 s\n";
        assert_eq!(told(2_500, "/livez?verbose"), Ok((unavailable, format!("stalled: {stalled}"))));
        assert_eq!(told(2_500, "/readyz"), Ok((unavailable, format!("not ready: {stalled}"))));
        assert_eq!(told(0, "/"), Err("only /livez, /readyz, /metrics and /ui are here\n".to_owned()));
        let (status, text) = told(2_500, "/metrics").unwrap();
        assert!(status == StatusCode::OK && text.ends_with("more 1\n"));
        for line in [
            "downbeat_live 0",
            "downbeat_ready 0",
            "downbeat_thread_silence_seconds{thread=\"model-0\"} 2.5",
            "# TYPE process_cpu_seconds_total counter",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        assert!(text.contains(&format!("wire=\"{}\",role=\"scheduler\",name=\"a-1\"}} 1\n", WireVersion::THIS)));
    }

    #[test]
    fn the_ends_of_certificates_are_told_where_there_are_any() {
        assert_eq!(certificates(&[]), "");
        let told = certificates(&[("clients.tls.certificate".to_owned(), 1_898_553_600)]);
        let line = "downbeat_certificate_ends_timestamp_seconds{key=\"clients.tls.certificate\"} 1898553600";
        assert_eq!(told.lines().last(), Some(line));
    }

    #[test]
    fn what_would_end_a_label_is_escaped() {
        assert_eq!(label_value("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
    }

    #[test]
    fn the_page_s_files_name_no_place_but_their_own() {
        let pages = Pages::new("frontend", "door", Vitals::default(), |_| String::new());
        let told = |target| pages.of(Timestamp::ZERO, target).unwrap();
        for path in ["/ui", "/ui?x", "/ui/page.css", "/ui/page.js"] {
            let page = told(path);
            assert!(page.status == StatusCode::OK && page.fields == ui::FIELDS, "{path}");
            // Absolute paths and other hosts would leave a proxy's prefix; style and script stand in files.
            for wrong in ["://", "=\"/", "url(", "@import", "style=", "onclick=", "innerHTML", "eval("] {
                assert!(!page.body.contains(wrong), "{path}: {wrong}");
            }
        }
        let state: serde_json::Value = serde_json::from_str(&told("/ui/state").body).unwrap();
        assert!(state["role"] == "frontend" && state["name"] == "door" && state["not_live"].is_null(), "{state}");
        assert_eq!(state["not_ready"], "it is about to start");
        let elsewhere = told("/ui/");
        let to = (StatusCode::PERMANENT_REDIRECT, &[("location", "../ui")][..]);
        assert_eq!((elsewhere.status, elsewhere.fields), to);
        assert!(pages.of(Timestamp::ZERO, "/ui/page.rs").is_err());
    }

    #[test]
    fn a_page_of_the_role_s_own_gets_the_query_and_may_refuse_it() {
        let own = |_, query: &str| {
            if query == "page=0" { Ok("{}\n".to_owned()) } else { Err(format!("page: found {query}")) }
        };
        let pages = Pages::new("scheduler", "a-1", Vitals::default(), |_| String::new()).with_json("/v2/cluster", own);
        let pages = pages.with_json("/debug/trace", |_, _| Ok("[]\n".to_owned()));
        let told = |target| pages.of(Timestamp::ZERO, target).map(|page| (page.status, page.content_type, page.body));
        assert_eq!(told("/v2/cluster?page=0"), Ok((StatusCode::OK, "application/json", "{}\n".to_owned())));
        let (status, _, body) = told("/v2/cluster?x").unwrap();
        assert_eq!((status, body.as_str()), (StatusCode::BAD_REQUEST, "page: found x\n"));
        assert_eq!(told("/debug/trace").unwrap().2, "[]\n");
        assert!(told("/v2/clusters").unwrap_err().contains("/ui, /v2/cluster and /debug/trace are here"));
    }
}
