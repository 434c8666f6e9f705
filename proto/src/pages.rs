//! Pages: what is told of thousands of models goes out a page at a time, and few pages go unread. So a reader is never
//! sent more than its connection holds, however slow it is and however much there is to tell.

/// A page ends with the message that reaches so many bytes.
pub const PAGE_BYTES: usize = 32 * 1024;
/// Pages on their way to one reader, or not yet read there.
pub const PAGES_UNREAD_MAX: usize = 4;

/// The pages of one reader.
#[derive(Debug, Default)]
pub struct Pages {
    /// Of the page that has yet to end.
    bytes: usize,
    unread: usize,
}

impl Pages {
    /// Whether more may be told.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.unread < PAGES_UNREAD_MAX
    }

    /// A message of so many bytes was told. True if the page ends with it: the reader is to be told so, and answers
    /// once it has come there.
    #[must_use]
    pub fn handle_told(&mut self, bytes: usize) -> bool {
        self.bytes += bytes;
        let ends = self.bytes >= PAGE_BYTES;
        if ends {
            (self.bytes, self.unread) = (0, self.unread + 1);
        }
        ends
    }

    /// The reader has read a page. False if there was none.
    #[must_use]
    pub fn handle_read(&mut self) -> bool {
        let was_any = self.unread > 0;
        self.unread = self.unread.saturating_sub(1);
        was_any
    }

    /// Pages that have ended and have not been read.
    #[must_use]
    pub fn unread(&self) -> usize {
        self.unread
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever is told and read: what is unread is bounded, and whoever reads is told all.
        #[test]
        fn what_is_unread_is_bounded_and_all_is_told(
            messages in proptest::collection::vec(1..1_600_usize, 0..600),
            reads in proptest::collection::vec(any::<bool>(), 0..1_200),
        ) {
            let (mut pages, mut reads) = (Pages::default(), reads.into_iter());
            // What was told since each end of a page that has not been read, the oldest first.
            let (mut told, mut waiting) = (vec![0], messages.into_iter().peekable());
            while waiting.peek().is_some() {
                if pages.has_room() {
                    let bytes = waiting.next().expect("peeked");
                    *told.last_mut().expect("never empty") += bytes;
                    if pages.handle_told(bytes) {
                        told.push(0);
                    }
                }
                // Once the reader is out of moods it reads whenever there is something to read.
                if reads.next().unwrap_or(true) {
                    prop_assert_eq!(pages.handle_read(), told.len() > 1);
                    if told.len() > 1 {
                        told.remove(0);
                    }
                }
                prop_assert_eq!(pages.unread(), told.len() - 1);
                prop_assert!(told.iter().sum::<usize>() < PAGES_UNREAD_MAX * (PAGE_BYTES + 1_600) + PAGE_BYTES);
            }
        }
    }
}
