//! RESP2, the protocol of Redis, as far as a frontend speaks it (redis.io, "Redis serialization protocol
//! specification"). What is read is bounded: a server that talks nonsense is found out before it is believed. No IO.

use std::io::Write as _;

/// Lines, and strings of a known length: numbers and errors, of which none is longer.
const TEXT_BYTES_MAX: usize = 4096;
/// Elements of one list: of a context of 32 members all sums of nine blocks are fewer.
const LIST_MAX: usize = 1024;
/// Lists in lists.
const DEPTH_MAX: usize = 4;

/// What a server says.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Text(String),
    Error(String),
    Number(i64),
    List(Vec<Value>),
    Nothing,
}

/// Something that no server of Redis says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Nonsense;

/// Appends a command.
pub(super) fn write(parts: &[&[u8]], to: &mut Vec<u8>) {
    let _ = write!(to, "*{}\r\n", parts.len());
    for part in parts {
        let _ = write!(to, "${}\r\n", part.len());
        to.extend_from_slice(part);
        to.extend_from_slice(b"\r\n");
    }
}

/// The reply that these bytes begin with, and what comes behind it; `None` if it is not all there yet.
pub(super) fn read(bytes: &[u8]) -> Result<Option<(Value, &[u8])>, Nonsense> {
    let mut reader = Reader { bytes };
    match reader.value(DEPTH_MAX) {
        Ok(value) => Ok(Some((value, reader.bytes))),
        Err(Stop::Short) => Ok(None),
        Err(Stop::Nonsense) => Err(Nonsense),
    }
}

enum Stop {
    Short,
    Nonsense,
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn value(&mut self, depth: usize) -> Result<Value, Stop> {
        let line = self.line()?;
        let (kind, rest) = line.split_at_checked(1).ok_or(Stop::Nonsense)?;
        match kind {
            "+" => Ok(Value::Text(rest.to_owned())),
            "-" => Ok(Value::Error(rest.to_owned())),
            ":" => rest.parse().map(Value::Number).map_err(|_| Stop::Nonsense),
            "$" | "*" if rest == "-1" => Ok(Value::Nothing),
            "$" => self.text(length(rest, TEXT_BYTES_MAX)?).map(Value::Text),
            "*" if depth > 0 => {
                (0..length(rest, LIST_MAX)?).map(|_| self.value(depth - 1)).collect::<Result<_, _>>().map(Value::List)
            }
            _ => Err(Stop::Nonsense),
        }
    }

    fn line(&mut self) -> Result<&'a str, Stop> {
        let end = self.bytes.iter().take(TEXT_BYTES_MAX).position(|byte| *byte == b'\n');
        let Some(end) = end else {
            return Err(if self.bytes.len() < TEXT_BYTES_MAX { Stop::Short } else { Stop::Nonsense });
        };
        let (line, rest) = (&self.bytes[..end], &self.bytes[end + 1..]);
        self.bytes = rest;
        let line = line.strip_suffix(b"\r").ok_or(Stop::Nonsense)?;
        str::from_utf8(line).map_err(|_| Stop::Nonsense)
    }

    fn text(&mut self, length: usize) -> Result<String, Stop> {
        let (text, rest) = self.bytes.split_at_checked(length).ok_or(Stop::Short)?;
        self.bytes = match rest {
            [b'\r', b'\n', rest @ ..] => rest,
            [] | [b'\r'] => return Err(Stop::Short),
            _ => return Err(Stop::Nonsense),
        };
        String::from_utf8(text.to_owned()).map_err(|_| Stop::Nonsense)
    }
}

fn length(text: &str, max: usize) -> Result<usize, Stop> {
    text.parse().ok().filter(|length| *length <= max).ok_or(Stop::Nonsense)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str) -> Result<Option<Value>, Nonsense> {
        let read = read(text.as_bytes())?;
        Ok(read.map(|(value, rest)| {
            assert_eq!(rest, b"");
            value
        }))
    }

    #[test]
    fn replies_are_read_once_they_are_all_there() {
        let text = "*4\r\n:-7\r\n$3\r\na\r\n\r\n$-1\r\n*2\r\n+OK\r\n-ERR no\r\n";
        let inner = Value::List(vec![Value::Text("OK".to_owned()), Value::Error("ERR no".to_owned())]);
        let expected = Value::List(vec![Value::Number(-7), Value::Text("a\r\n".to_owned()), Value::Nothing, inner]);
        // `a` and a line's end are three bytes.
        assert_eq!(all(text), Ok(Some(expected)));
        for end in 0..text.len() {
            assert_eq!(all(&text[..end]), Ok(None), "{end}");
        }
        let (first, rest) = read(b"+OK\r\n+PONG\r\n").unwrap().unwrap();
        assert_eq!((first, rest), (Value::Text("OK".to_owned()), &b"+PONG\r\n"[..]));
    }

    #[test]
    fn nonsense_is_found_out_before_it_is_stored() {
        let long = "x".repeat(TEXT_BYTES_MAX);
        for text in [
            "HTTP/1.1 400 Bad Request\r\n",
            "\r\n",
            "+OK\n",
            ":x\r\n",
            "$99999999999999999999\r\n",
            "$4097\r\n",
            "$-2\r\n",
            "*1025\r\n",
            "*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n",
            "$1\r\nabc",
            "%1\r\n",
            &long,
        ] {
            assert_eq!(all(text), Err(Nonsense), "{text}");
        }
        assert_eq!(read(b"+\xff\r\n"), Err(Nonsense));
    }

    #[test]
    fn commands_are_lists_of_strings() {
        let mut bytes = Vec::new();
        write(&[b"SET", b"a\r\n", b""], &mut bytes);
        assert_eq!(bytes, b"*3\r\n$3\r\nSET\r\n$3\r\na\r\n\r\n$0\r\n\r\n");
    }
}
