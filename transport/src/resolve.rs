//! Names of hosts are looked up here, by the system's resolver, which blocks: each look-up has a thread of its own, and
//! whoever waits for it waits at most [`RESOLVE_MAX`]. There is one look-up of a name at a time in a process, whoever
//! asks, so a resolver that hangs holds one thread for each name of the configuration.
#![allow(clippy::disallowed_methods)] // A driver: it starts threads, and asks the system for routes.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _, UdpSocket},
    sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak, mpsc},
    thread,
    time::Duration,
};

use crate::{
    Address, OpenError, OwnAddress,
    error::{NameError, OwnAddressError},
    limits::RESOLVE_MAX,
};

/// What asks for a name's addresses, and may take its time.
type LookUp = dyn Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// Looks names up.
#[derive(Clone)]
pub(crate) struct Resolver {
    look_up: Arc<LookUp>,
    under_way: Arc<Mutex<BTreeMap<Address, Vec<Weak<Waiter>>>>>,
}

/// Who waits for an answer.
struct Waiter {
    answer: OnceLock<Result<Vec<SocketAddr>, NameError>>,
    tell: Box<dyn Fn() + Send + Sync>,
}

/// An answer that comes.
pub(crate) struct Lookup(Arc<Waiter>);

impl Lookup {
    /// The name's addresses, once they are there; at least one.
    pub(crate) fn answer(&self) -> Option<&Result<Vec<SocketAddr>, NameError>> {
        self.0.answer.get()
    }
}

impl Resolver {
    /// The system's, which all endpoints of this process share.
    pub(crate) fn system() -> Self {
        static SYSTEM: LazyLock<Resolver> =
            LazyLock::new(|| Resolver::new(|host, port| Ok((host, port).to_socket_addrs()?.collect())));
        SYSTEM.clone()
    }

    pub(crate) fn new(look_up: impl Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static) -> Self {
        Self { look_up: Arc::new(look_up), under_way: Arc::default() }
    }

    fn under_way(&self) -> MutexGuard<'_, BTreeMap<Address, Vec<Weak<Waiter>>>> {
        // No invariant spans two changes of it.
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to look an address up, or joins those who wait for it. `tell` is called once the answer is there, maybe
    /// on another thread.
    pub(crate) fn look_up(&self, address: &Address, tell: impl Fn() + Send + Sync + 'static) -> Lookup {
        let waiter = Arc::new(Waiter { answer: OnceLock::new(), tell: Box::new(tell) });
        let Some((host, port)) = address.name() else {
            answer(&waiter, Ok(address.ip().into_iter().collect()));
            return Lookup(waiter);
        };
        {
            let mut under_way = self.under_way();
            if let Some(others) = under_way.get_mut(address) {
                // Who has given up waits no more.
                others.retain(|other| other.strong_count() > 0);
                others.push(Arc::downgrade(&waiter));
                return Lookup(waiter);
            }
            under_way.insert(address.clone(), vec![Arc::downgrade(&waiter)]);
        }
        let (resolver, name, host) = (self.clone(), address.clone(), host.to_owned());
        let look = move || {
            let found = (resolver.look_up)(&host, port);
            resolver.finish(&name, &found);
        };
        if let Err(error) = thread::Builder::new().name("names".to_owned()).spawn(look) {
            self.finish(address, &Err(error));
        }
        Lookup(waiter)
    }

    fn finish(&self, name: &Address, found: &io::Result<Vec<SocketAddr>>) {
        let waiters = self.under_way().remove(name).unwrap_or_default();
        for waiter in waiters.iter().filter_map(Weak::upgrade) {
            let name = name.clone();
            answer(
                &waiter,
                match found {
                    Ok(found) if found.is_empty() => Err(NameError::Nothing { name }),
                    Ok(found) => Ok(found.clone()),
                    Err(error) => Err(NameError::Failed { name, cause: error.to_string() }),
                },
            );
        }
    }

    /// Looks an address up, and waits for the answer.
    fn resolve(&self, address: &Address) -> Result<Vec<SocketAddr>, NameError> {
        let (told, tells) = mpsc::sync_channel(1);
        let lookup = self.look_up(address, move || {
            // It waits once.
            let _ = told.try_send(());
        });
        // Without an answer in time there is none.
        let _ = tells.recv_timeout(RESOLVE_MAX.to_duration());
        lookup.answer().cloned().unwrap_or_else(|| Err(NameError::Late { name: address.clone() }))
    }
}

fn answer(waiter: &Waiter, found: Result<Vec<SocketAddr>, NameError>) {
    if waiter.answer.set(found).is_ok() {
        (waiter.tell)();
    }
}

/// Which of a name's addresses is tried: one of our own family if there is any, and another one each time.
pub(crate) fn choose(found: &[SocketAddr], own: Option<IpAddr>, attempt: u64) -> Option<SocketAddr> {
    let fits = |at: &&SocketAddr| own.is_none_or(|own| own.is_ipv4() == at.is_ipv4());
    let fitting: Vec<_> = found.iter().filter(fits).collect();
    let among = if fitting.is_empty() { found.iter().collect() } else { fitting };
    let index = attempt.checked_rem(among.len() as u64)?;
    among.get(index as usize).map(|&&at| at)
}

/// How long it is waited before names and routes are looked up again that are not there yet.
const AGAIN: Duration = Duration::from_secs(1);
/// How often meanwhile it is looked whether to go on.
const LOOK: Duration = Duration::from_millis(100);

/// Tries again and again what [may pass](OpenError::may_pass), and says so once for each reason. `None` once `is_over`.
///
/// # Errors
/// Of an attempt, what does not pass.
pub fn wait_for_names<T>(
    is_over: impl Fn() -> bool,
    mut attempt: impl FnMut() -> Result<T, OpenError>,
) -> Result<Option<T>, OpenError> {
    let mut told = String::new();
    loop {
        match attempt() {
            Err(error) if error.may_pass() => {
                let reason = error.to_string();
                if reason != told {
                    tracing::warn!("{reason}; trying again each second");
                    told = reason;
                }
            }
            ended => return ended.map(Some),
        }
        for _ in 0..AGAIN.as_millis() / LOOK.as_millis() {
            if is_over() {
                return Ok(None);
            }
            thread::sleep(LOOK);
        }
    }
}

/// Where this host listens, or sends from, by an address that a key says. Waits for the resolver, at most
/// [`RESOLVE_MAX`].
///
/// # Errors
/// One line that names the key, the address, and what was expected.
pub fn own_address(key: &'static str, address: &Address) -> Result<SocketAddr, OwnAddressError> {
    let found = Resolver::system().resolve(address).map_err(|cause| OwnAddressError::Name { key, cause })?;
    Ok(choose(&found, Some(Ipv4Addr::LOCALHOST.into()), 0).expect("an answer has an address"))
}

/// The address of this host's own that a key says, or leaves to the route to a scheduler; of that `port` is the port
/// unless the key says another. Waits for the resolver, as the two do that it calls.
///
/// # Errors
/// Those of [`own_address`] and of [`source_address`].
pub fn own_or_routed(
    key: &'static str,
    address: &OwnAddress,
    schedulers: &[Address],
    port: u16,
) -> Result<SocketAddr, OwnAddressError> {
    match address {
        OwnAddress::At(address) => own_address(key, address),
        OwnAddress::Auto(said) => Ok(SocketAddr::new(source_address(key, schedulers)?, said.unwrap_or(port))),
    }
}

/// The address from which packets of this host leave to the first of the schedulers that there is a route to. Waits for
/// the resolver, at most [`RESOLVE_MAX`] for each.
///
/// # Errors
/// One line that names the key, why there is no route, and what was expected.
pub(crate) fn source_address(key: &'static str, schedulers: &[Address]) -> Result<IpAddr, OwnAddressError> {
    let mut first = None;
    for scheduler in schedulers {
        let to = match Resolver::system().resolve(scheduler) {
            Ok(found) => found,
            Err(cause) => {
                first.get_or_insert(OwnAddressError::Scheduler { key, cause });
                continue;
            }
        };
        for to in to {
            match route_to(to) {
                Ok(from) => return Ok(from),
                Err(cause) => {
                    first.get_or_insert(OwnAddressError::NoRoute { key, to, cause });
                }
            }
        }
    }
    Err(first.unwrap_or(OwnAddressError::Alone { key }))
}

/// The address from which packets to a peer leave. Sends nothing: the system only looks the route up.
fn route_to(peer: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(peer)?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests;
