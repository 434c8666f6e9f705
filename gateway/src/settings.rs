//! What clients may change while the server runs: how much is logged, and which requests leave a trace there.
//!
//! A trace is one line in the log with the stages of a request, or with a collector of OpenTelemetry configured, its
//! spans. Settings that would name a file on this host cannot be changed from outside.

use std::collections::BTreeMap;

use frontend::{
    error::{InferError, invalid},
    excerpt,
};
use serde_json::{Map, Value, json};
use tracing::level_filters::LevelFilter;

/// Settings by name.
pub type Settings = Map<String, Value>;

/// How much is logged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    info: bool,
    warning: bool,
    error: bool,
    verbose_level: u32,
    format: LogFormat,
}

/// How Triton writes a line's time. Here it is always as in ISO 8601, and only what was asked for is remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LogFormat {
    Default,
    Iso8601,
}

impl LogFormat {
    const ALL: [Self; 2] = [Self::Default, Self::Iso8601];

    fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Iso8601 => "ISO8601",
        }
    }
}

impl Default for LogSettings {
    fn default() -> Self {
        Self { info: true, warning: true, error: true, verbose_level: 0, format: LogFormat::Default }
    }
}

impl LogSettings {
    /// The most verbose level that is logged.
    #[must_use]
    pub fn level(&self) -> LevelFilter {
        match self {
            Self { verbose_level: 1, .. } => LevelFilter::DEBUG,
            Self { verbose_level: 2.., .. } => LevelFilter::TRACE,
            Self { info: true, .. } => LevelFilter::INFO,
            Self { warning: true, .. } => LevelFilter::WARN,
            Self { error: true, .. } => LevelFilter::ERROR,
            _ => LevelFilter::OFF,
        }
    }

    /// These settings with some changed.
    ///
    /// # Errors
    /// If a setting is unknown, fixed, or has a wrong value.
    pub fn changed(&self, changes: &Settings) -> Result<Self, InferError> {
        let mut new = self.clone();
        for (key, value) in changes {
            let wrong = |expected: &str| invalid(key, excerpt(&value.to_string()), expected);
            let flag = || value.as_bool().ok_or_else(|| wrong("true or false"));
            match key.as_str() {
                "log_info" => new.info = flag()?,
                "log_warning" => new.warning = flag()?,
                "log_error" => new.error = flag()?,
                "log_verbose_level" => {
                    let level = value.as_u64().and_then(|level| u32::try_from(level).ok());
                    new.verbose_level = level.ok_or_else(|| wrong("a number from 0 on"))?;
                }
                "log_file" if value == "" => {}
                "log_file" => return Err(elsewhere("log", "the log goes to stderr")),
                "log_format" => {
                    let format = value.as_str().and_then(|name| LogFormat::ALL.into_iter().find(|f| f.name() == name));
                    new.format = format.ok_or_else(|| wrong("\"default\" or \"ISO8601\""))?;
                }
                _ => return Err(unknown("log setting", key, &self.report())),
            }
        }
        Ok(new)
    }

    /// All settings.
    #[must_use]
    pub fn report(&self) -> Settings {
        as_map(json!({
            "log_file": "",
            "log_info": self.info,
            "log_warning": self.warning,
            "log_error": self.error,
            "log_verbose_level": self.verbose_level,
            "log_format": self.format.name(),
        }))
    }
}

/// Which requests leave a trace, as far as somebody has said so.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct TraceSettings {
    on: Option<bool>,
    /// One request in so many.
    rate: Option<u32>,
    /// So many more; no bound if that is `None`.
    count: Option<Option<u32>>,
}

/// Where traces go, in Triton's terms. It is the operator's to choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TraceMode {
    /// The log.
    #[default]
    Triton,
    /// A collector.
    OpenTelemetry,
}

impl TraceMode {
    fn name(self) -> &'static str {
        match self {
            Self::Triton => "triton",
            Self::OpenTelemetry => "opentelemetry",
        }
    }
}

/// One request in so many, if nobody says otherwise.
const TRACE_RATE: u32 = 1000;

impl TraceSettings {
    /// The same with some changed; `null` takes back what was said.
    fn changed(&self, changes: &Settings, mode: TraceMode) -> Result<Self, InferError> {
        let mut new = self.clone();
        for (key, value) in changes {
            let wrong = |expected: &str| invalid(key, excerpt(&value.to_string()), expected);
            let number = || value.as_str().map_or_else(|| value.as_i64(), |text| text.parse().ok());
            match (key.as_str(), value) {
                ("trace_level", Value::Null) => new.on = None,
                ("trace_rate", Value::Null) => new.rate = None,
                ("trace_count", Value::Null) => new.count = None,
                ("log_frequency" | "trace_file" | "trace_mode", Value::Null) => {}
                ("trace_level", value) => {
                    new.on = Some(level(value).ok_or_else(|| wrong("[\"OFF\"] or [\"TIMESTAMPS\"]"))?);
                }
                ("trace_rate", _) => {
                    let rate = number().and_then(|rate| u32::try_from(rate).ok()).filter(|rate| *rate > 0);
                    new.rate = Some(rate.ok_or_else(|| wrong("a number from 1 on"))?);
                }
                ("trace_count", _) => match number().map(|count| (count, u32::try_from(count))) {
                    Some((-1, _)) => new.count = Some(None),
                    Some((_, Ok(count))) => new.count = Some(Some(count)),
                    _ => return Err(wrong("a number from 0 on, or -1 for no bound")),
                },
                ("log_frequency", _) if number() == Some(0) => {}
                ("log_frequency", _) => return Err(wrong("0: each trace is logged at once")),
                ("trace_file", value) if value == "" => {}
                ("trace_file", _) => return Err(elsewhere("trace", "traces go to the log, or to a collector")),
                ("trace_mode", value) if value == mode.name() => {}
                ("trace_mode", _) => {
                    let expected = format!("\"{}\", as the frontend is configured ([otlp])", mode.name());
                    return Err(wrong(&expected));
                }
                _ => return Err(unknown("trace setting", key, &self.report(mode))),
            }
        }
        Ok(new)
    }

    /// The same, and what another says where nothing is said.
    fn or(&self, other: &Self) -> Self {
        Self { on: self.on.or(other.on), rate: self.rate.or(other.rate), count: self.count.or(other.count) }
    }

    fn report(&self, mode: TraceMode) -> Settings {
        let count = self.count.flatten();
        as_map(json!({
            "trace_level": [if self.on == Some(true) { "TIMESTAMPS" } else { "OFF" }],
            "trace_rate": self.rate.unwrap_or(TRACE_RATE).to_string(),
            "trace_count": count.map_or_else(|| "-1".to_owned(), |count| count.to_string()),
            "log_frequency": "0",
            "trace_file": "",
            "trace_mode": mode.name(),
        }))
    }
}

/// True if the levels ask for time stamps, which is the only level above OFF here.
fn level(value: &Value) -> Option<bool> {
    let levels: Vec<&str> = match value {
        Value::String(level) => vec![level],
        Value::Array(levels) => levels.iter().map(Value::as_str).collect::<Option<_>>()?,
        _ => return None,
    };
    match levels.as_slice() {
        ["OFF"] => Some(false),
        ["TIMESTAMPS"] => Some(true),
        _ => None,
    }
}

/// Trace settings of the server and of single models, and how far each has got. What is not said of a model is as for
/// the server, whatever that comes to be.
#[derive(Debug, Default)]
pub struct Tracer {
    mode: TraceMode,
    server: Sampler,
    /// Models with settings of their own. Bounded by the repository: only its models are looked up.
    models: BTreeMap<String, Sampler>,
}

#[derive(Debug, Default)]
struct Sampler {
    settings: TraceSettings,
    requests: u32,
}

impl Tracer {
    /// Traces go to a collector; unless clients say otherwise, one request in `rate`, or none if that is zero.
    #[must_use]
    pub fn for_collector(rate: u32) -> Self {
        let settings = TraceSettings { on: Some(rate > 0), rate: (rate > 0).then_some(rate), count: None };
        let server = Sampler { settings, requests: 0 };
        Self { mode: TraceMode::OpenTelemetry, server, models: BTreeMap::new() }
    }

    /// The settings that hold for a model, or for the server.
    #[must_use]
    pub fn report(&self, model: Option<&str>) -> Settings {
        let own = model.and_then(|model| self.models.get(model));
        let settings = own.map(|own| own.settings.or(&self.server.settings));
        settings.unwrap_or_else(|| self.server.settings.clone()).report(self.mode)
    }

    /// Changes settings, of a model or of the server. `null` clears: to the server's for a model, else to the default.
    ///
    /// # Errors
    /// If a setting is unknown, fixed, or has a wrong value.
    pub fn change(&mut self, model: Option<&str>, changes: &Settings) -> Result<(), InferError> {
        let mode = self.mode;
        let changed = |sampler: &Sampler| {
            sampler.settings.changed(changes, mode).map(|settings| Sampler { settings, requests: 0 })
        };
        match model {
            None => self.server = changed(&self.server)?,
            Some(model) => {
                let own = changed(self.models.get(model).unwrap_or(&Sampler::default()))?;
                if own.settings == TraceSettings::default() {
                    self.models.remove(model);
                } else {
                    self.models.insert(model.to_owned(), own);
                }
            }
        }
        Ok(())
    }

    /// Whether the request that ends now leaves a trace.
    pub fn sample(&mut self, model: &str) -> bool {
        let own = self.models.get_mut(model);
        let settings = match &own {
            Some(own) => own.settings.or(&self.server.settings),
            None => self.server.settings.clone(),
        };
        let left = settings.count.flatten();
        if settings.on != Some(true) || left == Some(0) {
            return false;
        }
        // Whoever has said how many counts them.
        let counts_itself = own.as_ref().is_some_and(|own| own.settings.count.is_some());
        let sampler = own.unwrap_or(&mut self.server);
        sampler.requests = (sampler.requests + 1) % settings.rate.unwrap_or(TRACE_RATE);
        let sampled = sampler.requests == 0;
        if let Some(left) = left.filter(|_| sampled) {
            let whose = if counts_itself { sampler } else { &mut self.server };
            whose.settings.count = Some(Some(left - 1));
        }
        sampled
    }
}

/// A file that a client would have written. As Triton says it.
fn elsewhere(what: &str, where_it_goes: &str) -> InferError {
    InferError::Invalid(format!("{what} file location can not be updated through network protocol: {where_it_goes}"))
}

fn unknown(kind: &str, key: &str, known: &Settings) -> InferError {
    let known: Vec<&str> = known.keys().map(String::as_str).collect();
    invalid(kind, format_args!("'{}'", excerpt(key)), format_args!("one of: {}", known.join(", ")))
}

fn as_map(value: Value) -> Settings {
    match value {
        Value::Object(map) => map,
        other => unreachable!("{other} is written as an object here"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(value: Value) -> Settings {
        as_map(value)
    }

    #[test]
    fn log_settings_choose_the_level() {
        let log = LogSettings::default();
        assert_eq!(log.level(), LevelFilter::INFO);
        let level = |value| log.changed(&settings(value)).map(|log| log.level());
        assert_eq!(level(json!({ "log_verbose_level": 1 })), Ok(LevelFilter::DEBUG));
        assert_eq!(level(json!({ "log_info": false })), Ok(LevelFilter::WARN));
        let quiet = json!({ "log_info": false, "log_warning": false, "log_error": false });
        assert_eq!(level(quiet), Ok(LevelFilter::OFF));
        let error = |value| level(value).unwrap_err().to_string();
        assert_eq!(error(json!({ "log_info": 1 })), "log_info: found 1, expected true or false");
        let elsewhere = "log file location can not be updated through network protocol: the log goes to stderr";
        assert_eq!(error(json!({ "log_file": "/etc/passwd" })), elsewhere);
        let iso = log.changed(&settings(json!({ "log_format": "ISO8601" }))).unwrap();
        assert_eq!((&iso.report()["log_format"], &log.report()["log_format"]), (&json!("ISO8601"), &json!("default")));
        assert!(error(json!({ "log_format": 8601 })).ends_with("expected \"default\" or \"ISO8601\""));
        assert!(error(json!({ "loud": true })).starts_with("log setting: found 'loud', expected one of: log_error"));
    }

    #[test]
    fn every_nth_request_is_traced_until_the_count_is_used_up() {
        let mut tracer = Tracer::default();
        assert!(!(0..5000).any(|_| tracer.sample("m")), "off by default");
        tracer
            .change(None, &settings(json!({ "trace_level": ["TIMESTAMPS"], "trace_rate": "3", "trace_count": "2" })))
            .unwrap();
        let traced: Vec<bool> = (0..9).map(|_| tracer.sample("m")).collect();
        assert_eq!(traced, [false, false, true, false, false, true, false, false, false]);
        assert_eq!(tracer.report(None)["trace_count"], "0");
        tracer.change(Some("m"), &settings(json!({ "trace_rate": 1, "trace_count": -1 }))).unwrap();
        assert!(tracer.sample("m") && tracer.sample("m") && !tracer.sample("other"));
        tracer.change(Some("m"), &settings(json!({ "trace_rate": null }))).unwrap();
        assert_eq!(tracer.report(Some("m"))["trace_rate"], "3", "the server's");
    }

    #[test]
    fn what_is_not_said_of_a_model_follows_the_server() {
        let mut tracer = Tracer::default();
        let mut change = |model, value| {
            tracer.change(model, &settings(value)).unwrap();
            tracer.report(Some("m"))
        };
        assert_eq!(change(Some("m"), json!({ "trace_rate": "12" }))["trace_level"], json!(["OFF"]));
        let both = change(None, json!({ "trace_level": ["TIMESTAMPS"], "trace_rate": "56", "trace_count": "1" }));
        assert_eq!((&both["trace_level"], &both["trace_rate"]), (&json!(["TIMESTAMPS"]), &json!("12")));
        let cleared = change(Some("m"), json!({ "trace_rate": null }));
        assert_eq!(cleared["trace_rate"], "56");
        change(Some("m"), json!({ "trace_rate": 1 }));
        assert!(tracer.sample("m") && !tracer.sample("m"), "the server's count is used up");
        assert_eq!(tracer.report(None)["trace_count"], "0");
    }

    #[test]
    fn a_collector_gets_what_is_configured_until_clients_say_otherwise() {
        let mut tracer = Tracer::for_collector(2);
        assert_eq!(tracer.report(None)["trace_mode"], "opentelemetry");
        assert_eq!((0..4).map(|_| tracer.sample("m")).collect::<Vec<_>>(), [false, true, false, true]);
        tracer.change(None, &settings(json!({ "trace_level": null, "trace_mode": "opentelemetry" }))).unwrap();
        assert!(!tracer.sample("m") && !Tracer::for_collector(0).sample("m"));
        assert_eq!(tracer.report(None)["trace_mode"], "opentelemetry");
        assert!(tracer.change(None, &settings(json!({ "trace_mode": "triton" }))).is_err());
    }

    #[test]
    fn wrong_trace_settings_change_nothing() {
        let mut tracer = Tracer::default();
        let before = tracer.report(None);
        for (change, expected) in [
            (
                json!({ "trace_level": ["TIMESTAMPS"], "trace_rate": 0 }),
                "trace_rate: found 0, expected a number from 1",
            ),
            (json!({ "trace_level": ["TENSORS"] }), "expected [\"OFF\"] or [\"TIMESTAMPS\"]"),
            (
                json!({ "trace_file": "/tmp/x" }),
                "trace file location can not be updated through network protocol: traces go",
            ),
            (json!({ "trace_mode": "opentelemetry" }), "expected \"triton\", as the frontend is configured ([otlp])"),
            (json!({ "trace_count": -2 }), "expected a number from 0 on"),
            (json!({ "trace_colour": 1 }), "trace setting: found 'trace_colour', expected one of"),
        ] {
            let error = tracer.change(None, &settings(change)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            assert_eq!(tracer.report(None), before);
        }
    }
}
