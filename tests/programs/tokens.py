# Takes texts apart at blanks: as many words as there are, and not those that are shorter than `least`.
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "text", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_input({"name": "least", "data_type": "TYPE_INT32", "dims": [1], "optional": True})
        config.add_output({"name": "words", "data_type": "TYPE_STRING", "dims": [-1]})
        config.add_output({"name": "lengths", "data_type": "TYPE_INT64", "dims": [-1]})
        config.set_max_batch_size(8)
        return config

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[0, 0].decode()
        if text.startswith("odd"):
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"'{text}' is no text"))
        least = pb_utils.get_input_tensor_by_name(request, "least")
        least = 0 if least is None else least.as_numpy()[0, 0]
        words = [word for word in text.split() if len(word) >= least]
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("lengths", np.array([[len(word) for word in words]], np.int64)),
            pb_utils.Tensor("words", np.array([words], object)),
        ])
