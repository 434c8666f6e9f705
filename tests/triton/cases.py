"""Runs the tests of one of Triton's unittest files, unmodified, and tells of each on a line of JSON.

    cases.py FILE --list               prints the tests' names
    cases.py FILE NAME...              runs them, in the file's folder

With ANY_WORDS set, an error may have any text: what else the tests expect is looked at alone.

With ONNX_ONLY set, Triton's own question "can this platform serve these types" is answered with no for every platform
but ONNX, since many of its tests go through all platforms in one test.
"""

import importlib.util
import json
import os
import sys
import unittest
from contextlib import redirect_stdout
from pathlib import Path


def only_onnx():
    import test_util

    for platform in ("trt", "libtorch", "openvino", "ensemble"):
        setattr(test_util, f"validate_for_{platform}_model", lambda *_, **__: False)


def any_words():
    exact = unittest.TestCase.assertIn

    def assert_in(self, member, container, msg=None):
        if not isinstance(member, str) or not isinstance(container, str) or " " not in member:
            exact(self, member, container, msg)

    unittest.TestCase.assertIn = assert_in
    unittest.TestCase.assertRaisesRegex = lambda self, kind, _, *args, **more: self.assertRaises(kind, *args, **more)


def load(file):
    os.chdir(file.parent)
    sys.path[:0] = [str(file.parent), "../common", "../../common"]
    if os.environ.get("ONNX_ONLY"):
        only_onnx()
    if os.environ.get("ANY_WORDS"):
        any_words()
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.argv[0] = str(file)
    spec.loader.exec_module(module)
    return module


def flat(suite):
    for item in suite:
        yield from flat(item) if isinstance(item, unittest.TestSuite) else [item]


def name(test):
    return test.id().split(".", 1)[1]


class Told(unittest.TestResult):
    def __init__(self, out):
        super().__init__()
        self.out, self.parts = out, []

    def tell(self, **what):
        print(json.dumps(what), file=self.out, flush=True)

    def startTest(self, test):
        super().startTest(test)
        self.parts, self.done = [], None
        self.tell(start=name(test))

    def stopTest(self, test):
        super().stopTest(test)
        outcome, why, text = self.done or ("passed", "", "")
        if self.parts and outcome == "passed":
            why, text = ("; ".join(whys) if n == 0 else "\n".join(whys) for n, whys in enumerate(zip(*self.parts)))
            outcome = "failed"
        self.tell(test=name(test), outcome=outcome, why=why, text=text)

    def wrong(self, test, err):
        text = self._exc_info_to_string(err, test)
        return ("failed", " ".join(str(err[1]).split())[:600] or err[0].__name__, text)

    def addError(self, test, err):
        super().addError(test, err)
        self.done = self.wrong(test, err)

    addFailure = addError

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.done = ("not applicable", reason, "")

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            _, why, text = self.wrong(test, err)
            self.parts.append((f"{subtest._subDescription()}: {why}", text))


def main():
    file, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    out, noise = sys.stdout, open(os.devnull, "w")
    del sys.argv[1:]
    with redirect_stdout(noise):
        module = load(file)
        tests = list(flat(unittest.defaultTestLoader.loadTestsFromModule(module)))
        if names == ["--list"]:
            print(json.dumps([name(test) for test in tests]), file=out)
            return
        by_name = {name(test): test for test in tests}
        for wanted in names:
            # A suite of one, so that its class is set up and torn down as unittest does.
            result = Told(out)
            unittest.TestSuite([by_name[wanted]])(result)
            if result.testsRun == 0:
                why = " ".join(result.errors[0][1].split())[-600:] if result.errors else "did not run"
                result.tell(test=wanted, outcome="failed", why=why, text="")


main()
