//! GPUs' memory for weights, emulated: what is in it, and loads, one after another on each GPU's link, each of which
//! starts within its window or not at all (Clockwork, section 4.4). Each GPU has a machine of its own, whose host
//! memory may hold but a part of all weights: the others are read from disk as a part of their loads.

use std::collections::{BTreeMap, VecDeque};

use proto::{
    GpuId, ModelId, Span, Timestamp,
    host_memory::{HostMemory, Moved},
};
use scheduler::{LoadEnd, Predicted, Weights, indexed_heap::IndexedHeap};

/// A load that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Into which GPU.
    pub gpu: GpuId,
    /// Whose weights.
    pub model: ModelId,
    /// The earliest start.
    pub earliest: Timestamp,
    /// The latest start.
    pub latest: Timestamp,
    /// What is planned of it.
    pub predicted: Predicted,
}

/// A load ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Which.
    pub load: Load,
    /// When it began; `None` if it did not.
    pub started_at: Option<Timestamp>,
    /// How much of it was reading from disk.
    pub read: Span,
    /// How.
    pub end: LoadEnd,
}

/// Weights came into the host memory of a GPU's machine, or left it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostNews {
    /// The GPU that loads.
    pub gpu: GpuId,
    /// What has changed.
    pub moved: Moved,
}

/// The memory of all GPUs, by place.
#[derive(Debug)]
pub struct Memory {
    pages: u32,
    host_news: VecDeque<HostNews>,
    places: Vec<Place>,
    /// By place: when its first load ends or may begin.
    timers: IndexedHeap,
    ended: VecDeque<Ended>,
}

#[derive(Debug, Default)]
struct Place {
    resident: BTreeMap<ModelId, u32>,
    /// With the instants at which they were asked for.
    loads: VecDeque<(Timestamp, Load, Weights)>,
    /// When the first of them began, and how long it reads from disk.
    started: Option<(Timestamp, Span)>,
    idle_since: Timestamp,
    /// The GPU and its machine's host memory, if that holds but a part of all weights.
    host: Option<(GpuId, HostMemory)>,
}

impl Place {
    /// Of what is there or being copied.
    fn pages(&self) -> u32 {
        let copied = self.started.and(self.loads.front()).map_or(0, |(.., weights)| weights.pages);
        self.resident.values().sum::<u32>() + copied
    }
}

impl Memory {
    /// Empty memory of so many pages for each GPU.
    #[must_use]
    pub fn new(places: usize, pages: u32) -> Self {
        let places = (0..places).map(|_| Place::default()).collect();
        let (host_news, ended) = (VecDeque::new(), VecDeque::new());
        Self { pages, host_news, places, timers: IndexedHeap::default(), ended }
    }

    /// A GPU comes up in a machine whose host memory has so many pages, into which all models (by id) were read one
    /// after another. Yields those that are not there any more.
    pub fn handle_machine(&mut self, gpu: GpuId, host_pages: u32, models: &[Weights]) -> Vec<ModelId> {
        let mut host = HostMemory::new(host_pages);
        for (id, weights) in (0..).zip(models) {
            host.insert(ModelId(id), weights.pages);
        }
        while host.poll_moved().is_some() {}
        let on_disk = (0..models.len() as u32).map(ModelId).filter(|&id| !host.holds(id)).collect();
        let place = self.place(gpu);
        self.places[place].host = Some((gpu, host));
        on_disk
    }

    fn place(&self, gpu: GpuId) -> usize {
        gpu.0 as usize % self.places.len()
    }

    /// Whether a model is in a GPU's memory.
    #[must_use]
    pub fn is_resident(&self, gpu: GpuId, model: ModelId) -> bool {
        self.places[self.place(gpu)].resident.contains_key(&model)
    }

    /// Whether it is in any.
    #[must_use]
    pub fn is_anywhere(&self, model: ModelId) -> bool {
        self.places.iter().any(|place| place.resident.contains_key(&model))
    }

    /// Loads a model behind what was asked for before. The load of `weights` is how long it will take.
    pub fn handle_load(&mut self, now: Timestamp, load: Load, weights: Weights) {
        let place = self.place(load.gpu);
        self.places[place].loads.push_back((now, load, weights));
        self.advance(now, place);
    }

    /// A model makes room. False if it is not there.
    pub fn handle_unload(&mut self, now: Timestamp, gpu: GpuId, model: ModelId) -> bool {
        let place = self.place(gpu);
        let was_there = self.places[place].resident.remove(&model).is_some();
        self.advance(now, place);
        was_there
    }

    /// A GPU dies, and with it what is in its memory.
    pub fn handle_failure(&mut self, gpu: GpuId) {
        let place = self.place(gpu);
        self.places[place] = Place::default();
        self.timers.remove(place as u32);
    }

    /// Ends and starts what is due.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        while let Some((at, place)) = self.timers.peek()
            && at <= now
        {
            self.advance(now, place as usize);
        }
    }

    /// When [`Self::handle_timeout`] must be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.timers.peek().map(|(at, _)| at)
    }

    /// The next load that ended.
    pub fn poll_ended(&mut self) -> Option<Ended> {
        self.ended.pop_front()
    }

    /// The next weights that came into host memory or left it.
    pub fn poll_host_news(&mut self) -> Option<HostNews> {
        self.host_news.pop_front()
    }

    fn advance(&mut self, now: Timestamp, index: usize) {
        let place = &mut self.places[index];
        let timer = loop {
            let Some(&(came_at, load, weights)) = place.loads.front() else { break None };
            if let Some((started_at, read)) = place.started {
                let finished_at = started_at + weights.load + read;
                if finished_at > now {
                    break Some(finished_at);
                }
                place.loads.pop_front();
                place.started = None;
                place.idle_since = finished_at;
                place.resident.insert(load.model, weights.pages);
                let end = LoadEnd { finished_at, is_loaded: true };
                self.ended.push_back(Ended { load, started_at: Some(started_at), read, end });
                if let Some((_, host)) = &mut place.host {
                    host.end(load.model, true);
                }
                continue;
            }
            let starts_at = load.earliest.max(came_at).max(place.idle_since);
            if starts_at > now {
                break Some(starts_at);
            }
            let has_room = place.pages() + weights.pages <= self.pages && !place.resident.contains_key(&load.model);
            if has_room && starts_at <= load.latest {
                let is_near = place.host.as_mut().is_none_or(|(_, host)| host.begin(load.model, weights.pages));
                place.started = Some((starts_at, if is_near { Span::ZERO } else { weights.read }));
            } else {
                place.loads.pop_front();
                let end = LoadEnd { finished_at: starts_at, is_loaded: false };
                self.ended.push_back(Ended { load, started_at: None, read: Span::ZERO, end });
            }
        };
        if let Some((gpu, host)) = &mut place.host {
            let news = std::iter::from_fn(|| host.poll_moved());
            self.host_news.extend(news.map(|moved| HostNews { gpu: *gpu, moved }));
        }
        match timer {
            Some(at) => self.timers.set(index as u32, at),
            None => self.timers.remove(index as u32),
        }
    }
}

#[cfg(test)]
mod tests {
    use proto::Span;

    use super::*;

    fn at(ms: i64) -> Timestamp {
        Timestamp::ZERO + Span::from_millis(ms)
    }

    const WEIGHTS: Weights = Weights::new(4, Span::from_millis(8));

    fn load(model: u32, earliest: i64, latest: i64) -> Load {
        let predicted = Predicted { duration: WEIGHTS.load, ends_at: at(earliest) + WEIGHTS.load };
        Load { gpu: GpuId(3), model: ModelId(model), earliest: at(earliest), latest: at(latest), predicted }
    }

    fn ends(memory: &mut Memory) -> Vec<(u32, Option<Timestamp>, Timestamp, bool)> {
        let mut ends = Vec::new();
        loop {
            while let Some(Ended { load, started_at, end, .. }) = memory.poll_ended() {
                ends.push((load.model.0, started_at, end.finished_at, end.is_loaded));
            }
            let Some(next) = memory.poll_timeout() else { return ends };
            memory.handle_timeout(next);
        }
    }

    #[test]
    fn loads_run_in_turn_within_their_windows_where_there_is_room() {
        let mut memory = Memory::new(2, 10);
        for (model, earliest, latest) in [(0, 1, 5), (1, 2, 8), (2, 2, 20), (3, 2, 20)] {
            memory.handle_load(at(0), load(model, earliest, latest), WEIGHTS);
        }
        let expected = [
            (0, Some(at(1)), at(9), true),
            (1, None, at(9), false),
            (2, Some(at(9)), at(17), true),
            (3, None, at(17), false),
        ];
        assert_eq!(ends(&mut memory), expected);
        assert!(memory.is_resident(GpuId(1), ModelId(0)) && !memory.is_anywhere(ModelId(1)));
        assert!(
            memory.handle_unload(at(20), GpuId(3), ModelId(0)) && !memory.handle_unload(at(20), GpuId(3), ModelId(3))
        );
        memory.handle_load(at(20), load(3, 20, 30), WEIGHTS);
        assert_eq!(ends(&mut memory), [(3, Some(at(20)), at(28), true)]);
        memory.handle_failure(GpuId(3));
        assert!(!memory.is_anywhere(ModelId(3)));
    }

    #[test]
    fn what_is_not_in_host_memory_is_read_first_and_what_was_loaded_longest_ago_leaves_it() {
        let mut memory = Memory::new(1, 100);
        let weights = Weights { read: Span::from_millis(50), ..WEIGHTS };
        let on_disk = memory.handle_machine(GpuId(3), 10, &[weights; 3]);
        assert_eq!(on_disk, [ModelId(0)]);
        for model in [2, 0, 1] {
            memory.handle_load(at(0), load(model, 0, 200), weights);
        }
        let expected =
            [(2, Some(at(0)), at(8), true), (0, Some(at(8)), at(66), true), (1, Some(at(66)), at(124), true)];
        assert_eq!(ends(&mut memory), expected);
        let news: Vec<_> = std::iter::from_fn(|| memory.poll_host_news()).map(|news| news.moved).collect();
        let moved = |model, is_there| Moved { model: ModelId(model), is_there };
        assert_eq!(news, [moved(1, false), moved(0, true), moved(2, false), moved(1, true)]);
    }
}
