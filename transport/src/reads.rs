//! The READ budget: how many bytes may be on their way to us at once, over all connections. No IO.
//!
//! The sources of READs answer as fast as they can and know nothing of one another; what overruns our socket's buffer
//! is lost and costs a retransmission timeout (incast). So READs wait here until the bytes in flight fit the buffer.
//! Large READs go out in pieces, one piece per connection and turn, so that no source starves the others. A source that
//! lives and does not answer keeps its pieces under way for seconds: it leaves a quarter of the budget to others.
//!
//! What comes by a ring overruns nothing, and takes none of the budget.

use std::collections::{BTreeMap, VecDeque};

use crate::{ConnectionId, PostError, Transfer, device::READ_BYTES_MAX};

/// READs that may wait, per connection.
pub(crate) const READS_WAITING_MAX: usize = 4096;

/// A part of a transfer, to be posted as one READ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The part, with its transfer's token.
    pub transfer: Transfer,
    /// Whether its transfer ends with it.
    pub last: bool,
}

/// READs of all connections of one endpoint.
#[derive(Debug)]
pub(crate) struct Reads {
    by_network: Pool,
    by_rings: Pool,
    sources: BTreeMap<ConnectionId, Source>,
}

/// Connections that share a budget.
#[derive(Debug)]
struct Pool {
    budget_bytes: usize,
    /// What one source may have of it.
    share_bytes: usize,
    piece_bytes_max: usize,
    outstanding_bytes: usize,
    /// Connections with waiting READs and room for a piece, whose turn comes first.
    turns: VecDeque<ConnectionId>,
}

impl Pool {
    fn new(budget_bytes: usize, piece_bytes_max: usize) -> Self {
        let quarter_bytes = (budget_bytes / 4).max(1);
        Self {
            budget_bytes,
            share_bytes: budget_bytes - quarter_bytes,
            piece_bytes_max: piece_bytes_max.min(quarter_bytes),
            outstanding_bytes: 0,
            turns: VecDeque::new(),
        }
    }
}

#[derive(Debug)]
struct Source {
    /// What is not posted yet; of the first, possibly only the rest.
    waiting: VecDeque<Transfer>,
    /// Sizes of the posted pieces, oldest first: a queue pair completes in order.
    posted: VecDeque<usize>,
    /// Their sum.
    posted_bytes: usize,
    /// Pieces that may be posted at once: more would make the SENDs behind them wait in the queue pair.
    posted_max: usize,
    in_turns: bool,
    has_ring: bool,
}

impl Reads {
    /// Two limits: of the bytes outstanding, and of one piece.
    pub(crate) fn new(budget_bytes: usize, piece_bytes_max: usize) -> Self {
        let by_rings = Pool::new(usize::MAX, READ_BYTES_MAX);
        Self { by_network: Pool::new(budget_bytes, piece_bytes_max), by_rings, sources: BTreeMap::new() }
    }

    /// READs on this connection may be given, but wait for [`Self::start`].
    pub(crate) fn open(&mut self, connection: ConnectionId) {
        let source = Source {
            waiting: VecDeque::new(),
            posted: VecDeque::new(),
            posted_bytes: 0,
            posted_max: 0,
            in_turns: false,
            has_ring: false,
        };
        self.sources.insert(connection, source);
    }

    /// The peer of this open connection answers `posted_max` READs at once, from now on; perhaps by a ring.
    pub(crate) fn start(&mut self, connection: ConnectionId, posted_max: usize, has_ring: bool) {
        let source = self.sources.get_mut(&connection).expect("started once, when open");
        (source.posted_max, source.has_ring) = (posted_max, has_ring);
        self.on_change(connection);
    }

    /// A READ to be done.
    ///
    /// # Errors
    /// `NotConnected` if the connection is not open, `QueueFull` if too many READs wait on it already.
    pub(crate) fn post(&mut self, connection: ConnectionId, transfer: Transfer) -> Result<(), PostError> {
        let source = self.sources.get_mut(&connection).ok_or(PostError::NotConnected)?;
        if source.waiting.len() >= READS_WAITING_MAX {
            return Err(PostError::QueueFull);
        }
        source.waiting.push_back(transfer);
        self.on_change(connection);
        Ok(())
    }

    /// The next piece to post, if a budget allows one.
    pub(crate) fn poll_piece(&mut self) -> Option<(ConnectionId, Piece)> {
        self.poll_pool(true).or_else(|| self.poll_pool(false))
    }

    fn poll_pool(&mut self, has_ring: bool) -> Option<(ConnectionId, Piece)> {
        let pool = if has_ring { &mut self.by_rings } else { &mut self.by_network };
        let connection = *pool.turns.front()?;
        let source = self.sources.get_mut(&connection).expect("connections with turns are open");
        let waiting = source.waiting.front_mut().expect("connections with turns have READs");
        let bytes = waiting.bytes.min(pool.piece_bytes_max);
        // The one whose turn it is waits for room; smaller READs behind it do not overtake, or it might wait for ever.
        if pool.outstanding_bytes > 0 && pool.outstanding_bytes + bytes > pool.budget_bytes {
            return None;
        }
        let piece = Piece { transfer: Transfer { bytes, ..*waiting }, last: bytes == waiting.bytes };
        if piece.last {
            source.waiting.pop_front();
        } else {
            waiting.local_offset += bytes;
            waiting.remote_address = waiting.remote_address.wrapping_add(bytes as u64);
            waiting.bytes -= bytes;
        }
        source.posted.push_back(bytes);
        source.posted_bytes += bytes;
        source.in_turns = false;
        pool.turns.pop_front();
        pool.outstanding_bytes += bytes;
        self.on_change(connection);
        Some((connection, piece))
    }

    /// The oldest posted piece of a connection has ended.
    pub(crate) fn handle_done(&mut self, connection: ConnectionId) {
        if let Some(source) = self.sources.get_mut(&connection) {
            let bytes = source.posted.pop_front().expect("a piece ends once");
            source.posted_bytes -= bytes;
            let pool = if source.has_ring { &mut self.by_rings } else { &mut self.by_network };
            pool.outstanding_bytes -= bytes;
            self.on_change(connection);
        }
    }

    /// A connection is down: the tokens of READs that were not posted, or not to their end.
    pub(crate) fn close(&mut self, connection: ConnectionId) -> Vec<u64> {
        let Some(source) = self.sources.remove(&connection) else { return Vec::new() };
        let pool = if source.has_ring { &mut self.by_rings } else { &mut self.by_network };
        pool.turns.retain(|&turn| turn != connection);
        pool.outstanding_bytes -= source.posted_bytes;
        source.waiting.iter().map(|transfer| transfer.token).collect()
    }

    /// Gives a connection a turn if it can use one and has none.
    fn on_change(&mut self, connection: ConnectionId) {
        let source = self.sources.get_mut(&connection).expect("called for open connections");
        let Some(next) = source.waiting.front() else { return };
        let pool = if source.has_ring { &mut self.by_rings } else { &mut self.by_network };
        let bytes = source.posted_bytes + next.bytes.min(pool.piece_bytes_max);
        let is_in_share = source.posted.is_empty() || bytes <= pool.share_bytes;
        if !source.in_turns && is_in_share && source.posted.len() < source.posted_max {
            source.in_turns = true;
            pool.turns.push_back(connection);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(token: u64, bytes: usize) -> Transfer {
        Transfer { token, lkey: 1, local_offset: 100, remote_address: 0x1000, rkey: 2, bytes }
    }

    #[test]
    fn a_large_read_goes_out_in_adjacent_pieces() {
        let mut reads = Reads::new(8 * 10_000, 10_000);
        assert_eq!(
            Reads::new(1_000, 1_000).by_network.piece_bytes_max,
            250,
            "others find room, however large a READ may be"
        );
        let connection = ConnectionId(1);
        reads.open(connection);
        reads.start(connection, 16, false);
        reads.post(connection, read(5, 25_000)).unwrap();
        let pieces: Vec<_> = std::iter::from_fn(|| reads.poll_piece()).map(|(_, piece)| piece).collect();
        let part = |local_offset, remote_address, bytes, last| Piece {
            transfer: Transfer { local_offset, remote_address, bytes, ..read(5, 0) },
            last,
        };
        assert_eq!(
            pieces,
            [
                part(100, 0x1000, 10_000, false),
                part(10_100, 0x1000 + 10_000, 10_000, false),
                part(20_100, 0x1000 + 20_000, 5_000, true),
            ]
        );
    }

    #[test]
    fn an_empty_read_is_one_piece() {
        let mut reads = Reads::new(1000, 4096);
        reads.open(ConnectionId(1));
        reads.post(ConnectionId(1), read(1, 0)).unwrap();
        assert_eq!(reads.poll_piece(), None, "not started");
        reads.start(ConnectionId(1), 1, false);
        assert_eq!(reads.poll_piece(), Some((ConnectionId(1), Piece { transfer: read(1, 0), last: true })));
        assert_eq!(reads.poll_piece(), None);
    }

    #[test]
    fn a_busy_source_does_not_starve_a_quiet_one() {
        let mut reads = Reads::new(8 * 4096, 4096);
        (1..=2).for_each(|id| reads.open(ConnectionId(id)));
        (1..=2).for_each(|id| reads.start(ConnectionId(id), 100, false));
        (0..50).for_each(|token| reads.post(ConnectionId(1), read(token, 4096)).unwrap());
        while reads.poll_piece().is_some() {}
        reads.post(ConnectionId(2), read(99, 4096)).unwrap();
        reads.handle_done(ConnectionId(1));
        reads.handle_done(ConnectionId(1));
        let served: Vec<_> = std::iter::from_fn(|| reads.poll_piece()).map(|(connection, _)| connection.0).collect();
        assert_eq!(served, [2, 1, 1], "there was room for it before");
    }

    /// One that answered nothing had the whole budget until its connection broke.
    #[test]
    fn a_silent_source_leaves_room_to_others() {
        let mut reads = Reads::new(8 * 4096, 4096);
        (1..=2).for_each(|id| reads.open(ConnectionId(id)));
        (1..=2).for_each(|id| reads.start(ConnectionId(id), 100, false));
        (0..50).for_each(|token| reads.post(ConnectionId(1), read(token, 4096)).unwrap());
        assert_eq!(std::iter::from_fn(|| reads.poll_piece()).count(), 6);
        for token in 50..150 {
            reads.post(ConnectionId(2), read(token, 4096)).unwrap();
            let served: Vec<_> = std::iter::from_fn(|| reads.poll_piece()).collect();
            assert!(served.len() == 1 && served[0].1.last, "{served:?}");
            reads.handle_done(ConnectionId(2));
        }
        reads.close(ConnectionId(1));
        assert_eq!(reads.by_network.outstanding_bytes, 0);
    }

    #[test]
    fn what_comes_by_a_ring_takes_none_of_the_budget_and_waits_for_none() {
        let mut reads = Reads::new(8 * 4096, 4096);
        (1..=2).for_each(|id| reads.open(ConnectionId(id)));
        reads.start(ConnectionId(1), 100, false);
        reads.start(ConnectionId(2), 3, true);
        for (token, id) in (0..100).map(|token| (token, 1 + token % 2)) {
            reads.post(ConnectionId(id), read(token, 300_000)).unwrap();
        }
        let posted: Vec<_> = std::iter::from_fn(|| reads.poll_piece()).collect();
        let of =
            |id| posted.iter().filter(move |(connection, _)| connection.0 == id).map(|(_, piece)| piece.transfer.bytes);
        assert_eq!(of(1).collect::<Vec<_>>(), [4096; 6]);
        assert_eq!(of(2).collect::<Vec<_>>(), [READ_BYTES_MAX, 300_000 - READ_BYTES_MAX, READ_BYTES_MAX]);
        reads.handle_done(ConnectionId(2));
        assert_eq!(reads.by_network.outstanding_bytes, 6 * 4096);
        assert!(matches!(reads.poll_piece(), Some((ConnectionId(2), _))));
        reads.close(ConnectionId(2));
        assert_eq!(reads.by_rings.outstanding_bytes, 0);
    }

    #[test]
    fn the_queue_is_bounded_and_closing_returns_what_waits() {
        let mut reads = Reads::new(1 << 20, 1 << 17);
        assert_eq!(reads.post(ConnectionId(1), read(0, 1)), Err(PostError::NotConnected));
        reads.open(ConnectionId(1));
        reads.start(ConnectionId(1), 1, false);
        let posted = (0..).take_while(|&token| reads.post(ConnectionId(1), read(token, 1)).is_ok()).count();
        assert_eq!(posted, READS_WAITING_MAX);
        reads.poll_piece().unwrap();
        assert_eq!(reads.close(ConnectionId(1)), (1..READS_WAITING_MAX as u64).collect::<Vec<_>>());
        assert_eq!((reads.by_network.outstanding_bytes, reads.poll_piece()), (0, None));
    }

    proptest! {
        /// Whatever comes: the budget holds (but for a single piece larger than it), and every byte of every READ is
        /// asked for exactly once, in order.
        #[test]
        fn budget_and_coverage(
            budget in 1usize..200_000,
            piece_max in 1000usize..300_000,
            depth in 1usize..5,
            steps in proptest::collection::vec((0u64..3, 0usize..60_000, any::<bool>()), 1..60),
        ) {
            let mut reads = Reads::new(budget, piece_max);
            (0..3).for_each(|id| reads.open(ConnectionId(id)));
            (0..3).for_each(|id| reads.start(ConnectionId(id), depth, false));
            let mut asked = BTreeMap::new();
            let mut in_flight = VecDeque::new();
            let mut pull = |reads: &mut Reads, in_flight: &mut VecDeque<(ConnectionId, usize)>| {
                while let Some((connection, piece)) = reads.poll_piece() {
                    *asked.entry(piece.transfer.token).or_insert(0) += piece.transfer.bytes;
                    in_flight.push_back((connection, piece.transfer.bytes));
                    let total: usize = in_flight.iter().map(|(_, bytes)| bytes).sum();
                    let filled = in_flight.iter().filter(|(_, b)| *b > 0).count();
                    assert!(total <= budget || in_flight.len() == 1 || filled <= 1);
                    assert!(in_flight.iter().filter(|(c, _)| *c == connection).count() <= depth);
                }
            };
            for (token, &(connection, bytes, done)) in steps.iter().enumerate() {
                reads.post(ConnectionId(connection), read(token as u64, bytes)).unwrap();
                pull(&mut reads, &mut in_flight);
                if done && let Some((connection, _)) = in_flight.pop_front() {
                    reads.handle_done(connection);
                }
            }
            loop {
                pull(&mut reads, &mut in_flight);
                let Some((connection, _)) = in_flight.pop_front() else { break };
                reads.handle_done(connection);
            }
            let expected: BTreeMap<_, _> =
                steps.iter().enumerate().map(|(token, &(_, bytes, _))| (token as u64, bytes)).collect();
            prop_assert_eq!(asked, expected);
        }
    }
}
