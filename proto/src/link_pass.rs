//! What shows a frontend that a scheduler sent a backend to it.

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use wincode::{SchemaRead, SchemaWrite};

use crate::ids::BackendId;

/// The right of one backend to link to one frontend, in this life of the frontend. It is made of the frontend's token
/// ([`Standing::token`](crate::epoch::Standing)), which the frontend and its schedulers alone know. So every scheduler
/// that the frontend has joined makes the same, the frontend needs no message to know it, and a backend cannot make
/// that of another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub struct LinkPass(pub u64);

impl LinkPass {
    /// HMAC-SHA-256 (RFC 2104) of the backend's id under the token, its first eight bytes.
    #[must_use]
    pub fn of(token: u64, backend: BackendId) -> Self {
        let mut mac = Hmac::<Sha256>::new_from_slice(&token.to_le_bytes()).expect("HMAC takes keys of any length");
        mac.update(b"downbeat link");
        mac.update(&backend.0.to_le_bytes());
        let digest: [u8; 32] = mac.finalize().into_bytes().into();
        Self(u64::from_le_bytes(*digest.first_chunk().expect("it is longer")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_of_one_backend_and_of_one_life() {
        let pass = LinkPass::of(7, BackendId(3));
        assert_eq!(pass, LinkPass::of(7, BackendId(3)));
        assert!(pass != LinkPass::of(7, BackendId(4)) && pass != LinkPass::of(8, BackendId(3)));
        // By Python's hmac: hmac.new((7).to_bytes(8, "little"), b"downbeat link\x03\0\0\0", "sha256").digest()[:8].
        assert_eq!(pass, LinkPass(0x9047_3d93_8401_9ff4));
    }
}
