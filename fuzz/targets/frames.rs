//! Control messages: the first byte chooses the edge, the rest is a frame. What decodes is encoded to what decodes
//! alike.
#![no_main]

use libfuzzer_sys::fuzz_target;
use proto::{
    backend_to_frontend::AnswerHeader,
    backend_to_scheduler::{BackendToControl, BackendToModelThread, BackendToScheduler},
    frame::{FrameWriter, read_frame},
    frontend_to_scheduler::{FrontendToControl, FrontendToModelThread, FrontendToScheduler},
    hello::SchedulerHello,
    scheduler_to_backend::SchedulerToBackend,
    scheduler_to_frontend::SchedulerToFrontend,
};

macro_rules! round_trip {
    ($message:ty, $frame:expr) => {
        for message in read_frame::<$message>($frame) {
            let Ok(message) = message else { break };
            let mut writer = FrameWriter::default();
            // The largest message is smaller than a frame, but a list in a forged one may be longer than any of ours.
            let Ok(None) = writer.push(&message) else { continue };
            let frame = writer.take().expect("one message");
            let again = read_frame::<$message>(&frame).next().expect("one message").expect("it was encoded by us");
            assert_eq!(format!("{again:?}"), format!("{message:?}"));
        }
    };
}

fuzz_target!(|bytes: &[u8]| {
    let Some((edge, frame)) = bytes.split_first() else { return };
    match edge % 6 {
        0 => {
            round_trip!(BackendToControl, frame);
            round_trip!(BackendToModelThread, frame);
            read_frame::<BackendToScheduler>(frame).for_each(drop);
        }
        1 => {
            round_trip!(FrontendToControl, frame);
            round_trip!(FrontendToModelThread, frame);
            read_frame::<FrontendToScheduler>(frame).for_each(drop);
        }
        2 => round_trip!(SchedulerToBackend, frame),
        3 => round_trip!(SchedulerToFrontend, frame),
        4 => round_trip!(SchedulerHello, frame),
        _ => drop(AnswerHeader::parse(frame)),
    }
});
