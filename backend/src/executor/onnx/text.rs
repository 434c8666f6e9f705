//! Strings of any bytes as those that engines have, which are UTF-8.
//!
//! Bytes that are not UTF-8 become characters of their own, the last 128 that there are: two noncharacters and private
//! ones before them, which no text has by accident. Where a client's text does have one of these, its bytes become such
//! characters, too, so that every string comes back from a model that only passes it on.

/// What the byte 0x80 becomes; the others follow it.
const FIRST: u32 = 0x10_ff80;
const _: () = assert!(FIRST + 0x7f == char::MAX as u32);

/// A string for a model.
pub(super) fn from_bytes(bytes: &[u8]) -> String {
    let is_own = |char: char| u32::from(char) >= FIRST;
    match str::from_utf8(bytes) {
        Ok(text) if !text.contains(is_own) => return text.to_owned(),
        _ => {}
    }
    let mut text = String::with_capacity(2 * bytes.len());
    let escape = |bytes: &[u8], text: &mut String| {
        text.extend(bytes.iter().map(|&byte| {
            let own = FIRST + u32::from(byte & 0x7f);
            char::from_u32(own).filter(|_| byte >= 0x80).unwrap_or(char::from(byte))
        }));
    };
    for chunk in bytes.utf8_chunks() {
        for char in chunk.valid().chars() {
            if is_own(char) { escape(char.encode_utf8(&mut [0; 4]).as_bytes(), &mut text) } else { text.push(char) }
        }
        escape(chunk.invalid(), &mut text);
    }
    text
}

/// The bytes of a string that a model gives.
pub(super) fn to_bytes(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    for char in text.chars() {
        match u32::from(char).checked_sub(FIRST) {
            Some(own) => bytes.push(0x80 + own as u8),
            None => bytes.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_string_comes_back(pieces in proptest::collection::vec(
            prop_oneof![
                any::<u8>().prop_map(|byte| vec![byte]),
                any::<char>().prop_map(|char| char.to_string().into_bytes()),
                (FIRST..=char::MAX as u32).prop_map(|own| char::from_u32(own).unwrap().to_string().into_bytes()),
            ],
            0..20,
        )) {
            let bytes = pieces.concat();
            prop_assert_eq!(to_bytes(&from_bytes(&bytes)), bytes);
        }

        #[test]
        fn text_stays_as_it_is(text in "[a-zäé€😀\u{10ff7f}\\x00]{0,20}") {
            prop_assert_eq!(from_bytes(text.as_bytes()), &text[..]);
            prop_assert_eq!(to_bytes(&text), text.as_bytes());
        }
    }
}
