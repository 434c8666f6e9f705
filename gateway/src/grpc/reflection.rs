//! gRPC's server reflection: what grpcurl, Postman and generic proxies ask before they can call anything. It tells of
//! the protocol, which is public, and of no model.
//!
//! `tonic-reflection` does not fit. It spawns a task for each stream that waits for the next question without an end:
//! an idle client keeps its stream, and the server cannot drain. Questions are charged to nobody while they are read.

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
    sync::LazyLock,
};

use bytes::Bytes;
use frontend::excerpt;
use hyper::Response;
use prost::Message as _;
use prost_types::{DescriptorProto, FileDescriptorProto, FileDescriptorSet};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, body::Body};

use super::{
    call::{Call, Codings, respond},
    framing::Messages,
    status::undecodable,
    streams::Quiet,
};
use crate::{
    access::{Operation, Refusal, Scope},
    api::reflection::{
        ErrorResponse, ExtensionNumberResponse, FileDescriptorResponse, ListServiceResponse, ServerReflectionRequest,
        ServerReflectionResponse, ServiceResponse, server_reflection_request::MessageRequest,
        server_reflection_response::MessageResponse,
    },
    metrics::Cause,
    server::{BodyMax, Caller},
};

/// Of one question, which comes back in its answer: it is a name.
const QUESTION_MAX: BodyMax = BodyMax { bytes: 4 << 10, key: "" };

/// Everything that this server's descriptors tell.
static KNOWN: LazyLock<Known> = LazyLock::new(|| {
    let set = FileDescriptorSet::decode(&include_bytes!("../../proto/generated/descriptors.bin")[..]);
    Known::of(set.expect("a test has written it").file)
});

#[derive(Default)]
struct Known {
    /// By name: what it needs, and its descriptor.
    files: BTreeMap<String, (Vec<String>, Bytes)>,
    /// The file of each service, method, message and enumeration, by its full name.
    symbols: BTreeMap<String, String>,
    services: Vec<String>,
    messages: BTreeSet<String>,
}

impl Known {
    fn of(files: Vec<FileDescriptorProto>) -> Self {
        let mut known = Self::default();
        for mut file in files {
            // Comments: three quarters of it.
            file.source_code_info = None;
            let (name, package) = (file.name().to_owned(), file.package().to_owned());
            for message in &file.message_type {
                known.add_message(&name, &package, message);
            }
            for listed in &file.enum_type {
                known.symbols.insert(format!("{package}.{}", listed.name()), name.clone());
            }
            for service in &file.service {
                let of = format!("{package}.{}", service.name());
                for method in &service.method {
                    known.symbols.insert(format!("{of}.{}", method.name()), name.clone());
                }
                known.symbols.insert(of.clone(), name.clone());
                known.services.push(of);
            }
            known.files.insert(name, (file.dependency.clone(), file.encode_to_vec().into()));
        }
        known
    }

    fn add_message(&mut self, file: &str, within: &str, message: &DescriptorProto) {
        let name = format!("{within}.{}", message.name());
        for nested in &message.nested_type {
            self.add_message(file, &name, nested);
        }
        for listed in &message.enum_type {
            self.symbols.insert(format!("{name}.{}", listed.name()), file.to_owned());
        }
        self.symbols.insert(name.clone(), file.to_owned());
        self.messages.insert(name);
    }

    /// A file, and those that it needs.
    fn file(&self, name: &str) -> Option<MessageResponse> {
        let mut wanted = vec![name];
        let mut found = BTreeMap::new();
        while let Some(name) = wanted.pop() {
            let (needs, descriptor) = self.files.get(name)?;
            if found.insert(name, descriptor.clone()).is_none() {
                wanted.extend(needs.iter().map(String::as_str));
            }
        }
        // The one that was asked for comes first.
        let first = found.remove(name)?;
        let file_descriptor_proto = [first].into_iter().chain(found.into_values()).collect();
        Some(MessageResponse::FileDescriptorResponse(FileDescriptorResponse { file_descriptor_proto }))
    }

    fn answer(&self, question: &MessageRequest) -> MessageResponse {
        let missing = |what: &str, name: &str, expected: &str| {
            let error_message = format!("{what}: found '{}', expected {expected}", excerpt(name));
            MessageResponse::ErrorResponse(ErrorResponse { error_code: Code::NotFound.into(), error_message })
        };
        match question {
            MessageRequest::ListServices(_) => {
                let service = self.services.iter().map(|name| ServiceResponse { name: name.clone() }).collect();
                MessageResponse::ListServicesResponse(ListServiceResponse { service })
            }
            MessageRequest::FileByFilename(name) => {
                self.file(name).unwrap_or_else(|| missing("file_by_filename", name, "one that a descriptor names"))
            }
            MessageRequest::FileContainingSymbol(name) => {
                let file = self.symbols.get(name).and_then(|file| self.file(file));
                file.unwrap_or_else(|| missing("file_containing_symbol", name, "a service, method or message of ours"))
            }
            MessageRequest::FileContainingExtension(of) => {
                missing("file_containing_extension", &of.containing_type, "none: proto3 has no extensions")
            }
            MessageRequest::AllExtensionNumbersOfType(name) if self.messages.contains(name) => {
                let (base_type_name, extension_number) = (name.clone(), Vec::new());
                let numbers = ExtensionNumberResponse { base_type_name, extension_number };
                MessageResponse::AllExtensionNumbersResponse(numbers)
            }
            MessageRequest::AllExtensionNumbersOfType(name) => {
                missing("all_extension_numbers_of_type", name, "a message of ours")
            }
        }
    }
}

/// Answers each question of a stream, one after another.
pub(super) fn answer(call: Call<'_>) -> Response<Body> {
    let (caller, codings) = (Rc::clone(call.caller), Codings::of(call.request.headers()));
    let open = || {
        caller.permit(Operation::Metadata, Scope::Server)?;
        let messages = call.stream(codings.request?, QUESTION_MAX);
        let (answers, replies) = mpsc::channel(1);
        tokio::task::spawn_local(answer_all(Rc::clone(&caller), messages, answers));
        Ok(ReceiverStream::new(replies))
    };
    respond(open(), codings.reply)
}

async fn answer_all(
    caller: Rc<Caller>,
    mut messages: Messages,
    answers: mpsc::Sender<Result<ServerReflectionResponse, Status>>,
) {
    let server = &caller.server;
    let mut quiet = Quiet::new(server);
    loop {
        let answer = tokio::select! {
            () = answers.closed() => return,
            next = messages.next() => match next {
                Ok(Some(message)) => async {
                    let (bytes, _charge) = message.decompressed(&server.service.pool).await?;
                    Ok(reply(ServerReflectionRequest::decode(bytes).map_err(undecodable)?))
                }.await,
                Ok(None) => return,
                Err(status) => Err(status),
            },
            () = server.drain.begun() => Err(Refusal::Draining.into()),
            status = quiet.over() => {
                server.service.record.refusals().count(Cause::Stream);
                Err(status)
            }
        };
        let is_last = answer.is_err();
        if answers.send(answer).await.is_err() || is_last {
            return;
        }
        quiet.begin();
    }
}

fn reply(question: ServerReflectionRequest) -> ServerReflectionResponse {
    let answer = question.message_request.as_ref().map(|asked| KNOWN.answer(asked)).unwrap_or_else(|| {
        let error_message = "message_request: found none, expected one".to_owned();
        MessageResponse::ErrorResponse(ErrorResponse { error_code: Code::InvalidArgument.into(), error_message })
    });
    ServerReflectionResponse {
        valid_host: question.host.clone(),
        original_request: Some(question),
        message_response: Some(answer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(request: MessageRequest) -> MessageResponse {
        let question = ServerReflectionRequest { host: "h".to_owned(), message_request: Some(request) };
        let reply = reply(question.clone());
        assert_eq!((reply.valid_host.as_str(), reply.original_request), ("h", Some(question)));
        reply.message_response.unwrap()
    }

    #[test]
    fn every_service_is_listed_and_its_file_comes_with_what_it_needs() {
        let MessageResponse::ListServicesResponse(listed) = asked(MessageRequest::ListServices(String::new())) else {
            panic!()
        };
        let names: Vec<&str> = listed.service.iter().map(|service| service.name.as_str()).collect();
        for expected in
            ["inference.GRPCInferenceService", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"]
        {
            assert!(names.contains(&expected), "{names:?}");
        }
        for symbol in ["inference.GRPCInferenceService", "inference.GRPCInferenceService.ModelInfer"] {
            let found = asked(MessageRequest::FileContainingSymbol(symbol.to_owned()));
            let MessageResponse::FileDescriptorResponse(files) = found else { panic!("{found:?}") };
            let files: Vec<FileDescriptorProto> = files
                .file_descriptor_proto
                .iter()
                .map(|file| FileDescriptorProto::decode(&file[..]).unwrap())
                .collect();
            assert_eq!(files[0].name(), "inference_service.proto");
            let all: Vec<&str> = files.iter().map(FileDescriptorProto::name).collect();
            assert!(files.iter().flat_map(|file| &file.dependency).all(|need| all.contains(&need.as_str())), "{all:?}");
        }
        let nested = "inference.ModelInferRequest.InferInputTensor".to_owned();
        assert!(matches!(
            asked(MessageRequest::FileContainingSymbol(nested)),
            MessageResponse::FileDescriptorResponse(_)
        ));
    }

    #[test]
    fn what_there_is_not_is_said_so() {
        for wrong in [
            MessageRequest::FileByFilename("/etc/passwd".to_owned()),
            MessageRequest::FileContainingSymbol("inference".to_owned()),
            MessageRequest::AllExtensionNumbersOfType("inference.GRPCInferenceService".to_owned()),
            MessageRequest::FileContainingExtension(Default::default()),
        ] {
            let MessageResponse::ErrorResponse(error) = asked(wrong.clone()) else { panic!("{wrong:?}") };
            assert_eq!(error.error_code, 5, "{error:?}");
        }
        let none = reply(ServerReflectionRequest::default()).message_response;
        assert!(matches!(none, Some(MessageResponse::ErrorResponse(ErrorResponse { error_code: 3, .. }))), "{none:?}");
    }
}
