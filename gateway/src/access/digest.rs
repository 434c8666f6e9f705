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

/// Whose digest is the token's. All of them are compared, whichever it is.
#[must_use]
pub(super) fn find<'a, T>(digests: impl Iterator<Item = (T, &'a Digest)>, token: &[u8]) -> Option<T> {
    let presented = digest_of(token);
    let mut found = None;
    for (holder, digest) in digests {
        if bool::from(digest.ct_eq(&presented)) {
            found = Some(holder);
        }
    }
    found
}
