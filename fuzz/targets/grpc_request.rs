//! The message of a gRPC infer request.
#![no_main]

mod counted;
mod served;

use gateway::{
    api::ModelInferRequest,
    protocol::messages::{self, outline::Outline},
};
use libfuzzer_sys::fuzz_target;
use prost::Message;

fuzz_target!(|bytes: &[u8]| {
    let Ok(outline) = Outline::of(bytes, usize::MAX) else { return };
    if let Err(error) = outline.check(&served::MODEL) {
        assert_eq!(error.to_string().lines().count(), 1, "{error}");
        return;
    }
    // What was told beforehand, and the texts of errors.
    counted::check(outline.decoded_bytes() + 8192, || {
        let Ok(message) = ModelInferRequest::decode(bytes) else { return };
        served::check(messages::parse_request(message).and_then(served::prepare));
    });
});
