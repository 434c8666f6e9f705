//! The body of an infer request as bytes, in pieces, with any header length; its inputs also as pictures.
#![no_main]

mod counted;
mod served;

use std::sync::LazyLock;

use bytes::Bytes;
use frontend::rope::Rope;
use gateway::protocol::{Tensors, json, pictures};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (Option<u16>, u8, &[u8])| {
    let (header_length, piece_bytes, bytes) = input;
    let mut body = Rope::default();
    for piece in bytes.chunks(usize::from(piece_bytes).max(1)) {
        body.push(Bytes::copy_from_slice(piece));
    }
    // Loaded once, and not on the account of whatever input comes first.
    LazyLock::force(&served::MODEL);
    // A list of the input's names and shapes; and the pieces' handles of 32 bytes each, in a list that holds three
    // times as many while it grows.
    let pieces = body.pieces().len();
    counted::check(64 * bytes.len() + 96 * pieces + 4096, || parse(body, header_length));
});

fn parse(body: Rope, header_length: Option<u16>) {
    let split = json::split_body(body, header_length.map(usize::from));
    served::check(split.and_then(|(json, binary)| {
        let request = json::parse_request(&json.joined(), binary, Tensors::of(&served::MODEL))?;
        for input in &request.inputs {
            match pictures(input, 4) {
                Ok(pictures) => assert_eq!(pictures.len(), input.shape[0]),
                Err(error) => assert_eq!(error.to_string().lines().count(), 1, "{error}"),
            }
        }
        served::prepare(request)
    }));
}
