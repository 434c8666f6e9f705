//! The message of a gRPC infer request.
#![no_main]

mod served;

use gateway::{
    api::ModelInferRequest,
    protocol::{messages, prepare},
    regions::Regions,
};
use libfuzzer_sys::fuzz_target;
use prost::Message;

fuzz_target!(|bytes: &[u8]| {
    let Ok(message) = ModelInferRequest::decode(bytes) else { return };
    served::check(
        messages::parse_request(message)
            .and_then(|request| prepare(&served::MODEL, 0, request, None, &Regions::new("/nonexistent"))),
    );
});
