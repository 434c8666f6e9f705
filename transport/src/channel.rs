//! One connection's queue pair and what waits for it. No IO of its own: it posts to the endpoint's device.
//!
//! Life: created with its receives posted (so that whatever the peer sends finds one), connected once the peer's
//! parameters are known, started once the peer can receive, closed once. Frames are copied into registered memory when
//! they are given to us and leave from there; they and WRITEs go out in the order given, each for one credit. READs
//! come from [`crate::reads`] and overtake both. Nobody waits for the end of a frame, so most go out unsignalled: a
//! queue pair completes in order, and the next completion tells of all before it.

use std::collections::VecDeque;

use proto::{Timestamp, frame::FRAME_BYTES_MAX};
use soft_roce::{
    Completion, CompletionOpcode, Operation, PathMtu, ProtectionDomain, Psn, QueuePairNumber, RecvRequest, Remote,
    Segment, SendRequest, Status,
};

use crate::{
    Access, ConnectionId, Event, PostError, RegionKey, Transfer, TransferError,
    bootstrap::Parameters,
    credits::{CREDIT_RECEIVES, Credits, HEADER_BYTES, Header},
    device::Device,
    error::{ChannelError, WorkRequestError},
    limits::WORK_MAX,
    opening::Opening,
    patience::Patience,
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
/// Frames that wait or are under way, in bytes.
const RING_BYTES: usize = 512 * 1024;
/// One receive: a header and the largest frame.
const SLOT_BYTES: usize = (HEADER_BYTES + FRAME_BYTES_MAX).next_multiple_of(64);
pub(crate) const SLOTS: usize = (RECEIVE_DEPTH + CREDIT_RECEIVES) as usize;
/// The send queue: frames and WRITEs, the one credit message, pieces of READs.
pub(crate) const SEND_DEPTH: usize = SENDS_POSTED_MAX + 1 + READS_POSTED_MAX as usize;
/// Frames in a row, at most, whose end is told by a later completion only; and how much of the ring they may hold.
const UNSIGNALLED_MAX: usize = 16;
const UNSIGNALLED_BYTES_MAX: usize = RING_BYTES / 4;

/// The connection's memory: the ring of frames to send, the one credit message, the receives.
const CREDIT_AT: usize = RING_BYTES;
const SLOTS_AT: usize = CREDIT_AT + 64;
const MEMORY_BYTES: usize = SLOTS_AT + SLOTS * SLOT_BYTES;

// With nothing else under way, frames that were sent but not told of leave room for one more, and for the next.
const _: () = assert!(UNSIGNALLED_MAX < SENDS_POSTED_MAX);
const _: () = assert!((RING_BYTES - UNSIGNALLED_BYTES_MAX - SLOT_BYTES) / 2 >= SLOT_BYTES);

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
    key: RegionKey,
    /// What the peer alone reaches, if anything.
    opening: Option<Opening>,
    credits: Credits,
    ring: Ring,
    waiting: VecDeque<Work>,
    /// How many have left `waiting`.
    left: u64,
    /// How long they wait for credits.
    patience: Patience,
    posted: VecDeque<Posted>,
    /// How many work requests had been posted, or taken off `posted`, so far: their ids.
    posted_count: u64,
    ended_count: u64,
    /// Frames since the last signalled work request, and what they hold of the ring.
    unsignalled: usize,
    unsignalled_bytes: usize,
    /// Of the posted ones, those that consume a receive.
    sends_posted: usize,
    credit_posted: bool,
    /// Whether the peer can receive.
    started: bool,
    /// The first failure of a READ whose last piece has not ended.
    read_failure: Option<(u64, TransferError)>,
}

impl Channel {
    /// A queue pair that can receive as soon as it is connected.
    ///
    /// # Errors
    /// One line if the system or the device has no room for it.
    pub(crate) fn create(device: &mut Device, id: ConnectionId) -> Result<Self, ChannelError> {
        Self::create_in(device, id, ProtectionDomain::default())
    }

    /// The same, whose peer alone reaches a region, by the key that comes of it.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub(crate) fn create_opening(
        device: &mut Device,
        id: ConnectionId,
        region: &Region,
        access: Access,
    ) -> Result<(Self, RegionKey), ChannelError> {
        let opening = Opening::open(device, region, access)?;
        match Self::create_in(device, id, opening.domain()) {
            Ok(channel) => {
                let key = opening.key();
                Ok((Self { opening: Some(opening), ..channel }, key))
            }
            Err(error) => {
                opening.close(device);
                Err(error)
            }
        }
    }

    fn create_in(device: &mut Device, id: ConnectionId, domain: ProtectionDomain) -> Result<Self, ChannelError> {
        let memory =
            Region::allocate(MEMORY_BYTES).map_err(|cause| ChannelError::Memory { bytes: MEMORY_BYTES, cause })?;
        let key = device.register(&memory, Access::default(), domain).map_err(ChannelError::Register)?;
        let number = device.create_queue_pair(domain).map_err(|error| {
            device.deregister(key.lkey);
            ChannelError::Create(error)
        })?;
        let channel = Self {
            id,
            number,
            psn: device.random_psn(),
            memory,
            key,
            opening: None,
            credits: Credits::new(RECEIVE_DEPTH, 0),
            ring: Ring::new(RING_BYTES),
            waiting: VecDeque::new(),
            left: 0,
            patience: Patience::default(),
            posted: VecDeque::new(),
            posted_count: 0,
            ended_count: 0,
            unsignalled: 0,
            unsignalled_bytes: 0,
            sends_posted: 0,
            credit_posted: false,
            started: false,
            read_failure: None,
        };
        for slot in 0..SLOTS as u64 {
            channel.post_receive(device, slot).inspect_err(|_| channel.release(device))?;
        }
        Ok(channel)
    }

    /// The queue pair's number, for the peer and for completions.
    pub(crate) fn number(&self) -> QueuePairNumber {
        self.number
    }

    /// Whether its peer reaches a region that is registered for it.
    pub(crate) fn has_opening(&self) -> bool {
        self.opening.is_some()
    }

    /// The PSN of the first packet that we will send, for the peer.
    pub(crate) fn psn(&self) -> Psn {
        self.psn
    }

    /// Tells the queue pair who its peer is. From now on it receives; `path_mtu` is what both links carry.
    ///
    /// # Errors
    /// One line if the device refuses what the peer told.
    pub(crate) fn connect(
        &mut self,
        device: &mut Device,
        peer: &Parameters,
        path_mtu: PathMtu,
    ) -> Result<(), ChannelError> {
        self.credits = Credits::new(RECEIVE_DEPTH, peer.receive_depth);
        device.connect_queue_pair(self.number, self.psn, peer, path_mtu).map_err(ChannelError::Connect)
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
    pub(crate) fn post(&mut self, now: Timestamp, device: &mut Device) -> Result<(), WorkRequestError> {
        while self.may_send() && self.credits.take().is_ok() {
            self.sends_posted += 1;
            self.left += 1;
            match self.waiting.pop_front().expect("may_send looked") {
                Work::Frame { offset, bytes } => {
                    let header = Header { granted: self.credits.grant(), frame: true };
                    self.memory.write(offset, &header.emit());
                    let local = self.own_segment(offset, HEADER_BYTES + bytes);
                    self.post_send(device, Operation::Send { local }, Posted::Frame)?;
                }
                Work::Write { transfer, immediate } => {
                    let (local, remote) = ends(&transfer);
                    let operation = Operation::WriteWithImmediate { local, remote, immediate };
                    self.post_send(device, operation, Posted::Write { token: transfer.token })?;
                }
            }
        }
        if self.must_grant() {
            self.credit_posted = true;
            let header = Header { granted: self.credits.grant(), frame: false };
            self.memory.write(CREDIT_AT, &header.emit());
            let local = self.own_segment(CREDIT_AT, HEADER_BYTES);
            self.post_send(device, Operation::Send { local }, Posted::Credit)?;
        }
        let is_starved = self.started && !self.waiting.is_empty() && self.credits.available() == 0;
        let came = self.left + self.waiting.len() as u64;
        self.patience.handle_change(now, (came, self.left), is_starved);
        Ok(())
    }

    /// Since when the oldest of what is to be sent has waited for the peer's credit.
    pub(crate) fn starved_since(&self) -> Option<Timestamp> {
        self.patience.since()
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
    pub(crate) fn post_read(&mut self, device: &mut Device, piece: Piece) -> Result<(), WorkRequestError> {
        let (local, remote) = ends(&piece.transfer);
        let posted = Posted::Read { token: piece.transfer.token, last: piece.last };
        self.post_send(device, Operation::Read { local, remote }, posted)
    }

    /// The receive of an event that was taken is the peer's to use again.
    ///
    /// # Errors
    /// As [`Self::post`].
    pub(crate) fn handle_taken(&mut self, device: &mut Device, slot: u64) -> Result<(), WorkRequestError> {
        self.credits.on_reposted();
        self.post_receive(device, slot)
    }

    /// Takes in the end of a posted SEND, WRITE or READ, and of the unsignalled frames before it; of a READ, tells
    /// `reads`.
    pub(crate) fn handle_sent(&mut self, completion: &Completion, reads: &mut Reads) -> Option<Event> {
        while self.ended_count < completion.id {
            // They ended well, or they would have told.
            let event = self.on_ended(Ok(()), reads);
            assert!(event.is_none(), "only frames go out unsignalled");
        }
        self.on_ended(outcome(completion.status), reads)
    }

    /// The oldest posted work request has ended.
    fn on_ended(&mut self, result: Result<(), TransferError>, reads: &mut Reads) -> Option<Event> {
        self.ended_count += 1;
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
    pub(crate) fn handle_received(
        &mut self,
        device: &mut Device,
        completion: &Completion,
    ) -> Result<Option<Held>, ChannelError> {
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
            return Err(ChannelError::NoHeader { bytes: completion.bytes });
        };
        if !self.credits.handle_grant(header.granted) {
            return Err(ChannelError::Credits);
        }
        if !header.frame {
            self.post_receive(device, slot)?;
            return Ok(None);
        }
        let mut frame = vec![0; bytes];
        self.memory.read(at + HEADER_BYTES, &mut frame);
        Ok(Some((Event::Message { connection: self.id, frame }, Some(slot))))
    }

    /// Ends the queue pair, whose flushed work has been handed to [`Self::handle_sent`], and returns the memory.
    /// What was never posted, or not completed, ends here.
    pub(crate) fn close(mut self, device: &mut Device, reads: &mut Reads) -> Vec<Event> {
        self.release(device);
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

    fn release(&self, device: &mut Device) {
        device.destroy_queue_pair(self.number);
        device.deregister(self.key.lkey);
        if let Some(opening) = &self.opening {
            opening.close(device);
        }
    }

    fn post_send(&mut self, device: &mut Device, operation: Operation, posted: Posted) -> Result<(), WorkRequestError> {
        let signalled = self.is_signalled(&operation, &posted);
        let request = SendRequest { signalled, ..SendRequest::new(self.posted_count, operation) };
        // Remembered even if it is refused: whatever was taken in is reported once.
        self.posted.push_back(posted);
        self.posted_count += 1;
        device.post_send(self.number, request)
    }

    /// Whether the end of this work request is told by a completion of its own.
    fn is_signalled(&mut self, operation: &Operation, posted: &Posted) -> bool {
        self.unsignalled += 1;
        self.unsignalled_bytes += operation.local().bytes as usize;
        let signalled = !matches!(posted, Posted::Frame)
            || self.unsignalled > UNSIGNALLED_MAX
            || self.unsignalled_bytes > UNSIGNALLED_BYTES_MAX;
        if signalled {
            (self.unsignalled, self.unsignalled_bytes) = (0, 0);
        }
        signalled
    }

    fn post_receive(&self, device: &mut Device, slot: u64) -> Result<(), WorkRequestError> {
        let segment = self.own_segment(slot_at(slot), SLOT_BYTES);
        device.post_recv(self.number, RecvRequest { id: slot, segment })
    }

    fn own_segment(&self, offset: usize, bytes: usize) -> Segment {
        Segment { lkey: self.key.lkey, offset, bytes: bytes as u32 }
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
