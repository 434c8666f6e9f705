"""Models that are subclasses of `downbeat.Model`."""

import numpy as np
import pytest
from conftest import tensor

from downbeat import tensors

DOUBLE = """
import downbeat

class Double(downbeat.Model):
    def load(self, context):
        self.factor = int(context.parameter("factor", "2"))

    def predict(self, batch):
        return {"y": batch["x"] * self.factor}
"""
X, Y = [tensor("x", "FP32", 3)], [tensor("y", "FP32", 3)]


def test_a_batch_comes_as_arrays_and_goes_as_arrays(start):
    backend = start(DOUBLE, X, Y, {"parameters": {"factor": {"string_value": "3"}}})
    assert backend.started == {"ready": {"protocol": 2}}
    batch = np.arange(12, dtype=np.float32).reshape(4, 3)
    (found,) = backend.run(("FP32", batch))
    np.testing.assert_array_equal(found, 3 * batch)
    assert backend.close() == 0


VIEWS = {
    "every second column": "batch['x'][:, ::2]",
    "some columns": "batch['x'][:, 1:3]",
    "a column": "batch['x'][:, :1]",
    "reversed columns": "batch['x'][:, ::-1]",
    "reversed tasks": "batch['x'][::-1]",
    "reversed numbers": "batch['x'][:, 3:4][::-1]",
    "Fortran order": "np.asfortranarray(batch['x'])",
    "a transposed array": "np.ascontiguousarray(batch['x'].T).T",
    "a column of a transposed array": "np.ascontiguousarray(batch['x'].T).T[:, ::3]",
    "one number for all": "np.broadcast_to(np.float32(3), (len(batch['x']), 2))",
    "nothing": "batch['x'][:, :0]",
    "nothing, reversed": "batch['x'][:, 4:0:-1][:, 5:]",
    "another type": "batch['x'][:, ::2].astype('float64')[:, ::-1]",
    "big-endian": "batch['x'][:, ::2].astype('>f4')",
}


@pytest.mark.parametrize("tasks", (1, 3))
@pytest.mark.parametrize("view", VIEWS)
def test_outputs_may_be_any_view(start, view, tasks):
    text = f"""
    import numpy as np, downbeat
    class View(downbeat.Model):
        def predict(self, batch):
            return {VIEWS[view]}
    """
    x = np.arange(4 * tasks, dtype=np.float32).reshape(tasks, 4)
    backend = start(text, [tensor("x", "FP32", 4)], [tensor("y", "FP32", -1)])
    (found,) = backend.run(("FP32", x))
    np.testing.assert_array_equal(found, eval(VIEWS[view], {"np": np, "batch": {"x": x}}))


def test_outputs_without_dimensions_and_of_bytes_may_be_views_too():
    assert tensors.to_bytes("y", "INT16", np.arange(6, dtype=np.int16)[::-2][0])[0] == ()
    names = np.array([["a", "b"], ["c", "d"]], dtype=object)
    shape, data = tensors.to_bytes("y", "BYTES", names[:, ::-1])
    assert tensors.from_bytes("BYTES", shape, memoryview(data)).tolist() == [[b"b", b"a"], [b"d", b"c"]]


def test_an_exception_fails_its_batch_and_no_other(start):
    backend = start(
        """
        import downbeat
        class Odd(downbeat.Model):
            def predict(self, batch):
                if batch["x"][0, 0] < 0:
                    raise ValueError("negative\\nvalues")
                return batch["x"]
        """,
        X,
        Y,
    )
    batch = np.ones((1, 3), dtype=np.float32)
    assert backend.run_groups((1, [("FP32", -batch)])) == [(1, "ValueError: negative values")]
    np.testing.assert_array_equal(backend.run(("FP32", batch))[0], batch)


def test_outputs_that_do_not_fit_are_named(start):
    def reason(expression: str, outputs=Y) -> str:
        text = f"""
        import numpy as np, downbeat
        class Odd(downbeat.Model):
            def predict(self, batch):
                return {expression}
        """
        ((tasks, found),) = start(text, X, outputs).run_groups((2, [("FP32", np.ones((2, 3), dtype=np.float32))]))
        assert tasks == 2 and isinstance(found, str), found
        return found

    assert "output y has shape [2, 2], expected [2, 3]" in reason("batch['x'][:, :2]")
    assert "output y has shape [3], expected [2, 3]" in reason("batch['x'][0]")
    assert "expected y too" in reason("{'z': batch['x']}")
    assert "output y is <U1, expected FP32" in reason("np.array([['a'] * 3] * 2)")
    assert "predict gave 1 outputs, expected 2: y, z" in reason("[batch['x']]", [*Y, tensor("z", "FP32", 1)])
    assert "read-only" in reason("batch['x'].__setitem__(0, 1)")
    assert "output y has 48000 bytes, expected at most 512 a task" in reason("np.ones((2, 6000), np.float32)", [tensor("y", "FP32", -1)])
    assert "output y has 1 tasks, expected 2" in reason("{'y': [np.ones(2)]}", [tensor("y", "FP32", -1)])
    assert "expected bytes or str" in reason("np.array([[1, 2, 3]] * 2, object)", [tensor("y", "BYTES", 3)])


def test_what_can_be_cast_without_changing_its_kind_is(start):
    text = """
    import downbeat
    class Wide(downbeat.Model):
        def predict(self, batch):
            return batch["x"].astype("float64"), batch["x"][:, 0].astype("int64").reshape(-1, 1)
    """
    backend = start(text, X, [tensor("y", "FP32", 3), tensor("n", "INT32", 1)])
    y, n = backend.run(("FP32", np.full((2, 3), 7.5, dtype=np.float32)))
    assert (y.dtype, n.dtype, n.tolist()) == (np.float32, np.int32, [[7], [7]])


def test_bytes_are_objects(start):
    text = """
    import numpy as np, downbeat
    class Tokens(downbeat.Model):
        def predict(self, batch):
            words = [text.decode().split() for text in batch["text"][:, 0]]
            return {"count": np.array([[len(found)] for found in words], np.int64),
                    "first": np.array([[found[0] if found else ""] for found in words], object)}
    """
    backend = start(text, [tensor("text", "BYTES", 1)], [tensor("count", "INT64", 1), tensor("first", "BYTES", 1)])
    count, first = backend.run(("BYTES", np.array([["a small thing"], [""], ["für"]], object)))
    assert count.tolist() == [[3], [0], [1]]
    assert first.tolist() == [[b"a"], [b""], ["für".encode()]]


TOKENS = """
import numpy as np, downbeat

class Tokens(downbeat.Model):
    def predict(self, batch):
        words = [text.decode().split() for text in batch["text"][:, 0]]
        if ["boo"] in words:
            raise ValueError("boo")
        return {"ids": [np.array([len(word) for word in found], np.int64) for found in words],
                "words": [np.array(found, object) for found in words]}
"""


def texts(*found):
    return "BYTES", np.array([[text] for text in found], object)


def test_an_output_whose_length_varies_has_one_for_each_task(start):
    backend = start(TOKENS, [tensor("text", "BYTES", 1)], [tensor("ids", "INT64", -1), tensor("words", "BYTES", -1)])
    answers = backend.run_groups((4, [texts("a small thing", "", "one two", "three four")]))
    assert [tasks for tasks, _ in answers] == [1, 1, 2], "neighbours of one shape are one"
    assert [outputs[0].tolist() for _, outputs in answers] == [[[1, 5, 5]], [[]], [[3, 3], [5, 4]]]
    assert answers[2][1][1].tolist() == [[b"one", b"two"], [b"three", b"four"]]


def test_groups_are_run_one_after_another_and_fail_alone(start):
    backend = start(TOKENS, [tensor("text", "BYTES", 1)], [tensor("ids", "INT64", -1), tensor("words", "BYTES", -1)])
    first, second, third = backend.run_groups((1, [texts("a")]), (2, [texts("boo", "b")]), (1, [texts("ccc")]))
    assert (first[1][0].tolist(), third[1][0].tolist()) == ([[1]], [[3]])
    assert second == (2, "ValueError: boo")


def test_an_input_that_is_left_out_is_not_there(start):
    text = """
    import downbeat
    class Masked(downbeat.Model):
        def predict(self, batch):
            return batch["x"] * batch.get("mask", 2)
    """
    inputs = [tensor("x", "FP32", -1), tensor("mask", "FP32", -1, optional=True)]
    backend = start(text, inputs, [tensor("y", "FP32", -1)])
    x, mask = (("FP32", np.full((1, 2), value, np.float32)) for value in (3, 5))
    answers = backend.run_groups((1, [x, None]), (1, [x, mask]), (1, [("FP32", np.zeros((1, 0), np.float32)), None]))
    assert [outputs[0].tolist() for _, outputs in answers] == [[[6, 6], [15, 15]], [[]]]


def test_reasons_of_a_batch_fit_a_line(start):
    text = """
    import downbeat
    class Odd(downbeat.Model):
        def predict(self, batch):
            raise ValueError(f"{batch['x'][0, 0]} " + "\N{SNOWMAN}" * 5000)
    """
    backend = start(text, [tensor("x", "UINT8", 1)], [tensor("y", "UINT8", 1)])
    groups = [(1, [("UINT8", np.array([[number]], np.uint8))]) for number in range(250)]
    answers = backend.run_groups(*groups)
    assert len(answers) == 250 and answers[7][1].startswith("ValueError: 7")
    assert sum(len(reason) for _, reason in answers) <= 100_000


def test_a_model_without_batches_has_no_dimension_for_them(start):
    backend = start(DOUBLE, X, Y, batched=False)
    np.testing.assert_array_equal(backend.run(("FP32", np.ones(3, dtype=np.float32)))[0], np.full(3, 2, np.float32))


def test_what_cannot_be_loaded_says_why(start):
    def refused(text: str) -> str:
        backend = start(text, X, Y)
        assert backend.close() == 1
        return backend.started["refused"]

    assert "found none, expected one subclass of downbeat.Model, or TritonPythonModel" in refused("")
    assert "SyntaxError" in refused("def")
    missing = refused("import package_of_nobody")
    assert "the Python package package_of_nobody is missing for" in missing and "parameter `python`" in missing
    broken = refused("import downbeat\nclass M(downbeat.Model):\n    def load(self, context): raise OSError('no weights')")
    assert "OSError: no weights" in broken


def test_a_model_of_scikit_learn(start):
    datasets = pytest.importorskip("sklearn.datasets")
    text = """
    import downbeat
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression

    class Iris(downbeat.Model):
        def load(self, context):
            features, labels = load_iris(return_X_y=True)
            self.model = LogisticRegression(max_iter=1000).fit(features, labels)

        def predict(self, batch):
            features = batch["features"]
            return {"label": self.model.predict(features).reshape(-1, 1), "scores": self.model.predict_proba(features)}
    """
    backend = start(text, [tensor("features", "FP32", 4)], [tensor("label", "INT64", 1), tensor("scores", "FP32", 3)])
    assert backend.started == {"ready": {"protocol": 2}}
    features, labels = datasets.load_iris(return_X_y=True)
    chosen = slice(0, 150, 20)
    label, scores = backend.run(("FP32", features[chosen].astype(np.float32)))
    assert label[:, 0].tolist() == labels[chosen].tolist()
    assert scores.argmax(axis=1).tolist() == labels[chosen].tolist()
