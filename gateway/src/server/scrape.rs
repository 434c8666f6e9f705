//! `/metrics`: however many ask, one text at a time is written and compressed, beside the thread that moves packets,
//! and for a tenth of the time at most. A text is never older than the question: who was answered, and asks then, finds
//! that request counted.

use std::cell::RefCell;

use bytes::Bytes;
use proto::{Span, Timestamp};
use tokio::{sync::Mutex, task::spawn_blocking};

use crate::{compression::Coding, metrics::Reading};

/// No text is written for so many times what the last one took, within limits.
const TIMES_RESTED: i64 = 9;
const REST_MIN: Span = Span::from_millis(1);
const REST_MAX: Span = Span::from_millis(250);

/// The last text.
#[derive(Debug, Default)]
pub(crate) struct Scrape {
    last: RefCell<Option<Scraped>>,
    /// Whoever waits until a text may be written, writes or compresses; others wait for it.
    writing: Mutex<()>,
}

#[derive(Debug, Clone)]
struct Scraped {
    /// When its numbers were read.
    read: Timestamp,
    /// When the next one may be.
    next: Timestamp,
    text: Bytes,
    /// None where it is too short to be worth it.
    encoded: Vec<(Coding, Option<Bytes>)>,
}

/// When the next text may be written after what was begun and done then.
fn next_after(began: Timestamp, done: Timestamp) -> Timestamp {
    done + ((done - began) * TIMES_RESTED).clamp(REST_MIN, REST_MAX)
}

impl Scrape {
    /// The text, compressed if the client wants it and that is worth it, and by what. It is shared with whoever asked
    /// before it was begun; `rest` returns after so long. `None` while the process ends.
    pub(crate) async fn text(
        &self,
        coding: Option<Coding>,
        now: &impl Fn() -> Timestamp,
        rest: impl AsyncFnOnce(Span),
        read: impl FnOnce() -> Reading,
    ) -> Option<(Bytes, Option<Coding>)> {
        let asked = now();
        let _only = self.writing.lock().await;
        let last = self.last.borrow().clone();
        let mut scraped = match last {
            Some(last) if asked <= last.read => last,
            last => {
                let early = last.map_or(Span::ZERO, |last| last.next - now());
                if early > Span::ZERO {
                    rest(early).await;
                }
                let began = now();
                let reading = read();
                let text = spawn_blocking(move || Bytes::from(reading.text())).await.ok()?;
                Scraped { read: began, next: next_after(began, now()), text, encoded: Vec::new() }
            }
        };
        if let Some(coding) = coding
            && scraped.encoded.iter().all(|(known, _)| *known != coding)
        {
            let (began, text) = (now(), scraped.text.clone());
            let encoded = spawn_blocking(move || coding.encode_at_once(&text).map(Bytes::from)).await.ok()?;
            scraped.encoded.push((coding, encoded));
            scraped.next = scraped.next.max(next_after(began, now()));
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
    fn those_who_ask_at_once_share_a_text_and_who_asks_later_has_a_newer_one() {
        let (scrape, reads, at) = (Scrape::default(), Cell::new(0), Cell::new(Timestamp(0)));
        let now = || at.get();
        let metrics = Metrics::new(MetricsConfig::default());
        let read = || {
            reads.set(reads.get() + 1);
            at.set(at.get() + TOOK);
            metrics.reading()
        };
        let rest = |span: Span| {
            at.set(at.get() + span);
            std::future::ready(())
        };
        let text = async |coding| {
            let (text, found) = scrape.text(coding, &now, rest, read).await.unwrap();
            assert_eq!(found, coding);
            text.as_ptr()
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let gzip = Some(Coding::Gzip);
            // All of them ask before the first is let in.
            let writing = scrape.writing.lock().await;
            let (one, other, first, second, ()) =
                tokio::join!(biased; text(None), text(None), text(gzip), text(gzip), async { drop(writing) });
            assert_eq!((one, first), (other, second), "each is once in memory");
            assert_eq!((reads.get(), at.get()), (1, Timestamp(0) + TOOK));
            // What they were answered with was read before these ask.
            let writing = scrape.writing.lock().await;
            let (later, latest, ()) = tokio::join!(biased; text(None), text(None), async { drop(writing) });
            assert!(later == latest && later != one);
            assert_eq!((reads.get(), at.get()), (2, Timestamp(0) + TOOK * (2 + TIMES_RESTED)));
        });
    }

    #[test]
    fn texts_take_a_tenth_of_the_time_and_nobody_waits_for_long() {
        let rest = |took: Span| next_after(Timestamp(0), Timestamp(0) + took) - Timestamp(0) - took;
        assert_eq!(rest(Span::ZERO), REST_MIN);
        assert_eq!(rest(TOOK), TOOK * TIMES_RESTED);
        assert_eq!(rest(Span::from_millis(5_000)), REST_MAX);
    }
}
