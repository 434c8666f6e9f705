"""The chart's configuration files, as the binary reads them."""

import os
import re
import subprocess
import time

from chart import ROLES, must
from place import ROOT

PATIENCE_S = 60
# Keys that the chart writes itself, or that mean nothing in pods.
OWNED = {
    "scheduler",
    "schedulers",
    "listen",
    "secret",
    "secret_file",
    "repository",
    "arm",
    "shared_address",
    "admin",
    "tls",
    "http",
    "grpc",
    "link",
    "name",
    "load_files",
    "load_files_bytes_max",
}
# A role that has read its file, and all that it names, looks for the scheduler, whose name does not resolve here.
IS_READ = "trying again each second"


def check_keys(binary, schema, folder):
    """The schema knows the keys that the binary knows."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "unknown.toml"
    file.write_text("unknown = 1\n")
    for role in ROLES:
        done = subprocess.run([binary, role, "--config", file], capture_output=True, text=True)
        must("unknown field `unknown`" in done.stderr, f"{role}: {done.stderr}")
        known = set(re.findall(r"`([a-z_]+)`", done.stderr.split("expected one of", 1)[1]))
        found = set(schema["definitions"][role]["properties"]["config"]["properties"])
        must(
            found == known - OWNED,
            f"values.schema.json, {role}.config: the binary has {known - OWNED - found}, and not {found - known}",
        )


class Place:
    """The folders that pods have, with certificates and secrets to read."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("secret/first", "secret/second", "tokens/camera"):
            path = folder / "etc/downbeat" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("a secret of more than sixteen bytes\n")
        for name in ("tls", "clients"):
            path = folder / "etc/downbeat" / name
            path.mkdir(exist_ok=True)
            subject = ["-subj", "/CN=downbeat", "-addext", "subjectAltName=DNS:downbeat"]
            curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
            files = ["-keyout", path / "tls.key", "-out", path / "tls.crt"]
            subprocess.run(
                ["openssl", "req", "-x509", "-nodes", "-days", "1", *curve, *subject, *files],
                check=True,
                capture_output=True,
            )
            (path / "ca.crt").write_bytes((path / "tls.crt").read_bytes())

    def moved(self, text):
        """A file with this place's folders and addresses in the place of a pod's, and CPUs in that of GPUs."""
        text = text.replace('"/etc/downbeat/', f'"{self.folder}/etc/downbeat/')
        text = re.sub(r'(?m)^(repository = )".*"$', rf'\1"{ROOT / "models"}"', text)
        text = re.sub(r'"(0\.0\.0\.0|\[::\]):\d+"', '"127.0.0.1:0"', text)
        return text.replace('executor = "cuda"', 'executor = "auto"')

    def start(self, binary, number, workload, text):
        file = self.folder / f"{number}.toml"
        file.write_text(self.moved(text))
        log = file.with_suffix(".log")
        environment = {**os.environ, "POD_NAME": workload.pod_names()[0], "XDG_CACHE_HOME": str(self.folder / "cache")}
        command = [binary, workload.role, "--config", file]
        with log.open("wb") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, env=environment), log


def is_read(process, log):
    """Whether a role takes its file; what it said."""
    until = time.monotonic() + PATIENCE_S
    while True:
        ended = process.poll() is not None
        said = log.read_text(errors="replace")
        if ended or IS_READ in said or time.monotonic() > until:
            return not ended and IS_READ in said, said


def check_read(binary, cluster, folder):
    """Every role reads the file that the chart writes, and one with another wrong key is refused by that."""
    place = Place(folder)
    for workload in cluster.workloads():
        for number, text in enumerate((workload.config_text, f"drain_timeout = 5\n{workload.config_text}")):
            process, log = place.start(binary, f"{workload.name}-{number}", workload, text)
            try:
                taken, said = is_read(process, log)
            finally:
                process.kill()
                process.wait()
            if number == 0:
                must(taken, f"{workload.name}: the binary does not take its file: {said[-1000:]}")
            else:
                must(not taken and "drain_timeout" in said, f"{workload.name}: a wrong key is taken: {said[-1000:]}")
