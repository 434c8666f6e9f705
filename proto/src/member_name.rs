//! How operators call a member: in logs, in metrics, and to the scheduler.

/// Bytes of a member's name: those of a DNS label.
pub const MEMBER_NAME_BYTES_MAX: usize = 63;

/// Whether members can be called so: 1 to [`MEMBER_NAME_BYTES_MAX`] letters, digits, `-`, `_` and `.`.
#[must_use]
pub fn is_member_name(name: &str) -> bool {
    (1..=MEMBER_NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(is_allowed)
}

/// What members can be called that is most like a text, such as a host's name.
#[must_use]
pub fn member_name_like(text: &str) -> String {
    let name: String = text.bytes().take(MEMBER_NAME_BYTES_MAX).map(like).collect();
    if name.is_empty() { "unnamed".to_owned() } else { name }
}

fn like(byte: u8) -> char {
    if is_allowed(byte) { char::from(byte) } else { '-' }
}

fn is_allowed(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded_and_have_no_strange_characters() {
        let longest = "n".repeat(MEMBER_NAME_BYTES_MAX);
        for name in ["a", "gpu-host_3.rack7", &longest] {
            assert!(is_member_name(name), "{name}");
            assert_eq!(member_name_like(name), name);
        }
        for (text, like) in [("", "unnamed"), ("a b", "a-b"), ("h\u{f6}st\n", "h--st-"), ("{\"}", "---")] {
            assert!(!is_member_name(text), "{text}");
            assert_eq!(member_name_like(text), like);
        }
        let long = "n".repeat(MEMBER_NAME_BYTES_MAX + 1);
        assert!(!is_member_name(&long));
        assert_eq!(member_name_like(&long), longest);
    }
}
