"""gRPC's own services, as its own clients of PyPI ask: health, which Kubernetes' probes ask for, and reflection."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from judge import MODEL, Table, expect

SERVING = health_pb2.HealthCheckResponse.SERVING


def health(address):
    call = Table("grpcio-health-checking")
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def check(service):
            return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status

        call("Check", "serving", lambda: expect(check(""), SERVING))
        call("Check (model)", "serving", lambda: expect(check(MODEL), SERVING))
        call.refused("Check (unknown model)", "found 'nothing'", grpc.RpcError, lambda: check("nothing"))

        def watch(service, expected):
            told = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=10)
            expect(next(told).status, expected)
            told.cancel()

        call("Watch", "serving", lambda: watch("", SERVING))
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        call("Watch (unknown model)", "unknown, until there is one", lambda: watch("nothing", unknown))
    return call


def reflection(address):
    call = Table("grpcio-reflection")
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)

        def services():
            names = database.get_services()
            assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= set(names), names

        def methods():
            file = database.FindFileContainingSymbol("inference.GRPCInferenceService")
            assert "ModelStreamInfer" in [method.name for method in file.service[0].method], file.service

        call("get_services", "this protocol's and gRPC's own", services)
        call("FindFileContainingSymbol", "every method", methods)
        missing = lambda: database.FindFileContainingSymbol("inference.Nothing")
        call.refused("FindFileContainingSymbol (unknown)", "inference.Nothing", KeyError, missing)
    return call


def run(_, grpc_address):
    return [health(grpc_address), reflection(grpc_address)]
