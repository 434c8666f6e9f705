//! `/metrics` as it was a moment ago: however many ask, one text at a time is written and compressed, beside the thread
//! that moves packets, and for a tenth of the time at most.

use std::cell::RefCell;

use bytes::Bytes;
use proto::{Span, Timestamp};
use tokio::{sync::Mutex, task::spawn_blocking};

use crate::{compression::Coding, metrics::Reading};

/// A text is shared for so many times what it took, within limits.
const TIMES_SHARED: i64 = 9;
const SHARED_MIN: Span = Span::from_millis(1);
const SHARED_MAX: Span = Span::from_millis(250);

/// The last text.
#[derive(Debug, Default)]
pub(crate) struct Scrape {
    last: RefCell<Option<Scraped>>,
    /// Whoever writes or compresses; others wait for it.
    writing: Mutex<()>,
}

#[derive(Debug, Clone)]
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
    /// The text, compressed if the client wants it and that is worth it, and by what; read and written anew if the last
    /// one is too old. `None` while the process ends.
    pub(crate) async fn text(
        &self,
        coding: Option<Coding>,
        now: &impl Fn() -> Timestamp,
        read: impl FnOnce() -> Reading,
    ) -> Option<(Bytes, Option<Coding>)> {
        let _only = self.writing.lock().await;
        let began = now();
        let last = self.last.borrow().clone().filter(|last| began < last.until);
        let mut scraped = match last {
            Some(last) => last,
            None => {
                let reading = read();
                let text = spawn_blocking(move || Bytes::from(reading.text())).await.ok()?;
                Scraped { until: shared_until(began, now()), text, encoded: Vec::new() }
            }
        };
        if let Some(coding) = coding
            && scraped.encoded.iter().all(|(known, _)| *known != coding)
        {
            let text = scraped.text.clone();
            let encoded = spawn_blocking(move || coding.encode_at_once(&text).map(Bytes::from)).await.ok()?;
            scraped.encoded.push((coding, encoded));
            scraped.until = scraped.until.max(shared_until(began, now()));
        }
        let encoded = scraped.encoded.iter().find(|(known, _)| Some(*known) == coding);
        let told = match encoded {
            Some((coding, Some(encoded))) => (encoded.clone(), Some(*coding)),
            _ => (scraped.text.clone(), None),
        };
        *self.last.borrow_mut() = Some(scraped);
        Some(told)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::{config::MetricsConfig, metrics::Metrics};

    /// Of each reading.
    const TOOK: Span = Span::from_millis(2);

    #[test]
    fn a_thousand_scrapes_at_once_are_written_and_compressed_once() {
        let (scrape, reads) = (Scrape::default(), Cell::new(0));
        let at = Cell::new(Timestamp(0));
        let now = || at.get();
        let metrics = Metrics::new(MetricsConfig::default());
        let read = || {
            reads.set(reads.get() + 1);
            at.set(at.get() + TOOK);
            metrics.reading()
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime, async {
            let (first, _) = scrape.text(None, &now, read).await.unwrap();
            for _ in 0..1000 {
                let (text, coding) = scrape.text(None, &now, read).await.unwrap();
                assert_eq!((text.as_ptr(), coding), (first.as_ptr(), None), "one text in memory");
            }
            let gzip = || scrape.text(Some(Coding::Gzip), &now, read);
            let (one, other) = tokio::join!(gzip(), gzip());
            let ((one, coding), (other, _)) = (one.unwrap(), other.unwrap());
            assert_eq!((one.as_ptr(), coding), (other.as_ptr(), Some(Coding::Gzip)));
            assert_eq!(reads.get(), 1);
            at.set(Timestamp(0) + TOOK * (1 + TIMES_SHARED));
            assert_ne!(scrape.text(None, &now, read).await.unwrap().0.as_ptr(), first.as_ptr());
            assert_eq!(reads.get(), 2);
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
