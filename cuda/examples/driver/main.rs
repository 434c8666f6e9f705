//! What the driver does on a real GPU: products and convolutions against their meaning ([`lowering::interpret`]), pages
//! under a captured graph, and how fast all of it is. Prints `passed|failed NAME` for each case, and a JSON object for
//! each measurement; the exit code is 1 if a case failed.
//!
//! ```text
//! cargo run --release -p cuda --example driver -- [--trace FILE] [PART..]
//! ```
//!
//! Parts are `cases`, `pages`, `copies`, `loads`, `convolutions`, `launches` and `kernels`; all of them by default.
//! `leak` does nothing but not give back what it has taken.

// The host's time is measured, too.
#![allow(clippy::disallowed_methods)]

mod cases;
mod own;
mod rig;
mod speed;

use std::{process::ExitCode, sync::Mutex};

use cuda::driver::real::{devices, libraries};

pub(crate) fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--trace") {
        let file = std::fs::File::create(&arguments[at + 1]).expect("a file that can be written");
        tracing_subscriber::fmt()
            .with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG)
            .with_ansi(false)
            .with_writer(Mutex::new(file))
            .init();
        arguments.drain(at..at + 2);
    }
    for library in libraries() {
        println!("{}: {}", library.name, library.found.unwrap_or_else(|missing| missing));
    }
    println!("{:?}", devices());
    let rig = match rig::Rig::open() {
        Ok(rig) => rig,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let is_asked = |part: &str| arguments.is_empty() || arguments.iter().any(|argument| argument == part);
    let mut failed = 0;
    if arguments.iter().any(|argument| argument == "leak") {
        // As a driver would leave it that forgets what it has taken.
        std::mem::forget(rig);
        return ExitCode::SUCCESS;
    }
    if is_asked("cases") {
        failed += cases::run(&rig) + own::cases(&rig);
    }
    if is_asked("pages") {
        failed += usize::from(!rig::say("pages under a captured graph", speed::pages(&rig)));
    }
    for (part, measure) in [
        ("copies", speed::copies as fn(&rig::Rig) -> Result<(), cuda::DriverError>),
        ("loads", speed::loads),
        ("launches", speed::launches),
        ("kernels", own::speed),
        ("convolutions", speed::convolutions),
    ] {
        if is_asked(part) {
            failed += usize::from(!rig::say(part, measure(&rig)));
        }
    }
    println!("{failed} failed");
    ExitCode::from(u8::from(failed > 0))
}
