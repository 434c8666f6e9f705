//! The models that an ensemble asks, as they are when a request comes, and how tensors go between them.

use std::rc::Rc;

use bytes::Bytes;
use frontend::{
    InferError,
    desk::Desk,
    request::{Place, Places, check_placed},
    rope::Rope,
    tasks::{CheckedRequest, Reply},
};
use proto::Span;
use repository::{DataType, Ensemble, EnsembleStep, Model};

use crate::run::StepTimes;

/// A tensor on its way from one step to the next.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) datatype: DataType,
    /// As clients see it: with the batch dimension, if its maker has one.
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Rope,
}

/// The model that a step asks. It stays what it is while the request is under way; if it is loaded anew meanwhile, the
/// step fails.
#[derive(Debug)]
pub(crate) struct Member {
    /// In the model table.
    pub(crate) index: usize,
    pub(crate) model: Rc<Model>,
    /// Its outputs that become tensors of the ensemble, by index, in the order of the step's.
    outputs: Vec<usize>,
}

/// A member and what it takes, or why it cannot be asked.
pub(crate) type Found = Result<(Member, StepTimes), InferError>;

impl Member {
    /// All members of an ensemble, one for each step, with what they take, as the desk has them now; or why one cannot
    /// be asked.
    ///
    /// # Errors
    /// If the ensemble does not fit them any more.
    pub(crate) fn each(desk: &Desk, face: &Model, ensemble: &Ensemble) -> Result<Vec<Found>, InferError> {
        desk.with_core(|core| {
            let unfit = |reason| InferError::NotLoaded { model: face.name.clone(), reason };
            core.models().check_members(face).map_err(unfit)?;
            let member = |step: &EnsembleStep| {
                let found = core.models().member(&step.model, step.version.as_deref());
                let (index, served) = found.expect("the ensemble fits its members");
                let offer = core.offer(served).map_err(|cause| in_step(face, &served.model, cause))?;
                let place = |name: &String| served.model.outputs.iter().position(|output| output.name == *name);
                let outputs = step.outputs.iter().map(|(name, _)| place(name).expect("it fits them"));
                let member = Self { index, model: Rc::clone(&served.model), outputs: outputs.collect() };
                Ok((member, StepTimes { least: offer.least_latency, batching: offer.batching }))
            };
            Ok(ensemble.steps.iter().map(member).collect())
        })
    }

    /// What it is asked with these inputs, of those that `names` names.
    pub(crate) fn placed(
        &self,
        names: &[(String, usize)],
        inputs: Vec<Option<Tensor>>,
    ) -> Result<Vec<(Place, Rope)>, InferError> {
        let mut places = Places::of(&self.model);
        let given = names.iter().zip(inputs).filter_map(|((name, _), tensor)| Some((name, tensor?)));
        let place = |(name, Tensor { datatype, shape, data }): (&String, Tensor)| {
            Ok((places.take(name, datatype.name(), shape)?, data))
        };
        let placed: Vec<(Place, Rope)> = given.map(place).collect::<Result<_, InferError>>()?;
        places.check_complete()?;
        Ok(placed)
    }

    /// The same inside this objective.
    pub(crate) fn checked(&self, placed: Vec<(Place, Rope)>, slo: Span) -> Result<CheckedRequest, InferError> {
        check_placed(&self.model, self.index, placed, slo)
    }

    /// Bytes of a reply that stay in memory until other steps have taken them.
    pub(crate) fn kept_bytes(&self, reply: &Reply) -> usize {
        self.outputs.iter().map(|&output| reply.outputs[output].len()).sum()
    }

    /// The tensors of a reply that the step gives to others.
    pub(crate) fn tensors(&self, reply: &Reply) -> Vec<Tensor> {
        let tensor = |&output: &usize| Tensor {
            datatype: self.model.outputs[output].datatype,
            shape: reply.shape(&self.model, output),
            data: Rope::from(reply.outputs[output].clone()),
        };
        self.outputs.iter().map(tensor).collect()
    }
}

/// Why a request for an ensemble has no answer, if this is why a step has none.
pub(crate) fn in_step(face: &Model, member: &Model, cause: InferError) -> InferError {
    InferError::InEnsemble { ensemble: face.name.clone(), step: member.name.clone(), cause: Box::new(cause) }
}

/// What the ensemble answers: for each output its elements, and the shape of one row; empty for those that are not
/// wanted.
///
/// # Errors
/// If a step has made something of another size than the ensemble's configuration says.
pub(crate) fn answer(
    face: &Model,
    rows: usize,
    outputs: Vec<Option<Tensor>>,
) -> Result<(Vec<Bytes>, Vec<Vec<usize>>), InferError> {
    let mut answer = (Vec::with_capacity(outputs.len()), Vec::with_capacity(outputs.len()));
    for (tensor, made) in face.outputs.iter().zip(outputs) {
        let Some(Tensor { shape, data, .. }) = made else {
            answer.0.push(Bytes::new());
            answer.1.push(tensor.shape.clone());
            continue;
        };
        let row = match (face.is_batched, shape.split_first()) {
            (true, Some((found, row))) => (*found == rows).then_some(row),
            (true, None) => None,
            (false, _) => Some(&shape[..]),
        };
        let fits = |row: &&[usize]| tensor.accepts(row);
        let Some(row) = row.filter(fits) else {
            let dims: Vec<String> = tensor.dims().map(|dim| dim.to_string()).collect();
            let batch = if face.is_batched { format!("{rows}, ") } else { String::new() };
            return Err(InferError::Failed(format!(
                "ensemble '{}': output '{}': found shape {shape:?}, expected [{batch}{}]",
                face.name,
                tensor.name,
                dims.join(", ")
            )));
        };
        answer.1.push(row.to_vec());
        answer.0.push(data.joined());
    }
    Ok(answer)
}
