use std::collections::BTreeMap;

use proptest::prelude::*;
use proto::Span;

use super::*;

fn candidate(serial: u32) -> Candidate {
    let exec_at = Timestamp(-i64::from(serial));
    let [anywhere_at, latest, due_at, expected_at] = [7, 1, 2, -3].map(|later| exec_at + Span(later));
    let (size, grants_seen, patience) = (serial + 1, serial, Span(4));
    // One in two has nothing to say of its traffic.
    let traffic = serial.is_multiple_of(2).then_some(Traffic {
        gap: Span(1 + i64::from(serial)),
        arrived_at: exec_at - Span(5),
        fixed: Span(6),
        per_task: Span(8),
        target: serial + 9,
        gpu_price: Traffic::ENDLESS_PRICE - serial,
    });
    Candidate { size, exec_at, anywhere_at, latest, due_at, grants_seen, expected_at, patience, traffic }
}

fn background(serial: u32) -> Background {
    let since = Timestamp(-i64::from(serial));
    Background { size: serial + 1, since, least: Span(5), most: Span(6), grants_seen: serial }
}

proptest! {
    /// The oracle is a map of what was not looked at yet, and lists.
    #[test]
    fn behaves_like_a_map_and_lists(steps in proptest::collection::vec((0u32..8, 0u32..8), 0..200)) {
        let (mut model_end, mut rank_end) = link(8);
        let (mut candidates, mut backgrounds) = (BTreeMap::new(), BTreeMap::new());
        let (mut grants, mut gpus) = (Vec::new(), Vec::new());
        for (serial, (kind, id)) in (0u32..).zip(steps) {
            let at = Timestamp(i64::from(serial) << 33);
            match kind {
                0 | 1 => {
                    let candidate = (kind == 0).then_some(candidate(serial));
                    model_end.post_candidate(ModelId(id), candidate);
                    candidates.insert(id, candidate);
                }
                2 if grants.len() < 8 => {
                    let (model, gpu, timer_at) = (ModelId(id), GpuId(serial), Timestamp(0));
                    let (free_at, gpus, is_open, background_until) = (at, 1, true, Some(at));
                    let grant = Grant { model, gpu, free_at, gpus, is_open, timer_at, background_until };
                    rank_end.post(FromRankThread::Grant(grant));
                    grants.push(grant);
                }
                3 if gpus.len() < 16 => {
                    let update = match id % 3 {
                        0 => GpuUpdate::Planned { exec_at: at, free_at: at + Span(7), is_certain: true },
                        1 => GpuUpdate::Returned,
                        _ => GpuUpdate::Finished { finished_at: at },
                    };
                    model_end.post_gpu(GpuId(id), update);
                    gpus.push((GpuId(id), update));
                }
                4 => {
                    let expected = (!grants.is_empty()).then(|| grants.remove(0));
                    prop_assert_eq!(model_end.poll(), expected.map(FromRankThread::Grant));
                }
                5 | 6 => {
                    let background = (kind == 5).then_some(background(serial));
                    model_end.post_background(ModelId(id), background);
                    backgrounds.insert(id, background);
                }
                _ => match rank_end.poll() {
                    None => prop_assert!(candidates.is_empty() && backgrounds.is_empty() && gpus.is_empty()),
                    Some(FromModelThread::Gpu(gpu, update)) => prop_assert_eq!((gpu, update), gpus.remove(0)),
                    Some(FromModelThread::Candidate(model, candidate)) => {
                        prop_assert!(gpus.is_empty(), "answers to grants come first");
                        prop_assert_eq!(Some(candidate), candidates.remove(&model.0));
                    }
                    Some(FromModelThread::Background(model, background)) => {
                        prop_assert_eq!(Some(background), backgrounds.remove(&model.0));
                    }
                },
            }
        }
    }
}

#[test]
fn prices_are_those_that_were_posted_last() {
    let (model_end, mut rank_end) = link(2);
    let price = |price| Price { price, execution_ms: 2.5 };
    assert_eq!(model_end.price(ModelId(1)), Price::default());
    for posted in [price(0.1), price(f32::INFINITY), price(3e5)] {
        rank_end.post_price(ModelId(1), posted);
        assert_eq!((model_end.price(ModelId(1)), model_end.price(ModelId(0))), (posted, Price::default()));
    }
    // Of a model that is not there nothing comes.
    rank_end.post_price(ModelId(2), price(1.0));
    assert_eq!(model_end.price(ModelId(2)), Price::default());
}
