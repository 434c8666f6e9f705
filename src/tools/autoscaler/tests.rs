use proptest::{collection::vec, prelude::*};

use super::*;

fn at(ms: i64) -> Timestamp {
    Timestamp(0) + Span::from_millis(ms)
}

fn range(text: &str) -> Range {
    Range::try_from(text.to_owned()).unwrap()
}

/// So many are needed, and these serve.
fn look(needed: impl Into<Option<u32>>, serving: impl IntoIterator<Item = usize>) -> Look {
    Look { needed: needed.into(), reason: String::new(), serving: serving.into_iter().collect() }
}

/// A cluster whose backends serve and leave at once, looked at every half second.
struct World {
    core: Autoscaler,
    now: Timestamp,
    serving: BTreeSet<usize>,
}

impl World {
    fn new(text: &str) -> Self {
        let range = range(text);
        Self { core: Autoscaler::new(range), now: at(0), serving: (0..range.min as usize).collect() }
    }

    fn look(&mut self, needed: impl Into<Option<u32>>) -> Option<Step> {
        self.now += Span::from_millis(500);
        let step = self.core.handle_look(self.now, Some(&look(needed, self.serving.clone())));
        match step {
            Some(Step::Start(place)) => assert!(self.serving.insert(place)),
            Some(Step::End(place)) => {
                assert!(self.serving.remove(&place));
                assert_eq!(self.core.handle_end(self.now, place, true), None);
            }
            _ => {}
        }
        step
    }

    /// How many there are after so many looks.
    fn after(&mut self, looks: usize, needed: impl Into<Option<u32>> + Copy) -> usize {
        (0..looks).for_each(|_| _ = self.look(needed));
        self.serving.len()
    }
}

#[test]
fn bounds_are_two_numbers() {
    assert_eq!(range("2..16"), Range { min: 2, max: 16 });
    assert_eq!(range("3..3"), Range { min: 3, max: 3 });
    for wrong in ["", "2", "..", "2..", "..16", "0..4", "5..4", "-1..4", "2...4", "2..=4", "2..4294967296", "a..b"] {
        assert!(Range::try_from(wrong.to_owned()).is_err(), "{wrong}");
    }
}

#[test]
fn as_many_are_there_as_are_needed_and_the_newest_leave_first() {
    let mut world = World::new("2..16");
    assert_eq!(world.after(10, 2), 2);
    let starts: Vec<_> = (0..4).map(|_| world.look(5)).collect();
    // The first is seen to serve in the look after its start, in which the next one is started.
    assert_eq!(starts, [Some(Step::Start(2)), Some(Step::Start(3)), Some(Step::Start(4)), None]);
    let ends: Vec<_> = (0..9).map(|_| world.look(3)).collect();
    assert_eq!(ends[..6], [None; 6], "fewer must be enough for 3 s");
    assert_eq!(ends[6..], [Some(Step::End(4)), Some(Step::End(3)), None]);
    assert_eq!(world.core.here(), 3);
}

#[test]
fn rates_that_jump_go_to_the_bounds_and_not_beyond() {
    let mut world = World::new("2..16");
    assert_eq!(world.after(100, 1_600), 16);
    assert_eq!(world.after(100, 0), 2);
    assert_eq!(world.after(100, u32::MAX), 16);
}

#[test]
fn advice_that_flaps_does_not_flap() {
    let mut world = World::new("1..8");
    // Up at once, and no way down as long as it says so again and again.
    let counts: Vec<_> = (0..200).map(|turn| world.after(1 + turn % 5, if turn % 2 == 0 { 8 } else { 1 })).collect();
    assert!(counts.is_sorted() && counts.last() == Some(&8), "{counts:?}");
}

#[test]
fn without_advice_nothing_changes() {
    let mut world = World::new("1..8");
    assert_eq!(world.after(20, 6), 6);
    assert_eq!(world.after(200, None), 6);
    assert!((0..200).all(|turn| world.core.handle_look(world.now + Span::from_millis(turn), None).is_none()));
    // What was said before is forgotten: fewer must be enough for 3 s from now on.
    world.after(5, 2);
    world.look(None);
    assert_eq!(world.after(6, 2), 6);
    assert_eq!(world.after(20, 2), 2);
}

#[test]
fn one_that_somebody_else_ends_is_replaced_if_it_is_needed() {
    let mut world = World::new("2..4");
    world.after(10, 4);
    for (needed, then) in [(Some(4), Some(Step::Start(1))), (Some(3), None)] {
        world.serving.remove(&1);
        assert_eq!(world.core.handle_end(world.now, 1, true), None);
        assert_eq!(world.look(needed), then);
    }
    // There are as many as there must be, whether it is known how many are needed or not.
    for place in [0, 2] {
        world.serving.remove(&place);
        world.core.handle_end(world.now, place, true);
    }
    assert_eq!((world.look(None), world.look(None)), (Some(Step::Start(0)), None));
}

#[test]
fn starts_that_fail_are_repeated_with_growing_pauses() {
    let mut core = Autoscaler::new(range("1..4"));
    let (mut now, mut pauses) = (at(0), Vec::new());
    for _ in 0..9 {
        assert_eq!(core.handle_look(now, Some(&look(4, [0]))), Some(Step::Start(1)));
        let pause = core.handle_end(now, 1, false).unwrap();
        pauses.push(pause.0 / 1_000_000_000);
        assert_eq!(core.handle_look(now + pause - Span(1), Some(&look(4, [0]))), None);
        now += pause;
    }
    assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 300, 300, 300]);
    // One that serves makes up for it.
    core.handle_look(now, Some(&look(4, [0])));
    assert_eq!(core.handle_look(now, Some(&look(4, [0, 1]))), Some(Step::Start(2)));
    assert_eq!(core.handle_end(now, 2, false), Some(PAUSE.0));
}

#[test]
fn one_that_hangs_as_it_comes_or_leaves_does_not_hold_up_the_others_for_ever() {
    let mut core = Autoscaler::new(range("1..4"));
    let mut seen = |ms, needed| core.handle_look(at(ms), Some(&look(needed, [0])));
    assert_eq!((seen(0, 4), seen(59_999, 4)), (Some(Step::Start(1)), None));
    assert_eq!((seen(60_000, 4), seen(60_001, 4)), (Some(Step::TellLate(1)), Some(Step::Start(2))));
    assert_eq!((seen(120_001, 1), seen(123_001, 1)), (Some(Step::TellLate(2)), Some(Step::End(2))));
    assert_eq!((seen(153_000, 1), seen(153_001, 1), seen(999_999, 1)), (None, Some(Step::Kill(2)), None));
    assert_eq!(core.handle_end(at(999_999), 2, false), None, "it was told to end, however it did");
    assert_eq!(core.handle_look(at(1_000_000), Some(&look(1, [0]))), Some(Step::End(1)));
}

#[derive(Debug, Clone)]
enum Event {
    Look(Option<Look>),
    End { place: usize, is_in_order: bool },
}

/// All that has happened, the oldest first, with what was done then.
type History = Vec<(Timestamp, Event, Option<Step>)>;

/// Those that there are, the oldest first, each with the part of the history since its start.
fn there(range: Range, history: &History) -> Vec<(usize, usize)> {
    let mut there: Vec<(usize, usize)> = (0..range.min as usize).map(|place| (place, 0)).collect();
    for (index, (_, event, step)) in history.iter().enumerate() {
        if let Event::End { place: ended, .. } = event {
            there.retain(|(place, _)| place != ended);
        }
        if let Some(Step::Start(place)) = step {
            there.push((*place, index));
        }
    }
    there
}

/// When a step was last taken, in a part of the history.
fn taken(part: &[(Timestamp, Event, Option<Step>)], step: Step) -> Option<Timestamp> {
    part.iter().rfind(|(.., taken)| *taken == Some(step)).map(|(when, ..)| *when)
}

/// What is to be done, by going through all that has happened. The last is the look that is asked about.
fn expected(range: Range, history: &History) -> Option<Step> {
    let (now, Event::Look(this), _) = history.last()? else { return None };
    let there = there(range, history);
    let wanted_of = |look: &Look, here: usize| look.needed.unwrap_or(here as u32).clamp(range.min, range.max) as usize;
    let mut is_busy = false;
    for &(place, since) in &there {
        let own = &history[since..];
        let serves =
            |(_, event, _): &(_, Event, _)| matches!(event, Event::Look(Some(look)) if look.serving.contains(&place));
        let is_late = taken(own, Step::TellLate(place)).is_some();
        if let Some(when) = taken(own, Step::End(place)) {
            is_busy = true;
            if taken(own, Step::Kill(place)).is_none() && when + LEAVES_WITHIN <= *now {
                return Some(Step::Kill(place));
            }
        } else if let Some(when) = taken(own, Step::Start(place))
            && !is_late
            && !own.iter().skip(1).any(serves)
        {
            if when + COMES_WITHIN <= *now {
                return Some(Step::TellLate(place));
            }
            is_busy = true;
        }
    }
    let this = this.as_ref().filter(|_| !is_busy)?;
    let wanted = wanted_of(this, there.len());
    if wanted > there.len() {
        return (pauses_until(range, history) <= *now).then(|| {
            let place = (0..).find(|place| there.iter().all(|(other, _)| other != place)).unwrap();
            Step::Start(place)
        });
    }
    // All looks, back to one of 3 s ago at least, said that fewer are enough than there were then.
    for until in (1..=history.len()).rev() {
        let (when, event, _) = &history[until - 1];
        let Event::Look(look) = event else { continue };
        let mut before: History = history[..until].to_vec();
        before.last_mut().unwrap().2 = None;
        let before_end = self::there(range, &before).into_iter();
        let is_there = |&(place, since): &(usize, usize)| taken(&before[since..], Step::End(place)).is_none();
        let here = before_end.filter(is_there).count();
        if look.as_ref().is_none_or(|look| wanted_of(look, here) >= here) {
            return None;
        }
        if *when + FEWER_FOR <= *now {
            return there.last().map(|(place, _)| Step::End(*place));
        }
    }
    None
}

/// Failures since the last backend came, each with twice the pause of the one before.
fn pauses_until(range: Range, history: &History) -> Timestamp {
    let (mut pause, mut until) = (PAUSE.0, Timestamp::PAST);
    for index in 0..history.len() {
        let before = history[..index].to_vec();
        match &history[index] {
            (when, Event::End { place, is_in_order: false }, _) => {
                let of = there(range, &before).into_iter().find(|(other, _)| other == place);
                if of.is_some_and(|(_, since)| taken(&before[since..], Step::End(*place)).is_none()) {
                    until = *when + pause;
                    pause = (pause * 2).min(PAUSE.1);
                }
            }
            (_, Event::Look(Some(look)), _) => {
                let comes = |&(place, since): &(usize, usize)| {
                    let own = &before[since..];
                    let has_served = own
                        .iter()
                        .skip(1)
                        .any(|(_, event, _)| matches!(event, Event::Look(Some(look)) if look.serving.contains(&place)));
                    look.serving.contains(&place)
                        && taken(own, Step::Start(place)).is_some()
                        && !has_served
                        && taken(own, Step::TellLate(place)).is_none()
                };
                if there(range, &before).iter().any(comes) {
                    pause = PAUSE.0;
                }
            }
            _ => {}
        }
    }
    until
}

fn events() -> impl Strategy<Value = Vec<(i64, Event)>> {
    let needed = prop_oneof![1 => Just(None), 6 => (0u32..9).prop_map(Some), 1 => Just(Some(u32::MAX))];
    // Mostly all serve.
    let serving = prop_oneof![3 => Just((0..8).collect()), 1 => vec(0usize..8, 0..8)];
    let seen = (needed, serving).prop_map(|(needed, serving)| Event::Look(Some(look(needed, serving))));
    let ended = (0usize..8, any::<bool>()).prop_map(|(place, is_in_order)| Event::End { place, is_in_order });
    let event = prop_oneof![8 => seen, 1 => Just(Event::Look(None)), 2 => ended];
    let pause_ms = prop_oneof![6 => 0i64..2_000, 1 => 2_000i64..70_000];
    vec((pause_ms, event), 1..80)
}

proptest! {
    /// Whatever is seen and whoever ends, it does what going through all of the history says, and stays within bounds.
    #[test]
    fn each_step_is_the_one_that_the_history_asks_for(min in 1u32..4, more in 0u32..4, events in events()) {
        let range = Range { min, max: min + more };
        let (mut core, mut history, mut now) = (Autoscaler::new(range), History::new(), at(0));
        for (pause_ms, event) in events {
            now += Span::from_millis(pause_ms);
            history.push((now, event.clone(), None));
            let step = match &event {
                Event::Look(look) => core.handle_look(now, look.as_ref()),
                Event::End { place, is_in_order } => {
                    core.handle_end(now, *place, *is_in_order);
                    None
                }
            };
            prop_assert_eq!(step, expected(range, &history), "{:?}", history);
            let here = core.here();
            history.last_mut().unwrap().2 = step;
            let there = there(range, &history);
            prop_assert!(there.len() <= range.max as usize);
            if let Some(Step::End(_)) = step {
                prop_assert!(range.min <= here, "{:?}", history);
            }
        }
    }
}
