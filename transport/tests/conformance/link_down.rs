//! Two hosts on a link that goes down and comes back: network namespaces joined by a veth pair. Needs
//! iproute2 and a user who may make them.
#![allow(clippy::disallowed_methods)] // Real processes, real time.

use std::{
    io::{BufRead, BufReader, Lines},
    net::SocketAddr,
    process::{Child, ChildStdout, Command, Stdio},
};

use proto::{Span, Timestamp};
use transport::{
    Access, Arm, Clock, ConnectionId, Endpoint, EndpointConfig, Event, Faults, LocalPath, Region, Sharing, Transfer,
};

/// Set in the two processes, to the role.
const ROLE: &str = "DOWNBEAT_TEST_ROLE";
/// What those two run.
const THIS: &str = "link_down::a_short_outage_is_ridden_out_and_a_long_one_ends_in_a_new_connection";
const SECRET: &str = "the link's secret";
const BYTES: usize = 64 * 1024;
const SERVER: &str = "10.77.0.2:4791";
const CLIENT: &str = "10.77.0.1:4791";
const LISTEN: &str = "10.77.0.2:7000";
/// Between attempts to connect again.
const RECONNECT: Span = Span::from_millis(200);

fn open(address: &str) -> (Clock, Endpoint, Region) {
    let arm = Arm::Soft {
        address: address.parse().unwrap(),
        any_port: false,
        faults: Faults::default(),
        sharing: Sharing::Alone,
        local: LocalPath::Udp,
    };
    let config = EndpointConfig { arm, ..EndpointConfig::default() }.with_secret(SECRET);
    let config = if address == SERVER { config.listening(LISTEN.parse().unwrap()) } else { config };
    (Clock::start(), Endpoint::open(config).unwrap(), Region::allocate(BYTES).unwrap())
}

/// Offers its memory to whoever connects, and tells the key with the welcome.
fn serve() -> ! {
    let (clock, mut endpoint, region) = open(SERVER);
    region.write(0, &[7; BYTES]);
    let key = endpoint.register(&region, Access { remote_read: true, remote_write: false }).unwrap();
    println!("told serving");
    loop {
        endpoint.drive(clock.now());
        while let Some(event) = endpoint.poll_event() {
            if let Event::Incoming { connection, .. } = event {
                let welcome = [key.address.to_le_bytes(), u64::from(key.rkey).to_le_bytes()].concat();
                endpoint.accept(clock.now(), connection, welcome);
            }
        }
        endpoint.wait(clock.now(), clock.now() + Span::from_millis(100));
    }
}

/// Reads the server's memory again and again, connects again when the connection ends, and tells of both.
fn read() -> ! {
    let (clock, mut endpoint, region) = open(CLIENT);
    let lkey = endpoint.register(&region, Access::default()).unwrap().lkey;
    let to: SocketAddr = LISTEN.parse().unwrap();
    let mut connect_at = Some(Timestamp::PAST);
    let (mut reads, mut remote) = (0u64, (0, 0));
    let post = |endpoint: &mut Endpoint, connection: ConnectionId, (remote_address, rkey): (u64, u64)| {
        let transfer = Transfer { token: 0, lkey, local_offset: 0, remote_address, rkey: rkey as u32, bytes: BYTES };
        endpoint.read(connection, transfer).unwrap();
    };
    loop {
        if connect_at.take_if(|at| *at <= clock.now()).is_some() {
            endpoint.connect(clock.now(), to, Vec::new());
        }
        endpoint.drive(clock.now());
        while let Some(event) = endpoint.poll_event() {
            match event {
                Event::Connected { connection, welcome } => {
                    let word = |at: usize| u64::from_le_bytes(welcome[at..at + 8].try_into().unwrap());
                    remote = (word(0), word(8));
                    println!("told connected");
                    post(&mut endpoint, connection, remote);
                }
                Event::ReadDone { connection, result: Ok(()), .. } => {
                    let mut bytes = vec![0; BYTES];
                    region.read(0, &mut bytes);
                    assert!(bytes == [7; BYTES], "wrong bytes");
                    region.write(0, &[0; BYTES]);
                    reads += 1;
                    if reads.is_multiple_of(100) {
                        println!("told {reads} reads");
                    }
                    post(&mut endpoint, connection, remote);
                }
                Event::ReadDone { .. } => {}
                Event::Disconnected { reason, .. } => {
                    println!("told lost: {reason}");
                    connect_at = Some(clock.now() + RECONNECT);
                }
                other => panic!("{other:?}"),
            }
        }
        endpoint.wait(clock.now(), clock.now() + Span::from_millis(50));
    }
}

fn ip(arguments: &str) -> bool {
    let done = Command::new("ip").args(arguments.split(' ')).stderr(Stdio::null()).status();
    done.is_ok_and(|status| status.success())
}

/// Two namespaces; they go with the test.
struct Link(String);

impl Link {
    fn new() -> Option<Self> {
        let link = Self(format!("downbeat-{}", std::process::id()));
        let name = &link.0;
        let made = ip(&format!("netns add {name}-1"))
            && ip(&format!("netns add {name}-2"))
            && ip(&format!("-n {name}-1 link add one mtu 4200 type veth peer name two mtu 4200 netns {name}-2"))
            && ip(&format!("-n {name}-1 addr add 10.77.0.1/24 dev one"))
            && ip(&format!("-n {name}-2 addr add 10.77.0.2/24 dev two"))
            && ip(&format!("-n {name}-2 link set two up"));
        (made && link.set("up")).then_some(link)
    }

    fn set(&self, state: &str) -> bool {
        ip(&format!("-n {}-1 link set one {state}", self.0))
    }

    fn spawn(&self, host: u8, role: &str) -> Process {
        let this = std::env::current_exe().unwrap();
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &format!("{}-{host}", self.0)]).arg(this).args(["--exact", THIS, "--nocapture"]);
        command.env(ROLE, role);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Process { child, lines }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        for host in [1, 2] {
            ip(&format!("netns del {}-{host}", self.0));
        }
    }
}

struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// What it tells next.
    fn told(&mut self) -> String {
        let lines = self.lines.by_ref().map_while(Result::ok);
        let told = lines.filter_map(|line| line.split_once("told ").map(|(_, rest)| rest.to_owned())).next();
        told.expect("it tells more")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_short_outage_is_ridden_out_and_a_long_one_ends_in_a_new_connection() {
    match std::env::var(ROLE).as_deref() {
        Ok("server") => serve(),
        Ok(_) => read(),
        Err(_) => {}
    }
    let Some(link) = Link::new() else {
        let has_ip = Command::new("ip").arg("-V").output().is_ok();
        testing::skip("transport/link_down", if has_ip { "network namespaces" } else { "iproute2" });
        return;
    };
    let mut server = link.spawn(2, "server");
    assert_eq!(server.told(), "serving");
    let mut client = link.spawn(1, "client");
    assert_eq!(client.told(), "connected");
    assert_eq!(client.told(), "100 reads");

    // As long as it takes to say so, which is shorter than retries and heartbeats reach: nobody notices but by a pause.
    assert!(link.set("down"));
    assert!(link.set("up"));
    for _ in 0..5 {
        let told = client.told();
        assert!(told.ends_with(" reads"), "{told}");
    }

    // Longer: the connection ends with a reason, and a new one comes up once the link does.
    assert!(link.set("down"));
    let lost = std::iter::from_fn(|| Some(client.told())).find(|told| !told.ends_with(" reads")).unwrap();
    assert!(lost.starts_with("lost: 10.77.0.2:7000: "), "{lost}");
    assert!(link.set("up"));
    let again = std::iter::from_fn(|| Some(client.told())).find(|told| !told.starts_with("lost: ")).unwrap();
    assert_eq!(again, "connected");
    assert!(client.told().ends_with(" reads"));
}
