//! Several drivers share an IP address and UDP port, in processes of one user or in threads of one. No IO.
//!
//! Each owns one top byte of queue pair numbers, its *prefix*. The kernel hands a packet to the socket whose
//! index a small program ([`program`]) names, by a table from prefixes to indexes. A socket's index is its place in the
//! order of binding; when any socket of the group closes, however its process dies, the kernel moves the last one into
//! the hole. So exactly one survivor can no longer be reached, and nobody tells it.
//!
//! Therefore every member checks itself. Life of a member: it *searches* its index, with one probe to each possible
//! index ([`Probe::Search`], which the program delivers by index); the first that comes back names it. It *publishes*
//! the index: the table on disk is corrected under a lock and a new program attached to the group. From then on it
//! *checks* from time to time: the group must still be larger than its index, for what the program sends beyond the
//! group's end goes to any member, perhaps to this one; and a probe to its own prefix ([`Probe::Check`]) must come
//! back. Otherwise the search begins again. Meanwhile its packets are lost, which its peers repair as any other loss.
//!
//! What members write about others may be out of date; each is put right by its own next check. Nothing depends on the
//! order in which processes died, on their clocks, or on a process that does not run.

pub(super) mod registry;

use std::{collections::BTreeMap, time::Duration};

use super::options::Instruction;
use crate::Timestamp;

/// Drivers that share one address.
pub(super) const MEMBERS_MAX: usize = 64;
/// How long a member may be unreachable before it looks: short against the time in which peers give up (seconds).
const CHECK_EVERY: Duration = Duration::from_millis(20);
/// The loopback delivers within the call that sends; what takes longer than this, and is not in the socket, has gone
/// elsewhere.
const PATIENCE: Duration = Duration::from_millis(5);
/// Another member holds the lock; it does so for a few system calls.
const LOCK_RETRY: Duration = Duration::from_millis(1);

/// From prefixes to indexes in the group.
pub(super) type Table = BTreeMap<u8, u8>;

/// What a member sends to itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Probe {
    /// To the socket with this index.
    Search { index: u8, token: u64 },
    /// To the socket that the table names for this prefix, as any packet.
    Check { prefix: u8, token: u64 },
}

/// First bytes that no packet of RoCEv2 has: their upper three bits are a reserved transport.
const SEARCH: u8 = 0xff;
const CHECK: u8 = 0xfe;
/// Where every packet has the top byte of its queue pair number (BTH, DestQP).
const TARGET_AT: usize = 5;
const TOKEN_AT: usize = 8;
pub(super) const PROBE_BYTES: usize = TOKEN_AT + size_of::<u64>();

impl Probe {
    pub(super) fn to_bytes(self) -> [u8; PROBE_BYTES] {
        let (first, target, token) = match self {
            Self::Search { index, token } => (SEARCH, index, token),
            Self::Check { prefix, token } => (CHECK, prefix, token),
        };
        let mut bytes = [0; PROBE_BYTES];
        bytes[0] = first;
        bytes[TARGET_AT] = target;
        bytes[TOKEN_AT..].copy_from_slice(&token.to_be_bytes());
        bytes
    }

    /// `None` for everything else.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; PROBE_BYTES] = bytes.try_into().ok()?;
        let token = u64::from_be_bytes(*bytes.last_chunk().expect("a probe ends with its token"));
        match bytes[0] {
            SEARCH => Some(Self::Search { index: bytes[TARGET_AT], token }),
            CHECK => Some(Self::Check { prefix: bytes[TARGET_AT], token }),
            _ => None,
        }
    }
}

/// The program for a table. Probes by index go to that index, everything else by the table. An index that the group
/// does not have makes the kernel choose any socket.
pub(super) fn program(table: &Table) -> Vec<Instruction> {
    const LOAD_BYTE: u16 = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
    const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    const RETURN_LOADED: u16 = (libc::BPF_RET | libc::BPF_A) as u16;
    let plain = |code, operand| Instruction { code, jump_true: 0, jump_false: 0, operand };
    let unless_equal = |operand: u8, skip| Instruction { jump_false: skip, ..plain(JUMP_EQUAL, operand.into()) };
    let mut program = vec![
        plain(LOAD_BYTE, 0),
        unless_equal(SEARCH, 2),
        plain(LOAD_BYTE, TARGET_AT as u32),
        plain(RETURN_LOADED, 0),
        plain(LOAD_BYTE, TARGET_AT as u32),
    ];
    for (&prefix, &index) in table {
        program.extend([unless_equal(prefix, 1), plain(RETURN, index.into())]);
    }
    program.push(plain(RETURN, u32::MAX));
    program
}

/// What the driver shall do for a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Send this to the shared address.
    Send(Probe),
    /// Correct the table, attach its program, and tell [`Member::handle_published`].
    Publish { index: u8 },
    /// Count the members that live, and tell [`Member::handle_count`].
    Count,
}

/// How the publication went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Published {
    Done,
    /// Another member is at it.
    Locked,
    /// The group has no such index, or the system refused: search again.
    Refused,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The probe to index `next` is to be sent; all are once it is `MEMBERS_MAX`.
    Searching {
        next: u8,
        until: Timestamp,
    },
    Publishing {
        index: u8,
        at: Timestamp,
    },
    Counting {
        index: u8,
    },
    /// The probe is `sent`, or about to be.
    Checking {
        index: u8,
        sent: bool,
        until: Timestamp,
    },
    Reachable {
        index: u8,
        check_at: Timestamp,
    },
}

/// One driver of a group.
#[derive(Debug)]
pub(super) struct Member {
    prefix: u8,
    state: State,
    /// Tells our probes from those of others and from those of before; starts at random.
    token: u64,
}

impl Member {
    /// A member whose socket has just joined the group.
    pub(super) const fn new(now: Timestamp, prefix: u8, token: u64) -> Self {
        Self { prefix, state: State::Searching { next: 0, until: now }, token }
    }

    pub(super) const fn prefix(&self) -> u8 {
        self.prefix
    }

    /// Whether packets for its prefix were last seen to reach it.
    pub(super) const fn is_reachable(&self) -> bool {
        matches!(self.state, State::Reachable { .. })
    }

    /// A probe has come.
    pub(super) fn handle_probe(&mut self, now: Timestamp, probe: Probe) {
        match (self.state, probe) {
            (State::Searching { .. }, Probe::Search { index, token }) if token == self.token => {
                self.state = State::Publishing { index, at: now };
            }
            (State::Checking { index, sent: true, .. }, Probe::Check { prefix, token })
                if token == self.token && prefix == self.prefix =>
            {
                self.state = State::Reachable { index, check_at: now + CHECK_EVERY };
            }
            _ => {}
        }
    }

    pub(super) fn handle_published(&mut self, now: Timestamp, outcome: Published) {
        if let State::Publishing { index, .. } = self.state {
            self.state = match outcome {
                Published::Done => State::Counting { index },
                Published::Locked => State::Publishing { index, at: now + LOCK_RETRY },
                Published::Refused => self.search(now + PATIENCE),
            };
        }
    }

    /// So many members live, this one included.
    pub(super) fn handle_count(&mut self, now: Timestamp, members: usize) {
        if let State::Counting { index } = self.state {
            self.token = self.token.wrapping_add(1);
            self.state = if usize::from(index) < members {
                State::Checking { index, sent: false, until: now + PATIENCE }
            } else {
                self.search(now)
            };
        }
    }

    /// `is_drained`: the socket held nothing more when it was read last. Until then a probe that is missing may lie in
    /// it, behind packets or behind earlier probes. Who sent others instead of reading on, each time that it came back
    /// after more than [`PATIENCE`], would never see an answer to the last ones, and never be reached.
    pub(super) fn handle_timeout(&mut self, now: Timestamp, is_drained: bool) {
        match self.state {
            State::Reachable { index, check_at } if check_at <= now => self.state = State::Counting { index },
            _ if !is_drained => {}
            State::Checking { sent: true, until, .. } if until <= now => self.state = self.search(now),
            State::Searching { next, until } if usize::from(next) == MEMBERS_MAX && until <= now => {
                self.state = self.search(now);
            }
            _ => {}
        }
    }

    /// What is to be done now.
    pub(super) fn poll_action(&mut self, now: Timestamp) -> Option<Action> {
        let (prefix, token) = (self.prefix, self.token);
        match &mut self.state {
            State::Searching { next, until } if usize::from(*next) < MEMBERS_MAX && *until <= now => {
                let index = *next;
                *next += 1;
                if usize::from(*next) == MEMBERS_MAX {
                    *until = now + PATIENCE;
                }
                Some(Action::Send(Probe::Search { index, token }))
            }
            State::Publishing { index, at } if *at <= now => Some(Action::Publish { index: *index }),
            State::Counting { .. } => Some(Action::Count),
            State::Checking { sent: sent @ false, .. } => {
                *sent = true;
                Some(Action::Send(Probe::Check { prefix, token }))
            }
            _ => None,
        }
    }

    /// When to come back even if no probe does; in the past if there is something to do.
    pub(super) const fn poll_timeout(&self) -> Timestamp {
        match self.state {
            State::Counting { .. } | State::Checking { sent: false, .. } => Timestamp(0),
            State::Searching { until: at, .. }
            | State::Publishing { at, .. }
            | State::Checking { until: at, .. }
            | State::Reachable { check_at: at, .. } => at,
        }
    }

    fn search(&mut self, at: Timestamp) -> State {
        self.token = self.token.wrapping_add(1);
        State::Searching { next: 0, until: at }
    }
}

#[cfg(test)]
mod tests;
