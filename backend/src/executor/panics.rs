//! Panics of what runs a model, where a task is to blame: a library that indexes beyond the end of a table, or divides
//! by a length of 0, because a client asked for that. They end in the client's answer, so whoever reports panics asks
//! [`panic_is_caught`] and leaves these out of the log.

use std::{
    any::Any,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::process::printable;

/// The longest text of a panic that clients are told.
const TEXT_BYTES_MAX: usize = 200;

thread_local! {
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic of this thread now is a task's failure, of which its client is told.
#[must_use]
pub fn panic_is_caught() -> bool {
    IS_CAUGHT.get()
}

/// Runs a model on what clients chose.
///
/// # Errors
/// What it said as it panicked, in one line.
pub(super) fn catch<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    let before = IS_CAUGHT.replace(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    IS_CAUGHT.set(before);
    result.map_err(|panic| text(&*panic))
}

fn text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let words: Vec<&str> = text.unwrap_or("it panicked").split_whitespace().collect();
    let mut line = printable(&words.join(" "));
    if line.len() > TEXT_BYTES_MAX {
        line.truncate(line.floor_char_boundary(TEXT_BYTES_MAX));
        line.push_str("..");
    }
    line
}

#[cfg(test)]
mod tests {
    use std::panic::panic_any;

    use super::*;

    #[test]
    fn what_was_said_is_kept_in_one_short_line() {
        assert_eq!((catch(|| 7), catch(panic_is_caught), panic_is_caught()), (Ok(7), Ok(true), false));
        let said = |run: fn()| catch(run).unwrap_err();
        assert_eq!(said(|| panic!("index {} out of\n range\x1b[31m", 99)), "index 99 out of range\\u{1b}[31m");
        assert_eq!(said(|| panic!("left")), "left");
        assert_eq!(said(|| panic_any(7)), "it panicked");
        let long = said(|| panic!("{}", "\u{fc}x".repeat(100)));
        assert!(long.len() <= TEXT_BYTES_MAX + 2 && long.ends_with(".."), "{long}");
        assert!(!panic_is_caught());
    }

    #[test]
    fn one_within_another_leaves_that_caught() {
        let outer = catch(|| {
            let inner = catch(|| panic!("inner"));
            (inner, panic_is_caught())
        });
        assert_eq!(outer, Ok((Err("inner".to_owned()), true)));
    }
}
