//! How tasks of unequal sizes run together: `batch_lengths`, `pad_values` and `mask_inputs` of a model's `parameters`,
//! and Triton's `allow_ragged_batch`, `batch_input` and `batch_output`. ONNX models alone take them: a program gets its
//! tasks as they are, and an emulated model looks at each by itself.

use std::collections::BTreeMap;

use prost_reflect::{DynamicMessage, Value};
use serde::{Deserialize, de::DeserializeOwned};

use super::variable::{BOUND_MAX, is_ragged};
use crate::{
    BatchLengths, Batching, Generated, GeneratedKind,
    config::file::{ConfigFile, get},
    error::RepositoryError,
    tensor::{DataType, Tensor},
};

/// Parameters that say how tasks run together.
const PARAMETERS: [&str; 4] = [LENGTHS, PADS, MASKS, ELEMENTS];
const LENGTHS: &str = "batch_lengths";
const PADS: &str = "pad_values";
const MASKS: &str = "mask_inputs";
const ELEMENTS: &str = "batch_elements_max";
/// Elements of a run whose tasks are padded or joined, if the configuration does not say.
const ELEMENTS_DEFAULT: usize = 1 << 22;
/// Bounds of `bucketed`, at most: each is a group of tasks of its own.
const BUCKETS_MAX: usize = 64;

impl ConfigFile<'_> {
    /// What becomes of lengths that differ.
    pub(super) fn batch_lengths(&self) -> Result<BatchLengths, RepositoryError> {
        let Some(found) = self.parameter(LENGTHS) else { return Ok(BatchLengths::Equal) };
        let wrong = |expected: String| self.error(LENGTHS, format_args!("\"{found}\""), expected);
        match found.split_once(':') {
            None if found == "equal" => Ok(BatchLengths::Equal),
            None if found == "padded" => Ok(BatchLengths::Padded),
            Some(("bucketed", bounds)) => {
                let bounds: Option<Vec<usize>> = bounds.split(',').map(|bound| bound.trim().parse().ok()).collect();
                let is_valid = |bounds: &Vec<usize>| {
                    (1..=BUCKETS_MAX).contains(&bounds.len())
                        && bounds.iter().all(|bound| (1..=BOUND_MAX).contains(bound))
                        && bounds.is_sorted_by(|a, b| a < b)
                };
                bounds.filter(is_valid).map(BatchLengths::Bucketed).ok_or_else(|| {
                    wrong(format!(
                        "1 to {BUCKETS_MAX} bounds that ascend, each 1 to {BOUND_MAX}: \"bucketed:16,32,64\""
                    ))
                })
            }
            _ => Err(wrong("\"equal\", \"padded\" or \"bucketed:16,32,64\" with bounds that ascend".to_owned())),
        }
    }

    /// How the tasks of an ONNX model run together.
    pub(super) fn batching(
        &self,
        is_batched: bool,
        (inputs, outputs): (&[Tensor], &[Tensor]),
    ) -> Result<Batching, RepositoryError> {
        let listed = get(&self.message, "input");
        let listed = listed.as_list().unwrap_or_default().iter().filter_map(Value::as_message);
        let mut batching = Batching {
            lengths: self.batch_lengths()?,
            ragged: listed.map(is_ragged).collect(),
            ..Batching::equal(inputs.len(), outputs.len())
        };
        self.check_ragged(&batching, inputs)?;
        batching.elements_max = self.elements_max(&batching)?;
        batching.generated = self.masks(&batching, inputs)?;
        batching.generated.extend(self.batch_inputs(inputs)?);
        self.check_generated(&batching.generated, inputs)?;
        batching.pads = self.pads(&batching, inputs)?;
        batching.follows = self.batch_outputs(inputs, outputs)?;
        if !batching.is_plain() && !is_batched {
            let expected = "1 or more: batch_lengths, mask_inputs, batch_elements_max, allow_ragged_batch and \
                            batch_input are about tasks that run together";
            return Err(self.error("max_batch_size", 0, expected));
        }
        let is_padded = |(input, ragged): (&Tensor, &bool)| !ragged && !input.model_variable_dims().is_empty();
        if batching.is_padded() && !inputs.iter().zip(&batching.ragged).any(is_padded) {
            let found = self.parameter(LENGTHS).unwrap_or_default();
            let expected = "none, or an input with a dimension of -1 that is not ragged";
            return Err(self.error(LENGTHS, format_args!("\"{found}\""), expected));
        }
        Ok(batching)
    }

    /// Refuses, for a model that no ONNX file runs, what is about those alone.
    pub(super) fn refuse_batching(&self) -> Result<(), RepositoryError> {
        let expected = "none: only ONNX models take it; a program is given tasks in groups of one shape, and an \
                        emulated model each by itself";
        if let Some(key) = PARAMETERS.into_iter().find(|key| self.parameter(key).is_some()) {
            return Err(self.error(key, "it", expected));
        }
        match ["batch_input", "batch_output"].into_iter().find(|key| self.message.has_field_by_name(key)) {
            Some(key) => Err(self.error(key, "it", expected)),
            None => {
                let listed = get(&self.message, "input");
                if listed.as_list().unwrap_or_default().iter().filter_map(Value::as_message).any(is_ragged) {
                    self.note("allow_ragged_batch", "a batch may have tasks of any shapes");
                }
                Ok(())
            }
        }
    }

    /// Inputs that no request has: they are the model file's.
    pub(super) fn generated_names(&self) -> Result<Vec<String>, RepositoryError> {
        let masks = self.table::<String>(MASKS, "which input each mask is about")?.into_keys();
        let targets = get(&self.message, "batch_input");
        let targets = targets.as_list().unwrap_or_default().iter().filter_map(Value::as_message);
        Ok(masks.chain(targets.flat_map(|item| names(item, "target_name"))).collect())
    }

    fn elements_max(&self, batching: &Batching) -> Result<usize, RepositoryError> {
        let Some(found) = self.parameter(ELEMENTS) else {
            let is_unequal = batching.is_padded() || batching.is_joined();
            return Ok(if is_unequal { ELEMENTS_DEFAULT } else { usize::MAX });
        };
        let number = found.parse().ok().filter(|number| (1..=BOUND_MAX).contains(number));
        let expected = format_args!("elements of all inputs of one run, 1 to {BOUND_MAX}");
        number.ok_or_else(|| self.error(ELEMENTS, format_args!("\"{found}\""), expected))
    }

    fn check_ragged(&self, batching: &Batching, inputs: &[Tensor]) -> Result<(), RepositoryError> {
        for (index, input) in inputs.iter().enumerate() {
            let is_joined = batching.ragged[index];
            if input.datatype != DataType::Bytes || input.model_variable_dims().is_empty() && !is_joined {
                continue;
            }
            if is_joined {
                let key = format!("input[{index}].allow_ragged_batch");
                return Err(self.error(&key, "it", "none: only numbers can be joined, this input has strings"));
            }
            if batching.is_padded() {
                let expected = format!("numbers: batch_lengths pads \"{}\"", input.name);
                return Err(self.error(&format!("input[{index}].data_type"), "TYPE_STRING", expected));
            }
        }
        Ok(())
    }

    fn masks(&self, batching: &Batching, inputs: &[Tensor]) -> Result<Vec<Generated>, RepositoryError> {
        let written = self.table::<String>(MASKS, "which input each mask is about")?;
        let mask = |(name, source): (String, String)| {
            let of_mask = format!("{MASKS}.{name}");
            let source = self.source(&of_mask, &source, inputs)?;
            if batching.ragged[source] || inputs[source].model_variable_dims().is_empty() {
                let expected = "an input with a dimension of -1 that is not ragged";
                return Err(self.error(&of_mask, format_args!("\"{}\"", inputs[source].name), expected));
            }
            Ok(Generated { name, datatype: None, kind: GeneratedKind::Mask, source })
        };
        written.into_iter().map(mask).collect()
    }

    fn batch_inputs(&self, inputs: &[Tensor]) -> Result<Vec<Generated>, RepositoryError> {
        let listed = get(&self.message, "batch_input");
        let mut generated = Vec::new();
        for (index, item) in listed.as_list().unwrap_or_default().iter().filter_map(Value::as_message).enumerate() {
            let key = |field: &str| format!("batch_input[{index}].{field}");
            let number = get(item, "kind").as_enum_number().unwrap_or_default();
            let kind = GeneratedKind::of_batch_input(number)
                .ok_or_else(|| self.error(&key("kind"), number, "0 to 5, or its name"))?;
            let datatype = self.datatype(&format!("batch_input[{index}]"), item)?;
            if ![DataType::Int32, DataType::Int64, DataType::Fp32].contains(&datatype) {
                let expected = "TYPE_INT32, TYPE_INT64 or TYPE_FP32";
                return Err(self.error(&key("data_type"), datatype.config_name(), expected));
            }
            let source = self.only_source(&key("source_input"), item, inputs)?;
            let targets = names(item, "target_name");
            if targets.is_empty() {
                return Err(self.error(&key("target_name"), "none", "an input of the model's file"));
            }
            let of_target = |name| Generated { name, datatype: Some(datatype), kind, source };
            generated.extend(targets.into_iter().map(of_target));
        }
        Ok(generated)
    }

    /// That each is one input of its own.
    fn check_generated(&self, generated: &[Generated], inputs: &[Tensor]) -> Result<(), RepositoryError> {
        for (index, Generated { name, kind, .. }) in generated.iter().enumerate() {
            let key = if *kind == GeneratedKind::Mask { MASKS } else { "batch_input.target_name" };
            if inputs.iter().any(|input| input.name == *name) {
                let expected = "an input that `input` does not list, as requests do not have it";
                return Err(self.error(key, format_args!("\"{name}\""), expected));
            }
            if generated[..index].iter().any(|other| other.name == *name) {
                return Err(self.error(key, format_args!("\"{name}\" again"), "a name that is used once"));
            }
        }
        Ok(())
    }

    fn pads(&self, batching: &Batching, inputs: &[Tensor]) -> Result<Vec<f64>, RepositoryError> {
        let mut pads = vec![0.0; inputs.len()];
        for (name, value) in self.table::<toml::Value>(PADS, "the number that each input is padded with")? {
            let key = format!("{PADS}.{name}");
            let Some(index) = inputs.iter().position(|input| input.name == name) else {
                return Err(self.error(PADS, format_args!("\"{name}\""), known(inputs)));
            };
            let input = &inputs[index];
            if !batching.is_padded() || batching.ragged[index] || input.model_variable_dims().is_empty() {
                let expected = "an input that batch_lengths pads: one with a dimension of -1 that is not ragged";
                return Err(self.error(PADS, format_args!("\"{name}\""), expected));
            }
            pads[index] = number(input.datatype, &value).ok_or_else(|| {
                self.error(&key, &value, format_args!("a number that {} has, up to 2^53", input.datatype))
            })?;
        }
        Ok(pads)
    }

    fn batch_outputs(&self, inputs: &[Tensor], outputs: &[Tensor]) -> Result<Vec<Option<usize>>, RepositoryError> {
        let listed = get(&self.message, "batch_output");
        let mut follows = vec![None; outputs.len()];
        for (index, item) in listed.as_list().unwrap_or_default().iter().filter_map(Value::as_message).enumerate() {
            let key = |field: &str| format!("batch_output[{index}].{field}");
            let source = self.only_source(&key("source_input"), item, inputs)?;
            let targets = names(item, "target_name");
            if targets.is_empty() {
                return Err(self.error(&key("target_name"), "none", "an output of the model"));
            }
            for name in targets {
                let found = format!("\"{name}\"");
                let Some(output) = outputs.iter().position(|output| output.name == name) else {
                    return Err(self.error(&key("target_name"), found, known(outputs)));
                };
                let chosen = |tensor: &Tensor| tensor.variable.as_ref().map_or(Vec::new(), |v| v.dims.clone());
                let (own, others) = (chosen(&outputs[output]), chosen(&inputs[source]));
                if outputs[output].datatype == DataType::Bytes || !own.iter().all(|dim| others.contains(dim)) {
                    let expected = format!(
                        "numbers, with -1 in dims only where those of \"{}\" have it: its lengths are taken",
                        inputs[source].name
                    );
                    return Err(self.error(&key("target_name"), found, expected));
                }
                if follows[output].replace(source).is_some() {
                    return Err(self.error(&key("target_name"), format_args!("{found} again"), "each output once"));
                }
            }
        }
        Ok(follows)
    }

    fn only_source(&self, key: &str, item: &DynamicMessage, inputs: &[Tensor]) -> Result<usize, RepositoryError> {
        match &names(item, "source_input")[..] {
            [name] => self.source(key, name, inputs),
            found => Err(self.error(key, format_args!("{} names", found.len()), "one input")),
        }
    }

    fn source(&self, key: &str, name: &str, inputs: &[Tensor]) -> Result<usize, RepositoryError> {
        let position = inputs.iter().position(|input| input.name == name);
        position.ok_or_else(|| self.error(key, format_args!("\"{name}\""), known(inputs)))
    }

    /// A parameter that is an inline table of TOML.
    fn table<V: DeserializeOwned>(&self, key: &str, what: &str) -> Result<BTreeMap<String, V>, RepositoryError> {
        #[derive(Deserialize)]
        struct Parameter<V> {
            table: BTreeMap<String, V>,
        }
        let Some(found) = self.parameter(key) else { return Ok(BTreeMap::new()) };
        let written = toml::from_str::<Parameter<V>>(&format!("table = {}", found.replace('\n', " ")));
        written.map(|Parameter { table }| table).map_err(|error| {
            let cause = error.message().replace('\n', "; ");
            self.error(key, format_args!("\"{found}\""), format_args!("an inline table of TOML, {what}: {cause}"))
        })
    }
}

fn names(message: &DynamicMessage, field: &str) -> Vec<String> {
    let value = get(message, field);
    value.as_list().unwrap_or_default().iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

fn known(tensors: &[Tensor]) -> String {
    format!("one of the model's: {}", crate::names::listed(tensors.iter().map(|tensor| &tensor.name[..])))
}

/// The number that an element of this type has of this value, if it has.
fn number(datatype: DataType, value: &toml::Value) -> Option<f64> {
    // All integers up to here are doubles.
    const WHOLE_MAX: i64 = 1 << f64::MANTISSA_DIGITS;
    let integer = |least: i64, most: i64| {
        let range = least.max(-WHOLE_MAX)..=most.min(WHOLE_MAX);
        value.as_integer().filter(|number| range.contains(number)).map(|number| number as f64)
    };
    match datatype {
        DataType::Bool => value.as_bool().map(f64::from),
        DataType::Uint8 => integer(0, u8::MAX.into()),
        DataType::Uint16 => integer(0, u16::MAX.into()),
        DataType::Uint32 => integer(0, u32::MAX.into()),
        DataType::Uint64 => integer(0, i64::MAX),
        DataType::Int8 => integer(i8::MIN.into(), i8::MAX.into()),
        DataType::Int16 => integer(i16::MIN.into(), i16::MAX.into()),
        DataType::Int32 => integer(i32::MIN.into(), i32::MAX.into()),
        DataType::Int64 => integer(i64::MIN, i64::MAX),
        DataType::Fp16 | DataType::Fp32 | DataType::Fp64 | DataType::Bf16 => {
            value.as_float().or_else(|| integer(i64::MIN, i64::MAX)).filter(|number| number.is_finite())
        }
        DataType::Bytes => None,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{
        model::{Executor, Model},
        onnx::tests::file,
    };

    /// Loads a model of ids and types, both of any length, to states of any length.
    fn load(config: &str) -> Result<Model, String> {
        let rows: &[i64] = &[-1, -1];
        let inputs = [("ids", 7, rows), ("types", 6, rows), ("mask", 7, rows), ("ends", 6, &[-1])];
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("m/1")).unwrap();
        fs::write(folder.path().join("m/1/model.onnx"), file(&inputs, &[("states", 1, &[-1, -1, 4])], &[])).unwrap();
        fs::write(folder.path().join("m/config.pbtxt"), config).unwrap();
        let prefix = format!("{}/m/config.pbtxt: ", folder.path().display());
        crate::load::load_model(&folder.path().join("m")).map_err(|error| error.to_string().replace(&prefix, ""))
    }

    fn batching(config: &str) -> Batching {
        match load(config).unwrap().executor {
            Executor::Onnx { batching, .. } => batching,
            other => panic!("{other:?}"),
        }
    }

    fn parameter(key: &str, value: &str) -> String {
        format!("parameters {{ key: \"{key}\" value {{ string_value: \"{value}\" }} }} ")
    }

    const MASK_AND_ENDS: &str = r#"
        parameters { key: "mask_inputs" value { string_value: "{ mask = 'ids' }" } }
        batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends" data_type: TYPE_INT32
            source_input: "types" }
    "#;

    #[test]
    fn what_is_made_for_each_run_is_no_input_of_requests() {
        let config = [MASK_AND_ENDS, &parameter("batch_lengths", "padded"), &parameter("pad_values", "{ ids = -3 }")];
        let model = load(&config.concat()).unwrap();
        let names: Vec<&str> = model.inputs.iter().map(|input| &input.name[..]).collect();
        assert_eq!((names, model.max_batch), (vec!["ids", "types"], 32), "the file names two more");
        let generated = |name: &str, datatype, kind, source| Generated { name: name.into(), datatype, kind, source };
        let expected = Batching {
            lengths: BatchLengths::Padded,
            elements_max: 1 << 22,
            pads: vec![-3.0, 0.0],
            generated: vec![
                generated("mask", None, GeneratedKind::Mask, 0),
                generated("ends", Some(DataType::Int32), GeneratedKind::AccumulatedElementCount, 1),
            ],
            ..Batching::equal(2, 1)
        };
        assert_eq!(batching(&config.concat()), expected);
        assert!(expected.is_padded() && !expected.is_plain() && Batching::equal(2, 1).is_plain());
        assert_eq!(batching(&parameter("batch_lengths", "equal")), Batching::equal(4, 1));
        let bounded = batching(&parameter("batch_elements_max", "100"));
        assert_eq!((bounded.elements_max, bounded.is_plain()), (100, false));
    }

    #[test]
    fn the_last_bound_is_the_longest_that_an_input_may_be() {
        let model = load(&parameter("batch_lengths", "bucketed:16, 32,64")).unwrap();
        assert!(model.inputs[0].accepts(&[64]) && !model.inputs[0].accepts(&[65]));
        assert!(model.outputs[0].accepts(&[65, 4]));
        let Executor::Onnx { batching, .. } = model.executor else { panic!("{:?}", model.executor) };
        assert_eq!(batching.lengths, BatchLengths::Bucketed(vec![16, 32, 64]));
    }

    const RAGGED: &str = r#"
        max_batch_size: 4
        input { name: "ids" dims: [ -1 ] allow_ragged_batch: true }
        input { name: "types" dims: [ -1 ] } input { name: "mask" } input { name: "ends" dims: [ 1 ] }
        batch_output { target_name: "states" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "ids" }
        output { name: "states" dims: [ -1, 4 ] }
    "#;

    #[test]
    fn joined_inputs_say_what_one_request_has() {
        let found = batching(RAGGED);
        assert_eq!((found.ragged, found.follows), (vec![true, false, false, false], vec![Some(0)]));
        let error = load(&RAGGED.replacen("dims: [ -1 ] ", "", 1)).unwrap_err();
        assert!(error.starts_with("input[0].dims: found none, expected those of one request"), "{error}");
        // It is not bounded by buckets.
        let model = load(&[RAGGED, &parameter("batch_lengths", "bucketed:8")].concat()).unwrap();
        assert!(model.inputs[0].accepts(&[9]) && !model.inputs[1].accepts(&[9]));
    }

    #[test]
    fn what_cannot_be_meant_is_refused_by_name() {
        let padded = parameter("batch_lengths", "padded");
        let with = |key: &str, value: &str| [&padded, &parameter(key, value)[..]].concat();
        let lengths = |value: &str| parameter("batch_lengths", value);
        let item = |fields: &str| {
            format!("batch_input {{ target_name: \"ends\" data_type: TYPE_INT32 source_input: \"ids\" {fields} }}")
        };
        let output = |fields: &str| format!("batch_output {{ target_name: \"states\" {fields} }}");
        let strings = "max_batch_size: 4 input { name: \"ids\" data_type: TYPE_STRING dims: [ -1 ] }";
        let cases = [
            (lengths("longest"), "batch_lengths: found \"longest\", expected \"equal\", \"padded\" or \"bucketed:16,"),
            (lengths("bucketed:"), "batch_lengths: found \"bucketed:\", expected 1 to 64 bounds that ascend"),
            (lengths("bucketed:0,4"), "batch_lengths: found \"bucketed:0,4\", expected 1 to 64 bounds"),
            (lengths("bucketed:-4"), "batch_lengths: found \"bucketed:-4\", expected 1 to 64 bounds"),
            (lengths("bucketed:8,8"), "batch_lengths: found \"bucketed:8,8\", expected 1 to 64 bounds"),
            (lengths("bucketed:16,8"), "batch_lengths: found \"bucketed:16,8\", expected 1 to 64 bounds"),
            (with("batch_elements_max", "0"), "batch_elements_max: found \"0\", expected elements of all inputs of"),
            (with("pad_values", "1"), "pad_values: found \"1\", expected an inline table of TOML"),
            (with("pad_values", "{ id = 1 }"), "pad_values: found \"id\", expected one of the model's: ids, types"),
            (
                with("pad_values", "{ types = 2147483648 }"),
                "pad_values.types: found 2147483648, expected a number that",
            ),
            (with("pad_values", "{ ids = 0.5 }"), "pad_values.ids: found 0.5, expected a number that INT64 has"),
            (parameter("pad_values", "{ ids = 1 }"), "pad_values: found \"ids\", expected an input that batch_lengths"),
            (
                with("mask_inputs", "{ mask = 'id' }"),
                "mask_inputs.mask: found \"id\", expected one of the model's: ids",
            ),
            (
                ["max_batch_size: 2 input { name: \"ids\" }", &with("mask_inputs", "{ ids = 'ids' }")].concat(),
                "mask_inputs: found \"ids\", expected an input that `input` does not list",
            ),
            (item("source_input: \"types\""), "batch_input[0].source_input: found 2 names, expected one input"),
            (item("").replace("\"ids\"", "\"id\""), "batch_input[0].source_input: found \"id\", expected one of"),
            (item("").replace("\"ends\"", "[ ]"), "batch_input[0].target_name: found none, expected an input of the"),
            (item("").replace("INT32", "FP16"), "batch_input[0].data_type: found TYPE_FP16, expected TYPE_INT32"),
            ([item(""), item("")].concat(), "batch_input.target_name: found \"ends\" again, expected a name"),
            (output(""), "batch_output[0].source_input: found 0 names, expected one input"),
            (
                output("source_input: \"ends\""),
                "batch_output[0].target_name: found \"states\", expected numbers, with -1 in dims only where",
            ),
            (
                output("source_input: \"ids\"").replace("states", "state"),
                "batch_output[0].target_name: found \"state\", expected one of the model's: states",
            ),
            (
                [padded.as_str(), strings].concat(),
                "input[0].data_type: found TYPE_STRING, expected numbers: batch_lengths pads \"ids\"",
            ),
            (
                RAGGED.replace("name: \"ids\"", "name: \"ids\" data_type: TYPE_STRING"),
                "input[0].allow_ragged_batch: found it, expected none: only numbers can be joined",
            ),
            (RAGGED.replace("max_batch_size: 4", ""), "max_batch_size: found 0, expected 1 or more"),
            (
                [padded.as_str(), "max_batch_size: 2 input { name: \"ends\" dims: [ 1 ] }"].concat(),
                "batch_lengths: found \"padded\", expected none, or an input with a dimension of -1",
            ),
            (
                format!("{RAGGED}{}", with("mask_inputs", "{ m = 'ids' }")),
                "mask_inputs.m: found \"ids\", expected an input with a dimension of -1 that is not ragged",
            ),
        ];
        for (config, expected) in cases {
            let error = load(&config).unwrap_err();
            assert!(error.starts_with(expected) && !error.contains('\n'), "found `{error}`, expected `{expected}`");
        }
    }

    #[test]
    fn a_pad_is_a_number_that_the_type_has() {
        let of = |datatype, text: &str| {
            number(datatype, &toml::from_str::<toml::Table>(&format!("x = {text}")).unwrap()["x"])
        };
        for (datatype, least, most) in [
            (DataType::Bool, "false", "true"),
            (DataType::Uint8, "0", "255"),
            (DataType::Uint16, "0", "65535"),
            (DataType::Uint32, "0", "4294967295"),
            (DataType::Uint64, "0", "9007199254740992"),
            (DataType::Int8, "-128", "127"),
            (DataType::Int16, "-32768", "32767"),
            (DataType::Int32, "-2147483648", "2147483647"),
            (DataType::Int64, "-9007199254740992", "9007199254740992"),
            (DataType::Fp16, "-0.5", "65504"),
        ] {
            let whole = |text: &str| text.parse().unwrap_or(f64::from(u8::from(text == "true")));
            assert_eq!([least, most].map(|text| of(datatype, text)), [least, most].map(|text| Some(whole(text))));
            let beyond = most.parse::<i64>().map_or("2".to_owned(), |most| (most + 1).to_string());
            let is_whole = !datatype.is_float();
            assert_eq!(of(datatype, &beyond).is_none(), is_whole, "{datatype} {beyond}");
        }
        assert_eq!(["nan", "inf", "'1'", "true"].map(|text| of(DataType::Fp32, text)), [None; 4]);
        assert_eq!((of(DataType::Int8, "1.0"), of(DataType::Bytes, "1")), (None, None));
    }

    #[test]
    fn models_that_no_file_runs_take_their_tasks_as_they_are() {
        let emulated = r#"
            backend: "emulated" input { name: "x" data_type: TYPE_INT8 dims: -1 allow_ragged_batch: true }
            output { name: "digest" data_type: TYPE_UINT64 dims: 2 }
        "#;
        let emulated = [emulated, &parameter("alpha_ms", "1"), &parameter("beta_ms", "2")].concat();
        assert!(load(&emulated).is_ok(), "joined or not, each is answered by itself");
        let error = load(&[&emulated, &parameter("batch_lengths", "padded")[..]].concat()).unwrap_err();
        assert!(error.starts_with("batch_lengths: found it, expected none: only ONNX models take it"), "{error}");
        let error = load(&format!("{emulated} batch_output {{ }}")).unwrap_err();
        assert!(error.starts_with("batch_output: found it, expected none: only ONNX"), "{error}");
    }
}
