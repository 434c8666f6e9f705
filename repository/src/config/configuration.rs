//! A model's configuration as clients are told of it: as it was written, and as it is in effect where nothing was.

use std::{fmt, str::FromStr, sync::Arc};

use prost::Message as _;
use prost_reflect::{DynamicMessage, EnumDescriptor, FieldDescriptor, Kind, MapKey, ReflectMessage as _, Value};
use proto::Span;
use serde::{
    Serialize, Serializer,
    ser::{SerializeMap, SerializeSeq},
};

use super::{PROCESS, PYTHON};
use crate::{
    config::file::{MODEL_CONFIG, get, parse, text},
    emulated::UnequalTimes,
    error::RepositoryError,
    model::{ENSEMBLE, ONNX},
    selection::WEIGHTS,
};

/// An `inference.ModelConfig`. Serialises as Triton writes it in JSON: fields by their own names, enumerations by
/// theirs, numbers as numbers, what is not set with its default but for messages.
#[derive(Clone, PartialEq)]
pub struct Configuration {
    pub(super) message: DynamicMessage,
    /// What requests of an emulated model take, with what was in the file that the message names: whoever runs the
    /// model need not find it again.
    unequal_times: Option<Arc<UnequalTimes>>,
    caches_responses: bool,
}

/// `KIND_GPU` of an instance group.
const KIND_GPU: i32 = 1;

impl Configuration {
    /// Whether an instance group says that it is for GPUs.
    #[must_use]
    pub fn names_gpus(&self) -> bool {
        let groups = get(&self.message, "instance_group");
        let mut groups = groups.as_list().unwrap_or_default().iter().filter_map(Value::as_message);
        groups.any(|group| get(group, "kind").as_enum_number() == Some(KIND_GPU))
    }

    /// Whether answers may be kept, and given to whoever asks the same (`response_cache { enable: true }`).
    #[must_use]
    pub fn caches_responses(&self) -> bool {
        self.caches_responses
    }

    /// With what is in effect for what `message` does not say: which version is served, what runs it, the objective
    /// if there is one.
    pub(super) fn completed(mut message: DynamicMessage, slo: Span) -> Self {
        let is_emulated = text(&message, "backend") == "emulated";
        let default = |message: &mut DynamicMessage, key: &str, value: &str| {
            if text(message, key).is_empty() {
                message.set_field_by_name(key, Value::String(value.to_owned()));
            }
        };
        // As in Triton, nothing runs an ensemble itself.
        if text(&message, "platform") != ENSEMBLE {
            default(&mut message, "backend", if is_emulated { "emulated" } else { ONNX });
        }
        // As in Triton, what a program runs has no platform.
        match text(&message, "backend").as_str() {
            PROCESS | PYTHON | "" => {}
            "emulated" => default(&mut message, "platform", "emulated"),
            _ => default(&mut message, "platform", "onnxruntime_onnx"),
        }
        let policy = MODEL_CONFIG.get_field_by_name("version_policy").expect("the schema declares it");
        if !message.has_field(&policy) {
            let mut latest = submessage(&policy.kind(), "latest");
            latest.set_field_by_name("num_versions", Value::U32(1));
            let mut chosen = DynamicMessage::new(message_of(&policy.kind()).clone());
            chosen.set_field_by_name("latest", Value::Message(latest));
            message.set_field(&policy, Value::Message(chosen));
        }
        if slo == Span::ENDLESS {
            return Self::from(message);
        }
        let key = MapKey::String("slo_ms".to_owned());
        let parameters = message.get_field_by_name_mut("parameters").and_then(Value::as_map_mut);
        let parameters = parameters.expect("the schema says map");
        parameters.entry(key).or_insert_with(|| {
            let field = MODEL_CONFIG.get_field_by_name("parameters").expect("the schema declares it");
            let mut parameter = DynamicMessage::new(message_of(&value_field(&field).kind()).clone());
            parameter.set_field_by_name("string_value", Value::String((slo.0 as f64 / 1e6).to_string()));
            Value::Message(parameter)
        });
        Self::from(message)
    }

    /// With what requests take, if they take unequal times.
    pub(super) fn with_times(self, unequal_times: Option<UnequalTimes>) -> Self {
        Self { unequal_times: unequal_times.map(Arc::new), ..self }
    }

    /// What requests of an emulated model take, if they take unequal times.
    #[must_use]
    pub fn unequal_times(&self) -> Option<&Arc<UnequalTimes>> {
        self.unequal_times.as_ref()
    }

    /// The same with other weights (`weights`, as text), if it has any: those of an ensemble of models of one task.
    #[must_use]
    pub fn with_weights(&self, weights: &str) -> Option<Self> {
        let mut configuration = self.clone();
        let parameters = configuration.message.get_field_by_name_mut("parameters").and_then(Value::as_map_mut)?;
        let parameter = parameters.get_mut(&MapKey::String(WEIGHTS.to_owned())).and_then(Value::as_message_mut)?;
        parameter.set_field_by_name("string_value", Value::String(weights.to_owned()));
        (text(&self.message, "platform") == ENSEMBLE).then_some(configuration)
    }

    /// The message, encoded as protobuf.
    #[must_use]
    pub fn encoded(&self) -> Vec<u8> {
        self.message.encode_to_vec()
    }

    /// `platform`: what the model's file is, as Triton names it.
    #[must_use]
    pub fn platform(&self) -> String {
        text(&self.message, "platform")
    }
}

impl From<DynamicMessage> for Configuration {
    fn from(message: DynamicMessage) -> Self {
        let cache = get(&message, "response_cache");
        let cache = cache.as_message().expect("the schema says message");
        let caches_responses = get(cache, "enable").as_bool() == Some(true);
        Self { message, unequal_times: None, caches_responses }
    }
}

/// From the text format, for models that are made without a repository; nothing is completed.
impl FromStr for Configuration {
    type Err = RepositoryError;

    fn from_str(text: &str) -> Result<Self, RepositoryError> {
        parse(text).map(Self::from).map_err(RepositoryError)
    }
}

/// Of a model that was made without a repository.
impl Default for Configuration {
    fn default() -> Self {
        Self::from(DynamicMessage::new(MODEL_CONFIG.clone()))
    }
}

impl fmt::Debug for Configuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Configuration({})", self.message)
    }
}

impl Serialize for Configuration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Told::Message(&self.message).serialize(serializer)
    }
}

/// A message as clients are told it.
pub(super) fn told(message: &DynamicMessage) -> serde_json::Value {
    serde_json::to_value(Told::Message(message)).expect("it has text for keys")
}

/// A value with what its field says about it.
enum Told<'a> {
    Message(&'a DynamicMessage),
    /// Lists and maps as a whole.
    Field(&'a Value, &'a FieldDescriptor),
    One(&'a Value, &'a Kind),
}

impl Serialize for Told<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Message(message) => {
                let mut map = serializer.serialize_map(None)?;
                let fields = message.descriptor();
                let told = fields.fields().filter(|field| !field.supports_presence() || message.has_field(field));
                for field in told {
                    map.serialize_entry(field.name(), &Told::Field(&message.get_field(&field), &field))?;
                }
                map.end()
            }
            Self::Field(Value::List(values), field) => {
                let mut list = serializer.serialize_seq(Some(values.len()))?;
                let kind = field.kind();
                values.iter().try_for_each(|value| list.serialize_element(&Told::One(value, &kind)))?;
                list.end()
            }
            Self::Field(Value::Map(values), field) => {
                // In the order of keys, so that a configuration is told the same way every time.
                let kind = value_field(field).kind();
                let mut entries: Vec<(String, &Value)> =
                    values.iter().map(|(key, value)| (key_text(key), value)).collect();
                entries.sort_unstable_by(|a, b| a.0.cmp(&b.0));
                let entries = entries.into_iter().map(|(key, value)| (key, Told::One(value, &kind)));
                serializer.collect_map(entries)
            }
            Self::Field(value, field) => Told::One(value, &field.kind()).serialize(serializer),
            Self::One(value, kind) => serialize_one(value, kind, serializer),
        }
    }
}

fn serialize_one<S: Serializer>(value: &Value, kind: &Kind, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        Value::Bool(flag) => serializer.serialize_bool(*flag),
        Value::I32(number) => serializer.serialize_i32(*number),
        Value::I64(number) => serializer.serialize_i64(*number),
        Value::U32(number) => serializer.serialize_u32(*number),
        Value::U64(number) => serializer.serialize_u64(*number),
        Value::F32(number) => serializer.serialize_f32(*number),
        Value::F64(number) => serializer.serialize_f64(*number),
        Value::String(text) => serializer.serialize_str(text),
        Value::Bytes(bytes) => serializer.serialize_bytes(bytes),
        Value::EnumNumber(number) => match kind.as_enum().and_then(|names: &EnumDescriptor| names.get_value(*number)) {
            Some(name) => serializer.serialize_str(name.name()),
            None => serializer.serialize_i32(*number),
        },
        Value::Message(message) => Told::Message(message).serialize(serializer),
        Value::List(_) | Value::Map(_) => unreachable!("neither is an element of another"),
    }
}

fn key_text(key: &MapKey) -> String {
    match key {
        MapKey::String(text) => text.clone(),
        MapKey::U64(number) => number.to_string(),
        other => format!("{other:?}"),
    }
}

/// What the values of a map's field are.
fn value_field(map: &FieldDescriptor) -> FieldDescriptor {
    message_of(&map.kind()).map_entry_value_field()
}

fn message_of(kind: &Kind) -> &prost_reflect::MessageDescriptor {
    kind.as_message().expect("the schema says message")
}

/// An empty message for a field of a message.
fn submessage(kind: &Kind, field: &str) -> DynamicMessage {
    let field = message_of(kind).get_field_by_name(field).expect("the schema declares it");
    DynamicMessage::new(message_of(&field.kind()).clone())
}
