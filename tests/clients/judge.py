"""What the tests of all clients share: the images, and the table of what was called and how it ended.

A call stands in the table only if what it answered was what it had to be; anything else ends the test."""

import csv

import numpy as np

# Microseconds: the objective of requests whose answers are judged, not their lateness.
PATIENT = 5_000_000
MODEL = "digits"
# The same model, of which there is nothing but the file.
PLAIN = "plain"
# The cluster's own copy, which tests may spoil.
REPOSITORY = "target/clients-models"

with open("models/digits/heldout.csv") as file:
    ROWS = [[int(cell) for cell in row] for row in csv.reader(file)][:60]
LABELS = [row[0] for row in ROWS]
IMAGES = np.array([row[1:] for row in ROWS], dtype=np.float32)


class Table:
    """Calls of one client, in order."""

    def __init__(self, client):
        self.client = client
        self.calls = []

    def __call__(self, call, outcome, function):
        """Runs a call; `function` raises if the answer is wrong. Yields what it yields."""
        try:
            answer = function()
        except BaseException as error:
            raise AssertionError(f"{self.client}: {call}: {error!r}") from error
        self.calls.append((call, outcome))
        print(f"{self.client}: {call}: {outcome}", flush=True)
        return answer

    def refused(self, call, reason, error, function):
        """Runs a call that has to end in `error` with `reason` in its text."""

        def refuse():
            try:
                function()
            except error as refusal:
                assert reason in str(refusal), f"found the reason {refusal}, expected {reason!r}"
            else:
                raise AssertionError("it was not refused")

        self(call, f"refused: {reason}", refuse)

    def markdown(self):
        lines = [f"## {self.client}", "", "| call | outcome |", "| --- | --- |"]
        return "\n".join(lines + [f"| `{call}` | {outcome} |" for call, outcome in self.calls]) + "\n"


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-5)


def expect(found, expected):
    assert found == expected, f"found {found!r}, expected {expected!r}"
