//! Step 5 for candidates that wait: timers that fire, and GPUs that free.
//!
//! With prices a candidate is schedulable twice: first on a sub-cluster's open GPUs, those with the smallest ids, and
//! at its frontrun moment on any. Those that wait for an open GPU are in a heap of their own, so that another GPU that
//! frees passes them over in O(log M).

use proto::{ModelId, Timestamp};

use super::{Candidate, RankThread, SubCluster, Waits};

/// A match that a sub-cluster's timer is for.
#[derive(Debug, Clone, Copy)]
struct Match {
    fires_at: Timestamp,
    free_at: Timestamp,
    /// The candidate's place among the sub-cluster's models.
    place: u32,
}

impl SubCluster {
    /// All of its GPUs may start batches early.
    pub(super) fn is_open(&self) -> bool {
        self.open >= self.gpus.len()
    }
}

impl RankThread {
    /// Algorithm 1, `OnModelTimer`.
    pub(super) fn on_model_timer(&mut self, (now, timer_at): (Timestamp, Timestamp), id: ModelId) {
        self.model_timers.remove(id.0);
        let model = &self.models[id.0 as usize];
        let candidate = model.candidate.expect("a model's timer runs only while it has a candidate");
        let soonest = now + self.delay(id, candidate.size);
        let first_free = model.hosts.iter().filter_map(|&(host, _)| {
            let sub_cluster = self.sub_clusters[host as usize].as_ref().expect("hosts are sub-clusters with GPUs");
            let (position, _) = sub_cluster.free_times.first_free_by(candidate.exec_at.max(soonest))?;
            let is_schedulable = position < sub_cluster.open || candidate.anywhere_at <= soonest;
            is_schedulable.then(|| sub_cluster.gpus[position])
        });
        match first_free.min() {
            Some(gpu) => self.on_match(timer_at, id, gpu),
            None => self.on_waiting(now, id),
        }
    }

    /// Algorithm 1, `OnGpuTimer`, for the GPU of the sub-cluster that frees first.
    pub(super) fn on_gpu_timer(&mut self, (now, timer_at): (Timestamp, Timestamp), host: u32) {
        let Match { free_at, place, .. } = self.next_match(host).expect("the timer runs for a match");
        let sub_cluster = self.sub_clusters[host as usize].as_mut().expect("only sub-clusters with GPUs have timers");
        let model = sub_cluster.models[place as usize];
        let Candidate { size, latest, .. } = self.models[model.0 as usize].candidate.expect("it waits");
        let budget = self.models[model.0 as usize].budget.unwrap_or(self.budget);
        let starts_at = free_at.max(now + budget.delay(size as usize));
        if starts_at <= latest {
            // Of those that are free by then the smallest id, which is one of the open ones if any of these is.
            let (position, _) = sub_cluster.free_times.first_free_by(starts_at).expect("one is free then");
            let gpu = sub_cluster.gpus[position];
            self.on_match(timer_at, model, gpu);
        } else {
            // Too late for this batch; its ModelThread is about to draw up a smaller one.
            sub_cluster.schedulable.remove(place);
            sub_cluster.early.remove(place);
            self.set_gpu_timer(host);
        }
    }

    /// The candidate waits for a GPU, wherever its model is hosted: for any, or for one that is open.
    pub(super) fn on_waiting(&mut self, now: Timestamp, id: ModelId) {
        let candidate = self.models[id.0 as usize].candidate.expect("callers checked");
        let anywhere_at = candidate.anywhere_at - self.delay(id, candidate.size);
        let waits = if anywhere_at <= now { Waits::Anywhere } else { Waits::Open };
        self.models[id.0 as usize].waits = waits;
        match waits {
            Waits::Open => self.model_timers.set(id.0, anywhere_at),
            Waits::Anywhere | Waits::No => self.model_timers.remove(id.0),
        }
        self.check_starved(now, id);
        for index in 0..self.models[id.0 as usize].hosts.len() {
            let (host, place) = self.models[id.0 as usize].hosts[index];
            self.set_waiting(host, place, id);
        }
    }

    /// The same at one of its hosts.
    pub(super) fn set_waiting(&mut self, host: u32, place: u32, id: ModelId) {
        let model = &self.models[id.0 as usize];
        let sub_cluster = self.sub_clusters[host as usize].as_mut().expect("a host");
        let is_anywhere = model.waits == Waits::Anywhere || sub_cluster.is_open();
        let SubCluster { schedulable, early, .. } = sub_cluster;
        let (waits_in, other) = if is_anywhere { (schedulable, early) } else { (early, schedulable) };
        waits_in.set(place, model.candidate.expect("it waits").due_at);
        other.remove(place);
        self.set_gpu_timer(host);
    }

    /// Stops the model's timer and waiting.
    pub(super) fn withdraw(&mut self, id: ModelId) {
        self.model_timers.remove(id.0);
        let model = &mut self.models[id.0 as usize];
        if std::mem::take(&mut model.waits) == Waits::No {
            return;
        }
        for index in 0..model.hosts.len() {
            let (host, place) = self.models[id.0 as usize].hosts[index];
            let sub_cluster = self.sub_clusters[host as usize].as_mut().expect("a host");
            sub_cluster.schedulable.remove(place);
            sub_cluster.early.remove(place);
            self.set_gpu_timer(host);
        }
    }

    /// So many of a sub-cluster's GPUs are open from now on.
    pub(super) fn set_open(&mut self, host: u32, open: usize) {
        let sub_cluster = self.sub_clusters[host as usize].as_mut().expect("callers hold a sub-cluster with GPUs");
        if std::mem::replace(&mut sub_cluster.open, open) == open {
            return;
        }
        if sub_cluster.is_open() {
            while let Some((due_at, place)) = sub_cluster.early.peek() {
                sub_cluster.early.remove(place);
                sub_cluster.schedulable.set(place, due_at);
            }
        }
        self.set_gpu_timer(host);
    }

    /// The next GPU with the candidate that takes it: any GPU with those that wait for any, or an open one with all.
    fn next_match(&self, host: u32) -> Option<Match> {
        let sub_cluster = self.sub_clusters[host as usize].as_ref().expect("callers hold a sub-cluster with GPUs");
        let of = |free: Option<(usize, Timestamp)>, place: Option<(Timestamp, u32)>| {
            let ((_, free_at), (_, place)) = free.zip(place)?;
            let model = sub_cluster.models[place as usize];
            let size = self.models[model.0 as usize].candidate.expect("it waits").size;
            Some(Match { fires_at: free_at - self.delay(model, size), free_at, place })
        };
        let anywhere = sub_cluster.schedulable.peek();
        let any = of(sub_cluster.free_times.earliest(), anywhere);
        let Some(early) = sub_cluster.early.peek() else { return any };
        let first = anywhere.map_or(early, |anywhere| anywhere.min(early));
        let open = of(sub_cluster.free_times.earliest_below(sub_cluster.open), Some(first));
        // Whoever comes first takes what all wait for.
        open.into_iter().chain(any).min_by_key(|found| found.fires_at)
    }

    /// Figure 18, `set_gpu_timer`; the delay is that of the candidate that the timer would take.
    pub(super) fn set_gpu_timer(&mut self, host: u32) {
        match self.next_match(host) {
            Some(next) => self.gpu_timers.set(host, next.fires_at),
            None => self.gpu_timers.remove(host),
        }
    }
}
