"""Leases after broken connections, on three real members: which end after their grace, and which must not."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import raftkv
from tests.compat.wire import Wire
from tests.procs import RAFTKV, ROOT, Cluster, wait_for
from tests.relay import Relay
from tests.server.process.process import leader_of

LONG_TTL_S = 600
"""Longer than any test waits: what ends has been ended."""

OWNER = """
import sys
import raftkv

kv = raftkv.connect(sys.argv[1])
for key, grace_s in (("gone", 0.1), ("stays", 0.0)):
    lease = kv.lease(ttl=600, disconnect_grace_s=grace_s).grant()
    kv.put(f"{sys.argv[2]}/{key}", b"", lease=lease)
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV, size=3) as cluster:
        yield cluster


@pytest.fixture
def kv(cluster: Cluster) -> Iterator[raftkv.Client]:
    for member in cluster.members:
        if not member.is_running():
            member.restart()
    with raftkv.connect(cluster.endpoints, timeout_s=30.0) as kv:
        yield kv


def leader(cluster: Cluster) -> int:
    with Wire(cluster.endpoints) as wire:
        wait_for(lambda: leader_of(wire) >= 0, "a leader")
        return leader_of(wire)


@contextlib.contextmanager
def owner(endpoint: str, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with two leases and a key of each, kept alive by way of one member."""
    command = [sys.executable, "-c", OWNER, endpoint, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"up\n"
            yield process
        finally:
            process.kill()


def wait_kept_past(kv: raftkv.Client, key: str, seconds: float) -> None:
    """The key is there until so much time has passed."""
    until = time.monotonic() + seconds

    def passed() -> bool:
        assert kv.get(key) is not None
        return time.monotonic() > until

    wait_for(passed, "time to pass")


@pytest.mark.long
@pytest.mark.parametrize("distance", [0, 1], ids=["at the leader", "at a follower"])
def test_killed_owner_leaves_only_leases_without_grace(cluster: Cluster, kv: raftkv.Client, distance: int) -> None:
    member = (leader(cluster) + distance) % 3
    name = f"killed{distance}"
    with owner(cluster.endpoints[member], name) as process:
        assert (kv.get(f"{name}/gone"), kv.get(f"{name}/stays")) != (None, None)
        process.kill()
        wait_for(lambda: kv.get(f"{name}/gone") is None, "the end of the lease")
        kept = kv.get(f"{name}/stays")
        assert kept is not None
        kv.revoke(kept.lease)


@pytest.mark.long
def test_owner_continuing_elsewhere_keeps_its_lease(cluster: Cluster, kv: raftkv.Client) -> None:
    relay = Relay(cluster.endpoints[0])
    with raftkv.connect([f"127.0.0.1:{relay.port}", cluster.endpoints[1]]) as moving:
        lease = moving.lease(ttl=LONG_TTL_S, disconnect_grace_s=3.0).grant()
        moving.put("moved", b"", lease=lease)
        before_s = kv.lease_info(lease.id).ttl
        assert before_s > LONG_TTL_S - 100
        relay.close()
        wait_kept_past(kv, "moved", 4.0)
        assert lease.alive
        lease.revoke()


@pytest.mark.long
@pytest.mark.parametrize("gently", [True, False], ids=["SIGTERM", "SIGKILL"])
def test_the_end_of_a_member_is_not_the_end_of_its_clients(cluster: Cluster, kv: raftkv.Client, gently: bool) -> None:
    with raftkv.connect(cluster.endpoints) as client:
        lease = client.lease(ttl=LONG_TTL_S, disconnect_grace_s=0.1).grant()
        client.put("survives", b"", lease=lease)
        if gently:
            cluster.members[0].stop()
        else:
            cluster.members[0].kill()
        wait_kept_past(kv, "survives", 1.0)
        assert lease.alive
        lease.revoke()


@pytest.mark.long
def test_a_client_that_is_closed_leaves_its_lease_to_the_ttl(cluster: Cluster, kv: raftkv.Client) -> None:
    with raftkv.connect(cluster.endpoints) as client:
        lease = client.lease(ttl=LONG_TTL_S, disconnect_grace_s=0.1)
        lease.grant()
        client.put("closed", b"", lease=lease)
        lease.stop()
    wait_kept_past(kv, "closed", 1.0)
    kv.revoke(lease.id)


@pytest.mark.long
@pytest.mark.parametrize("down", [2, 3], ids=["no quorum", "all members"])
def test_a_patient_owner_outlives_an_outage_longer_than_its_ttl(cluster: Cluster, kv: raftkv.Client, down: int) -> None:
    with raftkv.connect(cluster.endpoints, timeout_s=30.0) as client:
        lease = client.lease(ttl=3, disconnect_grace_s=0.1, patient=True).grant()
        assert lease.ttl == 3
        client.put("patient", b"", lease=lease)
        last = leader(cluster)
        # The leader is left alone: what it decides without a quorum is in its log when the others are back.
        dead = [*cluster.members[:last], *cluster.members[last + 1 :], cluster.members[last]][:down]
        for member in dead:
            member.kill()
        until = time.monotonic() + 4.0
        wait_for(lambda: time.monotonic() > until, "more than the TTL")
        assert lease.alive
        assert lease.remaining_s == 0.0
        for member in dead:
            member.start()
        for member in dead:
            member.wait_ready()
        wait_for(lambda: lease.remaining_s > 0.0 or lease.lost.is_set(), "the cluster's word")
        assert not lease.lost.is_set()
        client.put("patient", b"again", lease=lease)
        found = kv.get("patient")
        assert found is not None
        assert (found.version, found.lease) == (2, lease.id)
        lease.revoke()


def test_a_patient_lease_may_be_shorter_than_the_least_ttl(kv: raftkv.Client) -> None:
    """The least protects owners who go by their own clock from elections; a patient one waits for the cluster."""
    assert kv.lease(ttl=1).grant().ttl == 2
    assert kv.lease(ttl=1, patient=True).grant().ttl == 1
