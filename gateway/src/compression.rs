//! Steps 1 and 10: gzip and deflate bodies over HTTP. What a body becomes is bounded while it grows, and a large one
//! leaves the thread to others between its pieces.

use std::io::{self, Read, Write};

use bytes::Bytes;
use flate2::{
    Compression,
    read::{GzDecoder, ZlibDecoder},
    write::{GzEncoder, ZlibEncoder},
};
use frontend::rope::Rope;

/// Replies smaller than this are not worth the time.
const COMPRESSED_BYTES_MIN: usize = 1024;
/// How much is decoded at a time.
const PIECE_BYTES: usize = 64 * 1024;

/// A content coding (RFC 9110, section 8.4.1). `deflate` is the zlib format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// RFC 1952.
    Gzip,
    /// RFC 1950.
    Deflate,
}

/// Why a body cannot be decoded.
#[derive(Debug)]
pub enum DecodeError {
    /// It is larger than the limit.
    TooLarge,
    /// What it takes up is not to be had.
    Refused,
    /// It is not of its coding.
    Malformed(io::Error),
}

impl Coding {
    /// The coding of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name.trim().to_ascii_lowercase().as_str() {
            "gzip" | "x-gzip" => Some(Self::Gzip),
            "deflate" => Some(Self::Deflate),
            _ => None,
        }
    }

    /// As headers name it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Deflate => "deflate",
        }
    }

    /// The first coding of an `Accept-Encoding` that we have and the client does not rule out.
    #[must_use]
    pub fn accepted(header: &str) -> Option<Self> {
        header.split(',').find_map(|entry| {
            let (name, weight) = entry.split_once(';').unwrap_or((entry, ""));
            let weight = weight.trim().strip_prefix("q=").map_or(Ok(1.0), str::parse::<f32>);
            Self::from_name(name).filter(|_| weight.is_ok_and(|weight| weight > 0.0))
        })
    }

    /// Decodes a body of at most `bytes_max` decoded bytes; `take` is asked for each piece of them.
    ///
    /// # Errors
    /// If it is larger, or malformed. No more than the limit and a piece was held by then.
    pub async fn decode(
        self,
        body: &Rope,
        bytes_max: usize,
        take: impl Fn(usize) -> bool,
    ) -> Result<Rope, DecodeError> {
        let mut decoder: Box<dyn Read + '_> = match self {
            Self::Gzip => Box::new(GzDecoder::new(body.reader())),
            Self::Deflate => Box::new(ZlibDecoder::new(body.reader())),
        };
        let mut decoded = Rope::default();
        loop {
            let mut piece = Vec::new();
            let read = decoder.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut piece);
            if read.map_err(DecodeError::Malformed)? == 0 {
                return Ok(decoded);
            }
            if decoded.len() + piece.len() > bytes_max {
                return Err(DecodeError::TooLarge);
            }
            if !take(piece.len()) {
                return Err(DecodeError::Refused);
            }
            decoded.push(Bytes::from(piece));
            tokio::task::yield_now().await;
        }
    }

    /// Encodes a body, unless it is too small to be worth it.
    pub async fn encode(self, body: &[u8]) -> Option<Vec<u8>> {
        if body.len() < COMPRESSED_BYTES_MIN {
            return None;
        }
        Some(match self {
            Self::Gzip => {
                let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
                write_pieces(body, &mut encoder).await;
                encoder.finish().expect(IN_MEMORY)
            }
            Self::Deflate => {
                let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
                write_pieces(body, &mut encoder).await;
                encoder.finish().expect(IN_MEMORY)
            }
        })
    }
}

const IN_MEMORY: &str = "writing into memory cannot fail";

async fn write_pieces(body: &[u8], encoder: &mut impl Write) {
    for piece in body.chunks(PIECE_BYTES) {
        encoder.write_all(piece).expect(IN_MEMORY);
        tokio::task::yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    fn decode(coding: Coding, encoded: &[u8], bytes_max: usize) -> Result<Vec<u8>, DecodeError> {
        let mut body = Rope::default();
        // In pieces, as it comes from a socket.
        encoded.chunks(7).for_each(|piece| body.push(Bytes::copy_from_slice(piece)));
        block_on(coding.decode(&body, bytes_max, |_| true)).map(|decoded| decoded.joined().to_vec())
    }

    #[test]
    fn bodies_round_trip_and_bombs_stop_at_the_limit() {
        let body: Vec<u8> = (0..200_000u32).map(|n| (n / 1000) as u8).collect();
        for coding in [Coding::Gzip, Coding::Deflate] {
            let encoded = block_on(coding.encode(&body)).unwrap();
            assert_eq!(decode(coding, &encoded, body.len()).unwrap(), body);
            assert!(matches!(decode(coding, &encoded, body.len() - 1), Err(DecodeError::TooLarge)));
            assert!(matches!(decode(coding, b"no such thing", 100), Err(DecodeError::Malformed(_))));
            let cut = decode(coding, &encoded[..encoded.len() - 9], body.len());
            assert!(matches!(cut, Err(DecodeError::Malformed(_))));
            assert_eq!(block_on(coding.encode(&body[..100])), None);
        }
    }

    #[test]
    fn codings_are_chosen_as_the_client_says() {
        assert_eq!(Coding::accepted("identity, deflate, gzip"), Some(Coding::Deflate));
        assert_eq!(Coding::accepted("br;q=1.0, gzip;q=0.5"), Some(Coding::Gzip));
        assert_eq!(Coding::accepted("gzip;q=0, *"), None);
        assert_eq!(Coding::accepted("GZip"), Some(Coding::Gzip));
    }
}
