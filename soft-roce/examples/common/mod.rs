//! What the examples share: an endpoint on its socket with the system's clock, TCP to agree with the peer, arguments.

// The examples drive an endpoint in real time: they own their clock.
#![allow(clippy::disallowed_methods)]
// Each example uses its part.
#![allow(dead_code)]

use std::{
    collections::BTreeMap,
    error::Error,
    io::{self, Read, Write},
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    str::FromStr,
    time::{Duration, Instant},
};

use soft_roce::{
    Completion, DatagramConfig, Endpoint, EndpointConfig, Identification, PathMtu, Peer, Psn, QueuePairConfig,
    QueuePairNumber, Status, Timestamp,
    udp::{Driver, Faults},
};

/// Anything that ends an example.
pub(crate) type Failure = Box<dyn Error>;

/// The UDP port of RoCEv2.
pub(crate) const ROCE_PORT: u16 = 4791;
/// No single step takes longer, even with an emulated peer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// How long a server may take to start: an emulated machine loads its programs slowly.
const START: Duration = Duration::from_secs(60);
/// A finished end answers its peer's repetitions until nothing has arrived for so long.
const SILENCE: Duration = Duration::from_millis(400);
/// Passes without packets before the processor is given up for [`NAP`].
const IDLE_PASSES: u32 = 200;
const NAP: Duration = Duration::from_micros(50);

/// An endpoint on its socket.
pub(crate) struct Node {
    pub endpoint: Endpoint,
    driver: Driver,
    started: Instant,
    /// Of the last pass, since the start.
    now: Duration,
    idle_passes: u32,
}

impl Node {
    /// Binds `address`, with the share `--loss` of what it sends thrown away, drawn from `--seed`.
    pub(crate) fn bind(address: IpAddr, arguments: &Arguments) -> Result<Self, Failure> {
        let local = SocketAddr::new(address, ROCE_PORT);
        let process = u64::from(std::process::id());
        let (loss, given) = (arguments.get("loss", 0.0)?, arguments.find("seed")?);
        if loss > 0.0 && given.is_none() {
            eprintln!("losses are drawn from --seed {process}");
        }
        let faults = Faults { loss, ..Faults::default() };
        let driver = Driver::bind(local, faults, given.unwrap_or(process))
            .map_err(|error| format!("cannot bind UDP {local}: {error}"))?;
        let endpoint = Endpoint::new(EndpointConfig::new(driver.local(), process));
        Ok(Self { endpoint, driver, started: Instant::now(), now: Duration::ZERO, idle_passes: 0 })
    }

    /// The time since the start.
    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// The same, as the last pass has read it: for limits that need not be exact.
    pub(crate) fn elapsed_about(&self) -> Duration {
        self.now
    }

    /// One pass: receive, timers, send. False if nothing was received.
    pub(crate) fn step(&mut self) -> bool {
        let received = self.receive();
        self.transmit(received);
        received
    }

    /// The first half of a pass. What is posted before the second leaves with it. False if nothing was received.
    pub(crate) fn receive(&mut self) -> bool {
        self.now = self.elapsed();
        let now = Timestamp::default() + self.now;
        let received = self.driver.receive(now, &mut self.endpoint);
        self.endpoint.handle_timeout(now);
        received
    }

    /// The second half; a nap if nothing has moved for long.
    pub(crate) fn transmit(&mut self, received: bool) {
        let sent = self.driver.transmit(Timestamp::default() + self.now, &mut self.endpoint);
        self.idle_passes = if received || sent { 0 } else { self.idle_passes.saturating_add(1) };
        if self.idle_passes > IDLE_PASSES {
            std::thread::sleep(NAP);
        }
    }

    /// The next completion.
    pub(crate) fn completion(&mut self) -> Result<Completion, Failure> {
        let until = self.elapsed() + PATIENCE;
        loop {
            if let Some(completion) = self.endpoint.poll_completion() {
                return Ok(completion);
            }
            if self.elapsed_about() > until {
                let counters = self.endpoint.counters();
                return Err(format!("nothing completed in {} s; {counters:?}", PATIENCE.as_secs()).into());
            }
            self.step();
        }
    }

    /// The next completion, which must be a success.
    pub(crate) fn success(&mut self) -> Result<Completion, Failure> {
        let completion = self.completion()?;
        match completion.status {
            Status::Success => Ok(completion),
            _ => Err(format!("{completion:?}; {:?}", self.endpoint.counters()).into()),
        }
    }

    /// Answers what the peer repeats, until it is silent.
    pub(crate) fn linger(&mut self) {
        let mut heard = self.elapsed();
        while self.elapsed_about() < heard + SILENCE {
            if self.step() {
                heard = self.elapsed_about();
            }
        }
    }

    /// Sets a queue pair up for a kernel or network card.
    pub(crate) fn connect(
        &mut self,
        number: QueuePairNumber,
        own: Name,
        peer: Name,
        mtu: PathMtu,
    ) -> Result<(), Failure> {
        let peer = Peer {
            address: SocketAddr::new(peer.address, ROCE_PORT),
            queue_pair: QueuePairNumber(peer.queue_pair),
            rq_psn: Psn::new(peer.psn),
            sq_psn: Psn::new(own.psn),
            path_mtu: mtu,
            identification: Identification::Any,
            ack_delay: None,
        };
        Ok(self.endpoint.connect_queue_pair(number, peer)?)
    }

    /// A queue pair and the name under which the peer reaches it.
    pub(crate) fn queue_pair(
        &mut self,
        address: IpAddr,
        config: QueuePairConfig,
    ) -> Result<(QueuePairNumber, Name), Failure> {
        let number = self.endpoint.create_queue_pair(config)?;
        let psn = self.endpoint.random_psn().value();
        Ok((number, Name { address, queue_pair: number.0, psn }))
    }

    /// A datagram queue pair, ready, and the name under which peers reach it.
    pub(crate) fn datagram_queue_pair(
        &mut self,
        address: IpAddr,
        config: DatagramConfig,
    ) -> Result<(QueuePairNumber, Name), Failure> {
        let number = self.endpoint.create_datagram_queue_pair(config)?;
        self.endpoint.modify_datagrams_to_ready_to_receive(number)?;
        self.endpoint.modify_to_ready_to_send(number)?;
        // Datagrams are not numbered for their receiver.
        Ok((number, Name { address, queue_pair: number.0, psn: 0 }))
    }
}

/// What a peer must know to reach a queue pair.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Name {
    pub address: IpAddr,
    pub queue_pair: u32,
    /// The first packet sequence number that the queue pair sends.
    pub psn: u32,
}

/// An address as a GID: IPv4 addresses are mapped (IBTA annex A17.4.1).
pub(crate) fn gid(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The address behind a GID.
pub(crate) fn address(gid: [u8; 16]) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from(gid)).to_canonical()
}

/// The TCP connection over which both sides agree: to `server`, or from whoever comes.
pub(crate) fn agree(local: IpAddr, server: Option<IpAddr>, port: u16) -> Result<TcpStream, Failure> {
    let stream = match server {
        Some(server) => dial(SocketAddr::new(server, port))?,
        None => {
            let listener = TcpListener::bind((local, port))?;
            println!("listening on {local}:{port}");
            listener.accept()?.0
        }
    };
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// The server may still be starting.
fn dial(server: SocketAddr) -> Result<TcpStream, Failure> {
    let begun = Instant::now();
    loop {
        match TcpStream::connect_timeout(&server, PATIENCE) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && begun.elapsed() < START => {
                std::thread::sleep(Duration::from_millis(50));
            }
            other => return other.map_err(|error| format!("cannot connect to {server}: {error}").into()),
        }
    }
}

/// Sends ours and receives the peer's message of the same length; the client speaks first.
pub(crate) fn exchange(stream: &mut TcpStream, client: bool, ours: &[u8]) -> io::Result<Vec<u8>> {
    let mut theirs = vec![0; ours.len()];
    if client {
        stream.write_all(ours)?;
        stream.read_exact(&mut theirs)?;
    } else {
        stream.read_exact(&mut theirs)?;
        stream.write_all(ours)?;
    }
    Ok(theirs)
}

/// `--key value` pairs.
pub(crate) struct Arguments(BTreeMap<String, String>);

impl Arguments {
    /// Those of the process, all of which must be among `known`.
    pub(crate) fn parse(known: &[&str]) -> Result<Self, Failure> {
        let mut found = BTreeMap::new();
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let key = argument.strip_prefix("--").filter(|key| known.contains(key));
            let key = key.ok_or(format!("{argument}: expected one of --{}", known.join(", --")))?;
            let value = arguments.next().ok_or(format!("--{key}: expected a value"))?;
            found.insert(key.to_owned(), value);
        }
        Ok(Self(found))
    }

    /// A value that may be missing.
    pub(crate) fn find<T: FromStr>(&self, key: &str) -> Result<Option<T>, Failure> {
        let Some(text) = self.0.get(key) else { return Ok(None) };
        let value = text.parse().map_err(|_| format!("--{key} {text}: expected a {}", std::any::type_name::<T>()))?;
        Ok(Some(value))
    }

    /// A value, or what it is where none is given.
    pub(crate) fn get<T: FromStr>(&self, key: &str, default: T) -> Result<T, Failure> {
        Ok(self.find(key)?.unwrap_or(default))
    }

    /// A value that must be there.
    pub(crate) fn need<T: FromStr>(&self, key: &str) -> Result<T, Failure> {
        self.find(key)?.ok_or(format!("--{key}: missing").into())
    }

    /// `--mtu`.
    pub(crate) fn mtu(&self) -> Result<PathMtu, Failure> {
        let bytes = self.get("mtu", 4096)?;
        let mtu = PathMtu::of_bytes(bytes);
        mtu.ok_or(format!("--mtu {bytes}: expected 256, 512, 1024, 2048 or 4096").into())
    }
}
