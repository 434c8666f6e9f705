//! Ensembles that ask ensembles, as Triton has them: the steps of the inner one take the place of the step that asks
//! it, so that a graph is of models alone. What each of them takes and makes is checked first, as if it were a model.
//!
//! An inner ensemble is there for its graph: its objective, its priority levels and its cache are those of requests
//! that ask for itself.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    ensemble::{Ensemble, EnsembleStep, Nested, STEPS_MAX},
    error::RepositoryError,
    members::wrong,
    model::{Executor, Model},
};

/// Ensembles that one may have inside one another, itself among them.
pub(crate) const DEPTH_MAX: usize = 8;

impl Model {
    /// The graph of an ensemble, with the steps of those that it asks in their places; nothing of what is none. `find`
    /// finds models and ensembles by name and version.
    ///
    /// # Errors
    /// What does not fit in it or in one that it asks, in one line.
    pub fn joined<'m>(
        &self,
        find: impl Fn(&str, Option<&str>) -> Option<&'m Self>,
    ) -> Result<Option<Arc<Ensemble>>, RepositoryError> {
        let Executor::Ensemble(ensemble) = &self.executor else { return Ok(None) };
        let written = ensemble.written();
        written.check_asked(self, &find)?;
        let (steps, tensors, inner) = (Vec::new(), written.tensors.clone(), Vec::new());
        let mut joining = Joining { find: &find, steps, tensors, inner, is_full: false };
        joining.add(&mut vec![self.name.clone()], (self, written), &(0..written.tensors.len()).map(Some).collect())?;
        let Joining { steps, tensors, inner, is_full, .. } = joining;
        if is_full {
            let found = "more with those of the ensembles that it asks";
            return Err(wrong(self, "ensemble_scheduling.step", found, format_args!("at most {STEPS_MAX} steps")));
        }
        if inner.is_empty() {
            return Ok(Some(Arc::new(written.clone())));
        }
        let nested = Some(Arc::new(Nested { written: written.clone(), inner }));
        let joined = Ensemble { steps, tensors, outputs: written.outputs.clone(), selection: None, nested };
        joined.check(self, &find)?;
        Ok(Some(Arc::new(joined)))
    }

    /// Takes on its graph as it is joined now, if it is an ensemble.
    ///
    /// # Errors
    /// As [`Self::joined`].
    pub fn join<'m>(&mut self, find: impl Fn(&str, Option<&str>) -> Option<&'m Self>) -> Result<(), RepositoryError> {
        if let Some(graph) = self.joined(find)? {
            self.executor = Executor::Ensemble(graph);
        }
        Ok(())
    }
}

/// A graph that is being joined.
struct Joining<'f, F> {
    find: &'f F,
    steps: Vec<EnsembleStep>,
    tensors: Vec<String>,
    inner: Vec<(String, Option<String>)>,
    /// There are more steps than may be.
    is_full: bool,
}

/// Which tensor of the whole each tensor of an inner graph is; none of an input that is left out.
type Places = Vec<Option<usize>>;

impl<'m, F: Fn(&str, Option<&str>) -> Option<&'m Model>> Joining<'_, F> {
    /// Adds the steps of a graph. `path` has the names of the ensembles that it is in, and its own.
    fn add(
        &mut self,
        path: &mut Vec<String>,
        (face, graph): (&Model, &Ensemble),
        places: &Places,
    ) -> Result<(), RepositoryError> {
        for (at, step) in graph.steps.iter().enumerate() {
            let found = (self.find)(&step.model, step.version.as_deref());
            match found.and_then(|found| Some((found, found.ensemble()?.written()))) {
                Some(inner) => {
                    let refused = |RepositoryError(reason)| {
                        let key = format!("ensemble_scheduling.step[{at}].model_name");
                        let found = format!("'{}', an ensemble: {reason}", step.model);
                        wrong(face, &key, found, "one that can be asked in another")
                    };
                    self.add_inner(path, step, inner, places).map_err(refused)?;
                }
                None if self.steps.len() == STEPS_MAX => self.is_full = true,
                None => self.steps.push(self.placed(step, places)),
            }
            if self.is_full {
                break;
            }
        }
        Ok(())
    }

    /// Adds the steps of an ensemble that a step asks.
    fn add_inner(
        &mut self,
        path: &mut Vec<String>,
        step: &EnsembleStep,
        (face, graph): (&'m Model, &'m Ensemble),
        places: &Places,
    ) -> Result<(), RepositoryError> {
        if path.contains(&face.name) {
            return Err(RepositoryError(format!("a cycle: {} asks it", path.join(", which asks "))));
        }
        if path.len() >= DEPTH_MAX {
            return Err(RepositoryError(format!("more than {DEPTH_MAX} inside one another: {}", path.join(", "))));
        }
        if graph.selection.is_some() {
            return Err(RepositoryError("it selects from models of one task".to_owned()));
        }
        graph.check_asked(face, self.find)?;
        let named = |map: &[(String, usize)]| -> BTreeMap<String, Option<usize>> {
            map.iter().map(|(name, tensor)| (name.clone(), places[*tensor])).collect()
        };
        let (given, taken) = (named(&step.inputs), named(&step.outputs));
        let inputs = face.inputs.len();
        let inner = graph.tensors.iter().enumerate().map(|(at, tensor)| {
            let outside = if at < inputs { &given } else { &taken };
            outside.get(tensor).copied().unwrap_or_else(|| {
                // One that stays inside is new; an input that nothing is given to is left out.
                (at >= inputs).then(|| {
                    self.tensors.push(format!("{}.{tensor}", face.name));
                    self.tensors.len() - 1
                })
            })
        });
        let inner: Places = inner.collect();
        self.inner.push((face.name.clone(), step.version.clone()));
        path.push(face.name.clone());
        self.add(path, (face, graph), &inner)?;
        path.pop();
        Ok(())
    }

    /// A step that asks a model, with tensors of the whole.
    fn placed(&self, step: &EnsembleStep, places: &Places) -> EnsembleStep {
        let placed = |map: &[(String, usize)]| {
            map.iter().filter_map(|(name, tensor)| Some((name.clone(), places[*tensor]?))).collect()
        };
        EnsembleStep { inputs: placed(&step.inputs), outputs: placed(&step.outputs), ..step.clone() }
    }
}

#[cfg(test)]
mod tests;
