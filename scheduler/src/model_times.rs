//! How long batches of one model take: on any GPU that hosts it, and on those that are faster than that.

use std::{collections::BTreeMap, sync::Arc};

use proto::{GpuId, LatencyProfile, Span};

use crate::messages::NetworkBudget;

/// l(b), with what the network adds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Times {
    /// l(b).
    pub profile: LatencyProfile,
    /// `lead_times[b - 1]` is delay(b) + l(b): from a grant to the end of its batch, on an idle GPU.
    pub lead_times: Vec<Span>,
}

impl Times {
    pub(crate) fn new(profile: LatencyProfile, budget: &NetworkBudget) -> Self {
        Self { lead_times: budget.lead_times(&profile), profile }
    }
}

/// All that planners know of a model's l(b). The common one holds on every GPU, so it says which batches can be in time
/// wherever they run; a GPU's own one is never slower, and says what fits there.
#[derive(Debug)]
pub(crate) struct ModelTimes {
    budget: NetworkBudget,
    common: Times,
    /// GPUs that are faster. Bounded by those that host the model; mostly there is none.
    own: BTreeMap<GpuId, Arc<Times>>,
}

impl ModelTimes {
    /// All GPUs are alike.
    #[must_use]
    pub(crate) fn new(profile: LatencyProfile, budget: NetworkBudget) -> Self {
        Self { common: Times::new(profile, &budget), budget, own: BTreeMap::new() }
    }

    /// Another common profile. What is known of single GPUs holds until [`Self::set_own`] says otherwise.
    pub(crate) fn set_common(&mut self, profile: LatencyProfile, budget: NetworkBudget) {
        self.common = Times::new(profile, &budget);
        if self.budget != budget {
            self.budget = budget;
            for times in self.own.values_mut() {
                *times = Arc::new(Times::new(times.profile.clone(), &budget));
            }
        }
    }

    /// A GPU's own profile; `None` if the common one holds there. GPUs of one kind share a table with their neighbours:
    /// those of one backend have ids in a row.
    pub(crate) fn set_own(&mut self, gpu: GpuId, profile: Option<LatencyProfile>) {
        self.own.remove(&gpu);
        let Some(profile) = profile else { return };
        let neighbours = [self.own.range(..gpu).next_back(), self.own.range(gpu..).next()];
        let shared = neighbours.into_iter().flatten().find(|(_, times)| times.profile == profile);
        let times = shared.map_or_else(|| Arc::new(Times::new(profile, &self.budget)), |(_, times)| times.clone());
        self.own.insert(gpu, times);
    }

    /// What the network adds.
    #[must_use]
    pub(crate) fn budget(&self) -> &NetworkBudget {
        &self.budget
    }

    /// What holds on every GPU.
    #[must_use]
    pub(crate) fn common(&self) -> &Times {
        &self.common
    }

    /// What holds on this GPU, if that is not what holds on every one.
    #[must_use]
    pub(crate) fn own(&self, gpu: GpuId) -> Option<&Times> {
        self.own.get(&gpu).map(|times| &**times)
    }

    /// What holds on this GPU.
    #[must_use]
    pub(crate) fn of(&self, gpu: GpuId) -> &Times {
        self.own(gpu).unwrap_or(&self.common)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(beta_ms: f64) -> LatencyProfile {
        LatencyProfile::linear(1.0, beta_ms, 4).unwrap()
    }

    #[test]
    fn a_gpu_counts_as_all_do_unless_it_has_times_of_its_own() {
        let mut times = ModelTimes::new(profile(5.0), NetworkBudget::default());
        times.set_own(GpuId(3), Some(profile(2.0)));
        let first = |times: &ModelTimes, gpu| times.of(GpuId(gpu)).lead_times[0];
        assert_eq!((first(&times, 2), first(&times, 3)), (Span::from_millis(6), Span::from_millis(3)));
        times.set_common(profile(7.0), NetworkBudget { ctrl: Span::from_millis(1), ..NetworkBudget::default() });
        assert_eq!((first(&times, 2), first(&times, 3)), (Span::from_millis(9), Span::from_millis(4)));
        times.set_own(GpuId(3), None);
        assert_eq!(times.of(GpuId(3)), times.common());
    }

    #[test]
    fn gpus_of_one_kind_share_their_table() {
        let mut times = ModelTimes::new(profile(5.0), NetworkBudget::default());
        for gpu in [4, 2, 3] {
            times.set_own(GpuId(gpu), Some(profile(2.0)));
        }
        times.set_own(GpuId(5), Some(profile(1.0)));
        let same = |one, other| std::ptr::eq(times.of(GpuId(one)), times.of(GpuId(other)));
        assert!(same(2, 3) && same(3, 4) && !same(4, 5));
    }
}
