//! What is said over TCP before two queue pairs can talk, and as long as they do. No IO.
//!
//! ```text
//! client                                              server
//!   Preface: magic, versions, nonce        ->
//!                                          <-         Preface: magic, versions, nonce
//!   checks it, or Close                    <-         Proof: HMAC-SHA-256 over both prefaces
//!   Proof: the same under another label    ->         checks it, or Close
//!   Offer: queue pair parameters, hello    ->         Event `Incoming`; its owner decides
//!   its queue pair can send and receive    <-         Answer: parameters, welcome; its queue pair can receive
//!   Ready                                  ->         its queue pair may send
//!   Heartbeat                             <->         Heartbeat, every 500 ms
//!   Close: reason                          ->         (or the other way round, at any time)
//! ```
//!
//! No queue pair number, key or hello is told to a peer that has not proved that it knows the secret (RFC 2104 HMAC,
//! fresh nonces on both sides, so an old proof is worth nothing; different labels, so it cannot be reflected). The
//! server proves first: whoever answers at an address that a member dials learns nothing from it, and the client's
//! proof and offer travel together. What a stranger who connects gets instead is a server's proof, from which a secret
//! can only be had by guessing: hence [`crate::SECRET_BYTES_MIN`], and random bytes for it; with [`crate::tls`]
//! strangers do not get that far. The connection stays open: its end is the peer's end, its silence a stall.
//!
//! A preface has two versions: of the bootstrap itself ([`VERSION`]), and of the messages that follow
//! ([`proto::WireVersion`]). Peers with different wires say `Release` after their proofs, each its release's name, and
//! part: a stranger is not told it, and both logs name both releases.
//!
//! Deliberately absent: encryption, and protection against somebody who can change bytes on the path; that is
//! [`crate::tls`]'s, below. RoCEv2 itself has none.

use std::{collections::VecDeque, net::SocketAddr, sync::Arc};

use hmac::{Hmac, KeyInit as _, Mac as _};
use proto::{Span, Timestamp, Wait, WireVersion};
use sha2::Sha256;
use soft_roce::PathMtu;
use wincode::{SchemaRead, SchemaWrite};

use crate::{
    PeerName, Release,
    limits::{HANDSHAKE_MAX, HELLO_BYTES_MAX, SILENCE_MAX},
    secrets::Known,
};

const MAGIC: &[u8; 8] = b"downbeat";
/// Of prefaces, of [`Message`], and of what soft-RoCE's endpoints agree to ([`soft_roce::Peer::ack_delay`]); to be
/// raised with any change of them. It stands where it always has.
const VERSION: u16 = 7;
const VERSION_END: usize = MAGIC.len() + size_of::<u16>();
pub(crate) const NONCE_BYTES: usize = 32;
const PREFACE_BYTES: usize = VERSION_END + size_of::<u64>() + NONCE_BYTES;
const LENGTH_BYTES: usize = size_of::<u32>();
/// The largest reason told in a `Close`.
const REASON_BYTES_MAX: usize = 512;
/// The longest name of a release.
const RELEASE_BYTES_MAX: usize = 64;
/// What an operator does about two releases that do not understand each other.
const MIXED: &str = "run releases with one wire version; docs/operations.md, \"Upgrades\"";
/// A peer that has not proved itself may send a `Proof`, a `Release` or a `Close`, nothing larger.
const UNPROVED_BYTES_MAX: usize = REASON_BYTES_MAX + 64;
/// A hello and the fixed fields around it.
pub(crate) const MESSAGE_BYTES_MAX: usize = HELLO_BYTES_MAX + 256;
const _: () = assert!(UNPROVED_BYTES_MAX < MESSAGE_BYTES_MAX);

/// From the offer to the answer: the time of `accept`'s caller.
const DECISION_MAX: Span = Wait::Decision.bound();
/// Something is said at least this often.
pub(crate) const HEARTBEAT: Span = Span::from_millis(500);

/// What one side tells the other of its queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub(crate) struct Parameters {
    /// Random for each opening of an endpoint, so a peer that came back is known as another.
    pub incarnation: u64,
    /// Where its packets arrive.
    pub address: PacketAddress,
    /// 24 bits, not 0 or 1.
    pub queue_pair: u32,
    /// The PSN of the first packet that it will send; 24 bits.
    pub psn: u32,
    /// The largest payload that its link carries: 256, 512, 1024, 2048 or 4096 bytes, or one of soft-RoCE's own if both
    /// are on one host ([`PathMtu::within_a_host`]). The smaller one of both holds.
    pub path_mtu_bytes: u16,
    /// READs that it answers at once.
    pub max_dest_rd_atomic: u8,
    /// Receives that it has posted for frames and immediates: the first credits.
    pub receive_depth: u16,
    /// Bytes that its peer may have in flight towards it, so that all peers together fit its socket's buffer.
    pub window_bytes: u32,
    /// What operators call it.
    pub name: PeerName,
    /// Whither its peer may come for a ring; in an answer the same again, if it comes.
    pub ring: RingName,
}

/// Names a place where two processes of one host meet, which only they know ([`crate::LocalPath::Ring`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub(crate) struct RingName(pub [u8; 16]);

impl RingName {
    /// No place.
    pub(crate) const NONE: Self = Self([0; 16]);
}

impl Parameters {
    /// What its link carries; the bootstrap lets only sizes that there are pass.
    pub(crate) fn path_mtu(&self) -> PathMtu {
        PathMtu::of_bytes(self.path_mtu_bytes.into()).unwrap_or(PathMtu::Mtu256)
    }
}

/// Where the packets of a queue pair arrive, which also tells what kind of device is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SchemaRead, SchemaWrite)]
pub(crate) enum PacketAddress {
    /// RoCEv2 by soft-RoCE, which may have any UDP port.
    SoftRoce(SocketAddr),
    /// RoCEv2 by a verbs device, at RoCEv2's own UDP port.
    Roce(SocketAddr),
    /// A port of an InfiniBand subnet.
    InfiniBand {
        /// Assigned by the subnet manager; 1 to 0xbfff (IBTA 4.1.3).
        lid: u16,
    },
}

impl PacketAddress {
    /// The UDP address, where there is UDP.
    pub(crate) fn udp(self) -> Option<SocketAddr> {
        match self {
            Self::SoftRoce(address) | Self::Roce(address) => Some(address),
            Self::InfiniBand { .. } => None,
        }
    }

    /// Whether packets can be sent there.
    fn is_valid(self) -> bool {
        match self {
            Self::SoftRoce(at) | Self::Roce(at) => {
                !at.ip().is_unspecified() && !at.ip().is_multicast() && at.port() != 0
            }
            Self::InfiniBand { lid } => (1..0xc000).contains(&lid),
        }
    }
}

impl std::fmt::Display for PacketAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::SoftRoce(address) | Self::Roce(address) => write!(f, "the UDP address {address}"),
            Self::InfiniBand { lid } => write!(f, "the LID {lid:#x}"),
        }
    }
}

#[derive(Debug, SchemaRead, SchemaWrite)]
enum Message {
    Proof([u8; 32]),
    Offer(Parameters, Vec<u8>),
    Answer(Parameters, Vec<u8>),
    Ready,
    Heartbeat,
    Close(String),
    /// The name of the sender's release, whose wire has another version.
    Release(String),
}

/// What a member proves to its peers, and what it is.
#[derive(Clone)]
pub(crate) struct Identity {
    /// The first is proved, each is believed.
    pub secrets: Known,
    pub release: Arc<Release>,
}

/// What a peer says first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Preface {
    wire: WireVersion,
    nonce: [u8; NONCE_BYTES],
}

/// What the bootstrap tells its owner.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum BootstrapEvent {
    /// To a client: the server proved itself; call [`Bootstrap::offer`].
    Proved,
    /// To a server: call [`Bootstrap::accept`] or [`Bootstrap::close`].
    Incoming { parameters: Parameters, hello: Vec<u8> },
    /// To a client: move the queue pair to RTS, then call [`Bootstrap::ready`].
    Answered { parameters: Parameters, welcome: Vec<u8> },
    /// To a server: the client's queue pair receives.
    Ready,
    /// The connection is over; nothing more comes. The text says why.
    Closed(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Both.
    AwaitPreface,
    /// Both. A server has sent its own already.
    AwaitProof { theirs: Preface },
    /// Both, if their wires differ: the peer has proved itself, and is to say what it is.
    AwaitRelease { wire: WireVersion },
    /// Client: `Proved` was told, the owner's turn.
    Offering,
    /// Client.
    AwaitAnswer,
    /// Client: `Answered` was told, the owner's turn.
    Connecting,
    /// Server.
    AwaitOffer,
    /// Server: `Incoming` was told, the owner's turn.
    Deciding,
    /// Server.
    AwaitReady,
    /// Both.
    Established,
    /// Both.
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Client,
    Server,
}

/// One side of one bootstrap connection.
pub(crate) struct Bootstrap {
    role: Role,
    state: State,
    identity: Identity,
    nonce: [u8; NONCE_BYTES],
    inbound: Vec<u8>,
    outbound: Vec<u8>,
    events: VecDeque<BootstrapEvent>,
    /// When this step's exchange began.
    opened_at: Timestamp,
    /// When the owner's decision was asked for, on either side.
    offered_at: Timestamp,
    heard_at: Timestamp,
    said_at: Timestamp,
}

impl Bootstrap {
    /// The side that connected. `nonce` must be fresh and unpredictable.
    pub(crate) fn client(now: Timestamp, identity: Identity, nonce: [u8; NONCE_BYTES]) -> Self {
        let mut bootstrap = Self::new(Role::Client, now, identity, nonce);
        bootstrap.say_preface();
        bootstrap
    }

    /// The side that was connected to. `nonce` must be fresh and unpredictable.
    pub(crate) fn server(now: Timestamp, identity: Identity, nonce: [u8; NONCE_BYTES]) -> Self {
        Self::new(Role::Server, now, identity, nonce)
    }

    fn new(role: Role, now: Timestamp, identity: Identity, nonce: [u8; NONCE_BYTES]) -> Self {
        Self {
            role,
            state: State::AwaitPreface,
            identity,
            nonce,
            inbound: Vec::new(),
            outbound: Vec::new(),
            events: VecDeque::new(),
            opened_at: now,
            offered_at: now,
            heard_at: now,
            said_at: now,
        }
    }

    /// Bytes from the peer, in any pieces.
    pub(crate) fn handle_bytes(&mut self, now: Timestamp, bytes: &[u8]) {
        self.heard_at = now;
        let mut rest = bytes;
        while self.state != State::Closed && !rest.is_empty() {
            // A stranger has no more of our memory than its next message may need.
            let most = if self.is_proved() { MESSAGE_BYTES_MAX } else { UNPROVED_BYTES_MAX };
            let (piece, later) = rest.split_at(rest.len().min(most));
            rest = later;
            self.inbound.extend_from_slice(piece);
            while self.state != State::Closed && self.on_inbound(now) {}
        }
    }

    /// Whether the peer has proved itself and speaks as we do, and the connection has not ended.
    pub(crate) fn is_proved(&self) -> bool {
        !matches!(
            self.state,
            State::AwaitPreface | State::AwaitProof { .. } | State::AwaitRelease { .. } | State::Closed
        )
    }

    /// When the peer was last heard, heartbeats or whatever.
    pub(crate) fn heard_at(&self) -> Timestamp {
        self.heard_at
    }

    /// Another owner with another clock has it from now on.
    pub(crate) fn handle_handover(&mut self, now: Timestamp) {
        (self.opened_at, self.offered_at, self.heard_at, self.said_at) = (now, now, now, now);
    }

    /// The peer's end of the connection is gone; `cause` is a clause such as "it closed the connection".
    pub(crate) fn handle_end(&mut self, cause: &str) {
        self.on_failure(match self.state {
            State::Established => format!("the peer is gone: {cause}"),
            _ => format!("the connection ended before it was up: {cause}"),
        });
    }

    /// Runs deadlines and heartbeats.
    pub(crate) fn handle_timeout(&mut self, now: Timestamp) {
        if self.state == State::Closed {
            return;
        }
        if now >= self.deadline() {
            let (wait, reason) = match self.state {
                State::Deciding | State::AwaitAnswer => {
                    (Wait::Decision, format!("no answer to the offer within {DECISION_MAX}"))
                }
                State::Established => {
                    let text = "not even a heartbeat for";
                    (Wait::Heartbeat, format!("the peer has stalled: {text} {SILENCE_MAX}; is its thread blocked?"))
                }
                _ => {
                    let text = "is that a downbeat process, and not stalled?";
                    (Wait::Handshake, format!("no complete handshake within {HANDSHAKE_MAX}; {text}"))
                }
            };
            wait.note_reached();
            self.close(&reason);
        } else if self.beats() && now >= self.said_at + HEARTBEAT {
            self.said_at = now;
            // A peer that reads nothing does not let our queue grow.
            if self.outbound.is_empty() {
                self.say(&Message::Heartbeat);
            }
        }
    }

    /// When [`Self::handle_timeout`] has something to do.
    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        match self.state {
            State::Closed => None,
            _ if self.beats() => Some(self.deadline().min(self.said_at + HEARTBEAT)),
            _ => Some(self.deadline()),
        }
    }

    /// Bytes for the peer; tell [`Self::handle_transmitted`] how many went out.
    pub(crate) fn poll_transmit(&self) -> &[u8] {
        &self.outbound
    }

    /// The first `bytes` of [`Self::poll_transmit`] are on their way.
    pub(crate) fn handle_transmitted(&mut self, bytes: usize) {
        self.outbound.drain(..bytes);
    }

    /// Bytes that wait for the rest of their message.
    #[cfg(fuzzing)]
    pub(crate) fn inbound_bytes(&self) -> usize {
        self.inbound.len()
    }

    /// What happened.
    pub(crate) fn poll_event(&mut self) -> Option<BootstrapEvent> {
        self.events.pop_front()
    }

    /// A client's offer, once `Proved`. Nothing is said if the connection ended meanwhile.
    pub(crate) fn offer(&mut self, now: Timestamp, parameters: Parameters, hello: Vec<u8>) {
        if self.state != State::Offering {
            return;
        }
        (self.state, self.offered_at) = (State::AwaitAnswer, now);
        self.say(&Message::Offer(parameters, hello));
    }

    /// A server's yes, once `Incoming`. The queue pair must be able to receive. False if the connection ended
    /// meanwhile.
    pub(crate) fn accept(&mut self, now: Timestamp, parameters: Parameters, welcome: Vec<u8>) -> bool {
        if self.state != State::Deciding {
            return false;
        }
        (self.state, self.opened_at) = (State::AwaitReady, now);
        self.say(&Message::Answer(parameters, welcome));
        true
    }

    /// A client's queue pair receives, once `Answered`. Nothing is said if the connection ended meanwhile.
    pub(crate) fn ready(&mut self) {
        if self.state != State::Connecting {
            return;
        }
        self.state = State::Established;
        self.say(&Message::Ready);
    }

    /// Ends the connection and tells the peer why.
    pub(crate) fn close(&mut self, reason: &str) {
        if self.state == State::Closed {
            return;
        }
        if self.role == Role::Server && self.state == State::AwaitPreface {
            // So that a peer of another version can read why.
            self.say_preface();
        }
        self.say(&Message::Close(one_line(reason, REASON_BYTES_MAX)));
        self.on_failure(reason.to_owned());
    }

    /// Takes one message off `inbound`. False if there is none yet.
    fn on_inbound(&mut self, now: Timestamp) -> bool {
        if self.state == State::AwaitPreface {
            return self.on_preface(now);
        }
        let Some((length, rest)) = self.inbound.split_first_chunk::<LENGTH_BYTES>() else { return false };
        let length = u32::from_be_bytes(*length) as usize;
        let limit = if self.is_proved() { MESSAGE_BYTES_MAX } else { UNPROVED_BYTES_MAX };
        if length > limit {
            self.close(&format!("a bootstrap message of {length} bytes, where at most {limit} are allowed"));
            return false;
        }
        let Some(encoded) = rest.get(..length) else { return false };
        let message = wincode::deserialize_exact::<Message>(encoded);
        self.inbound.drain(..LENGTH_BYTES + length);
        match message {
            Ok(message) => self.on_message(now, message),
            Err(error) => self.close(&format!("a bootstrap message does not decode: {error}")),
        }
        true
    }

    fn on_preface(&mut self, now: Timestamp) -> bool {
        let given = self.inbound.len().min(MAGIC.len());
        if self.inbound[..given] != MAGIC[..given] {
            self.on_failure(match self.inbound[..given] {
                // RFC 8446, section 5.1: a record of type alert or handshake, and the major version that all have.
                [0x15 | 0x16] | [0x15 | 0x16, 3, ..] => {
                    "the peer speaks TLS and this member has no [tls]: configure it at both ends, or at neither".into()
                }
                _ => format!(
                    "the peer does not speak downbeat's bootstrap: it starts with \"{}\"; is the address right?",
                    self.inbound[..given].escape_ascii()
                ),
            });
            return false;
        }
        // Prefaces of other versions may be shorter.
        let Some(start) = self.inbound.first_chunk::<VERSION_END>() else { return false };
        let version = u16::from_be_bytes([start[MAGIC.len()], start[MAGIC.len() + 1]]);
        if version != VERSION {
            let ours = &self.identity.release;
            self.close(&format!("the peer speaks bootstrap version {version}, this is {ours} with {VERSION}: {MIXED}"));
            return false;
        }
        let Some(preface) = self.inbound.first_chunk::<PREFACE_BYTES>() else { return false };
        let (wire, nonce) = preface[VERSION_END..].split_at(size_of::<u64>());
        let wire = WireVersion(u64::from_be_bytes(wire.try_into().expect("split there")));
        let theirs = Preface { wire, nonce: nonce.try_into().expect("the preface ends with the nonce") };
        self.inbound.drain(..PREFACE_BYTES);
        self.state = State::AwaitProof { theirs };
        self.said_at = now;
        if self.role == Role::Server {
            self.say_preface();
            self.say_proof(&theirs);
        }
        true
    }

    fn on_message(&mut self, now: Timestamp, message: Message) {
        match (self.role, self.state, message) {
            (_, _, Message::Close(reason)) => {
                self.on_failure(format!("the peer says: {}", one_line(&reason, REASON_BYTES_MAX)));
            }
            (_, State::AwaitProof { theirs }, Message::Proof(proof)) => self.on_proof(&theirs, &proof),
            (_, State::AwaitRelease { wire }, Message::Release(name)) => {
                let theirs = Release { name: one_line(&name, RELEASE_BYTES_MAX), wire };
                self.on_failure(format!("the peer is {theirs}, this is {}: {MIXED}", self.identity.release));
            }
            (_, State::AwaitProof { .. }, _) => self.close("a message before the proof of the shared secret"),
            (_, _, Message::Heartbeat) => {}
            (Role::Server, State::AwaitOffer, Message::Offer(parameters, hello)) => {
                if self.valid(&parameters, &hello) {
                    (self.state, self.offered_at) = (State::Deciding, now);
                    self.events.push_back(BootstrapEvent::Incoming { parameters, hello });
                }
            }
            (Role::Client, State::AwaitAnswer, Message::Answer(parameters, welcome)) => {
                if self.valid(&parameters, &welcome) {
                    (self.state, self.opened_at) = (State::Connecting, now);
                    self.events.push_back(BootstrapEvent::Answered { parameters, welcome });
                }
            }
            (Role::Server, State::AwaitReady, Message::Ready) => {
                self.state = State::Established;
                self.events.push_back(BootstrapEvent::Ready);
            }
            _ => self.close("a bootstrap message out of order"),
        }
    }

    fn on_proof(&mut self, theirs: &Preface, proof: &[u8; 32]) {
        let peer = match self.role {
            Role::Client => Role::Server,
            Role::Server => Role::Client,
        };
        // Each is compared in constant time.
        let is_right = |secret: &[u8]| self.proof(peer, theirs, secret).verify_slice(proof).is_ok();
        if !self.identity.secrets.iter().any(|secret| is_right(secret)) {
            self.close("the shared secrets differ: give both sides the same `secret`");
            return;
        }
        if self.role == Role::Client {
            self.say_proof(theirs);
        }
        if theirs.wire != self.identity.release.wire {
            self.state = State::AwaitRelease { wire: theirs.wire };
            self.say(&Message::Release(one_line(&self.identity.release.name, RELEASE_BYTES_MAX)));
            return;
        }
        match self.role {
            Role::Client => {
                self.state = State::Offering;
                self.events.push_back(BootstrapEvent::Proved);
            }
            Role::Server => self.state = State::AwaitOffer,
        }
    }

    /// The proof that `prover` gives in this connection that it knows this secret.
    fn proof(&self, prover: Role, theirs: &Preface, secret: &[u8]) -> Hmac<Sha256> {
        let ours = Preface { wire: self.identity.release.wire, nonce: self.nonce };
        let (client, server) = match self.role {
            Role::Client => (&ours, theirs),
            Role::Server => (theirs, &ours),
        };
        let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes keys of any length");
        let role = match prover {
            Role::Client => "client",
            Role::Server => "server",
        };
        mac.update(format!("downbeat bootstrap {VERSION}, {role}").as_bytes());
        for preface in [client, server] {
            mac.update(&preface.nonce);
            mac.update(&preface.wire.0.to_be_bytes());
        }
        mac
    }

    /// Whether a proved peer's parameters can be used; closes if not.
    fn valid(&mut self, parameters: &Parameters, hello: &[u8]) -> bool {
        let address = parameters.address;
        let fault = if hello.len() > HELLO_BYTES_MAX {
            Some(format!("a hello of {} bytes, where at most {HELLO_BYTES_MAX} are allowed", hello.len()))
        } else if !(2..1 << 24).contains(&parameters.queue_pair) || parameters.psn >= 1 << 24 {
            Some(format!("queue pair {:#x} with PSN {:#x}; both have 24 bits", parameters.queue_pair, parameters.psn))
        } else if PathMtu::of_bytes(parameters.path_mtu_bytes.into()).is_none() {
            Some(format!("a path MTU of {} bytes; there are 256 to 4096, 16384 and 57344", parameters.path_mtu_bytes))
        } else if !address.is_valid() {
            Some(format!("{address}; it must be one that packets can be sent to"))
        } else if parameters.max_dest_rd_atomic == 0 || parameters.receive_depth == 0 || parameters.window_bytes == 0 {
            Some("a queue pair that can receive nothing".to_owned())
        } else {
            None
        };
        if let Some(fault) = &fault {
            self.close(&format!("the peer offers {fault}"));
        }
        fault.is_none()
    }

    /// Heartbeats run from the proof on: before, the handshake's deadline is enough.
    fn beats(&self) -> bool {
        self.is_proved()
    }

    fn deadline(&self) -> Timestamp {
        match self.state {
            State::Deciding | State::AwaitAnswer => (self.offered_at + DECISION_MAX).min(self.heard_at + SILENCE_MAX),
            State::Established => self.heard_at + SILENCE_MAX,
            _ => self.opened_at + HANDSHAKE_MAX,
        }
    }

    fn on_failure(&mut self, reason: String) {
        if self.state != State::Closed {
            self.state = State::Closed;
            self.inbound = Vec::new();
            self.events.push_back(BootstrapEvent::Closed(reason));
        }
    }

    fn say_preface(&mut self) {
        self.outbound.extend_from_slice(MAGIC);
        self.outbound.extend_from_slice(&VERSION.to_be_bytes());
        self.outbound.extend_from_slice(&self.identity.release.wire.0.to_be_bytes());
        self.outbound.extend_from_slice(&self.nonce);
    }

    fn say_proof(&mut self, theirs: &Preface) {
        let secret = self.identity.secrets.first().expect("there are one or two");
        let ours = self.proof(self.role, theirs, secret).finalize().into_bytes().into();
        self.say(&Message::Proof(ours));
    }

    fn say(&mut self, message: &Message) {
        let encoded = wincode::serialize(message).expect("encoding into memory cannot fail");
        self.outbound.extend_from_slice(&(encoded.len() as u32).to_be_bytes());
        self.outbound.extend_from_slice(&encoded);
    }
}

/// A text from or for a peer: one line of so many bytes at most.
fn one_line(text: &str, most: usize) -> String {
    let mut line = String::new();
    for character in text.chars().map(|c| if c.is_control() { ' ' } else { c }) {
        if line.len() + character.len_utf8() > most {
            break;
        }
        line.push(character);
    }
    line
}

#[cfg(test)]
mod tests;
