//! Tensor elements between JSON and little-endian bytes.

use std::fmt::{self, Write as _};

use frontend::excerpt;
use repository::DataType;

mod strings;

/// Reads exactly `elements` numbers (or booleans), nested in arrays in any way, as bytes.
///
/// A tensor is by far the most of a request, and its text is known to be valid JSON: its numbers are simply what lies
/// between the brackets, commas and spaces.
///
/// # Errors
/// What was found and expected, in one line.
pub fn read_json(datatype: DataType, elements: usize, json: &[u8]) -> Result<Vec<u8>, String> {
    if [DataType::Fp16, DataType::Bf16].contains(&datatype) {
        return Err(format!("found JSON, expected binary data: {datatype} has no JSON form"));
    }
    if datatype == DataType::Bytes {
        return strings::read_json(elements, json);
    }
    let separates = |byte: &u8| matches!(byte, b'[' | b']' | b',' | b' ' | b'\t' | b'\n' | b'\r');
    let limit = elements * datatype.bytes();
    let mut bytes = Vec::with_capacity(read_bytes_max(datatype, elements, json.len()));
    for element in json.split(separates).filter(|element| !element.is_empty()) {
        if bytes.len() == limit {
            return Err(format!("found more than the expected {elements} elements"));
        }
        read_element(datatype, element, &mut bytes).ok_or_else(|| {
            let found = excerpt(&String::from_utf8_lossy(element));
            format!("found {found}, expected values of {datatype}, or arrays of them")
        })?;
    }
    if bytes.len() < limit {
        return Err(format!("found {} elements, expected {elements}", bytes.len() / datatype.bytes()));
    }
    Ok(bytes)
}

/// Bytes that [`read_json`] yields at most: each element has a character, and another one before the next.
#[must_use]
pub fn read_bytes_max(datatype: DataType, elements: usize, json_bytes: usize) -> usize {
    if datatype == DataType::Bytes {
        return strings::read_bytes_max(elements, json_bytes);
    }
    elements.min(json_bytes.div_ceil(2)) * datatype.bytes()
}

/// Appends an element. Rust reads every number that JSON can write; what else it reads as one, JSON cannot write.
fn read_element(datatype: DataType, text: &[u8], bytes: &mut Vec<u8>) -> Option<()> {
    let text = str::from_utf8(text).ok()?;
    macro_rules! append {
        ($type:ty) => {
            bytes.extend_from_slice(&text.parse::<$type>().ok()?.to_le_bytes())
        };
    }
    match datatype {
        DataType::Bool => bytes.push(text.parse::<bool>().ok()?.into()),
        DataType::Uint8 => append!(u8),
        DataType::Uint16 => append!(u16),
        DataType::Uint32 => append!(u32),
        DataType::Uint64 => append!(u64),
        DataType::Int8 => append!(i8),
        DataType::Int16 => append!(i16),
        DataType::Int32 => append!(i32),
        DataType::Int64 => append!(i64),
        DataType::Fp32 => {
            let value: f32 = text.parse().ok()?;
            bytes.extend_from_slice(&Some(value).filter(|value| value.is_finite() || is_spelled(text))?.to_le_bytes());
        }
        DataType::Fp64 => {
            let value: f64 = text.parse().ok()?;
            bytes.extend_from_slice(&Some(value).filter(|value| value.is_finite() || is_spelled(text))?.to_le_bytes());
        }
        DataType::Fp16 | DataType::Bf16 | DataType::Bytes => return None,
    }
    Some(())
}

/// Whether a number that is not finite is meant to be: one that is too large is read as infinite.
fn is_spelled(text: &str) -> bool {
    matches!(text.strip_prefix('-').unwrap_or(text), "NaN" | "Infinity")
}

/// The same text with numbers for what JSON has none for, `NaN` and `Infinity`, outside of strings, so that a parser
/// takes it: each as long as what it stands for, so that whatever is found there lies at the same place in `json`.
/// `None` if there is nothing to replace.
pub fn finite(json: &[u8]) -> Option<Vec<u8>> {
    let mut text = json.to_vec();
    let (mut at, mut is_found) = (0, false);
    while let Some(&byte) = text.get(at) {
        let word = ["NaN", "Infinity"].into_iter().find(|word| text[at..].starts_with(word.as_bytes()));
        if let Some(word) = word {
            text[at..at + word.len()].fill(b'0');
            text[at + 1] = b'.';
            (at, is_found) = (at + word.len(), true);
        } else if byte == b'"' {
            at += 1;
            while text.get(at).is_some_and(|&byte| byte != b'"') {
                at += if text[at] == b'\\' { 2 } else { 1 };
            }
            at += 1;
        } else {
            at += 1;
        }
    }
    is_found.then_some(text)
}

/// Appends the elements to a JSON array's inside, flat. What JSON has no number for is written as Triton does: `NaN`,
/// `Infinity` and `-Infinity`.
///
/// # Errors
/// If there is a string that JSON cannot hold: what was found and expected.
pub fn write_json(datatype: DataType, data: &[u8], json: &mut String) -> Result<(), String> {
    match datatype {
        DataType::Bytes => return strings::write_json(data, json),
        DataType::Bool => join(data, |[byte]| byte != 0, json),
        DataType::Uint8 => join(data, u8::from_le_bytes, json),
        DataType::Uint16 => join(data, u16::from_le_bytes, json),
        DataType::Uint32 => join(data, u32::from_le_bytes, json),
        DataType::Uint64 => join(data, u64::from_le_bytes, json),
        DataType::Int8 => join(data, i8::from_le_bytes, json),
        DataType::Int16 => join(data, i16::from_le_bytes, json),
        DataType::Int32 => join(data, i32::from_le_bytes, json),
        DataType::Int64 => join(data, i64::from_le_bytes, json),
        DataType::Fp16 => join(data, |bytes| Number(half_to_f32(u16::from_le_bytes(bytes))), json),
        DataType::Bf16 => join(data, |bytes| Number(brain_to_f32(u16::from_le_bytes(bytes))), json),
        DataType::Fp32 => join(data, |bytes| Number(f32::from_le_bytes(bytes)), json),
        DataType::Fp64 => join(data, |bytes| Number(f64::from_le_bytes(bytes)), json),
    }
    Ok(())
}

/// The elements as numbers; true is 1, and strings are none.
pub fn to_f64(datatype: DataType, data: &[u8]) -> Vec<f64> {
    fn each<const N: usize>(data: &[u8], element: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        data.as_chunks::<N>().0.iter().map(|bytes| element(*bytes)).collect()
    }
    match datatype {
        DataType::Bool | DataType::Uint8 => each(data, |[byte]| byte.into()),
        DataType::Uint16 => each(data, |bytes| u16::from_le_bytes(bytes).into()),
        DataType::Uint32 => each(data, |bytes| u32::from_le_bytes(bytes).into()),
        DataType::Uint64 => each(data, |bytes| u64::from_le_bytes(bytes) as f64),
        DataType::Int8 => each(data, |bytes| i8::from_le_bytes(bytes).into()),
        DataType::Int16 => each(data, |bytes| i16::from_le_bytes(bytes).into()),
        DataType::Int32 => each(data, |bytes| i32::from_le_bytes(bytes).into()),
        DataType::Int64 => each(data, |bytes| i64::from_le_bytes(bytes) as f64),
        DataType::Fp16 => each(data, |bytes| half_to_f32(u16::from_le_bytes(bytes)).into()),
        DataType::Bf16 => each(data, |bytes| brain_to_f32(u16::from_le_bytes(bytes)).into()),
        DataType::Fp32 => each(data, |bytes| f32::from_le_bytes(bytes).into()),
        DataType::Fp64 => each(data, f64::from_le_bytes),
        DataType::Bytes => Vec::new(),
    }
}

fn join<const N: usize, T: fmt::Display>(data: &[u8], element: impl Fn([u8; N]) -> T, json: &mut String) {
    for (index, bytes) in data.as_chunks::<N>().0.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        write!(json, "{comma}{}", element(*bytes)).expect("writing into memory cannot fail");
    }
}

/// A number. `{:?}` is the shortest text that reads back as the same one.
struct Number<T>(T);

impl<T: fmt::Debug + Copy + Into<f64>> fmt::Display for Number<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value: f64 = self.0.into();
        match value.is_infinite() {
            true if value > 0.0 => f.write_str("Infinity"),
            true => f.write_str("-Infinity"),
            // What is no number is `NaN`.
            false => write!(f, "{:?}", self.0),
        }
    }
}

/// The upper half of a binary32.
fn brain_to_f32(brain: u16) -> f32 {
    f32::from_bits(u32::from(brain) << 16)
}

/// IEEE 754 binary16 to binary32, which holds every one of its values.
fn half_to_f32(half: u16) -> f32 {
    let sign = if half >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, fraction) = (i32::from(half >> 10 & 0x1f), f32::from(half & 0x3ff) / 1024.0);
    sign * match exponent {
        0 => fraction * 2f32.powi(-14),
        31 if fraction == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        _ => (1.0 + fraction) * 2f32.powi(exponent - 15),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json, value::RawValue};

    fn round_trip(datatype: DataType, bytes: &[u8]) -> Vec<u8> {
        let mut json = String::from("[");
        write_json(datatype, bytes, &mut json).unwrap();
        json.push(']');
        read_json(datatype, bytes.len() / datatype.bytes(), raw(&json).unwrap()).unwrap()
    }

    fn raw(json: &str) -> serde_json::Result<&[u8]> {
        serde_json::from_str::<&RawValue>(json).map(|raw| raw.get().as_bytes())
    }

    /// Arrays of numbers, and now and then of something else.
    fn nested() -> impl Strategy<Value = Value> {
        let number = prop_oneof![
            any::<i16>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from)
        ];
        let other = prop_oneof![
            any::<bool>().prop_map(Value::from),
            "[\\[,1 ]{0,3}".prop_map(Value::from),
            Just(json!({ "a": [1] })),
            Just(Value::Null)
        ];
        let leaf = prop_oneof![30 => number, 1 => other];
        leaf.prop_recursive(4, 40, 5, |inner| proptest::collection::vec(inner, 0..5).prop_map(Value::from))
    }

    /// The elements as serde_json finds them.
    fn flattened(datatype: DataType, value: &Value, bytes: &mut Vec<u8>) -> Option<()> {
        match (datatype, value) {
            (_, Value::Array(values)) => values.iter().try_for_each(|value| flattened(datatype, value, bytes))?,
            (DataType::Bool, _) => bytes.push(value.as_bool()?.into()),
            (DataType::Uint8, _) => bytes.push(value.as_u64()?.try_into().ok()?),
            (DataType::Int64, _) => bytes.extend(value.as_i64()?.to_le_bytes()),
            (DataType::Fp64, _) => bytes.extend(value.as_f64()?.to_le_bytes()),
            other => unreachable!("{other:?}"),
        }
        Some(())
    }

    proptest! {
        #[test]
        fn every_type_round_trips(random in proptest::collection::vec(any::<u8>(), 16)) {
            for datatype in DataType::ALL {
                let mut bytes = random.clone();
                match datatype {
                    DataType::Fp16 | DataType::Bf16 | DataType::Bytes => continue,
                    DataType::Bool => bytes.iter_mut().for_each(|byte| *byte &= 1),
                    // Without the upper exponent bits every pattern is a finite number.
                    DataType::Fp32 | DataType::Fp64 => bytes.iter_mut().for_each(|byte| *byte &= 0x3f),
                    _ => {}
                }
                prop_assert_eq!(round_trip(datatype, &bytes), &bytes[..], "{}", datatype);
            }
        }

        #[test]
        fn elements_are_those_that_a_parser_finds(value in nested()) {
            for datatype in [DataType::Bool, DataType::Uint8, DataType::Int64, DataType::Fp64] {
                let mut expected = Vec::new();
                let expected = flattened(datatype, &value, &mut expected).map(|()| expected);
                let elements = expected.as_ref().map_or(usize::MAX / 8, |bytes| bytes.len() / datatype.bytes());
                for text in [value.to_string(), format!("{value:#}")] {
                    let found = read_json(datatype, elements, raw(&text).unwrap());
                    prop_assert_eq!(found.ok(), expected.clone(), "{}: {}", datatype, text);
                }
            }
        }

        #[test]
        fn no_text_panics(text in "[\\[\\]0-9eE.,truefalsn \"{}-]{0,60}", elements in 0usize..20) {
            for datatype in DataType::ALL {
                if let Ok(json) = raw(&text) {
                    let _ = read_json(datatype, elements, json);
                }
            }
        }
    }

    #[test]
    fn values_outside_the_type_are_named() {
        let error = |datatype, json| read_json(datatype, 2, raw(json).unwrap()).unwrap_err();
        assert!(error(DataType::Uint8, "[1, 256]").starts_with("found 256, expected values of UINT8"));
        assert!(error(DataType::Uint8, "[1, -1]").starts_with("found -1, expected values of UINT8"));
        assert!(error(DataType::Int32, "[1.5]").starts_with("found 1.5, expected values of INT32"));
        assert!(error(DataType::Fp32, "[1e300]").starts_with("found 1e300"));
        assert!(error(DataType::Fp32, "[true]").starts_with("found true"));
        assert!(error(DataType::Fp32, "[\"1\"]").contains("expected values of FP32, or arrays of them"));
        assert!(error(DataType::Bool, "[1]").starts_with("found 1, expected values of BOOL"));
        assert!(error(DataType::Fp32, "[[1], [2, 3]]").starts_with("found more than the expected 2 elements"));
        assert_eq!(error(DataType::Fp32, "[[1], []]"), "found 1 elements, expected 2");
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        assert_eq!(error(DataType::Fp32, &deep), "found 0 elements, expected 2");
    }

    #[test]
    fn halves_are_exact_and_what_json_has_no_number_for_is_written_as_triton_does() {
        let halves = [0x3c00u16, 0xc000, 0x3555, 0x0001, 0x7c00, 0x7e00, 0xfc00];
        let bytes: Vec<u8> = halves.into_iter().flat_map(u16::to_le_bytes).collect();
        let mut json = String::new();
        write_json(DataType::Fp16, &bytes, &mut json).unwrap();
        assert_eq!(json, "1.0,-2.0,0.33325195,5.9604645e-8,Infinity,NaN,-Infinity");
        let brains: Vec<u8> =
            [0x3f80u16, 0xc000, 0x3eab, 0x7f80, 0x7fc0].into_iter().flat_map(u16::to_le_bytes).collect();
        json.clear();
        write_json(DataType::Bf16, &brains, &mut json).unwrap();
        assert_eq!(json, "1.0,-2.0,0.33398438,Infinity,NaN");
        assert_eq!(to_f64(DataType::Bf16, &brains[..4]), [1.0, -2.0]);
    }

    #[test]
    fn what_json_has_no_number_for_is_replaced_in_place_and_read() {
        let json = br#"{"NaN": "Infinity \" NaN", "data": [NaN, -Infinity, 1]}"#;
        let replaced = finite(json).unwrap();
        assert_eq!(str::from_utf8(&replaced).unwrap(), r#"{"NaN": "Infinity \" NaN", "data": [0.0, -0.000000, 1]}"#);
        assert_eq!(finite(br#"{"a": "NaN", "b": [1], "c": "\"#), None);
        let bytes = read_json(DataType::Fp32, 3, b"[NaN, -Infinity, Infinity]").unwrap();
        let values: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        assert!(values[0].is_nan() && values[1..] == [f32::NEG_INFINITY, f32::INFINITY]);
        assert!(
            read_json(DataType::Int32, 1, b"[NaN]").unwrap_err().starts_with("found NaN, expected values of INT32")
        );
    }
}
