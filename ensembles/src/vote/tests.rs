use proptest::prelude::*;

use super::*;

fn at(ms: i64) -> Timestamp {
    Timestamp(ms * 1_000_000)
}

fn ms(ms: i64) -> Span {
    Span::from_millis(ms)
}

#[test]
fn all_are_asked_at_once_and_the_last_closes_it() {
    let mut vote = Vote::new(vec![(2, ms(5)), (0, ms(1))], Order::AtOnce, at(100), ms(2));
    assert_eq!((vote.least(), vote.poll_timeout()), (ms(1), Some(at(98))));
    let asked = [vote.poll_action(at(0)), vote.poll_action(at(0)), vote.poll_action(at(0))];
    let ask = |member| Some(Action::Ask { member, until: at(96) });
    assert_eq!(asked, [ask(2), ask(0), None]);
    assert!(vote.handle_end(2, false) && vote.poll_action(at(50)).is_none());
    assert!(!vote.handle_end(2, false), "it has ended already");
    assert!(vote.handle_end(0, false));
    assert_eq!([vote.poll_action(at(50)), vote.poll_action(at(50))], [Some(Action::Close), None]);
}

#[test]
fn it_leaves_before_its_deadline_with_what_is_there() {
    let mut vote = Vote::new(vec![(0, ms(1)), (1, ms(1))], Order::AtOnce, at(100), ms(2));
    while vote.poll_action(at(0)).is_some() {}
    vote.handle_end(0, false);
    vote.handle_timeout(at(97));
    assert_eq!(vote.poll_action(at(97)), None);
    vote.handle_timeout(at(98));
    assert!(!vote.handle_end(1, false), "it is late");
    let actions = [vote.poll_action(at(98)), vote.poll_action(at(98)), vote.poll_action(at(98))];
    assert_eq!(actions, [Some(Action::Cancel { member: 1 }), Some(Action::Close), None]);
    let mut endless = Vote::new(vec![(0, ms(1))], Order::AtOnce, Timestamp::NEVER, ms(2));
    assert_eq!(endless.poll_timeout(), None);
    assert_eq!(endless.poll_action(at(0)), Some(Action::Ask { member: 0, until: Timestamp::NEVER }));
}

#[test]
fn the_dear_one_is_asked_only_if_the_cheap_one_is_not_sure() {
    let cascade = || Vote::new(vec![(0, ms(10)), (1, ms(30))], Order::UntilConfident, at(104), ms(2));
    let mut vote = cascade();
    // 100 ms, of which both take 40: each has 30 more.
    assert_eq!(vote.poll_action(at(0)), Some(Action::Ask { member: 0, until: at(40) }));
    assert_eq!(vote.poll_action(at(0)), None);
    vote.handle_end(0, true);
    assert_eq!(vote.poll_action(at(20)), Some(Action::Close));
    let mut vote = cascade();
    vote.poll_action(at(0));
    vote.handle_end(0, false);
    assert_eq!(vote.poll_action(at(20)), Some(Action::Ask { member: 1, until: at(100) }), "all that is left");
    vote.handle_end(1, false);
    assert_eq!(vote.poll_action(at(30)), Some(Action::Close));
    // Where there is no time for the dear one the cheap one has all.
    let mut short = Vote::new(vec![(0, ms(10)), (1, ms(30))], Order::UntilConfident, at(34), ms(2));
    assert_eq!(short.poll_action(at(0)), Some(Action::Ask { member: 0, until: at(30) }));
}

#[test]
fn a_variant_that_has_no_time_is_followed_by_a_cheaper_one() {
    let variants = |deadline| Vote::new(vec![(0, ms(30)), (1, ms(5))], Order::UntilAnswered, at(deadline), ms(2));
    let mut vote = variants(104);
    // 100 ms, of which twice 5 are left for the cheaper one.
    assert_eq!(vote.poll_action(at(0)), Some(Action::Ask { member: 0, until: at(90) }));
    assert_eq!(vote.poll_action(at(0)), None);
    assert!(vote.handle_end(0, false));
    assert_eq!(vote.poll_action(at(60)), Some(Action::Ask { member: 1, until: at(100) }), "all that is left");
    vote.handle_end(1, true);
    assert_eq!([vote.poll_action(at(70)), vote.poll_action(at(70))], [Some(Action::Close), None]);
    // Whoever answers is enough.
    let mut vote = variants(104);
    vote.poll_action(at(0));
    vote.handle_end(0, true);
    assert_eq!(vote.poll_action(at(80)), Some(Action::Close));
    // The better one needs 30, and must leave 10.
    let mut vote = variants(43);
    assert_eq!(vote.poll_action(at(0)), Some(Action::Ask { member: 1, until: at(39) }));
    // If the cheaper one cannot be asked nothing is left for it, and without an objective nothing need be.
    let mut alone = Vote::new(vec![(0, ms(30)), (1, Span::ZERO)], Order::UntilAnswered, at(43), ms(2));
    assert_eq!(alone.poll_action(at(0)), Some(Action::Ask { member: 0, until: at(39) }));
    let mut endless = Vote::new(vec![(0, ms(30)), (1, ms(5))], Order::UntilAnswered, Timestamp::NEVER, ms(2));
    assert_eq!(endless.poll_action(at(0)), Some(Action::Ask { member: 0, until: Timestamp::NEVER }));
}

#[test]
fn who_fails_early_leaves_the_rest_of_the_time_to_another() {
    let versions = || Vote::new(vec![(1, ms(30)), (0, ms(5))], Order::OnFailure, at(104), ms(2));
    let mut vote = versions();
    assert_eq!(vote.poll_action(at(0)), Some(Action::Ask { member: 1, until: at(100) }), "nothing is left for others");
    assert_eq!(vote.poll_action(at(1)), None);
    vote.handle_end(1, false);
    assert_eq!(vote.poll_action(at(7)), Some(Action::Ask { member: 0, until: at(100) }));
    vote.handle_end(0, true);
    assert_eq!(vote.poll_action(at(9)), Some(Action::Close));
    let mut vote = versions();
    vote.poll_action(at(0));
    vote.handle_end(1, true);
    assert_eq!(vote.poll_action(at(50)), Some(Action::Close), "one answer is enough");
}

#[test]
fn without_anybody_to_ask_it_is_over_at_once() {
    let mut vote = Vote::new(Vec::new(), Order::AtOnce, at(10), ms(1));
    assert_eq!([vote.poll_action(at(0)), vote.poll_action(at(0))], [Some(Action::Close), None]);
}

proptest! {
    /// Whatever becomes of whom and when: it closes once and never later than it must; nobody is asked twice or after
    /// that, and whoever is under way then is cancelled.
    #[test]
    fn it_closes_once(
        count in 0..6usize,
        order in prop_oneof![
            Just(Order::AtOnce), Just(Order::UntilConfident), Just(Order::UntilAnswered), Just(Order::OnFailure),
        ],
        events in proptest::collection::vec((0..7usize, any::<bool>(), 0..9i64), 0..20),
    ) {
        let members = (0..count).map(|member| (member, ms(1))).collect();
        let one_by_one = order != Order::AtOnce;
        let mut vote = Vote::new(members, order, at(40), ms(1));
        let (mut now, mut under_way, mut asked, mut closed) = (0, Vec::new(), Vec::new(), 0);
        let drain = |vote: &mut Vote, now: i64, under_way: &mut Vec<usize>, asked: &mut Vec<usize>, closed: &mut i32| {
            while let Some(action) = vote.poll_action(at(now)) {
                match action {
                    Action::Ask { member, until } => {
                        assert!(*closed == 0 && !asked.contains(&member) && until <= at(38).max(at(now) + ms(1)));
                        asked.push(member);
                        under_way.push(member);
                    }
                    Action::Cancel { member } => under_way.retain(|other| *other != member),
                    Action::Close => {
                        assert!(under_way.is_empty(), "{under_way:?}");
                        *closed += 1;
                    }
                }
            }
            assert!(!one_by_one || under_way.len() <= 1);
        };
        drain(&mut vote, now, &mut under_way, &mut asked, &mut closed);
        for (member, is_enough, later) in events {
            now += later;
            let counts = under_way.contains(&member) && closed == 0;
            vote.handle_timeout(at(now));
            if now < 39 {
                prop_assert_eq!(vote.handle_end(member, is_enough), counts);
                under_way.retain(|other| *other != member);
            }
            drain(&mut vote, now, &mut under_way, &mut asked, &mut closed);
            prop_assert!(closed == 1 || !under_way.is_empty(), "it waits for nobody");
            prop_assert!(now < 39 || closed == 1);
        }
        vote.handle_timeout(at(40));
        drain(&mut vote, 40, &mut under_way, &mut asked, &mut closed);
        prop_assert_eq!(closed, 1);
        prop_assert!(one_by_one || asked == (0..count).collect::<Vec<_>>());
    }
}
