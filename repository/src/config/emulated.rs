//! Emulated models: what each batch takes, `alpha_ms` and `beta_ms`; or, where requests take unequal times,
//! `cost_fixed_ms`, `cost_per_task` and `alone_ms`.

use std::{fs::File, io::Read as _};

use proto::{BatchCost, LatencyProfile, Span};

use super::{DataType, RepositoryError, Tensor};
use crate::{
    cell,
    config::file::ConfigFile,
    emulated::{Alone, Normal, OUTPUT, OUTPUT_ELEMENTS, TIME_MAX, UnequalTimes, is_echo},
};

/// The parameters of a model whose requests take unequal times: all of them, or none.
const FIXED: &str = "cost_fixed_ms";
const PER_TASK: &str = "cost_per_task";
const ALONE: &str = "alone_ms";

const ALONE_EXPECTED: &str = "normal:MEAN:SIGMA, or several separated by \";\", log-normal:MEDIAN:SIGMA, trace:FILE, \
                              or bytes:MS_PER_KIB";
/// The largest standard deviation of a logarithm: a time in forty is then above 350 times the median.
const SIGMA_MAX: f64 = 3.0;
/// Modes of a distribution.
const MODES_MAX: usize = 16;
/// Times of a trace.
const TRACE_MAX: usize = 1_000_000;
/// Bytes of its file: a line has as many as the longest number that is written with all of its digits.
const TRACE_BYTES_MAX: u64 = 32 * TRACE_MAX as u64;

impl ConfigFile<'_> {
    /// l(b) of an emulated model. Its outputs must be such as it can give.
    pub(super) fn emulated_profile(
        &self,
        max_batch: usize,
        (inputs, outputs): (&[Tensor], &[Tensor]),
        times: Option<&UnequalTimes>,
    ) -> Result<LatencyProfile, RepositoryError> {
        let digest = Tensor::new(OUTPUT, DataType::Uint64, vec![OUTPUT_ELEMENTS]);
        if outputs != [digest] && !is_echo(inputs, outputs) {
            let found = format!("\"{}\"", outputs[0].name);
            let expected = "only \"digest\", TYPE_UINT64, dims [ 2 ], or one for each input with its type and \
                            dims, when emulated";
            return Err(self.error("output", found, expected));
        }
        let is_given = ["alpha_ms", "beta_ms"].iter().any(|key| self.parameter(key).is_some());
        if let Some(times) = times.filter(|_| !is_given) {
            let profile = times.profile(max_batch, cell::bytes_max(inputs));
            return profile.map_err(|error| RepositoryError(format!("{}: {ALONE}: {error}", self.path.display())));
        }
        let (alpha, beta) = (self.milliseconds("alpha_ms")?, self.milliseconds("beta_ms")?);
        LatencyProfile::linear(alpha, beta, max_batch)
            .map_err(|error| RepositoryError(format!("{}: alpha_ms, beta_ms: {error}", self.path.display())))
    }

    /// What requests take, if the model is emulated and its parameters say so.
    pub(super) fn unequal_times(&self) -> Result<Option<UnequalTimes>, RepositoryError> {
        let keys = [FIXED, PER_TASK, ALONE];
        if self.executor_name() != "emulated" || keys.iter().all(|key| self.parameter(key).is_none()) {
            return Ok(None);
        }
        let needed = |key: &str, expected: &str| {
            let beside = format_args!("{expected}, as {FIXED}, {PER_TASK} and {ALONE} go together").to_string();
            self.parameter(key).ok_or_else(|| self.error(key, "none", beside))
        };
        let number = |key: &str, (least, expected): (f64, &str), largest: f64| {
            let found = needed(key, expected)?;
            let wrong = || self.error(key, format_args!("\"{found}\""), expected);
            within(&found, (least, largest)).ok_or_else(wrong)
        };
        let longest = TIME_MAX.as_millis_f64();
        let fixed = number(FIXED, (0.0, "milliseconds, 0 to 60000"), longest)?;
        let per_task = number(PER_TASK, (f64::MIN_POSITIVE, "a number above 0 and at most 1"), 1.0)?;
        let ppm = (per_task * f64::from(BatchCost::PER_TASK_MAX)).round().max(1.0) as u32;
        let alone = self.alone(&needed(ALONE, ALONE_EXPECTED)?)?;
        Ok(Some(UnequalTimes { cost: BatchCost { fixed: Span::from_millis_f64(fixed), per_task_ppm: ppm }, alone }))
    }

    fn alone(&self, text: &str) -> Result<Alone, RepositoryError> {
        let wrong = |found: &str, expected: &str| self.error(ALONE, format_args!("\"{found}\""), expected);
        let time = |found: &str, least: f64| {
            let expected =
                if least > 0.0 { "milliseconds, above 0 and at most 60000" } else { "milliseconds, 0 to 60000" };
            within(found, (least, TIME_MAX.as_millis_f64())).ok_or_else(|| wrong(found, expected))
        };
        let parts: Vec<&str> = text.split(':').collect();
        match parts[..] {
            ["normal", ..] => {
                let modes: Vec<&str> = text.split(';').collect();
                if modes.len() > MODES_MAX {
                    let expected = format!("at most {MODES_MAX} modes");
                    return Err(self.error(ALONE, format_args!("{} modes", modes.len()), expected));
                }
                let mode = |mode: &str| match mode.trim().split(':').collect::<Vec<_>>()[..] {
                    ["normal", mean, sigma] => {
                        Ok(Normal { mean_ms: time(mean, f64::MIN_POSITIVE)?, sigma_ms: time(sigma, 0.0)? })
                    }
                    _ => Err(wrong(mode, "normal:MEAN:SIGMA, as each mode is normal")),
                };
                modes.into_iter().map(mode).collect::<Result<_, _>>().map(Alone::Normals)
            }
            ["log-normal", median, sigma] => {
                let expected = format!("the logarithm's standard deviation, 0 to {SIGMA_MAX}");
                let median_ms = time(median, f64::MIN_POSITIVE)?;
                let sigma = within(sigma, (0.0, SIGMA_MAX)).ok_or_else(|| wrong(sigma, &expected))?;
                Ok(Alone::LogNormal { median_ms, sigma })
            }
            ["trace", file] => self.trace(file).map(Alone::Trace),
            ["bytes", ms_per_kib] => time(ms_per_kib, f64::MIN_POSITIVE).map(Alone::Length),
            _ => Err(wrong(text, ALONE_EXPECTED)),
        }
    }

    /// The times in a file of the model's folder, in milliseconds, one a line.
    fn trace(&self, name: &str) -> Result<Vec<f64>, RepositoryError> {
        self.check_inside(ALONE, name)?;
        let path = self.folder.join(name);
        let cannot = |error| RepositoryError(format!("{}: {error}", path.display()));
        let wrong = |line: &str, found: &str, expected: &str| {
            RepositoryError(format!("{}{line}: found {found}, expected {expected}", path.display()))
        };
        // What is no file, as a pipe, might never end.
        if !path.is_file() {
            return Err(self.error(ALONE, format_args!("\"{name}\""), "a file in the model's folder"));
        }
        let mut text = String::new();
        File::open(&path).and_then(|file| file.take(TRACE_BYTES_MAX + 1).read_to_string(&mut text)).map_err(cannot)?;
        if text.len() as u64 > TRACE_BYTES_MAX {
            return Err(wrong("", "more", &format!("at most {TRACE_BYTES_MAX} bytes")));
        }
        let mut times = Vec::new();
        for (number, line) in (1..).zip(text.lines().map(str::trim)).filter(|(_, line)| !line.is_empty()) {
            let expected = "milliseconds, above 0 and at most 60000";
            let time = within(line, (f64::MIN_POSITIVE, TIME_MAX.as_millis_f64()));
            times.push(time.ok_or_else(|| wrong(&format!(", line {number}"), &format!("{line:?}"), expected))?);
            if times.len() > TRACE_MAX {
                return Err(wrong("", "more", &format!("at most {TRACE_MAX} times")));
            }
        }
        if times.is_empty() {
            return Err(wrong("", "none", "a time in milliseconds a line"));
        }
        Ok(times)
    }
}

/// The number, unless it is no such, or outside of these bounds.
fn within(text: &str, (least, largest): (f64, f64)) -> Option<f64> {
    text.trim().parse().ok().filter(|number| (least..=largest).contains(number))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::model::Model;

    /// An emulated model of at most 4 with these parameters, beside a trace.
    fn load(parameters: &[(&str, &str)]) -> Result<Model, String> {
        let repository = tempfile::tempdir().unwrap();
        let folder = repository.path().join("m");
        fs::create_dir(&folder).unwrap();
        let parameters = parameters
            .iter()
            .map(|(key, value)| format!("parameters {{ key: \"{key}\" value {{ string_value: \"{value}\" }} }}\n"))
            .collect::<String>();
        let config = r#"
            backend: "emulated" max_batch_size: 4
            input { name: "x" data_type: TYPE_UINT8 dims: 2048 }
            output { name: "digest" data_type: TYPE_UINT64 dims: 2 }
        "#;
        fs::write(folder.join("config.pbtxt"), [config, &parameters].concat()).unwrap();
        fs::write(folder.join("times"), "1.5\n\n 2 \n").unwrap();
        fs::write(folder.join("nothing"), "\n").unwrap();
        fs::write(folder.join("nan"), "1\nNaN\n").unwrap();
        fs::write(folder.join("negative"), "-1").unwrap();
        fs::write(folder.join("many"), "1\n".repeat(TRACE_MAX + 1)).unwrap();
        // Zeros, of which no disk has any.
        File::create(folder.join("large")).unwrap().set_len(TRACE_BYTES_MAX + 1).unwrap();
        crate::load::load_model(&folder).map_err(|error| {
            let text = error.to_string();
            text.split_once("/m/").map_or(text.clone(), |(_, rest)| rest.to_owned())
        })
    }

    fn with(fixed: &str, per_task: &str, alone: &str) -> Result<Model, String> {
        load(&[(FIXED, fixed), (PER_TASK, per_task), (ALONE, alone)])
    }

    #[test]
    fn times_are_read_in_each_way_in_which_they_are_written() {
        let normal = |mean_ms, sigma_ms| Normal { mean_ms, sigma_ms };
        for (text, expected) in [
            ("normal:50:5", Alone::Normals(vec![normal(50.0, 5.0)])),
            ("normal:20:0; normal:100.5:3", Alone::Normals(vec![normal(20.0, 0.0), normal(100.5, 3.0)])),
            ("log-normal:50:0.5", Alone::LogNormal { median_ms: 50.0, sigma: 0.5 }),
            ("trace:times", Alone::Trace(vec![1.5, 2.0])),
            ("bytes:4", Alone::Length(4.0)),
        ] {
            let model = with("2", "0.25", text).unwrap();
            let cost = BatchCost { fixed: Span::from_millis(2), per_task_ppm: 250_000 };
            let found = model.configuration.unequal_times().unwrap();
            assert_eq!(**found, UnequalTimes { cost, alone: expected });
        }
    }

    #[test]
    fn l_of_b_is_what_the_model_says_or_else_that_of_the_mean() {
        let unequal = [(FIXED, "2"), (PER_TASK, "0.25"), (ALONE, "bytes:5")];
        let profile = |parameters: &[(&str, &str)]| load(parameters).unwrap().executor;
        let expected =
            |alpha, beta| crate::model::Executor::Emulated { profile: LatencyProfile::linear(alpha, beta, 4).unwrap() };
        assert_eq!(profile(&unequal), expected(2.0, 8.0), "10 ms for 2 KiB");
        let own = [("alpha_ms", "1"), ("beta_ms", "3")];
        assert_eq!(profile(&[&unequal[..], &own].concat()), expected(1.0, 3.0));
        assert_eq!(load(&own).unwrap().configuration.unequal_times(), None);
        let half = load(&[&unequal[..], &own[..1]].concat()).unwrap_err();
        assert!(half.starts_with("config.pbtxt: beta_ms: found none, expected milliseconds"), "{half}");
    }

    #[test]
    fn what_is_missing_or_wrong_is_named_with_what_was_expected() {
        let fixed = "cost_fixed_ms: found \"TEXT\", expected milliseconds, 0 to 60000";
        let per_task = "cost_per_task: found \"TEXT\", expected a number above 0 and at most 1";
        for text in ["NaN", "inf", "-1", "60001", "much", ""] {
            assert_eq!(with(text, "1", "bytes:1").unwrap_err(), format!("config.pbtxt: {fixed}").replace("TEXT", text));
        }
        for text in ["NaN", "inf", "-1", "0", "1.1", "much"] {
            let expected = format!("config.pbtxt: {per_task}").replace("TEXT", text);
            assert_eq!(with("0", text, "bytes:1").unwrap_err(), expected);
        }
        for (keys, missing) in [
            (
                &[(FIXED, "1"), (ALONE, "bytes:1")][..],
                "cost_per_task: found none, expected a number above 0 and at most 1",
            ),
            (&[(PER_TASK, "1"), (ALONE, "bytes:1")], "cost_fixed_ms: found none, expected milliseconds, 0 to 60000"),
            (&[(FIXED, "1"), (PER_TASK, "1")], "alone_ms: found none, expected normal:MEAN:SIGMA, or several"),
        ] {
            let error = load(keys).unwrap_err();
            assert!(error.starts_with(&format!("config.pbtxt: {missing}")), "{error}");
            assert!(error.ends_with(", as cost_fixed_ms, cost_per_task and alone_ms go together"), "{error}");
        }
    }

    #[test]
    fn no_time_is_read_that_is_unknown_endless_or_no_number() {
        let above_0 = "milliseconds, above 0 and at most 60000";
        let kinds = format!("expected {ALONE_EXPECTED}");
        let modes = vec!["normal:1:1"; MODES_MAX + 1].join(";");
        for (text, expected) in [
            ("gamma:1:2", format!("config.pbtxt: alone_ms: found \"gamma:1:2\", {kinds}")),
            ("", format!("config.pbtxt: alone_ms: found \"\", {kinds}")),
            ("log-normal:5", format!("config.pbtxt: alone_ms: found \"log-normal:5\", {kinds}")),
            ("normal:NaN:1", format!("config.pbtxt: alone_ms: found \"NaN\", expected {above_0}")),
            ("normal:0:1", format!("config.pbtxt: alone_ms: found \"0\", expected {above_0}")),
            ("normal:60001:1", format!("config.pbtxt: alone_ms: found \"60001\", expected {above_0}")),
            ("normal:1:-1", "config.pbtxt: alone_ms: found \"-1\", expected milliseconds, 0 to 60000".into()),
            ("normal:1:inf", "config.pbtxt: alone_ms: found \"inf\", expected milliseconds, 0 to 60000".into()),
            (
                "normal:1:1;bytes:2",
                "config.pbtxt: alone_ms: found \"bytes:2\", expected normal:MEAN:SIGMA, as each mode is normal".into(),
            ),
            (&modes, "config.pbtxt: alone_ms: found 17 modes, expected at most 16 modes".into()),
            ("log-normal:inf:1", format!("config.pbtxt: alone_ms: found \"inf\", expected {above_0}")),
            (
                "log-normal:1:NaN",
                "config.pbtxt: alone_ms: found \"NaN\", expected the logarithm's standard deviation, 0 to 3".into(),
            ),
            ("bytes:-1", format!("config.pbtxt: alone_ms: found \"-1\", expected {above_0}")),
            ("bytes:inf", format!("config.pbtxt: alone_ms: found \"inf\", expected {above_0}")),
            (
                "trace:../m/times",
                "config.pbtxt: alone_ms: found \"../m/times\", expected a file below the model's folder".into(),
            ),
            ("trace:gone", "config.pbtxt: alone_ms: found \"gone\", expected a file in the model's folder".into()),
            ("trace:nothing", "nothing: found none, expected a time in milliseconds a line".into()),
            ("trace:nan", format!("nan, line 2: found \"NaN\", expected {above_0}")),
            ("trace:negative", format!("negative, line 1: found \"-1\", expected {above_0}")),
            ("trace:many", "many: found more, expected at most 1000000 times".into()),
            ("trace:large", "large: found more, expected at most 32000000 bytes".into()),
        ] {
            assert_eq!(with("0", "1", text).unwrap_err(), expected);
        }
    }
}
