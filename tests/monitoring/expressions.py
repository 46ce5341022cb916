"""Metrics that queries name, and what labels they ask them for.

>>> sorted(named('sum by (le) (rate(etcd_a_bucket{job="x",To=~"y"}[5m])) > 0'))
[('etcd_a_bucket', frozenset({'To', 'job'}))]
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.procs import ROOT

DEPLOY = ROOT / "deploy"
_METRIC = re.compile(r"\b((?:etcd|raftkv|grpc|process|up)(?:_\w+)?)\b(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


def named(expression: str) -> set[tuple[str, frozenset[str]]]:
    """Names of metrics in a query, with the labels that it selects them by; recorded names (with colons) left out."""
    plain = re.sub(r"\b\w+(?::\w+)+(?:\{[^}]*\})?", "", expression)
    plain = re.sub(r"\b(?:by|without|on)\s*\([^)]*\)", "", plain)
    return {(name, frozenset(_LABEL.findall(labels or ""))) for name, labels in _METRIC.findall(plain)}


def panels() -> Iterator[tuple[str, str]]:
    """Title with legend and query of each target of each panel."""
    for path in sorted((DEPLOY / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.name}: {panel['title']}: {target['legendFormat']}", target["expr"]


def labels_of(title: str) -> set[str]:
    """Labels that a legend shows."""
    return set(re.findall(r"\{\{(\w+)\}\}", title))


def rules() -> Iterator[tuple[str, str]]:
    """Name and query of each rule."""
    for path in (DEPLOY / "prometheus" / "rules.yaml", DEPLOY / "prometheus" / "alerts.yaml"):
        groups: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in (rule for group in groups for rule in group["rules"]):
            yield rule.get("alert") or rule["record"], rule["expr"]


def in_grafana(expression: str) -> str:
    """A query as Grafana sends it, when everything is chosen."""
    for variable, value in (("$__rate_interval", "10s"), ("$job", "raftkv"), ("$instance", ".*"), ("$run", ".*")):
        expression = expression.replace(variable, value)
    return expression


def configuration(directory: Path, members: list[str], exporter: str) -> Path:
    """Write deploy/prometheus/prometheus.yaml for other addresses and short intervals, and return where.

    Arguments:
        directory: to write to.
        members, exporter: addresses.
    """
    content = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text(encoding="utf-8"))
    content["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    content["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in content["rule_files"]]
    jobs = {job["job_name"]: job for job in content["scrape_configs"]}
    jobs["raftkv"]["static_configs"] = [{"targets": members}]
    jobs["raftkv-runs"]["static_configs"] = [{"targets": [exporter]}]
    path = directory / "prometheus.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path
