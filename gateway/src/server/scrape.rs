//! `/metrics` as it was a moment ago: however many ask, it is rendered, and compressed, a few times a second.

use std::cell::RefCell;

use bytes::Bytes;
use proto::{Span, Timestamp};
use tokio::sync::Mutex;

use crate::compression::Coding;

/// For how long a text is shared.
const FRESH: Span = Span::from_millis(250);

/// The last text.
#[derive(Debug, Default)]
pub(crate) struct Scrape {
    last: RefCell<Option<Scraped>>,
    /// Whoever compresses; others wait for it.
    compressing: Mutex<()>,
}

#[derive(Debug)]
struct Scraped {
    at: Timestamp,
    text: Bytes,
    /// None where it is too short to be worth it.
    encoded: Vec<(Coding, Option<Bytes>)>,
}

impl Scrape {
    /// The text, rendered anew if the last one is too old.
    pub(crate) fn text(&self, now: Timestamp, render: impl FnOnce() -> String) -> Bytes {
        let mut last = self.last.borrow_mut();
        if let Some(last) = last.as_ref().filter(|last| now - last.at < FRESH) {
            return last.text.clone();
        }
        let text = Bytes::from(render());
        *last = Some(Scraped { at: now, text: text.clone(), encoded: Vec::new() });
        text
    }

    /// The same, compressed if that is worth it.
    pub(crate) async fn encoded(
        &self,
        coding: Coding,
        now: impl Fn() -> Timestamp,
        render: impl FnOnce() -> String,
    ) -> Result<Bytes, Bytes> {
        let _only = self.compressing.lock().await;
        let at = now();
        let text = self.text(at, render);
        let known = self
            .last
            .borrow()
            .as_ref()
            .and_then(|last| Some(last.encoded.iter().find(|(of, _)| *of == coding)?.1.clone()));
        let encoded = match known {
            Some(encoded) => encoded,
            None => {
                let encoded = coding.encode(&text).await.map(Bytes::from);
                if let Some(last) = self.last.borrow_mut().as_mut().filter(|last| last.text.as_ptr() == text.as_ptr()) {
                    last.encoded.push((coding, encoded.clone()));
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

    #[test]
    fn a_thousand_scrapes_at_once_are_rendered_and_compressed_once() {
        let (scrape, rendered) = (Scrape::default(), Cell::new(0));
        let render = || {
            rendered.set(rendered.get() + 1);
            "downbeat_slots_in_use 0\n".repeat(1000)
        };
        let now = Cell::new(Timestamp(0));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime, async {
            let first = scrape.text(now.get(), render);
            for _ in 0..1000 {
                assert_eq!(scrape.text(now.get(), render).as_ptr(), first.as_ptr(), "one text in memory");
            }
            let (one, other) = tokio::join!(
                scrape.encoded(Coding::Gzip, || now.get(), render),
                scrape.encoded(Coding::Gzip, || now.get(), render)
            );
            assert_eq!(one.unwrap().as_ptr(), other.unwrap().as_ptr());
            assert_eq!(rendered.get(), 1);
            now.set(Timestamp(0) + FRESH);
            assert_ne!(scrape.text(now.get(), render).as_ptr(), first.as_ptr());
            assert_eq!(rendered.get(), 2);
        });
    }
}
