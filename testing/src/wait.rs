//! Waiting for another process or thread: for the event, never for a time.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Longer than anything takes, however busy the machine is: only a test that hangs meets it.
pub const HANG: Duration = Duration::from_secs(300);
/// Between two looks at another process.
const LOOK: Duration = Duration::from_millis(10);

/// Waits until something `is_so` that must come to be.
///
/// # Panics
/// If it has not come after [`HANG`].
#[allow(clippy::disallowed_methods, reason = "waits for other processes, in real time")]
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < HANG, "waited in vain for {what}");
        thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_as_soon_as_it_is_so() {
        let mut looks = 0;
        eventually("the third look", || {
            looks += 1;
            looks == 3
        });
        assert_eq!(looks, 3);
    }
}
