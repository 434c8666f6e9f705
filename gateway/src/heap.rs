//! What large bodies took goes back to the system when they are gone. glibc keeps what is freed for whoever wants
//! memory next: of hundreds of megabytes that clients held for a second, a process would keep most for as long as it
//! lives. Holds the crate's only `unsafe`: a call of the C library.

use std::{convert::Infallible, time::Duration};

use crate::server::Server;

/// Giving back takes milliseconds for each 100 MB, in which the allocator is locked.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// What the process may keep.
const BURST_BYTES_MIN: usize = 64 << 20;

/// Whether much has been held and let go.
#[derive(Debug, Default)]
struct Bursts {
    peak: usize,
}

impl Bursts {
    /// Takes the most that was held since the last call, and what is held now. True if memory is to be given back.
    fn handle(&mut self, peak: usize, held: usize) -> bool {
        self.peak = self.peak.max(peak);
        let is_over = self.peak.saturating_sub(held) >= BURST_BYTES_MIN;
        if is_over {
            self.peak = held;
        }
        is_over
    }
}

/// Watches what clients hold, for ever.
pub(crate) async fn keep_small(server: &Server) -> Infallible {
    let mut bursts = Bursts::default();
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let (peak, held) = server.take_bodies_peak();
        if bursts.handle(peak, held) {
            // It fails only if this process is about to end.
            let _ = tokio::task::spawn_blocking(give_back).await;
        }
    }
}

/// Gives back all pages that hold nothing, whichever thread has freed them.
#[cfg(target_env = "gnu")]
fn give_back() {
    // SAFETY: it takes a number, touches no memory that is in use, and may be called by any thread at any time.
    unsafe { libc::malloc_trim(0) };
}

/// Other allocators are left to themselves.
#[cfg(not(target_env = "gnu"))]
fn give_back() {}

#[cfg(test)]
mod tests {
    use super::*;

    const BURST: usize = BURST_BYTES_MIN;

    #[test]
    fn each_burst_ends_once() {
        let mut bursts = Bursts::default();
        let ended = [
            (0, 0),
            (BURST - 1, 0),
            // Held for longer than one look.
            (3 * BURST, 3 * BURST),
            (3 * BURST, 2 * BURST + 1),
            (2 * BURST + 1, 2 * BURST),
            // The rest of it, and what came meanwhile.
            (2 * BURST, BURST),
            (BURST, BURST),
            (BURST, 0),
            (0, 0),
            // Came and went between two looks.
            (BURST, 0),
        ]
        .map(|(peak, held)| bursts.handle(peak, held));
        assert_eq!(ended, [false, false, false, false, true, true, false, true, false, true]);
    }

    #[test]
    fn memory_can_be_given_back_at_any_time() {
        let kept = vec![1u8; 1 << 20];
        drop(vec![2u8; 1 << 20]);
        give_back();
        assert!(kept.iter().all(|byte| *byte == 1));
    }
}
