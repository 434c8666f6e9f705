#!/usr/bin/env python3
"""judge.py DOWNBEAT: `downbeat place` against HiGHS.

Small problems, which HiGHS solves to the optimum: the objective must be that, and the bound below it. Larger ones, which HiGHS has
some seconds for: imbalances of rates and of memory must each be at most HiGHS's plus 0.01. All are drawn from fixed seeds.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import highs

EPSILON = 1e-5
SECONDS = 8


class Case:
    """A workload, drawn from a seed, and how it is to be placed."""

    def __init__(self, seed, models, sub_clusters, moves_max=None, is_tight=False):
        self.name = f"{models} models into {sub_clusters}, seed {seed}"
        self.moves_max = moves_max
        if moves_max is not None:
            self.name += f", {moves_max} moves"
        if is_tight:
            self.name += ", tight"
        draw = random.Random(seed)
        self.sub_clusters = sub_clusters
        self.models = [
            (f"m{i}", draw.expovariate(1.0) + 1e-3, round(draw.uniform(10, 500), 1), round(draw.uniform(0, 200), 1))
            for i in range(models)
        ]
        self.former = [draw.randrange(sub_clusters) for _ in self.models] if moves_max is not None else None
        # Little more than the means of both: few placements fit, or none. Otherwise nearly all do.
        memory = sum(model[2] for model in self.models) / sub_clusters
        room = 1.02 * memory + 150 if is_tight else 3 * memory + 700
        self.gpu_mb = round(room, 1)

    def workload(self):
        text = f"gpus = {self.sub_clusters}\nmemory = {{ gpu_mb = {self.gpu_mb}, pcie_gbps = 100 }}\n"
        for name, share, static_mb, dynamic_mb in self.models:
            text += f'[[model]]\nname = "{name}"\nalpha_ms = 1\nbeta_ms = 5\nslo_ms = 100\nshare = {share!r}\n'
            text += f"weights_mb = {static_mb}\ndynamic_mb = {dynamic_mb}\n"
        return text

    def place(self, downbeat, steps):
        """What the tool prints."""
        with tempfile.TemporaryDirectory() as folder:
            workload, former = Path(folder) / "w.toml", Path(folder) / "former.json"
            workload.write_text(self.workload())
            words = [downbeat, "place", "--workload", workload, "--partitions", str(self.sub_clusters), "--json"]
            words += ["--steps", str(steps)]
            if self.former:
                there = [{"name": model[0], "sub_cluster": at} for model, at in zip(self.models, self.former)]
                former.write_text(json.dumps({"models": there}))
                words += ["--from", former, "--max-moves", str(self.moves_max)]
            ended = subprocess.run(words, capture_output=True, text=True, check=False)
            return ended.returncode, json.loads(ended.stdout) if ended.returncode == 0 else ended.stderr.strip()


def check(case, found):
    """That the tool's placement keeps to the constraints, and is as good as it says."""
    place = [model["sub_cluster"] for model in found["models"]]
    assert set(place) <= set(range(case.sub_clusters)), place
    assert abs(highs.objective(found, place) - found["objective"]) < EPSILON, found["objective"]
    for at in range(case.sub_clusters):
        here = [model for model in found["models"] if model["sub_cluster"] == at]
        needed = sum(model["static_bytes"] for model in here) + max((m["dynamic_bytes"] for m in here), default=0)
        assert needed <= found["memory_max_bytes"], (at, needed)
    if case.former:
        moved = [model["name"] for model in found["models"] if model["former"] != model["sub_cluster"]]
        assert sorted(moved) == sorted(step["model"] for step in found["moves"]), moved
        assert len(moved) <= case.moves_max, moved
    return place


def is_optimal(downbeat, case):
    """Of a small case: whether the tool finds what HiGHS proves."""
    code, found = case.place(downbeat, 200_000)
    if code != 0:
        # What the tool does not find must not be there. The numbers are in the workload alone then.
        names = ["name", "rate_rps", "static_bytes", "dynamic_bytes"]
        models = [dict(zip(names, (n, r, round(s * 1e6), round(d * 1e6)))) for n, r, s, d in case.models]
        for model, at in zip(models, case.former or [None] * len(models)):
            model["former"] = at
        problem = {"sub_clusters": case.sub_clusters, "models": models, "memory_max_bytes": round(case.gpu_mb * 1e6)}
        solved = highs.solve(problem | {"moves_max": case.moves_max}, 60)
        print(f"{case.name}: none; HiGHS {'none' if solved is None else 'has one'}; {found}")
        return solved is None and "expected" in found
    check(case, found)
    problem = found | {"moves_max": case.moves_max}
    solved = highs.solve(problem, 60)
    assert solved and solved[1], f"{case.name}: HiGHS has not solved it"
    best = highs.objective(problem, solved[0])
    print(f"{case.name}: {found['objective']:.6f}, HiGHS {best:.6f}, bound {found['bound']:.6f}")
    return found["objective"] <= best + EPSILON and found["bound"] <= best + EPSILON


def is_balanced(downbeat, case):
    """Of a larger case: whether both imbalances are at most HiGHS's after some seconds plus 0.01."""
    code, found = case.place(downbeat, 2_000_000)
    assert code == 0, found
    place = check(case, found)
    problem = found | {"moves_max": case.moves_max}
    solved = highs.solve(problem, SECONDS)
    ours = highs.imbalances(problem, place)
    if not solved:
        print(f"{case.name}: {ours[0]:.5f} and {ours[1]:.5f}, HiGHS nothing after {SECONDS} s")
        return True
    theirs = highs.imbalances(problem, solved[0])
    better = highs.objective(problem, place) <= highs.objective(problem, solved[0]) + EPSILON
    print(f"{case.name}: {ours[0]:.5f} and {ours[1]:.5f}, HiGHS {theirs[0]:.5f} and {theirs[1]:.5f} after {SECONDS} s")
    # With few moves one imbalance is bought with the other, so that the sum is what counts.
    return better if case.moves_max else all(our <= their + 0.01 for our, their in zip(ours, theirs))


def main():
    downbeat = sys.argv[1]
    small = [Case(seed, 10, 3) for seed in range(4)]
    small += [Case(seed, 10, 3, is_tight=True) for seed in range(10, 16)]
    small += [Case(seed, 14, 3, moves_max=3) for seed in range(20, 24)]
    larger = [Case(30, 60, 5), Case(31, 100, 6, is_tight=True), Case(32, 60, 5, moves_max=8)]
    failed = [case.name for case in small if not is_optimal(downbeat, case)]
    failed += [case.name for case in larger if not is_balanced(downbeat, case)]
    for name in failed:
        print(f"FAILED {name}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
