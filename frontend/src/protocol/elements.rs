//! Tensor elements between JSON and little-endian bytes.

use std::fmt::{self, Write as _};

use repository::DataType;
use serde::de::{DeserializeSeed, Deserializer, Error, SeqAccess, Visitor};

/// Reads exactly `elements` numbers (or booleans), nested in arrays in any way, as bytes.
///
/// # Errors
/// What was found and expected, in one line.
pub fn read_json(datatype: DataType, elements: usize, json: &str) -> Result<Vec<u8>, String> {
    if datatype == DataType::Fp16 {
        return Err("found JSON, expected binary data: FP16 has no JSON form".to_owned());
    }
    let mut bytes = Vec::with_capacity((elements * datatype.bytes()).min(json.len() * datatype.bytes()));
    let mut deserializer = serde_json::Deserializer::from_str(json);
    let limit = elements * datatype.bytes();
    Flatten { datatype, limit, bytes: &mut bytes }
        .deserialize(&mut deserializer)
        .map_err(|error| format!("{error} in the data"))?;
    if bytes.len() < limit {
        return Err(format!("found {} elements, expected {elements}", bytes.len() / datatype.bytes()));
    }
    Ok(bytes)
}

/// Appends the elements to a JSON array's inside, flat. What JSON has no number for (NaN, infinities) becomes `null`.
pub fn write_json(datatype: DataType, data: &[u8], json: &mut String) {
    match datatype {
        DataType::Bool => join(data, |[byte]| byte != 0, json),
        DataType::Uint8 => join(data, u8::from_le_bytes, json),
        DataType::Uint16 => join(data, u16::from_le_bytes, json),
        DataType::Uint32 => join(data, u32::from_le_bytes, json),
        DataType::Uint64 => join(data, u64::from_le_bytes, json),
        DataType::Int8 => join(data, i8::from_le_bytes, json),
        DataType::Int16 => join(data, i16::from_le_bytes, json),
        DataType::Int32 => join(data, i32::from_le_bytes, json),
        DataType::Int64 => join(data, i64::from_le_bytes, json),
        DataType::Fp16 => join(data, |bytes| Finite(half_to_f32(u16::from_le_bytes(bytes))), json),
        DataType::Fp32 => join(data, |bytes| Finite(f32::from_le_bytes(bytes)), json),
        DataType::Fp64 => join(data, |bytes| Finite(f64::from_le_bytes(bytes)), json),
    }
}

/// The elements as numbers; true is 1.
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
        DataType::Fp32 => each(data, |bytes| f32::from_le_bytes(bytes).into()),
        DataType::Fp64 => each(data, f64::from_le_bytes),
    }
}

fn join<const N: usize, T: fmt::Display>(data: &[u8], element: impl Fn([u8; N]) -> T, json: &mut String) {
    for (index, bytes) in data.as_chunks::<N>().0.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        write!(json, "{comma}{}", element(*bytes)).expect("writing into memory cannot fail");
    }
}

/// A number, or `null` if JSON cannot write it. `{:?}` is the shortest text that reads back as the same number.
struct Finite<T>(T);

impl<T: fmt::Debug + Copy + Into<f64>> fmt::Display for Finite<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.into().is_finite() { write!(f, "{:?}", self.0) } else { f.write_str("null") }
    }
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

/// Appends whatever it deserializes, arrays element by element, to `bytes`. The parser bounds how deep arrays nest.
struct Flatten<'a> {
    datatype: DataType,
    /// Bytes at most.
    limit: usize,
    bytes: &'a mut Vec<u8>,
}

impl Flatten<'_> {
    fn push<E: Error>(self, element: &[u8]) -> Result<(), E> {
        if self.bytes.len() + element.len() > self.limit {
            let expected = self.limit / self.datatype.bytes();
            return Err(E::custom(format_args!("found more than the expected {expected} elements")));
        }
        self.bytes.extend_from_slice(element);
        Ok(())
    }

    fn mismatch<E: Error>(&self, found: impl fmt::Display) -> E {
        E::custom(format_args!("found {found}, expected values of {}", self.datatype))
    }

    fn push_integer<E: Error>(self, value: i128) -> Result<(), E> {
        macro_rules! integer {
            ($type:ty) => {
                match <$type>::try_from(value) {
                    Ok(fits) => self.push(&fits.to_le_bytes()),
                    Err(_) => Err(self.mismatch(value)),
                }
            };
        }
        match self.datatype {
            DataType::Uint8 => integer!(u8),
            DataType::Uint16 => integer!(u16),
            DataType::Uint32 => integer!(u32),
            DataType::Uint64 => integer!(u64),
            DataType::Int8 => integer!(i8),
            DataType::Int16 => integer!(i16),
            DataType::Int32 => integer!(i32),
            DataType::Int64 => integer!(i64),
            DataType::Fp32 => self.push(&(value as f32).to_le_bytes()),
            DataType::Fp64 => self.push(&(value as f64).to_le_bytes()),
            DataType::Bool | DataType::Fp16 => Err(self.mismatch(value)),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Flatten<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Flatten<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "values of {}, or arrays of them", self.datatype)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<(), E> {
        if self.datatype == DataType::Bool { self.push(&[u8::from(value)]) } else { Err(self.mismatch(value)) }
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<(), E> {
        self.push_integer(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<(), E> {
        self.push_integer(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<(), E> {
        match self.datatype {
            DataType::Fp32 if (value as f32).is_finite() => self.push(&(value as f32).to_le_bytes()),
            DataType::Fp64 => self.push(&value.to_le_bytes()),
            _ => Err(self.mismatch(format_args!("{value:?}"))),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let Self { datatype, limit, bytes } = self;
        while seq.next_element_seed(Flatten { datatype, limit, bytes: &mut *bytes })?.is_some() {}
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn round_trip(datatype: DataType, bytes: &[u8]) -> Vec<u8> {
        let mut json = String::from("[");
        write_json(datatype, bytes, &mut json);
        json.push(']');
        read_json(datatype, bytes.len() / datatype.bytes(), &json).unwrap()
    }

    proptest! {
        #[test]
        fn every_type_round_trips(random in proptest::collection::vec(any::<u8>(), 16)) {
            for datatype in DataType::ALL {
                let mut bytes = random.clone();
                match datatype {
                    DataType::Fp16 => continue,
                    DataType::Bool => bytes.iter_mut().for_each(|byte| *byte &= 1),
                    // Without the upper exponent bits every pattern is a finite number.
                    DataType::Fp32 | DataType::Fp64 => bytes.iter_mut().for_each(|byte| *byte &= 0x3f),
                    _ => {}
                }
                prop_assert_eq!(round_trip(datatype, &bytes), &bytes[..], "{}", datatype);
            }
        }

        #[test]
        fn no_text_panics(text in "[\\[\\]0-9eE.,truefalsn \"{}-]{0,60}", elements in 0usize..20) {
            for datatype in DataType::ALL {
                let _ = read_json(datatype, elements, &text);
            }
        }
    }

    #[test]
    fn values_outside_the_type_are_named() {
        let error = |datatype, json| read_json(datatype, 2, json).unwrap_err();
        assert!(error(DataType::Uint8, "[1, 256]").starts_with("found 256, expected values of UINT8"));
        assert!(error(DataType::Uint8, "[1, -1]").starts_with("found -1, expected values of UINT8"));
        assert!(error(DataType::Int32, "[1.5]").starts_with("found 1.5, expected values of INT32"));
        assert!(error(DataType::Fp32, "[1e300]").starts_with("found 1e300"));
        assert!(error(DataType::Fp32, "[true]").starts_with("found true"));
        assert!(error(DataType::Fp32, "[\"1\"]").contains("expected values of FP32, or arrays of them"));
        assert!(error(DataType::Bool, "[1]").starts_with("found 1, expected values of BOOL"));
        assert!(error(DataType::Fp32, "[[1], [2, 3]]").starts_with("found more than the expected 2 elements"));
        assert_eq!(error(DataType::Fp32, "[[1], []]"), "found 1 elements, expected 2");
        let deep = "[".repeat(100_000);
        assert!(error(DataType::Fp32, &deep).contains("recursion limit"));
    }

    #[test]
    fn halves_are_exact_and_what_is_no_number_is_null() {
        let halves = [0x3c00u16, 0xc000, 0x3555, 0x0001, 0x7c00, 0x7e00];
        let bytes: Vec<u8> = halves.into_iter().flat_map(u16::to_le_bytes).collect();
        let mut json = String::new();
        write_json(DataType::Fp16, &bytes, &mut json);
        assert_eq!(json, "1.0,-2.0,0.33325195,5.9604645e-8,null,null");
    }
}
