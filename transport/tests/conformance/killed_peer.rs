//! A peer that is killed in the middle of READs: each ends once, and what is reported as read is right.
#![allow(clippy::disallowed_methods)] // Real processes, real time.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use crate::fabric::config;
use proto::Span;
use transport::{Access, Address, Clock, Endpoint, Event, Region, Transfer, TransferError};

/// Set in the process that shall be killed.
const VICTIM: &str = "DOWNBEAT_TEST_VICTIM";
const READS: usize = 64;
const BYTES: usize = 1 << 20;
/// READs that end before the kill.
const BEFORE: usize = 5;
const HANG: Duration = Duration::from_secs(300);

fn byte(at: usize) -> u8 {
    (at % 251) as u8
}

/// The victim: offers its memory until it is killed.
fn serve() -> ! {
    let mut endpoint = Endpoint::open(config(1)).unwrap();
    let region = Region::allocate(BYTES).unwrap();
    region.write(0, &(0..BYTES).map(byte).collect::<Vec<_>>());
    let key = endpoint.register(&region, Access { remote_read: true, remote_write: false }).unwrap();
    println!("victim {} {} {}", endpoint.listen_address().unwrap(), key.address, key.rkey);
    let clock = Clock::start();
    loop {
        endpoint.drive(clock.now());
        while let Some(event) = endpoint.poll_event() {
            if let Event::Incoming { connection, .. } = event {
                endpoint.accept(clock.now(), connection, Vec::new());
            }
        }
        endpoint.wait(clock.now(), clock.now() + Span::from_millis(100));
    }
}

/// Ends with the test, whatever becomes of it.
struct Victim(Child);

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn every_read_from_a_killed_process_ends_once() {
    if std::env::var_os(VICTIM).is_some() {
        serve();
    }
    let this = std::env::current_exe().unwrap();
    let mut victim = Command::new(this);
    victim.args(["--exact", "killed_peer::every_read_from_a_killed_process_ends_once", "--nocapture"]);
    let victim = victim.env(VICTIM, "1").stdout(Stdio::piped()).spawn().unwrap();
    let mut victim = Victim(victim);
    let lines = BufReader::new(victim.0.stdout.take().unwrap()).lines();
    let line = lines.map_while(Result::ok).find_map(|line| line.split_once("victim ").map(|(_, rest)| rest.to_owned()));
    let line = line.expect("it tells where it is");
    let [address, remote_address, rkey] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();

    let clock = Clock::start();
    let mut endpoint = Endpoint::open(config(0)).unwrap();
    let region = Region::allocate(READS * BYTES).unwrap();
    let lkey = endpoint.register(&region, Access::default()).unwrap().lkey;
    let ours = endpoint.connect(clock.now(), address.parse::<Address>().unwrap(), Vec::new());
    let (mut results, mut disconnected, started) = (vec![Vec::new(); READS], false, Instant::now());
    while !disconnected {
        assert!(started.elapsed() < HANG, "it hangs with {results:?}");
        endpoint.drive(clock.now());
        while let Some(event) = endpoint.poll_event() {
            assert!(!disconnected, "{event:?} after the end");
            match event {
                Event::Connected { .. } => {
                    for token in 0..READS {
                        let (token, local_offset) = (token as u64, token * BYTES);
                        let (remote_address, rkey) = (remote_address.parse().unwrap(), rkey.parse().unwrap());
                        let transfer = Transfer { token, lkey, local_offset, remote_address, rkey, bytes: BYTES };
                        endpoint.read(ours, transfer).unwrap();
                    }
                }
                Event::ReadDone { token, result, .. } => {
                    results[token as usize].push(result);
                    if results.iter().flatten().count() == BEFORE {
                        victim.0.kill().unwrap();
                    }
                }
                Event::Disconnected { .. } => disconnected = true,
                other => panic!("{other:?}"),
            }
        }
        endpoint.wait(clock.now(), clock.now() + Span::from_millis(10));
    }
    let expected: Vec<u8> = (0..BYTES).map(byte).collect();
    let mut bytes = vec![0; BYTES];
    let mut read = 0;
    for (token, results) in results.iter().enumerate() {
        match results[..] {
            [Ok(())] => {
                region.read(token * BYTES, &mut bytes);
                assert!(bytes == expected, "READ {token} has other bytes than it said");
                read += 1;
            }
            [Err(TransferError::Flushed | TransferError::RetriesExceeded)] => {}
            ref other => panic!("READ {token} ended as {other:?}"),
        }
    }
    assert!((BEFORE..READS).contains(&read), "{read} of {READS} were read, though it was killed after {BEFORE}");
}
