//! Strings (BYTES) between JSON and bytes, in which each has its length before it, as four bytes.

use std::{borrow::Cow, fmt::Write as _};

use frontend::excerpt;
use repository::cell::{self, HEAD_BYTES};
use serde::Deserialize;

/// A string with what may be borrowed of it: JSON without an escape.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// Reads exactly `elements` strings, nested in arrays in any way, of valid JSON.
pub(super) fn read_json(elements: usize, json: &[u8]) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::with_capacity(read_bytes_max(elements, json.len()));
    let (mut found, mut rest) = (0, json);
    while let Some(start) =
        rest.iter().position(|byte| !matches!(byte, b'[' | b']' | b',' | b' ' | b'\t' | b'\n' | b'\r'))
    {
        rest = &rest[start..];
        if rest[0] != b'"' {
            let end = rest.iter().position(|byte| matches!(byte, b',' | b']')).unwrap_or(rest.len());
            let found = excerpt(&String::from_utf8_lossy(&rest[..end]));
            return Err(format!("found {found}, expected strings, or arrays of them"));
        }
        if found == elements {
            return Err(format!("found more than the expected {elements} elements"));
        }
        let (text, after) = rest.split_at(text_bytes(rest));
        let Text(string) =
            serde_json::from_slice(text).map_err(|error| format!("found a string that is none: {error}"))?;
        bytes.extend_from_slice(&(string.len() as u32).to_le_bytes());
        bytes.extend_from_slice(string.as_bytes());
        (found, rest) = (found + 1, after);
    }
    if found < elements { Err(format!("found {found} elements, expected {elements}")) } else { Ok(bytes) }
}

/// Bytes that [`read_json`] yields at most: no character of JSON stands for more than its own bytes, and each string
/// has two quotation marks and another character before the next.
pub(super) fn read_bytes_max(elements: usize, json_bytes: usize) -> usize {
    json_bytes + elements.min(json_bytes.div_ceil(3)) * HEAD_BYTES
}

/// Bytes of the string that begins here, its quotation marks included.
fn text_bytes(json: &[u8]) -> usize {
    let mut at = 1;
    while let Some(&byte) = json.get(at) {
        match byte {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    json.len()
}

/// Appends the strings to a JSON array's inside, flat.
pub(super) fn write_json(data: &[u8], json: &mut String) -> Result<(), String> {
    for (index, string) in cell::strings(data).enumerate() {
        let text = string.map(str::from_utf8).ok_or("found strings whose lengths are wrong, expected true ones")?;
        let text = text.map_err(|_| {
            format!("found an element ({index}) that is not UTF-8, which JSON cannot hold; ask for binary_data")
        })?;
        let comma = if index > 0 { "," } else { "" };
        let text = serde_json::to_string(text).expect("text is representable in JSON");
        write!(json, "{comma}{text}").expect("writing into memory cannot fail");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn encoded(strings: &[String]) -> Vec<u8> {
        strings.iter().flat_map(|text| [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()).collect()
    }

    proptest! {
        #[test]
        fn strings_round_trip_as_a_parser_has_them(strings in proptest::collection::vec(any::<String>(), 0..6)) {
            let mut json = String::from("[");
            write_json(&encoded(&strings), &mut json).unwrap();
            json.push(']');
            prop_assert_eq!(serde_json::from_str::<Vec<String>>(&json).unwrap(), &strings[..]);
            let nested = format!("{:#}", json!([[strings], []]));
            for text in [&json, &nested] {
                let bytes = read_json(strings.len(), text.as_bytes()).unwrap();
                prop_assert!(bytes.len() <= read_bytes_max(strings.len(), text.len()));
                prop_assert_eq!(bytes, encoded(&strings));
            }
        }

        #[test]
        fn no_bytes_panic(text in "[\\[\\]\",\\\\u0-9a ]{0,40}", data in proptest::collection::vec(0u8..9, 0..30)) {
            let _ = (read_json(3, text.as_bytes()), write_json(&data, &mut String::new()));
        }
    }

    #[test]
    fn what_is_no_string_is_named() {
        let error = |json: &str| read_json(2, json.as_bytes()).unwrap_err();
        assert_eq!(error(r#"["a", 12]"#), "found 12, expected strings, or arrays of them");
        assert_eq!(error(r#"["a", ["b", "c"]]"#), "found more than the expected 2 elements");
        assert_eq!(error(r#"["a,]\""]"#), "found 1 elements, expected 2");
        assert!(error(r#"["\ud800", ""]"#).starts_with("found a string that is none: "));
        let error = write_json(&[1, 0, 0, 0, b'a', 1, 0, 0, 0, 255], &mut String::new()).unwrap_err();
        assert!(error.starts_with("found an element (1) that is not UTF-8"), "{error}");
        assert!(write_json(&[9, 0, 0, 0, 1], &mut String::new()).is_err());
    }
}
