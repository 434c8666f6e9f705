"""inside.py OLD NEW: what becomes of the packages in these two folders on a host that systemd runs. Python 3.9 and
Debian's numpy; root, and no network but loopback."""

import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ROLES = ["scheduler", "frontend", "backend"]
UNITS = [f"downbeat-{role}.service" for role in ROLES]
URL = "http://127.0.0.1:8000/v2"
SHIPPED = Path("/usr/share/downbeat/models")
EXAMPLES = Path("/usr/share/doc/downbeat/examples/downbeat-backend.service.d")
CONFIG = Path("/etc/downbeat")
# `systemd-analyze security` counts up to 10.0; its threshold is ten times that.
EXPOSURE_MAX = 20
PATIENCE_S = 60
# Far more than a busy machine takes.
OBJECTIVE_US = 20_000_000
# What every system changes by itself while it runs, and what is no file of its own.
NOT_COMPARED = ("/proc", "/sys", "/dev", "/run", "/tmp", "/test", "/var/log", "/var/tmp", "/var/lib/dpkg", "/var/cache/ldconfig")
NOT_COMPARED_NAMES = re.compile(r"/etc/(passwd|group|shadow|gshadow|subuid|subgid)-?$|/etc/\.pwd\.lock$|/__pycache__")
MODEL = """
import downbeat


class Sum(downbeat.Model):
    def predict(self, batch):
        return {"sum": batch["values"].sum(axis=1, keepdims=True)}
"""
MODEL_CONFIG = """
backend: "python"
max_batch_size: 64
input { name: "values" data_type: TYPE_FP32 dims: 16 }
output { name: "sum" data_type: TYPE_FP32 dims: 1 }
"""
SUM = {"inputs": [{"name": "values", "datatype": "FP32", "shape": [1, 16], "data": list(range(16))}]}


def must(is_so, text):
    if not is_so:
        raise AssertionError(text)


def run(*words):
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    must(done.returncode == 0, f"`{' '.join(words)}` ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def wait_for(what, is_so):
    since = time.monotonic()
    while not is_so():
        if time.monotonic() - since > PATIENCE_S:
            raise AssertionError(f"never seen: {what}")
        time.sleep(0.05)


def shown(unit, key):
    return run("systemctl", "show", "--property", key, "--value", unit).strip()


def pid(unit):
    return int(shown(unit, "MainPID"))


def processes():
    """Those of the roles' user, by what they are called."""
    user, found = pwd.getpwnam("downbeat").pw_uid, []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if folder.stat().st_uid == user:
                found.append((int(folder.name), (folder / "comm").read_text().strip()))
    return found


def are_ready():
    return all(shown(unit, "StatusText") == "ready" for unit in UNITS)


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{URL}/{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.loads(reply.read() or b"null")
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{path}: {error.code}, {error.read().decode()}") from None


def seven():
    body = json.loads((SHIPPED / "digits/seven.json").read_text())
    scores = ask("models/digits/infer", {**body, "parameters": {"timeout": OBJECTIVE_US}})["outputs"][0]["data"]
    return scores.index(max(scores)) == 7


def files():
    """All files of the system, which a package may leave behind."""
    found = set()
    for folder, names, others in os.walk("/"):
        names[:] = [name for name in names if not os.path.join(folder, name).startswith(NOT_COMPARED)]
        found.update(os.path.join(folder, name) for name in [*names, *others])
    return {path for path in found if not path.startswith(NOT_COMPARED) and not NOT_COMPARED_NAMES.search(path)}


def users():
    return {user.pw_name for user in pwd.getpwall()}


def installed(folder):
    [package] = Path(folder).glob("*.deb")
    return run("dpkg", "--install", str(package))


def check_files():
    must(run("dpkg", "--verify", "downbeat") == "", "files differ from the package's")
    for path in map(Path, run("dpkg", "--listfiles", "downbeat").split()):
        found = path.lstat()
        expected = ("root", "downbeat") if path == CONFIG else ("root", "root")
        must((path.owner(), path.group()) == expected, f"{path} is {path.owner()}:{path.group()}'s")
        must(stat.S_ISLNK(found.st_mode) or not found.st_mode & 0o022, f"{path} can be written by others")
    must(CONFIG.stat().st_mode & 0o777 == 0o750, f"{CONFIG} has mode {CONFIG.stat().st_mode:o}")
    secret = CONFIG / "secret"
    must(secret.stat().st_mode & 0o777 == 0o640, f"the secret has mode {secret.stat().st_mode:o}")
    must((secret.owner(), secret.group()) == ("root", "downbeat"), "the secret is somebody else's")
    must(re.fullmatch("[0-9a-f]{64}", secret.read_text()), "the secret is none")
    user = pwd.getpwnam("downbeat")
    must(user.pw_shell == "/usr/sbin/nologin" and not Path(user.pw_dir).exists(), f"{user}")


def check_commands():
    must(re.match(r"downbeat \d+\.\d+\.\d+ \(wire ", run("downbeat", "--version")), "another version")
    for role in ROLES:
        told = run("runuser", "-u", "downbeat", "--", "downbeat", role, "--check", "--config", f"{CONFIG}/{role}.toml")
        must("checked, and nothing opened" in told, told)
    script = (
        ". /usr/share/bash-completion/bash_completion; _completion_loader downbeat; COMP_WORDS=(downbeat scheduler --che);"
        ' COMP_CWORD=2; _downbeat downbeat --che scheduler; echo "${COMPREPLY[@]}"'
    )
    must(run("bash", "-c", script).strip() == "--check", run("bash", "-c", script))
    for script in ("zsh/vendor-completions/_downbeat", "fish/vendor_completions.d/downbeat.fish"):
        must("log-format" in Path("/usr/share", script).read_text(), script)


def check_units():
    run("systemd-analyze", "verify", *UNITS)
    for unit in UNITS:
        must(shown(unit, "UnitFileState") == "disabled" and shown(unit, "ActiveState") == "inactive", f"{unit} is on")
        table = run("systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", "--no-pager", unit)
        print("   ", re.sub(r"\W*(Overall exposure.*?)\W*$", r"\1", table.strip().splitlines()[-1]), flush=True)
    for example in EXAMPLES.iterdir():
        with drop_in("downbeat-backend.service", example.read_text()):
            told = run("systemd-analyze", "verify", "downbeat-backend.service")
            must("ignoring" not in told.lower(), told)


@contextlib.contextmanager
def drop_in(unit, text):
    """As `systemctl edit --runtime` makes one."""
    file = Path(f"/run/systemd/system/{unit}.d/test.conf")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    run("systemctl", "daemon-reload")
    try:
        yield
    finally:
        shutil.rmtree(file.parent)
        run("systemctl", "daemon-reload")


def check_start():
    """In the wrong order: who waits for the scheduler has started all the same."""
    run("systemctl", "enable", *UNITS)
    for role in ("frontend", "backend"):
        run("systemctl", "start", "--no-block", f"downbeat-{role}")
    wait_for("a frontend that waits", lambda: "it has no scheduler" in shown("downbeat-frontend", "StatusText"))
    must(shown("downbeat-frontend", "ActiveState") == "activating", "it has started at once")
    wait_for("a start without a scheduler", lambda: shown("downbeat-frontend", "ActiveState") == "active")
    wait_for("a backend's", lambda: shown("downbeat-backend", "ActiveState") == "active")
    run("systemctl", "start", "downbeat-scheduler")
    must(shown("downbeat-scheduler", "StatusText") == "ready", "a start ends once the role serves")
    wait_for("all are ready", are_ready)
    must(seven(), "it is no seven")


def check_rights():
    user = str(pwd.getpwnam("downbeat").pw_uid)
    for unit in UNITS:
        status = Path(f"/proc/{pid(unit)}/status").read_text()
        has = dict(re.findall(r"(?m)^(\w+):\s+(.*)$", status))
        must(set(has["Uid"].split()) == {user}, f"{unit} runs as {has['Uid']}")
        must(int(has["CapBnd"], 16) == int(has["CapEff"], 16) == 0, f"{unit} has capabilities {has['CapBnd']}")
        must((has["NoNewPrivs"], has["Seccomp"]) == ("1", "2"), f"{unit} may call everything")


def check_own_models():
    """A repository of the operator's, with a model in Python: what its programs and clients need, units allow."""
    models = Path("/srv/models")
    shutil.copytree(SHIPPED, models)
    (models / "sum/1").mkdir(parents=True)
    (models / "sum/config.pbtxt").write_text(MODEL_CONFIG)
    (models / "sum/1/model.py").write_text(MODEL)
    for role in ("frontend", "backend"):
        file = CONFIG / f"{role}.toml"
        file.write_text(re.sub('(?m)^repository = "[^"]*"', f'repository = "{models}"', file.read_text()))
        run("systemctl", "restart", f"downbeat-{role}")
    wait_for("all are ready", are_ready)
    must(ask("models/sum/infer", SUM)["outputs"][0]["data"] == [120], "a model in Python")
    log = run("journalctl", "--unit", "downbeat-backend", "--output", "cat")
    must("the kernel gives the program no namespaces" not in log, log)
    must(any(Path("/var/cache/downbeat/downbeat").rglob("*")), "what was measured is not remembered")
    with open("/dev/shm/of-a-client", "wb") as file:
        file.write(bytes(256))
        os.fchmod(file.fileno(), 0o666)
    region = {"key": "/of-a-client", "offset": 0, "byte_size": 256}
    ask("systemsharedmemory/region/of-a-client/register", region)
    ask("systemsharedmemory/region/of-a-client/unregister", {})
    os.remove("/dev/shm/of-a-client")
    run("systemctl", "reload", "downbeat-frontend")
    told = lambda: run("journalctl", "--unit", "downbeat-frontend", "--output", "cat")
    wait_for("a reload", lambda: "have been read anew" in told())


def check_watchdog():
    """One that stands still is ended and started again; the others, which live, are not."""
    unit = "downbeat-frontend.service"
    with drop_in(unit, "[Service]\nWatchdogSec=2\nTimeoutAbortSec=1\nRestartSec=0\n"):
        run("systemctl", "restart", unit)
        before = pid(unit)
        # Three times as long as the watchdog waits.
        time.sleep(6)
        must(pid(unit) == before, "a frontend that lives was ended")
        os.kill(before, signal.SIGSTOP)
        wait_for("another process", lambda: pid(unit) not in (0, before))
        wait_for("all are ready", are_ready)
        must(shown(unit, "NRestarts") == "1" and seven(), "it was not started again")
        log = run("journalctl", "--unit", unit, "--output", "cat")
        must("Watchdog timeout" in log, log)
    run("systemctl", "restart", unit)
    wait_for("all are ready", are_ready)


class Load:
    """A client that asks twenty times a second, and never twice for the same."""

    def __init__(self):
        self.answered, self.lost, self.ends = 0, [], threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while not self.ends.wait(0.05):
            try:
                must(seven(), "it is no seven")
                self.answered += 1
            except Exception as error:
                self.lost.append(error)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ends.set()
        self.thread.join()


def check_upgrade(folder):
    before, secret = [pid(unit) for unit in UNITS], (CONFIG / "secret").read_text()
    with Load() as load:
        wait_for("a client is answered", lambda: load.answered > 5)
        told = installed(folder)
        must(all(f"{unit} goes on as it was" in told for unit in UNITS), told)
        seen = load.answered
        wait_for("it is answered after the upgrade", lambda: load.answered > seen + 20)
        must([pid(unit) for unit in UNITS] == before, "an upgrade has ended a role")
        # Programs of models start by the binary that runs, whose file has gone.
        [program] = [number for number, name in processes() if name.startswith("python")]
        os.kill(program, signal.SIGKILL)
        is_served = lambda: ask("models/sum/infer", SUM)["outputs"][0]["data"] == [120]
        wait_for("the program of a model is started again", lambda: holds(is_served))
    must(not load.lost, f"{len(load.lost)} requests were lost: {load.lost[:3]}")
    must("/srv/models" in (CONFIG / "backend.toml").read_text(), "the operator's changes are gone")
    must((CONFIG / "secret").read_text() == secret, "there is another secret")
    must(all(shown(unit, "UnitFileState") == "enabled" for unit in UNITS), "a unit is not enabled any more")
    for unit in UNITS:
        run("systemctl", "restart", unit)
        link = os.readlink(f"/proc/{pid(unit)}/exe")
        must(link == "/usr/bin/downbeat", f"{unit} runs {link}")
    wait_for("all are ready", are_ready)
    must(seven(), "it is no seven")
    return f"{load.answered} requests, none lost"


def holds(check):
    """Whether something holds that is refused as long as it does not."""
    try:
        return check()
    except (OSError, AssertionError):
        return False


def check_remove():
    run("dpkg", "--remove", "downbeat")
    must(not processes(), f"processes are left: {processes()}")
    log = run("journalctl", "--output", "cat", *(word for unit in UNITS for word in ("--unit", unit)))
    must(log.count("Deactivated successfully") >= len(UNITS), log)
    must("drained: every request has been answered" in log, log)
    must("it ended with signal 15" not in log, "a program was ended under its backend")
    must((CONFIG / "backend.toml").exists() and (CONFIG / "secret").exists(), "a removal takes no configuration")
    must(not Path("/usr/bin/downbeat").exists(), "the binary is there")


def check_purge(files_before, users_before):
    run("dpkg", "--purge", "downbeat")
    shutil.rmtree("/srv/models")
    left = sorted(files() - files_before)
    must(not left, f"left behind: {left}")
    must(users() == users_before, f"left behind: {users() - users_before}")


def main(old, new):
    files_before, users_before = files(), users()

    def passes(what, check, *arguments):
        since = time.monotonic()
        more = check(*arguments)
        print(f"passed {what}{f': {more}' if more else ''} ({time.monotonic() - since:.1f} s)", flush=True)

    # What an installation says is for people.
    passes("install", lambda: must("error" not in installed(old), "an error"))
    passes("files, owners, the user and the secret", check_files)
    passes("commands, --check of every file, completions", check_commands)
    passes(f"units verify, and are exposed by {EXPOSURE_MAX / 10} at most", check_units)
    passes("roles start in any order, and serve", check_start)
    passes("processes have no rights", check_rights)
    passes("models of one's own, programs, shared memory, reload", check_own_models)
    passes("the watchdog", check_watchdog)
    passes("upgrade under load", check_upgrade, new)
    passes("remove", check_remove)
    passes("purge leaves nothing", check_purge, files_before, users_before)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (AssertionError, subprocess.TimeoutExpired) as error:
        print(f"FAILED {error}")
        for unit in UNITS:
            print(subprocess.run(["journalctl", "-n", "15", "-o", "cat", "-u", unit], capture_output=True, text=True).stdout)
        sys.exit(1)
