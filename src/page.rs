//! Asks a member for a page of its `admin.http`, over HTTP/1. What a page says comes from other processes, and clients
//! name models: [`decoded`] makes it harmless for a terminal, for whoever shows it. Part of the driver: one connection
//! at a time, and a clock.
#![allow(clippy::disallowed_methods)] // Has a socket and waits, in real time.

use std::{
    io::{Error, ErrorKind, Read as _, Write as _},
    net::{TcpStream, ToSocketAddrs as _},
    time::Instant,
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use proto::{Span, Wait};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// How long a member may take to connect, and then for all of its answer: it does so on a thread of its own.
const PATIENCE: Span = Wait::Looked.bound();
/// Bytes of an answer that are read.
const ANSWER_BYTES_MAX: usize = 32 << 20;
const CHUNK_BYTES: usize = 64 << 10;

/// What is at a target (a path, and perhaps a query) of the member at `ip:port`, `name:port` or a URL of these;
/// `whose` says where it should be.
///
/// # Errors
/// In words: what was found, and what was expected.
pub(crate) fn of(member: &str, target: &str, whose: &str) -> Result<String> {
    let address = member.strip_prefix("http://").unwrap_or(member).trim_end_matches('/');
    let found = address.to_socket_addrs().context("expected ip:port or name:port")?.next();
    let at = found.ok_or_else(|| anyhow!("the name has no address"))?;
    let mut stream = TcpStream::connect_timeout(&at, PATIENCE.to_duration()).inspect_err(note_if_late)?;
    let until = Instant::now() + PATIENCE.to_duration();
    stream.set_write_timeout(Some(PATIENCE.to_duration()))?;
    let question = format!("GET {target} HTTP/1.1\r\nhost: {address}\r\n\r\n");
    stream.write_all(question.as_bytes()).inspect_err(note_if_late)?;
    body(&read(stream, until).context("no answer")?, target, whose)
}

fn note_if_late(error: &Error) {
    if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) {
        Wait::Looked.note_reached();
    }
}

/// All that comes until the other end closes. One that tells a byte at a time gets no more time than others.
fn read(mut stream: TcpStream, until: Instant) -> Result<String> {
    let (mut answer, mut chunk) = (Vec::new(), vec![0; CHUNK_BYTES]);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            Wait::Looked.note_reached();
            bail!("it took longer than {PATIENCE}");
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut chunk) {
            Ok(0) => return String::from_utf8(answer).context("it is no text"),
            Ok(count) => answer.extend_from_slice(&chunk[..count]),
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(error) => return Err(error.into()),
        }
        ensure!(answer.len() <= ANSWER_BYTES_MAX, "it is longer than {ANSWER_BYTES_MAX} bytes");
    }
}

/// What stands in an answer.
pub(crate) fn body(answer: &str, target: &str, whose: &str) -> Result<String> {
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(|| anyhow!("found no answer in HTTP"))?;
    let path = target.split('?').next().unwrap_or_default();
    match head.split(' ').nth(1).unwrap_or_default() {
        "200" => Ok(body.to_owned()),
        "404" => bail!("nothing is at {path}: expected {whose}"),
        _ => bail!("{}", plain(body.lines().next().unwrap_or_default())),
    }
}

/// A body in JSON, as it is: for other programs.
pub(crate) fn exact<T: DeserializeOwned>(body: &str) -> Result<T> {
    serde_json::from_str(body).context(OTHER_VERSION)
}

/// The same for people: no text in it does anything to a terminal.
pub(crate) fn decoded<T: DeserializeOwned>(body: &str) -> Result<T> {
    let mut value: Value = exact(body)?;
    make_plain(&mut value);
    serde_json::from_value(value).context(OTHER_VERSION)
}

const OTHER_VERSION: &str = "its answer is of another version";

/// All texts, whatever they are called: none is forgotten that a page is to have one day. The parser has bounded the
/// depth.
fn make_plain(value: &mut Value) {
    match value {
        Value::String(text) => *text = plain(text),
        Value::Array(values) => values.iter_mut().for_each(make_plain),
        Value::Object(fields) => {
            let plain_fields = std::mem::take(fields).into_iter().map(|(key, mut value)| {
                make_plain(&mut value);
                (plain(&key), value)
            });
            *fields = plain_fields.collect();
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// A text with escapes in place of what a terminal obeys (control characters), hides or turns around (formats), or
/// joins to what stands before it. A backslash is escaped, too, so that different names stay different.
pub(crate) fn plain(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '\'' | '"' => shown.push(letter),
            _ => shown.extend(letter.escape_debug()),
        }
    }
    shown
}

/// JSON that says the same and that a terminal does not obey. Control characters can only stand in its strings: between
/// them this process writes none.
pub(crate) fn plain_json(json: &str) -> String {
    let mut shown = String::with_capacity(json.len());
    for letter in json.chars() {
        match letter {
            // Those of ASCII but one are escaped already.
            '\u{7f}'..='\u{9f}' => shown += &format!("\\u{:04x}", u32::from(letter)),
            _ => shown.push(letter),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use std::{io, net::TcpListener, thread};

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// What a terminal could obey, or show in another place than where it stands.
    fn is_harmful(letter: char) -> bool {
        let formats = ['\u{ad}'..='\u{ad}', '\u{200b}'..='\u{200f}', '\u{2028}'..='\u{202e}', '\u{2060}'..='\u{206f}'];
        letter.is_control() || letter == '\u{feff}' || formats.iter().any(|range| range.contains(&letter))
    }

    /// Undoes [`plain`], by what Rust's literals mean.
    fn meant(shown: &str) -> String {
        let (mut text, mut letters) = (String::new(), shown.chars());
        while let Some(letter) = letters.next() {
            let escaped = (letter == '\\').then(|| letters.next().unwrap());
            text.push(match escaped {
                None => letter,
                Some('n') => '\n',
                Some('r') => '\r',
                Some('t') => '\t',
                Some('0') => '\0',
                Some('u') => {
                    let digits: String = letters.by_ref().skip(1).take_while(|digit| *digit != '}').collect();
                    char::from_u32(u32::from_str_radix(&digits, 16).unwrap()).unwrap()
                }
                Some(other) => other,
            });
        }
        text
    }

    proptest! {
        #[test]
        fn no_text_reaches_a_terminal_that_it_obeys(
            text in prop_oneof![any::<String>(), "[\u{1b}\u{7}\u{9b}\u{202e}\\[\\]a-c0-9;\n\"\\\\]{0,20}"]
        ) {
            let body = json!({ "name": text, "in": [{ text.clone(): [text.clone()] }] }).to_string();
            let page: Value = decoded(&body).unwrap();
            prop_assert!(!page["name"].as_str().unwrap().chars().any(is_harmful), "{page}");
            prop_assert_eq!(meant(page["name"].as_str().unwrap()), text.clone());
            prop_assert_eq!(&page["in"][0][plain(&text)][0], &page["name"]);
            let shown = plain_json(&body);
            prop_assert!(!shown.chars().any(char::is_control), "{shown}");
            prop_assert_eq!(exact::<Value>(&shown).unwrap(), exact::<Value>(&body).unwrap());
        }
    }

    #[test]
    fn names_that_do_nothing_stay_as_they_are() {
        for name in ["resnet50", "it's \"x\"", "Überwachung/モデル", "a.b-c_d e"] {
            assert_eq!(plain(name), name);
        }
        assert_eq!(plain("\u{1b}[2J\u{7}r\u{202e}\n\u{9b}"), r"\u{1b}[2J\u{7}r\u{202e}\n\u{9b}");
    }

    #[test]
    fn why_a_member_refuses_is_told_without_its_escapes() {
        let wrong = body("HTTP/1.1 400 Bad Request\r\n\r\nno \u{1b}[31mway\n", "/x", "y").unwrap_err();
        assert_eq!(wrong.to_string(), r"no \u{1b}[31mway");
    }

    /// What a listener answers who writes this and closes.
    fn answered(with: &'static [u8]) -> Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let answers = thread::spawn(move || -> io::Result<()> {
            let (mut stream, _) = listener.accept()?;
            let mut asked = Vec::new();
            while !asked.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte)?;
                asked.push(byte[0]);
            }
            stream.write_all(with)
        });
        let told = of(&address, "/v2/x?page=0", "a frontend's `admin.http`");
        answers.join().unwrap().unwrap();
        told
    }

    #[test]
    fn an_answer_is_all_until_its_end() {
        assert_eq!(answered(b"HTTP/1.1 200 OK\r\na: b\r\n\r\n{\"a\": 1}").unwrap(), "{\"a\": 1}");
        let wrong = |with| format!("{:#}", answered(with).unwrap_err());
        assert_eq!(wrong(b"HTTP/1.1 404 x\r\n\r\n"), "nothing is at /v2/x: expected a frontend's `admin.http`");
        assert_eq!(wrong(b"HTTP/1.1 200 OK\r\n\r\n\xff").split(": ").nth(1), Some("it is no text"));
        assert_eq!(wrong(b""), "found no answer in HTTP");
    }

    #[test]
    fn a_member_that_tells_nothing_in_its_time_is_given_up() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let wrong = read(stream, Instant::now()).unwrap_err();
        assert_eq!(wrong.to_string(), "it took longer than 5.000 s");
    }
}
