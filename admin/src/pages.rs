//! What is answered: health in a word, metrics in Prometheus's text format.

use std::fmt::Write as _;

use proto::{Timestamp, WireVersion};

use crate::{process, vitals::Vitals};

/// An answer.
pub(crate) struct Page {
    /// Whether it is a good one.
    pub(crate) is_well: bool,
    pub(crate) body: String,
}

/// What a role tells of itself.
pub struct Pages {
    role: &'static str,
    name: String,
    vitals: Vitals,
    /// Metrics of the role's own.
    more: Box<dyn Fn(Timestamp) -> String + Send>,
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
        Self { role, name: name.into(), vitals, more: Box::new(more) }
    }

    /// The page at a path, if there is one.
    pub(crate) fn of(&self, now: Timestamp, path: &str) -> Option<Page> {
        let health = |health: Result<(), String>, not: &str| match health {
            Ok(()) => Page { is_well: true, body: "ok\n".to_owned() },
            Err(why) => Page { is_well: false, body: format!("{not}: {why}\n") },
        };
        match path {
            "/livez" => Some(health(self.vitals.live(now), "stalled")),
            "/readyz" => Some(health(self.vitals.ready(now), "not ready")),
            "/metrics" => Some(Page { is_well: true, body: self.metrics(now) }),
            _ => None,
        }
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
        text.push_str(&(self.more)(now));
        text
    }
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
    text + &process::metrics()
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
        let told = |ms, path| pages.of(at(ms), path).map(|page| (page.is_well, page.body));
        assert_eq!(told(1_500, "/livez"), Some((true, "ok\n".to_owned())));
        let stalled = "thread model-0 has done nothing for 2.500 s\n";
        assert_eq!(told(2_500, "/livez"), Some((false, format!("stalled: {stalled}"))));
        assert_eq!(told(2_500, "/readyz"), Some((false, format!("not ready: {stalled}"))));
        assert!(told(0, "/").is_none());
        let (is_well, text) = told(2_500, "/metrics").unwrap();
        assert!(is_well && text.ends_with("more 1\n"));
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
}
