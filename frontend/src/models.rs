//! What this frontend can serve: the repository's models, joined with what the primary says about them.

use std::{collections::BTreeMap, rc::Rc};

use proto::{
    Brought, ModelId, ModelThreadId, Span,
    scheduler_to_frontend::{ModelState, NetworkTimes},
};
use repository::{Model, Refused};

use crate::{error::InferError, slots::SlotSize, spoken::Spoken};

/// Models that cannot be served of which it is remembered why.
const REFUSED_MAX: usize = 4_096;
/// Versions of models that have ever been served: each keeps its index, and its counts.
const VERSIONS_EVER_MAX: usize = 65_536;

/// A model of the repository.
#[derive(Debug)]
pub struct ServedModel {
    /// As in the repository.
    pub model: Rc<Model>,
    /// What one of its tasks needs.
    pub slot_size: SlotSize,
    /// What the scheduler said last; `None` before it said anything, and after it was lost.
    pub offer: Option<Offer>,
    /// What clients have made of it, as the scheduler said last.
    pub state: ModelState,
    /// Whether the repository has, or had when it was read last, this version among those that are to be served.
    is_listed: bool,
    /// Which load of it this is, as far as can be told here: no two that may answer differently have the same number.
    /// It grows with each load and unload, whenever a backend comes, and whenever another scheduler is obeyed.
    pub load: u64,
}

impl ServedModel {
    /// Whether it is an ensemble, which takes no slots and is never offered.
    #[must_use]
    pub fn is_ensemble(&self) -> bool {
        self.model.ensemble().is_some()
    }

    /// Whether this version is to be served; one that another has taken the place of may go on for a while.
    #[must_use]
    pub fn is_listed(&self) -> bool {
        self.is_listed
    }

    /// What it is told by stays, for whoever asks about it.
    fn let_files_go(&mut self) {
        if self.model.files.is_some() {
            Rc::make_mut(&mut self.model).files = None;
        }
    }
}

/// The scheduler's word on a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// Assigned by the scheduler.
    pub id: ModelId,
    /// Which ModelThread owns it: new tasks go there.
    pub model_thread: ModelThreadId,
    /// GPUs that host it and can reach our slots.
    pub gpus: u32,
    /// The least time from submission to answer.
    pub least_latency: Span,
    /// How much it gains by time for larger batches.
    pub batching: Span,
    /// The network's part of that.
    pub network: NetworkTimes,
}

/// All models. One that has come keeps its index.
#[derive(Debug, Default)]
pub struct ModelTable {
    models: Vec<ServedModel>,
    /// The indexes of each model's versions, by their numbers.
    by_name: BTreeMap<String, BTreeMap<u64, usize>>,
    /// Why those of the repository that are not among them cannot be served, by name and version; that is empty where
    /// the whole model cannot.
    refused: BTreeMap<(String, String), String>,
    /// All that the primary said.
    spoken: Spoken,
    /// Loads that have been numbered.
    loads: u64,
}

impl ModelTable {
    /// The repository's models, none of them offered yet.
    #[must_use]
    pub fn new(models: Vec<Model>) -> Self {
        let mut table = Self::default();
        for model in models {
            table.handle_version(model);
        }
        table
    }

    /// Whether these versions of a model can be served beside all others.
    ///
    /// # Errors
    /// If too many have been served; if a model would become an ensemble, or an ensemble a model; or if an ensemble
    /// does not fit its members.
    pub fn check(&self, versions: &[Model]) -> Result<(), String> {
        self.check_room(versions)?;
        for model in versions {
            let mut known = self.by_name.get(&model.name).into_iter().flat_map(BTreeMap::values);
            let is_other = |index: &usize| self.models[*index].is_ensemble() != model.ensemble().is_some();
            if known.any(is_other) {
                let [found, expected] = match model.ensemble() {
                    Some(_) => ["an ensemble", "a model"],
                    None => ["a model", "an ensemble"],
                };
                let text = "as the name was when this frontend started: restart it, or take another name";
                return Err(format!("'{}': found {found}, expected {expected}, {text}", model.name));
            }
            let find = |name: &str, version: Option<&str>| self.member(name, version).map(|(_, served)| &*served.model);
            model.joined(find).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Whether an ensemble fits its members as they are; anything else does.
    ///
    /// # Errors
    /// What does not fit.
    pub fn check_members(&self, model: &Model) -> Result<(), String> {
        let Some(ensemble) = model.ensemble() else { return Ok(()) };
        let find = |name: &str, version: Option<&str>| self.member(name, version).map(|(_, served)| &*served.model);
        let Some(nested) = &ensemble.nested else {
            return ensemble.check(model, find).map_err(|error| error.to_string());
        };
        for (name, version) in &nested.inner {
            let found = self.member(name, version.as_deref());
            if found.is_some_and(|(_, found)| matches!(found.state, ModelState::Unloading | ModelState::Unloaded)) {
                return Err(format!("ensemble '{}': '{name}', which it asks, is unloaded", model.name));
            }
        }
        match model.joined(find) {
            Ok(Some(joined)) if *joined == *ensemble => Ok(()),
            Ok(_) => Err(format!("ensemble '{}': one that it asks has been loaded anew", model.name)),
            Err(error) => Err(error.to_string()),
        }
    }

    /// A model that a step of an ensemble asks, and its index.
    #[must_use]
    pub fn member(&self, name: &str, version: Option<&str>) -> Option<(usize, &ServedModel)> {
        let index = self.find(name, version).ok()?;
        Some((index, &self.models[index]))
    }

    fn check_room(&self, versions: &[Model]) -> Result<(), String> {
        let is_new = |model: &&Model| self.position(&model.name, &model.version).is_none();
        if self.models.len() + versions.iter().filter(is_new).count() > VERSIONS_EVER_MAX {
            return Err(format!("this frontend has served {VERSIONS_EVER_MAX} versions of models; restart it"));
        }
        Ok(())
    }

    /// Takes in a model as it was read: all versions that are to be served, instead of what was known under its name.
    /// Yields their indexes, and those of ensembles that have other steps by this.
    pub fn handle_model(&mut self, versions: Vec<Model>) -> Vec<usize> {
        if let Some(Model { name, .. }) = versions.first() {
            for index in self.by_name.get(name).into_iter().flat_map(BTreeMap::values) {
                let served = &mut self.models[*index];
                (served.is_listed, served.state) = (false, ModelState::Unloaded);
                served.load = next(&mut self.loads);
                served.let_files_go();
            }
            self.refused.retain(|(refused, _), _| refused != name);
        }
        let name = versions.first().map(|model| model.name.clone());
        let mut read: Vec<usize> = versions.into_iter().map(|model| self.handle_version(model)).collect();
        read.extend(name.into_iter().flat_map(|name| self.join_those_that_ask(&name)));
        read
    }

    /// Graphs that have the steps of this ensemble in them are of those that it has now. Yields their indexes. One that
    /// does not fit any more stays as it is, and cannot be asked.
    fn join_those_that_ask(&mut self, name: &str) -> Vec<usize> {
        let find = |name: &str, version: Option<&str>| self.member(name, version).map(|(_, served)| &*served.model);
        let asks = |model: &Model| {
            let nested = model.ensemble().and_then(|ensemble| ensemble.nested.as_ref());
            nested.is_some_and(|nested| nested.inner.iter().any(|(inner, _)| inner == name))
        };
        let joined = self.models.iter().enumerate().filter(|(_, served)| asks(&served.model));
        let joined = joined.filter_map(|(index, ServedModel { model, .. })| {
            let mut again = Model::clone(model);
            again.join(find).ok()?;
            (again.ensemble() != model.ensemble()).then_some((index, again))
        });
        let joined: Vec<(usize, Model)> = joined.collect();
        let indexes = joined.iter().map(|(index, _)| *index).collect();
        for (index, model) in joined {
            let served = &mut self.models[index];
            (served.model, served.load) = (Rc::new(model), next(&mut self.loads));
        }
        indexes
    }

    fn handle_version(&mut self, mut model: Model) -> usize {
        let find = |name: &str, version: Option<&str>| self.member(name, version).map(|(_, served)| &*served.model);
        // One that is read before those that it asks has their steps already, or is refused before.
        let _ = model.join(find);
        model.inherit_labels(find);
        let (name, version) = (model.name.clone(), number(&model.version));
        let (offer, state) = (self.spoken.offer(&name, &model.version), self.spoken.state(&name));
        let slot_size = SlotSize::new(model.input_bytes(), model.output_bytes());
        let load = next(&mut self.loads);
        let served = ServedModel { slot_size, model: Rc::new(model), offer, state, is_listed: true, load };
        let index = *self.by_name.entry(name).or_default().entry(version).or_insert(self.models.len());
        match self.models.get_mut(index) {
            Some(known) => *known = served,
            None => self.models.push(served),
        }
        index
    }

    /// A model of the repository, or one version of it, cannot be served, for this reason. What is served stays as it
    /// is.
    pub fn handle_refused(&mut self, Refused { name, version, reason }: Refused) {
        let versions = self.by_name.get(&name);
        let is_served = match &version[..] {
            "" => versions.is_some(),
            version => versions.is_some_and(|versions| versions.contains_key(&number(version))),
        };
        let key = (name, version);
        if !is_served && (self.refused.len() < REFUSED_MAX || self.refused.contains_key(&key)) {
            self.refused.insert(key, reason);
        }
    }

    /// Models and versions that cannot be served, and why. The version is empty where the whole model cannot.
    pub fn refused(&self) -> impl Iterator<Item = (&str, &str, &str)> {
        self.refused.iter().map(|((name, version), reason)| (name.as_str(), version.as_str(), reason.as_str()))
    }

    /// The index of a model, by the name and, if given, the version that a client asked for; otherwise of the newest
    /// version that is served.
    ///
    /// # Errors
    /// If there is none of that name, or it has no such version. As Triton says it.
    pub fn find(&self, name: &str, version: Option<&str>) -> Result<usize, InferError> {
        let Some(versions) = self.by_name.get(name) else {
            let prefix = (name.to_owned(), String::new());
            if let Some((_, reason)) = self.refused.range(prefix..).next().filter(|((refused, _), _)| refused == name) {
                let text = format!("Request for unknown model: '{name}' cannot be served: {reason}");
                return Err(InferError::NotFound(text));
            }
            // As Triton says it.
            return Err(InferError::NotFound(format!(
                "Request for unknown model: '{}' is not found, expected one of: {}",
                excerpt(name),
                repository::listed(self.by_name.keys().map(String::as_str))
            )));
        };
        if let Some(version) = version {
            let known = || versions.keys().map(u64::to_string).collect::<Vec<_>>().join(", ");
            // As Triton says it, both times.
            let number = version.parse::<i64>().map_err(|_| {
                InferError::Invalid(format!(
                    "failed to get model version from specified version string '{}', expected one of: {}",
                    excerpt(version),
                    known()
                ))
            })?;
            let found = u64::try_from(number).ok().and_then(|number| versions.get(&number));
            return found.copied().ok_or_else(|| {
                InferError::NotFound(format!(
                    "Request for unknown model: '{name}' version {number} is not found, expected one of: {}",
                    known()
                ))
            });
        }
        let newest = |is_meant: &dyn Fn(&ServedModel) -> bool| {
            versions.values().rev().copied().find(|&index| is_meant(&self.models[index]))
        };
        let is_offered = |served: &ServedModel| served.offer.is_some_and(|offer| offer.gpus > 0);
        let found = newest(&is_offered).or_else(|| newest(&|served| served.is_listed)).or_else(|| newest(&|_| true));
        Ok(found.expect("a name is known by a version"))
    }

    /// The versions of a model that are to be served, ascending; none if there is no such model.
    pub fn versions(&self, name: &str) -> impl Iterator<Item = usize> {
        let versions = self.by_name.get(name).into_iter().flat_map(BTreeMap::values).copied();
        versions.filter(|&index| self.models[index].is_listed)
    }

    /// The model at an index that [`Self::find`] gave.
    #[must_use]
    pub fn get(&self, index: usize) -> &ServedModel {
        &self.models[index]
    }

    /// All versions of all models and their indexes, by name and version.
    pub fn sorted(&self) -> impl Iterator<Item = (usize, &ServedModel)> {
        self.by_name.values().flat_map(BTreeMap::values).map(|&index| (index, &self.models[index]))
    }

    /// All models, by index.
    pub fn iter(&self) -> impl Iterator<Item = &ServedModel> {
        self.models.iter()
    }

    /// Takes in the scheduler's word on a model. False if the repository has no such model and version.
    pub fn handle_offer(&mut self, name: &str, version: &str, offer: Offer) -> bool {
        if !self.spoken.handle_offer(name, version, offer) {
            return false;
        }
        let Some(index) = self.position(name, version) else { return false };
        self.models[index].offer = Some(offer);
        true
    }

    /// Takes in what clients have made of a model. True if it has been loaded since it was last spoken of.
    pub fn handle_state(&mut self, name: &str, (state, loads): (ModelState, u32), brought: Option<Brought>) -> bool {
        let Some(loads_before) = self.spoken.handle_state(name, (state, loads), brought) else { return false };
        for &index in self.by_name.get(name).into_iter().flat_map(BTreeMap::values) {
            let served = &mut self.models[index];
            served.load = next(&mut self.loads);
            if served.is_listed {
                served.state = state;
            }
            if state == ModelState::Unloaded {
                served.let_files_go();
            }
        }
        loads > loads_before
    }

    /// Takes in whether a version of a model, or, if it is empty, any of them could not be loaded, and why.
    pub(crate) fn handle_not_loaded(&mut self, name: String, version: String, reason: Option<String>) {
        self.spoken.handle_not_loaded(name, version, reason);
    }

    /// Why a model could not be loaded when that was tried last, if so.
    #[must_use]
    pub fn reason_against(&self, model: &Model) -> Option<&str> {
        self.spoken.reason_against(&model.name, &model.version)
    }

    /// What a model was loaded with, if not what the repository has.
    pub(crate) fn brought(&self, name: &str) -> Option<&Brought> {
        self.spoken.brought(name)
    }

    fn position(&self, name: &str, version: &str) -> Option<usize> {
        let index = *self.by_name.get(name)?.get(&number(version))?;
        (self.models[index].model.version == version).then_some(index)
    }

    /// The word of a scheduler that is obeyed from now on takes the place of what another said.
    pub(crate) fn handle_obeyed(&mut self, spoken: Spoken) {
        let former = std::mem::replace(&mut self.spoken, spoken);
        self.spoken.inherit_states(former);
        for served in &mut self.models {
            let model = &served.model;
            let state = if served.is_listed { self.spoken.state(&model.name) } else { ModelState::Unloaded };
            (served.offer, served.state) = (self.spoken.offer(&model.name, &model.version), state);
        }
        self.renew_loads();
    }

    /// From now on others answer than before: a backend that comes may have read its models anew.
    pub(crate) fn renew_loads(&mut self) {
        self.models.iter_mut().for_each(|served| served.load = next(&mut self.loads));
    }

    /// What the primary says of a model that may have been read anew since.
    pub(crate) fn offer_of(&self, model: &Model) -> Option<Offer> {
        match self.position(&model.name, &model.version) {
            Some(index) => self.models[index].offer,
            None => self.spoken.offer(&model.name, &model.version),
        }
    }

    /// Forgets everything that the scheduler said.
    pub fn clear_offers(&mut self) {
        self.spoken = Spoken::default();
        for served in &mut self.models {
            served.offer = None;
            if served.is_listed {
                served.state = ModelState::Serving;
            }
        }
        self.renew_loads();
    }
}

fn next(loads: &mut u64) -> u64 {
    *loads += 1;
    *loads
}

/// The order of versions.
fn number(version: &str) -> u64 {
    version.parse().unwrap_or_default()
}

/// A client's text for an error message: short, and on one line whatever is in it.
#[must_use]
pub fn excerpt(text: &str) -> String {
    const CHARS_MAX: usize = 64;
    let cut = if text.chars().nth(CHARS_MAX).is_some() { "..." } else { "" };
    let shown =
        text.chars().take(CHARS_MAX).map(|char| if char.is_control() { char::REPLACEMENT_CHARACTER } else { char });
    shown.chain(cut.chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn version(name: &str, version: &str) -> Model {
        Model { version: version.to_owned(), ..testing::model(name, vec![], vec![]) }
    }

    fn refused(name: &str, version: &str, reason: &str) -> Refused {
        Refused { name: name.to_owned(), version: version.to_owned(), reason: reason.to_owned() }
    }

    #[test]
    fn a_model_that_cannot_be_served_is_known_until_it_can_be() {
        let mut table = ModelTable::new(vec![version("good", "1")]);
        table.handle_refused(refused("bad", "", "bad/config.pbtxt: dims: found 0"));
        table.handle_refused(refused("good", "", "its next version"));
        table.handle_refused(refused("good", "2", "no file"));
        let expected = [("bad", "", "bad/config.pbtxt: dims: found 0"), ("good", "2", "no file")];
        assert_eq!(table.refused().collect::<Vec<_>>(), expected);
        let error = table.find("bad", None).unwrap_err().to_string();
        assert!(error.ends_with("'bad' cannot be served: bad/config.pbtxt: dims: found 0"), "{error}");
        assert_eq!(table.handle_model(vec![version("bad", "1")]), [1]);
        assert_eq!((table.refused().count(), table.find("bad", None)), (1, Ok(1)));
        (0..REFUSED_MAX + 9).for_each(|n| table.handle_refused(refused(&n.to_string(), "", "")));
        assert_eq!(table.refused().count(), REFUSED_MAX);
    }

    fn offer(gpus: u32) -> Offer {
        let (id, model_thread, network) = (ModelId(0), ModelThreadId(0), NetworkTimes::default());
        Offer { id, model_thread, gpus, least_latency: Span::ZERO, batching: Span::ZERO, network }
    }

    #[test]
    fn an_ensemble_fits_its_members_and_keeps_its_name() {
        let tensor = |name: &str| testing::tensor(name, repository::DataType::Uint8, &[4]);
        let member = |name: &str| testing::model(name, vec![tensor("x")], vec![tensor("y")]);
        let ensemble = |name: &str, of: &str| {
            let map = |name: &str, tensor| vec![(name.to_owned(), tensor)];
            let (inputs, outputs) = (map("x", 0), map("y", 1));
            let step = repository::EnsembleStep { model: of.to_owned(), version: None, inputs, outputs };
            let tensors = ["x", "y"].map(str::to_owned).into();
            let graph =
                repository::Ensemble { steps: vec![step], tensors, outputs: vec![1], selection: None, nested: None };
            Model { executor: repository::Executor::Ensemble(std::sync::Arc::new(graph)), ..member(name) }
        };
        let table = ModelTable::new(vec![member("m"), ensemble("e", "m")]);
        assert_eq!((table.find("e", None), table.check(&[ensemble("f", "m")])), (Ok(1), Ok(())));
        for (wrong, expected) in [
            (
                ensemble("f", "none"),
                "ensemble 'f': ensemble_scheduling.step[0].model_name: found 'none', expected a model",
            ),
            (ensemble("e", "e"), "found 'e', an ensemble: a cycle: e asks it, expected one that can be asked"),
            (
                ensemble("m", "m"),
                "'m': found an ensemble, expected a model, as the name was when this frontend started",
            ),
            (member("e"), "'e': found a model, expected an ensemble, as the name was when this frontend started"),
        ] {
            let error = table.check(&[wrong]).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        // A member that is loaded with other tensors leaves the ensemble behind.
        let mut table = table;
        table.handle_model(vec![testing::model("m", vec![tensor("other")], vec![tensor("y")])]);
        let error = table.check_members(&ensemble("e", "m")).unwrap_err();
        assert!(error.contains("input_map: found none, expected one for input 'other' of model 'm'"), "{error}");
    }

    /// `outer` asks `e`, which asks `m` and then also `n`.
    #[test]
    fn an_ensemble_that_asks_another_has_the_steps_that_this_has_now() {
        let tensor = |name: &str| testing::tensor(name, repository::DataType::Uint8, &[4]);
        let member = |name: &str| testing::model(name, vec![tensor("x")], vec![tensor("y")]);
        let chain = |name: &str, of: &[&str]| {
            let step = |(at, model): (usize, &&str)| repository::EnsembleStep {
                model: (*model).to_owned(),
                version: None,
                inputs: vec![("x".to_owned(), at)],
                outputs: vec![("y".to_owned(), at + 1)],
            };
            let tensors = (0..=of.len()).map(|at| if at == of.len() { "y".into() } else { ["x", "t"][at].into() });
            let graph = repository::Ensemble {
                steps: of.iter().enumerate().map(step).collect(),
                tensors: tensors.collect(),
                outputs: vec![of.len()],
                selection: None,
                nested: None,
            };
            Model { executor: repository::Executor::Ensemble(std::sync::Arc::new(graph)), ..member(name) }
        };
        let mut table =
            ModelTable::new(vec![member("m"), member("n"), chain("e", &["m"]), chain("outer", &["e", "n"])]);
        let steps = |table: &ModelTable| {
            let outer = Rc::clone(&table.get(3).model);
            assert_eq!(table.check_members(&outer), Ok(()));
            outer.ensemble().unwrap().steps.iter().map(|step| step.model.clone()).collect::<Vec<_>>()
        };
        assert_eq!(steps(&table), ["m", "n"]);
        let (before, load) = (Rc::clone(&table.get(3).model), table.get(3).load);
        assert_eq!(table.handle_model(vec![chain("e", &["m", "n"])]), [2, 3], "both are others now");
        assert_eq!(steps(&table), ["m", "n", "n"]);
        assert!(table.get(3).load > load && !Rc::ptr_eq(&before, &table.get(3).model));
        let error = table.check_members(&before).unwrap_err();
        assert_eq!(error, "ensemble 'outer': one that it asks has been loaded anew");
        // It cannot ask what cannot be asked, and what is unloaded.
        table.handle_state("e", (ModelState::Unloaded, 1), None);
        let error = table.check_members(&table.get(3).model).unwrap_err();
        assert_eq!(error, "ensemble 'outer': 'e', which it asks, is unloaded");
        table.handle_state("e", (ModelState::Serving, 2), None);
        assert_eq!(table.handle_model(vec![chain("e", &["outer"])]), [2]);
        let error = table.check_members(&table.get(3).model).unwrap_err();
        assert!(error.contains("a cycle: outer, which asks e asks it"), "{error}");
    }

    #[test]
    fn without_a_version_the_newest_is_found_that_is_served() {
        let mut table = ModelTable::new(["2", "9", "10"].map(|number| version("m", number)).into());
        assert_eq!(table.find("m", None), Ok(2), "10 is above 9");
        assert!(table.handle_offer("m", "9", offer(1)) && table.handle_offer("m", "2", offer(1)));
        assert_eq!(
            (table.find("m", None), table.find("m", Some("10")), table.find("m", Some("2"))),
            (Ok(1), Ok(2), Ok(0))
        );
        table.handle_offer("m", "10", offer(0));
        assert_eq!(table.find("m", None), Ok(1), "nobody hosts the newest");
        for wrong in ["ten", "10 ", "9223372036854775808"] {
            let error = table.find("m", Some(wrong)).unwrap_err();
            let expected = format!("from specified version string '{wrong}', expected one of: 2, 9, 10");
            assert!(matches!(&error, InferError::Invalid(text) if text.ends_with(&expected)), "{error}");
        }
        for unknown in ["1", "-1"] {
            let error = table.find("m", Some(unknown)).unwrap_err().to_string();
            let expected = format!("unknown model: 'm' version {unknown} is not found, expected one of: 2, 9, 10");
            assert!(error.ends_with(&expected), "{error}");
        }
    }

    #[test]
    fn files_are_held_as_long_as_they_are_served() {
        let folder = tempfile::tempdir().unwrap();
        let store = repository::Store::open(folder.path()).unwrap();
        let with_files = |number: &str| Model { files: Some(store.keep("m", &[], 0).unwrap()), ..version("m", number) };
        let mut table = ModelTable::new(vec![version("m", "2")]);
        let held =
            |table: &ModelTable| -> Vec<bool> { table.iter().map(|served| served.model.files.is_some()).collect() };
        table.handle_model(vec![with_files("2"), with_files("3")]);
        assert_eq!(held(&table), [true, true]);
        let under_way = Rc::clone(&table.get(1).model);
        table.handle_model(vec![with_files("2")]);
        assert_eq!(held(&table), [true, false], "version 3 is not served any more");
        assert!(under_way.files.is_some(), "a request has it");
        for (state, expected) in
            [(ModelState::Loading, true), (ModelState::Unloading, true), (ModelState::Unloaded, false)]
        {
            table.handle_state("m", (state, 1), None);
            assert_eq!(held(&table), [expected, false]);
        }
        assert_eq!(table.get(0).model.name, "m", "what is told of it stays");
    }

    #[test]
    fn versions_that_are_not_to_be_served_any_more_keep_their_place_and_are_unloaded() {
        let mut table = ModelTable::new(vec![version("m", "1"), version("m", "2")]);
        table.handle_offer("m", "1", offer(1));
        assert_eq!(table.handle_model(vec![version("m", "2"), version("m", "3")]), [1, 2]);
        assert_eq!(table.versions("m").collect::<Vec<_>>(), [1, 2]);
        table.handle_state("m", (ModelState::Loading, 1), None);
        let states: Vec<_> = table.sorted().map(|(_, served)| served.state).collect();
        assert_eq!(states, [ModelState::Unloaded, ModelState::Loading, ModelState::Loading]);
        table.handle_offer("m", "1", offer(0));
        assert_eq!(table.find("m", None), Ok(2));
        assert_eq!(table.handle_model(vec![version("m", "1")]), [0], "it is back");
        assert_eq!(table.find("m", None), Ok(0));
    }
}
