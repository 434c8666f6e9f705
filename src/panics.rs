//! What a panic leaves behind: one event in the log of a role, in that log's format, or a few lines on stderr in what
//! has no log. What a client's request makes a model do is told to the client, and is no news for the log.

use std::{
    backtrace::{Backtrace, BacktraceStatus},
    panic::Location,
    sync::atomic::{AtomicBool, Ordering},
};

/// What a shell shows for a process that ended by SIGPIPE (128 + 13), as other tools do when nobody reads on.
const BROKEN_PIPE: i32 = 141;

/// Whether this process writes a log.
static HAS_LOG: AtomicBool = AtomicBool::new(false);

/// There is a log from now on: panics are events of it.
pub(crate) fn report_to_log() {
    HAS_LOG.store(true, Ordering::Relaxed);
}

/// Reports panics from now on. The process ends quietly if what it prints is not read any more (`downbeat ... | head`):
/// the standard library ignores SIGPIPE, which sockets need, and `println!` panics instead.
pub(crate) fn report() {
    let to_stderr = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload_as_str().unwrap_or("a value that is no text");
        if text.starts_with("failed printing to stdout") && text.contains("Broken pipe") {
            std::process::exit(BROKEN_PIPE);
        }
        let is_caught = backend::executor::panic_is_caught();
        let has_log = HAS_LOG.load(Ordering::Relaxed);
        if has_log {
            log(panic.location(), text, is_caught);
        }
        // The standard library's own, after which it aborts: what writes the log has no time any more.
        let aborts = text.starts_with("panic in a ");
        if aborts || !has_log && !is_caught {
            to_stderr(panic);
        }
    }));
}

fn log(location: Option<&Location<'_>>, text: &str, is_caught: bool) {
    let location = location.map(tracing::field::display);
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let thread = std::thread::current();
    let thread = thread.name();
    if is_caught {
        tracing::debug!(location, thread, "a model panicked on what a client asked for: {text}");
        return;
    }
    // Only if RUST_BACKTRACE asks for it.
    let backtrace = Some(Backtrace::capture()).filter(|found| found.status() == BacktraceStatus::Captured);
    let backtrace = backtrace.map(tracing::field::display);
    tracing::error!(location, thread, backtrace, "panicked: {text}");
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Arc, Mutex},
    };

    use serde_json::Value;
    use tracing::level_filters::LevelFilter;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The lines of a log in JSON.
    fn logged(level: LevelFilter, text: &str, is_caught: bool) -> Vec<Value> {
        let lines = Lines::default();
        let writer = lines.clone();
        let format = tracing_subscriber::fmt().json().flatten_event(true).with_max_level(level);
        let subscriber = format.with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(subscriber, || log(Some(Location::caller()), text, is_caught));
        let written = lines.0.lock().unwrap().clone();
        String::from_utf8(written).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn a_panic_is_one_event_that_says_where_and_what() {
        let found = logged(LevelFilter::INFO, "range end index 99\n  out of range", false);
        assert_eq!((found.len(), &found[0]["level"]), (1, &"ERROR".into()), "{found:?}");
        assert_eq!(found[0]["message"], "panicked: range end index 99 out of range");
        assert!(found[0]["location"].as_str().unwrap().contains("src/panics.rs:"), "{found:?}");
        assert!(found[0]["thread"].as_str().unwrap().contains("a_panic_is_one_event"), "{found:?}");
        let wanted = ["RUST_BACKTRACE", "RUST_LIB_BACKTRACE"].iter().any(|key| std::env::var_os(key).is_some());
        assert!(wanted || found[0].get("backtrace").is_none(), "{found:?}");
    }

    #[test]
    fn what_clients_make_models_do_is_for_those_who_look_for_it() {
        assert_eq!(logged(LevelFilter::INFO, "range end index 99", true), Vec::<Value>::new());
        let found = logged(LevelFilter::DEBUG, "range end index 99", true);
        let expected = "a model panicked on what a client asked for: range end index 99";
        assert_eq!((found.len(), &found[0]["message"]), (1, &expected.into()));
    }
}
