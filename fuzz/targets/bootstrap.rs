//! The transport's bootstrap with a hostile peer, before and after it has proved that it knows the secret.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use transport::fuzzing::HandshakeUnderAttack;

#[derive(Debug, Arbitrary)]
enum Step {
    Bytes(Vec<u8>),
    /// With their length before them, so that they are a message.
    Message(Vec<u8>),
    Wait {
        milliseconds: u16,
    },
    Read {
        bytes: u16,
    },
    End,
}

fuzz_target!(|input: (bool, u8, Vec<Step>)| {
    let (is_client, turns, steps) = input;
    let mut handshake = HandshakeUnderAttack::new(is_client, turns % 6);
    for step in &steps {
        match step {
            Step::Bytes(bytes) => handshake.bytes(bytes),
            Step::Message(message) => {
                handshake.bytes(&(message.len() as u32).to_be_bytes());
                handshake.bytes(message);
            }
            Step::Wait { milliseconds } => handshake.wait((*milliseconds).into()),
            Step::Read { bytes } => handshake.read((*bytes).into()),
            Step::End => handshake.end(),
        }
    }
});
