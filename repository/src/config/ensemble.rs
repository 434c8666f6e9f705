//! `ensemble_scheduling`: the graph of an ensemble, as far as its own configuration says it.

use std::collections::BTreeMap;

use prost_reflect::{DynamicMessage, MapKey, Value};

use crate::{
    config::{
        configuration::told,
        file::{ConfigFile, get, text},
    },
    ensemble::{Ensemble, EnsembleStep, STEPS_MAX},
    error::RepositoryError,
    model::ENSEMBLE,
    tensor::Tensor,
};

const KEY: &str = "ensemble_scheduling";

/// A step as it is written: its tensors by name.
struct Written {
    /// Its place in the configuration.
    at: usize,
    model: String,
    version: Option<String>,
    inputs: BTreeMap<String, String>,
    outputs: BTreeMap<String, String>,
}

impl ConfigFile<'_> {
    /// Whether `platform` and the graph are there together, or neither is.
    pub(super) fn check_ensemble(&self) -> Result<(), RepositoryError> {
        let is_scheduled = self.message.has_field_by_name(KEY);
        match (self.executor_name() == ENSEMBLE, is_scheduled) {
            (true, false) => Err(self.error(KEY, "none", "the steps of the ensemble that platform says it is")),
            (false, true) => {
                let found = format!("\"{}\" beside {KEY}", self.executor_name());
                Err(self.error("platform", found, "\"ensemble\" and no backend"))
            }
            _ => Ok(()),
        }
    }

    /// Whether a client's configuration has the graph that the model's own has, or none: whoever may have an ensemble
    /// asked has its members asked, so clients must not choose these.
    pub(super) fn check_graph(&self, own: &DynamicMessage) -> Result<(), RepositoryError> {
        // As clients are told it: what is said and what is left out may be the same.
        let graph = |message: &DynamicMessage| {
            let graph = message.has_field_by_name(KEY).then(|| get(message, KEY))?;
            graph.as_message().map(told)
        };
        match graph(&self.message) {
            Some(found) if graph(own).as_ref() != Some(&found) => Err(self.error(
                KEY,
                "another graph",
                "what config.pbtxt has: clients do not say which models are asked",
            )),
            _ => Ok(()),
        }
    }

    /// The graph of the ensemble of these inputs and outputs.
    pub(super) fn ensemble(&self, inputs: &[Tensor], own_outputs: &[Tensor]) -> Result<Ensemble, RepositoryError> {
        let scheduling = get(&self.message, KEY);
        let steps = get(scheduling.as_message().expect("the schema says message"), "step");
        let steps = steps.as_list().unwrap_or_default();
        if !(1..=STEPS_MAX).contains(&steps.len()) {
            return Err(self.error(&format!("{KEY}.step"), steps.len(), format_args!("1 to {STEPS_MAX} steps")));
        }
        let steps = steps.iter().filter_map(Value::as_message).enumerate().map(|(at, step)| self.step(at, step));
        let steps: Vec<Written> = steps.collect::<Result<_, _>>()?;
        let tensors = self.tensors_of(&steps, inputs)?;
        let index = |name: &str| tensors.iter().position(|tensor| tensor == name);
        for step in &steps {
            if let Some((input, from)) = step.inputs.iter().find(|(_, from)| index(from).is_none()) {
                let key = format!("{KEY}.step[{}].input_map['{input}']", step.at);
                return Err(self.error(
                    &key,
                    format_args!("'{from}'"),
                    "an input of the ensemble, or what a step makes",
                ));
            }
        }
        let made = |tensor: &Tensor| {
            let is_made = steps.iter().any(|step| step.outputs.values().any(|to| *to == tensor.name));
            let missing = || {
                let key = format!("output '{}'", tensor.name);
                self.error(&key, "no step that makes it", format_args!("it in some output_map of {KEY}"))
            };
            index(&tensor.name).filter(|_| is_made).ok_or_else(missing)
        };
        let outputs: Vec<usize> = own_outputs.iter().map(made).collect::<Result<_, _>>()?;
        let steps = self.ordered(steps, inputs)?;
        let places = |map: BTreeMap<String, String>| -> Vec<(String, usize)> {
            map.into_iter().map(|(name, tensor)| (name, index(&tensor).expect("it was looked for"))).collect()
        };
        let steps = steps.into_iter().map(|Written { model, version, inputs, outputs, .. }| EnsembleStep {
            model,
            version,
            inputs: places(inputs),
            outputs: places(outputs),
        });
        let steps: Vec<EnsembleStep> = steps.collect();
        let selection = self.selection(&steps, inputs, (own_outputs, &outputs))?;
        Ok(Ensemble { steps, outputs, tensors, selection, nested: None })
    }

    fn step(&self, at: usize, step: &DynamicMessage) -> Result<Written, RepositoryError> {
        let key = |key: &str| format!("{KEY}.step[{at}].{key}");
        let model = text(step, "model_name");
        if model.is_empty() {
            return Err(self.error(&key("model_name"), "none", "the model that runs it"));
        }
        if model == self.name()? {
            return Err(self.error(&key("model_name"), format_args!("'{model}', the ensemble itself"), "another one"));
        }
        let namespace = text(step, "model_namespace");
        if !namespace.is_empty() {
            return Err(self.error(&key("model_namespace"), format_args!("'{namespace}'"), "none: there is one"));
        }
        let version = match get(step, "model_version").as_i64().unwrap_or_default() {
            // Nothing is said, or that it does not matter.
            0 | -1 => None,
            number @ 1.. => Some(number.to_string()),
            other => return Err(self.error(&key("model_version"), other, "-1 (the newest), or a version's number")),
        };
        let [inputs, outputs] = ["input_map", "output_map"].map(|field| map(step, field));
        for (field, map) in [("input_map", &inputs), ("output_map", &outputs)] {
            if map.is_empty() {
                return Err(self.error(&key(field), "none", "at least one tensor"));
            }
        }
        Ok(Written { at, model, version, inputs, outputs })
    }

    /// The names of all tensors, each of which is made once, or by models of one task.
    fn tensors_of(&self, steps: &[Written], inputs: &[Tensor]) -> Result<Vec<String>, RepositoryError> {
        let mut tensors: Vec<String> = inputs.iter().map(|input| input.name.clone()).collect();
        for step in steps {
            for (output, to) in &step.outputs {
                if tensors.contains(to) && !(self.selects() && inputs.iter().all(|input| input.name != *to)) {
                    let key = format!("{KEY}.step[{}].output_map['{output}']", step.at);
                    let found = format!("'{to}', which is an input of the ensemble, or made elsewhere already");
                    return Err(self.error(&key, found, "a tensor that nothing else makes"));
                }
                if !tensors.contains(to) {
                    tensors.push(to.clone());
                }
            }
        }
        Ok(tensors)
    }

    /// The steps, each after all whose tensors it takes, which are all made.
    fn ordered(&self, mut steps: Vec<Written>, inputs: &[Tensor]) -> Result<Vec<Written>, RepositoryError> {
        let mut made: Vec<String> = inputs.iter().map(|input| input.name.clone()).collect();
        let mut ordered = Vec::with_capacity(steps.len());
        while !steps.is_empty() {
            let is_ready = |step: &Written| step.inputs.values().all(|from| made.contains(from));
            let Some(next) = steps.iter().position(is_ready) else {
                let names: Vec<String> = steps.iter().map(|step| format!("{} ({})", step.at, step.model)).collect();
                let found = format!("a cycle among the steps {}", names.join(", "));
                return Err(self.error(&format!("{KEY}.step"), found, "steps that need no tensor of later ones"));
            };
            let step = steps.remove(next);
            made.extend(step.outputs.values().cloned());
            ordered.push(step);
        }
        Ok(ordered)
    }
}

/// A map of names.
fn map(message: &DynamicMessage, field: &str) -> BTreeMap<String, String> {
    let value = get(message, field);
    let entries = value.as_map().into_iter().flatten();
    let texts = entries.filter_map(|(key, value)| match key {
        MapKey::String(key) => Some((key.clone(), value.as_str()?.to_owned())),
        _ => None,
    });
    texts.collect()
}

#[cfg(test)]
mod tests;
