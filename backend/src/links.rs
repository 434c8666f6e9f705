//! The backend's connections to frontends: opened when the primary says that a frontend joined, opened again when
//! they break, for as long as the primary does not say that it left. They outlive a primary.
//!
//! The first link is opened once the primary has told its clock, as no batch's window means anything before. A link
//! that broke is opened again after a backoff, under another id: what failed on the old one is fenced off by its own
//! id, and what was under way there is cut off ([`crate::worker`]), so that none of it uses the new one.
//!
//! Instants are on this process's clock.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
};

use proto::{
    FrontendId, LinkId, LinkPass, SlotDescriptor, Span, Timestamp, backend_to_frontend::LinkWelcome, backoff::Backoff,
    slot::GUARD_BYTES,
};
use thiserror::Error;
use transport::ConnectionId;

/// The first wait before a broken link is opened again; each failure doubles it.
const BACKOFF_MIN: Span = Span::from_millis(20);
/// The longest wait.
const BACKOFF_MAX: Span = Span::from_millis(2_000);
/// The first wait before a link is opened again whose frontend took nothing in, so that answers waited for it; each
/// such end doubles it.
const STARVED_MIN: Span = Span::from_millis(10_000);
/// The longest such wait.
const STARVED_MAX: Span = Span::from_millis(600_000);
/// Frontends that a scheduler may name at once.
pub const FRONTENDS_MAX: usize = 4_096;

/// How a frontend is reached, as a scheduler tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Its bootstrap listener.
    pub address: SocketAddr,
    /// What it is to be shown.
    pub pass: LinkPass,
}

/// The scheduler names more frontends than it can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the scheduler names more than {FRONTENDS_MAX} frontends")]
pub struct TooManyFrontends;

/// What the driver must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkAction {
    /// Open a connection; then call [`Links::handle_opened`].
    Open {
        /// To this frontend.
        frontend: FrontendId,
        /// How.
        target: Target,
        /// The link that the connection is to be.
        link: LinkId,
    },
    /// Close a connection whose frontend left. Its end need not be reported.
    Close {
        /// The connection.
        connection: ConnectionId,
    },
}

/// Why the driver is told that a link's state changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// A link that was up is down.
    Link(FrontendId),
    /// It never came up; it is tried again.
    Attempt(FrontendId),
}

/// All frontends that the scheduler has named.
#[derive(Debug, Default)]
pub struct Links {
    frontends: BTreeMap<FrontendId, Link>,
    connections: BTreeMap<ConnectionId, FrontendId>,
    actions: VecDeque<LinkAction>,
    /// The last link that was to be opened.
    last: u32,
    clock_is_known: bool,
}

#[derive(Debug)]
struct Link {
    id: LinkId,
    target: Target,
    state: State,
    backoff: Backoff,
    /// After it has taken nothing in; it begins anew with another frontend only.
    starved: Backoff,
}

#[derive(Debug)]
enum State {
    /// Until the scheduler has told its clock.
    AwaitingClock,
    /// Until the backoff is over.
    AwaitingRetry { at: Timestamp },
    /// The driver has been asked for a connection, and may have opened it.
    Opening { connection: Option<ConnectionId> },
    /// Up.
    Up { connection: ConnectionId, welcome: LinkWelcome },
}

impl Links {
    /// The scheduler says that a frontend joined.
    ///
    /// # Errors
    /// If there are too many.
    pub fn handle_joined(
        &mut self,
        now: Timestamp,
        frontend: FrontendId,
        target: Target,
    ) -> Result<(), TooManyFrontends> {
        self.handle_left(frontend);
        if self.frontends.len() >= FRONTENDS_MAX {
            return Err(TooManyFrontends);
        }
        let state = if self.clock_is_known { State::AwaitingRetry { at: now } } else { State::AwaitingClock };
        let (backoff, starved) = (Backoff::new(BACKOFF_MIN, BACKOFF_MAX), Backoff::new(STARVED_MIN, STARVED_MAX));
        self.frontends.insert(frontend, Link { id: LinkId::NONE, target, state, backoff, starved });
        self.handle_timeout(now);
        Ok(())
    }

    /// The scheduler says that a frontend left.
    pub fn handle_left(&mut self, frontend: FrontendId) {
        let Some(link) = self.frontends.remove(&frontend) else { return };
        if let State::Up { connection, .. } | State::Opening { connection: Some(connection) } = link.state {
            self.connections.remove(&connection);
            self.actions.push_back(LinkAction::Close { connection });
        }
    }

    /// The scheduler has told its clock.
    pub fn handle_clock(&mut self, now: Timestamp) {
        if std::mem::replace(&mut self.clock_is_known, true) {
            return;
        }
        for link in self.frontends.values_mut() {
            if matches!(link.state, State::AwaitingClock) {
                link.state = State::AwaitingRetry { at: now };
            }
        }
        self.handle_timeout(now);
    }

    /// The driver is opening `connection` to `frontend`.
    pub fn handle_opened(&mut self, frontend: FrontendId, connection: ConnectionId) {
        match self.frontends.get_mut(&frontend) {
            Some(link) if matches!(link.state, State::Opening { connection: None }) => {
                link.state = State::Opening { connection: Some(connection) };
                self.connections.insert(connection, frontend);
            }
            // It left meanwhile.
            _ => self.actions.push_back(LinkAction::Close { connection }),
        }
    }

    /// A connection came up. The frontend that can be served now, and by which link; `None` if the connection is not
    /// wanted any more.
    pub fn handle_up(&mut self, connection: ConnectionId, welcome: LinkWelcome) -> Option<(FrontendId, LinkId)> {
        let frontend = *self.connections.get(&connection)?;
        let link = self.frontends.get_mut(&frontend)?;
        link.state = State::Up { connection, welcome };
        link.backoff.handle_success();
        Some((frontend, link.id))
    }

    /// A connection ended, or did not come up; perhaps because the frontend took nothing in. `None` if that was
    /// expected.
    pub fn handle_broken(&mut self, now: Timestamp, connection: ConnectionId, is_starved: bool) -> Option<Broken> {
        let frontend = self.connections.remove(&connection)?;
        let link = self.frontends.get_mut(&frontend)?;
        let was_up = matches!(link.state, State::Up { .. });
        let backoff = if is_starved { &mut link.starved } else { &mut link.backoff };
        link.state = State::AwaitingRetry { at: backoff.handle_failure(now) };
        Some(if was_up { Broken::Link(frontend) } else { Broken::Attempt(frontend) })
    }

    /// Time passed.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        for (&frontend, link) in &mut self.frontends {
            if let State::AwaitingRetry { at } = link.state
                && at <= now
            {
                // Below `LinkId::ALL`, whatever a scheduler makes us open.
                self.last = (self.last + 1).min(LinkId::ALL.0 - 1);
                link.id = LinkId(self.last);
                link.state = State::Opening { connection: None };
                self.actions.push_back(LinkAction::Open { frontend, target: link.target, link: link.id });
            }
        }
    }

    /// When [`Self::handle_timeout`] must be called even if nothing else happens; [`Timestamp::NEVER`] if not at all.
    #[must_use]
    pub fn poll_timeout(&self) -> Timestamp {
        let retries = self.frontends.values().filter_map(|link| match link.state {
            State::AwaitingRetry { at } => Some(at),
            _ => None,
        });
        retries.min().unwrap_or(Timestamp::NEVER)
    }

    /// What to do next.
    pub fn poll_action(&mut self) -> Option<LinkAction> {
        self.actions.pop_front()
    }

    /// The frontends that we are to be linked to.
    pub fn frontends(&self) -> impl Iterator<Item = FrontendId> {
        self.frontends.keys().copied()
    }

    /// How a frontend is reached, if we are to be linked to it.
    #[must_use]
    pub fn target(&self, frontend: FrontendId) -> Option<Target> {
        Some(self.frontends.get(&frontend)?.target)
    }

    /// The links that are up, and whose they are.
    pub fn up(&self) -> impl Iterator<Item = (FrontendId, LinkId)> {
        let up = self.frontends.iter().filter(|(_, link)| matches!(link.state, State::Up { .. }));
        up.map(|(&frontend, link)| (frontend, link.id))
    }

    /// Whether this is the connection of a link.
    #[must_use]
    pub fn has(&self, connection: ConnectionId) -> bool {
        self.connections.contains_key(&connection)
    }

    /// Where `bytes` bytes at `offset` of a frontend's arena are reached by a slot's key: the connection, the remote
    /// address and its key. `None` if there is no link, or they do not lie in the arena.
    #[must_use]
    pub fn remote(
        &self,
        frontend: FrontendId,
        key: u32,
        (offset, bytes): (u64, usize),
    ) -> Option<(ConnectionId, u64, u32)> {
        let State::Up { connection, welcome } = &self.frontends.get(&frontend)?.state else { return None };
        let end = offset.checked_add(bytes as u64)?;
        let address = welcome.arena_address.checked_add(offset)?;
        let rkey = if key == SlotDescriptor::NO_KEY { welcome.arena_rkey } else { key };
        (end <= welcome.arena_bytes).then_some((*connection, address, rkey))
    }

    /// The same for the guards of `slots` slots from this one on.
    #[must_use]
    pub fn remote_guards(&self, frontend: FrontendId, slot: u32, slots: usize) -> Option<(ConnectionId, u64, u32)> {
        let State::Up { welcome, .. } = &self.frontends.get(&frontend)?.state else { return None };
        let offset = welcome.guards_offset.checked_add(u64::from(slot) * GUARD_BYTES as u64)?;
        self.remote(frontend, welcome.guards_rkey, (offset, slots * GUARD_BYTES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRONTEND: FrontendId = FrontendId(4);

    fn target() -> Target {
        Target { address: "127.0.0.1:7000".parse().unwrap(), pass: LinkPass(9) }
    }

    fn welcome() -> LinkWelcome {
        LinkWelcome { arena_address: 1000, arena_bytes: 100, arena_rkey: 5, guards_offset: 90, guards_rkey: 6 }
    }

    fn actions(links: &mut Links) -> Vec<LinkAction> {
        std::iter::from_fn(|| links.poll_action()).collect()
    }

    /// Links with one frontend, that joined at 10 and is being opened as connection 0.
    fn opening() -> Links {
        let mut links = Links::default();
        links.handle_joined(Timestamp(10), FRONTEND, target()).unwrap();
        assert_eq!(actions(&mut links), []);
        links.handle_clock(Timestamp(12));
        assert_eq!(actions(&mut links), [LinkAction::Open { frontend: FRONTEND, target: target(), link: LinkId(1) }]);
        links.handle_opened(FRONTEND, ConnectionId(0));
        links
    }

    #[test]
    fn a_link_that_broke_is_opened_again_under_another_id() {
        let mut links = opening();
        assert_eq!(links.handle_up(ConnectionId(0), welcome()), Some((FRONTEND, LinkId(1))));
        assert_eq!(links.handle_broken(Timestamp(50), ConnectionId(0), false), Some(Broken::Link(FRONTEND)));
        assert_eq!(links.remote(FRONTEND, 7, (0, 1)), None);
        assert_eq!((actions(&mut links), links.poll_timeout()), (vec![], Timestamp(50) + BACKOFF_MIN));
        links.handle_timeout(links.poll_timeout());
        assert_eq!(actions(&mut links), [LinkAction::Open { frontend: FRONTEND, target: target(), link: LinkId(2) }]);
    }

    #[test]
    fn a_frontend_that_joins_once_the_clock_is_known_is_linked_at_once() {
        let mut links = opening();
        let other = FrontendId(5);
        links.handle_joined(Timestamp(20), other, target()).unwrap();
        assert_eq!(actions(&mut links), [LinkAction::Open { frontend: other, target: target(), link: LinkId(2) }]);
    }

    #[test]
    fn a_scheduler_cannot_name_frontends_without_end() {
        let mut links = Links::default();
        for id in 0..FRONTENDS_MAX as u32 {
            links.handle_joined(Timestamp(0), FrontendId(id), target()).unwrap();
        }
        assert!(links.handle_joined(Timestamp(0), FrontendId(7), target()).is_ok(), "it was one of them");
        assert_eq!(links.handle_joined(Timestamp(0), FrontendId(u32::MAX), target()), Err(TooManyFrontends));
    }

    #[test]
    fn attempts_back_off_up_to_the_bound_and_a_success_starts_over() {
        let mut links = opening();
        let mut now = Timestamp(100);
        let mut waits = Vec::new();
        for attempt in 0..10 {
            assert_eq!(links.handle_broken(now, ConnectionId(attempt), false), Some(Broken::Attempt(FRONTEND)));
            waits.push((links.poll_timeout() - now).as_millis_f64());
            links.handle_timeout(links.poll_timeout() - Span(1));
            assert_eq!(actions(&mut links), []);
            now = links.poll_timeout();
            links.handle_timeout(now);
            assert_eq!((actions(&mut links).len(), links.poll_timeout()), (1, Timestamp::NEVER));
            links.handle_opened(FRONTEND, ConnectionId(attempt + 1));
        }
        assert_eq!(waits, [20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2000.0, 2000.0, 2000.0]);
        links.handle_up(ConnectionId(10), welcome());
        links.handle_broken(now, ConnectionId(10), false);
        assert_eq!(links.poll_timeout() - now, BACKOFF_MIN);
    }

    /// All answers of a GPU wait behind those that a frontend does not take in.
    #[test]
    fn a_frontend_that_takes_nothing_in_is_linked_to_ever_more_rarely() {
        let (mut links, mut now) = (opening(), Timestamp(100));
        for (connection, seconds) in [(0, 10), (1, 20), (2, 40), (3, 80), (4, 160), (5, 320), (6, 600), (7, 600)] {
            links.handle_up(ConnectionId(connection), welcome());
            assert_eq!(links.handle_broken(now, ConnectionId(connection), true), Some(Broken::Link(FRONTEND)));
            assert_eq!(links.poll_timeout() - now, Span::from_millis(seconds * 1_000));
            now = links.poll_timeout();
            links.handle_timeout(now);
            links.handle_opened(FRONTEND, ConnectionId(connection + 1));
        }
        links.handle_broken(now, ConnectionId(8), false);
        assert_eq!(links.poll_timeout() - now, BACKOFF_MIN, "that the network broke is another matter");
    }

    #[test]
    fn a_frontend_that_left_is_closed_and_forgotten() {
        for up in [false, true] {
            let mut links = opening();
            if up {
                links.handle_up(ConnectionId(0), welcome());
            }
            links.handle_left(FRONTEND);
            assert_eq!(actions(&mut links), [LinkAction::Close { connection: ConnectionId(0) }]);
            assert_eq!(links.handle_up(ConnectionId(0), welcome()), None);
            assert_eq!(links.handle_broken(Timestamp(99), ConnectionId(0), false), None);
            assert_eq!((links.poll_timeout(), actions(&mut links)), (Timestamp::NEVER, vec![]));
        }
    }

    #[test]
    fn only_bytes_inside_the_arena_are_reached() {
        let mut links = opening();
        links.handle_up(ConnectionId(0), welcome());
        assert_eq!(links.remote(FRONTEND, 7, (40, 60)), Some((ConnectionId(0), 1040, 7)));
        assert_eq!(links.remote(FRONTEND, SlotDescriptor::NO_KEY, (40, 60)), Some((ConnectionId(0), 1040, 5)));
        assert_eq!(links.remote(FRONTEND, 7, (41, 60)), None);
        assert_eq!(links.remote(FRONTEND, 7, (u64::MAX, 60)), None);
        assert_eq!(links.remote(FrontendId(5), 7, (0, 1)), None);
        assert_eq!(links.remote_guards(FRONTEND, 1, 1), None, "the guards begin at 90 of 100 bytes");
        assert_eq!(links.remote_guards(FRONTEND, 0, 1), Some((ConnectionId(0), 1090, 6)));
        assert_eq!(links.remote_guards(FrontendId(5), 0, 1), None);
    }
}
