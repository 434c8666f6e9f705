//! What clients may change while the server runs: how much is logged, and which requests leave a trace there.
//!
//! A trace is one line in the log with the stages of a request, or one in a file, or with a collector of OpenTelemetry
//! configured, its spans. Settings that would name a file on this host cannot be changed from outside.

use std::{collections::BTreeMap, path::Path};

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
    level: Option<Level>,
    /// One request in so many.
    rate: Option<u32>,
    /// So many more; no bound if that is `None`.
    count: Option<Option<u32>>,
    /// As Triton has it, traces in a file before the next one. Here it is only remembered: each is written at once.
    log_frequency: Option<u32>,
}

/// What a trace holds; nothing is none. Tensors are only remembered: no trace has them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Level {
    timestamps: bool,
    tensors: bool,
}

impl Level {
    /// `None` if the value is no such list.
    fn read(value: &Value) -> Option<Self> {
        let levels: Vec<&str> = match value {
            Value::String(level) => vec![level],
            Value::Array(levels) => levels.iter().map(Value::as_str).collect::<Option<_>>()?,
            _ => return None,
        };
        let all = |known: &[&str]| !levels.is_empty() && levels.iter().all(|level| known.contains(level));
        match () {
            () if all(&["OFF"]) => Some(Self::default()),
            () if all(&["TIMESTAMPS", "TENSORS"]) => {
                let [timestamps, tensors] = ["TIMESTAMPS", "TENSORS"].map(|level| levels.contains(&level));
                Some(Self { timestamps, tensors })
            }
            () => None,
        }
    }

    fn names(self) -> Vec<&'static str> {
        let names = [(self == Self::default(), "OFF"), (self.timestamps, "TIMESTAMPS"), (self.tensors, "TENSORS")];
        names.into_iter().filter(|(is_set, _)| *is_set).map(|(_, name)| name).collect()
    }
}

/// Where traces go. It is the operator's to choose.
#[derive(Debug, Default)]
struct TracePlace {
    mode: TraceMode,
    /// Empty if it is no file.
    file: String,
}

/// The same in Triton's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TraceMode {
    /// The log, or a file.
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
    fn changed(&self, changes: &Settings, place: &TracePlace) -> Result<Self, InferError> {
        let mut new = self.clone();
        for (key, value) in changes {
            let wrong = |expected: &str| invalid(key, excerpt(&value.to_string()), expected);
            let number = || value.as_str().map_or_else(|| value.as_i64(), |text| text.parse().ok());
            match (key.as_str(), value) {
                ("trace_level", Value::Null) => new.level = None,
                ("trace_rate", Value::Null) => new.rate = None,
                ("trace_count", Value::Null) => new.count = None,
                ("log_frequency", Value::Null) => new.log_frequency = None,
                ("trace_file" | "trace_mode", Value::Null) => {}
                ("trace_level", value) => {
                    let expected = "[\"OFF\"], [\"TIMESTAMPS\"] or [\"TIMESTAMPS\", \"TENSORS\"]";
                    new.level = Some(Level::read(value).ok_or_else(|| wrong(expected))?);
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
                ("log_frequency", _) => {
                    let frequency = number().and_then(|number| u32::try_from(number).ok());
                    new.log_frequency = Some(frequency.ok_or_else(|| wrong("a number from 0 on"))?);
                }
                ("trace_file", value) if *value == place.file => {}
                ("trace_file", _) => {
                    return Err(elsewhere("trace", "traces go to the log, or where [trace] or [otlp] say"));
                }
                ("trace_mode", value) if value == place.mode.name() => {}
                ("trace_mode", _) => {
                    let expected = format!("\"{}\", as the frontend is configured ([otlp])", place.mode.name());
                    return Err(wrong(&expected));
                }
                _ => return Err(unknown("trace setting", key, &self.report(place))),
            }
        }
        Ok(new)
    }

    /// The same, and what another says where nothing is said.
    fn or(&self, other: &Self) -> Self {
        Self {
            level: self.level.or(other.level),
            rate: self.rate.or(other.rate),
            count: self.count.or(other.count),
            log_frequency: self.log_frequency.or(other.log_frequency),
        }
    }

    fn report(&self, place: &TracePlace) -> Settings {
        let count = self.count.flatten();
        as_map(json!({
            "trace_level": self.level.unwrap_or_default().names(),
            "trace_rate": self.rate.unwrap_or(TRACE_RATE).to_string(),
            "trace_count": count.map_or_else(|| "-1".to_owned(), |count| count.to_string()),
            "log_frequency": self.log_frequency.unwrap_or_default().to_string(),
            "trace_file": place.file,
            "trace_mode": place.mode.name(),
        }))
    }
}

/// Trace settings of the server and of single models, and how far each has got. What is not said of a model is as for
/// the server, whatever that comes to be, and what is not said of that as it was configured.
#[derive(Debug, Default)]
pub struct Tracer {
    place: TracePlace,
    configured: TraceSettings,
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
        Self::configured(TracePlace { mode: TraceMode::OpenTelemetry, file: String::new() }, rate)
    }

    /// The same, where they go to a file, or to the log if there is none.
    #[must_use]
    pub fn for_file(file: Option<&Path>, rate: u32) -> Self {
        let file = file.map_or(String::new(), |file| file.display().to_string());
        Self::configured(TracePlace { mode: TraceMode::Triton, file }, rate)
    }

    fn configured(place: TracePlace, rate: u32) -> Self {
        let level = Some(Level { timestamps: rate > 0, tensors: false });
        let configured = TraceSettings { level, rate: (rate > 0).then_some(rate), ..TraceSettings::default() };
        Self { place, configured, ..Self::default() }
    }

    /// The settings that hold for a model, or for the server.
    #[must_use]
    pub fn report(&self, model: Option<&str>) -> Settings {
        let own = model.and_then(|model| self.models.get(model));
        let settings = self.server.settings.or(&self.configured);
        own.map_or_else(|| settings.clone(), |own| own.settings.or(&settings)).report(&self.place)
    }

    /// Changes settings, of a model or of the server. `null` clears: to the server's for a model, else to what is
    /// configured.
    ///
    /// # Errors
    /// If a setting is unknown, fixed, or has a wrong value.
    pub fn change(&mut self, model: Option<&str>, changes: &Settings) -> Result<(), InferError> {
        let place = &self.place;
        let changed = |sampler: &Sampler| {
            sampler.settings.changed(changes, place).map(|settings| Sampler { settings, requests: 0 })
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
        let settings = self.server.settings.or(&self.configured);
        let settings = own.as_ref().map_or_else(|| settings.clone(), |own| own.settings.or(&settings));
        let left = settings.count.flatten();
        if !settings.level.is_some_and(|level| level.timestamps) || left == Some(0) {
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
        tracer.change(None, &settings(json!({ "trace_level": "OFF", "trace_mode": "opentelemetry" }))).unwrap();
        assert!(!tracer.sample("m") && !Tracer::for_collector(0).sample("m"));
        tracer.change(None, &settings(json!({ "trace_level": null }))).unwrap();
        assert_eq!((0..4).map(|_| tracer.sample("m")).collect::<Vec<_>>(), [false, true, false, true], "as configured");
        assert_eq!(tracer.report(None)["trace_mode"], "opentelemetry");
        assert!(tracer.change(None, &settings(json!({ "trace_mode": "triton" }))).is_err());
    }

    #[test]
    fn a_file_is_the_operators_to_name() {
        let mut tracer = Tracer::for_file(Some(Path::new("/var/log/traces.json")), 1);
        let told = tracer.report(Some("m"));
        let expected = (json!("/var/log/traces.json"), json!("triton"), json!(["TIMESTAMPS"]), json!("1"));
        let found = ["trace_file", "trace_mode", "trace_level", "trace_rate"].map(|key| told[key].clone());
        assert_eq!(<(Value, Value, Value, Value)>::from(found), expected);
        assert!(tracer.sample("m"));
        tracer.change(None, &settings(json!({ "trace_file": "/var/log/traces.json", "trace_rate": 5 }))).unwrap();
        assert!(tracer.change(None, &settings(json!({ "trace_file": "" }))).is_err() && !tracer.sample("m"));
        let remembered = json!({ "trace_level": ["TENSORS", "TIMESTAMPS"], "log_frequency": "34", "trace_rate": 1 });
        tracer.change(Some("m"), &settings(remembered)).unwrap();
        let told_of_model = tracer.report(Some("m"));
        let found = (&told_of_model["trace_level"], &told_of_model["log_frequency"]);
        assert_eq!((found, tracer.sample("m")), ((&json!(["TIMESTAMPS", "TENSORS"]), &json!("34")), true));
        tracer.change(Some("m"), &settings(json!({ "trace_level": "TENSORS" }))).unwrap();
        assert!(!tracer.sample("m"), "no trace has tensors");
        tracer.change(None, &settings(json!({ "trace_rate": null }))).unwrap();
        assert_eq!(tracer.report(None), told);
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
            (json!({ "trace_level": ["OFF", "TENSORS"] }), "expected [\"OFF\"], [\"TIMESTAMPS\"] or"),
            (json!({ "trace_level": [] }), "expected [\"OFF\"], [\"TIMESTAMPS\"] or"),
            (json!({ "log_frequency": "-1" }), "log_frequency: found \"-1\", expected a number from 0 on"),
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
