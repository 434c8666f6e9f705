//! Step 1, Step 10.
//! Gzip and deflate. What a body becomes is charged and bounded while it grows (`server/intake.rs`),
//! and a large reply leaves the thread to others between its pieces.

use std::io::{self, BufRead as _, BufReader, Read, Write};

use flate2::{
    Compression,
    bufread::GzDecoder,
    read::ZlibDecoder,
    write::{GzEncoder, ZlibEncoder},
};
use frontend::rope::Rope;

/// Replies smaller than this are not worth the time.
const COMPRESSED_BYTES_MIN: usize = 1024;
/// How much is coded at a time.
pub const PIECE_BYTES: usize = 64 * 1024;
/// Members of a gzip body: those that decode to nothing cost time, and are charged for nothing.
const MEMBERS_MAX: usize = 4_096;

/// A content coding (RFC 9110, section 8.4.1). `deflate` is the zlib format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// RFC 1952.
    Gzip,
    /// RFC 1950.
    Deflate,
}

/// A body that is being decoded, a piece at a time.
pub struct Decoding {
    decoder: Box<dyn Read + Send>,
    decoded: Vec<u8>,
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

    /// Decodes a body.
    #[must_use]
    pub fn decoding(self, body: Rope) -> Decoding {
        let decoder: Box<dyn Read + Send> = match self {
            Self::Gzip => Box::new(Members::new(body.into_reader())),
            Self::Deflate => Box::new(ZlibDecoder::new(body.into_reader())),
        };
        Decoding { decoder, decoded: Vec::new() }
    }

    /// Encodes a body, unless it is too small to be worth it; between pieces, this thread is left to others.
    pub async fn encode(self, body: &[u8]) -> Option<Vec<u8>> {
        let mut encoder = self.encoder(body)?;
        for piece in body.chunks(PIECE_BYTES) {
            encoder.write(piece);
            tokio::task::yield_now().await;
        }
        Some(encoder.finish())
    }

    /// The same, in one go.
    #[must_use]
    pub fn encode_at_once(self, body: &[u8]) -> Option<Vec<u8>> {
        let mut encoder = self.encoder(body)?;
        encoder.write(body);
        Some(encoder.finish())
    }

    fn encoder(self, body: &[u8]) -> Option<Encoder> {
        (body.len() >= COMPRESSED_BYTES_MIN).then(|| match self {
            Self::Gzip => Encoder::Gzip(GzEncoder::new(Vec::new(), Compression::fast())),
            Self::Deflate => Encoder::Deflate(ZlibEncoder::new(Vec::new(), Compression::fast())),
        })
    }
}

enum Encoder {
    Gzip(GzEncoder<Vec<u8>>),
    Deflate(ZlibEncoder<Vec<u8>>),
}

impl Encoder {
    fn write(&mut self, piece: &[u8]) {
        match self {
            Self::Gzip(encoder) => encoder.write_all(piece),
            Self::Deflate(encoder) => encoder.write_all(piece),
        }
        .expect(IN_MEMORY);
    }

    fn finish(self) -> Vec<u8> {
        match self {
            Self::Gzip(encoder) => encoder.finish(),
            Self::Deflate(encoder) => encoder.finish(),
        }
        .expect(IN_MEMORY)
    }
}

impl Decoding {
    /// What it takes up besides what it has decoded.
    pub const BYTES: usize = 128 << 10;

    /// Decodes the next piece, which is of this length; the last one is of less than [`PIECE_BYTES`].
    ///
    /// # Errors
    /// If it is malformed.
    pub fn step(&mut self) -> io::Result<usize> {
        self.decoder.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut self.decoded)
    }

    /// What has been decoded.
    #[must_use]
    pub fn decoded(self) -> Vec<u8> {
        self.decoded
    }

    /// Its length.
    #[must_use]
    pub fn len(&self) -> usize {
        self.decoded.len()
    }

    /// Whether nothing has been decoded.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.decoded.is_empty()
    }
}

/// The members of a gzip body, one after another (RFC 1952, section 2.2).
struct Members<R> {
    /// `None` for a moment only, between two of them.
    member: Option<GzDecoder<BufReader<R>>>,
    /// How many may follow.
    left: usize,
}

impl<R: Read> Members<R> {
    fn new(body: R) -> Self {
        Self { member: Some(GzDecoder::new(BufReader::new(body))), left: MEMBERS_MAX - 1 }
    }
}

impl<R: Read> Read for Members<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let member = self.member.as_mut().ok_or_else(|| io::Error::other("it has failed before"))?;
            let read = member.read(into)?;
            if read > 0 || into.is_empty() || member.get_mut().fill_buf()?.is_empty() {
                return Ok(read);
            }
            let too_many = || io::Error::other(format!("found more than {MEMBERS_MAX} members"));
            self.left = self.left.checked_sub(1).ok_or_else(too_many)?;
            self.member = self.member.take().map(|ended| GzDecoder::new(ended.into_inner()));
        }
    }
}

const IN_MEMORY: &str = "writing into memory cannot fail";

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    fn decode(coding: Coding, encoded: &[u8]) -> io::Result<Vec<u8>> {
        let mut body = Rope::default();
        // In pieces, as it comes from a socket.
        encoded.chunks(7).for_each(|piece| body.push(Bytes::copy_from_slice(piece)));
        let mut decoding = coding.decoding(body);
        loop {
            let before = decoding.len();
            let piece = decoding.step()?;
            assert!(piece <= PIECE_BYTES && decoding.len() == before + piece);
            if piece < PIECE_BYTES {
                return Ok(decoding.decoded());
            }
        }
    }

    #[test]
    fn bodies_round_trip_piece_by_piece() {
        for length in [0, 5, PIECE_BYTES, 200_000] {
            let body: Vec<u8> = (0..length).map(|n| (n / 1000) as u8).collect();
            for coding in [Coding::Gzip, Coding::Deflate] {
                let Some(encoded) = block_on(coding.encode(&body)) else { continue };
                assert_eq!(decode(coding, &encoded).unwrap(), body);
                assert_eq!(decode(coding, &coding.encode_at_once(&body).unwrap()).unwrap(), body);
                assert!(decode(coding, b"no such thing").is_err());
                assert!(decode(coding, &encoded[..encoded.len() - 9]).is_err());
                assert_eq!(block_on(coding.encode(&body[..100])), None);
            }
        }
    }

    /// Whoever compresses in blocks, or appends to a file, sends several members: all but the first were dropped.
    #[test]
    fn all_members_of_a_gzip_body_count_up_to_a_bound() {
        let member = |body: &[u8]| {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(body).unwrap();
            encoder.finish().unwrap()
        };
        let (one, other) = (vec![1; PIECE_BYTES + 7], b"and more".to_vec());
        let body = [member(&one), member(b""), member(&other)].concat();
        assert_eq!(decode(Coding::Gzip, &body).unwrap(), [one, other].concat());
        assert!(decode(Coding::Gzip, &body[..body.len() - 1]).is_err());
        assert!(decode(Coding::Gzip, &[&member(b"x")[..], b"no member"].concat()).is_err());
        assert_eq!(decode(Coding::Gzip, &member(b"x").repeat(MEMBERS_MAX)).unwrap(), b"x".repeat(MEMBERS_MAX));
        let error = decode(Coding::Gzip, &member(b"").repeat(MEMBERS_MAX + 1)).unwrap_err();
        assert_eq!(error.to_string(), "found more than 4096 members");
    }

    #[test]
    fn codings_are_chosen_as_the_client_says() {
        assert_eq!(Coding::accepted("identity, deflate, gzip"), Some(Coding::Deflate));
        assert_eq!(Coding::accepted("br;q=1.0, gzip;q=0.5"), Some(Coding::Gzip));
        assert_eq!(Coding::accepted("gzip;q=0, *"), None);
        assert_eq!(Coding::accepted("GZip"), Some(Coding::Gzip));
    }
}
