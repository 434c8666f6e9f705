"""Measures each server in turn, several times, and prints one table of medians. bench/peers/run installs what it needs."""

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import tritonclient.http as tritonclient

from servers import DOWNBEAT, HOST, PEERS

HERE = Path(__file__).parent
DOCUMENT = HERE.parent.parent / "docs/peers.md"
SLO_MS = 20
# Goodput: the share of requests that must be answered within the objective, and how near to the limit the search ends.
ON_TIME_MIN = 0.99
SEARCH_RATIO = 1.08
# Equal loads, in requests a second: one that every server holds, and one that only some do.
RATES = 500, 5000


def closed_loop(server, seconds):
    """wrk, 64 keep-alive connections: requests a second, p50 and p99 in ms."""
    command = ["wrk", "-t1", "-c64", f"-d{seconds}s", "-s", HERE / "infer.lua", f"{server.url}/v2/models/sum/infer"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rps, p50, p99, errors = map(float, output.split("RESULT")[1].split())
    if errors:
        progress(f"warning: {server}: wrk counted {errors:.0f} errors")
    return rps, p50, p99


def one_at_a_time(server, seconds):
    """tritonclient, the next request when the last one is answered: median in ms."""
    client = tritonclient.InferenceServerClient(f"{HOST}:{server.port}")
    tensor = tritonclient.InferInput("x", [1, 64], "FP32")
    tensor.set_data_from_numpy(np.arange(64, dtype=np.float32).reshape(1, 64) / 2, binary_data=False)
    output = tritonclient.InferRequestedOutput("sum", binary_data=False)
    took, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.perf_counter()
        client.infer("sum", [tensor], outputs=[output])
        took.append(time.perf_counter() - started)
    return statistics.median(took) * 1e3


def open_loop(server, rate, seconds):
    """downbeat bench load at `rate`: its report of the model, or none if it could not send so much beside the server."""
    command = [DOWNBEAT, "bench", "load", "--url", server.url, "--model", f"sum:{rate:.0f}", "--encoding", "json",
               "--seconds", str(seconds), "--slo-ms", str(SLO_MS), "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    if "what this machine can generate" in result.stderr:
        return None
    # With 1 the load was sent and nothing of it was served, which its report says.
    if result.returncode not in (0, 1):
        sys.exit(f"{server}: {result.stderr.strip()}")
    return json.loads(result.stdout)["models"][0]


def goodput(server, capacity, seconds):
    """The highest rate found at which 99 % of the requests are answered within the objective."""
    def holds(rate):
        report = open_loop(server, rate, seconds)
        return report is not None and report["on_time_fraction"] >= ON_TIME_MIN

    # From near what the server does in closed loop, up or down to where the answer changes, and then between.
    low, high, rate = 0, None, 0.7 * capacity
    while rate > capacity / 100:
        if holds(rate):
            low = rate
        else:
            high = rate
        if high and low and high / low < SEARCH_RATIO:
            break
        rate = 1.3 * low if not high else (low * high) ** 0.5 if low else high / 2
    return low


def measure(server, options):
    """One round of one server."""
    with server.running(options.work):
        closed_loop(server, 2)  # warms up
        rps, p50, p99 = closed_loop(server, options.seconds)
        found = {"rps": rps, "p50_ms": p50, "p99_ms": p99, "alone_ms": one_at_a_time(server, options.seconds / 2)}
        for rate in RATES:
            report = open_loop(server, rate, options.seconds) if rate < 0.9 * rps else None
            found[f"p50_ms_at_{rate}"] = report and report["p50_ms"]
            found[f"p99_ms_at_{rate}"] = report and report["p99_ms"]
        found["goodput_rps"] = goodput(server, rps, options.seconds / 2)
        return found


def compare(options):
    """Each server with the medians of what the rounds found of it."""
    servers = [server for name in options.only.split(",") for server in PEERS[name](options.venvs.absolute(), options.work)]
    rounds = {server: [] for server in servers}
    # In turn, so that what else the machine does disturbs all of them alike.
    for number in range(options.rounds):
        for server in servers:
            rounds[server].append(measure(server, options))
            progress(f"round {number + 1} of {options.rounds}: {server}: {rounds[server][-1]['rps']:,.0f} requests a second")
    return [{"name": server.name, "variant": server.variant, "version": server.version, **medians(rounds[server])}
            for server in servers]


def medians(rounds):
    def of(key):
        values = [found[key] for found in rounds if found[key] is not None]
        return statistics.median(values) if values else None

    return {key: of(key) for key in rounds[0]}


def goals(results):
    """What downbeat is to reach against the best variant of each peer, and whether it did: (goal, expected, found)."""
    ours = next((result for result in results if result["name"] == "downbeat"), None)

    def ratio(peer, key, best):
        values = [result[key] for result in results if result["name"] == peer and result[key]]
        return ours[key] / best(values) if ours and ours[key] and values else None

    asked = [("requests a second, times Triton's", "Triton", "rps", max, 2)]
    asked += [(f"{label}, times Triton's", "Triton", key, min, 1)
              for label, key in [("latency of one request at a time", "alone_ms")]
              + [(f"{quantile} at {rate} requests a second", f"{quantile}_ms_at_{rate}") for rate in RATES for quantile in ("p50", "p99")]]
    asked += [(f"goodput, times that of {peer}", peer, "goodput_rps", max, 5) for peer in ("MLServer", "Ray Serve")]
    found = [(text, best, expected, ratio(peer, key, best)) for text, peer, key, best, expected in asked]
    return [{"goal": text, "expected": f"{'at least' if best is max else 'below'} {expected}", "found": value,
             "reached": value >= expected if best is max else value < expected}
            for text, best, expected, value in found if value is not None]


def markdown(options, results):
    columns = [("requests/s", "rps", 0), ("p50 ms", "p50_ms", 2), ("p99 ms", "p99_ms", 2), ("alone ms", "alone_ms", 2)]
    columns += [(f"{quantile} ms at {rate}/s", f"{quantile}_ms_at_{rate}", 2) for rate in RATES for quantile in ("p50", "p99")]
    columns.append(("goodput/s", "goodput_rps", 0))

    def row(cells):
        return "| " + " | ".join(cells) + " |"

    def cell(value, digits):
        return "-" if value is None else f"{value:,.{digits}f}"

    lines = [f"{os.cpu_count()} cores, {platform.machine()}; medians of {options.rounds} rounds of {options.seconds} s.", "",
             row(["server", "version", *(title for title, _, _ in columns)]),
             row(["---", "---", *("---:" for _ in columns)])]
    for result in results:
        name = ", ".join(filter(None, (result["name"], result["variant"])))
        lines.append(row([name, result["version"], *(cell(result[key], digits) for _, key, digits in columns)]))
    lines += ["", row(["goal of downbeat", "expected", "found"]), row(["---", "---:", "---:"])]
    lines += [row([goal["goal"], goal["expected"], f"{goal['found']:.2f}{'' if goal['reached'] else ' (missed)'}"])
              for goal in goals(results)]
    return "\n".join(lines) + "\n"


def record(table):
    """Puts the table where the document has the last one."""
    begin, end = "<!-- written by bench/peers/run --record -->\n", "<!-- end -->"
    text, count = re.subn(f"(?s){begin}.*{end}", lambda _: begin + table + end, DOCUMENT.read_text())
    if count != 1:
        sys.exit(f"{DOCUMENT}: expected one pair of {begin.strip()} and {end}, found {count}")
    DOCUMENT.write_text(text)


def progress(line):
    print(line, file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(prog="bench/peers/run", description=__doc__)
    parser.add_argument("--venvs", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--only", default=",".join(PEERS), help="servers, separated by commas (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=3, help="of each measurement (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="all servers in turn, so often (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--record", action="store_true", help="write the table into docs/peers.md too")
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - set(PEERS):
        parser.error(f"--only: expected some of {', '.join(PEERS)}, found {', '.join(sorted(unknown))}")
    for flag in "seconds", "rounds":
        if getattr(options, flag) < 1:
            parser.error(f"--{flag}: expected at least 1, found {getattr(options, flag)}")
    options.work = (options.venvs / "work").absolute()
    options.work.mkdir(exist_ok=True)
    # Also told to end, this stops the server that runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    results = compare(options)
    table = markdown(options, results)
    if options.record:
        record(table)
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "seconds": options.seconds, "rounds": options.rounds, "slo_ms": SLO_MS,
                          "servers": results, "goals": goals(results)}))
    else:
        print(table, end="")


if __name__ == "__main__":
    main()
