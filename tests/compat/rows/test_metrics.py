"""The families of /metrics: those of etcd 3.5.1 are raftkv's, with their types, labels and buckets, or are listed."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from raftkv.pb import rpc_pb2
from tests import installed
from tests.compat.wire import Wire
from tests.procs import ETCD_FAST, RAFTKV, ROOT, Cluster, Program, http_get, wait_for

pytestmark = pytest.mark.long

FLAGS = ("--metrics", "extensive")
PAGE = ROOT / "docs" / "reference" / "compatibility.md"


@dataclass(frozen=True)
class Family:
    """What of a family is compared."""

    kind: str
    labels: frozenset[str]
    bounds: frozenset[str]
    text: str


def _family(metric: Metric) -> Family:
    labels = frozenset(label for sample in metric.samples for label in sample.labels)
    bounds = frozenset(sample.labels["le"] for sample in metric.samples if "le" in sample.labels)
    return Family(metric.type, labels, bounds, metric.documentation.rstrip("."))


def families(text: str) -> dict[str, Family]:
    """Read the families of a text by their names, as they stand there."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    found = {metric.name: _family(metric) for metric in text_string_to_metric_families(text) if metric.samples}
    return {name: found[name if name in found else name.removesuffix("_total")] for name in kinds if kinds[name]}


def _use(cluster: Cluster) -> str:
    """Do something of everything, and return the text of a member's metrics."""
    with Wire(cluster.endpoints[:1]) as wire:
        lease = wire.call("etcdserverpb.Lease/LeaseGrant", rpc_pb2.LeaseGrantRequest(TTL=60)).message.ID
        wire.call("etcdserverpb.KV/Put", rpc_pb2.PutRequest(key=b"a", lease=lease))
        wire.call("etcdserverpb.KV/Range", rpc_pb2.RangeRequest(key=b"a"))
        wire.call("etcdserverpb.KV/DeleteRange", rpc_pb2.DeleteRangeRequest(key=b"a"))
        alarm = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.ACTIVATE, memberID=1, alarm=rpc_pb2.CORRUPT)
        wire.call("etcdserverpb.Maintenance/Alarm", alarm)
    http_get(cluster.endpoints[0], "/health")

    def text() -> str:
        return http_get(cluster.endpoints[0], "/metrics")[2]

    # Both probe their peers every few seconds.
    name = "etcd_network_peer_round_trip_time_seconds_count{"
    wait_for(lambda: any(line.startswith(name) and not line.endswith(" 0") for line in text().splitlines()), "probes")
    return text()


def _text(program: Program) -> str:
    with Cluster(program, size=2, flags=FLAGS) as cluster:
        return _use(cluster)


@pytest.fixture(scope="module")
def texts() -> tuple[str, str]:
    """The metrics of etcd and of raftkv."""
    return _text(ETCD_FAST), _text(RAFTKV)


def listed() -> set[str]:
    """The families that docs/reference/compatibility.md says are not served; a name may end with ``*``."""
    section = PAGE.read_text(encoding="utf-8").partition("## Metrics\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section.partition("Not served:")[2], re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([a-z0-9_]+\*?)`", cell)}


def test_each_family_of_etcd_is_served_or_listed(texts: tuple[str, str]) -> None:
    theirs, ours = map(families, texts)
    names = listed()
    prefixes = tuple(name[:-1] for name in names if name.endswith("*"))
    missing = {name for name in theirs if name not in ours and name not in names and not name.startswith(prefixes)}
    assert missing == set()
    served = {name for name in ours if name in names or name.startswith(prefixes)}
    assert served == set(), "listed as not served"
    # The list must have no names that etcd does not know: they would hide a typing error.
    known = {name for name in names if name in theirs or any(one.startswith(name[:-1]) for one in theirs)}
    assert names - known == set()


def test_families_are_alike(texts: tuple[str, str]) -> None:
    theirs, ours = map(families, texts)
    shared = theirs.keys() & ours.keys()
    different = {name: (theirs[name], ours[name]) for name in shared if theirs[name] != ours[name]}
    assert different == {}
    assert len(shared) >= 75


def test_numbers_are_written_as_by_etcd(texts: tuple[str, str]) -> None:
    """A whole one has no fraction: what reads ``etcd_server_has_leader 1`` line by line finds it."""
    for text in texts:
        numbers = [line.rpartition(" ")[2] for line in text.splitlines() if not line.startswith("#")]
        assert [number for number in numbers if re.search(r"\.0$|e\+0\d\d", number)] == []
        assert "\netcd_server_has_leader 1\n" in text


def test_promtool_has_no_complaint_but_those_of_etcds_names(texts: tuple[str, str], tmp_path: Path) -> None:
    promtool = installed.program("promtool")
    theirs, ours = (
        {
            line
            for line in subprocess.run(
                [promtool, "check", "metrics"], input=text, text=True, capture_output=True, check=False
            ).stderr.splitlines()
            if line
        }
        for text in texts
    )
    assert ours - theirs == set()
