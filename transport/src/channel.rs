//! One connection's queue pair and what waits for it. No IO of its own: it posts to the endpoint's core.
//!
//! Life: created with its receives posted (so that whatever the peer sends finds one), connected once the peer's
//! parameters are known, started once the peer can receive, closed once. Frames are copied into registered memory when
//! they are given to us and leave from there; they and WRITEs go out in the order given, each for one credit. READs come
//! from [`crate::reads`] and overtake both.

use std::{collections::VecDeque, sync::Arc};

use proto::frame::FRAME_BYTES_MAX;
use soft_roce::{
    Access, Completion, CompletionOpcode, Endpoint as Core, Identification, Operation, PathMtu, Peer, Psn,
    QueuePairConfig, QueuePairNumber, RecvRequest, RegionHandle, Remote, Segment, SendRequest, Status,
};

use crate::{
    ConnectionId, Event, PostError, Transfer, TransferError,
    bootstrap::Parameters,
    credits::{CREDIT_RECEIVES, Credits, HEADER_BYTES, Header},
    reads::{Piece, Reads},
    region::Region,
    ring::Ring,
};

/// Receives posted for frames and immediates, which are the peer's credits.
pub(crate) const RECEIVE_DEPTH: u16 = 64;
/// READs that we answer at once, and that we ask for at once.
pub(crate) const READS_POSTED_MAX: u8 = 16;
/// SENDs and WRITEs posted at once; more wait here.
const SENDS_POSTED_MAX: usize = 128;
/// However small the peer's buffer: fewer would make every few packets wait for a round trip.
const WINDOW_PACKETS_MIN: u32 = 4;
/// Frames and WRITEs that wait or are under way.
const WORK_MAX: usize = 1024;
/// Frames that wait or are under way, in bytes.
const RING_BYTES: usize = 512 * 1024;
/// One receive: a header and the largest frame.
const SLOT_BYTES: usize = (HEADER_BYTES + FRAME_BYTES_MAX).next_multiple_of(64);
const SLOTS: usize = (RECEIVE_DEPTH + CREDIT_RECEIVES) as usize;
/// The send queue: frames and WRITEs, the one credit message, pieces of READs.
const SEND_DEPTH: usize = SENDS_POSTED_MAX + 1 + READS_POSTED_MAX as usize;
/// Work requests that one connection has outstanding, in both queues.
pub(crate) const WORK_REQUESTS_MAX: usize = SEND_DEPTH + SLOTS;
/// The first retransmission timeout, as an exponent: 4.096 us * 2^11 = 8.4 ms, long against a busy peer's turn and short
/// against a deadline. It doubles seven times, so a queue pair gives up after 2.1 s, as the bootstrap does on silence.
const ACK_TIMEOUT: u8 = 11;

/// The connection's memory: the ring of frames to send, the one credit message, the receives.
const CREDIT_AT: usize = RING_BYTES;
const SLOTS_AT: usize = CREDIT_AT + 64;
const MEMORY_BYTES: usize = SLOTS_AT + SLOTS * SLOT_BYTES;

const _: () = assert!(RING_BYTES >= 2 * SLOT_BYTES);

/// What waits for a credit.
#[derive(Debug)]
enum Work {
    Frame { offset: usize, bytes: usize },
    Write { transfer: Transfer, immediate: u32 },
}

/// What the queue pair has and will complete, in this order.
#[derive(Debug)]
enum Posted {
    Frame,
    Credit,
    Write { token: u64 },
    Read { token: u64, last: bool },
}

/// An event, and the receive that it holds until it is taken.
pub(crate) type Held = (Event, Option<u64>);

/// A queue pair with its memory, its credits and its queues.
pub(crate) struct Channel {
    id: ConnectionId,
    number: QueuePairNumber,
    psn: Psn,
    memory: Region,
    handle: RegionHandle,
    credits: Credits,
    ring: Ring,
    waiting: VecDeque<Work>,
    posted: VecDeque<Posted>,
    /// Of the posted ones, those that consume a receive.
    sends_posted: usize,
    credit_posted: bool,
    /// Whether the peer can receive.
    started: bool,
    /// The first failure of a READ whose last piece has not ended.
    read_failure: Option<(u64, TransferError)>,
}

impl Channel {
    /// A queue pair that can receive as soon as it is connected. `access` is what its peer may do.
    ///
    /// # Errors
    /// One line if the system or the core has no room for it.
    pub(crate) fn create(core: &mut Core, id: ConnectionId, read_window_bytes: u32) -> Result<Self, String> {
        let memory = Region::allocate(MEMORY_BYTES)
            .map_err(|error| format!("no memory for one more connection ({MEMORY_BYTES} bytes): {error}"))?;
        let handle = core
            .register(Arc::new(memory.clone()), Access::LOCAL)
            .map_err(|error| format!("no registration for one more connection: {error}"))?;
        let number = core.create_queue_pair(queue_pair_config(read_window_bytes)).map_err(|error| {
            core.deregister(handle.lkey);
            format!("no queue pair for one more connection: {error}")
        })?;
        let channel = Self {
            id,
            number,
            psn: core.random_psn(),
            memory,
            handle,
            credits: Credits::new(RECEIVE_DEPTH, 0),
            ring: Ring::new(RING_BYTES),
            waiting: VecDeque::new(),
            posted: VecDeque::new(),
            sends_posted: 0,
            credit_posted: false,
            started: false,
            read_failure: None,
        };
        for slot in 0..SLOTS as u64 {
            channel.post_receive(core, slot).inspect_err(|_| channel.release(core))?;
        }
        Ok(channel)
    }

    /// The queue pair's number, for the peer and for completions.
    pub(crate) fn number(&self) -> QueuePairNumber {
        self.number
    }

    /// The PSN of the first packet that we will send, for the peer.
    pub(crate) fn psn(&self) -> Psn {
        self.psn
    }

    /// Tells the queue pair who its peer is. From now on it receives; `path_mtu` is what both links carry.
    ///
    /// # Errors
    /// One line if the core refuses what the peer told.
    pub(crate) fn connect(&mut self, core: &mut Core, peer: &Parameters, path_mtu: PathMtu) -> Result<(), String> {
        self.credits = Credits::new(RECEIVE_DEPTH, peer.receive_depth);
        let address = Peer {
            address: peer.address,
            queue_pair: QueuePairNumber(peer.queue_pair),
            rq_psn: Psn::new(peer.psn),
            sq_psn: self.psn,
            path_mtu,
            identification: Identification::SegmentIndex,
        };
        core.connect_queue_pair(self.number, address)
            .map_err(|error| format!("the queue pair cannot be connected: {error}"))?;
        let window_packets = (peer.window_bytes / path_mtu.bytes()).max(WINDOW_PACKETS_MIN);
        core.limit_requests(self.number, peer.max_dest_rd_atomic.into(), window_packets);
        Ok(())
    }

    /// The peer can receive: what waits may go.
    pub(crate) fn start(&mut self) {
        self.started = true;
    }

    /// Takes a frame in.
    ///
    /// # Errors
    /// `QueueFull` if too much waits already.
    ///
    /// # Panics
    /// If the frame is larger than `FRAME_BYTES_MAX`.
    pub(crate) fn send(&mut self, frame: &[u8]) -> Result<(), PostError> {
        assert!(
            frame.len() <= FRAME_BYTES_MAX,
            "a frame of {} bytes, where {FRAME_BYTES_MAX} are allowed",
            frame.len()
        );
        self.check_room()?;
        let offset = self.ring.take(HEADER_BYTES + frame.len()).ok_or(PostError::QueueFull)?;
        self.memory.write(offset + HEADER_BYTES, frame);
        self.waiting.push_back(Work::Frame { offset, bytes: frame.len() });
        Ok(())
    }

    /// Takes a WRITE_WITH_IMM in.
    ///
    /// # Errors
    /// `QueueFull` if too much waits already.
    pub(crate) fn write(&mut self, transfer: Transfer, immediate: u32) -> Result<(), PostError> {
        self.check_room()?;
        self.waiting.push_back(Work::Write { transfer, immediate });
        Ok(())
    }

    fn check_room(&self) -> Result<(), PostError> {
        if self.waiting.len() + self.sends_posted < WORK_MAX { Ok(()) } else { Err(PostError::QueueFull) }
    }

    /// Posts what has credits, and grants that are due.
    ///
    /// # Errors
    /// One line if the queue pair refuses; the connection cannot go on then.
    pub(crate) fn post(&mut self, core: &mut Core) -> Result<(), String> {
        while self.may_send() && self.credits.take().is_ok() {
            self.sends_posted += 1;
            match self.waiting.pop_front().expect("may_send looked") {
                Work::Frame { offset, bytes } => {
                    let header = Header { granted: self.credits.grant(), frame: true };
                    self.memory.write(offset, &header.emit());
                    let local = self.own_segment(offset, HEADER_BYTES + bytes);
                    self.post_send(core, Operation::Send { local }, Posted::Frame)?;
                }
                Work::Write { transfer, immediate } => {
                    let (local, remote) = ends(&transfer);
                    let operation = Operation::WriteWithImmediate { local, remote, immediate };
                    self.post_send(core, operation, Posted::Write { token: transfer.token })?;
                }
            }
        }
        if self.must_grant() {
            self.credit_posted = true;
            let header = Header { granted: self.credits.grant(), frame: false };
            self.memory.write(CREDIT_AT, &header.emit());
            let local = self.own_segment(CREDIT_AT, HEADER_BYTES);
            self.post_send(core, Operation::Send { local }, Posted::Credit)?;
        }
        Ok(())
    }

    /// Whether [`Self::post`] has something to do.
    pub(crate) fn is_due(&self) -> bool {
        self.may_send() && self.credits.available() > 0 || self.must_grant()
    }

    fn may_send(&self) -> bool {
        self.started && !self.waiting.is_empty() && self.sends_posted < SENDS_POSTED_MAX
    }

    fn must_grant(&self) -> bool {
        self.started && self.credits.is_owing() && !self.credit_posted
    }

    /// Posts a piece of a READ.
    ///
    /// # Errors
    /// As [`Self::post`].
    pub(crate) fn post_read(&mut self, core: &mut Core, piece: Piece) -> Result<(), String> {
        let (local, remote) = ends(&piece.transfer);
        let posted = Posted::Read { token: piece.transfer.token, last: piece.last };
        self.post_send(core, Operation::Read { local, remote }, posted)
    }

    /// The receive of an event that was taken is the peer's to use again.
    ///
    /// # Errors
    /// As [`Self::post`].
    pub(crate) fn handle_taken(&mut self, core: &mut Core, slot: u64) -> Result<(), String> {
        self.credits.on_reposted();
        self.post_receive(core, slot)
    }

    /// Takes in the end of the oldest posted SEND, WRITE or READ; of a READ, tells `reads`.
    pub(crate) fn handle_sent(&mut self, completion: &Completion, reads: &mut Reads) -> Option<Event> {
        let result = outcome(completion.status);
        match self.posted.pop_front().expect("the queue pair completes what was posted, once and in order") {
            Posted::Frame => {
                self.ring.give_back();
                self.sends_posted -= 1;
                None
            }
            Posted::Credit => {
                self.credit_posted = false;
                None
            }
            Posted::Write { token } => {
                self.sends_posted -= 1;
                Some(Event::WriteDone { connection: self.id, token, result })
            }
            Posted::Read { token, last } => {
                reads.handle_done(self.id);
                self.on_read_piece(token, last, result)
            }
        }
    }

    /// A READ has ended with its last piece. If one before has failed, that is the cause, not the flush of the rest.
    fn on_read_piece(&mut self, token: u64, last: bool, result: Result<(), TransferError>) -> Option<Event> {
        if let Err(error) = result
            && self.read_failure.is_none_or(|(failed, _)| failed != token)
        {
            self.read_failure = Some((token, error));
        }
        last.then(|| Event::ReadDone { connection: self.id, token, result: self.read_result(token) })
    }

    fn read_result(&self, token: u64) -> Result<(), TransferError> {
        match self.read_failure {
            Some((failed, error)) if failed == token => Err(error),
            _ => Ok(()),
        }
    }

    /// Takes in a receive that was used up.
    ///
    /// # Errors
    /// One line if the peer sent what no peer of ours sends.
    pub(crate) fn handle_received(&mut self, core: &mut Core, completion: &Completion) -> Result<Option<Held>, String> {
        if completion.status != Status::Success {
            return Ok(None);
        }
        let slot = completion.id;
        if completion.opcode == CompletionOpcode::RecvWriteWithImmediate {
            let immediate = completion.immediate.unwrap_or_default();
            let event = Event::Immediate { connection: self.id, immediate, bytes: completion.bytes };
            return Ok(Some((event, Some(slot))));
        }
        let at = slot_at(slot);
        let mut header = [0; HEADER_BYTES];
        self.memory.read(at, &mut header);
        let bytes = (completion.bytes as usize).checked_sub(HEADER_BYTES);
        let (Some(header), Some(bytes)) = (Header::parse(&header), bytes) else {
            return Err(format!("the peer sent {} bytes without our header", completion.bytes));
        };
        if !self.credits.handle_grant(header.granted) {
            return Err("the peer granted credits that it cannot have".to_owned());
        }
        if !header.frame {
            self.post_receive(core, slot)?;
            return Ok(None);
        }
        let mut frame = vec![0; bytes];
        self.memory.read(at + HEADER_BYTES, &mut frame);
        Ok(Some((Event::Message { connection: self.id, frame }, Some(slot))))
    }

    /// Ends the queue pair, whose flushed work has been handed to [`Self::handle_sent`], and returns the memory.
    /// What was never posted, or not completed, ends here.
    pub(crate) fn close(mut self, core: &mut Core, reads: &mut Reads) -> Vec<Event> {
        self.release(core);
        let connection = self.id;
        let mut events = Vec::new();
        let flushed = Err(TransferError::Flushed);
        for posted in std::mem::take(&mut self.posted) {
            match posted {
                Posted::Write { token } => events.push(Event::WriteDone { connection, token, result: flushed }),
                Posted::Read { token, last } => events.extend(self.on_read_piece(token, last, flushed)),
                Posted::Frame | Posted::Credit => {}
            }
        }
        events.extend(reads.close(connection).into_iter().map(|token| {
            let result = self.read_result(token).and(flushed);
            Event::ReadDone { connection, token, result }
        }));
        events.extend(self.waiting.iter().filter_map(|work| match work {
            Work::Write { transfer, .. } => {
                Some(Event::WriteDone { connection, token: transfer.token, result: flushed })
            }
            Work::Frame { .. } => None,
        }));
        events
    }

    fn release(&self, core: &mut Core) {
        core.destroy_queue_pair(self.number);
        core.deregister(self.handle.lkey);
    }

    fn post_send(&mut self, core: &mut Core, operation: Operation, posted: Posted) -> Result<(), String> {
        // Remembered even if it is refused: whatever was taken in is reported once.
        self.posted.push_back(posted);
        core.post_send(self.number, SendRequest::new(0, operation)).map_err(|error| error.to_string())
    }

    fn post_receive(&self, core: &mut Core, slot: u64) -> Result<(), String> {
        let segment = self.own_segment(slot_at(slot), SLOT_BYTES);
        core.post_recv(self.number, RecvRequest { id: slot, segment }).map_err(|error| error.to_string())
    }

    fn own_segment(&self, offset: usize, bytes: usize) -> Segment {
        Segment { lkey: self.handle.lkey, offset, bytes: bytes as u32 }
    }
}

fn queue_pair_config(read_window_bytes: u32) -> QueuePairConfig {
    QueuePairConfig {
        send_depth: SEND_DEPTH,
        recv_depth: SLOTS,
        max_rd_atomic: READS_POSTED_MAX.into(),
        max_dest_rd_atomic: READS_POSTED_MAX.into(),
        access: Access { local_write: true, remote_read: true, remote_write: true, remote_atomic: false },
        ack_timeout: ACK_TIMEOUT,
        read_window_bytes,
        ..QueuePairConfig::default()
    }
}

fn slot_at(slot: u64) -> usize {
    SLOTS_AT + slot as usize * SLOT_BYTES
}

fn ends(transfer: &Transfer) -> (Segment, Remote) {
    // What is longer than any message comes out too long for the queue pair, too.
    let bytes = u32::try_from(transfer.bytes).unwrap_or(u32::MAX);
    (
        Segment { lkey: transfer.lkey, offset: transfer.local_offset, bytes },
        Remote { address: transfer.remote_address, rkey: transfer.rkey },
    )
}

fn outcome(status: Status) -> Result<(), TransferError> {
    match status {
        Status::Success => Ok(()),
        Status::Flushed => Err(TransferError::Flushed),
        Status::RemoteAccess => Err(TransferError::RemoteAccess),
        Status::RetryExceeded | Status::ReceiverNotReadyRetryExceeded => Err(TransferError::RetriesExceeded),
        _ => Err(TransferError::QueuePair),
    }
}
