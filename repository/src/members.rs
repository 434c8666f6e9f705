//! Whether an ensemble and the models that it asks fit each other.

use crate::{
    ensemble::{Ensemble, EnsembleStep},
    error::RepositoryError,
    model::{Executor, Model},
    tensor::{DataType, Tensor},
};

/// What is known of a tensor before any request: its type, and its dimensions with -1 for what requests choose.
#[derive(Debug, PartialEq, Eq)]
struct Kind {
    datatype: DataType,
    /// Whether the batch dimension comes before these.
    is_batched: bool,
    dims: Vec<i64>,
}

impl Kind {
    fn of(model: &Model, tensor: &Tensor) -> Self {
        Self { datatype: tensor.datatype, is_batched: model.is_batched, dims: tensor.dims().collect() }
    }

    /// Whether a tensor can be both, as in Triton: of two dimensions that are both known, both are alike; where only
    /// one has a batch dimension, that is the other one's first.
    fn fits(&self, other: &Self) -> bool {
        let own = |kind: &Self| (kind.is_batched && !(self.is_batched && other.is_batched)).then_some(-1);
        let dims = |kind: &Self| own(kind).into_iter().chain(kind.dims.iter().copied()).collect::<Vec<i64>>();
        let (a, b) = (dims(self), dims(other));
        let alike = a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| a == b || *a < 0 || *b < 0);
        self.datatype == other.datatype && alike
    }

    fn shown(&self) -> String {
        let batch = if self.is_batched { "n, " } else { "" };
        let dims: Vec<String> = self.dims.iter().map(i64::to_string).collect();
        format!("{} [{batch}{}]", self.datatype, dims.join(", "))
    }
}

impl Ensemble {
    /// Whether the ensemble whose entry is `face` fits its members, which `find` finds by name and version: models, as
    /// those of ensembles that it asks are in their places.
    ///
    /// # Errors
    /// What does not fit, in one line: the step, what was found, what was expected.
    pub fn check<'m>(
        &self,
        face: &Model,
        find: impl Fn(&str, Option<&str>) -> Option<&'m Model>,
    ) -> Result<(), RepositoryError> {
        for (at, step) in self.steps.iter().enumerate() {
            let is_ensemble = |found: &Model| found.ensemble().is_some();
            if find(&step.model, step.version.as_deref()).is_some_and(is_ensemble) {
                let key = format!("ensemble_scheduling.step[{at}].model_name");
                let expected = "a model that is none";
                return Err(wrong(face, &key, format_args!("'{}', an ensemble", step.model), expected));
            }
        }
        self.check_asked(face, &find)
    }

    /// The same, whose members may be ensembles, unless they are to be models of one task.
    pub(crate) fn check_asked<'m>(
        &self,
        face: &Model,
        find: &impl Fn(&str, Option<&str>) -> Option<&'m Model>,
    ) -> Result<(), RepositoryError> {
        let mut kinds: Vec<Option<Kind>> = self.tensors.iter().map(|_| None).collect();
        kinds.iter_mut().zip(&face.inputs).for_each(|(kind, input)| *kind = Some(Kind::of(face, input)));
        for (at, step) in self.steps.iter().enumerate() {
            self.check_step(face, (at, step), find, &mut kinds)?;
            // Steps that are models of one task make the same tensors, each of which has to fit.
            if self.selection.is_some() || at + 1 == self.steps.len() {
                self.check_outputs(face, &kinds)?;
            }
        }
        Ok(())
    }

    fn check_outputs(&self, face: &Model, kinds: &[Option<Kind>]) -> Result<(), RepositoryError> {
        for (output, &tensor) in face.outputs.iter().zip(&self.outputs) {
            let (own, made) = (Kind::of(face, output), kinds[tensor].as_ref().expect("some step makes it"));
            if !own.fits(made) {
                let key = format!("output '{}'", output.name);
                return Err(wrong(face, &key, own.shown(), format_args!("{}, as its step makes it", made.shown())));
            }
        }
        Ok(())
    }

    fn check_step<'m>(
        &self,
        face: &Model,
        (at, step): (usize, &EnsembleStep),
        find: &impl Fn(&str, Option<&str>) -> Option<&'m Model>,
        kinds: &mut [Option<Kind>],
    ) -> Result<(), RepositoryError> {
        let wrong = |key: &str, found: String, expected: String| {
            wrong(face, &format!("ensemble_scheduling.step[{at}].{key}"), found, expected)
        };
        let name = &step.model;
        let member = find(name, step.version.as_deref()).ok_or_else(|| {
            let version = step.version.as_ref().map_or(String::new(), |version| format!(" version {version}"));
            wrong("model_name", format!("'{name}'{version}"), "a model of the repository that can be served".to_owned())
        })?;
        if member.ensemble().is_some() && self.selection.is_some() {
            let expected = "a model that is none: with selection answers are those of models";
            return Err(wrong("model_name", format!("'{name}', an ensemble"), expected.to_owned()));
        }
        if face.is_batched && member.rows_max < face.rows_max {
            let expected = format!("a model whose max_batch_size is at least the ensemble's, {}", face.rows_max);
            let found = if member.is_batched { member.rows_max } else { 0 };
            return Err(wrong("model_name", format!("'{name}' with max_batch_size {found}"), expected));
        }
        let is_given = |input: &&Tensor| step.inputs.iter().any(|(name, _)| *name == input.name);
        if let Some(missing) = member.inputs.iter().find(|input| !input.is_optional() && !is_given(input)) {
            let expected = format!("one for input '{}' of model '{name}'", missing.name);
            return Err(wrong("input_map", "none".to_owned(), expected));
        }
        let tensor = |key: &str, of: &str, all: &'m [Tensor]| {
            let names = || all.iter().map(|tensor| tensor.name.as_str()).collect::<Vec<_>>().join(", ");
            let unknown = || wrong(key, format!("key '{of}'"), format!("one of model '{name}': {}", names()));
            all.iter().find(|tensor| tensor.name == of).ok_or_else(unknown)
        };
        for (input, from) in &step.inputs {
            let taken = Kind::of(member, tensor("input_map", input, &member.inputs)?);
            let given = kinds[*from].as_ref().expect("steps come after those whose tensors they take");
            if !taken.fits(given) {
                let found = format!("'{}', {}", self.tensors[*from], given.shown());
                let expected = format!("{}, as input '{input}' of model '{name}' is", taken.shown());
                return Err(wrong("input_map", found, expected));
            }
        }
        for (output, to) in &step.outputs {
            kinds[*to] = Some(Kind::of(member, tensor("output_map", output, &member.outputs)?));
        }
        Ok(())
    }
}

impl Model {
    /// The graph, if it is an ensemble.
    #[must_use]
    pub fn ensemble(&self) -> Option<&Ensemble> {
        match &self.executor {
            Executor::Ensemble(ensemble) => Some(ensemble),
            Executor::Emulated { .. } | Executor::Onnx { .. } | Executor::Process { .. } => None,
        }
    }

    /// Takes on the labels of its members' outputs, of an ensemble whose own have none; as in Triton.
    pub fn inherit_labels<'m>(&mut self, find: impl Fn(&str, Option<&str>) -> Option<&'m Model>) {
        let Executor::Ensemble(ensemble) = &self.executor else { return };
        for (labels, &tensor) in self.labels.iter_mut().zip(&ensemble.outputs) {
            let Some((step, output)) = ensemble.maker(tensor).filter(|_| labels.is_empty()) else { continue };
            let step = &ensemble.steps[step];
            let Some(member) = find(&step.model, step.version.as_deref()) else { continue };
            let at = member.outputs.iter().position(|tensor| tensor.name == output);
            *labels = at.and_then(|at| member.labels.get(at)).cloned().unwrap_or_default();
        }
    }
}

pub(crate) fn wrong(
    face: &Model,
    key: &str,
    found: impl std::fmt::Display,
    expected: impl std::fmt::Display,
) -> RepositoryError {
    RepositoryError(format!("ensemble '{}': {key}: found {found}, expected {expected}", face.name))
}
