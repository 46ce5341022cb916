"""Quotas of prefixes on real members: by the library, by raftkvctl, over restarts, with leases, for clients of etcd."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import raftkv
from raftkv.errors import InvalidQuotaError, QuotaExceededError, QuotaNotFoundError, TooManyRequestsError
from raftkv.pb import rpc_pb2
from tests.cli.runner import run_ctl
from tests.compat.wire import Wire
from tests.procs import RAFTKV, Cluster, wait_for
from tests.server.process.process import put


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV, size=3) as cluster:
        yield cluster


def _ctl(cluster: Cluster, *words: str) -> tuple[int, str, str]:
    ran = run_ctl(["--endpoints", ",".join(cluster.endpoints), "quota", *words])
    return ran.code, ran.output.decode(), ran.errors


def test_the_library_sets_lists_and_meets_them(cluster: Cluster) -> None:
    with raftkv.connect(cluster.endpoints) as kv:
        kv.put("jobs/1", "one")
        assert kv.set_quota("jobs/", keys_max=2, bytes_max=1_000) == raftkv.aio.PrefixQuota(b"jobs/", 1_000, 2, 73, 1)
        kv.put("jobs/2", "two")
        with pytest.raises(QuotaExceededError, match="prefix 'jobs/' exceeded: 2 of 2 keys used, 1 more wanted"):
            kv.put("jobs/3", "three")
        kv.delete("jobs/1")
        kv.put("jobs/3", "three")
        assert kv.quotas() == [raftkv.aio.PrefixQuota(b"jobs/", 1_000, 2, 4 * 64 + 9 + 9 + 6 + 11, 2, 64 + 9 + 64 + 6)]
        kv.compact(kv.get("jobs/3").mod_revision)
        assert kv.quotas() == [raftkv.aio.PrefixQuota(b"jobs/", 1_000, 2, 2 * 64 + 9 + 11, 2, 0)]
        with pytest.raises(InvalidQuotaError):
            kv.set_quota(bytes(300), keys_max=1)
        kv.remove_quota("jobs/")
        with pytest.raises(QuotaNotFoundError):
            kv.remove_quota("jobs/")
        kv.put("jobs/4", "four")


def test_a_large_prefix_is_counted_on_after_the_answer(cluster: Cluster) -> None:
    with raftkv.connect(cluster.endpoints) as kv:
        for part in range(30):
            kv.txn().then(*(raftkv.put(f"many/{part}/{number}", "") for number in range(100))).commit()
        assert kv.set_quota("many/", keys_max=10_000).is_counting
        wait_for(lambda: not kv.quotas()[0].is_counting, "the count")
        assert kv.quotas()[0].keys_used == 3_000
        kv.remove_quota("many/")


@pytest.mark.long
def test_the_end_of_a_lease_gives_back_and_restarts_keep_count(cluster: Cluster) -> None:
    with Wire(cluster.endpoints) as wire:
        grant = wire.call("etcdserverpb.Lease/LeaseGrant", rpc_pb2.LeaseGrantRequest(TTL=600)).message
        assert _ctl(cluster, "set", "leased/", "--keys=1")[0] == 0
        request = rpc_pb2.PutRequest(key=b"leased/1", lease=grant.ID)
        assert wire.call("etcdserverpb.KV/Put", request).code == "OK"
        for member in cluster.members:
            member.kill()
        for member in cluster.members:
            member.start()
        cluster.wait_ready()
        wire.reconnect()
        for member in range(3):
            answer = put(wire, "leased/2", member=member)
            assert answer.code == "RESOURCE_EXHAUSTED"
            assert answer.text.startswith(
                "etcdserver: mvcc: database space exceeded (raftkv: quota of prefix 'leased/' "
            )
        assert wire.call("etcdserverpb.Lease/LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=grant.ID)).code == "OK"
        wait_for(lambda: put(wire, "leased/2").code == "OK", "room")
        assert _ctl(cluster, "remove", "leased/") == (0, "", "")


def test_raftkvctl(cluster: Cluster) -> None:
    code, output, errors = _ctl(cluster, "set", "a/", "--bytes=1KiB")
    assert (code, errors) == (0, "")
    assert output.splitlines()[1].split() == [
        *("|", "PREFIX", "|", "BYTES", "|", "OF", "|", "HISTORY", "|", "KEYS", "|", "OF", "|")
    ]
    assert output.splitlines()[3].split() == ["|", "a/", "|", "0", "|", "1024", "|", "0", "|", "0", "|", "-", "|"]
    assert json.loads(_ctl(cluster, "list", "--json")[1]) == [
        {
            "prefix": "a/", "bytes_used": 0, "bytes_max": 1024, "bytes_history": 0, "keys_used": 0, "keys_max": 0,
            "is_counting": False,
        }
    ]  # fmt: skip
    assert _ctl(cluster, "remove", "a/", "--json")[:2] == (0, "[]\n")
    assert _ctl(cluster, "list") == (0, "", "")
    assert "| \\x1b[2J\\n |" in _ctl(cluster, "set", "\x1b[2J\n", "--keys=1")[1], "it does nothing to a terminal"
    assert _ctl(cluster, "remove", "\x1b[2J\n")[0] == 0
    assert _ctl(cluster, "remove", "a/") == (1, "", "Error: raftkv: no quota of this prefix\n")
    assert _ctl(cluster, "set", "a/")[2] == "Error: quota set needs --bytes, --keys or both; 0 is no limit\n"
    assert _ctl(cluster, "set", "a/", "--bytes=much")[2] == (
        "Error: --bytes 'much' is not a size: write 1000, 64KiB or 2GB\n"
    )
    assert _ctl(cluster, "set", "--keys=1")[2] == "Error: quota set takes one prefix; '' means all keys\n"
    assert _ctl(cluster, "set", "a/", "--keys=-1")[2] == (
        "Error: raftkv: a quota has a prefix of at most 256 bytes, and limits of 0 (none) or more\n"
    )


def test_limits_are_set_by_raftkvctl_met_and_waited_for(cluster: Cluster) -> None:
    assert _ctl(cluster, "limit", "prefix", "slow/", "--requests=2", "--requests-burst=1")[0] == 0
    assert json.loads(_ctl(cluster, "limits", "--json")[1]) == [
        {
            "kind": "prefix", "name": "slow/", "requests_per_s": 2, "requests_burst": 1, "bytes_per_s": 0,
            "bytes_burst": 0, "watches_max": 0, "weight": 0,
        }
    ]  # fmt: skip
    wait_for(lambda: all(_has_limit(endpoint) for endpoint in cluster.endpoints), "the limit at all members")
    with Wire(cluster.endpoints[:1]) as wire:
        answers = [put(wire, "slow/1") for _ in range(3)]
        assert {(answer.code, answer.text) for answer in answers[1:]} == {
            ("RESOURCE_EXHAUSTED", "etcdserver: too many requests")
        }
        assert put(wire, "other").code == "OK"
    with raftkv.connect(cluster.endpoints[:1]) as kv:
        for number in range(3):
            kv.put(f"slow/{number}", "waited for")
        with pytest.raises(TooManyRequestsError):
            kv.put("slow/2", "too late", timeout_s=0.1)
        kv.set_limit(raftkv.aio.RateLimit("each", watches_max=1))
        assert [one.kind for one in kv.limits()] == ["each", "prefix"]
        kv.put("other", "counted")
    assert _ctl(cluster, "unlimit", "each") == (0, "", "")
    assert _ctl(cluster, "unlimit", "prefix", "slow/") == (0, "", "")
    assert _ctl(cluster, "unlimit", "prefix", "slow/") == (1, "", "Error: raftkv: no limit of this name\n")
    assert _ctl(cluster, "limits") == (0, "", "")
    assert "--requests, --bytes, --watches, --weight" in _ctl(cluster, "limit", "each")[2]
    assert "--weight" in _ctl(cluster, "limit", "user", "a", "--weight=0")[2]
    assert "a weight is 1 to 10,000" in _ctl(cluster, "limit", "role", "a", "--weight=50")[2]
    assert "a burst needs a rate" in _ctl(cluster, "limit", "user", "a", "--requests-burst=1")[2]
    assert "a limit is of a user" in _ctl(cluster, "limit", "user", "--requests=1")[2]


def _has_limit(endpoint: str) -> bool:
    with raftkv.connect([endpoint]) as kv:
        return bool(kv.limits())
