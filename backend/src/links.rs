//! The backend's connections to frontends: opened when the scheduler says that a frontend joined, opened again when they
//! break, for as long as the scheduler does not say that it left.
//!
//! A link is opened only after the scheduler has answered a clock request that was made since the frontend joined or the
//! last link to it broke. Messages arrive in order, so every plan that the scheduler made before it knew of the break has
//! been taken in by then, and is cut off ([`crate::worker`]): nothing that was planned for the old link uses the new one.
//!
//! Instants are on this process's clock.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
};

use proto::{FrontendId, LinkId, Span, Timestamp, backend_to_frontend::LinkWelcome};
use transport::ConnectionId;

/// The first wait before a broken link is opened again; each failure doubles it.
const BACKOFF_MIN: Span = Span::from_millis(20);
/// The longest wait.
const BACKOFF_MAX: Span = Span::from_millis(2_000);

/// What the driver must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkAction {
    /// Ask the scheduler for its clock.
    AskClock,
    /// Open a connection; then call [`Links::handle_opened`].
    Open {
        /// To this frontend.
        frontend: FrontendId,
        /// Its bootstrap listener.
        address: SocketAddr,
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
}

#[derive(Debug)]
struct Link {
    id: LinkId,
    address: SocketAddr,
    state: State,
    backoff: Span,
}

#[derive(Debug)]
enum State {
    /// Until the scheduler answers a clock request made at `since` or later.
    AwaitingClock { since: Timestamp },
    /// Until the backoff is over.
    AwaitingRetry { at: Timestamp },
    /// The driver has been asked for a connection, and may have opened it.
    Opening { connection: Option<ConnectionId> },
    /// Up.
    Up { connection: ConnectionId, welcome: LinkWelcome },
}

impl Links {
    /// The scheduler says that a frontend joined.
    pub fn handle_joined(&mut self, now: Timestamp, frontend: FrontendId, address: SocketAddr) {
        self.handle_left(frontend);
        let link = Link { id: LinkId::NONE, address, state: State::AwaitingClock { since: now }, backoff: BACKOFF_MIN };
        self.frontends.insert(frontend, link);
        self.actions.push_back(LinkAction::AskClock);
    }

    /// The scheduler says that a frontend left.
    pub fn handle_left(&mut self, frontend: FrontendId) {
        let Some(link) = self.frontends.remove(&frontend) else { return };
        if let State::Up { connection, .. } | State::Opening { connection: Some(connection) } = link.state {
            self.connections.remove(&connection);
            self.actions.push_back(LinkAction::Close { connection });
        }
    }

    /// The scheduler answered the clock request that was made at `asked_at`.
    pub fn handle_clock(&mut self, now: Timestamp, asked_at: Timestamp) {
        for link in self.frontends.values_mut() {
            if let State::AwaitingClock { since } = link.state
                && since <= asked_at
            {
                link.state = State::AwaitingRetry { at: now };
            }
        }
        self.handle_timeout(now);
    }

    /// The driver is opening `connection` to `frontend`.
    pub fn handle_opened(&mut self, frontend: FrontendId, connection: ConnectionId) {
        if let Some(link) = self.frontends.get_mut(&frontend) {
            link.state = State::Opening { connection: Some(connection) };
            self.connections.insert(connection, frontend);
        }
    }

    /// A connection came up. The frontend that can be served now, and by which link; `None` if the connection is not
    /// wanted any more.
    pub fn handle_up(&mut self, connection: ConnectionId, welcome: LinkWelcome) -> Option<(FrontendId, LinkId)> {
        let frontend = *self.connections.get(&connection)?;
        let link = self.frontends.get_mut(&frontend)?;
        link.state = State::Up { connection, welcome };
        link.backoff = BACKOFF_MIN;
        Some((frontend, link.id))
    }

    /// A connection ended, or did not come up. `None` if that was expected.
    pub fn handle_broken(&mut self, now: Timestamp, connection: ConnectionId) -> Option<Broken> {
        let frontend = self.connections.remove(&connection)?;
        let link = self.frontends.get_mut(&frontend)?;
        if matches!(link.state, State::Up { .. }) {
            link.state = State::AwaitingClock { since: now };
            self.actions.push_back(LinkAction::AskClock);
            return Some(Broken::Link(frontend));
        }
        link.state = State::AwaitingRetry { at: now + link.backoff };
        link.backoff = (link.backoff * 2).min(BACKOFF_MAX);
        Some(Broken::Attempt(frontend))
    }

    /// Time passed.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        for (&frontend, link) in &mut self.frontends {
            if let State::AwaitingRetry { at } = link.state
                && at <= now
            {
                self.last += 1;
                link.id = LinkId(self.last);
                link.state = State::Opening { connection: None };
                self.actions.push_back(LinkAction::Open { frontend, address: link.address, link: link.id });
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

    /// Where `bytes` bytes at `offset` of a frontend's arena are reached: the connection, the remote address and its key.
    /// `None` if there is no link, or they do not lie in the arena.
    #[must_use]
    pub fn remote(&self, frontend: FrontendId, offset: u64, bytes: usize) -> Option<(ConnectionId, u64, u32)> {
        let State::Up { connection, welcome } = &self.frontends.get(&frontend)?.state else { return None };
        let end = offset.checked_add(bytes as u64)?;
        let address = welcome.arena_address.checked_add(offset)?;
        (end <= welcome.arena_bytes).then_some((*connection, address, welcome.arena_rkey))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRONTEND: FrontendId = FrontendId(4);

    fn address() -> SocketAddr {
        "127.0.0.1:7000".parse().unwrap()
    }

    fn welcome() -> LinkWelcome {
        LinkWelcome { arena_address: 1000, arena_bytes: 100, arena_rkey: 5 }
    }

    fn actions(links: &mut Links) -> Vec<LinkAction> {
        std::iter::from_fn(|| links.poll_action()).collect()
    }

    /// Links with one frontend, that joined at 10 and is being opened as connection 0.
    fn opening() -> Links {
        let mut links = Links::default();
        links.handle_joined(Timestamp(10), FRONTEND, address());
        links.handle_clock(Timestamp(12), Timestamp(10));
        let open = LinkAction::Open { frontend: FRONTEND, address: address(), link: LinkId(1) };
        assert_eq!(actions(&mut links), [LinkAction::AskClock, open]);
        links.handle_opened(FRONTEND, ConnectionId(0));
        links
    }

    #[test]
    fn a_link_waits_for_a_clock_that_was_asked_for_after_it_broke() {
        let mut links = opening();
        assert_eq!(links.handle_up(ConnectionId(0), welcome()), Some((FRONTEND, LinkId(1))));
        assert_eq!(links.handle_broken(Timestamp(50), ConnectionId(0)), Some(Broken::Link(FRONTEND)));
        assert_eq!(links.remote(FRONTEND, 0, 1), None);
        links.handle_clock(Timestamp(60), Timestamp(49));
        assert_eq!(actions(&mut links), [LinkAction::AskClock]);
        links.handle_clock(Timestamp(61), Timestamp(51));
        assert_eq!(actions(&mut links), [LinkAction::Open { frontend: FRONTEND, address: address(), link: LinkId(2) }]);
    }

    #[test]
    fn attempts_back_off_up_to_the_bound_and_a_success_starts_over() {
        let mut links = opening();
        let mut now = Timestamp(100);
        let mut waits = Vec::new();
        for attempt in 0..10 {
            assert_eq!(links.handle_broken(now, ConnectionId(attempt)), Some(Broken::Attempt(FRONTEND)));
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
        links.handle_broken(now, ConnectionId(10));
        links.handle_clock(now, now);
        links.handle_opened(FRONTEND, ConnectionId(11));
        links.handle_broken(now, ConnectionId(11));
        assert_eq!(links.poll_timeout() - now, BACKOFF_MIN);
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
            assert_eq!(links.handle_broken(Timestamp(99), ConnectionId(0)), None);
            assert_eq!((links.poll_timeout(), actions(&mut links)), (Timestamp::NEVER, vec![]));
        }
    }

    #[test]
    fn only_bytes_inside_the_arena_are_reached() {
        let mut links = opening();
        links.handle_up(ConnectionId(0), welcome());
        assert_eq!(links.remote(FRONTEND, 40, 60), Some((ConnectionId(0), 1040, 5)));
        assert_eq!(links.remote(FRONTEND, 41, 60), None);
        assert_eq!(links.remote(FRONTEND, u64::MAX, 60), None);
        assert_eq!(links.remote(FrontendId(5), 0, 1), None);
    }
}
