//! What a backend and the program that runs a model for it say to each other (docs/process.md): a JSON object on each
//! line, over a socket. Tensors are not in it: a line says where in the shared memory they lie.
//!
//! Tasks whose tensors have the same shapes are a group, and come as whole tensors. If the sizes of a model's tensors
//! do not differ between requests, a batch is one group. A program answers its tasks in groups of its own, since
//! outputs may differ in shape where inputs do not, and some tasks may fail.
//!
//! While it runs a batch a program may call other models, several at once. The tensors of a call, and of its answer,
//! follow their line as bytes: nobody knows beforehand how large they are.
//!
//! Metrics of a program's own come as what changes, not as what they are: several processes of a model add to the same
//! ones, and what a process has counted is not lost with it.
//!
//! Nothing that a program says is believed: a line has a bound, places are checked against the area that the program
//! may write, and the bytes behind a call are counted before they are read.

use std::{borrow::Cow, collections::BTreeMap};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The version of all this.
pub const PROTOCOL: u32 = 2;
/// The longest line of a program, with its end: room for some kilobytes about each task of the largest batch.
pub const LINE_BYTES_MAX: usize = 1 << 20;
const _: () = assert!(LINE_BYTES_MAX >= 4_096 * crate::LatencyProfile::MAX_BATCH);
/// Tensors lie at multiples of this, so that a program can look at them as what they are.
pub const ALIGNMENT_BYTES: u64 = 64;

/// What a backend says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToProgram {
    /// First of all, once.
    Model(Box<ModelTold>),
    /// Instead of a model, and then nothing else: what is known of its configuration, which lacks tensors.
    Complete(Box<CompleteTold>),
    /// A batch to run. The next one comes when this one is answered.
    Batch(Batch),
    /// What became of a call. It may be one of a batch that has been answered.
    Called(Called),
    /// What became of changes to metrics whose outcome the program wants to know.
    Metrics(MetricsTold),
}

/// What a program says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromProgram {
    /// The model is loaded, and batches may come.
    Ready {
        /// The version that the program speaks: [`PROTOCOL`].
        protocol: u32,
    },
    /// What the configuration lacked, and may have besides: in Triton's fields.
    Config(serde_json::Value),
    /// The model cannot be loaded, or its configuration not completed, for this reason.
    Refused(String),
    /// A batch has run.
    Done {
        /// The batch's.
        id: u64,
        /// What became of all its tasks, in its order.
        groups: Vec<Answered>,
    },
    /// A batch cannot be run; the next one may.
    Failed {
        /// The batch's.
        id: u64,
        /// Why.
        reason: String,
    },
    /// Another model is to be asked.
    Call(Call),
    /// Metrics of its own change. It may say so before it is ready, too.
    Metrics(MetricsSaid),
}

/// Changes to a program's own metrics, one after another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MetricsSaid {
    /// Comes back with what became of the last change. Without it nothing comes back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    /// Those after one that is refused are not made.
    pub changes: Vec<MetricChange>,
}

/// A change to a program's own metrics.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MetricChange {
    /// There is to be a family; nothing if there is.
    Family {
        /// As Prometheus names metrics.
        name: String,
        /// Its help.
        #[serde(default)]
        description: String,
        /// That of all its metrics.
        kind: MetricKind,
    },
    /// There is to be a metric; nothing if there is.
    Metric {
        /// The name of its family.
        family: String,
        /// What tells it from the others of its family.
        #[serde(default)]
        labels: BTreeMap<String, String>,
        /// The upper bounds of a histogram's buckets, ascending, without that which holds all.
        #[serde(default)]
        buckets: Vec<f64>,
    },
    /// A counter or a gauge is to be larger by so much; a gauge may be less.
    Increment(MetricValue),
    /// A gauge is to be so much.
    Set(MetricValue),
    /// A histogram is to count this.
    Observe(MetricValue),
}

/// A metric, and a value for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MetricValue {
    /// The name of its family.
    pub family: String,
    /// What tells it from the others of its family.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// In the unit that the family's name tells.
    pub value: f64,
}

/// What a metric counts, by Prometheus's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MetricKind {
    /// What only grows.
    Counter,
    /// What grows and shrinks.
    Gauge,
    /// How often values were how large.
    Histogram,
}

/// What became of changes to metrics.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MetricsTold {
    /// The program's.
    pub id: u64,
    /// What the metric of the last change is now; nothing of families, of histograms, and where metrics are not kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// Why a change was not made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

impl MetricKind {
    /// Prometheus's word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// What another model is to be asked. Its tensors' bytes follow the line, one tensor after another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Comes back with the answer.
    pub id: u64,
    /// The model or ensemble.
    pub model: String,
    /// Its version; as requests without one if it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The outputs that are wanted; all if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<String>,
    /// The latency objective; the model's own if it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_us: Option<u64>,
    /// All that the model is given.
    pub inputs: Vec<Carried>,
}

/// What became of a call. Its tensors' bytes follow the line, one tensor after another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Called {
    /// The call's.
    pub id: u64,
    /// What the model has answered; nothing if it has not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<Carried>,
    /// Why it has not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// A tensor whose bytes follow the line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carried {
    /// Its name.
    pub name: String,
    /// As the Open Inference Protocol spells it.
    pub datatype: String,
    /// With the dimension for tasks, if the model has it.
    pub shape: Vec<usize>,
    /// How long it is, in the form of [`Placed::bytes`].
    pub bytes: usize,
}

impl Call {
    /// Bytes that follow its line; `None` if that is no number that there is.
    #[must_use]
    pub fn bytes(&self) -> Option<usize> {
        self.inputs.iter().try_fold(0usize, |sum, input| sum.checked_add(input.bytes))
    }
}

/// A model, as its program is told of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelTold {
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Its folder in the repository.
    pub folder: String,
    /// Its file or program.
    pub file: String,
    /// Tasks of a batch, at most.
    pub max_batch: usize,
    /// Whether tensors have a first dimension for the tasks. If not, a batch is one task.
    pub is_batched: bool,
    /// What it takes.
    pub inputs: Vec<TensorTold>,
    /// What it gives.
    pub outputs: Vec<TensorTold>,
    /// Bytes of the shared memory.
    pub memory_bytes: u64,
    /// Where in it the program writes outputs.
    pub output_area: Area,
    /// The configuration, as JSON in Triton's fields.
    pub config: serde_json::Value,
}

/// A model whose configuration is to be completed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CompleteTold {
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Its folder in the repository.
    pub folder: String,
    /// Its file or program.
    pub file: String,
    /// The configuration as far as it is known, as JSON in Triton's fields.
    pub config: serde_json::Value,
}

/// A tensor of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorTold {
    /// Its name.
    pub name: String,
    /// As the Open Inference Protocol spells it.
    pub datatype: String,
    /// Without the dimension for tasks; -1 for a length that requests choose.
    pub shape: Vec<i64>,
    /// Requests may leave it out.
    pub optional: bool,
    /// Bytes of one task's elements, at most.
    pub bytes_max: u64,
}

/// A batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// Comes back with the answer.
    pub id: u64,
    /// One after another, at least one.
    pub groups: Vec<Group>,
}

/// Tasks of a batch whose inputs have the same shapes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// How many, at least one.
    pub tasks: usize,
    /// One for each of the model's inputs, in its order; nothing for one that is left out.
    pub inputs: Vec<Option<Placed>>,
}

/// Tasks that follow each other in a batch, and what became of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answered {
    /// How many, at least one. They need not be those of a group.
    pub tasks: usize,
    /// One for each of the model's outputs, in its order, in the area for outputs; of tasks that failed none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<Placed>,
    /// Why they have no outputs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// A tensor of so many tasks, and where it lies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// As the Open Inference Protocol spells it.
    pub datatype: Cow<'static, str>,
    /// With the dimension for tasks, if the model has it.
    pub shape: Vec<u64>,
    /// Where it begins in the shared memory.
    pub offset: u64,
    /// How long it is. Elements are in row-major order, little-endian; each of BYTES is preceded by its length as
    /// 32 bits.
    pub bytes: u64,
}

/// A part of the shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Area {
    /// Where it begins.
    pub offset: u64,
    /// How long it is.
    pub bytes: u64,
}

/// A program broke the protocol.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct Breach(pub String);

/// A line of a backend's, with its end.
#[must_use]
pub fn line<M: Serialize>(message: &M) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("plain data");
    line.push(b'\n');
    line
}

impl FromProgram {
    /// A line of a program, without its end.
    ///
    /// # Errors
    /// If it is none of these.
    pub fn parse(line: &[u8]) -> Result<Self, Breach> {
        serde_json::from_slice(line).map_err(|error| {
            let text: String = String::from_utf8_lossy(&line[..line.len().min(80)]).escape_debug().collect();
            // It quotes what it found, whatever that is.
            let error: String = error.to_string().chars().take(200).flat_map(shown).collect();
            Breach(format!("it wrote `{text}`, expected a line of docs/process.md: {error}"))
        })
    }
}

/// A letter as it does nothing to a terminal.
fn shown(letter: char) -> impl Iterator<Item = char> {
    let escaped = letter.is_control().then(|| letter.escape_default());
    escaped.into_iter().flatten().chain((!letter.is_control()).then_some(letter))
}

impl Placed {
    /// Whether it is all inside of `area`.
    #[must_use]
    pub fn lies_in(&self, area: Area) -> bool {
        let end = self.offset.checked_add(self.bytes);
        self.offset >= area.offset && end.is_some_and(|end| end <= area.offset.saturating_add(area.bytes))
    }
}

/// Lines out of what a socket gives, each at most [`LINE_BYTES_MAX`] long.
#[derive(Debug, Default)]
pub struct Lines {
    bytes: Vec<u8>,
    /// None of these ends a line.
    seen: usize,
}

impl Lines {
    /// The next line without its end, if all of it is there.
    ///
    /// # Errors
    /// If it is too long. Nothing is to be read any more then.
    pub fn poll(&mut self) -> Result<Option<Vec<u8>>, Breach> {
        let end = self.bytes[self.seen..].iter().position(|&byte| byte == b'\n').map(|at| self.seen + at);
        match end {
            Some(end) if end < LINE_BYTES_MAX => {
                let rest = self.bytes.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.bytes, rest);
                line.truncate(end);
                self.seen = 0;
                Ok(Some(line))
            }
            None if self.bytes.len() < LINE_BYTES_MAX => {
                self.seen = self.bytes.len();
                Ok(None)
            }
            _ => Err(Breach(format!("it wrote a line of more than {LINE_BYTES_MAX} bytes"))),
        }
    }

    /// So many bytes that follow the line before, if all of them are there.
    pub fn poll_bytes(&mut self, count: usize) -> Option<Vec<u8>> {
        (self.bytes.len() >= count).then(|| {
            let rest = self.bytes.split_off(count);
            self.seen = 0;
            std::mem::replace(&mut self.bytes, rest)
        })
    }

    /// What the socket gave.
    pub fn handle_bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Whether there is a part of a line.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lines_are_spelled_as_the_documentation_has_them() {
        let ready = br#"{"ready": {"protocol": 2}}"#;
        assert_eq!(FromProgram::parse(ready), Ok(FromProgram::Ready { protocol: 2 }));
        let done = br#"{"done": {"id": 7, "groups": [
            {"tasks": 2, "outputs": [{"datatype": "FP32", "shape": [2, 1], "offset": 64, "bytes": 8}]},
            {"tasks": 1, "failed": "negative"}]}}"#;
        let placed = Placed { datatype: "FP32".into(), shape: vec![2, 1], offset: 64, bytes: 8 };
        let groups = vec![
            Answered { tasks: 2, outputs: vec![placed.clone()], failed: None },
            Answered { tasks: 1, outputs: vec![], failed: Some("negative".into()) },
        ];
        assert_eq!(FromProgram::parse(done), Ok(FromProgram::Done { id: 7, groups }));
        let call = br#"{"call": {"id": 3, "model": "m", "inputs":
            [{"name": "x", "datatype": "FP32", "shape": [1], "bytes": 4}]}}"#;
        let carried = Carried { name: "x".into(), datatype: "FP32".into(), shape: vec![1], bytes: 4 };
        let inputs = vec![carried.clone()];
        let expected = Call { id: 3, model: "m".into(), version: None, outputs: vec![], timeout_us: None, inputs };
        assert_eq!(expected.bytes(), Some(4));
        assert_eq!(FromProgram::parse(call), Ok(FromProgram::Call(expected)));
        let called = line(&ToProgram::Called(Called { id: 3, outputs: vec![carried], failed: None }));
        let expected = br#"{"called":{"id":3,"outputs":[{"name":"x","datatype":"FP32","shape":[1],"bytes":4}]}}"#;
        assert_eq!(called, [&expected[..], b"\n"].concat());
        let metrics = br#"{"metrics": {"id": 4, "changes": [
            {"family": {"name": "rows_total", "description": "Rows", "kind": "counter"}},
            {"metric": {"family": "rows_total", "labels": {"model": "m"}}},
            {"increment": {"family": "rows_total", "labels": {"model": "m"}, "value": 8}}]}}"#;
        let (family, description) = ("rows_total".to_owned(), "Rows".to_owned());
        let labels = BTreeMap::from([("model".to_owned(), "m".to_owned())]);
        let changes = vec![
            MetricChange::Family { name: family.clone(), description, kind: MetricKind::Counter },
            MetricChange::Metric { family: family.clone(), labels: labels.clone(), buckets: vec![] },
            MetricChange::Increment(MetricValue { family, labels, value: 8.0 }),
        ];
        let expected = FromProgram::Metrics(MetricsSaid { id: Some(4), changes });
        assert_eq!(FromProgram::parse(metrics), Ok(expected));
        let told = ToProgram::Metrics(MetricsTold { id: 4, value: Some(8.0), failed: None });
        assert_eq!(line(&told), b"{\"metrics\":{\"id\":4,\"value\":8.0}}\n");
        let group = Group { tasks: 2, inputs: vec![Some(placed), None] };
        let batch = ToProgram::Batch(Batch { id: 7, groups: vec![group] });
        let expected = r#"{"batch":{"id":7,"groups":[{"tasks":2,"inputs":[{"datatype":"FP32","shape":[2,1],"#
            .to_owned()
            + r#""offset":64,"bytes":8},null]}]}}"#;
        assert_eq!(line(&batch), format!("{expected}\n").into_bytes());
    }

    #[test]
    fn garbage_is_shown_in_one_line() {
        for garbage in
            [&b"Traceback (most recent call last):\r"[..], b"", b"\xff\0\x1b[2J", b"{\"done\": {\"id\": -1}}"]
        {
            let Breach(text) = FromProgram::parse(garbage).unwrap_err();
            assert!(text.starts_with("it wrote `") && !text.contains(char::is_control), "{text}");
        }
        let quoted = format!("{{\"a\\n\\u001b{}\": 1}}", "x".repeat(5_000));
        let Breach(text) = FromProgram::parse(quoted.as_bytes()).unwrap_err();
        assert!(text.contains("unknown variant `a\\n\\u{1b}xxx") && !text.contains(char::is_control), "{text}");
        assert!(text.len() < 500, "{text}");
    }

    #[test]
    fn a_line_without_an_end_is_given_up() {
        let mut lines = Lines::default();
        for _ in 0..LINE_BYTES_MAX / 4_096 - 1 {
            lines.handle_bytes(&[b'x'; 4_096]);
            assert_eq!(lines.poll(), Ok(None));
        }
        lines.handle_bytes(&[b'x'; 4_095]);
        assert_eq!(lines.poll(), Ok(None));
        lines.handle_bytes(b"x");
        assert!(lines.poll().is_err());
    }

    proptest! {
        /// However a socket cuts them.
        #[test]
        fn lines_come_out_as_they_went_in(
            lines in proptest::collection::vec("[ -~]{0,40}", 0..20),
            cuts in proptest::collection::vec(1..17usize, 1..40),
        ) {
            let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
            let (mut rest, mut found, mut cuts) = (text.as_bytes(), Vec::new(), cuts.into_iter().cycle());
            let mut reader = Lines::default();
            while !rest.is_empty() {
                let (now, later) = rest.split_at(cuts.next().unwrap().min(rest.len()));
                reader.handle_bytes(now);
                while let Some(line) = reader.poll().unwrap() {
                    found.push(String::from_utf8(line).unwrap());
                }
                rest = later;
            }
            prop_assert_eq!(found, lines);
            prop_assert!(reader.is_empty());
        }

        /// A line may have bytes behind it, which look like lines, too.
        #[test]
        fn bytes_come_out_behind_their_line(
            parts in proptest::collection::vec(("[ -~]{0,9}", proptest::collection::vec(any::<u8>(), 0..20)), 0..9),
            cuts in proptest::collection::vec(1..17usize, 1..40),
        ) {
            let all: Vec<u8> = parts.iter().flat_map(|(line, rest)| [line.as_bytes(), b"\n", rest].concat()).collect();
            let (mut rest, mut cuts, mut reader) = (&all[..], cuts.into_iter().cycle(), Lines::default());
            for (expected, behind) in &parts {
                let (mut line, mut bytes) = (None, None);
                while bytes.is_none() {
                    line = line.or_else(|| reader.poll().unwrap());
                    bytes = line.as_ref().and_then(|_| reader.poll_bytes(behind.len()));
                    if bytes.is_none() {
                        let now = rest.split_off(..cuts.next().unwrap().min(rest.len())).unwrap();
                        prop_assert!(!now.is_empty(), "there is more");
                        reader.handle_bytes(now);
                    }
                }
                prop_assert_eq!((line.unwrap(), bytes.unwrap()), (expected.clone().into_bytes(), behind.clone()));
            }
            prop_assert!(reader.is_empty() && rest.is_empty());
        }

        /// The naive way: in arithmetic that cannot overflow.
        #[test]
        fn what_lies_in_an_area_is_inside_of_it(
            offset in prop_oneof![0..200u64, u64::MAX - 200..],
            bytes in prop_oneof![0..200u64, u64::MAX - 200..],
            area in (0..100u64, 0..100u64),
        ) {
            let placed = Placed { datatype: "UINT8".into(), shape: vec![], offset, bytes };
            let area = Area { offset: area.0, bytes: area.1 };
            let inside = u128::from(offset) >= u128::from(area.offset)
                && u128::from(offset) + u128::from(bytes) <= u128::from(area.offset) + u128::from(area.bytes);
            prop_assert_eq!(placed.lies_in(area), inside);
        }
    }
}
