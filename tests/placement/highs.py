"""The MILP of Symphony's appendix A.1 as the paper writes it, for HiGHS; and the instances of its Figure 16."""

import csv
import math

import highspy

MASK = (1 << 64) - 1


def splitmix(seed):
    """SplitMix64, which figures/src/fig16.rs draws by, too."""
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


def instance(zoo, seed, models, sub_clusters):
    """`models` variants of models of the zoo (a file of CSV), whose rates are exponential with a mean of 100 requests a second.

    Dynamic memory is what the tensors of a batch of 16 take.
    """
    with open(zoo, encoding="utf-8") as file:
        kinds = list(csv.DictReader(file))
    draws, found = splitmix(seed), []
    for number in range(models):
        kind = kinds[next(draws) % len(kinds)]
        rate_rps = -100 * math.log1p(-(next(draws) >> 11) / 2**53)
        found.append(
            {
                "name": f"{kind['model']}-{number}",
                "rate_rps": rate_rps,
                "static_bytes": round(float(kind["weights_mb"]) * 1e6),
                "dynamic_bytes": round(16_000 * (float(kind["input_kb"]) + float(kind["output_kb"]))),
            }
        )
    return {"sub_clusters": sub_clusters, "models": found}


def loads(problem, place):
    """Rate and static memory of each sub-cluster; `place` has the sub-cluster of each model."""
    rates, memory = [0.0] * problem["sub_clusters"], [0.0] * problem["sub_clusters"]
    for model, at in zip(problem["models"], place):
        rates[at] += model["rate_rps"]
        memory[at] += model["static_bytes"]
    return rates, memory


def imbalances(problem, place):
    """(max - min) / mean of rate and of static memory."""
    return [(max(load) - min(load)) * len(load) / sum(load) if any(load) else 0.0 for load in loads(problem, place)]


def objective(problem, place):
    """dR + w dS, each as a part of its mean: w is R / S."""
    parts = []
    for load in loads(problem, place):
        mean = sum(load) / len(load)
        parts.append(max(abs(each - mean) for each in load) / mean if mean else 0.0)
    return sum(parts)


def solve(problem, seconds, threads=1, improved=None):
    """The sub-cluster of each model, whether that is optimal, and the bound; None where there is no placement.

    `improved(seconds, place)` is called with each better placement that is found.
    """
    models, count = problem["models"], problem["sub_clusters"]
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("time_limit", float(seconds))
    solver.setOptionValue("threads", threads)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_abs_gap", 1e-9)
    x = [[solver.addBinary() for _ in range(count)] for _ in models]
    # (6) and (7), in parts of the means; (8) and (9).
    deviations = []
    for key in ("rate_rps", "static_bytes"):
        mean = sum(model[key] for model in models) / count
        deviation = solver.addVariable(0.0, highspy.kHighsInf, obj=1.0)
        deviations.append(deviation)
        for at in range(count if mean else 0):
            part = solver.qsum(x[i][at] * (model[key] / mean) for i, model in enumerate(models))
            solver.addConstr(part - deviation <= 1.0)
            solver.addConstr(part + deviation >= 1.0)
    for row in x:
        solver.addConstr(solver.qsum(row) == 1)
    # (4).
    if problem.get("rate_max"):
        for at in range(count):
            part = solver.qsum(x[i][at] * (model["rate_rps"] / problem["rate_max"]) for i, model in enumerate(models))
            solver.addConstr(part <= 1.0)
    # (5): the largest dynamic memory is a variable above each.
    memory_max = problem.get("memory_max_bytes")
    if memory_max:
        for at in range(count):
            largest = solver.addVariable(0.0, highspy.kHighsInf)
            for i, model in enumerate(models):
                solver.addConstr(largest - x[i][at] * (model["dynamic_bytes"] / memory_max) >= 0)
            part = solver.qsum(x[i][at] * (model["static_bytes"] / memory_max) for i, model in enumerate(models))
            solver.addConstr(part + largest <= 1.0)
    # (10), where each model that leaves costs 1 and no model is new: y is 1 - x of where it is now.
    if problem.get("moves_max") is not None:
        stayed = solver.qsum(x[i][model["former"]] for i, model in enumerate(models))
        solver.addConstr(stayed >= len(models) - problem["moves_max"])
    place_of = lambda values: [max(range(count), key=lambda at: values[x[i][at].index]) for i in range(len(models))]
    if improved:
        solver.cbMipImprovingSolution += lambda event: improved(
            event.data_out.running_time, place_of(event.data_out.mip_solution)
        )
    solver.minimize()
    status, info = solver.getModelStatus(), solver.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    place = place_of(solver.getSolution().col_value)
    return place, status == highspy.HighsModelStatus.kOptimal, info.mip_dual_bound
