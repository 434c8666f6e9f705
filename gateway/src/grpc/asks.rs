//! What each message asks for, as far as permissions are concerned.

use crate::{
    access::Operation,
    api::{
        CudaSharedMemoryRegisterRequest, CudaSharedMemoryStatusRequest, CudaSharedMemoryUnregisterRequest,
        LogSettingsRequest, ModelConfigRequest, ModelInferRequest, ModelMetadataRequest, ModelReadyRequest,
        ModelStatisticsRequest, RepositoryIndexRequest, RepositoryModelLoadRequest, RepositoryModelUnloadRequest,
        ServerLiveRequest, ServerMetadataRequest, ServerReadyRequest, SystemSharedMemoryRegisterRequest,
        SystemSharedMemoryStatusRequest, SystemSharedMemoryUnregisterRequest, TraceSettingRequest,
        feedback::FeedbackRequest, health::HealthCheckRequest,
    },
};

/// A message that asks for something.
pub(super) trait Asks {
    /// What it asks for.
    const OPERATION: Operation;

    /// Of which model, if it names one.
    fn model(&self) -> Option<&str>;
}

/// Messages, what they ask for, and the field that names their model if they have one.
macro_rules! asks {
    ($($message:ident $operation:ident $($model:ident)?;)*) => {
        $(impl Asks for $message {
            const OPERATION: Operation = Operation::$operation;

            fn model(&self) -> Option<&str> {
                None$(.or(given(&self.$model)))?
            }
        })*
    };
}

asks! {
    ServerLiveRequest Health;
    ServerReadyRequest Health;
    ServerMetadataRequest Health;
    HealthCheckRequest Health;
    ModelInferRequest Infer model_name;
    ModelReadyRequest Metadata name;
    ModelMetadataRequest Metadata name;
    ModelConfigRequest Metadata name;
    ModelStatisticsRequest Metadata name;
    RepositoryIndexRequest Metadata;
    RepositoryModelLoadRequest Repository model_name;
    RepositoryModelUnloadRequest Repository model_name;
    SystemSharedMemoryStatusRequest SharedMemory;
    SystemSharedMemoryRegisterRequest SharedMemory;
    SystemSharedMemoryUnregisterRequest SharedMemory;
    CudaSharedMemoryStatusRequest SharedMemory;
    CudaSharedMemoryRegisterRequest SharedMemory;
    CudaSharedMemoryUnregisterRequest SharedMemory;
    TraceSettingRequest Settings model_name;
    LogSettingsRequest Settings;
    FeedbackRequest Feedback model_name;
}

/// A field of proto3 that is empty was not given.
pub(super) fn given(field: &str) -> Option<&str> {
    (!field.is_empty()).then_some(field)
}
