//! A configuration file as it was parsed, and what its keys say.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Component, Path, PathBuf},
    sync::LazyLock,
};

use miette::Diagnostic as _;
use prost_reflect::{
    DescriptorPool, DynamicMessage, EnumDescriptor, MapKey, MessageDescriptor, Value, text_format::ParseError,
};

use crate::{
    error::RepositoryError,
    limits::SLO_MAX,
    model::{CUDA, ONNX, ONNXRUNTIME},
};

/// `inference.ModelConfig`, as `tests/generated.rs` compiled it.
pub(super) static MODEL_CONFIG: LazyLock<MessageDescriptor> = LazyLock::new(|| {
    DescriptorPool::decode(include_bytes!("../../proto/generated/model_config.bin").as_slice())
        .expect("a test wrote it")
        .get_message_by_name("inference.ModelConfig")
        .expect("the schema declares it")
});

/// The file of an ONNX model, unless the configuration names one.
pub(super) const ONNX_FILE: &str = "model.onnx";

/// A parsed `config.pbtxt`.
pub(super) struct ConfigFile<'a> {
    pub(super) folder: &'a Path,
    /// Whom errors name.
    pub(super) path: PathBuf,
    pub(super) message: DynamicMessage,
    /// Which of its versions this is about.
    pub(super) version: String,
    /// Whether it may name a program: its files are not a client's.
    pub(super) may_start: bool,
    /// Keys of outputs that are maps in the model's file, by the output's name.
    pub(super) keys: BTreeMap<String, Vec<String>>,
    /// Whether it says `max_batch_size`, be it 0.
    pub(super) says_batch: bool,
    /// Tensors whose rows have no dimension, as the model's file says.
    pub(super) scalars: BTreeSet<String>,
    /// Outputs of which the model's file says how many dimensions they have, and nobody else.
    pub(super) free_ranks: BTreeSet<String>,
    /// Whether the model's file has inputs with any number of rows, and no others.
    pub(super) has_free_rows: bool,
}

impl<'a> ConfigFile<'a> {
    /// Of all versions of a model.
    pub(super) fn new(folder: &'a Path, path: PathBuf, message: DynamicMessage, may_start: bool) -> Self {
        Self {
            folder,
            path,
            message,
            version: String::new(),
            may_start,
            keys: BTreeMap::new(),
            says_batch: false,
            scalars: BTreeSet::new(),
            free_ranks: BTreeSet::new(),
            has_free_rows: false,
        }
    }

    /// The same of one version.
    pub(super) fn of_version(&self, version: String) -> Self {
        let Self { folder, path, message, may_start, says_batch, .. } = self;
        let of_all = Self::new(folder, path.clone(), message.clone(), *may_start);
        Self { version, says_batch: *says_batch, ..of_all }
    }

    pub(super) fn name(&self) -> Result<String, RepositoryError> {
        let folder = self.folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let name = text(&self.message, "name");
        if !name.is_empty() && name != folder {
            return Err(self.error(
                "name",
                format_args!("\"{name}\""),
                format_args!("the folder's name, \"{folder}\""),
            ));
        }
        Ok(folder)
    }

    /// `parameters: executor`, or else `backend`, or else `platform`.
    pub(super) fn executor_name(&self) -> String {
        let candidates = [self.parameter("executor"), Some(text(&self.message, "backend"))];
        candidates
            .into_iter()
            .flatten()
            .find(|name| !name.is_empty())
            .unwrap_or_else(|| text(&self.message, "platform"))
    }

    /// That a file's name leads to nowhere else: it may be a client's.
    pub(super) fn check_inside(&self, key: &str, name: &str) -> Result<(), RepositoryError> {
        match Path::new(name).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir)) {
            true => Ok(()),
            false => Err(self.error(key, format_args!("\"{name}\""), "a file below the model's folder")),
        }
    }

    /// `parameters { key: "KEY" value: { string_value: ".." } }`.
    pub(super) fn parameter(&self, key: &str) -> Option<String> {
        parameter(&self.message, key)
    }

    pub(super) fn milliseconds(&self, key: &str) -> Result<f64, RepositoryError> {
        let expected = "milliseconds, above 0 and at most 600000, in parameters { key value { string_value } }";
        let Some(found) = self.parameter(key) else { return Err(self.error(key, "none", expected)) };
        match found.parse::<f64>() {
            Ok(ms) if ms > 0.0 && ms <= SLO_MAX.as_millis_f64() => Ok(ms),
            _ => Err(self.error(key, format_args!("\"{found}\""), expected)),
        }
    }

    pub(super) fn error(
        &self,
        key: &str,
        found: impl std::fmt::Display,
        expected: impl std::fmt::Display,
    ) -> RepositoryError {
        RepositoryError(format!("{}: {key}: found {found}, expected {expected}", self.path.display()))
    }
}

/// A configuration as clients give it: in the JSON form of protobuf, with fields by their own names or in camel case.
pub(super) fn parse_json(text: &str) -> Result<DynamicMessage, String> {
    let mut json = serde_json::Deserializer::from_str(text);
    let message = DynamicMessage::deserialize(MODEL_CONFIG.clone(), &mut json);
    let parsed = message.and_then(|message| json.end().map(|()| message));
    parsed.map_err(|error| format!("{error}; expected a ModelConfig in JSON").replace('\n', " "))
}

/// Whether such a configuration says `max_batch_size`.
pub(super) fn json_says_batch(text: &str) -> bool {
    let json: Result<serde_json::Value, _> = serde_json::from_str(text);
    json.is_ok_and(|json| ["max_batch_size", "maxBatchSize"].iter().any(|key| json.get(key).is_some()))
}

pub(super) fn parse(text: &str) -> Result<DynamicMessage, String> {
    let text = with_colons(text);
    DynamicMessage::parse_text_format(MODEL_CONFIG.clone(), &text).map_err(|error| located(&error, &text))
}

/// Whether a configuration in the text format says `max_batch_size`: 0 is what it is where nothing is said, too.
pub(super) fn says_batch(text: &str) -> bool {
    let (mut depth, mut word, mut chars) = (0usize, String::new(), text.chars());
    while let Some(c) = chars.next() {
        if c.is_ascii_alphanumeric() || c == '_' {
            word.push(c);
            continue;
        }
        if depth == 0 && word == "max_batch_size" {
            return true;
        }
        word.clear();
        match c {
            '#' => drop(chars.by_ref().find(|&c| c == '\n')),
            '"' | '\'' => while chars.by_ref().next().is_some_and(|inner| inner != c) {},
            '{' | '[' | '<' => depth += 1,
            '}' | ']' | '>' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    false
}

/// Writes `input: [` for `input [`. The colon before a list of messages is optional in the text format and Triton's
/// own examples leave it out, but the parser wants it. A blank before the bracket gives its place, so that the
/// positions of errors stay what they are.
pub(super) fn with_colons(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 8);
    let mut chars = text.chars();
    // The last character that is neither a blank nor in a comment.
    let mut last = ' ';
    while let Some(c) = chars.next() {
        match c {
            '#' => {
                out.push(c);
                out.extend(chars.by_ref().take_while(|&c| c != '\n'));
                out.push('\n');
            }
            '"' | '\'' => {
                out.push(c);
                let mut escaped = false;
                for inner in chars.by_ref() {
                    out.push(inner);
                    if inner == c && !escaped {
                        break;
                    }
                    escaped = inner == '\\' && !escaped;
                }
            }
            '[' if last.is_ascii_alphanumeric() || last == '_' => {
                if out.ends_with([' ', '\t']) {
                    out.pop();
                }
                out.push_str(":[");
            }
            _ => out.push(c),
        }
        if c != '#' && !c.is_whitespace() {
            last = c;
        }
    }
    out
}

/// The parser's complaint with the line and column that it points at.
pub(super) fn located(error: &ParseError, text: &str) -> String {
    let label = error.labels().and_then(|mut labels| labels.next());
    let Some(before) = label.and_then(|label| text.get(..label.offset())) else { return error.to_string() };
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|&c| c != '\n').count() + 1;
    format!("line {line}, column {column}: {error}")
}

/// Whether a model of this executor has an ONNX file.
pub(super) fn is_onnx(executor: &str) -> bool {
    [ONNX, CUDA, ONNXRUNTIME, "onnxruntime_onnx"].contains(&executor)
}

pub(super) fn parameter(message: &DynamicMessage, key: &str) -> Option<String> {
    let parameters = get(message, "parameters");
    let value = parameters.as_map()?.get(&MapKey::String(key.to_owned()))?;
    Some(text(value.as_message()?, "string_value"))
}

pub(super) fn get(message: &DynamicMessage, field: &str) -> Value {
    message.get_field_by_name(field).expect("the schema declares it").into_owned()
}

/// A list of lengths.
pub(super) fn dims(message: &DynamicMessage, field: &str) -> Vec<i64> {
    get(message, field).as_list().unwrap_or_default().iter().filter_map(Value::as_i64).collect()
}

pub(super) fn text(message: &DynamicMessage, field: &str) -> String {
    get(message, field).as_str().unwrap_or_default().to_owned()
}

/// Triton's names and numbers of types.
pub(super) fn data_types() -> Option<EnumDescriptor> {
    MODEL_CONFIG.parent_pool().get_enum_by_name("inference.DataType")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_of_none_is_told_from_one_that_is_not_said() {
        let says = ["max_batch_size: 0", "name: \"m\" max_batch_size:4", "input [ { } ]\nmax_batch_size : 0 # one"];
        assert!(says.into_iter().all(says_batch));
        let others = ["", "# max_batch_size: 0\n", "name: 'max_batch_size: 0'", "x { max_batch_size: 0 }", "max_batch"];
        assert!(!others.into_iter().any(says_batch));
    }

    #[test]
    fn the_colon_before_a_list_is_optional_and_strings_and_comments_stay() {
        assert_eq!(with_colons("input [ {} ] dims: [ 3 ]"), "input:[ {} ] dims: [ 3 ]");
        assert_eq!(with_colons("input\n[ ] gpus[ 0 ]"), "input\n:[ ] gpus:[ 0 ]");
        let untouched = "a: \"input [ \\\" [\" # input [\nb: 'x [ \"' # end [\nc: # list\n[ ]";
        assert_eq!(with_colons(untouched), untouched);
    }
}
