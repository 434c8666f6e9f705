//! Members by chance: schedulers take them in, claim, ask, are lost and come back, and a naive judge says from the
//! whole history of a life what docs/operations.md promises of it. The judge keeps no state but what happened.

use std::collections::{BTreeMap, BTreeSet};

use member::{Destination, MISSED_AFTER, Membership, ORPHAN_MAX, Output, Reader, Verdict, Welcome, encode};
use proptest::prelude::*;
use proto::{
    BackendId, Claim, Epoch, Era, ModelThreadId, Span, Timestamp,
    backend_to_scheduler::BackendToControl,
    clock::ClockReply,
    frame::read_frame,
    hello::{Member, ModelThreads, SchedulerHello},
};
use transport::ConnectionId;

const NAME: Member = Member::Backend(BackendId(3));
/// All schedulers but strangers keep this clock.
const ERA: Era = Era(1);

/// What happened in a life, in its order.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fact {
    /// A session of a scheduler was joined, or claimed another epoch since.
    Claimed { at: Timestamp, session: u64, scheduler: usize, claim: Claim },
    /// A session ended.
    Ended { at: Timestamp, session: u64 },
    /// A scheduler gave us our name.
    Named { at: Timestamp },
}

/// What is promised, read off the facts.
#[derive(Debug)]
struct Judge<'a> {
    facts: &'a [Fact],
    schedulers: usize,
}

impl Judge<'_> {
    /// "A member obeys the highest epoch that was ever claimed to it", of the era of whom it obeyed first.
    fn obeys(&self) -> Option<(Timestamp, u64, usize, Claim)> {
        let claims = self.facts.iter().filter_map(|fact| match *fact {
            Fact::Claimed { at, session, scheduler, claim } if claim.epoch != Epoch::NONE => {
                Some((at, session, scheduler, claim))
            }
            _ => None,
        });
        let claims: Vec<_> = claims.collect();
        let era = claims.first()?.3.era;
        // Of equal ones the first counts: the same primary has repeated it.
        claims.into_iter().rev().filter(|(.., claim)| claim.era == era).max_by_key(|(.., claim)| claim.epoch)
    }

    fn has_ended(&self, session: u64) -> Option<Timestamp> {
        self.facts.iter().find_map(|fact| match *fact {
            Fact::Ended { at, session: ended } if ended == session => Some(at),
            _ => None,
        })
    }

    /// Whoever is obeyed, unless its session has ended.
    fn primary(&self) -> Option<usize> {
        let (_, session, scheduler, _) = self.obeys()?;
        self.has_ended(session).is_none().then_some(scheduler)
    }

    /// What a claim means that is made after these facts.
    fn of_claim(&self, scheduler: usize, claim: Claim) -> Verdict {
        let is_primary = claim.epoch != Epoch::NONE;
        let Some((.., obeyed)) = self.obeys() else {
            return if is_primary { Verdict::Obey { former: None } } else { Verdict::Nothing };
        };
        // "nobody is left who knows the clock that windows and deadlines are told by (an era)"
        if claim.era != obeyed.era {
            let is_over = is_primary && self.primary().is_none();
            return if is_over { Verdict::StartOver("") } else { Verdict::Leave("") };
        }
        match claim.epoch.cmp(&obeyed.epoch) {
            std::cmp::Ordering::Less => Verdict::Nothing,
            std::cmp::Ordering::Equal if self.primary().is_none() => Verdict::StartOver(""),
            std::cmp::Ordering::Equal => Verdict::Nothing,
            std::cmp::Ordering::Greater if self.primary() == Some(scheduler) => Verdict::Leave(""),
            std::cmp::Ordering::Greater => Verdict::Obey { former: self.primary() },
        }
    }

    /// "Members that no standby takes over wait two seconds, then start over": when that is.
    fn starts_over_at(&self) -> Option<Timestamp> {
        let since = match self.obeys() {
            Some((_, session, ..)) => self.has_ended(session)?,
            None => self.facts.iter().find_map(|fact| match *fact {
                Fact::Named { at } => Some(at),
                _ => None,
            })?,
        };
        (self.schedulers > 1).then_some(since + ORPHAN_MAX)
    }
}

/// The same up to the words.
fn kind(verdict: &Verdict) -> Verdict {
    match verdict {
        Verdict::Leave(_) => Verdict::Leave(""),
        Verdict::StartOver(_) => Verdict::StartOver(""),
        Verdict::Obey { former } => Verdict::Obey { former: *former },
        Verdict::Nothing => Verdict::Nothing,
    }
}

/// One scheduler, as the member's network shows it.
#[derive(Debug, Default)]
struct Side {
    /// The number of the session.
    session: u64,
    /// Its connection to the scheduler.
    control: Option<ConnectionId>,
    /// Those to its ModelThreads that are not up yet.
    coming: Vec<ConnectionId>,
    threads: Vec<ConnectionId>,
    /// What it has claimed since its welcome.
    claim: Option<Claim>,
    knows_all: bool,
    /// It has asked, and the primary is missed then unless it is heard before.
    asked: Option<Timestamp>,
    /// What it must be told at once.
    awaits: Option<bool>,
}

impl Side {
    fn has_joined(&self) -> bool {
        self.claim.is_some() && self.coming.is_empty() && self.knows_all
    }
}

#[derive(Debug)]
struct World {
    membership: Membership<u32>,
    now: Timestamp,
    next: u64,
    sides: Vec<Side>,
    facts: Vec<Fact>,
    closed: BTreeSet<ConnectionId>,
    lower_epochs: u64,
    /// The highest number that anybody claimed.
    number: u32,
    counts: BTreeMap<&'static str, u32>,
}

impl World {
    fn new(schedulers: usize) -> Self {
        let mut world = Self {
            membership: Membership::new(schedulers),
            now: Timestamp(1_000_000_000),
            next: 0,
            sides: (0..schedulers).map(|_| Side::default()).collect(),
            facts: Vec::new(),
            closed: BTreeSet::new(),
            lower_epochs: 0,
            number: 0,
            counts: BTreeMap::new(),
        };
        world.look();
        world
    }

    fn judge(&self) -> Judge<'_> {
        Judge { facts: &self.facts, schedulers: self.sides.len() }
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn connection(&mut self) -> ConnectionId {
        self.next += 1;
        ConnectionId(self.next)
    }

    /// Does what the membership wants.
    fn perform(&mut self) {
        while let Some(output) = self.membership.poll_output() {
            match output {
                Output::Connect { to: Destination::Scheduler(scheduler), hello } => {
                    assert_eq!(hello, None, "the role knows what to say");
                    let dialled = self.sides.iter().filter(|side| side.control.is_some()).count();
                    assert!(self.membership.name().is_some() || dialled == 0, "two would give two names");
                    let connection = self.connection();
                    let former = std::mem::take(&mut self.sides[scheduler]);
                    assert!(former.control.is_none(), "it is connected to already");
                    self.next += 1;
                    self.sides[scheduler].session = self.next;
                    self.sides[scheduler].control = Some(connection);
                    self.membership.handle_connecting(scheduler, Reader::Scheduler, connection);
                }
                Output::Connect { to, hello } => {
                    let hello = wincode::deserialize(&hello.expect("nobody else knows the pass")).unwrap();
                    assert!(matches!(hello, SchedulerHello::Member(hello) if hello.member == NAME && hello.pass == 9));
                    let connection = self.connection();
                    let side = &mut self.sides[to.scheduler()];
                    assert!(side.claim.is_some(), "it has not taken us in");
                    side.coming.push(connection);
                    side.threads.push(connection);
                    self.membership.handle_connecting(to.scheduler(), to.reader(), connection);
                }
                Output::Disconnect { connection } => {
                    assert!(self.closed.insert(connection), "it is closed twice");
                }
            }
        }
    }

    /// Checks what must hold after every step.
    fn look(&mut self) {
        self.perform();
        while let Some((connection, frame)) = self.membership.poll_frame() {
            assert!(!self.closed.contains(&connection), "who was cut off is told something");
            assert!(read_frame::<BackendToControl>(&frame).all(|message| message.is_ok()));
        }
        self.check();
    }

    fn check(&mut self) {
        let obeys = self.judge().obeys().map_or_else(Claim::default, |(.., claim)| claim);
        assert_eq!((self.membership.obeys(), self.membership.primary()), (obeys, self.judge().primary()));
        assert_eq!(self.membership.lower_epochs(), self.lower_epochs);
        while let Some((scheduler, is_missed)) = self.membership.poll_answer() {
            self.count("answers");
            assert_eq!(self.sides[scheduler].awaits.take(), Some(is_missed), "to scheduler {scheduler}");
        }
        assert!(self.sides.iter().all(|side| side.awaits.is_none()), "somebody is not answered");
        for (scheduler, side) in self.sides.iter().enumerate() {
            assert_eq!(self.membership[scheduler].has_joined(), side.has_joined(), "scheduler {scheduler}");
            assert_eq!(self.membership[scheduler].word == 0, side.claim.is_none(), "a word outlives its session");
        }
        let due = self.membership.poll_timeout();
        let asked = self.sides.iter().filter_map(|side| side.asked);
        for at in asked.chain(self.judge().starts_over_at()) {
            assert!(due <= at, "its timers come too late: {due:?}, {at:?}");
        }
    }

    /// A scheduler's session is over, as far as anybody can see.
    fn note_ended(&mut self, scheduler: usize) {
        let side = std::mem::take(&mut self.sides[scheduler]);
        self.facts.push(Fact::Ended { at: self.now, session: side.session });
    }

    fn note_known(&mut self, is_missed: bool) {
        for side in &mut self.sides {
            if side.asked.take().is_some() {
                side.awaits = Some(is_missed);
            }
        }
    }

    fn lose(&mut self, scheduler: usize) {
        let was_primary = self.judge().primary() == Some(scheduler);
        self.note_ended(scheduler);
        if was_primary {
            self.note_known(true);
        }
        let verdict = self.membership.handle_lost(self.now, scheduler);
        // "The same happens if all schedulers are gone at once", which a single one is.
        let expected = if self.sides.len() == 1 { Verdict::StartOver("") } else { Verdict::Nothing };
        assert_eq!(kind(&verdict), expected);
        if verdict != Verdict::Nothing {
            self.start_over();
        }
    }

    fn start_over(&mut self) {
        self.count("lives");
        self.membership.start_over();
        self.sides.iter_mut().for_each(|side| *side = Side::default());
        self.facts.clear();
        assert_eq!(self.membership.name(), None);
        self.look();
        assert!(self.sides.iter().all(|side| side.control.is_none()), "before the former life is over");
        self.membership.begin_life(self.now);
    }

    /// All that a scheduler claims once it is joined.
    fn claim(&mut self, scheduler: usize) {
        let side = &self.sides[scheduler];
        let (Some(claim), true, session) = (side.claim, side.has_joined(), side.session) else {
            assert_eq!(self.membership.handle_claim(self.now, scheduler), Verdict::Nothing, "it is not joined");
            return;
        };
        let expected = self.judge().of_claim(scheduler, claim);
        let verdict = self.membership.handle_claim(self.now, scheduler);
        assert_eq!(kind(&verdict), expected, "{claim:?} of {scheduler} after {:?}", self.facts);
        match verdict {
            Verdict::Nothing => {}
            Verdict::Leave(_) => return self.lose(scheduler),
            Verdict::StartOver(_) => return self.start_over(),
            Verdict::Obey { former } => {
                self.count(if former.is_some() { "takeovers" } else { "obeyed" });
                // "It ends its connections to the former primary first": and to whom it cannot follow.
                let is_other = |side: &Side| side.claim.is_some_and(|other| other.era != claim.era);
                let left: Vec<usize> = (0..self.sides.len())
                    .filter(|&other| Some(other) == former || other != scheduler && is_other(&self.sides[other]))
                    .collect();
                left.into_iter().for_each(|other| self.note_ended(other));
                self.note_known(false);
            }
        }
        self.facts.push(Fact::Claimed { at: self.now, session, scheduler, claim });
    }

    /// A scheduler takes us in whom we have dialled.
    fn welcome(&mut self, scheduler: usize, luck: u16) {
        let Some(control) = self.sides[scheduler].control.filter(|_| self.sides[scheduler].claim.is_none()) else {
            return;
        };
        assert_eq!(self.membership.handle_connected(control), Some((scheduler, Reader::Scheduler)));
        assert_eq!(self.membership.handle_connected(control), None, "it has been up");
        let claim = match luck % 16 {
            0 => Claim { era: Era(9), epoch: Epoch::NONE },
            1 => Claim { era: Era(9), epoch: Epoch { number: 7, scheduler: scheduler as u16 } },
            2..=4 => self.present(scheduler, i64::from(luck / 16 % 3) - 1),
            _ => Claim { era: ERA, epoch: Epoch::NONE },
        };
        let (threads, knows_all) = (luck / 64 % 3, !luck.is_multiple_of(7));
        let addresses = (0..threads).map(|id| format!("127.0.0.1:{}", 1_000 + id)).collect();
        let model_threads = ModelThreads { addresses, pass: 9 };
        let is_other = luck.is_multiple_of(37) && self.membership.name().is_some();
        let member = if is_other { Member::Backend(BackendId(4)) } else { NAME };
        let is_below = self.judge().obeys().is_some_and(|(.., obeyed)| {
            claim.era == obeyed.era && claim.epoch < obeyed.epoch && claim.epoch != Epoch::NONE
        });
        let is_named = self.membership.name().is_some();
        let welcome = Welcome { member, model_threads, claim, knows_all };
        let taken = self.membership.handle_welcome(self.now, scheduler, welcome);
        assert_eq!(taken.is_err(), is_other);
        if is_other {
            self.lose(scheduler);
            return self.look();
        }
        self.lower_epochs += u64::from(is_below);
        if !is_named {
            self.facts.push(Fact::Named { at: self.now });
        }
        let side = &mut self.sides[scheduler];
        (side.claim, side.knows_all) = (Some(claim), knows_all);
        self.membership[scheduler].word = 1;
        self.perform();
        self.membership[scheduler].push(Reader::Scheduler, &BackendToControl::Leaving { within: Span::ZERO }).unwrap();
        self.claim(scheduler);
    }

    /// What somebody claims: more than all before, as much, or less.
    fn present(&mut self, scheduler: usize, by: i64) -> Claim {
        let number = (i64::from(self.number) + by).max(0) as u32;
        self.number = self.number.max(number);
        let of = self.judge().obeys().filter(|(.., claim)| by == 0 && claim.epoch.number == number);
        let scheduler = of.map_or(scheduler as u16, |(.., claim)| claim.epoch.scheduler);
        Claim { era: ERA, epoch: if number == 0 { Epoch::NONE } else { Epoch { number, scheduler } } }
    }

    fn take_over(&mut self, scheduler: usize, luck: u16) {
        let Some(before) = self.sides[scheduler].claim else { return };
        let Claim { epoch, .. } = match luck % 4 {
            0 => self.present(scheduler, -1),
            1 => self.present(scheduler, 0),
            _ => self.present(scheduler, 1),
        };
        let claim = Claim { epoch, ..before };
        let is_below_obeyed =
            self.judge().obeys().is_some_and(|(.., obeyed)| claim.era == obeyed.era && epoch < obeyed.epoch);
        let is_lower = epoch < before.epoch || is_below_obeyed;
        assert_eq!(self.membership.handle_takeover(scheduler, epoch), !is_lower, "{epoch} after {before:?}");
        if is_lower {
            self.count("lower");
            self.lower_epochs += 1;
            return;
        }
        self.sides[scheduler].claim = Some(claim);
        self.claim(scheduler);
    }

    fn ask(&mut self, scheduler: usize) {
        if self.sides[scheduler].claim.is_none() {
            return;
        }
        let (primary, has_asked) = (self.judge().primary(), self.sides[scheduler].asked.is_some());
        let asks = self.membership.handle_question(self.now, scheduler);
        let side = &mut self.sides[scheduler];
        match primary {
            None => side.awaits = Some(true),
            Some(primary) if primary == scheduler => side.awaits = Some(false),
            Some(_) if !has_asked => side.asked = Some(self.now + MISSED_AFTER),
            Some(_) => {}
        }
        assert_eq!(asks, primary.is_some_and(|primary| primary != scheduler) && !has_asked);
    }

    fn hear(&mut self, scheduler: usize) {
        if self.sides[scheduler].claim.is_none() {
            return;
        }
        let is_primary = self.judge().primary() == Some(scheduler);
        let at = self.now + Span(70);
        let reply = ClockReply { sent_at: self.now, received_at: at, replied_at: at };
        self.membership.handle_heard(scheduler);
        assert_eq!(self.membership.handle_clock(self.now, scheduler, reply), is_primary);
        if is_primary {
            self.note_known(false);
            assert_eq!(self.membership.clock().to_scheduler(self.now), Some(at));
        }
    }

    fn pass(&mut self, span: Span) {
        self.now += span;
        let now = self.now;
        for side in &mut self.sides {
            if side.asked.take_if(|at| *at <= now).is_some() {
                side.awaits = Some(true);
            }
        }
        let is_over = self.judge().starts_over_at().is_some_and(|at| at <= now);
        let verdict = self.membership.handle_timeout(now);
        assert_eq!(kind(&verdict), if is_over { Verdict::StartOver("") } else { Verdict::Nothing });
        while let Some((scheduler, sent_at)) = self.membership.poll_clock_request(now) {
            assert!(self.sides[scheduler].claim.is_some() && sent_at == now);
        }
        if is_over {
            self.sides.iter_mut().for_each(|side| side.awaits = None);
            self.start_over();
        }
    }

    /// A connection ends by itself.
    fn disconnect(&mut self, scheduler: usize, luck: u16) {
        let side = &self.sides[scheduler];
        let all: Vec<ConnectionId> = side.control.into_iter().chain(side.threads.iter().copied()).collect();
        let Some(&connection) = all.get(usize::from(luck) % all.len().max(1)) else { return };
        self.closed.insert(connection);
        assert_eq!(self.membership.handle_disconnected(connection), Some(scheduler));
        self.lose(scheduler);
    }

    fn step(&mut self, (what, scheduler, luck): (u8, u8, u16)) {
        let scheduler = usize::from(scheduler) % self.sides.len();
        match what % 16 {
            0..=3 => self.welcome(scheduler, luck),
            4 | 5 => {
                if let Some(connection) = self.sides[scheduler].coming.pop() {
                    assert!(matches!(
                        self.membership.handle_connected(connection),
                        Some((of, Reader::ModelThread(ModelThreadId(0..=1)))) if of == scheduler
                    ));
                    self.claim(scheduler);
                }
            }
            6 => {
                if self.sides[scheduler].claim.is_some() {
                    self.sides[scheduler].knows_all = true;
                    self.membership.handle_known(scheduler);
                    self.claim(scheduler);
                }
            }
            7 | 8 => self.take_over(scheduler, luck),
            9 => self.ask(scheduler),
            10 => self.hear(scheduler),
            11 => self.disconnect(scheduler, luck),
            12 if luck % 8 == 1 => {
                let primary = self.judge().primary();
                let joins = |&other: &usize| Some(other) != primary && self.sides[other].control.is_some();
                let anew: Vec<usize> = (0..self.sides.len()).filter(joins).collect();
                self.membership.rejoin_standbys();
                anew.into_iter().for_each(|other| self.note_ended(other));
            }
            12 if luck.is_multiple_of(8) => self.pass(Span::from_millis(700)),
            _ => self.pass(Span::from_micros(i64::from(luck % 4_096) * 25)),
        }
        self.look();
    }
}

fn steps() -> impl Strategy<Value = Vec<(u8, u8, u16)>> {
    proptest::collection::vec(any::<(u8, u8, u16)>(), 1..400)
}

proptest! {
    #[test]
    fn a_member_does_what_the_documents_promise(schedulers in 1_usize..=3, steps in steps()) {
        let mut world = World::new(schedulers);
        steps.into_iter().for_each(|step| world.step(step));
    }
}

/// Runs are worth something only if they reach what is judged.
#[test]
fn by_chance_everything_happens() {
    use proptest::{strategy::ValueTree as _, test_runner::TestRunner};
    let mut runner = TestRunner::deterministic();
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    for _ in 0..200 {
        let mut world = World::new(3);
        let steps = steps().new_tree(&mut runner).unwrap().current();
        steps.into_iter().for_each(|step| world.step(step));
        world.counts.into_iter().for_each(|(what, count)| *counts.entry(what).or_default() += count);
    }
    for what in ["answers", "lives", "takeovers", "obeyed", "lower"] {
        assert!(counts.get(what).is_some_and(|count| *count > 100), "{what}: {counts:?}");
    }
}

#[test]
fn a_welcome_that_cannot_be_is_refused_with_what_is_expected() {
    let welcome = |addresses: Vec<String>| Welcome {
        member: NAME,
        model_threads: ModelThreads { addresses, pass: 9 },
        claim: Claim::default(),
        knows_all: true,
    };
    for (addresses, expected) in [
        (
            vec!["rack\u{1b}7".to_owned()],
            "its welcome has 'rack\u{fffd}7' as the address of a ModelThread, expected ip:port",
        ),
        (vec!["127.0.0.1:1".to_owned(); 5_000], "its welcome names 5000 ModelThreads, expected at most "),
    ] {
        let mut membership = Membership::<()>::new(2);
        let refused = membership.handle_welcome(Timestamp(0), 0, welcome(addresses)).unwrap_err();
        assert!(refused.starts_with(expected), "{refused}");
        assert_eq!(membership.name(), None);
    }
    assert_eq!(encode(&7_u32), [7, 0, 0, 0]);
}
