"""Faults of clusters, and the alerts that they raise. A fault is a context: it is there inside of it."""

import contextlib
import http.server
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests" / "control"), str(ROOT / "tests" / "attacks")]
import fabric  # noqa: E402
import member  # noqa: E402
from roles import ADMIN, CLIENTS, LISTEN, Model, write, write_program, write_torn  # noqa: E402
from stopped import stopped  # noqa: E402

# A few requests of so many bytes are an arena.
PATIENT_BYTES = 1 << 16


class Fault:
    """What is done, and of each alert that it raises a word that this says."""

    def __init__(self, what, inject, fires):
        self.what, self.inject, self.fires = what, contextlib.contextmanager(inject), fires


# Schedulers.


def kill_primary(cluster, _):
    cluster.kill("scheduler-0")
    yield
    cluster.start("scheduler-0")


def split(cluster, watch):
    """A scheduler and a frontend whose lists of schedulers are others' than the cluster's, in the same job."""
    alone = {"schedulers": [cluster.address("scheduler-2", LISTEN)]}
    cluster.layout |= {"scheduler-2": alone, "frontend-2": alone}
    cluster.start("scheduler-2")
    cluster.start("frontend-2")
    watch.retarget()
    yield
    for name in ("scheduler-2", "frontend-2"):
        del cluster.layout[name]
        cluster.kill(name)
    watch.retarget()


def kill_all_schedulers(cluster, _):
    for number in (0, 1):
        cluster.kill(f"scheduler-{number}")
    yield
    for number in (0, 1):
        cluster.start(f"scheduler-{number}")


# Requests.


def overload(cluster, _):
    """A GPU that runs 20 tasks a second is asked for three times as many."""
    stop = cluster.traffic("frontend-0", "slow", clients=12, pause_s=0.01)
    yield
    stop.set()


def ask_for_torn(cluster, _):
    stop = cluster.traffic("frontend-0", "torn")
    yield
    stop.set()


def break_program(cluster, _):
    broken = cluster.repository / "program" / "broken"
    broken.touch()
    stop = cluster.traffic("frontend-0", "program")
    yield
    broken.unlink()
    stop.set()


def fill_slots(cluster, _):
    """Requests without an objective wait for minutes; so many clients, as each may have a share alone."""
    stops = []
    for client in range(40):
        source = f"{cluster.network}.{100 + client}"
        more = {"row_bytes": PATIENT_BYTES, "source": source}
        stops.append(cluster.traffic("frontend-0", "patient", clients=3, pause_s=1, **more))
    yield
    for stop in stops:
        stop.set()
    # What is queued would run for minutes.
    cluster.kill("frontend-0")
    cluster.start("frontend-0")


# Members.


def lose_packets(cluster, _):
    cluster.kill("frontend-0")
    cluster.start("frontend-0", faults={"loss": 0.2})
    yield
    cluster.kill("frontend-0")
    cluster.start("frontend-0")


def refuse_certificate(cluster, _):
    """Clients do not take the frontend's certificate, as if it had expired."""
    stop = threading.Event()
    address = cluster.at("frontend-1", CLIENTS)

    def ask():
        while not stop.wait(0.1):
            with contextlib.suppress(OSError), socket.create_connection(address, 5) as connection:
                ssl.create_default_context().wrap_socket(connection, server_hostname="localhost")

    threading.Thread(target=ask, daemon=True).start()
    yield
    stop.set()


def show_old_certificate(cluster, _):
    """A certificate that ends tomorrow lies where the frontend's own was; then the own one again."""
    make_certificate(cluster, days=1)
    yield
    make_certificate(cluster, days=90)


def make_certificate(cluster, days):
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", str(days), "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", cluster.folder / "key.pem", "-out", cluster.folder / "certificate.pem"]
    subprocess.run(command, check=True, capture_output=True)


def forget_drain(cluster, _):
    primary = cluster.address("scheduler-0", LISTEN)
    cluster.command("drain", "frontend", "frontend-1", "--scheduler", primary)
    yield
    cluster.command("resume", "frontend", "frontend-1", "--scheduler", primary)


class Undecided(member.Frontend):
    """One that joins and says nothing more, so it obeys nobody."""

    def send(self, pair, frame):
        pass


class Door:
    """What such a member has to know of a cluster."""

    def __init__(self, cluster):
        self.secret, self.scheduler = cluster.secret, cluster.at("scheduler-0", LISTEN)


def disobey(cluster, _):
    undecided = Undecided(Door(cluster), f"{cluster.network}.200")
    yield
    for connection in undecided.connections:
        connection.shutdown(socket.SHUT_RDWR)


def freeze(cluster, _):
    """A frontend that the host gives no processor, again and again."""
    stop = threading.Event()

    def blink():
        while not stop.wait(0.1):
            cluster.signal("frontend-0", signal.SIGSTOP)
            stop.wait(0.2)
            cluster.signal("frontend-0", signal.SIGCONT)

    thread = threading.Thread(target=blink, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()


def stall(cluster, _):
    with stopped(cluster.members["backend-0"].pid):
        yield


# GPUs. There are none here, so a page says what backends say of theirs (backend/src/health.rs).

PAGE = """downbeat_gpu_temperature_celsius{{gpu_uuid="GPU-5a"}} 61
downbeat_gpu_readings_age_seconds{{gpu_uuid="GPU-5a"}} {age}
downbeat_gpu_clocks_held_back{{gpu_uuid="GPU-5a",by="power_limit"}} 1
downbeat_gpu_clocks_held_back{{gpu_uuid="GPU-5a",by="heat"}} {held_back}
downbeat_gpu_memory_errors_total{{gpu_uuid="GPU-5a",kind="corrected"}} 3
downbeat_gpu_memory_errors_total{{gpu_uuid="GPU-5a",kind="uncorrected"}} {errors}
"""
WELL = {"age": 0.5, "held_back": 0, "errors": 0}


class Gpus:
    """In the place of a cluster."""

    name = "downbeat-gpus"

    def __init__(self):
        self.values = WELL
        page = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(PAGE.format(**page.values).encode())

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def targets(self):
        return ["{}:{}".format(*self.server.server_address)]

    def start_all(self):
        pass

    def logs(self):
        return ""

    def end(self):
        self.server.shutdown()


def changed(**values):
    def change(gpus, _):
        gpus.values = WELL | values
        yield
        gpus.values = WELL

    return change


# What runs where. Faults of one step are there at once; steps follow one another.


def of_schedulers(cluster):
    write(cluster.repository, [Model("quick")])


def of_requests(cluster):
    slow, patient = Model("slow", beta_ms=50, slo_ms=200, batch=1), Model("patient", 2000, None, 1, PATIENT_BYTES)
    write(cluster.repository, [Model("quick"), slow, patient])
    write_torn(cluster.repository)
    write_program(cluster.repository)


def of_members(cluster):
    write(cluster.repository, [Model("quick")])
    make_certificate(cluster, days=90)
    files = {"certificate": str(cluster.folder / "certificate.pem"), "key": str(cluster.folder / "key.pem")}
    cluster.layout["frontend-1"] = {"clients.tls": files}


# By the name of its cluster: its members, what is done before they start, who is asked for `quick`, and the steps.
CLUSTERS = {
    "schedulers": (
        ["scheduler-0", "scheduler-1", "frontend-0", "frontend-1", "backend-0"],
        of_schedulers,
        ["frontend-0", "frontend-1"],
        [
            [
                Fault(
                    "the primary is killed",
                    kill_primary,
                    {
                        "DownbeatTakeover": "primary",
                        "DownbeatMembersDown": ".10:28100 did not answer",
                        "DownbeatStandbyMissing": ".20:28100",
                    },
                )
            ],
            [Fault("a frontend with a scheduler of its own", split, {"DownbeatTwoPrimaries": "obey 2 primaries"})],
            [
                Fault(
                    "all schedulers are killed",
                    kill_all_schedulers,
                    {"DownbeatNoScheduler": "2 frontends", "DownbeatRequestsLost": ".20:28100"},
                )
            ],
        ],
    ),
    "requests": (
        ["scheduler-0", "frontend-0", "backend-0"],
        of_requests,
        ["frontend-0"],
        [
            [
                Fault(
                    "a model is asked for more than its GPU can run",
                    overload,
                    {
                        "DownbeatDeadlinesMissed": "Dropped: deadline ",
                        "DownbeatRequestsDropped": "requests: deadline",
                        "DownbeatModelsMissDeadlines": "slow (",
                    },
                ),
                Fault("a model is refused by backends", ask_for_torn, {"DownbeatModelsNotServed": "for: torn."}),
                Fault("a model's program fails", break_program, {"DownbeatModelsFail": "second: program ("}),
            ],
            [Fault("requests hold all slots", fill_slots, {"DownbeatSlotsNearlyFull": ".20:28100"})],
        ],
    ),
    "members": (
        ["scheduler-0", "frontend-0", "frontend-1", "backend-0", "backend-1"],
        of_members,
        ["frontend-0"],
        [
            [
                Fault("a frontend loses packets", lose_packets, {"DownbeatPacketsLost": ".20:28100"}),
                Fault("clients refuse a certificate", refuse_certificate, {"DownbeatClientsRefused": "handshake"}),
                Fault("a certificate is not renewed", show_old_certificate, {"DownbeatCertificatesEnd": ".21:28100"}),
                Fault("nobody ends a drain", forget_drain, {"DownbeatMembersNotReady": ".21:28100"}),
                Fault("a member joins and obeys nobody", disobey, {"DownbeatMembersDisobey": "1 members"}),
            ],
            [Fault("a frontend gets no processor", freeze, {"DownbeatThreadsWait": ".20:28100"})],
            [
                Fault(
                    "a backend's thread stands still",
                    stall,
                    {"DownbeatMembersStalled": ".30:28100", "DownbeatPeersHang": "heartbeat"},
                )
            ],
        ],
    ),
}
OF_GPUS = [
    [
        Fault("errors of a GPU's memory", changed(errors=2), {"DownbeatGpuMemoryErrors": "GPU-5a"}),
    ],
    [Fault("a GPU that is too hot", changed(held_back=1), {"DownbeatGpusUnwell": "GPU-5a by heat"})],
    [Fault("a driver that hangs", changed(age=60), {"DownbeatGpusUnwell": "ten seconds: GPU-5a"})],
]
# Keys of members, by cluster.
PLACEMENT = {"quick": [0], "torn": [0], "slow": [1], "patient": [2], "program": [3]}
KEYS = {
    ("requests", "frontend-0"): {"arena_bytes": 64 * PATIENT_BYTES},
    ("requests", "backend-0"): {"gpus": 4, "placement": PLACEMENT},
}
