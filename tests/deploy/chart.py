"""The chart rendered, and what must hold of it whatever its values are."""

import base64
import json
import re
import shutil
import subprocess
import sys
import tomllib

import helm_python as helm
import kubernetes_validate
import yaml

from place import CHART, ROOT, RUNTIME

RELEASE, NAMESPACE = "db", "inference"
# The oldest that the chart wants, one between, and the newest that the package knows.
KUBERNETES = ["1.30.0", "1.34.0", "1.37.0"]
ROLES = ["scheduler", "frontend", "backend"]
ROCE_PORT = 4791
DRAIN_TIMEOUT_MS, DRAIN_GRACE_MS = 25000, 5000
CUSTOM = {
    "ScaledObject": {
        "scaleTargetRef",
        "minReplicaCount",
        "maxReplicaCount",
        "pollingInterval",
        "cooldownPeriod",
        "fallback",
        "advanced",
        "triggers",
    },
    "ServiceMonitor": {"selector", "podTargetLabels", "endpoints"},
}
CRDS = ["@kubernetes-models/keda@0.4.2", "@kubernetes-models/prometheus-operator@6.0.0"]
CRD_CHECK = """
import { ScaledObject } from "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject";
import { ServiceMonitor } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";
const kinds = { ScaledObject, ServiceMonitor };
for (const object of JSON.parse(process.argv[2])) new kinds[object.kind](object).validate();
"""


class Wrong(Exception):
    """What does not hold, in one line."""


def must(holds, what):
    if not holds:
        raise Wrong(what)


class Loader(yaml.SafeLoader):
    """As Kubernetes reads it: a key that comes twice is wrong."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        must(not twice, f"line {node.start_mark.line + 1}: {twice} come twice")
        return super().construct_mapping(node, deep)


def merged(values, more):
    both = dict(values)
    for key, value in more.items():
        is_table = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = merged(both[key], value) if is_table else value
    return both


def read_values(*files):
    values = {}
    for file in files:
        values = merged(values, helm.values_from_yaml(file.read_text()))
    return values


def render(values):
    """The text of what is made of these values."""
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        manifests = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    return "\n---\n".join(text for name, text in sorted(manifests.items()) if name.endswith(".yaml"))


class Cluster:
    """What is made of some values: objects by kind and name."""

    def __init__(self, values):
        self.text = render(values)
        self.objects = [found for found in yaml.load_all(self.text, Loader) if found]
        with helm.Chart.load(CHART) as chart:
            self.values = chart.merge_values(values)
        names = [(found["kind"], found["metadata"]["name"]) for found in self.objects]
        must(len(names) == len(set(names)), f"two of one name: {names}")

    def of(self, *kinds):
        return [found for found in self.objects if found["kind"] in kinds]

    def named(self, kind, name):
        found = [one for one in self.of(kind) if one["metadata"]["name"] == name]
        must(found, f"{kind} {name} is not there")
        return found[0]

    def workloads(self):
        return [Workload(found, self) for found in self.of("StatefulSet", "Deployment")]

    def selected(self, labels):
        return [found for found in self.workloads() if labels.items() <= found.labels.items()]


class Workload:
    """Pods of one kind: their container and the configuration that it reads."""

    def __init__(self, found, cluster):
        self.object, self.cluster = found, cluster
        self.name, self.replicas = found["metadata"]["name"], found["spec"].get("replicas")
        template = found["spec"]["template"]
        self.labels, self.annotations = template["metadata"]["labels"], template["metadata"]["annotations"]
        self.pod = template["spec"]
        [self.container] = self.pod["containers"]
        self.role = self.container["name"]
        self.ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        self.volumes = {volume["name"]: volume for volume in self.pod["volumes"]}
        self.mounts = {mount["mountPath"]: self.volumes[mount["name"]] for mount in self.container["volumeMounts"]}
        [self.config_path] = [argument for argument in self.container["args"] if argument.endswith(".toml")]
        folder, file = self.config_path.rsplit("/", 1)
        self.config_text = cluster.named("ConfigMap", self.mounts[folder]["configMap"]["name"])["data"][file]
        self.config = tomllib.loads(self.config_text)

    def pod_names(self):
        """Those of a StatefulSet are known, others are chosen by the cluster."""
        if self.object["kind"] == "StatefulSet":
            return [f"{self.name}-{number}" for number in range(self.replicas)]
        return [f"{self.name}-7c9f-{number}" for number in range(self.replicas or 1)]


def check_schemas(found):
    if found["kind"] not in CUSTOM:
        for version in KUBERNETES:
            try:
                kubernetes_validate.validate(found, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                path = ".".join(map(str, error.path))
                name = found["metadata"]["name"]
                raise Wrong(f"{found['kind']} {name}, {path}, Kubernetes {version}: {error.message}") from None


def check_selectors(cluster):
    """Whoever selects pods finds those of one role or of all; a name that leads elsewhere is there."""
    for workload in cluster.workloads():
        own = workload.object["spec"]["selector"]["matchLabels"]
        must(
            [found.name for found in cluster.selected(own)] == [workload.name], f"{workload.name} selects others' pods"
        )
        if workload.object["kind"] == "StatefulSet":
            cluster.named("Service", workload.object["spec"]["serviceName"])
    for service in cluster.of("Service"):
        pods = cluster.selected(service["spec"]["selector"])
        must(pods, f"Service {service['metadata']['name']} selects no pods")
        for port in service["spec"]["ports"]:
            for pod in pods:
                must(pod.ports.get(port["targetPort"]) == port["port"], f"{pod.name} has no port {port['targetPort']}")
    for budget in cluster.of("PodDisruptionBudget"):
        name = budget["metadata"]["name"]
        found = [pod.name for pod in cluster.selected(budget["spec"]["selector"]["matchLabels"])]
        must(found == [name], f"PodDisruptionBudget {name} is for {found}")
        must(budget["spec"]["maxUnavailable"] != 0, f"PodDisruptionBudget {name} keeps nodes from being drained")
    for scaler in cluster.of("HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        workload = cluster.named(target["kind"], target["name"])
        must("replicas" not in workload["spec"], f"{target['name']} has replicas beside what scales it")
    for monitor in cluster.of("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        [service] = [one for one in cluster.of("Service") if wanted <= one["metadata"]["labels"].items()]
        ports = {port["name"] for port in service["spec"]["ports"]}
        must(
            {end["port"] for end in monitor["spec"]["endpoints"]} <= ports,
            "ServiceMonitor asks for a port that is not there",
        )
        must(
            len(cluster.selected(service["spec"]["selector"])) == len(cluster.workloads()), "not all roles are scraped"
        )


def check_scalers(cluster):
    """What scales backends asks this release's scheduler how many GPUs are needed, and divides by those of a pod."""
    told = (ROOT / "scheduler" / "src" / "status" / "metrics.rs").read_text()
    for scaler in cluster.of("HorizontalPodAutoscaler", "ScaledObject"):
        name = scaler["metadata"]["name"]
        [workload] = [one for one in cluster.workloads() if one.name == scaler["spec"]["scaleTargetRef"]["name"]]
        if workload.role != "backend":
            continue
        if scaler["kind"] == "ScaledObject":
            [trigger] = scaler["spec"]["triggers"]
            query, each = trigger["metadata"]["query"], trigger["metadata"]["threshold"]
            metric, selected = re.search(r"(downbeat_\w+)\{([^}]*)\}", query).groups()
            labels = dict(re.findall(r'(\w+)="([^"]*)"', selected))
            must(trigger["metadata"]["ignoreNullValues"] == "false", f"{name} takes no answer for 0")
        else:
            [external] = [one["external"] for one in scaler["spec"]["metrics"]]
            metric, labels = external["metric"]["name"], external["metric"]["selector"]["matchLabels"]
            each = external["target"]["averageValue"]
        must(f'"{metric}"' in told, f"{name} asks for {metric}, which no scheduler tells")
        must(labels["namespace"] == NAMESPACE, f"{name} asks for what is in {labels}")
        if "models" not in labels:
            cluster.named("Service", labels["service"])
        gpus = workload.config.get("gpus", 1)
        gpus = len(gpus) if isinstance(gpus, list) else gpus
        must(each == str(gpus), f"{name}: {each} GPUs are a pod, expected {gpus}, as its file says")


def check_probes(workload):
    for probe, path in (("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        get = workload.container[probe]["httpGet"]
        must(get["path"] == path, f"{workload.name}: {probe} asks for {get['path']}")
        must(get["port"] in workload.ports, f"{workload.name}: {probe} asks at {get['port']}, which is no port of it")


def check_rights(workload):
    pod, container = workload.pod["securityContext"], workload.container["securityContext"]
    added = container["capabilities"].get("add", [])
    is_root = pod["runAsUser"] == 0
    for holds, what in (
        (pod["runAsNonRoot"] != is_root, "runAsNonRoot and runAsUser disagree"),
        (pod["seccompProfile"] == {"type": "RuntimeDefault"}, "no seccomp profile"),
        (container["readOnlyRootFilesystem"] is True, "its root file system can be written"),
        (container["allowPrivilegeEscalation"] is False, "it may get more privileges"),
        (container["capabilities"]["drop"] == ["ALL"], "it keeps capabilities"),
        (workload.pod["automountServiceAccountToken"] is False, "it has a token of the cluster"),
        (not workload.pod.get("hostNetwork"), "it has the host's network"),
        (added == (["IPC_LOCK"] if is_root else []), f"it runs as {pod['runAsUser']} with {added}"),
    ):
        must(holds, f"{workload.name}: {what}")


def check_end(workload):
    """What a role needs to end is what it is given."""
    drain_ms = workload.config.get("drain_timeout_ms", DRAIN_TIMEOUT_MS)
    sleeps = workload.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    given = workload.pod["terminationGracePeriodSeconds"]
    must(
        given > sleeps + drain_ms / 1000,
        f"{workload.name}: {given} s for a sleep of {sleeps} and a drain of {drain_ms} ms",
    )
    if workload.role == "frontend":
        grace_ms = workload.config.get("drain_grace_ms", DRAIN_GRACE_MS)
        must(grace_ms < drain_ms, f"{workload.name}: the drain's grace is all of it")


def check_network(cluster):
    """`soft` needs nothing of a device; every pod of another arm has one."""
    is_soft = cluster.values["arm"] == "soft"
    found = re.findall(r"IPC_LOCK|infiniband|rdma/\S+", cluster.text)
    must(not (is_soft and found), f"the soft arm asks for {found[:1]}")
    for workload in cluster.workloads():
        must(workload.config["arm"] == cluster.values["arm"], f"{workload.name}: its arm is another one")
        if not is_soft:
            limits, requests = (workload.container["resources"][key] for key in ("limits", "requests"))
            rdma = cluster.values["rdma"]["resource"]
            must(limits.get(rdma) == requests.get(rdma) == 1, f"{workload.name}: it has no {rdma}")


def check_config(cluster):
    """Files say what pods, services and volumes say."""
    [scheduler] = [one for one in cluster.workloads() if one.role == "scheduler"]
    service = cluster.named("Service", scheduler.name)
    must(service["spec"]["publishNotReadyAddresses"] is True, "schedulers are not found before they are ready")
    domain = f"{scheduler.name}.{NAMESPACE}.svc.{cluster.values['clusterDomain']}:{scheduler.ports['members']}"
    listens = [scheduler.config["listen"].replace("${POD_NAME}", name) for name in scheduler.pod_names()]
    must(listens == [f"{name}.{domain}" for name in scheduler.pod_names()], f"schedulers listen at {listens}")
    must({one.role for one in cluster.workloads()} == set(ROLES), "a role is missing")
    for workload in cluster.workloads():
        config, ports = workload.config, workload.ports
        must(config["schedulers"] == listens, f"{workload.name}: its schedulers are {config['schedulers']}")
        must(ports["roce"] == ROCE_PORT, f"{workload.name}: packets come to {ports['roce']}")
        said = {
            "admin": config["admin"]["http"],
            "http": config.get("http"),
            "grpc": config.get("grpc"),
            "link": config.get("link"),
        }
        for port, address in said.items():
            found = address and int(address.rsplit(":", 1)[1])
            must(
                found == ports.get(port),
                f"{workload.name}: it listens at {found}, and its port {port} is {ports.get(port)}",
            )
        for path in re.findall(r'"(/etc/[^"]+)"', workload.config_text):
            must(
                any(path.startswith(f"{mount}/") for mount in workload.mounts), f"{workload.name}: {path} is not there"
            )
        must("/tmp" in workload.mounts, f"{workload.name}: it has no /tmp")


def check_secret(cluster):
    """The chart's own is one that roles take: both keys are there, and equal until somebody changes it."""
    for secret in cluster.of("Secret"):
        first, second = (base64.b64decode(secret["data"][key]) for key in ("first", "second"))
        must(first == second and len(first) == 64, f"the Secret holds {len(first)} and {len(second)} bytes")
    names = {found["metadata"]["name"] for found in cluster.of("Secret")} | {cluster.values["secret"]["existing"]}
    for workload in cluster.workloads():
        found = workload.mounts["/etc/downbeat/secret"]["secret"]["secretName"]
        must(found in names, f"{workload.name}: its secret is in {found}, which nobody makes")


def check_one_role():
    """A role that gets another image leaves the pods of others as they are, and so does a second rendering."""
    before = {one.name: one.pod for one in Cluster({}).workloads()}
    for role in ROLES:
        after = Cluster({role: {"tag": "another"}}).workloads()
        changed = {one.role for one in after if one.pod != before[one.name]}
        must(changed == {role}, f"{role}.tag: found other pods of {changed}, expected those of {role} alone")


def check_custom(clusters, folder):
    """Objects whose schemas Kubernetes does not have, by those that npm has. They let unknown keys pass."""
    found = [one for cluster in clusters for one in cluster.of(*CUSTOM)]
    must({one["kind"] for one in found} == set(CUSTOM), "the files of values do not make all custom kinds")
    for one in found:
        unknown = set(one["spec"]) - CUSTOM[one["kind"]]
        must(not unknown, f"{one['kind']} {one['metadata']['name']}: {unknown} are no keys of it")
        for trigger in one["spec"].get("triggers", []):
            must(trigger["type"] == "prometheus", f"a trigger is {trigger['type']}")
            must(
                set(trigger["metadata"]) == {"serverAddress", "query", "threshold", "ignoreNullValues"},
                f"a trigger has {trigger['metadata']}",
            )
            must(
                all(isinstance(value, str) for value in trigger["metadata"].values()), "a trigger has what is no string"
            )
    folder.mkdir(parents=True, exist_ok=True)
    wanted = "\n".join(CRDS)
    note = folder / "installed"
    if not note.exists() or note.read_text() != wanted:
        npm = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", folder, *CRDS]
        if not shutil.which("npm") or subprocess.run(npm, stdin=subprocess.DEVNULL).returncode:
            print(f"skipped tests/deploy: needs npm's {' '.join(CRDS)}")
            sys.exit(0)
        note.write_text(wanted)
    program = folder / "check.mjs"
    program.write_text(CRD_CHECK)
    done = subprocess.run(["node", program, json.dumps(found)], capture_output=True, text=True)
    must(done.returncode == 0, f"schemas of npm: {done.stderr}")


def check_runtime():
    """KServe's runtime: what it has of a pod is one, and the rest has KServe's names."""
    runtime = yaml.load(RUNTIME.read_text(), Loader)
    spec = runtime["spec"]
    kind = (runtime["apiVersion"], runtime["kind"])
    must(kind == ("serving.kserve.io/v1alpha1", "ClusterServingRuntime"), f"it is a {kind}")
    must(
        set(spec) == {"protocolVersions", "supportedModelFormats", "containers", "volumes"},
        f"its spec has {list(spec)}",
    )
    must(set(spec["protocolVersions"]) == {"v2", "grpc-v2"}, f"it speaks {spec['protocolVersions']}")
    must(all(set(one) == {"name", "version"} for one in spec["supportedModelFormats"]), "a format is none of KServe's")
    must(
        [one["name"] for one in spec["containers"]] == ["kserve-container"], "KServe looks for a container of that name"
    )
    with helm.Chart.load(CHART) as chart:
        wanted = f"downbeat:{chart.metadata['appVersion']}"
    must(spec["containers"][0]["image"] == wanted, f"its image is another one than {wanted}")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "runtime"}}
    check_schemas({**pod, "spec": {key: spec[key] for key in ("containers", "volumes")}})


def check(cluster):
    for found in cluster.objects:
        check_schemas(found)
    check_selectors(cluster)
    check_scalers(cluster)
    check_network(cluster)
    check_config(cluster)
    check_secret(cluster)
    for workload in cluster.workloads():
        check_probes(workload)
        check_rights(workload)
        check_end(workload)


def check_lint():
    report = helm.lint(CHART, strict=True)
    # 1 is a remark.
    wrong = [message for message in report["messages"] if message["severity"] > 1]
    must(not wrong and not report["errors"], f"helm lint: {wrong} {report['errors']}")


def check_version():
    with (ROOT / "Cargo.toml").open("rb") as file:
        wanted = tomllib.load(file)["workspace"]["package"]["version"]
    with helm.Chart.load(CHART) as chart:
        found = chart.metadata["appVersion"]
    must(found == wanted, f"Chart.yaml: appVersion: found {found}, expected {wanted}, as Cargo.toml has it")


def refusal(values):
    """What the chart says of values that are wrong."""
    try:
        render(values)
    except helm.HelmError as error:
        return str(error)
    raise Wrong(f"{values} are taken")


def check_refusals():
    """A wrong key, value or combination is refused, and named."""
    rdma = read_values(CHART / "rdma.yaml")
    for values, *named in (
        ({"replicas": 3}, "replicas"),
        ({"scheduler": {"replcas": 3}}, "scheduler", "replcas"),
        ({"scheduler": {"replicas": 0}}, "scheduler", "replicas"),
        ({"scheduler": {"config": {"suspect": 5}}}, "suspect"),
        ({"frontend": {"config": {"drain_grace": 5}}}, "drain_grace"),
        ({"frontend": {"config": {"drain_timeout_ms": "5"}}}, "drain_timeout_ms"),
        ({"backend": {"config": {"secret": "in a ConfigMap"}}}, "secret"),
        ({"backends": {"main": {"gpu": 1}}}, "main", "gpu"),
        ({"backends": {"Main": {}}}, "Main"),
        ({"backends": {"main": {"config": {"executors": "cuda"}}}}, "executors"),
        ({"bind": "localhost"}, "bind"),
        ({"networkPolicy": {"client": []}}, "networkPolicy", "client"),
        ({"arm": "verbs:auto"}, "rdma.resource"),
        (merged(rdma, {"arm": "soft"}), "rdma.resource"),
        ({"backends": {"a": {"keda": {"enabled": True}}}}, "backends.a.keda.query"),
        ({"backends": {"a": {"autoscaling": {"enabled": True}}}}, "backends.a.autoscaling.labels"),
        ({"backend": {"autoscaling": {"targetCPUUtilizationPercentage": 70}}}, "targetCPUUtilizationPercentage"),
        ({"scheduler": {"config": {"advice": {"window_ms": 5}}}}, "advice", "window_ms"),
        ({"scheduler": {"config": {"advice": {"windows": 5}}}}, "advice", "windows"),
        ({"backend": {"keda": {"enabled": True}, "autoscaling": {"enabled": True}}}, "backends.main.keda.enabled"),
    ):
        said = refusal(values)
        must(all(name in said for name in named), f"{values}: {said!r} does not name {named}")
