"""Metrics that models have of their own."""

import numpy as np
from conftest import tensor

INPUTS, OUTPUTS = [tensor("x", "FP32", 1)], [tensor("y", "FP32", 1)]
FAMILY = {"name": "rows_total", "description": "Rows so far", "kind": "counter"}
METRIC = {"family": "rows_total", "labels": {"model": "m"}}
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily(
            name="rows_total", description="Rows so far", kind=pb_utils.MetricFamily.COUNTER
        )
        self.rows = self.family.Metric(labels={"model": "m"})
        %s

    def execute(self, requests):
        answers = []
        for request in requests:
            self.rows.increment(1)
            %s
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 0 + self.found())]))
        return answers

    def found(self):
        return np.float32(%s)

    def finalize(self):
        self.rows.increment(1)
        pb_utils.MetricFamily(name="late", description="", kind=pb_utils.MetricFamily.GAUGE)
"""


def model(start, initialize="pass", execute="pass", found="0", **rest):
    return start(MODEL % (initialize, execute, found), INPUTS, OUTPUTS, **rest)


def rows(count):
    return ("FP32", np.ones((count, 1), dtype=np.float32))


def test_a_counter_is_declared_and_told_once_a_batch(start):
    backend = model(start)
    assert backend.started == {"ready": {"protocol": 2}}
    declared = [{"family": FAMILY}, {"metric": {**METRIC, "buckets": []}}]
    assert backend.changes == declared
    for count in (3, 5):
        backend.changes.clear()
        backend.run(rows(count))
        assert backend.changes == [{"increment": {**METRIC, "value": count}}]
    assert backend.close() == 0


def test_what_a_metric_is_the_backend_says_as_others_count_too(start):
    backend = model(start, found="self.rows.value()", told=lambda change: {"value": 40.0} if "metric" in change else {})
    assert backend.run(rows(1)) == [np.float32(40)]
    assert [next(iter(change)) for change in backend.changes[2:]] == ["increment", "metric"]
    # Where it keeps none, a process knows its own.
    backend = model(start, found="self.rows.value()")
    assert [float(backend.run(rows(1))[0][0, 0]) for _ in range(2)] == [1, 2]


def test_gauges_are_what_became_of_them_and_histograms_are_told_of_each_value(start):
    initialize = """
        self.gauge = pb_utils.MetricFamily(name="g", description="", kind=pb_utils.MetricFamily.GAUGE).Metric()
        kind = pb_utils.MetricFamily.HISTOGRAM
        self.histogram = pb_utils.MetricFamily(name="h", description="", kind=kind).Metric(buckets=[1, 2.5])
    """.strip()
    execute = """
            self.gauge.increment(-2)
            self.gauge.set(7)
            self.gauge.increment(0.5)
            for value in (0.5, 3):
                self.histogram.observe(value)
    """.strip()
    backend = model(start, initialize, execute)
    assert {"metric": {"family": "h", "labels": {}, "buckets": [1.0, 2.5]}} in backend.changes
    backend.changes.clear()
    backend.run(rows(1))
    assert backend.changes == [
        {"increment": {**METRIC, "value": 1.0}},
        {"set": {"family": "g", "labels": {}, "value": 7.5}},
        {"observe": {"family": "h", "labels": {}, "value": 0.5}},
        {"observe": {"family": "h", "labels": {}, "value": 3.0}},
    ]
    backend.changes.clear()
    many = model(start, initialize, "[self.histogram.observe(n) for n in range(10_003)]")
    many.changes.clear()
    many.run(rows(1))
    seen = [change["observe"]["value"] for change in many.changes if "observe" in change]
    assert seen == [float(n) for n in range(10_003)]


def test_what_cannot_be_is_refused_with_its_name(start):
    wrong = {
        "self.rows.increment(-1)": "found -1.0, expected none that is negative",
        "self.rows.increment(float('nan'))": "found nan, expected a number that is finite",
        "self.rows.set(1)": "set: found a counter, expected a gauge",
        "self.rows.observe(1)": "observe: found a counter, expected a histogram",
        "self.family.Metric(labels={'a': 1})": "labels: found {'a': 1}, expected strings",
        "pb_utils.MetricFamily(name='a', description='', kind='counter')": "kind: found 'counter', expected COUNTER",
    }
    for line, expected in wrong.items():
        refused = model(start, line).started["refused"]
        assert expected in refused and "MetricFamily" in refused, refused
        failed = model(start, execute=line).run(rows(1))
        assert expected in failed, failed
    taken = lambda change: {"failed": "metric family rows_total: found kind counter, expected gauge"}
    assert "expected gauge" in model(start, told=taken).started["refused"]


def test_what_threads_count_between_batches_waits_for_the_next(start):
    initialize = """
        import threading
        self.go = threading.Event()
        def count():
            self.go.wait()
            for _ in range(1_000):
                self.rows.increment(1)
        self.thread = threading.Thread(target=count)
        self.thread.start()
    """.strip()
    backend = model(start, initialize, "self.go.set()")
    batches = counted = 0
    while counted < batches + 1_000:
        backend.run(rows(1))
        batches += 1
        counted = sum(change["increment"]["value"] for change in backend.changes if "increment" in change)
    assert counted == batches + 1_000
    assert backend.close() == 0
