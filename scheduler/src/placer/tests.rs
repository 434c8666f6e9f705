use std::cell::Cell;

use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

const EPOCH: Span = Span::from_millis(60_000);

fn config(sub_clusters: u16, moves_max: u32) -> PlacementConfig {
    PlacementConfig {
        sub_clusters,
        epoch: EPOCH,
        moves_max,
        rate_max_rps: None,
        memory_max_bytes: None,
        memory_weight: 1.0,
        pins: BTreeMap::new(),
    }
}

/// Backends that do what they are told, or fail.
struct World {
    placer: Placer,
    now: Timestamp,
    places: Places,
    /// Of each load: whether it fails.
    fails: Box<dyn FnMut() -> bool>,
    /// Models that were loaded somewhere since the last epoch began.
    copied: BTreeSet<String>,
}

struct Places {
    seats: BTreeMap<BackendId, Seat>,
    /// By model: its rate, and who hosts it.
    models: BTreeMap<String, (f64, BTreeSet<BackendId>)>,
    /// How many models were looked at.
    looks: Cell<usize>,
}

impl Whereabouts for Places {
    fn backends(&self) -> BTreeMap<BackendId, Seat> {
        self.seats.clone()
    }

    fn names(&self) -> Vec<&str> {
        self.models.keys().map(String::as_str).collect()
    }

    fn seen(&self, name: &str) -> Option<Seen> {
        self.looks.update(|looks| looks + 1);
        let (rate_rps, hosts) = self.models.get(name)?;
        let hosts: BTreeSet<BackendId> = hosts.iter().copied().filter(|id| self.seats.contains_key(id)).collect();
        Some(Seen { rate_rps: *rate_rps, bytes: 0, planned: hosts.clone(), hosts, is_elsewhere: false })
    }

    fn rate_rps(&self, name: &str) -> f64 {
        self.models.get(name).map_or(0.0, |(rate_rps, _)| *rate_rps)
    }
}

impl World {
    fn new(config: PlacementConfig, backends: u32, models: u32) -> Self {
        let all: BTreeSet<BackendId> = (0..backends).map(BackendId).collect();
        let mut placer = Placer::new(config);
        placer.handle_standing(Timestamp(0), true);
        let seat = Seat { sub_cluster: None, gpus: 4 };
        Self {
            placer,
            now: Timestamp(0),
            places: Places {
                seats: all.iter().map(|&backend| (backend, seat)).collect(),
                models: (0..models).map(|number| (name(number), (f64::from(number + 1), all.clone()))).collect(),
                looks: Cell::new(0),
            },
            fails: Box::new(|| false),
            copied: BTreeSet::new(),
        }
    }

    /// Does what is ordered until nothing is any more. After each step all models are hosted that were.
    fn settle(&mut self) {
        assert!((0..10_000).any(|_| self.step()), "it goes in circles");
    }

    /// Does what is to be done now, and waits for what comes after it. True if nothing does within this epoch.
    fn step(&mut self) -> bool {
        self.placer.handle_timeout(self.now, &self.places);
        while let Some(order) = self.placer.poll_order() {
            self.carry_out(order);
        }
        let next = self.placer.poll_timeout().filter(|&at| at <= self.now + SLICE_EVERY);
        self.now = self.now.max(next.unwrap_or(Timestamp::PAST));
        next.is_none()
    }

    fn carry_out(&mut self, order: Order) {
        let hosted = self.hosted();
        match order {
            Order::Assign(backend, cluster) => {
                self.places.seats.get_mut(&backend).unwrap().sub_cluster = Some(cluster);
            }
            Order::Copy(name, to) if (self.fails)() => self.placer.handle_failed(&name, to),
            Order::Copy(name, to) => {
                assert!(self.places.models.get_mut(&name).unwrap().1.insert(to), "{name} is there");
                self.copied.insert(name);
                self.placer.handle_changed();
            }
            Order::LetGo(gone) => {
                for (backend, name) in gone {
                    // A model may have been unloaded since it was looked at.
                    let hosts = self.places.models.get_mut(&name).map(|(_, hosts)| hosts.remove(&backend));
                    assert_ne!(hosts, Some(false), "{name} is not there");
                }
                self.placer.handle_changed();
            }
        }
        assert!(self.hosted().is_superset(&hosted), "a model that was hosted is not any more");
    }

    /// Models that backends host that are there.
    fn hosted(&self) -> BTreeSet<String> {
        let is_there = |hosts: &BTreeSet<BackendId>| hosts.iter().any(|id| self.places.seats.contains_key(id));
        self.places.models.iter().filter(|(_, (_, hosts))| is_there(hosts)).map(|(name, _)| name.clone()).collect()
    }

    /// The next epoch, until all that comes of it is done.
    fn epoch(&mut self) {
        self.copied.clear();
        self.now = self.now.max(self.placer.next_at);
        self.settle();
    }

    fn leave(&mut self, backend: u32) {
        self.places.seats.remove(&BackendId(backend));
        for (_, hosts) in self.places.models.values_mut() {
            hosts.remove(&BackendId(backend));
        }
        self.placer.handle_changed();
    }

    /// Another one comes, with all models.
    fn come(&mut self, backend: u32, gpus: u32) {
        self.places.seats.insert(BackendId(backend), Seat { sub_cluster: None, gpus });
        for (_, hosts) in self.places.models.values_mut() {
            hosts.insert(BackendId(backend));
        }
        self.placer.handle_changed();
    }

    /// Of each model: the sub-clusters that host it on all of their backends, if no other backend does.
    fn homes(&self) -> BTreeMap<String, Vec<u16>> {
        let home = |hosts: &BTreeSet<BackendId>| {
            let mut there: Vec<u16> = hosts.iter().filter_map(|id| self.places.seats[id].sub_cluster).collect();
            there.sort_unstable();
            there.dedup();
            let is_in = |seat: &Seat| seat.sub_cluster.is_some_and(|cluster| there.contains(&cluster));
            assert_eq!(self.places.seats.values().filter(|seat| is_in(seat)).count(), hosts.len(), "on some of them");
            there
        };
        self.places.models.iter().map(|(name, (_, hosts))| (name.clone(), home(hosts))).collect()
    }

    /// Requests a second that come to each sub-cluster; each model has one home.
    fn rates(&self) -> Vec<f64> {
        let mut rates = vec![0.0; usize::from(self.placer.config.sub_clusters)];
        for (name, homes) in self.homes() {
            let [home] = homes[..] else { panic!("{name} is in {homes:?}") };
            rates[usize::from(home)] += self.places.models[&name].0;
        }
        rates
    }
}

/// What was said of problems.
fn said(world: &World) -> Vec<String> {
    world.placer.said.iter().cloned().collect()
}

fn name(number: u32) -> String {
    format!("m{number:03}")
}

#[test]
fn backends_are_dealt_evenly_and_nothing_is_let_go_before_an_epoch_has_passed() {
    let mut world = World::new(config(3, 4), 7, 12);
    world.settle();
    let of = |cluster| world.places.seats.values().filter(|seat| seat.sub_cluster == Some(cluster)).count();
    assert_eq!([of(0), of(1), of(2)], [3, 2, 2]);
    assert!(world.places.models.values().all(|(_, hosts)| hosts.len() == 7));
    world.epoch();
    let rates = world.rates();
    assert!(rates.iter().all(|&rate| (25.0..27.5).contains(&rate)), "{rates:?}");
    assert_eq!(world.copied.len(), 0, "each could be dealt to any, as all host all");
}

#[test]
fn models_that_nobody_asks_for_are_dealt_evenly() {
    let mut world = World::new(config(4, 4), 4, 12);
    world.places.models.values_mut().for_each(|(rate, _)| *rate = 0.0);
    world.epoch();
    let mut homes = [0; 4];
    world.homes().values().for_each(|home| homes[usize::from(home[0])] += 1);
    assert_eq!(homes, [3; 4]);
}

#[test]
fn a_rate_that_jumps_a_hundredfold_moves_no_more_than_allowed_in_each_epoch() {
    let mut world = World::new(config(4, 3), 8, 40);
    world.epoch();
    for number in [3, 7, 11, 15] {
        world.places.models.get_mut(&name(number)).unwrap().0 *= 100.0;
    }
    let imbalance = |world: &World| {
        let rates = world.rates();
        rates.iter().fold(0.0f64, |most, &rate| most.max(rate)) / (rates.iter().sum::<f64>() / 4.0)
    };
    let mut before = imbalance(&world);
    let mut moved = 0;
    for _ in 0..6 {
        world.epoch();
        assert!(world.copied.len() <= 3, "{:?}", world.copied);
        moved += world.copied.len();
        let after = imbalance(&world);
        assert!(after <= before + 1e-9, "{after} after {before}");
        before = after;
    }
    assert!(moved > 3 && before < 1.75, "{moved} moves, and {before}");
    world.epoch();
    assert_eq!(world.copied.len(), 0, "what wins little is left as it is");
}

#[test]
fn a_load_that_fails_leaves_the_model_where_it_was() {
    let mut world = World::new(config(2, 8), 4, 10);
    world.epoch();
    let before = world.homes();
    world.places.models.values_mut().for_each(|(rate, _)| *rate = 1.0 / *rate);
    let mut loads = 0;
    // One backend of the new home has loaded it, and the other one cannot.
    world.fails = Box::new(move || {
        loads += 1;
        loads % 2 == 0
    });
    world.epoch();
    assert!(!world.copied.is_empty(), "models were to move");
    assert_eq!(world.homes(), before);
    world.fails = Box::new(|| false);
    world.epoch();
    assert_ne!(world.homes(), before, "the next epoch tries again");
}

#[test]
fn models_of_a_sub_cluster_that_has_gone_come_elsewhere_at_once() {
    let mut world = World::new(config(3, 1), 6, 12);
    world.epoch();
    let lost: Vec<BackendId> =
        world.places.seats.iter().filter(|(_, seat)| seat.sub_cluster == Some(1)).map(|(id, _)| *id).collect();
    for backend in lost {
        world.leave(backend.0);
        world.settle();
    }
    assert_eq!(world.hosted().len(), 12);
    assert_eq!(world.rates()[1], 0.0);
    // Another one comes: it takes the place, hosts everything at first, and gets models in moves.
    world.come(77, 4);
    world.settle();
    assert_eq!(world.places.seats[&BackendId(77)].sub_cluster, Some(1));
    world.epoch();
    assert!(world.copied.len() <= 1);
    assert!(world.rates()[1] > 0.0);
}

#[test]
fn the_next_primary_goes_on_from_what_is_hosted() {
    let mut world = World::new(config(3, 2), 6, 12);
    world.epoch();
    let before = world.homes();
    // It has the sub-clusters from the backends, which keep them; one model was on its way.
    let on_its_way = name(5);
    let [home] = before[&on_its_way][..] else { panic!() };
    let elsewhere =
        world.places.seats.iter().find(|(_, seat)| seat.sub_cluster != Some(home)).map(|(id, _)| *id).unwrap();
    world.places.models.get_mut(&on_its_way).unwrap().1.insert(elsewhere);
    world.placer = Placer::new(config(3, 2));
    world.placer.handle_standing(world.now, true);
    world.settle();
    assert!(world.places.models[&on_its_way].1.contains(&elsewhere), "nothing changes before an epoch has passed");
    world.epoch();
    assert_eq!((world.homes(), world.copied.len()), (before, 0));
}

#[test]
fn what_cannot_be_placed_is_said_by_its_key_and_nothing_moves() {
    let placed = |rate_max_rps| {
        let mut world = World::new(PlacementConfig { rate_max_rps: Some(rate_max_rps), ..config(2, 4) }, 4, 10);
        world.places.models.get_mut(&name(9)).unwrap().0 = 1_000.0;
        world.epoch();
        world.epoch();
        (world.places.models.values().all(|(_, hosts)| hosts.len() == 4), said(&world))
    };
    let (is_as_it_was, found) = placed(900.0);
    let expected = "model \"m009\": rate_rps: found 1000 requests/s, expected at most rate_max_rps, 900 requests/s: it \
                    fits no sub-cluster";
    assert_eq!((is_as_it_was, found), (true, vec![expected.to_owned()]));
    assert_eq!(placed(1_000.0), (false, vec![]), "it fits");
}

#[test]
fn pins_hold_and_those_that_cannot_are_said() {
    let mut pinned = config(2, 4);
    pinned.pins = (0..5).map(|number| (name(number), 1)).collect();
    let mut world = World::new(pinned.clone(), 4, 10);
    world.epoch();
    let homes = world.homes();
    assert!((0..5).all(|number| homes[&name(number)] == [1]), "{homes:?}");
    pinned.rate_max_rps = Some(40.0);
    pinned.pins = (5..10).map(|number| (name(number), 1)).collect();
    let mut world = World::new(pinned.clone(), 4, 10);
    world.epoch();
    assert_eq!(said(&world), [""; 0]);
    pinned.rate_max_rps = Some(39.0);
    let mut world = World::new(pinned.clone(), 4, 10);
    world.epoch();
    let pins = "pins: found 40 requests/s in sub-cluster 1, expected at most rate_max_rps, 39 requests/s";
    assert_eq!(said(&world), [pins]);
    pinned.pins = BTreeMap::from([(name(0), 1)]);
    let mut world = World::new(pinned, 1, 10);
    world.epoch();
    let empty = "pins.m000: found sub-cluster 1, which has no backend, expected one that has";
    assert_eq!(said(&world), [empty]);
}

#[test]
fn a_pin_of_a_model_that_is_not_served_holds_up_no_other() {
    let mut pinned = config(2, 4);
    pinned.pins = BTreeMap::from([("nope".to_owned(), 0), (name(3), 1)]);
    let mut world = World::new(pinned, 4, 10);
    for _ in 0..2 {
        world.epoch();
        assert_eq!(said(&world), ["pins.nope: found no such model, expected the name of a model that is served"]);
        assert_eq!(world.homes()[&name(3)], [1]);
        world.rates();
    }
}

/// However many there are, and whatever changes under way.
#[test]
fn few_models_are_looked_at_at_a_time() {
    let mut world = World::new(config(4, 3), 12, 100);
    let mut steps = 0;
    world.now = world.placer.next_at;
    while !world.step() {
        // One more for the move that is under way.
        assert!(world.places.looks.take() <= SLICE_PLACES / 12 + 1);
        if steps % 7 == 0 && steps < 200 {
            world.placer.handle_changed();
        }
        steps += 1;
    }
    assert!(steps > 100 * 12 / SLICE_PLACES);
    world.rates();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever happens, a model that a backend hosts that is there is hosted until that goes ([`World::carry_out`]
    /// looks at each step), no epoch moves more models than it may, and once loads do not fail any more each model has
    /// one home.
    #[test]
    fn nothing_is_lost_whatever_fails(
        seed in any::<u64>(),
        clusters in 1u16..5,
        backends in 1u32..9,
        moves_max in 1u32..5,
    ) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut world = World::new(config(clusters, moves_max), backends, 15);
        let mut luck = ChaCha8Rng::seed_from_u64(!seed);
        let mut next = backends;
        world.fails = Box::new(move || luck.random_range(0..4) == 0);
        for _ in 0..12 {
            match rng.random_range(0..6) {
                0 if world.places.seats.len() > 1 => {
                    let index = rng.random_range(0..world.places.seats.len());
                    let backend = *world.places.seats.keys().nth(index).unwrap();
                    world.leave(backend.0);
                }
                1 => {
                    world.come(next, rng.random_range(1..8));
                    next += 1;
                }
                2 => {
                    let number = rng.random_range(0..15);
                    if let Some((rate_rps, _)) = world.places.models.get_mut(&name(number)) {
                        *rate_rps *= [0.01, 100.0][rng.random_range(0..2)];
                    }
                }
                3 => {
                    // A takeover.
                    world.placer = Placer::new(config(clusters, moves_max));
                    world.placer.handle_standing(world.now, true);
                }
                4 => {
                    world.places.models.remove(&name(rng.random_range(0..15)));
                    world.placer.handle_changed();
                }
                _ => {
                    world.settle();
                    let homes = world.placer.homes.clone();
                    world.epoch();
                    let moved = homes.iter().filter(|(name, home)| world.placer.homes.get(*name) != Some(home));
                    prop_assert!(moved.count() <= moves_max as usize);
                }
            }
            // What comes next comes in the middle of this.
            for _ in 0..rng.random_range(0..20) {
                world.step();
            }
        }
        world.fails = Box::new(|| false);
        world.placer.failed.clear();
        world.settle();
        world.epoch();
        world.epoch();
        prop_assert_eq!(world.hosted().len(), world.places.models.len());
        prop_assert!(world.homes().values().all(|homes| homes.len() == 1));
    }
}
