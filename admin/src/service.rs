//! Tells the service manager that started this process (systemd, `Type=notify`) how it is, over a Unix datagram socket:
//! a thread of its own sends what `notices` yields, and never waits long. Without `NOTIFY_SOCKET` there is nobody to
//! tell.
#![allow(clippy::disallowed_methods)] // A driver: it owns a socket and a thread.

use std::{
    convert::Infallible,
    ffi::{OsStr, OsString},
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
    sync::mpsc::{RecvTimeoutError, Sender, channel},
    thread::JoinHandle,
    time::Duration,
};

use proto::Span;
use transport::Clock;

use crate::{listener::AdminError, notices::Notices, vitals::Vitals};

/// Where the manager listens.
pub const SOCKET_VARIABLE: &str = "NOTIFY_SOCKET";
/// After how many microseconds without a word the manager ends the process, and which process that is.
const WATCHDOG_VARIABLES: [&str; 2] = ["WATCHDOG_USEC", "WATCHDOG_PID"];

/// How long a manager that takes nothing in is waited for.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// What tells the manager; dropping it ends its thread.
pub struct Service {
    end: Option<Sender<Infallible>>,
    thread: Option<JoinHandle<()>>,
}

impl Service {
    /// Tells the manager from now on how these vitals are, if there is one that wants to know.
    ///
    /// # Errors
    /// If there is no thread for it.
    pub fn start(clock: Clock, vitals: &Vitals) -> Result<Option<Self>, AdminError> {
        Self::of(|name| std::env::var_os(name), clock, vitals)
    }

    /// As the variables of an environment say.
    fn of(
        variable: impl Fn(&str) -> Option<OsString>,
        clock: Clock,
        vitals: &Vitals,
    ) -> Result<Option<Self>, AdminError> {
        let Some(name) = variable(SOCKET_VARIABLE).filter(|name| !name.is_empty()) else { return Ok(None) };
        let opened = address(&name).and_then(|to| {
            let socket = UnixDatagram::unbound()?;
            socket.set_write_timeout(Some(SEND_TIMEOUT))?;
            Ok((socket, to))
        });
        let (socket, to) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                let found = name.display();
                tracing::warn!("{SOCKET_VARIABLE}: found {found}, which cannot be told anything: {error}");
                return Ok(None);
            }
        };
        let notices = Notices::new(watchdog(WATCHDOG_VARIABLES.map(variable)));
        let vitals = vitals.clone();
        let (end, ends) = channel::<Infallible>();
        let tell = move || {
            let mut teller = Teller { socket, to, notices, has_failed: false };
            let every = teller.notices.every().to_duration();
            loop {
                teller.turn(clock, &vitals);
                if ends.recv_timeout(every) == Err(RecvTimeoutError::Disconnected) {
                    // Whoever ends by itself within a moment says so, too.
                    return teller.turn(clock, &vitals);
                }
            }
        };
        let thread = std::thread::Builder::new().name("service".to_owned());
        let thread = thread.spawn(tell).map_err(AdminError::ServiceThread)?;
        Ok(Some(Self { end: Some(end), thread: Some(thread) }))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the thread has.
struct Teller {
    socket: UnixDatagram,
    /// Sent to by name, as a manager that starts anew may have another socket there.
    to: SocketAddr,
    notices: Notices,
    has_failed: bool,
}

impl Teller {
    fn turn(&mut self, clock: Clock, vitals: &Vitals) {
        let Some(text) = self.notices.poll(clock.now(), vitals) else { return };
        match self.socket.send_to_addr(text.as_bytes(), &self.to) {
            Ok(_) => {
                self.has_failed = false;
                self.notices.handle_told();
            }
            Err(error) if !std::mem::replace(&mut self.has_failed, true) => {
                tracing::warn!("the service manager cannot be told how this process is, and is tried again: {error}");
            }
            Err(_) => {}
        }
    }
}

/// A path, or a name of Linux's abstract ones.
fn address(name: &OsStr) -> io::Result<SocketAddr> {
    match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        [b'/', ..] => SocketAddr::from_pathname(name),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "expected a path that begins with / or @")),
    }
}

/// How often the manager wants to hear of this process, if it does.
fn watchdog([micros, process]: [Option<OsString>; 2]) -> Option<Span> {
    let number = |text: OsString| text.to_str()?.parse::<i64>().ok();
    if process.is_some_and(|process| number(process) != Some(i64::from(std::process::id()))) {
        return None;
    }
    let micros = number(micros?).filter(|micros| *micros > 0)?;
    micros.checked_mul(1_000).map(Span)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes at once is waited for so long, so that a defect ends a test.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// A manager's socket, and the environment of what it starts.
    struct Manager {
        socket: UnixDatagram,
        variables: Vec<(&'static str, OsString)>,
    }

    impl Manager {
        fn at(address: &SocketAddr, name: impl Into<OsString>) -> Self {
            let socket = UnixDatagram::bind_addr(address).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            Self { socket, variables: vec![(SOCKET_VARIABLE, name.into())] }
        }

        fn start(&self, vitals: &Vitals) -> Option<Service> {
            let variables = self.variables.clone();
            let variable = |name: &str| Some(variables.iter().find(|(known, _)| *known == name)?.1.clone());
            Service::of(variable, Clock::start(), vitals).unwrap()
        }

        fn told(&self) -> String {
            let mut bytes = [0; 1_024];
            let length = self.socket.recv(&mut bytes).unwrap();
            String::from_utf8(bytes[..length].to_vec()).unwrap()
        }
    }

    #[test]
    fn a_manager_hears_of_the_start_of_life_and_of_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let mut manager = Manager::at(&SocketAddr::from_pathname(&path).unwrap(), &path);
        manager.variables.push(("WATCHDOG_USEC", "400000".into()));
        manager.variables.push(("WATCHDOG_PID", std::process::id().to_string().into()));
        let vitals = Vitals::default();
        vitals.set_ready(Ok(()));
        let service = manager.start(&vitals);
        assert_eq!(manager.told(), "READY=1\nWATCHDOG=1\nSTATUS=ready\n");
        assert_eq!([manager.told(), manager.told()], ["WATCHDOG=1\n"; 2]);
        vitals.set_ending();
        drop(service);
        let last = std::iter::repeat_with(|| manager.told()).find(|told| told != "WATCHDOG=1\n").unwrap();
        assert!(last.starts_with("STOPPING=1\n"), "{last}");
        manager.socket.set_nonblocking(true).unwrap();
        assert!(manager.socket.recv(&mut [0; 1]).is_err(), "its thread has ended");
    }

    #[test]
    fn abstract_names_are_names_of_sockets() {
        let name = format!("downbeat-test-{}", std::process::id());
        let manager = Manager::at(&SocketAddr::from_abstract_name(&name).unwrap(), format!("@{name}"));
        let _service = manager.start(&Vitals::default());
        assert_eq!(manager.told(), "STATUS=not ready: it is about to start\n");
    }

    #[test]
    fn nobody_is_told_anything_where_nobody_can_be() {
        let starts = |name: Option<&str>| {
            let variable = |wanted: &str| name.filter(|_| wanted == SOCKET_VARIABLE).map(OsString::from);
            Service::of(variable, Clock::start(), &Vitals::default()).unwrap().is_some()
        };
        assert!(!starts(None) && !starts(Some("")) && !starts(Some("vsock:2:1")));
    }

    #[test]
    fn a_manager_that_was_away_is_told_all_that_it_missed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let address = SocketAddr::from_pathname(&path).unwrap();
        let manager = Manager::at(&address, &path);
        let vitals = Vitals::default();
        let _service = manager.start(&vitals);
        assert_eq!(manager.told(), "STATUS=not ready: it is about to start\n");
        drop(manager);
        std::fs::remove_file(&path).unwrap();
        vitals.set_ready(Ok(()));
        let manager = Manager::at(&address, &path);
        assert_eq!(manager.told(), "READY=1\nSTATUS=ready\n");
    }

    #[test]
    fn a_watchdog_is_for_the_process_that_it_names() {
        let of = |micros: &str, process: Option<u32>| {
            watchdog([Some(micros.into()), process.map(|process| process.to_string().into())])
        };
        let this = std::process::id();
        assert_eq!(of("30000000", None), Some(Span::from_millis(30_000)));
        assert_eq!(of("30000000", Some(this)), Some(Span::from_millis(30_000)));
        assert_eq!(of("30000000", Some(this + 1)), None, "a parent's, whose environment this process has");
        for wrong in ["", "0", "-1", "1 s", "9223372036854775807"] {
            assert_eq!(of(wrong, None), None, "{wrong}");
        }
        assert_eq!(watchdog([None, None]), None);
    }
}
