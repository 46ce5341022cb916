"""`raftkvctl bench` against a real member: every workload, from one process and from several, and its failures."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from raftkv.cli.bench import load as bench_load
from raftkv.cli.bench.load import Load, Result
from raftkv.pb import rpc_pb2
from tests import forked
from tests.cli.programs import PATIENT
from tests.cli.runner import run_ctl
from tests.procs import RAFTKV, Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV) as cluster:
        yield cluster


def _bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "raftkv.cli.ctl", "bench", *words, *PATIENT]
    return forked.run(command, timeout_s=120)


@pytest.mark.parametrize(
    "words",
    [
        ("put",),
        ("put", "--sequential-keys"),
        ("put", "--processes", "2"),
        ("range", "--key-space-size", "50"),
        ("range", "some-key", "--consistency", "s"),
        ("txn-put", "--txn-ops", "4"),
        ("mixed", "--key-space-size", "50", "--processes", "2"),
    ],
    ids=" ".join,
)
def test_every_workload_counts_every_call(cluster: Cluster, words: tuple[str, ...]) -> None:
    done = _bench(
        *words, "--endpoints", cluster.endpoints[0], "--total", "201", "--clients", "8", "--conns", "2", "--json"
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["calls"] == 201
    assert summary["errors"] == {}
    assert 0 < summary["p50_ms"] <= summary["p90_ms"] <= summary["p99_ms"]


@pytest.mark.parametrize(("key_size", "value_size"), [(1, 0), (8, 256), (200, 70_000)])
def test_puts_are_messages_of_their_sizes(key_size: int, value_size: int) -> None:
    numbers = set()
    requests = bench_load.puts(key_size=key_size, value_size=value_size, key_space=200, sequential=False, seed=7)
    for _, data in itertools.islice(requests, 300):
        request = rpc_pb2.PutRequest.FromString(data)
        key = request.key.removeprefix(bench_load.PREFIX)
        assert (len(request.key), len(key), len(request.value)) == (len(key) + 13, key_size, value_size)
        assert request.SerializeToString() == data
        numbers.add(int.from_bytes(key, "big"))
    assert max(numbers) < 200
    assert len(numbers) > 100


@pytest.mark.long
def test_a_measurement_writes_below_its_own_prefix_says_so_and_deletes_its_keys(cluster: Cluster) -> None:
    endpoint = cluster.endpoints[0]
    assert run_ctl(["--endpoints", endpoint, "put", "app", "1"]).code == 0
    sizes = ("--total", "64", "--key-space-size", "64", "--endpoints", endpoint)

    def keys() -> tuple[int, int]:
        """How many there are, and how many below the prefix."""
        found = [
            run_ctl(["--endpoints", endpoint, "get", key, "--prefix", "--count-only", "-w", "fields"]).output
            for key in ("", bench_load.PREFIX.decode())
        ]
        return tuple(int(text.partition(b'"Count" : ')[2]) for text in found)

    before = keys()
    assert before[1] == 0
    for words in (("put",), ("txn-put",), ("mixed",), ("range",), ("watch", "--streams=1"), ("watch-latency",)):
        given = sizes if words[0] not in ("watch", "watch-latency") else (*sizes[:2], *sizes[4:])
        done = _bench(*words, *given)
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith("raftkvctl: writes below raftkv-bench/; the keys are deleted at the end")
        assert keys() == before, words
    assert "the keys stay" in _bench("put", *sizes, "--sequential-keys", "--keep-keys").stderr
    assert keys() == (before[0] + 64, 64)
    assert _bench("put", *sizes, "--json").stderr == ""
    assert keys() == before, "keys of an earlier run go too"


async def test_refusals_are_counted_and_told(cluster: Cluster) -> None:
    load = Load([cluster.endpoints[0]], clients=2, connections=1)
    request = rpc_pb2.PutRequest(value=b"without a key").SerializeToString()
    result = await load.run(iter([("/etcdserverpb.KV/Put", request)] * 3), total=3)
    assert result.latencies_s == []
    assert list(result.errors.values()) == [3]


def test_results_of_processes_are_merged() -> None:
    first = Result([0.1, 0.3], 2.0, Counter({"no": 1}))
    second = Result([0.2], 3.0, Counter({"no": 2}))
    merged = Result.merged([first, second])
    assert merged.latencies_s == [0.1, 0.2, 0.3]
    assert (merged.seconds, merged.errors, merged.rate) == (3.0, Counter({"no": 3}), 1.0)
    assert (merged.percentile_s(50), merged.percentile_s(99), Result([], 0.0).percentile_s(99)) == (0.2, 0.3, 0.0)


@pytest.mark.long
def test_a_user_measures_a_cluster_that_asks_for_users() -> None:
    with Cluster(RAFTKV) as cluster:
        endpoints = ["--endpoints", cluster.endpoints[0]]
        for words in (["user", "add", "root:pw"], ["user", "grant-role", "root", "root"], ["auth", "enable"]):
            assert run_ctl([*endpoints, *words]).code == 0
        for name in ("put", "range", "watch", "watch-latency", "lease-keepalive", "lock"):
            done = _bench(name, *endpoints, "--user", "root:pw", "--total", "20", "--processes", "2", "--json")
            assert (done.returncode, done.stderr) == (0, ""), name
            assert json.loads(done.stdout)["errors"] == {}
        assert _bench("put", *endpoints).stderr == "Error: etcdserver: user name is empty\n"
