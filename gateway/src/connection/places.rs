//! The places that connections have: so many in all and for each client, and a few spare ones, so that whoever asks for
//! the server's health is answered when all others are taken.
//!
//! A state machine. [`Places::open`] gives a connection a place, and closes idle connections if there is none: of the
//! client itself if it has all that it may have, else of the client with the most. [`Places::close`] takes it back.

use std::{collections::BTreeMap, rc::Rc};

use tokio::time::Instant;

use super::activity::{Activity, Leave};
use crate::{
    access::client::{Client, Load, add, sub},
    config::Limits,
    limits::SPARE_MAX,
};

/// Idle connections that are closed at once at most: many newcomers then cost one search.
const CLOSED_MAX: usize = 16;

/// A connection's place, never another one's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PlaceId(u64);

/// All connections.
#[derive(Debug, Default)]
pub(crate) struct Places {
    next: u64,
    /// Those that clients may have.
    common: BTreeMap<PlaceId, Rc<Activity>>,
    spare: BTreeMap<PlaceId, Rc<Activity>>,
    /// Those that were told to make room and have not ended yet.
    leaving: BTreeMap<PlaceId, Rc<Activity>>,
    /// Of clients that have a connection.
    loads: BTreeMap<Client, Rc<Load>>,
}

/// What became of a newcomer.
#[derive(Debug)]
pub(crate) struct Opened {
    /// Its place; none if even the spare ones are taken.
    pub place: Option<(PlaceId, Rc<Activity>)>,
    /// Connections that were told to end for it.
    pub told: usize,
}

impl Places {
    /// Connections that have not ended.
    pub(crate) fn len(&self) -> usize {
        self.common.len() + self.spare.len() + self.leaving.len()
    }

    /// Tells every connection to end once its requests have been answered.
    pub(crate) fn drain(&self) {
        self.common.values().chain(self.spare.values()).for_each(|activity| activity.tell(Leave::Drain));
    }

    /// A client connects.
    pub(crate) fn open(&mut self, client: Client, limits: &Limits) -> Opened {
        if self.loads.len() > 2 * (self.len() + SPARE_MAX) {
            // What was under way when the last connection of a client ended has ended since.
            self.loads.retain(|_, load| Rc::strong_count(load) > 1);
        }
        let load = Rc::clone(self.loads.entry(client).or_default());
        let mut told = 0;
        if load.connections.get() >= limits.client_connections_max {
            told = self.make_room(Some(client), limits);
        } else if self.common.len() >= limits.connections_max {
            told = self.make_room(None, limits);
        }
        let is_spare =
            load.connections.get() >= limits.client_connections_max || self.common.len() >= limits.connections_max;
        if is_spare && self.spare.len() >= SPARE_MAX {
            let idle = self.spare.iter().filter_map(|(&id, activity)| Some((activity.idle_since()?, id)));
            let Some((_, id)) = idle.min() else {
                drop(load);
                self.forget(client);
                return Opened { place: None, told };
            };
            self.tell(id);
            told += 1;
        }
        let id = PlaceId(self.next);
        self.next += 1;
        let activity = Activity::new(client, Rc::clone(&load), is_spare);
        if is_spare {
            self.spare.insert(id, Rc::clone(&activity));
        } else {
            add(&load.connections, 1);
            self.common.insert(id, Rc::clone(&activity));
        }
        Opened { place: Some((id, activity)), told }
    }

    /// A connection turned out to be this client's. False if that has as many as it may have.
    pub(crate) fn rename(&mut self, id: PlaceId, client: Client, limits: &Limits) -> bool {
        let Some(activity) = self.common.get(&id) else { return true };
        let (before, old) = (activity.client(), activity.load());
        let new = Rc::clone(self.loads.entry(client).or_default());
        let has_room = new.connections.get() < limits.client_connections_max;
        sub(&old.connections, 1);
        add(&new.connections, 1);
        activity.set_client(client, new);
        drop(old);
        self.forget(before);
        has_room
    }

    /// A connection has ended.
    pub(crate) fn close(&mut self, id: PlaceId) {
        let common = self.common.remove(&id);
        if let Some(activity) = &common {
            sub(&activity.load().connections, 1);
        }
        let Some(activity) = common.or_else(|| self.spare.remove(&id)).or_else(|| self.leaving.remove(&id)) else {
            return;
        };
        let client = activity.client();
        drop(activity);
        self.forget(client);
    }

    /// Closes idle connections: of this client, or of the one with the most connections that has an idle one. Yields
    /// how many.
    fn make_room(&mut self, of: Option<Client>, limits: &Limits) -> usize {
        let mut idle: BTreeMap<Client, Vec<(Instant, PlaceId)>> = BTreeMap::new();
        for (&id, activity) in &self.common {
            if let Some(since) = activity.idle_since().filter(|_| of.is_none_or(|of| of == activity.client())) {
                idle.entry(activity.client()).or_default().push((since, id));
            }
        }
        let most = idle.into_iter().max_by_key(|(client, _)| self.loads.get(client).map(|load| load.connections.get()));
        let Some((_, mut idle)) = most else { return 0 };
        idle.sort_unstable();
        idle.truncate(CLOSED_MAX.min(limits.connections_max / 16).max(1));
        idle.iter().for_each(|(_, id)| self.tell(*id));
        idle.len()
    }

    /// Tells a connection to end; its place is free at once.
    fn tell(&mut self, id: PlaceId) {
        let common = self.common.remove(&id);
        if let Some(activity) = &common {
            sub(&activity.load().connections, 1);
        }
        if let Some(activity) = common.or_else(|| self.spare.remove(&id)) {
            activity.tell(Leave::Room);
            self.leaving.insert(id, activity);
        }
    }

    /// A client without connections and requests is not kept.
    fn forget(&mut self, client: Client) {
        if self.loads.get(&client).is_some_and(|load| Rc::strong_count(load) == 1) {
            self.loads.remove(&client);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::Config;

    fn limits(connections_max: usize, client_connections_max: usize) -> Limits {
        let config = Config::new(([127, 0, 0, 1], 1), "secret", "models");
        Limits { connections_max, client_connections_max, ..config.limits() }
    }

    fn client(last: u8) -> Client {
        Client::at([10, 0, 0, last].into())
    }

    fn place(places: &mut Places, of: u8, limits: &Limits) -> (PlaceId, Rc<Activity>) {
        places.open(client(of), limits).place.expect("a place")
    }

    #[test]
    fn idle_connections_of_the_client_with_the_most_make_room_oldest_first() {
        let limits = limits(4, 4);
        let mut places = Places::default();
        let quiet = place(&mut places, 1, &limits);
        let greedy: Vec<_> = (0..3).map(|_| place(&mut places, 2, &limits)).collect();
        let busy = greedy[0].1.open();
        let new = places.open(client(3), &limits);
        assert_eq!(new.told, 1);
        assert!(!new.place.as_ref().unwrap().1.is_spare);
        assert!(places.leaving.contains_key(&greedy[1].0), "the oldest idle one of client 2");
        assert!(places.common.contains_key(&quiet.0) && places.common.contains_key(&greedy[0].0));
        assert_eq!(places.common.len(), 4);
        places.close(greedy[1].0);
        assert_eq!(places.len(), 4);
        drop(busy);
    }

    #[test]
    fn when_all_are_busy_a_newcomer_gets_a_spare_place_and_then_none() {
        let limits = limits(3, 2);
        let mut places = Places::default();
        let held: Vec<_> = [1, 1, 2].map(|of| place(&mut places, of, &limits)).into();
        let open: Vec<_> = held.iter().map(|(_, activity)| activity.open()).collect();
        // A third one of client 1, and one of another client: neither cuts off what is under way.
        assert!(place(&mut places, 1, &limits).1.is_spare && place(&mut places, 3, &limits).1.is_spare);
        let spare: Vec<_> = (0..SPARE_MAX).map(|_| place(&mut places, 4, &limits)).collect();
        assert_eq!((places.spare.len(), places.common.len()), (SPARE_MAX, 3), "the silent ones left");
        let busy: Vec<_> = spare.iter().map(|(_, activity)| activity.open()).collect();
        assert!(places.open(client(5), &limits).place.is_none());
        assert!(!places.loads.contains_key(&client(5)));
        drop((open, busy));
        assert_eq!(places.open(client(5), &limits).told, 1, "now somebody is idle");
    }

    #[test]
    fn a_client_that_shows_a_certificate_is_counted_as_its_holder() {
        let limits = limits(9, 2);
        let mut places = Places::default();
        let holder = Client::with_certificate(b"c");
        for expected in [true, true, false] {
            let (id, activity) = place(&mut places, 1, &limits);
            assert_eq!((places.rename(id, holder, &limits), activity.client()), (expected, holder));
        }
        assert!(!places.loads.contains_key(&client(1)));
        assert_eq!(places.loads[&holder].connections.get(), 3);
    }

    proptest! {
        /// Against a naive count, whatever comes, goes and is busy.
        #[test]
        fn places_stay_within_their_limits(
            steps in prop::collection::vec((0u8..3, 0u8..4, any::<prop::sample::Index>()), 1..200),
        ) {
            let limits = limits(6, 4);
            let mut places = Places::default();
            let mut held: Vec<(PlaceId, Rc<Activity>, Option<_>)> = Vec::new();
            for (step, of, which) in steps {
                match step {
                    0 => if let Some((id, activity)) = places.open(client(of), &limits).place {
                        held.push((id, activity, None));
                    },
                    1 if !held.is_empty() => {
                        let index = which.index(held.len());
                        let (_, activity, open) = &mut held[index];
                        *open = match open { None => Some(activity.open()), Some(_) => None };
                    }
                    _ if !held.is_empty() => {
                        let index = which.index(held.len());
                        let (id, activity, open) = held.swap_remove(index);
                        drop((open, activity));
                        places.close(id);
                    }
                    _ => {}
                }
                prop_assert!(places.common.len() <= 6 && places.spare.len() <= SPARE_MAX);
                prop_assert_eq!(places.len(), held.len());
                for of in 0..4 {
                    let count = places.common.values().filter(|activity| activity.client() == client(of)).count();
                    prop_assert!(count <= 4);
                    let counted = places.loads.get(&client(of)).map_or(0, |load| load.connections.get());
                    prop_assert_eq!(count, counted);
                }
            }
            for (id, activity, open) in held {
                drop((activity, open));
                places.close(id);
            }
            prop_assert!(places.loads.is_empty());
        }
    }
}
