//! Step 1, Step 10 in gRPC: the methods of `inference.GRPCInferenceService`. `framing` takes messages in; tonic frames,
//! encodes and compresses replies. They run on this thread, where the core is.

use std::rc::Rc;

use frontend::InferError;
use hyper::{Request, Response, body::Incoming, header::HeaderValue};
use prost::Message as _;
use proto::frontend_to_scheduler::ModelChange;
use serde_json::Value;
use tonic::{Status, body::Body};

use crate::{
    access::{Client, Scope},
    api::{
        CudaSharedMemoryRegisterRequest, CudaSharedMemoryRegisterResponse, CudaSharedMemoryStatusRequest,
        CudaSharedMemoryStatusResponse, CudaSharedMemoryUnregisterRequest, CudaSharedMemoryUnregisterResponse,
        LogSettingsRequest, LogSettingsResponse, ModelConfig, ModelConfigRequest, ModelConfigResponse,
        ModelMetadataRequest, ModelReadyRequest, ModelReadyResponse, ModelStatisticsRequest, ModelStatisticsResponse,
        RepositoryIndexRequest, RepositoryModelLoadRequest, RepositoryModelLoadResponse, RepositoryModelUnloadRequest,
        RepositoryModelUnloadResponse, ServerLiveRequest, ServerLiveResponse, ServerMetadataRequest,
        ServerReadyRequest, ServerReadyResponse, SystemSharedMemoryRegisterRequest, SystemSharedMemoryRegisterResponse,
        SystemSharedMemoryStatusRequest, SystemSharedMemoryStatusResponse, SystemSharedMemoryUnregisterRequest,
        SystemSharedMemoryUnregisterResponse, TraceSettingRequest, TraceSettingResponse,
        feedback::{
            FeedbackRequest, FeedbackResponse,
            feedback_request::{Item, Output},
            feedback_response::Result as Outcome,
        },
        log_settings_request, log_settings_response, trace_setting_response,
    },
    loads,
    pool::AT_ONCE_BYTES_MAX,
    probes::{HEALTH_CHECK, SERVICE_PATH},
    protocol::messages::outline,
    regions::cuda,
    selections::{Heard, Told, Which},
    server::Caller,
    service::{Service, feedback::FeedbackModel, no_room},
    settings::Settings,
};

use asks::{Asks as _, given};
use call::{Call, Codings, respond};
use status::{status_of, undecodable};

/// The method of `downbeat.Feedback`.
const FEEDBACK: &str = "/downbeat.Feedback/Tell";

mod asks;
mod call;
mod framing;
mod health;
mod infer;
mod reflection;
mod status;
mod streams;

/// Answers a request; what goes wrong is in the reply's `grpc-status`.
pub async fn answer(caller: Rc<Caller>, request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path().to_owned();
    let call = Call { caller: &caller, request };
    match path.as_str() {
        HEALTH_CHECK => return health::check(call).await,
        "/grpc.health.v1.Health/Watch" => return health::watch(call).await,
        FEEDBACK => {
            let client = caller.client();
            return call.unary(|service, of| feedback(service, client, of)).await;
        }
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
        | "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo" => return reflection::answer(call),
        _ => {}
    }
    match path.strip_prefix(SERVICE_PATH).unwrap_or_default() {
        "ModelInfer" => infer::infer(call).await,
        "ModelStreamInfer" => streams::infer(call).await,
        "ServerLive" => call.unary(|_, _: ServerLiveRequest| Ok(ServerLiveResponse { live: true })).await,
        "ServerReady" => {
            call.unary(|service, _: ServerReadyRequest| Ok(ServerReadyResponse { ready: service.is_ready() })).await
        }
        "ModelReady" => call.unary(model_ready).await,
        "ServerMetadata" => call.unary(|service, _: ServerMetadataRequest| Ok(service.server_metadata())).await,
        "ModelMetadata" => {
            call.unary(|service, of: ModelMetadataRequest| service.model_metadata(&of.name, given(&of.version))).await
        }
        "ModelConfig" => call.unary(model_config).await,
        "ModelStatistics" => call.unary(model_statistics).await,
        "RepositoryIndex" => {
            call.unary(|service, of: RepositoryIndexRequest| Ok(service.repository_index(of.ready))).await
        }
        "RepositoryModelLoad" => load_model(call).await,
        "RepositoryModelUnload" => {
            let caller = Rc::clone(call.caller);
            call.unary_later(|_, of| unload_model(caller, of)).await
        }
        "SystemSharedMemoryStatus" => call.unary(|service, of| region_status(service, caller.client(), of)).await,
        "SystemSharedMemoryRegister" => call.unary(|service, of| register_region(service, caller.client(), of)).await,
        "SystemSharedMemoryUnregister" => {
            call.unary(|service, of| unregister_region(service, caller.client(), of)).await
        }
        "CudaSharedMemoryStatus" => call.unary(|_, of| cuda_status(&of)).await,
        "CudaSharedMemoryRegister" => call.unary(|_, of| register_cuda(&of)).await,
        "CudaSharedMemoryUnregister" => {
            call.unary(|_, _: CudaSharedMemoryUnregisterRequest| Ok(CudaSharedMemoryUnregisterResponse {})).await
        }
        "TraceSetting" => call.unary(trace_setting).await,
        "LogSettings" => call.unary(log_settings).await,
        _ => Status::unimplemented(format!("path: found '{path}', expected a method of {SERVICE_PATH}")).into_http(),
    }
}

/// Whether a request of this type is gRPC, with or without a suffix (gRPC over HTTP/2, "Content-Type"). gRPC-Web has
/// other frames.
pub(crate) fn is_content_type(value: &HeaderValue) -> bool {
    let rest = value.as_bytes().strip_prefix(b"application/grpc");
    rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';' | b' ')))
}

fn model_ready(service: &Service, of: ModelReadyRequest) -> Result<ModelReadyResponse, InferError> {
    match service.is_model_ready(&of.name, given(&of.version)) {
        // Who waits for a model asks until there is one, and takes an error for a server that is broken.
        Err(InferError::NotFound(_)) => Ok(ModelReadyResponse { ready: false }),
        ready => Ok(ModelReadyResponse { ready: ready? }),
    }
}

fn model_config(service: &Service, of: ModelConfigRequest) -> Result<ModelConfigResponse, InferError> {
    let encoded = service.model_config(&of.name, given(&of.version))?.encoded();
    let config = ModelConfig::decode(&encoded[..]).expect("both sides have one schema");
    Ok(ModelConfigResponse { config: Some(config) })
}

fn model_statistics(service: &Service, of: ModelStatisticsRequest) -> Result<ModelStatisticsResponse, InferError> {
    Ok(ModelStatisticsResponse { model_stats: service.statistics(given(&of.name), given(&of.version))? })
}

async fn load_model(call: Call<'_>) -> Response<Body> {
    let (caller, codings) = (Rc::clone(call.caller), Codings::of(call.request.headers()));
    let reply = async {
        type Asked = RepositoryModelLoadRequest;
        let service = &caller.server.service;
        caller.permit(Asked::OPERATION, Scope::Server)?;
        let max = service.load_max(&caller.server.limits());
        let message = call.messages(codings.request?, max).only().await?;
        let (bytes, charge) = message.decompressed(&service.pool).await?;
        let too_many = |error| Status::invalid_argument(format!("the request: {error}"));
        outline::check_load(&bytes, loads::PARAMETERS_MAX).map_err(too_many)?;
        let question = if bytes.len() <= AT_ONCE_BYTES_MAX {
            Asked::decode(bytes)
        } else {
            // Files stay parts of the message, but texts are copied.
            charge.grow(bytes.len()).map_err(|full| status_of(no_room(full)))?;
            let held = charge.clone();
            let decode = move || {
                let _held = held;
                Asked::decode(bytes)
            };
            service.pool.run(&charge, decode).await.map_err(status_of)?
        };
        let question = question.map_err(undecodable)?;
        caller.permit(Asked::OPERATION, Scope::of(Asked::OPERATION, question.model()))?;
        let asked = (&*question.model_name, question.parameters.into());
        let changed = service.change_model(ModelChange::Load, asked, Some(charge), |model| caller.may_change(model));
        changed.await.map_err(status_of)?;
        Ok(RepositoryModelLoadResponse {})
    };
    respond(reply.await.map(|reply| tokio_stream::once(Ok(reply))), codings.reply)
}

async fn unload_model(
    caller: Rc<Caller>,
    of: RepositoryModelUnloadRequest,
) -> Result<RepositoryModelUnloadResponse, Status> {
    let asked = (&*of.model_name, of.parameters.into());
    let service = &caller.server.service;
    let changed = service.change_model(ModelChange::Unload, asked, None, |model| caller.may_change(model));
    changed.await.map_err(status_of)?;
    Ok(RepositoryModelUnloadResponse {})
}

fn region_status(
    service: &Service,
    client: Client,
    of: SystemSharedMemoryStatusRequest,
) -> Result<SystemSharedMemoryStatusResponse, InferError> {
    Ok(SystemSharedMemoryStatusResponse { regions: service.regions.borrow().of(Some(client)).status(given(&of.name))? })
}

fn register_region(
    service: &Service,
    client: Client,
    region: SystemSharedMemoryRegisterRequest,
) -> Result<SystemSharedMemoryRegisterResponse, InferError> {
    let SystemSharedMemoryRegisterRequest { name, key, offset, byte_size } = region;
    service.regions.borrow_mut().register(client, &name, &key, offset, byte_size)?;
    Ok(SystemSharedMemoryRegisterResponse {})
}

fn unregister_region(
    service: &Service,
    client: Client,
    region: SystemSharedMemoryUnregisterRequest,
) -> Result<SystemSharedMemoryUnregisterResponse, InferError> {
    service.regions.borrow_mut().unregister(client, given(&region.name));
    Ok(SystemSharedMemoryUnregisterResponse {})
}

fn cuda_status(of: &CudaSharedMemoryStatusRequest) -> Result<CudaSharedMemoryStatusResponse, InferError> {
    cuda::status(given(&of.name))?;
    Ok(CudaSharedMemoryStatusResponse::default())
}

fn register_cuda(region: &CudaSharedMemoryRegisterRequest) -> Result<CudaSharedMemoryRegisterResponse, InferError> {
    Err(cuda::unsupported(&region.name))
}

fn feedback(service: &Service, of: Client, request: FeedbackRequest) -> Result<FeedbackResponse, InferError> {
    let FeedbackRequest { model_name, model_version, feedback } = request;
    let told = |asked_of: &FeedbackModel<'_>, Item { request, outputs, asked }: Item| Told {
        which: Which::new(request, asked.map(|asked| asked_of.by_message(asked))),
        outputs: Ok(outputs.into_iter().map(|Output { name, data }| (name, data)).collect()),
    };
    let result = |Heard { request, outcome, error }: Heard| Outcome {
        request,
        outcome: outcome.told().to_owned(),
        error: error.unwrap_or_default(),
    };
    let heard = service.feedback(of, (&model_name, given(&model_version)), |asked_of| {
        Ok(feedback.into_iter().map(|item| told(asked_of, item)).collect())
    })?;
    Ok(FeedbackResponse { model_name, results: heard.into_iter().map(result).collect() })
}

/// Looks at settings, or changes those that are given; one without a value is cleared.
fn trace_setting(service: &Service, request: TraceSettingRequest) -> Result<TraceSettingResponse, InferError> {
    let model = given(&request.model_name);
    let value = |key: &str, mut values: Vec<String>| match (key, values.len()) {
        (_, 0) => Value::Null,
        ("trace_level", _) => values.into(),
        (_, 1) => values.remove(0).into(),
        _ => values.into(),
    };
    let changes = request.settings.into_iter().map(|(key, setting)| {
        let value = value(&key, setting.value);
        (key, value)
    });
    let changes: Settings = changes.collect();
    let settings = if changes.is_empty() {
        service.trace_settings(model)?
    } else {
        service.change_trace_settings(model, &changes)?
    };
    let texts = |value: Value| match value {
        Value::Array(values) => values.iter().filter_map(|value| Some(value.as_str()?.to_owned())).collect(),
        Value::String(text) => vec![text],
        other => vec![other.to_string()],
    };
    let settings = settings.into_iter();
    let settings = settings.map(|(key, value)| (key, trace_setting_response::SettingValue { value: texts(value) }));
    Ok(TraceSettingResponse { settings: settings.collect() })
}

/// Looks at settings, or changes those that are given.
fn log_settings(service: &Service, request: LogSettingsRequest) -> Result<LogSettingsResponse, InferError> {
    use log_settings_request::setting_value::ParameterChoice as Given;
    use log_settings_response::{SettingValue, setting_value::ParameterChoice as Told};
    let value = |choice| match choice {
        Some(Given::BoolParam(flag)) => Value::from(flag),
        Some(Given::Uint32Param(number)) => Value::from(number),
        Some(Given::StringParam(text)) => Value::from(text),
        None => Value::Null,
    };
    let changes = request.settings.into_iter().map(|(key, setting)| (key, value(setting.parameter_choice)));
    let changes: Settings = changes.collect();
    let settings = if changes.is_empty() { service.log_settings() } else { service.change_log_settings(&changes)? };
    let told = |value: Value| match value {
        Value::Bool(flag) => Told::BoolParam(flag),
        Value::Number(number) => Told::Uint32Param(number.as_u64().and_then(|n| u32::try_from(n).ok()).unwrap_or(0)),
        Value::String(text) => Told::StringParam(text),
        other => Told::StringParam(other.to_string()),
    };
    let settings = settings.into_iter().map(|(key, value)| (key, SettingValue { parameter_choice: Some(told(value)) }));
    Ok(LogSettingsResponse { settings: settings.collect() })
}
