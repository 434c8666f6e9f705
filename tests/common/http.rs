//! One request over a connection of its own.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
};

use serde_json::Value;

/// The status and the answer; `None` if whoever is asked is gone before all of it is there.
pub(crate) fn try_exchange(address: SocketAddr, method: &str, path: &str, body: &str) -> Option<(u16, Value)> {
    let mut stream = TcpStream::connect(address).ok()?;
    let head = format!("{method} {path} HTTP/1.1\r\nhost: {address}\r\ncontent-length: {}\r\n", body.len());
    write!(stream, "{head}connection: close\r\n\r\n{body}").ok()?;
    let mut heard = String::new();
    stream.read_to_string(&mut heard).ok()?;
    let (head, body) = heard.split_once("\r\n\r\n")?;
    let answer = if body.is_empty() { Value::Null } else { serde_json::from_str(body).ok()? };
    Some((head[9..12].parse().ok()?, answer))
}

/// The same, of somebody who answers.
pub(crate) fn exchange(address: SocketAddr, method: &str, path: &str, body: &str) -> (u16, Value) {
    try_exchange(address, method, path, body).expect("an answer of JSON, or none")
}
