//! What a command says beside its log: lines for people, or under `--log-format json` objects as the log's are, so that
//! whoever collects them finds no other line.

#[cfg(feature = "tools")]
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};

use tracing_subscriber::fmt::{
    format::Writer,
    time::{FormatTime as _, SystemTime},
};

use crate::role::LogFormat;

static IS_JSON: AtomicBool = AtomicBool::new(false);

/// As the log is written from now on.
pub(crate) fn write_as(format: LogFormat) {
    IS_JSON.store(format == LogFormat::Json, Ordering::Relaxed);
}

/// What goes on, on stdout.
pub(crate) fn tell(text: &str) {
    println!("{}", told(text));
}

/// The same, of what may go on after whoever reads has gone.
#[cfg(feature = "tools")]
pub(crate) fn tell_whoever_reads(text: &str) {
    let _ = writeln!(std::io::stdout(), "{}", told(text));
}

/// The same as a line.
pub(crate) fn told(text: &str) -> String {
    line("INFO", text).unwrap_or_else(|| text.to_owned())
}

/// What is wrong, and does not end the command, on stderr.
#[cfg(feature = "tools")]
pub(crate) fn warn(text: &str) {
    eprintln!("{}", line("WARN", text).unwrap_or_else(|| format!("downbeat: {text}")));
}

/// Why the command ends, on stderr.
pub(crate) fn fail(text: &str) {
    eprintln!("{}", line("ERROR", text).unwrap_or_else(|| format!("downbeat: {text}")));
}

/// An object with the fields of the log's; `None` if lines are for people.
fn line(level: &str, message: &str) -> Option<String> {
    IS_JSON.load(Ordering::Relaxed).then(|| object(level, message))
}

fn object(level: &str, message: &str) -> String {
    let mut timestamp = String::new();
    let told = SystemTime.format_time(&mut Writer::new(&mut timestamp));
    told.expect("writing into memory cannot fail");
    let target = env!("CARGO_PKG_NAME");
    serde_json::json!({ "timestamp": timestamp, "level": level, "message": message, "target": target }).to_string()
}

#[cfg(test)]
mod tests {
    #[test]
    fn an_object_has_the_fields_of_the_log_on_one_line() {
        let line = super::object("ERROR", "found \"a\"\nexpected b");
        assert!(!line.contains('\n'), "{line}");
        let read: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!((&read["level"], &read["target"]), (&"ERROR".into(), &"downbeat".into()));
        assert_eq!(read["message"], "found \"a\"\nexpected b");
        assert!(read["timestamp"].as_str().is_some_and(|at| at.ends_with('Z')), "{line}");
    }
}
