//! Where the messages of a gRPC stream begin and end (gRPC over HTTP/2, "Length-Prefixed-Message"), so that one that
//! was begun has a deadline.

/// A flag, and the length of what follows.
const HEADER_BYTES: usize = 5;

/// Follows the messages of a stream.
#[derive(Debug, Default)]
pub(super) struct Messages {
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
    /// Of the message whose header is complete.
    missing: usize,
}

impl Messages {
    /// More of the stream has come: true if a message ended in it.
    pub(super) fn handle(&mut self, mut bytes: &[u8]) -> bool {
        let mut has_ended = false;
        while !bytes.is_empty() {
            if self.header_bytes == HEADER_BYTES && self.missing > 0 {
                let taken = self.missing.min(bytes.len());
                self.missing -= taken;
                bytes = &bytes[taken..];
            } else {
                if self.header_bytes == HEADER_BYTES {
                    self.header_bytes = 0;
                }
                let taken = (HEADER_BYTES - self.header_bytes).min(bytes.len());
                self.header[self.header_bytes..self.header_bytes + taken].copy_from_slice(&bytes[..taken]);
                self.header_bytes += taken;
                bytes = &bytes[taken..];
                if self.header_bytes == HEADER_BYTES {
                    let [_, length @ ..] = self.header;
                    self.missing = u32::from_be_bytes(length) as usize;
                }
            }
            has_ended |= !self.is_within();
        }
        has_ended
    }

    /// Whether a message has been begun and not ended.
    pub(super) fn is_within(&self) -> bool {
        match self.header_bytes {
            0 => false,
            HEADER_BYTES => self.missing > 0,
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn however_it_is_cut_a_stream_is_within_a_message_where_one_has_begun() {
        let lengths = [3usize, 0, 0, 300, 1];
        let mut stream = Vec::new();
        let mut ends = vec![0];
        for length in lengths {
            stream.push(0);
            stream.extend((length as u32).to_be_bytes());
            stream.resize(stream.len() + length, 7);
            ends.push(stream.len());
        }
        for piece in [1, 2, 3, 7, 64, 1000] {
            let (mut messages, mut read) = (Messages::default(), 0);
            for bytes in stream.chunks(piece) {
                let before = read;
                read += bytes.len();
                let has_ended = ends.iter().any(|end| (before + 1..=read).contains(end));
                assert_eq!(messages.handle(bytes), has_ended, "{read} in pieces of {piece}");
                assert_eq!(messages.is_within(), !ends.contains(&read), "{read} in pieces of {piece}");
            }
        }
    }
}
