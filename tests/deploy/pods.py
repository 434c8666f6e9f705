"""Pods as the kubelet would run them: each in a network namespace, under its user, without capabilities, on a root that
is only read, with its volumes, behind the NetworkPolicies that select it, and probed from the node."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import yaml

from place import ROOT, RUNTIME

sys.path.insert(0, str(ROOT / "tests" / "operate"))
from hosts import Hosts, install, ip, wait_for

from chart import NAMESPACE, Cluster, must

NETWORK = "10.79.0"
NODE = f"{NETWORK}.254"
# Hosts that are no pods of the chart, by the namespace that theirs are in.
STRANGERS = {"client": "default", "monitor": "monitoring"}
MODEL = ROOT / "models" / "digits"
# What a container has of its system, and what else a process needs that is in none.
OF_EVERY_SYSTEM, OF_THIS_SYSTEM = ["/dev", "/proc", "/sys"], ["/usr/bin", "/usr/lib", "/usr/lib64"]
SECRETS = ["the first secret, of thirty bytes", "the next secret, of thirty bytes."]
OBJECTIVE_US = 5_000_000


class Pod:
    def __init__(self, host, name, spec, labels, folder):
        self.host, self.name, self.labels, self.spec = host, name, labels, spec
        [self.container] = spec["containers"]
        self.rights = {**spec.get("securityContext", {}), **self.container["securityContext"]}
        self.root, self.log = folder / name / "root", folder / name / "log"
        self.ports = {port.get("name"): port["containerPort"] for port in self.container["ports"]}
        self.process = None

    def make_root(self, source, volumes, names):
        """`source` is an image's root file system, or a binary, which gets one of this system's folders."""
        self.volumes, self.source = volumes, source
        of_the_system = OF_EVERY_SYSTEM if source.is_dir() else [*OF_EVERY_SYSTEM, *OF_THIS_SYSTEM]
        self.mounts = [f"mount --rbind {path} {self.root}{path}" for path in of_the_system]
        for path in ("etc", *of_the_system, *(mount["mountPath"] for mount in self.container["volumeMounts"])):
            (self.root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        (self.root / "etc/hosts").write_text(names)
        (self.root / "etc/nsswitch.conf").write_text("hosts: files\n")
        if source.is_dir():
            layers = [self.root.with_name(name) for name in ("upper", "work")]
            self.root.rename(layers[0])
            for folder in (layers[1], self.root):
                folder.mkdir()
            options = f"lowerdir={source},upperdir={layers[0]},workdir={layers[1]}"
            self.mounts = [f"mount -t overlay -o {options} overlay {self.root}", *self.mounts]
            return
        for path in ("bin", "lib", "lib64"):
            (self.root / path).symlink_to(f"usr/{path}")
        shutil.copy(source, self.root / "downbeat")
        shutil.copytree(MODEL, self.root / "usr/share/downbeat/models/digits")
        self.mounts = [f"mount --bind {self.root} {self.root}", *self.mounts]

    def script(self, arguments):
        """Mounts what the container has, and becomes its process, or one beside it."""
        lines = [f"hostname {self.name}", "set -e", *self.mounts]
        kinds = {volume["name"]: volume for volume in self.spec["volumes"]}
        for mount in self.container["volumeMounts"]:
            at = f"{self.root}{mount['mountPath']}"
            if "emptyDir" in kinds[mount["name"]]:
                lines.append(f"mount -t tmpfs -o mode=1777 tmpfs {at}")
            else:
                lines.append(f"mount --bind {self.volumes[mount['name']]} {at}")
        if self.rights["readOnlyRootFilesystem"]:
            lines.append(f"mount -o remount,bind,ro {self.root}")
        user = self.rights["runAsUser"]
        variables = {
            "POD_NAME": self.name,
            "PATH": "/usr/sbin:/usr/bin",
            **{one["name"]: one["value"] for one in self.container.get("env", []) if "value" in one},
        }
        words = [
            "env",
            "-i",
            *(f"{key}={value}" for key, value in variables.items()),
            "chroot",
            str(self.root),
            "setpriv",
        ]
        words += [
            f"--reuid={user}",
            f"--regid={user}",
            "--clear-groups",
            "--no-new-privs",
            "--inh-caps=-all",
            "--bounding-set=-all",
        ]
        words += ["/usr/bin/downbeat" if self.source.is_dir() else "/downbeat", *arguments]
        return "\n".join([*lines, "exec " + " ".join(f"'{word}'" for word in words)])

    def command(self, space, arguments):
        return ["ip", "netns", "exec", space, "unshare", "--uts", "sh", "-c", self.script(arguments)]

    def start(self, space):
        log = open(self.log, "ab")
        self.process = subprocess.Popen(self.command(space, self.container["args"]), stdout=log, stderr=log)

    def told(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def check_rights(self):
        """Of its process, as the kernel has them."""
        status = dict(line.split(":", 1) for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines())
        user = str(self.rights["runAsUser"])
        must(set(status["Uid"].split()) == {user}, f"{self.name} runs as {status['Uid']}")
        must(
            int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0,
            f"{self.name} has capabilities {status['CapEff']}",
        )


class Node:
    """A node with pods, and what the cluster's networks let through."""

    def __init__(self, pods, names):
        self.pods = pods
        self.hosts = Hosts("dbk", [*(pod.host for pod in pods), *STRANGERS], {"": NETWORK})
        ip("-n", self.hosts.switch, "address", "add", f"{NODE}/24", "dev", "sw")
        self.addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(self.hosts.names, 1)}
        self.names = "127.0.0.1 localhost\n" + "".join(
            f"{self.addresses[pod.host]} {names(pod)} {pod.name}\n" for pod in pods
        )

    def enforce_all(self, policies):
        for pod in self.pods:
            mine = [
                policy
                for policy in policies
                if policy["spec"]["podSelector"]["matchLabels"].items() <= pod.labels.items()
            ]
            if mine:
                self.enforce(pod, mine)

    def peers(self, selectors):
        """Addresses of those that a policy's `from` or `to` means; everybody if it is not there."""
        if selectors is None:
            return None
        found = []
        for selector in selectors:
            if "podSelector" in selector:
                wanted = selector["podSelector"]["matchLabels"].items()
                found += [self.addresses[pod.host] for pod in self.pods if wanted <= pod.labels.items()]
            else:
                [namespace] = selector["namespaceSelector"]["matchLabels"].values()
                found += [self.addresses[host] for host, its in STRANGERS.items() if its == namespace]
        return found

    def enforce(self, pod, policies):
        rules = ["flush ruleset", "table inet pods {"]
        for chain, hook, way, ends in (("Ingress", "input", "from", "iif"), ("Egress", "output", "to", "oif")):
            rules.append(f"chain {hook} {{ type filter hook {hook} priority 0; policy drop;")
            rules += [f"{ends} lo accept", "ct state established,related accept"]
            # The kubelet's probes pass whatever a policy says.
            rules += [f"ip saddr {NODE} accept"] if hook == "input" else []
            for rule in (rule for policy in policies for rule in policy["spec"][chain.lower()]):
                peers = self.peers(rule.get(way))
                if peers == []:
                    continue
                address = f"ip {'s' if way == 'from' else 'd'}addr {{ {', '.join(peers)} }} " if peers else ""
                for port in rule["ports"]:
                    ports = f"{port['port']}-{port['endPort']}" if "endPort" in port else port["port"]
                    rules.append(f"{address}{port['protocol'].lower()} dport {ports} accept")
            rules.append("}")
        rules.append("}")
        nft = ["ip", "netns", "exec", self.hosts.space(pod.host), "nft", "-f", "-"]
        subprocess.run(nft, input="\n".join(rules), text=True, check=True)

    def start(self, pod):
        pod.start(self.hosts.space(pod.host))

    def run_inside(self, pod, *arguments):
        """What the binary says in a pod, as by `kubectl exec`."""
        command = pod.command(self.hosts.space(pod.host), arguments)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        must(done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}")
        return done.stdout

    def asked(self, host, url, *options):
        """(status, body) of a request from a host, or from the node itself; the status of none is 000."""
        space = self.hosts.switch if host is None else self.hosts.space(host)
        curl = ["ip", "netns", "exec", space, "curl", "-s", "-m", "10", "-w", "\n%{http_code}", url, *options]
        told = subprocess.run(curl, capture_output=True, text=True).stdout
        body, _, status = told.rpartition("\n")
        return status, body

    def url(self, pod, port, path):
        return f"http://{self.addresses[pod.host]}:{port}{path}"

    def is_probed(self, pod, probe):
        get = pod.container[probe]["httpGet"]
        return self.asked(None, self.url(pod, pod.ports.get(get["port"], get["port"]), get["path"]))[0] == "200"

    def are_ready(self):
        for pod in self.pods:
            code = pod.process.poll()
            must(code is None, f"{pod.name} ended with {code}:\n{pod.told()[-1500:]}")
        probes = ("startupProbe", "livenessProbe", "readinessProbe")
        return all(self.is_probed(pod, probe) for pod in self.pods for probe in probes)

    def is_served(self, pod, port):
        body = json.loads((MODEL / "seven.json").read_text())
        body["parameters"] = {"timeout": OBJECTIVE_US}
        status, answer = self.asked("client", self.url(pod, port, "/v2/models/digits/infer"), "-d", json.dumps(body))
        return status == "200" and '"data"' in answer

    def logs(self):
        return "".join(f"{pod.name}:\n{pod.told()[-1500:]}\n" for pod in self.pods)

    def end(self):
        for pod in self.pods:
            if pod.process:
                pod.process.kill()
                pod.process.wait()
        self.hosts.end()


class SecretVolume:
    """A Secret's files as the kubelet has them: links to a folder that is exchanged at once."""

    def __init__(self, folder):
        self.folder, self.number = folder, 0

    def write(self, **files):
        self.number += 1
        data = self.folder / f"..{self.number}"
        data.mkdir(parents=True)
        for name, text in files.items():
            (data / name).write_text(text)
        new = self.folder / "..new"
        new.symlink_to(data.name)
        new.rename(self.folder / "..data")
        for name in files:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")


def run_chart(folder, source, passes):
    # Two ModelThreads, whose ports members have to reach, too; and the shortest window before GPUs are asked for.
    config = {"model_threads": 2, "advice": {"window_ms": 10000}}
    cluster = Cluster({"scheduler": {"config": config}})
    secret, pods = SecretVolume(folder / "secret"), []
    secret.write(first=SECRETS[0], second=SECRETS[0])
    for workload in cluster.workloads():
        for number, name in enumerate(workload.pod_names()):
            pods.append(Pod(f"{workload.role[0]}{number}", name, workload.pod, workload.labels, folder))
            config = folder / name / "config"
            config.mkdir(parents=True)
            (config / Path(workload.config_path).name).write_text(workload.config_text)
    domain = f"{cluster.of('StatefulSet')[0]['spec']['serviceName']}.{NAMESPACE}.svc.{cluster.values['clusterDomain']}"
    node = Node(pods, lambda pod: f"{pod.name}.{domain}")
    role = lambda letter: [pod for pod in pods if pod.host.startswith(letter)]
    schedulers, frontends, backends = role("s"), role("f"), role("b")
    try:
        node.enforce_all(cluster.of("NetworkPolicy"))
        for pod in pods:
            pod.make_root(source, {"config": folder / pod.name / "config", "secret": secret.folder}, node.names)
            node.start(pod)
        wait_for(f"{len(pods)} pods are ready, as their probes have it", node.are_ready, node.logs)
        are_served = lambda: all(node.is_served(pod, pod.ports["http"]) for pod in frontends)
        wait_for("clients are answered by every frontend", are_served, node.logs)
        for pod in pods:
            passes(f"{pod.name} has no rights", pod.check_rights)
        passes("policies keep others out", check_strangers, node, schedulers, pods)
        passes("what KEDA asks for is told", check_query, node, schedulers)
        passes("operators' commands run in a scheduler's pod", check_commands, node, schedulers, backends[0], domain)

        primary = schedulers[0 if is_primary(node, schedulers[0]) else 1]
        primary.process.kill()
        primary.process.wait()
        passes("a primary that dies is taken over from, and clients are answered", must, are_served(), node.logs())
        node.start(primary)
        wait_for("it is ready again, as a standby", node.are_ready, node.logs)

        old, new = SECRETS
        for step, (first, second) in enumerate([(old, new), (new, old), (new, new)], 1):
            before = {pod.name: pod.told().count("it was replaced") for pod in pods}
            secret.write(first=first, second=second)
            is_read = lambda: all(pod.told().count("it was replaced") > before[pod.name] for pod in pods)
            wait_for(f"step {step} of another secret is read", is_read, node.logs)
        for pod in (backends[0], schedulers[0]):
            end(pod)
            node.start(pod)
            wait_for(f"{pod.name}, which knows the new secret only, is ready", node.are_ready, node.logs)
        passes("clients are answered", must, are_served(), node.logs())

        for pod in (*frontends, *backends, *schedulers):
            passes(f"{pod.name} ends within its grace period", end, pod)
    finally:
        node.end()


def check_strangers(node, schedulers, pods):
    for pod in pods:
        must(
            node.asked("monitor", node.url(pod, 8100, "/metrics"))[0] == "200", f"monitoring does not reach {pod.name}"
        )
        must(
            node.asked("client", node.url(pod, 8100, "/metrics"))[0] == "000", f"a client reaches {pod.name}'s metrics"
        )
    for pod in schedulers:
        space = node.hosts.space("client")
        connect = f"exec 3<> /dev/tcp/{node.addresses[pod.host]}/7400"
        done = subprocess.run(
            ["ip", "netns", "exec", space, "timeout", "2", "bash", "-c", connect], capture_output=True
        )
        must(done.returncode != 0, f"a client reaches {pod.name}")


def check_query(node, schedulers):
    [scaler] = Cluster({"backend": {"keda": {"enabled": True}}}).of("ScaledObject")
    [trigger] = scaler["spec"]["triggers"]
    [metric] = re.findall(r"downbeat_\w+", trigger["metadata"]["query"].replace("downbeat-metrics", ""))
    primary = schedulers[0 if is_primary(node, schedulers[0]) else 1]
    told = lambda: node.asked("monitor", node.url(primary, 8100, "/metrics"))[1]
    wait_for(f"{primary.name} tells {metric}", lambda: re.search(rf"(?m)^{metric} \d", told()), node.logs)


def check_commands(node, schedulers, backend, domain):
    """docs/kubernetes.md has them."""
    shown = node.run_inside(schedulers[0], "status", "--scheduler", "127.0.0.1:8100")
    must(all(pod.name in shown for pod in node.pods if pod not in schedulers), f"a member is missing:\n{shown}")
    primary = schedulers[0 if is_primary(node, schedulers[0]) else 1]
    at = ["--scheduler", f"{primary.name}.{domain}:7400", "--config", "/etc/downbeat/config/scheduler.toml"]
    for command, state in (("drain", "drained"), ("resume", "serving")):
        node.run_inside(schedulers[1], command, "backend", backend.name, *at)
        shows = rf"{backend.name} +\d+ +{state}"
        told = lambda: node.run_inside(primary, "status", "--scheduler", "127.0.0.1:8100")
        wait_for(f"{command}: {backend.name} is {state}", lambda: re.search(shows, told()), node.logs)


def is_primary(node, scheduler):
    return json.loads(node.asked("monitor", node.url(scheduler, 8100, "/v2/cluster"))[1])["is_primary"]


def end(pod):
    """As the kubelet does, after what `preStop` sleeps."""
    lives = pod.spec["terminationGracePeriodSeconds"]
    pod.process.send_signal(signal.SIGTERM)
    try:
        code = pod.process.wait(lives)
    except subprocess.TimeoutExpired:
        code = f"nothing within {lives} s"
    must(code == 0, f"SIGTERM to {pod.name}: it ended with {code}\n{pod.told()[-1500:]}")


def run_runtime(folder, source):
    """KServe's runtime, whose `storageUri` is in /mnt/models."""
    runtime = yaml.safe_load(RUNTIME.read_text())
    spec = runtime["spec"]
    # KServe mounts the models.
    spec["volumes"].append({"name": "storage"})
    spec["containers"][0]["volumeMounts"].append({"name": "storage", "mountPath": "/mnt/models"})
    pod = Pod("p", "predictor", spec, {}, folder)
    storage = folder / "storage"
    shutil.copytree(MODEL, storage / "digits")
    node = Node([pod], lambda pod: pod.name)
    try:
        pod.make_root(source, {"storage": storage}, node.names)
        node.start(pod)
        wait_for("KServe's runtime is ready", node.are_ready, node.logs)
        wait_for("KServe's runtime answers", lambda: node.is_served(pod, 8080), node.logs)
        # A message of no bytes; the answer's are `ready: true`.
        message = folder / "message"
        message.write_bytes(bytes(5))
        grpc = ["--http2-prior-knowledge", "-H", "content-type: application/grpc", "--data-binary", f"@{message}"]
        url = node.url(pod, 9000, "/inference.GRPCInferenceService/ServerReady")
        is_grpc = lambda: node.asked("client", url, *grpc) == ("200", "\0\0\0\0\2\x08\1")
        wait_for("KServe's runtime answers gRPC", is_grpc, node.logs)
    finally:
        node.end()


def run(folder, source, passes):
    """Runs a binary, or what is in an image."""
    install(["ip", "nft", "curl", "setpriv"], ["iproute2", "nftables", "curl", "util-linux"])
    shutil.rmtree(folder, ignore_errors=True)
    run_chart(folder / "chart", source, passes)
    run_runtime(folder / "kserve", source)
    shutil.rmtree(folder)
