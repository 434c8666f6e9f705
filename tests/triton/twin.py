"""For Triton's Python backend: runs the ONNX file beside it, as Triton's ONNX backend would."""

import json
import os

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


TYPES = {
    "tensor(float)": "TYPE_FP32", "tensor(float16)": "TYPE_FP16", "tensor(double)": "TYPE_FP64",
    "tensor(bool)": "TYPE_BOOL", "tensor(string)": "TYPE_STRING",
    **{f"tensor({sign}int{bits})": f"TYPE_{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        """As Triton's ONNX backend completes: a first dimension that varies everywhere is the batch, of four at
        most."""
        known = config.as_dict()
        if known["input"] and known["output"]:
            return config
        session = onnxruntime.InferenceSession(os.path.join(os.path.dirname(__file__), "model.onnx"))
        tensors = session.get_inputs() + session.get_outputs()
        batches = all(tensor.shape and not isinstance(tensor.shape[0], int) for tensor in tensors)
        config.set_max_batch_size(4 if batches else 0)
        for add, of in ((config.add_input, session.get_inputs()), (config.add_output, session.get_outputs())):
            for tensor in of:
                dims = [dim if isinstance(dim, int) else -1 for dim in tensor.shape]
                add({"name": tensor.name, "data_type": TYPES[tensor.type], "dims": dims[1:] if batches else dims})
        return config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        folder = os.path.join(args["model_repository"], args["model_version"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.batches = config["max_batch_size"] > 0
        self.reshaped = {
            tensor["name"]: tensor["reshape"]["shape"]
            for tensor in [*config["input"], *config["output"]]
            if tensor.get("reshape") is not None
        }
        self.dims = {tensor["name"]: tensor["dims"] for tensor in config["output"]}
        self.outputs = [tensor["name"] for tensor in config["output"]]
        self.session = onnxruntime.InferenceSession(os.path.join(folder, "model.onnx"), options)
        self.types = {tensor.name: tensor.type for tensor in self.session.get_inputs()}

    def shaped(self, name, array):
        if name not in self.reshaped:
            return array
        head = list(array.shape[:1]) if self.batches else []
        return array.reshape(head + [int(dim) for dim in self.reshaped[name]])

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        feed = {}
        for tensor in request.inputs():
            array = tensor.as_numpy()
            if array.dtype == np.object_:
                # Any bytes; the models do nothing with them but copy them, or read digits.
                array = np.array([x.decode("latin-1") for x in array.flatten()], dtype=object).reshape(array.shape)
            feed[tensor.name()] = self.shaped(tensor.name(), array)
        for name, kind in self.types.items():
            feed.setdefault(name, np.zeros([1], np.float32))
        found = dict(zip(self.outputs, self.session.run(self.outputs, feed)))
        wanted = request.requested_output_names()
        out = []
        for name, array in found.items():
            if name not in wanted:
                continue
            if array.dtype == np.object_:
                array = np.array([str(x).encode("latin-1") for x in array.flatten()], dtype=object).reshape(array.shape)
            if name in self.reshaped:
                head = list(array.shape[:1]) if self.batches else []
                array = array.reshape(head + [int(dim) for dim in self.dims[name]])
            out.append(pb_utils.Tensor(name, array))
        return pb_utils.InferenceResponse(out)
