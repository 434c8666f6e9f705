"""Serves the sum of 64 floats until told to stop, with as much of the Open Inference Protocol as the clients here speak.

Arguments: port, replicas, largest batch (1: no batching)."""

import logging
import signal
import sys

import numpy as np
import ray
from ray import serve
from starlette.requests import Request

PORT, REPLICAS, BATCH_MAX = map(int, sys.argv[1:])
SERVER = {"name": "ray serve", "version": ray.__version__, "extensions": []}
MODEL = {
    "name": "sum",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 64]}],
    "outputs": [{"name": "sum", "datatype": "FP32", "shape": [-1, 1]}],
}


@serve.deployment(num_replicas=REPLICAS, max_ongoing_requests=256, ray_actor_options={"num_cpus": 0.5},
                  logging_config={"enable_access_log": False, "log_level": "WARNING"})
class Sum:
    async def __call__(self, request: Request):
        if request.method == "GET":
            return MODEL if request.url.path.startswith("/v2/models/") else SERVER
        tensor = (await request.json())["inputs"][0]
        x = np.array(tensor["data"], dtype=np.float32).reshape(tensor["shape"])
        total = self.sums([x])[0] if BATCH_MAX == 1 else await self.batched_sums(x)
        output = {"name": "sum", "datatype": "FP32", "shape": list(total.shape), "data": total.ravel().tolist()}
        return {"model_name": "sum", "outputs": [output]}

    def sums(self, inputs):
        totals = np.concatenate(inputs).sum(axis=1, keepdims=True)
        return np.split(totals, np.cumsum([len(x) for x in inputs])[:-1])

    @serve.batch(max_batch_size=BATCH_MAX, batch_wait_timeout_s=0)
    async def batched_sums(self, inputs):
        return self.sums(inputs)


logging.getLogger("ray.serve").setLevel(logging.WARNING)
ray.init(include_dashboard=False)
serve.start(http_options={"host": "127.0.0.1", "port": PORT})
serve.run(Sum.bind(), route_prefix="/")
signal.pause()
