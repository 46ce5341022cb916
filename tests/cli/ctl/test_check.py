"""``raftkvctl check``: verdicts on made-up measurements, and short runs on etcd and on raftkv."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from raftkv.cli.bench import check as ctl_check
from raftkv.cli.bench.check import evaluate
from raftkv.cli.bench.load import Result
from raftkv.cli.ctl import top
from tests.cli.programs import PATIENT
from tests.cli.runner import run_ctl
from tests.compat.test_ctl_output import normal, run_etcdctl
from tests.long import long_except
from tests.procs import ETCD_FAST, RAFTKV, Cluster

PROGRAMS = {"etcd": ETCD_FAST, "raftkv": RAFTKV}


@pytest.fixture(scope="module", params=long_except(PROGRAMS, {"raftkv"}))
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    with Cluster(PROGRAMS[request.param]) as cluster:
        yield cluster.endpoints[0]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of a moment."""
    monkeypatch.setattr(ctl_check, "DURATION_S", 1)
    monkeypatch.setitem(ctl_check.PERF_LOADS, "s", (50, 5))
    monkeypatch.setitem(ctl_check.DATA_LOADS, "s", (500, 20))


def test_a_fast_and_steady_cluster_passes() -> None:
    passed, lines = evaluate(Result([0.001, 0.002, 0.003] * 50, 1.0), 150)
    assert passed
    assert lines == [
        "PASS: Throughput is 151 writes/s",
        "PASS: Slowest request took 0.003000s",
        "PASS: Stddev is 0.000816s",
        "PASS",
    ]


@pytest.mark.parametrize(
    ("result", "line"),
    [
        (Result([0.001] * 135, 1.0), "FAIL: Throughput too low: 136 writes/s"),
        (Result([0.001] * 149 + [0.6], 1.0), "Slowest request took too long: 0.600000s"),
        (Result([0.001] * 100 + [0.4] * 100, 1.0), "Stddev too high: 0.199500s"),
        (Result([0.001] * 200, 1.0, Counter({"no": 2})), "FAIL: ERROR(no) -> 2"),
        (Result([], 1.0, Counter({"no": 2})), "FAIL: too many errors"),
    ],
)
def test_each_fault_fails(result: Result, line: str) -> None:
    passed, lines = evaluate(result, 150)
    assert not passed
    assert line in lines
    assert lines[-1] == "FAIL"


@pytest.mark.long
@pytest.mark.usefixtures("short")
def test_perf(endpoint: str) -> None:
    ran = run_ctl(["--endpoints", endpoint, *PATIENT, "check", "perf", "--auto-compact", "--prefix", "here/"])
    lines = ran.output.decode().splitlines()
    assert re.fullmatch(r"Compacting with revision \d+", lines[0])
    assert re.fullmatch(r"Compacted with revision \d+", lines[1])
    assert "Throughput" in lines[2]
    assert ran.code == (0 if lines[-1] == "PASS" else 1)
    assert ran.errors == ""
    assert run_ctl(["--endpoints", endpoint, "get", "here/", "--prefix"]).output == b""


@pytest.mark.usefixtures("short")
def test_datascale(endpoint: str) -> None:
    ran = run_ctl(["--endpoints", endpoint, *PATIENT, "check", "datascale"])
    lines = ran.output.decode().splitlines()
    assert (ran.code, ran.errors) == (0, "")
    assert lines[0] == (
        "Start data scale check for work load [500 key-value pairs, 1024 bytes per key-value, 20 concurrent clients]."
    )
    assert re.fullmatch(r"PASS: Approximate system memory used : -?\d+\.\d\d MB\.", lines[1])
    assert run_ctl(["--endpoints", endpoint, "get", "/etcdctl-check", "--prefix"]).output == b""


@pytest.mark.parametrize(
    "words",
    [
        ("check",),
        ("check", "perf", "--load", "zz"),
        ("check", "datascale", "--load", "zz"),
        ("check", "perf", "--prefix", "used/"),
        ("check", "datascale", "--prefix", "used/"),
    ],
    ids=" ".join,
)
def test_refusals_are_those_of_etcdctl(endpoint: str, words: tuple[str, ...]) -> None:
    run_ctl(["--endpoints", endpoint, "put", "used/x", "1"])
    expected = normal(run_etcdctl(["--endpoints", endpoint, *words], b""))
    found = normal(run_ctl(["--endpoints", endpoint, *words]))
    if words == ("check",):  # both show a help page of their own
        assert (found[0], found[2]) == (expected[0], expected[2])
    else:
        assert found == expected


def test_unreachable_server_is_reported_with_the_reason() -> None:
    ran = run_ctl(["--endpoints", "127.0.0.1:1", "--command-timeout", "200ms", "check", "perf"])
    reason = "raftkvctl: no answer from 127.0.0.1:1: connect: connection refused\n"
    assert (ran.code, ran.output, ran.errors) == (1, b"", f"Error: context deadline exceeded\n{reason}")


def test_metrics_are_read(endpoint: str) -> None:
    samples = top.fetch(endpoint, None, 5.0)
    assert samples["etcd_server_has_leader"] == 1
    assert samples["process_resident_memory_bytes"] > 1e6
    with pytest.raises(OSError, match="refused"):
        top.fetch("127.0.0.1:1", None, 1.0)


def test_metrics_of_one_name_are_added() -> None:
    assert top.sums('a 1\n\n# c 3\nd{x="a b"} 4\nd{x="}"} 5\n') == {"a": 1.0, "d": 9.0}
    with pytest.raises(ValueError, match="nonsense"):
        top.sums("b nonsense\n")
