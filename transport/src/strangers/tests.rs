//! Floods against the pool, on a clock and a seed of the test's own.

use std::collections::VecDeque;

use proptest::prelude::*;
use rand::{SeedableRng as _, rngs::SmallRng};

use super::*;

const PATIENCE: Span = Span::from_millis(2_000);

fn at(us: i64) -> Timestamp {
    Timestamp::ZERO + Span::from_micros(us)
}

fn v4(last: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, last])
}

#[test]
fn whoever_has_the_most_makes_room_oldest_first() {
    let mut pool = Strangers::new(4, PATIENCE);
    for name in ["a1", "a2", "a3"] {
        assert_eq!(pool.admit(at(0), v4(1), name).1, None);
    }
    assert_eq!(pool.admit(at(0), v4(2), "b1").1, None);
    assert_eq!(pool.admit(at(0), v4(3), "c1").1, Some("a1"));
    assert_eq!(pool.admit(at(0), v4(2), "b2").1, Some("a2"));
    // All but one have one; the newcomer makes its own address the busiest.
    assert_eq!(pool.admit(at(0), v4(2), "b3").1, Some("b1"));
    // Of equals, whose oldest is the oldest.
    assert_eq!(pool.admit(at(0), v4(1), "a4").1, Some("a3"));
}

#[test]
fn an_ipv6_host_has_one_share_for_its_64() {
    let mut pool = Strangers::new(8, PATIENCE);
    let v6 = |text: &str| text.parse::<IpAddr>().unwrap();
    for host in 0..8u16 {
        pool.admit(at(0), v6(&format!("2001:db8:1:2:{host:x}::1")), "flood");
    }
    assert_eq!(pool.admit(at(0), v6("2001:db8:1:3::1"), "member").1, Some("flood"));
    assert_eq!(pool.by_address.len(), 2);
    assert_eq!(share_of(v6("::ffff:10.0.0.1")), v4(1), "IPv4 over an IPv6 socket");
}

#[test]
fn the_time_of_each_is_over_in_turn() {
    let mut pool = Strangers::new(8, PATIENCE);
    let (first, _) = pool.admit(at(0), v4(1), 'a');
    pool.admit(at(10), v4(1), 'b');
    pool.admit(at(20), v4(2), 'c');
    assert_eq!(pool.poll_timeout(), Some(at(0) + PATIENCE));
    assert_eq!(pool.remove(first), Some('a'));
    assert_eq!(pool.poll_timeout(), Some(at(10) + PATIENCE));
    assert_eq!(pool.poll_overdue(at(9) + PATIENCE), None);
    assert_eq!(pool.poll_overdue(at(50) + PATIENCE), Some('b'));
    assert_eq!(pool.poll_overdue(at(50) + PATIENCE), Some('c'));
    assert_eq!((pool.poll_overdue(at(50) + PATIENCE), pool.poll_timeout()), (None, None));
    assert!(pool.by_address.is_empty());
}

/// A member's attempts to get in: each needs so long from the connection to the proof.
struct Member {
    from: IpAddr,
    handshake: Span,
    done_at: Option<(u64, Timestamp)>,
    joined: u32,
    pushed_out: u32,
}

/// Strangers connect at `rate` a second from `addresses`, and never say a word, while members come and go. Yields how
/// often members came in, and how often one was pushed out on its way.
fn flood(seed: u64, rate: i64, addresses: &[IpAddr], members: &[(IpAddr, Span)]) -> (u32, u32) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut pool = Strangers::new(STRANGERS_MAX, PATIENCE);
    let mut members: Vec<_> = members
        .iter()
        .map(|&(from, handshake)| Member { from, handshake, done_at: None, joined: 0, pushed_out: 0 })
        .collect();
    let gap = 1_000_000 / rate;
    let mut now = at(0);
    let mut evicted = VecDeque::new();
    for _ in 0..rate * 4 {
        now += Span::from_micros(rng.random_range(0..=2 * gap));
        while pool.poll_overdue(now).is_some() {}
        let from = addresses[rng.random_range(0..addresses.len())];
        evicted.extend(pool.admit(now, from, None).1.flatten());
        for (index, member) in members.iter_mut().enumerate() {
            match member.done_at {
                None => {
                    let (number, out) = pool.admit(now, member.from, Some(index));
                    evicted.extend(out.flatten());
                    member.done_at = Some((number, now + member.handshake));
                }
                Some((number, done_at)) if done_at <= now => {
                    member.done_at = None;
                    member.joined += u32::from(pool.remove(number).is_some());
                }
                Some(_) => {}
            }
        }
        while let Some(index) = evicted.pop_front() {
            members[index].pushed_out += 1;
        }
        assert!(pool.all.len() <= STRANGERS_MAX, "seed {seed}");
        assert_eq!(pool.by_address.values().map(BTreeSet::len).sum::<usize>(), pool.all.len(), "seed {seed}");
    }
    (members.iter().map(|member| member.joined).sum(), members.iter().map(|member| member.pushed_out).sum())
}

#[test]
fn members_come_in_while_strangers_flood() {
    let slow = Span::from_millis(50);
    for seed in 0..8 {
        for rate in [500, 1_000, 20_000] {
            // From addresses of its own, however fast the flood is.
            let (joined, pushed_out) = flood(seed, rate, &[v4(1), v4(2)], &[(v4(100), slow), (v4(101), slow)]);
            assert!(joined >= 60 && pushed_out == 0, "seed {seed}, {rate}/s: {joined} in, {pushed_out} out");
        }
        // From the very address that the flood comes from: 256 places at 1,000 a second are 256 ms for each.
        let (joined, pushed_out) = flood(seed, 1_000, &[v4(1)], &[(v4(1), slow)]);
        assert!(joined >= 60 && pushed_out == 0, "seed {seed}: {joined} in, {pushed_out} out");
        // From more addresses than there are places.
        let everywhere: Vec<_> = (0..2_000u16).map(|n| IpAddr::from([10, 1, (n >> 8) as u8, n as u8])).collect();
        let (joined, pushed_out) = flood(seed, 1_000, &everywhere, &[(v4(100), slow)]);
        assert!(joined >= 60 && pushed_out == 0, "seed {seed}: {joined} in, {pushed_out} out");
    }
}

proptest! {
    /// Against a plain list.
    #[test]
    fn it_agrees_with_a_list(steps in prop::collection::vec((0u8..5, 0usize..9), 1..200)) {
        let (mut pool, mut list) = (Strangers::new(5, PATIENCE), Vec::<(u64, u8)>::new());
        for (address, pick) in steps {
            if pick < 6 {
                let next = pool.next;
                let (number, evicted) = pool.admit(at(0), v4(address), next);
                list.push((number, address));
                let mut expected = None;
                if list.len() > 5 {
                    let count = |address: u8| list.iter().filter(|other| other.1 == address).count();
                    let most = list.iter().map(|other| count(other.1)).max().unwrap();
                    let out = list.iter().position(|other| count(other.1) == most).unwrap();
                    expected = Some(list.remove(out).0);
                }
                prop_assert_eq!(evicted, expected);
            } else if !list.is_empty() {
                let (number, _) = list.remove(pick % list.len());
                prop_assert_eq!(pool.remove(number), Some(number));
                prop_assert_eq!(pool.remove(number), None);
            }
            prop_assert!(pool.all.keys().copied().eq(list.iter().map(|entry| entry.0)));
        }
    }
}
