//! Lanes: where models run that call others. A lane is to the scheduler one more GPU, behind those of the
//! configuration; it is a thread, and hosts nothing else, so that whom its model asks finds GPUs free.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use repository::Executor;

use super::{Config, Placed};
use crate::{error::BackendError, limits::GPUS_MAX};

/// The lanes of a backend, and whose they are. A model keeps those that it has been given: versions and later loads of
/// it find them free.
#[derive(Debug, Clone)]
pub struct Lanes {
    first: u32,
    count: u32,
    /// By the model's name.
    given: Arc<Mutex<BTreeMap<String, Vec<u32>>>>,
}

impl Lanes {
    /// As many as the configuration says, or as these models take; they are given theirs.
    ///
    /// # Errors
    /// If GPUs and lanes are more than a backend can have.
    pub fn of(config: &Config, models: &mut [Placed]) -> Result<Self, BackendError> {
        let first = config.gpus.count();
        let most = GPUS_MAX.saturating_sub(first);
        let mut wanted: BTreeMap<&str, u32> = BTreeMap::new();
        for placed in &*models {
            let lanes = lanes_of(placed);
            let of_name = wanted.entry(&placed.model.name).or_default();
            *of_name = lanes.max(*of_name);
        }
        let count = match config.lanes {
            Some(found) if found > most => {
                let expected = format!("at most {most} beside {first} GPUs");
                return Err(BackendError::Config(format!("lanes: found {found}, expected {expected}")));
            }
            Some(said) => said,
            None => wanted.values().sum::<u32>().min(most),
        };
        let lanes = Self { first, count, given: Arc::default() };
        models.iter_mut().for_each(|placed| lanes.give(placed));
        Ok(lanes)
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// GPUs and lanes of a backend.
    #[must_use]
    pub fn with_gpus(&self) -> u32 {
        self.first + self.count
    }

    /// Puts a model that calls others on its lanes. Where there are fewer than it wants it has those, and where all are
    /// given it shares some: two models of one lane must not call each other, as one waits for the other's turn.
    /// Without lanes it stays where it is, and its calls fail.
    pub fn give(&self, placed: &mut Placed) {
        let wanted = lanes_of(placed).min(self.count);
        if wanted == 0 {
            return;
        }
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lanes) = given.get(&placed.model.name) {
            placed.gpu_indexes.clone_from(lanes);
            return;
        }
        let models = |lane: u32| given.values().filter(|lanes| lanes.contains(&lane)).count();
        let mut lanes: Vec<u32> = (self.first..self.with_gpus()).collect();
        lanes.sort_by_key(|&lane| models(lane));
        lanes.truncate(wanted as usize);
        lanes.sort_unstable();
        given.insert(placed.model.name.clone(), lanes.clone());
        placed.gpu_indexes = lanes;
    }
}

/// Lanes that a model has best; none of one that calls nobody.
fn lanes_of(placed: &Placed) -> u32 {
    match &placed.model.executor {
        Executor::Process { program, .. } if program.calls => u32::try_from(program.instances).unwrap_or(u32::MAX),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use repository::{Launch, Model, Program, ProgramLimits};

    use super::*;
    use crate::config::Gpus;

    fn config(gpus: u32, lanes: Option<u32>) -> Config {
        let text = "scheduler = '127.0.0.1:7000'\nsecret = 'known to the cluster'\nrepository = 'models'";
        Config { gpus: Gpus::Count(gpus), lanes, ..toml::from_str(text).unwrap() }
    }

    /// A model that calls others from so many instances; from none, one that calls nobody.
    fn placed(name: &str, instances: usize) -> Placed {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/digits");
        let limits = ProgramLimits {
            memory_bytes: 1 << 30,
            files: 64,
            processes: 16,
            network: false,
            start: proto::Span::from_millis(1),
        };
        let launch = Launch::Program(vec!["none".into()]);
        let program =
            Program { launch, folder: folder.clone(), instances, limits, calls: instances > 0, samples: true };
        let executor = Executor::Process { program, profile: None };
        let model = Model { name: name.into(), executor, ..repository::load_model(&folder).unwrap() };
        Placed { model, gpu_indexes: vec![0, 1], weights: proto::Weights::default(), is_pinned: false, is_guest: false }
    }

    fn given(lanes: &Lanes, name: &str, instances: usize) -> Vec<u32> {
        let mut placed = placed(name, instances);
        lanes.give(&mut placed);
        placed.gpu_indexes
    }

    #[test]
    fn whoever_calls_others_has_lanes_behind_the_gpus() {
        let mut models = vec![placed("plain", 0), placed("one", 1), placed("three", 3), placed("one", 1)];
        let lanes = Lanes::of(&config(2, None), &mut models).unwrap();
        let indexes: Vec<&[u32]> = models.iter().map(|placed| &placed.gpu_indexes[..]).collect();
        assert_eq!(indexes, [&[0, 1][..], &[2], &[3, 4, 5], &[2]]);
        assert_eq!(lanes.with_gpus(), 6);
        // A later one shares; one that is loaded anew has its own.
        assert_eq!(given(&lanes, "later", 2), [2, 3]);
        assert_eq!(given(&lanes, "three", 3), [3, 4, 5]);
        assert_eq!(given(&lanes, "last", 1), [4]);
    }

    #[test]
    fn there_are_as_many_as_the_key_says() {
        let lanes = Lanes::of(&config(2, Some(2)), &mut []).unwrap();
        assert_eq!((given(&lanes, "a", 1), given(&lanes, "b", 9)), (vec![2], vec![2, 3]));
        let none = Lanes::of(&config(2, Some(0)), &mut []).unwrap();
        assert_eq!((given(&none, "a", 1), none.with_gpus()), (vec![0, 1], 2));
        let found = Lanes::of(&config(2, Some(63)), &mut []).unwrap_err().to_string();
        assert_eq!(found, "lanes: found 63, expected at most 62 beside 2 GPUs");
        let mut many: Vec<Placed> = ["a", "b", "c", "d", "e"].map(|name| placed(name, 16)).into();
        assert_eq!(Lanes::of(&config(2, None), &mut many).unwrap().with_gpus(), GPUS_MAX);
    }
}
