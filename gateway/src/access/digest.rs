//! Tokens are kept and compared as SHA-256 digests, in a time that does not depend on how they differ.

use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

/// The SHA-256 digest of a token.
pub(super) type Digest = [u8; 32];

/// The digest of a token.
#[must_use]
pub(super) fn digest_of(token: &[u8]) -> Digest {
    Sha256::digest(token).into()
}

/// Which of the digests is the token's. All of them are compared, whichever it is.
#[must_use]
pub(super) fn position<'a>(digests: impl Iterator<Item = &'a Digest>, token: &[u8]) -> Option<usize> {
    let presented = digest_of(token);
    let mut found = None;
    for (index, digest) in digests.enumerate() {
        if bool::from(digest.ct_eq(&presented)) {
            found = Some(index);
        }
    }
    found
}
