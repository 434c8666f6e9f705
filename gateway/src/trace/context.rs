//! W3C Trace Context, level 1: which trace a request is part of, and whether that trace is recorded. What is not valid
//! is as if it had not been sent (section 3.2).

use std::fmt;

use hyper::{HeaderMap, header::HeaderValue};

/// Bytes of `traceparent` of version 00.
const PARENT_BYTES: usize = 55;
/// Members of `tracestate` (section 3.3.1.1), and bytes that are carried on (section 3.3.1.5).
const STATE_MEMBERS_MAX: usize = 32;
const STATE_BYTES_MAX: usize = 512;

/// Which trace a request is part of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceContext {
    /// `trace-id`; not zero.
    pub trace: u128,
    /// `parent-id`: the caller's span; not zero.
    pub parent: u64,
    /// Whether the caller may have recorded its span.
    pub sampled: bool,
    /// `tracestate`, as it came; empty if there was none, or none that is valid.
    pub state: String,
}

impl TraceContext {
    /// That of a request over HTTP or gRPC.
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let all = |name| headers.get_all(name).iter().map(HeaderValue::as_bytes);
        Self::parse(all("traceparent"), all("tracestate"))
    }

    /// Reads the fields `traceparent` and `tracestate` of a request.
    #[must_use]
    pub fn parse<'a>(
        mut parents: impl Iterator<Item = &'a [u8]>,
        states: impl Iterator<Item = &'a [u8]>,
    ) -> Option<Self> {
        let (parent, None) = (parents.next()?, parents.next()) else { return None };
        let (trace, parent, sampled) = parse_parent(parent)?;
        Some(Self { trace, parent, sampled, state: parse_state(states).unwrap_or_default() })
    }
}

/// `traceparent`, version 00.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace, self.parent, u8::from(self.sampled))
    }
}

/// Section 3.2.2: `version "-" trace-id "-" parent-id "-" trace-flags`.
fn parse_parent(field: &[u8]) -> Option<(u128, u64, bool)> {
    let (known, rest) = field.split_at_checked(PARENT_BYTES)?;
    let dashes = [2, 35, 52].iter().all(|&at| known[at] == b'-');
    let version = hex(&known[..2])?;
    // A later version may go on after another dash (section 3.2.4); 255 is none.
    let fits = if version == 0 { rest.is_empty() } else { version != 0xff && rest.first().is_none_or(|&b| b == b'-') };
    let (trace, parent) = (hex(&known[3..35])?, hex(&known[36..52])? as u64);
    (dashes && fits && trace != 0 && parent != 0).then_some((trace, parent, hex(&known[53..])? & 1 == 1))
}

/// Lower-case hexadecimal digits, at most 32.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |number: u128, digit| match digit {
        b'0'..=b'9' => Some(number << 4 | u128::from(digit - b'0')),
        b'a'..=b'f' => Some(number << 4 | u128::from(digit - b'a' + 10)),
        _ => None,
    })
}

/// Section 3.3.1: members apart by commas, over any number of fields. It ends at the first that is one too many, so
/// that keys are compared with few others, whatever was sent.
fn parse_state<'a>(fields: impl Iterator<Item = &'a [u8]>) -> Option<String> {
    let (mut keys, mut state) = (Vec::new(), String::new());
    for field in fields {
        let members = std::str::from_utf8(field).ok()?.split(',').map(|member| member.trim_matches([' ', '\t']));
        for member in members.filter(|member| !member.is_empty()) {
            let comma = if keys.is_empty() { "" } else { "," };
            if keys.len() == STATE_MEMBERS_MAX || state.len() + comma.len() + member.len() > STATE_BYTES_MAX {
                return None;
            }
            let key = parse_member(member)?;
            if keys.contains(&key) {
                return None;
            }
            keys.push(key);
            state.extend([comma, member]);
        }
    }
    Some(state)
}

/// Sections 3.3.1.3.1 and 3.3.1.3.2: the key of a member that is valid.
fn parse_member(member: &str) -> Option<&str> {
    let (key, value) = member.split_once('=')?;
    let part = |text: &str, max: usize, digit_first: bool| {
        let starts = |b: &u8| b.is_ascii_lowercase() || digit_first && b.is_ascii_digit();
        let goes_on = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"_-*/".contains(b);
        text.len() <= max && text.as_bytes().first().is_some_and(starts) && text.as_bytes().iter().all(goes_on)
    };
    let is_key = match key.split_once('@') {
        None => part(key, 256, false),
        Some((tenant, system)) => part(tenant, 241, true) && part(system, 14, false),
    };
    let is_value = (1..=256).contains(&value.len())
        && value.bytes().all(|b| (0x20..=0x7e).contains(&b) && b != b',' && b != b'=')
        && !value.ends_with(' ');
    (is_key && is_value).then_some(key)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn parse(parents: &[&str], states: &[&str]) -> Option<TraceContext> {
        TraceContext::parse(parents.iter().map(|p| p.as_bytes()), states.iter().map(|s| s.as_bytes()))
    }

    #[test]
    fn the_recommendations_own_example() {
        let context = parse(&[PARENT], &["rojo=00f067aa0ba902b7", "congo=t61rcWkgMzE, t@v=x"]).unwrap();
        assert_eq!(context.trace, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        assert_eq!((context.parent, context.sampled), (0x00f0_67aa_0ba9_02b7, true));
        assert_eq!(context.state, "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE,t@v=x");
        assert_eq!(context.to_string(), PARENT);
    }

    #[test]
    fn what_is_not_valid_was_not_sent() {
        let zero_trace = "00-00000000000000000000000000000000-00f067aa0ba902b7-01";
        let zero_parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01";
        let (upper, version, flags) =
            (PARENT.to_uppercase(), PARENT.replacen("00", "ff", 1), PARENT.replace("-01", "-0x"));
        let (longer, dash) = (format!("{PARENT}-00"), PARENT.replacen('-', "_", 1));
        for wrong in ["", zero_trace, zero_parent, &upper, &version, &flags, &longer, &dash, &PARENT[1..]] {
            assert_eq!(parse(&[wrong], &[]), None, "{wrong}");
        }
        assert_eq!(parse(&[PARENT, PARENT], &[]), None);
        assert_eq!(parse(&[], &["a=b"]), None);
    }

    #[test]
    fn later_versions_and_unknown_flags_are_read_as_far_as_they_are_known() {
        for later in [
            "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-fe",
            "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-fe-what",
        ] {
            assert!(!parse(&[later], &[]).unwrap().sampled);
        }
        assert_eq!(parse(&["cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01what"], &[]), None);
    }

    #[test]
    fn a_state_that_is_not_valid_goes_and_the_parent_stays() {
        let many: String = (0..33).map(|n| format!("a{n}=b,")).collect();
        let long = format!("a={}", "b".repeat(257));
        for wrong in ["A=b", "a", "a=", "=b", "a=b,a=c", "a=b=c", "@v=x", "t@=x", "a=\u{e9}", &many, &long] {
            assert_eq!(parse(&[PARENT], &[wrong]).unwrap().state, "", "{wrong}");
        }
        assert_eq!(parse(&[PARENT], &["", " , a=b ,"]).unwrap().state, "a=b");
    }

    /// Keys were compared with all others before it was looked at how many there are: 62 KB took 0.17 s.
    #[test]
    fn a_state_is_read_no_further_than_it_can_be_valid() {
        use std::cell::Cell;

        let fields: Vec<Vec<u8>> = (0..10_000).map(|n| format!("a{n}=b").into_bytes()).collect();
        let count = |fields: &[Vec<u8>]| {
            let taken = Cell::new(0);
            let read = parse_state(fields.iter().map(|field| &field[..]).inspect(|_| taken.set(taken.get() + 1)));
            (read.map(|state| state.len()), taken.get())
        };
        assert_eq!(count(&fields), (None, STATE_MEMBERS_MAX + 1));
        let fields: Vec<Vec<u8>> = (0..10).map(|n| format!("a{n}={}", "b".repeat(99)).into_bytes()).collect();
        assert_eq!(count(&fields), (None, 5), "512 bytes");
        assert_eq!(count(&fields[..4]), (Some(4 * 102 + 3), 4));
    }

    proptest! {
        #[test]
        fn contexts_survive_being_written_and_read(trace in 1u128.., parent in 1u64.., sampled: bool) {
            let context = TraceContext { trace, parent, sampled, state: String::new() };
            prop_assert_eq!(parse(&[&context.to_string()], &[]), Some(context));
        }

        /// A good field with some bytes replaced by any: never a panic, and what is accepted is what it says.
        #[test]
        fn any_bytes_are_read_or_ignored(
            at in 0usize..60,
            junk in prop::collection::vec(any::<u8>(), 0..8),
            state in prop::collection::vec(any::<u8>(), 0..80),
        ) {
            let mut field = PARENT.as_bytes().to_vec();
            let at = at.min(field.len());
            field.splice(at..(at + junk.len()).min(PARENT.len()), junk);
            if let Some(context) = TraceContext::parse([&field[..]].into_iter(), [&state[..]].into_iter()) {
                prop_assert_eq!(&context.to_string()[3..52], std::str::from_utf8(&field[3..52]).unwrap());
                prop_assert!(context.state.len() <= STATE_BYTES_MAX);
            }
        }
    }
}
