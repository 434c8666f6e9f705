//! What happened, by cause: of an endpoint as a whole, and of each of its reliable connections.

/// The counters with what they say: one that is added here is only to be counted.
macro_rules! counters {
    ($($(#[doc = $help:literal])+ $name:ident)*) => {
        /// Monotonic counts.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[doc = $help])+ pub $name: u64,)*
        }

        impl Counters {
            /// Nothing has happened yet.
            pub const ZERO: Self = Self { $($name: 0),* };

            /// Each counter: its name, what it says, and its count.
            pub fn all(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
                [$((stringify!($name), concat!($($help),+), self.$name)),*].into_iter()
            }

            /// Counts what was counted elsewhere, too.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counters! {
    /// Packets accepted.
    packets_received
    /// Packets written.
    packets_sent
    /// Dropped: too short, too long, or not a whole packet.
    dropped_malformed
    /// Dropped: an opcode that we do not speak (UC, RD, XRC, congestion notifications, reserved values).
    dropped_unsupported
    /// Dropped: for no queue pair of ours, or one that is not ready.
    dropped_no_queue_pair
    /// Dropped: from another address or port than the queue pair's peer, or with another partition key.
    dropped_wrong_peer
    /// Dropped: ICRC mismatch.
    dropped_icrc
    /// Dropped: a datagram with another queue key.
    dropped_queue_key
    /// Dropped: a datagram that met no receive, or one that is too short for it.
    dropped_no_receive
    /// Dropped: an acknowledgement or response for nothing that is outstanding.
    dropped_ghost
    /// Asynchronous events that nobody polled in time.
    events_lost
    /// Requests that arrived again.
    duplicate_requests
    /// Gaps in the request sequence that we reported (NAK 0x60).
    sequence_errors
    /// Requests that met no receive (RNR NAK sent).
    receiver_not_ready
    /// Requests that we refused (NAK 0x61, 0x62, 0x63 sent).
    requests_refused
    /// Times that we went back because the peer reported a gap, or a READ response was missing.
    retransmits_gap
    /// Packets that we repeated because the answer took much longer than usual.
    probes
    /// Times that we went back because nothing came back in time.
    retransmits_timeout
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_counter_has_a_name_and_says_what_it_counts() {
        let mut counters = Counters { packets_sent: 3, probes: 1, ..Counters::default() };
        counters.add(&Counters { packets_sent: 4, dropped_icrc: 2, ..Counters::default() });
        let counted: Vec<_> = counters.all().filter(|(.., count)| *count > 0).collect();
        let sent = ("packets_sent", " Packets written.", 7);
        assert!(counted.contains(&sent) && counted.len() == 3, "{counted:?}");
        assert!(counters.all().all(|(_, help, _)| help.starts_with(' ') && help.ends_with('.')));
    }
}
