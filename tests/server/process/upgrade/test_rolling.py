"""Rolling restarts and upgrades under load: leadership moves before each stop, clients see no error, and members of two
versions exchange the log and the database.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raftkv.pb import admin_pb2, rpc_pb2
from tests.compat.wire import Wire
from tests.procs import RAFTKV, ROOT, Cluster, Member, wait_for
from tests.server.process.process import log_of, must_put, wait_for_equal_hashes
from tests.server.process.upgrade.load import Load
from tests.server.process.upgrade.versions import THIS, unpack, versions

pytestmark = pytest.mark.long

FLAGS = ("--snapshot-count", "50", "--snapshot-catchup-entries", "20")
INSTALLED = "installed a snapshot"


@pytest.fixture(params=versions())
def older(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The environment of a member of an older version, or of this one."""
    return {"PYTHONPATH": str(unpack(request.param, tmp_path))}


NEW = {"PYTHONPATH": str(ROOT)}

NOT_CAPABLE = ("FAILED_PRECONDITION", "etcdserver: not capable")
NEW_CALLS = [
    ("raftkvpb.Admin/QuotaSet", admin_pb2.QuotaSetRequest(prefix=b"quota/", keys_max=1_000)),
    ("etcdserverpb.Cluster/MemberUpdate", rpc_pb2.MemberUpdateRequest()),
]
"""What members of 0.1 would misunderstand: to be refused as long as there is one."""


def _refusal(wire: Wire, method: str, request: Any, position: int = 0) -> tuple[str, str] | None:
    """How a member refuses a call, None if it does not."""
    if isinstance(request, rpc_pb2.MemberUpdateRequest):
        member = wire.call("etcdserverpb.Cluster/MemberList", rpc_pb2.MemberListRequest()).message.members[0]
        request = rpc_pb2.MemberUpdateRequest(ID=member.ID, peerURLs=member.peerURLs)
    answer = wire.call(method, request, position)
    return None if answer.code == "OK" else (answer.code, answer.text)


def _restart(load: Load, member: Member, environment: dict[str, str]) -> None:
    """Stop gently, let the others work, start as another version."""
    member.stop()
    load.advance()
    member.environment = environment
    member.restart()
    load.advance()


def _fall_behind(load: Load, member: Member) -> None:
    """Stop a member, and let the others write until they have cut what it lacks."""
    member.stop()
    for _ in range(20):
        load.advance()


def _is_brought_up_by_a_copy(load: Load, member: Member) -> None:
    before = log_of(member).count(INSTALLED)
    _fall_behind(load, member)
    member.restart()
    wait_for(lambda: log_of(member).count(INSTALLED) > before, f"a database for {member.name}")
    load.advance()


def test_a_rolling_upgrade_fails_no_request(older: dict[str, str]) -> None:
    with Cluster(RAFTKV, size=3, flags=FLAGS, environment=older) as cluster, Wire(cluster.endpoints) as wire:
        with Load(cluster.endpoints) as load:
            first, second, third = cluster.members
            _restart(load, first, NEW)
            # From members of the older version, then from those of this one.
            _is_brought_up_by_a_copy(load, first)
            _restart(load, second, NEW)
            _is_brought_up_by_a_copy(load, third)
            _restart(load, third, older)
            refused = NOT_CAPABLE if older != NEW else None
            assert [_refusal(wire, *call) for call in NEW_CALLS] == [refused] * len(NEW_CALLS)
            _restart(load, third, NEW)
            assert [_refusal(wire, *call) for call in NEW_CALLS] == [None] * len(NEW_CALLS)
        load.check()
        wait_for_equal_hashes(wire, must_put(wire, "last"))
        # The versions were kept by all, though they were published while some could not: the first is not heard here.
        for member in cluster.members:
            member.stop()
        for member in (second, third):
            member.start()
        second.wait_ready()
        wire.reconnect()
        assert _refusal(wire, *NEW_CALLS[0], position=1) is None


@pytest.mark.parametrize("version", versions())
def test_an_older_version_can_be_unpacked(version: str, tmp_path: Path) -> None:
    assert version == THIS or (unpack(version, tmp_path) / "raftkv" / "storage" / "schema.py").exists()
