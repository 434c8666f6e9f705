//! `/metrics` as it was a moment ago: however many ask, rendering and compressing it takes a tenth of the time at most.

use std::cell::RefCell;

use bytes::Bytes;
use proto::{Span, Timestamp};
use tokio::sync::Mutex;

use crate::compression::Coding;

/// A text is shared for so many times what it took, within limits.
const TIMES_SHARED: i64 = 9;
const SHARED_MIN: Span = Span::from_millis(1);
const SHARED_MAX: Span = Span::from_millis(250);

/// The last text.
#[derive(Debug, Default)]
pub(crate) struct Scrape {
    last: RefCell<Option<Scraped>>,
    /// Whoever compresses; others wait for it.
    compressing: Mutex<()>,
}

#[derive(Debug)]
struct Scraped {
    until: Timestamp,
    text: Bytes,
    /// None where it is too short to be worth it.
    encoded: Vec<(Coding, Option<Bytes>)>,
}

/// Until when is shared what was begun and done then.
fn shared_until(began: Timestamp, done: Timestamp) -> Timestamp {
    done + ((done - began) * TIMES_SHARED).clamp(SHARED_MIN, SHARED_MAX)
}

impl Scrape {
    /// The text, rendered anew if the last one is too old.
    pub(crate) fn text(&self, now: &impl Fn() -> Timestamp, render: impl FnOnce() -> String) -> Bytes {
        let mut last = self.last.borrow_mut();
        let began = now();
        if let Some(last) = last.as_ref().filter(|last| began < last.until) {
            return last.text.clone();
        }
        let text = Bytes::from(render());
        *last = Some(Scraped { until: shared_until(began, now()), text: text.clone(), encoded: Vec::new() });
        text
    }

    /// The same, compressed if that is worth it.
    pub(crate) async fn encoded(
        &self,
        coding: Coding,
        now: &impl Fn() -> Timestamp,
        render: impl FnOnce() -> String,
    ) -> Result<Bytes, Bytes> {
        let _only = self.compressing.lock().await;
        let text = self.text(now, render);
        let known = self
            .last
            .borrow()
            .as_ref()
            .and_then(|last| Some(last.encoded.iter().find(|(of, _)| *of == coding)?.1.clone()));
        let encoded = match known {
            Some(encoded) => encoded,
            None => {
                let began = now();
                let encoded = coding.encode(&text).await.map(Bytes::from);
                if let Some(last) = self.last.borrow_mut().as_mut().filter(|last| last.text.as_ptr() == text.as_ptr()) {
                    last.encoded.push((coding, encoded.clone()));
                    last.until = last.until.max(shared_until(began, now()));
                }
                encoded
            }
        };
        encoded.ok_or(text)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Of each rendering.
    const TOOK: Span = Span::from_millis(2);

    #[test]
    fn a_thousand_scrapes_at_once_are_rendered_and_compressed_once() {
        let (scrape, rendered) = (Scrape::default(), Cell::new(0));
        let at = Cell::new(Timestamp(0));
        let now = || at.get();
        let render = || {
            rendered.set(rendered.get() + 1);
            at.set(at.get() + TOOK);
            "downbeat_slots_in_use 0\n".repeat(1000)
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime, async {
            let first = scrape.text(&now, render);
            for _ in 0..1000 {
                assert_eq!(scrape.text(&now, render).as_ptr(), first.as_ptr(), "one text in memory");
            }
            let (one, other) =
                tokio::join!(scrape.encoded(Coding::Gzip, &now, render), scrape.encoded(Coding::Gzip, &now, render));
            assert_eq!(one.unwrap().as_ptr(), other.unwrap().as_ptr());
            assert_eq!(rendered.get(), 1);
            at.set(Timestamp(0) + TOOK * (1 + TIMES_SHARED));
            assert_ne!(scrape.text(&now, render).as_ptr(), first.as_ptr());
            assert_eq!(rendered.get(), 2);
        });
    }

    #[test]
    fn a_text_is_shared_for_a_while_and_not_for_long() {
        let until = |took: Span| shared_until(Timestamp(0), Timestamp(0) + took) - Timestamp(0) - took;
        assert_eq!(until(Span::ZERO), SHARED_MIN);
        assert_eq!(until(TOOK), TOOK * TIMES_SHARED);
        assert_eq!(until(Span::from_millis(5_000)), SHARED_MAX);
    }
}
