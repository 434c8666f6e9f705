"""What happens to the network and to members, and what must hold meanwhile."""

import time
from dataclasses import dataclass, field

from control import UNANSWERED, WRONG
from roles import ROLES, Failed
from switch import CUT, Faults

# How long frontends may be without an answer while the network is bad, or worse.
BAD_S, WORSE_S = 0.75, 3.0
FAULTS_FOR_S, CUT_FOR_S = 8.0, 5.0
KILLS, TRIES = 3, 3
# What is sent again: after a loss, but on a busy machine also because an answer is late, `probes` above all.
KINDS = (("retransmits_gap", "retransmits_timeout"), ("probes",), ("duplicate_requests",))
# A loss of 20 % brings about so many at least, in FAULTS_FOR_S, and some times as many as there are with anybody else.
RETRANSMITS_MIN, TIMES = 20, 4
# Metrics are a second old at most.
METRICS_S = 1.5
# Whatever happens, no log grows by more than so many lines a second, but for what starts and takeovers say.
LINES_PER_S, LINES_MORE = 20, 400


@dataclass
class Verdict:
    """What was seen."""

    figures: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def expect(self, holds, failure):
        if not holds:
            self.failures.append(failure)


def judge(verdict, cluster, seen, bounds, killed=()):
    """`bounds` are of gaps by name of a frontend; `any` is whoever asks both."""
    for name, address in cluster.frontends().items():
        gap = seen.gaps_s[f"{address[0]}:{address[1]}"]
        verdict.figures.append(f"{name} gap {gap:.2f} s")
        if bound := bounds.get(name):
            verdict.expect(gap < bound, f"{name} answered nothing for {gap:.2f} s, expected less than {bound} s")
    if bound := bounds.get("any"):
        verdict.figures.append(f"both {seen.gap_s:.2f} s")
        verdict.expect(seen.gap_s < bound, f"nobody answered for {seen.gap_s:.2f} s, expected less than {bound} s")
    told = ", ".join(f"{count} x {what}" for what, count in seen.failed.most_common())
    verdict.figures.append(f"{seen.answered} of {seen.asked} answered{', ' if told else ''}{told}")
    for name in (WRONG, UNANSWERED):
        verdict.expect(not seen.failed[name], f"{seen.failed[name]} x {name}")
    ended = seen.answered + sum(seen.failed.values())
    verdict.expect(ended == seen.asked, f"{seen.asked - ended} requests have not ended")
    broken = [what for what in seen.failed if not what.isdecimal() and what not in (WRONG, UNANSWERED)]
    verdict.expect(killed or not broken, f"connections of clients ended: {', '.join(broken)}")
    verdict.expect(killed or not seen.unhealthy, f"frontends did not say that they live: {dict(seen.unhealthy)}")
    for name in cluster.ended():
        verdict.failures.append(f"{name} ended with {cluster.processes[name].returncode}")


def each(cluster, bound):
    return dict.fromkeys(cluster.frontends(), bound)


def everywhere(cluster, faults):
    hosts = [host.packed for host in cluster.hosts.values()]
    return {(a, b): faults for a in hosts for b in hosts if a != b}


def bad(faults, bound):
    """All links have these faults."""

    def run(cluster, control, verdict):
        overrun = cluster.overrun()
        before = cluster.switch.set(everywhere(cluster, faults))
        time.sleep(FAULTS_FOR_S)
        counts = cluster.switch.set({})
        verdict.figures.append(whole(cluster))
        judge(verdict, cluster, control.rested(), each(cluster, bound))
        cpu = (counts["cpu_s"] - before["cpu_s"]) / FAULTS_FOR_S
        done = [f"{counts[what]} {what}" for what in ("lost", "doubled", "overtaken", "corrupted") if counts.get(what)]
        rate = (sum(counts["packets"].values()) - sum(before["packets"].values())) / FAULTS_FOR_S
        verdict.figures.append(", ".join([f"{rate:.0f} packets/s at {cpu * 100:.0f} % CPU", *done]))
        lost = cluster.overrun() - overrun
        verdict.expect(lost == 0, f"{lost} packets met a full queue before the switch: it did not keep up")

    return run


def whole(cluster):
    return f"whole after {cluster.wait_until_whole():.1f} s"


def busy_backend(cluster):
    """The one that has most to do with a frontend: without load enough for all, some have nothing."""
    before = cluster.switch.set({})["packets"]
    time.sleep(0.5)
    after = cluster.switch.set({})["packets"]
    to = {name: cluster.hosts["frontend-0"].packed + cluster.hosts[name].packed for name in cluster.named("backend")}
    return max(to, key=lambda name: after[to[name]] - before[to[name]])


def cut(left, right, directions):
    """Nothing passes between two members; `primary` and `standby` are the schedulers that are it at the time. Once more
    if it was the other way round later, as a busy machine makes them change places."""

    def run(cluster, control, verdict):
        for _ in range(TRIES):
            tried, epoch = Verdict(), cluster.epoch()
            once(cluster, control, tried)
            if cluster.epoch() == epoch:
                break
            cluster.wait_until_whole()
            control.seen()
        verdict.figures += tried.figures
        verdict.failures += tried.failures

    def once(cluster, control, verdict):
        primary = cluster.primary()
        [standby] = [name for name in cluster.named("scheduler") if name != primary]
        known = {"primary": primary, "standby": standby, "frontend": "frontend-0", "backend": busy_backend(cluster)}
        a, b = (cluster.hosts[known[end]].packed for end in (left, right))
        pairs = {"to": [(a, b)], "from": [(b, a)], "both": [(a, b), (b, a)]}[directions]
        cluster.switch.set(dict.fromkeys(pairs, CUT))
        began, unready_s = time.monotonic(), None
        while (lasted := time.monotonic() - began) < CUT_FOR_S:
            if unready_s is None and not cluster.is_ready("frontend-0"):
                unready_s = lasted
            time.sleep(0.05)
        cluster.switch.set({})
        verdict.figures.append(whole(cluster))
        if unready_s is not None:
            verdict.figures.append(f"frontend-0 unready after {unready_s:.1f} s")
        # Who is cut off from the primary, and nobody takes over from that, answers nothing: balancers turn to others.
        is_turned_from = {left, right} == {"primary", "frontend"} and unready_s is not None and unready_s < WORSE_S
        bounds = {"any": WORSE_S} if is_turned_from else each(cluster, WORSE_S)
        judge(verdict, cluster, control.rested(), bounds)

    return run


def cut_off(end):
    """Nothing passes between a member and all others."""

    def run(cluster, control, verdict):
        primary = cluster.primary()
        name = {"primary": primary, "backend": busy_backend(cluster), "frontend": "frontend-0"}[end]
        faults = everywhere(cluster, CUT)
        host = cluster.hosts[name].packed
        cluster.switch.set({pair: fault for pair, fault in faults.items() if host in pair})
        time.sleep(CUT_FOR_S)
        cluster.switch.set({})
        verdict.figures.append(whole(cluster))
        bounds = {"any": WORSE_S} if end == "frontend" else each(cluster, WORSE_S)
        judge(verdict, cluster, control.rested(), bounds)

    return run


def kills(role):
    """Each member of a role is killed and started again, several times."""

    def run(cluster, control, verdict):
        took = []
        for _ in range(KILLS):
            for name in cluster.named(role):
                cluster.kill(name)
                time.sleep(0.5)
                cluster.start(name)
                took.append(cluster.wait_until_whole())
        verdict.figures.append(f"{len(took)} kills, whole after {max(took):.1f} s at most")
        killed = cluster.named(role) if role == "frontend" else ()
        bounds = {"any": BAD_S} if killed else each(cluster, BAD_S)
        judge(verdict, cluster, control.rested(), bounds, killed)

    return run


def kill_beside_loss(name, faults):
    """A member is started again over a network that loses packets, which then goes on losing them."""

    def run(cluster, control, verdict):
        cluster.switch.set(everywhere(cluster, faults))
        cluster.kill(name)
        cluster.start(name)
        verdict.figures.append(whole(cluster))
        cluster.switch.set({})
        killed = (name,) if name.startswith("frontend") else ()
        judge(verdict, cluster, control.rested(), each(cluster, WORSE_S), killed)

    return run


def counters(cluster, control, verdict):
    """Packets are lost between two members alone: who asks there sends again what it has asked, and counts that with
    nobody else."""
    asked, asks = "frontend-0", busy_backend(cluster)

    def counted():
        """By kind, what each counts with each peer."""
        time.sleep(METRICS_S)
        found = [(name, cluster.counts(name, *KINDS)) for name in cluster.hosts]
        return [{(name, peer): n for name, of in found for peer, n in of[kind].items()} for kind in range(len(KINDS))]

    before = counted()
    a, b = (cluster.hosts[name].packed for name in (asked, asks))
    cluster.switch.set({(a, b): Faults(loss=0.2), (b, a): Faults(loss=0.2)})
    time.sleep(FAULTS_FOR_S)
    cluster.switch.set({})
    after = counted()
    grown = [{pair: n - old.get(pair, 0) for pair, n in new.items()} for old, new in zip(before, after)]
    pairs = [(asks, asked), (asks, asked), (asked, asks)]
    for kind, of, pair in zip(("retransmits", "probes", "duplicates"), grown, pairs):
        found = of.pop(pair, 0)
        at, most = max(of.items(), key=lambda other: other[1], default=(None, 0))
        verdict.figures.append(f"{found} {kind} at {pair[0]} with {pair[1]}, elsewhere {most} at most")
        if kind == "retransmits":
            verdict.expect(found >= RETRANSMITS_MIN, f"{found} {kind}, expected {RETRANSMITS_MIN} or more")
            verdict.expect(most * TIMES <= found, f"{most} {kind} between {at}, where nothing was lost")
    judge(verdict, cluster, control.rested(), each(cluster, WORSE_S))


def all_cases():
    some = 0.02
    cases = {
        "no faults": bad(Faults(), BAD_S),
        "1 % lost": bad(Faults(loss=0.01), BAD_S),
        "5 % lost": bad(Faults(loss=0.05), BAD_S),
        "5 % doubled": bad(Faults(duplicate=0.05), BAD_S),
        "5 % overtaken": bad(Faults(reorder=0.05), BAD_S),
        "5 % corrupted": bad(Faults(corrupt=0.05), BAD_S),
        "10 ms late": bad(Faults(delay_s=0.01), BAD_S),
        "2 % each, 2 ms late": bad(Faults(some, some, some, some, 0.002), BAD_S),
        "20 % lost": bad(Faults(loss=0.2), WORSE_S),
        "counters of a peer, 20 % lost": counters,
        "backend joins, 5 % lost": kill_beside_loss("backend-0", Faults(loss=0.05)),
        "frontend joins, 5 % lost": kill_beside_loss("frontend-0", Faults(loss=0.05)),
    }
    ends = [("frontend", "backend"), ("primary", "backend"), ("primary", "frontend"), ("primary", "standby")]
    ends += [("standby", "backend"), ("standby", "frontend")]
    for left, right in ends:
        cases[f"cut {left} to {right}"] = cut(left, right, "to")
        cases[f"cut {right} to {left}"] = cut(left, right, "from")
        cases[f"cut {left} and {right}"] = cut(left, right, "both")
    for end in ("primary", "backend", "frontend"):
        cases[f"{end} cut off"] = cut_off(end)
    for role in ROLES:
        cases[f"kill -9 each {role}, {KILLS} times"] = kills(role)
    return cases


def run_case(case, cluster, control):
    """A case from when all is well."""
    verdict = Verdict()
    try:
        cluster.wait_until_whole()
        began, epoch, lines = time.monotonic(), cluster.epoch(), cluster.lines()
        control.seen()
        case(cluster, control, verdict)
        lines_max = LINES_PER_S * (time.monotonic() - began) + LINES_MORE
        for name, count in cluster.lines().items():
            grown = count - lines[name]
            verdict.expect(grown <= lines_max, f"{name} logged {grown} lines, expected {lines_max:.0f} at most")
        if takeovers := cluster.epoch() - epoch:
            verdict.figures.append(f"{takeovers} takeovers")
    except Failed as reason:
        verdict.failures.append(str(reason))
        cluster.switch.set({})
    return verdict
