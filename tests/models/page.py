"""docs/models.md: what came of the models of tests/models/run."""

HEAD = """# Models

What comes of models as users bring them: real ones that packages on PyPI carry, exports, and small ones of what once
went wrong, each file as it is, and but for a few small ones without a configuration. Each must be READY and is asked over
HTTP and gRPC, for one row and for several, short and long; an answer is right if it is ONNX Runtime's own of the same
tensors, numbers within 1e-4 of each or 1e-5. ONNX Runtime runs them. Where rows influence each other (`apart`) it is ONNX
Runtime's answer to each row alone.

This page is made by `tests/models/run --update`, and `tests/models/run` checks that it is still true.

| kind | models served right |
| --- | --- |
"""
KINDS = {
    "real": "real models, which this was made to serve",
    "further": "real models that nothing was written for",
    "strangers": "small models, one of each kind that once failed",
    "exports": "exports of scikit-learn, XGBoost and LightGBM",
}
TABLES = {
    "real": "## Real models",
    "further": "## Models that nothing was written for\n\nThey were chosen from packages by their names. Whatever comes of them is listed.",
}
COLUMNS = ("model", "package", "file", "MB", "answers right", "rows")


class Found:
    """What came of a model."""

    def __init__(self, right, count, wrong):
        self.right, self.count, self.wrong = right, count, wrong

    def is_right(self):
        return not self.wrong

    def line(self, name):
        verdict = "right" if self.is_right() else "wrong" if self.count else "refused"
        return "; ".join([f"{verdict} {name}: {self.right} of {self.count}", *self.wrong[:2]])

    def cell(self):
        return f"{self.right} of {self.count}" if self.count else self.wrong[0].replace("|", "/")


def package_of(packages, file):
    """As pip calls it, with its version."""
    inside = str(file.relative_to(packages))
    for record in packages.glob("*.dist-info/RECORD"):
        if any(line.startswith(f"{inside},") for line in record.read_text().splitlines()):
            return record.parent.name.removesuffix(".dist-info").replace("-", " ")
    return "?"


def write(place, kinds, found, packages):
    lines = [HEAD.rstrip()]
    for kind, text in KINDS.items():
        right = sum(found[subject.name].is_right() for subject in kinds[kind])
        lines.append(f"| {text} | {right} of {len(kinds[kind])} |")
    for kind, text in TABLES.items():
        lines += ["", text, "", f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
        for subject in kinds[kind]:
            rows = "apart" if subject.is_apart else ""
            cells = [subject.name, package_of(packages, subject.file), f"`{subject.file.name}`"]
            cells += [f"{subject.file.stat().st_size / 1e6:.1f}", found[subject.name].cell(), rows]
            lines.append(f"| {' | '.join(cells)} |")
    place.write_text("\n".join(lines) + "\n")
