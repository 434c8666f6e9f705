//! Graphs of models. Where there are some, all requests are theirs: models have no clients of their own.

use std::collections::BTreeMap;

use ::repository::{Ensemble, EnsembleStep, Policy, Selection};
use proto::ModelId;

use super::*;
use crate::workload::graph::{Graph, GraphStep};

/// Graphs of a workload, and steps of each.
const GRAPHS_MAX: usize = 1_000;
const STEPS_MAX: usize = 64;

impl Checks<'_> {
    /// Gives each model the longest objective of the graphs that ask it, so that its batches may be as large.
    pub(super) fn set_objectives(&self, graphs: &[raw::Graph], models: &mut [raw::Model]) -> Result<()> {
        if graphs.is_empty() {
            return Ok(());
        }
        let mut longest: BTreeMap<&str, f64> = BTreeMap::new();
        for graph in graphs {
            self.above_zero(&format!("graph {:?}: slo_ms", graph.name), graph.slo_ms, TIME_MAX_MS)?;
            for step in &graph.steps {
                let longest = longest.entry(&step.model).or_default();
                *longest = longest.max(graph.slo_ms);
            }
        }
        for model in models {
            let Some(name) = &model.name else {
                return self.fail("zoo", "expected named models where there are graphs, found a zoo");
            };
            let key = |key: &str| format!("model {name:?}: {key}");
            let has_clients = model.slo_ms.is_some() || model.classes.is_some() || model.background;
            if has_clients || model.share.is_some() || model.clients.is_some() || model.count.is_some() {
                let problem = "expected no slo_ms, classes, background, share, clients or count where there are graphs";
                return self.fail(format!("model {name:?}"), problem);
            }
            if model.applications.is_some() {
                return self.fail(key("applications"), "expected alpha_ms and beta_ms, or latency_ms, in a graph");
            }
            match longest.get(name.as_str()) {
                Some(slo_ms) => model.slo_ms = Some(*slo_ms),
                None => return self.fail(format!("model {name:?}"), "expected one that a graph asks"),
            }
        }
        Ok(())
    }

    /// The graphs, with the parts of their rate that models have: of all requests, how many ask each.
    pub(super) fn graphs(&self, raw: &[raw::Graph], models: &mut [Model]) -> Result<Vec<Graph>> {
        if raw.is_empty() {
            return Ok(Vec::new());
        }
        if raw.len() > GRAPHS_MAX {
            return self.fail("[[graph]]", format!("expected at most {GRAPHS_MAX}, found {}", raw.len()));
        }
        let mut graphs = raw.iter().map(|graph| self.graph(graph, models)).collect::<Result<Vec<Graph>>>()?;
        let mut names: Vec<&str> = graphs.iter().map(|graph| graph.name.as_str()).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return self.fail("graph: name", format!("expected unique names, found {:?} twice", twice[0]));
        }
        let sum: f64 = graphs.iter().map(|graph| graph.share).sum();
        graphs.iter_mut().for_each(|graph| graph.share /= sum);
        models.iter_mut().for_each(|model| model.share = 0.0);
        for graph in &graphs {
            // Of variants the one that serves most, as the rate's bound follows from it.
            let per_request = |step: &&GraphStep| {
                let profile = &models[step.model.0 as usize].profile;
                profile.latency(profile.max_batch()).as_secs_f64() / profile.max_batch() as f64
            };
            let cheapest = graph.steps.iter().min_by(|a, b| per_request(a).total_cmp(&per_request(b))).copied();
            let asked = if graph.ensemble.selection.is_some() { cheapest.as_slice() } else { &graph.steps[..] };
            for step in asked {
                models[step.model.0 as usize].share += graph.share * step.chance;
            }
        }
        Ok(graphs)
    }

    /// How frontends choose among its steps, if these are variants of one task.
    fn selection(&self, raw: &raw::Graph) -> Result<Option<Selection>> {
        let key = |key: &str| format!("graph {:?}: {key}", raw.name);
        let Some(found) = &raw.selection else { return Ok(None) };
        if found != Policy::Fallback.name() {
            return self.fail(key("selection"), format!("expected \"fallback\", found {found:?}"));
        }
        if raw.steps.iter().any(|step| !step.after.is_empty() || step.chance.is_some() || step.by.is_some()) {
            return self.fail(key("steps"), "expected no after, chance or by beside selection");
        }
        let (agreements, defaults, confidence) = (Vec::new(), None, 0.0);
        let (policy, reply, seed) = (Policy::Fallback, Span::ZERO, 0);
        Ok(Some(Selection { policy, agreements, defaults, confidence, reply, seed }))
    }

    fn graph(&self, raw: &raw::Graph, models: &[Model]) -> Result<Graph> {
        let key = |key: &str| format!("graph {:?}: {key}", raw.name);
        if !(1..=STEPS_MAX).contains(&raw.steps.len()) {
            return self.fail(key("steps"), format!("expected 1 to {STEPS_MAX}, found {}", raw.steps.len()));
        }
        let slo = Span::from_millis_f64(raw.slo_ms);
        let mut steps: Vec<GraphStep> = Vec::new();
        let mut ensemble = Ensemble {
            steps: vec![],
            tensors: vec!["request".to_owned()],
            outputs: vec![],
            selection: self.selection(raw)?,
            nested: None,
        };
        let is_selected = ensemble.selection.is_some();
        for (at, step) in raw.steps.iter().enumerate() {
            let earlier = |model: &str| raw.steps[..at].iter().position(|other| other.model == model);
            if earlier(&step.model).is_some() {
                return self.fail(key("steps"), format!("expected each model once, found {:?} twice", step.model));
            }
            let Some(model) = models.iter().position(|model| model.name == step.model) else {
                return self.fail(key("steps.model"), format!("expected a [[model]], found {:?}", step.model));
            };
            // Step 1 makes tensor 1, as the request itself is tensor 0.
            let mut takes = Vec::new();
            for after in &step.after {
                match earlier(after) {
                    Some(before) => takes.push((after.clone(), before + 1)),
                    None => {
                        let problem = format!("expected models of earlier steps, found {after:?}");
                        return self.fail(key("steps.after"), problem);
                    }
                }
            }
            if takes.is_empty() {
                takes.push(("request".to_owned(), 0));
            }
            // Variants all make the same.
            let made = if is_selected { 1 } else { at + 1 };
            let outputs = vec![(step.model.clone(), made)];
            ensemble.tensors.extend((ensemble.tensors.len() == made).then(|| step.model.clone()));
            ensemble.steps.push(EnsembleStep { model: step.model.clone(), version: None, inputs: takes, outputs });
            let by = step.by.map(|by| self.range(&key("steps.by"), by, 0.001, 1.0)).transpose()?;
            steps.push(GraphStep {
                model: ModelId(model as u32),
                chance: self.range(&key("steps.chance"), step.chance.unwrap_or(1.0), 0.0, 1.0)?,
                by: by.map(|by| Span::from_millis_f64(raw.slo_ms * by)),
            });
        }
        let is_taken =
            |tensor: usize| ensemble.steps.iter().any(|step| step.inputs.iter().any(|(_, from)| *from == tensor));
        ensemble.outputs = (1..ensemble.tensors.len()).filter(|&tensor| !is_taken(tensor)).collect();
        let share = self.above_zero(&key("share"), raw.share.unwrap_or(1.0), 1e9)?;
        let (name, class) = (raw.name.clone(), [Class { slo, share: 1.0 }]);
        Ok(Graph { name, class, share, steps, ensemble: Arc::new(ensemble) })
    }
}
