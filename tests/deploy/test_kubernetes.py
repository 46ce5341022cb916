"""The chart and the manifests: rendered by Helm itself, valid by Kubernetes' own schemas, closed, and as they are read.

What no test here has is a cluster of Kubernetes: nothing was applied, scheduled or pulled.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from raftkv.cli.server_options import read_options
from tests import installed
from tests.foreign.environments import interpreter

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/raftkv"
PLAIN = ROOT / "deploy/kubernetes/raftkv.yaml"
VERSIONS = ["1.27", "1.37"]
"""The oldest that the chart takes, and the newest whose schemas are there."""
ALL = [
    *("serviceMonitor.enabled=true", "serviceMonitor.labels.release=p", "prometheusRule.enabled=true"),
    "networkPolicy.clients[0].podSelector.matchLabels.a=b",
    "networkPolicy.metrics[0].namespaceSelector.matchLabels.a=b",
    *("imagePullSecrets[0].name=pull", "priorityClassName=high", "nodeSelector.disk=fast", "tolerations[0].key=db"),
    *("podAnnotations.a=b", "podLabels.team=x", "persistence.storageClass=fast"),
]
PLAINEST = ["tls.enabled=false", "podDisruptionBudget=false", "networkPolicy.enabled=false", "spread.node=false"]
CHOICES = {"default": [], "all": ALL, "plainest": PLAINEST, "grown": ["replicas=5", "bootstrap=false"]}

pytestmark = pytest.mark.long


def program(name: str) -> str:
    return str(interpreter("kubernetes").parent / name)


def run(*words: str, status: int = 0) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr * bool(status)


def template(*values: str, release: str = "raftkv", status: int = 0, flags: tuple[str, ...] = ()) -> str:
    words = [word for value in values for word in ("--set", value)]
    return run(program("helm"), "template", release, str(CHART), "--namespace=default", *flags, *words, status=status)


def objects(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = [each for each in yaml.safe_load_all(text) if each]
    named = {(each["kind"], each["metadata"]["name"]): each for each in found}
    assert len(named) == len(found)
    return named


def pods(text: str) -> Iterator[dict[str, Any]]:
    for (kind, _), each in objects(text).items():
        if kind in ("StatefulSet", "Pod"):
            yield each["spec"]["template"]["spec"] if kind == "StatefulSet" else each["spec"]


@pytest.mark.parametrize("choice", CHOICES)
def test_rendered_chart_is_valid_and_closed(choice: str, tmp_path: Path) -> None:
    text = template(*CHOICES[choice])
    own = [each for each in objects(text).values() if not each["apiVersion"].startswith("monitoring.coreos.com/")]
    path = tmp_path / "rendered.yaml"
    path.write_text(yaml.safe_dump_all(own))
    for version in VERSIONS:
        run(program("kubernetes-validate"), "--strict", "-k", version, str(path))
    # The profile "restricted" of Kubernetes' Pod Security Standards, and more.
    for pod in pods(text):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_the_chart_is_clean() -> None:
    assert "0 chart(s) failed" in run(program("helm"), "lint", "--strict", str(CHART))


def test_the_plain_manifests_are_the_chart_s(rewrite: bool) -> None:
    text = re.sub(r"^# Source: raftkv/", "# Of the chart: ", template(flags=("--skip-tests",)), flags=re.MULTILINE)
    head = "# Written by `pytest --rewrite tests/deploy/test_kubernetes.py` from the chart beside it; change that.\n"
    if rewrite:
        PLAIN.write_text(head + text)
    assert PLAIN.read_text() == head + text
    kustomized = run(program("kubectl"), "kustomize", str(PLAIN.parent))
    assert objects(kustomized).keys() == objects(text).keys()


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("replicas=2", "replicas (2) must not be below founders (3) while bootstrap is true"),
        ("replicas=many", "got string, want integer"),
        ("persistence.size=large", "persistence/size"),
        ("tls.enable=true", "additional properties 'enable' not allowed"),
        ("settings.Bad_Name=x", "invalid propertyName"),
    ],
)
def test_values_that_cannot_be_are_refused(value: str, error: str) -> None:
    assert error in template(value, status=1)


def environment(text: str, ordinal: int) -> dict[str, str]:
    """What the kubelet gives to the container of a pod."""
    found = objects(text)
    (name,) = [name for kind, name in found if kind == "StatefulSet"]
    (container,) = found["StatefulSet", name]["spec"]["template"]["spec"]["containers"]
    variables: dict[str, str] = dict(found["ConfigMap", name]["data"])
    for one in container["env"]:
        value = one.get("value", f"{name}-{ordinal}")
        variables[one["name"]] = re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], value)
    return variables


def command(text: str, ordinal: int, tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """The words and the environment with which the container's shell starts raftkv."""
    (stateful,) = [each for (kind, _), each in objects(text).items() if kind == "StatefulSet"]
    program = tmp_path / "raftkv"
    program.write_text('#!/bin/sh\necho "$@"\nenv\n')
    program.chmod(0o755)
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    variables = {**environment(text, ordinal), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(container["command"], env=variables, capture_output=True, text=True, check=True)
    words, *lines = done.stdout.splitlines()
    return words.split(), dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.mark.parametrize("release", ["raftkv", "my"])
@pytest.mark.parametrize("tls", ["true", "false"])
def test_founders_take_their_settings(release: str, tls: str, tmp_path: Path) -> None:
    text = template(f"tls.enabled={tls}", "settings.quota-backend-bytes=1000000", release=release)
    words, variables = command(text, 1, tmp_path)
    options = read_options(words, variables)
    name = "raftkv-1" if release == "raftkv" else "my-raftkv-1"
    assert options.warnings == []
    assert options.config.name == name
    assert options.config.initial_advertise_peer_urls == (
        f"http{'s' * (tls == 'true')}://{name}.{name.removesuffix('-1')}-peers.default.svc:2380",
    )
    assert f"{name}={options.config.initial_advertise_peer_urls[0]}" in options.config.initial_cluster.split(",")
    assert options.config.quota_bytes == 1_000_000
    assert options.config.auto_compaction_retention_s == 72 * 3600
    mounts = {mount["mountPath"] for pod in pods(text) for mount in pod["containers"][0].get("volumeMounts", ())}
    files = [value for key, value in variables.items() if key.endswith(("_FILE", "RAFTKV_CERT", "RAFTKV_KEY"))]
    assert {str(Path(file).parent) for file in files} <= mounts
    assert str(options.config.data_dir).startswith("/var/lib/raftkv/")


@pytest.mark.parametrize(("values", "ordinal", "joins"), [
    (("replicas=5",), 2, False), (("replicas=5",), 3, True), (("replicas=12", "founders=9"), 10, True),
    (("bootstrap=false",), 0, True), (("bootstrap=false", "replicas=2"), 1, True),
])  # fmt: skip
def test_the_first_pods_found_and_later_ones_join(values, ordinal, joins, tmp_path):
    words, variables = command(template(*values), ordinal, tmp_path)
    assert words == (["join", "https://raftkv.default.svc:2379"] if joins else [])
    assert ("ETCD_INITIAL_CLUSTER" in variables) != joins


def test_probes_and_services_name_ports_that_there_are() -> None:
    found = objects(template(*ALL))
    (container,) = found["StatefulSet", "raftkv"]["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"client": 2379, "peer": 2380, "metrics": 2381}
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert [(probe["path"], probe["port"]) for probe in probes] == [
        ("/livez", "metrics"),
        ("/livez", "metrics"),
        ("/readyz", "metrics"),
    ]
    headless = found["Service", "raftkv-peers"]["spec"]
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)
    labels = found["StatefulSet", "raftkv"]["spec"]["template"]["metadata"]["labels"]
    for kind, name in (("Service", "raftkv"), ("Service", "raftkv-peers")):
        spec = found[kind, name]["spec"]
        assert spec["selector"].items() <= labels.items()
        assert all(ports[port["targetPort"]] == port["port"] for port in spec["ports"])
    for name in ("PodDisruptionBudget", "NetworkPolicy"):
        spec = found[name, "raftkv"]["spec"]
        assert (spec.get("selector") or spec["podSelector"])["matchLabels"].items() <= labels.items()
    assert found["ServiceMonitor", "raftkv"]["spec"]["selector"]["matchLabels"].items() <= (
        found["Service", "raftkv-peers"]["metadata"]["labels"].items()
    )


@pytest.mark.parametrize("part", ["rules", "alerts"])
def test_rules_are_those_of_the_repository_and_read_by_prometheus(part: str, rewrite: bool, tmp_path: Path) -> None:
    own, copied = ROOT / f"deploy/prometheus/{part}.yaml", CHART / f"files/{part}.yaml"
    if rewrite:
        copied.write_text(own.read_text())
    assert copied.read_text() == own.read_text(), "pytest --rewrite tests/deploy/test_kubernetes.py copies them"
    spec = objects(template(*ALL))["PrometheusRule", f"raftkv-{part}"]["spec"]
    assert spec == yaml.safe_load(own.read_text())
    path = tmp_path / "rules.yaml"
    path.write_text(json.dumps(spec))
    assert "SUCCESS" in run(installed.program("promtool"), "check", "rules", str(path))


def test_the_rules_know_members_by_their_job() -> None:
    found = objects(template(*ALL))
    job = found["Service", "raftkv-peers"]["metadata"]["labels"][found["ServiceMonitor", "raftkv"]["spec"]["jobLabel"]]
    jobs = set(re.findall(r'job=~"([^"]*)"', (ROOT / "deploy/prometheus/alerts.yaml").read_text()))
    assert jobs
    assert all(re.fullmatch(pattern, job) for pattern in jobs)
