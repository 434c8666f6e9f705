#!/usr/bin/env python3
"""figure.py SECONDS INSTANCE..: what HiGHS, on one thread, finds in so long for instances of Symphony's Figure 16, as CSV.

figures/data/fig16-highs.csv is what it printed for `10 1 2 3 4 5 6 7 8 9 10` and for `600 1`.
"""

import sys
from pathlib import Path

import highs

MODELS, SUB_CLUSTERS = 800, 20


def main():
    seconds = float(sys.argv[1])
    zoo = Path(__file__).parents[2] / "sim/data/clockwork-zoo-v100.csv"
    print("instance,seconds,rate_rps,static_bytes,objective,rate_imbalance,memory_imbalance")
    for number in map(int, sys.argv[2:]):
        problem = highs.instance(zoo, number, MODELS, SUB_CLUSTERS)
        found = highs.solve(problem, seconds)
        if not found:
            sys.exit(f"instance {number}: HiGHS has found nothing in {seconds} s")
        rate, memory = (sum(load) for load in highs.loads(problem, found[0]))
        values = [rate, int(memory), highs.objective(problem, found[0]), *highs.imbalances(problem, found[0])]
        print(number, sys.argv[1], *values, sep=",", flush=True)


if __name__ == "__main__":
    main()
