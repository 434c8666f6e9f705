//! What a service manager (systemd) is told of a process, as sd_notify(3) has it. No IO: `service` sends it.
//!
//! A process has started (`READY=1`) once it serves. One that lacks nothing of its own, and waits for members on other
//! hosts, has started all the same after [`PATIENCE`]: it must not be killed for their sake, nor keep a boot or a
//! package's installation waiting. Models take as long to load as they take, which extends the manager's time.

use std::fmt::Write as _;

use proto::{Span, Timestamp};

use crate::vitals::{Stage, Vitals};

/// How often it is looked what there is to tell ..
const EVERY: Span = Span::from_millis(250);
/// .. and at most so often, however short a watchdog's time is.
const EVERY_MIN: Span = Span::from_millis(10);

/// How long others are waited for before a process has started without them.
const PATIENCE: Span = Span::from_millis(10_000);
/// While models load the manager is told so often ..
const LOADING_EVERY: Span = Span::from_millis(10_000);
/// .. to wait for so long from then on.
const LOADING_MORE: Span = Span::from_millis(60_000);
const _: () = assert!(LOADING_EVERY.0 * 2 < LOADING_MORE.0);

/// Bytes of a status; the manager keeps it, and shows it in a line.
const STATUS_BYTES_MAX: usize = 200;

/// What is to be told, and has been.
#[derive(Debug)]
pub(crate) struct Notices {
    /// How often the manager wants to hear that the process lives.
    watchdog: Option<Span>,
    told: Told,
    /// What [`Self::poll`] has yielded last.
    about_to_tell: Told,
}

#[derive(Debug, Clone, Default)]
struct Told {
    waits_since: Option<Timestamp>,
    has_started: bool,
    is_ending: bool,
    status: String,
    lived_at: Option<Timestamp>,
    loaded_at: Option<Timestamp>,
}

impl Notices {
    /// For a manager that ends a process of which it has heard nothing for `watchdog`.
    pub(crate) fn new(watchdog: Option<Span>) -> Self {
        Self { watchdog, told: Told::default(), about_to_tell: Told::default() }
    }

    /// How often [`Self::poll`] wants to be asked: a quarter of a watchdog's time, within reason.
    pub(crate) fn every(&self) -> Span {
        self.watchdog.map_or(EVERY, |watchdog| (watchdog / 4).clamp(EVERY_MIN, EVERY))
    }

    /// The next message, if there is one: lines of assignments.
    pub(crate) fn poll(&mut self, now: Timestamp, vitals: &Vitals) -> Option<String> {
        let (live, ready, stage) = (vitals.live(now), vitals.ready(now), vitals.stage());
        let mut next = self.told.clone();
        let mut lines = String::new();
        let is_due = |at: Option<Timestamp>, every: Span| at.is_none_or(|at| at + every <= now);

        next.is_ending = stage == Stage::Ending;
        if next.is_ending && !self.told.is_ending {
            lines.push_str("STOPPING=1\n");
        }
        next.waits_since = (stage == Stage::Waiting).then(|| next.waits_since.unwrap_or(now));
        let has_waited = next.waits_since.is_some_and(|since| since + PATIENCE <= now);
        if !next.has_started && stage != Stage::Ending && (ready.is_ok() || has_waited) {
            next.has_started = true;
            lines.push_str("READY=1\n");
        }
        if !next.has_started && stage == Stage::Loading && live.is_ok() && is_due(next.loaded_at, LOADING_EVERY) {
            next.loaded_at = Some(now);
            let _ = writeln!(lines, "EXTEND_TIMEOUT_USEC={}", LOADING_MORE.as_nanos() / 1_000);
        }
        if let Some(watchdog) = self.watchdog
            && live.is_ok()
            && is_due(next.lived_at, watchdog / 2)
        {
            next.lived_at = Some(now);
            lines.push_str("WATCHDOG=1\n");
        }
        next.status = match (live, ready) {
            (Err(why), _) => one_line(&format!("stalled: {why}")),
            _ if stage == Stage::Ending => "told to end: what is under way is finished".to_owned(),
            (_, Err(why)) => one_line(&format!("not ready: {why}")),
            _ => "ready".to_owned(),
        };
        // A stall is told by how long it has lasted, which is another text each time.
        if next.status != self.told.status && !(is_stall(&next.status) && is_stall(&self.told.status)) {
            let _ = writeln!(lines, "STATUS={}", next.status);
        }
        self.told.waits_since = next.waits_since;
        self.about_to_tell = next;
        (!lines.is_empty()).then_some(lines)
    }

    /// The manager has what was yielded last; without this it is yielded again.
    pub(crate) fn handle_told(&mut self) {
        self.told = self.about_to_tell.clone();
    }
}

fn is_stall(status: &str) -> bool {
    status.starts_with("stalled: ")
}

/// What would begin another assignment is a space.
fn one_line(text: &str) -> String {
    let mut line = text.replace(|found: char| found.is_control(), " ");
    line.truncate(line.floor_char_boundary(STATUS_BYTES_MAX));
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: i64) -> Timestamp {
        Timestamp::ZERO + Span::from_millis(ms)
    }

    /// What is told at a time, line by line.
    fn told(notices: &mut Notices, ms: i64, vitals: &Vitals) -> Vec<String> {
        let text = notices.poll(at(ms), vitals).unwrap_or_default();
        notices.handle_told();
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_process_has_started_once_it_serves_and_each_change_is_told_once() {
        let (mut notices, vitals) = (Notices::new(None), Vitals::default());
        assert_eq!(told(&mut notices, 0, &vitals), ["STATUS=not ready: it is about to start"]);
        assert_eq!(told(&mut notices, 250, &vitals), [""; 0]);
        vitals.set_ready(Ok(()));
        assert_eq!(told(&mut notices, 500, &vitals), ["READY=1", "STATUS=ready"]);
        vitals.set_ready(Err("it has no scheduler"));
        assert_eq!(told(&mut notices, 750, &vitals), ["STATUS=not ready: it has no scheduler"]);
        vitals.set_ready(Ok(()));
        assert_eq!(told(&mut notices, 1_000, &vitals), ["STATUS=ready"]);
        vitals.set_ending();
        vitals.set_ready(Err("it is about to end"));
        let ending = ["STOPPING=1", "STATUS=told to end: what is under way is finished"];
        assert_eq!(told(&mut notices, 1_250, &vitals), ending);
        assert_eq!(told(&mut notices, 60_000, &vitals), [""; 0]);
    }

    #[test]
    fn whoever_waits_for_others_has_started_after_ten_seconds_and_who_ends_before_has_not() {
        let (mut notices, vitals) = (Notices::new(None), Vitals::default());
        vitals.set_ready(Err("it has no scheduler"));
        assert_eq!(told(&mut notices, 0, &vitals).len(), 1);
        assert_eq!(told(&mut notices, 9_999, &vitals), [""; 0]);
        assert_eq!(told(&mut notices, 10_000, &vitals), ["READY=1"]);
        let (mut notices, vitals) = (Notices::new(None), Vitals::default());
        assert_eq!(told(&mut notices, 0, &vitals).len(), 1);
        vitals.set_ending();
        assert!(!told(&mut notices, 10_000, &vitals).contains(&"READY=1".to_owned()));
    }

    #[test]
    fn models_load_as_long_as_they_take_and_others_are_waited_for_from_then_on() {
        let (mut notices, vitals) = (Notices::new(None), Vitals::default());
        vitals.set_loading("models are loaded");
        let first = ["EXTEND_TIMEOUT_USEC=60000000", "STATUS=not ready: models are loaded"];
        assert_eq!(told(&mut notices, 0, &vitals), first);
        for ms in (250..600_000).step_by(250) {
            let extended: &[&str] = if ms % 10_000 == 0 { &first[..1] } else { &[] };
            assert_eq!(told(&mut notices, ms, &vitals), extended, "{ms}");
        }
        vitals.set_ready(Err("it has no scheduler"));
        assert_eq!(told(&mut notices, 600_000, &vitals).len(), 1);
        assert_eq!(told(&mut notices, 609_999, &vitals), [""; 0]);
        assert_eq!(told(&mut notices, 610_000, &vitals), ["READY=1"]);
    }

    #[test]
    fn the_watchdog_is_fed_twice_in_its_time_as_long_as_all_threads_move() {
        let (mut notices, vitals) = (Notices::new(Some(Span::from_millis(3_000))), Vitals::default());
        let heart = vitals.heart("rank");
        vitals.set_ready(Ok(()));
        let mut fed = Vec::new();
        let mut stalled = 0;
        for ms in (0..20_000).step_by(250) {
            if !(6_000..12_000).contains(&ms) {
                heart.beat(at(ms));
            }
            let told = told(&mut notices, ms, &vitals);
            fed.extend(told.iter().any(|line| line == "WATCHDOG=1").then_some(ms));
            stalled += told.iter().filter(|line| line.starts_with("STATUS=stalled: thread rank ")).count();
        }
        assert_eq!(fed, [0, 1_500, 3_000, 4_500, 6_000, 7_500, 12_000, 13_500, 15_000, 16_500, 18_000, 19_500]);
        assert_eq!(stalled, 1, "how long it lasts is no news");
    }

    #[test]
    fn a_watchdog_is_heard_in_time_and_takes_no_processor() {
        let every = |ms| Notices::new(Some(Span::from_millis(ms))).every();
        assert_eq!([30_000, 400, 1].map(every), [250, 100, 10].map(Span::from_millis));
        assert_eq!(Notices::new(None).every(), Span::from_millis(250));
    }

    #[test]
    fn what_could_not_be_told_is_told_again() {
        let (mut notices, vitals) = (Notices::new(Some(Span::from_millis(3_000))), Vitals::default());
        vitals.set_ready(Ok(()));
        let first = notices.poll(at(0), &vitals);
        assert_eq!(first.as_deref(), Some("READY=1\nWATCHDOG=1\nSTATUS=ready\n"));
        assert_eq!(notices.poll(at(250), &vitals), first);
        notices.handle_told();
        assert_eq!(notices.poll(at(500), &vitals), None);
    }

    #[test]
    fn a_status_is_one_line_of_bounded_length_whatever_it_names() {
        let (mut notices, vitals) = (Notices::new(None), Vitals::default());
        vitals.set_ready(Err(&format!("model a\nREADY=1\r{}", "é".repeat(500))));
        let told = told(&mut notices, 0, &vitals);
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].starts_with("STATUS=not ready: model a READY=1 é"), "{told:?}");
        assert!(told[0].len() <= "STATUS=".len() + STATUS_BYTES_MAX, "{told:?}");
    }
}
