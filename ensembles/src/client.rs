//! The frontend inside another program, which is answered by ensembles, too.

use std::rc::Rc;

use frontend::{
    Client, Config, FrontendError, Infer, InferError, Inferred, InputTensor,
    client::{self, objective},
    desk::Desk,
    request::{Place, Places},
    rope::Rope,
};
use proto::{Application, Span};

use crate::pending::{Request, submit};

/// Starts a frontend on its own thread, as [`Client::start`].
///
/// # Errors
/// As there.
pub fn start(config: Config) -> Result<Client, FrontendError> {
    Client::start_answering(config, |desk, infer| Box::pin(answer(desk, infer)))
}

async fn answer(desk: Rc<Desk>, infer: Infer) -> Result<Inferred, InferError> {
    let found =
        desk.with_model(&infer.model, infer.version.as_deref(), |index, served, _| (index, Rc::clone(&served.model)));
    let (index, face) = found?;
    if face.ensemble().is_none() {
        return client::answer(desk, infer).await;
    }
    let mut places = Places::of(&face);
    let place = |InputTensor { name, datatype, shape, data }: InputTensor| {
        Ok((places.take(&name, datatype.name(), shape)?, data))
    };
    let inputs: Vec<(Place, Rope)> = infer.inputs.into_iter().map(place).collect::<Result<_, InferError>>()?;
    places.check_complete()?;
    let request = Request {
        model: (index, Rc::clone(&face)),
        inputs,
        wanted: vec![true; face.outputs.len()],
        slo: objective(&face, infer.slo)?,
        waited: Span::ZERO,
        priority: 0,
        application: Application::NONE,
        client: None,
        room: Box::new(()),
        known: None,
        choice: None,
        allow_default: false,
        is_counted: true,
    };
    Ok(Inferred::of(&face, &submit(&desk, request)?.wait().await.result?))
}
