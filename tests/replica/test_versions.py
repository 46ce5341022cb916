"""Versions of members: running versions, capabilities of the cluster, and a peer with a newer format."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raftkv import __version__, errors
from raftkv.apply.membership import Membership
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft.types import ConfState
from raftkv.replica.membership.versions import WIRE_KEY, Versions, introduction, wire_refusal
from raftkv.rpc.status import RpcError
from raftkv.server.peer.service import PeerService
from raftkv.server.peer.transport import peer_metadata
from raftkv.storage.hash import hash_database
from raftkv.storage.mvcc import Store
from tests.storage.memory import MemoryBackend

OWN, OTHER, NEW = 1, 2, 3
MAJOR, MINOR = map(int, __version__.split(".")[:2])
CURRENT = (MAJOR, MINOR)


def _record(member_id: int, version: str) -> raft_pb2.MemberRecord:
    member = rpc_pb2.Member(ID=member_id, name=f"m{member_id}", clientURLs=["http://127.0.0.1:1"])
    return raft_pb2.MemberRecord(member=member, update=True, version=version)


def _membership(store: Store) -> Membership:
    membership = Membership(store)
    membership.bootstrap([rpc_pb2.Member(ID=OWN), rpc_pb2.Member(ID=OTHER)])
    return membership


@pytest.mark.parametrize(
    ("published", "heard", "lowest"),
    [
        ("", None, (0, 0)),
        (__version__, None, CURRENT),
        ("99.1.0", None, CURRENT),
        ("0.1.7", None, (0, 1)),
        (__version__, "0.1.0", (0, 1)),
        (__version__, "", (0, 0)),
        ("", __version__, CURRENT),
        ("", "99.0.0rc1", CURRENT),
        (__version__, "newest", (0, 0)),
    ],
)
def test_heard_version_wins_over_the_published_one(published: str, heard: str | None, lowest: tuple[int, int]) -> None:
    store = Store.open(MemoryBackend())
    membership = _membership(store)
    membership.set_attributes(_record(OTHER, published))
    versions = Versions(membership, OWN)
    if heard is not None:
        versions.heard(OTHER, {"raftkv-version": heard})
    assert versions.lowest_version() == lowest
    if lowest < CURRENT:
        with pytest.raises(errors.NotCapableError, match=r"^etcdserver: not capable$"):
            versions.check_capable(CURRENT)
    else:
        versions.check_capable(CURRENT)


def test_a_member_that_was_added_and_never_started_is_of_unknown_version() -> None:
    store = Store.open(MemoryBackend())
    membership = _membership(store)
    membership.set_attributes(_record(OTHER, __version__))
    versions = Versions(membership, OWN)
    assert versions.lowest_version() == CURRENT
    membership.bootstrap([rpc_pb2.Member(ID=NEW)])
    assert versions.lowest_version() == (0, 0)
    versions.heard(NEW, dict(introduction()))
    assert versions.lowest_version() == CURRENT


def test_changes_of_members_wait_only_for_those_that_have_ever_run() -> None:
    store = Store.open(MemoryBackend())
    membership = _membership(store)
    versions = Versions(membership, OWN)
    versions.check_started_capable(CURRENT)
    record = _record(OTHER, "")
    record.member.clientURLs.append("http://127.0.0.1:1")
    membership.set_attributes(record)
    with pytest.raises(errors.NotCapableError):
        versions.check_started_capable(CURRENT)


def test_version_is_published_again_after_an_upgrade() -> None:
    """It did not keep the versions of others while it ran one that knew nothing of them."""
    store = Store.open(MemoryBackend())
    versions = Versions(_membership(store), OWN)
    upgraded: list[str] = []
    versions.on_upgraded = lambda: upgraded.append("again")
    for metadata, times in (
        (dict(introduction()), 0),  # it always said so
        ({}, 0),  # back to an old version
        ({}, 0),
        (dict(introduction()), 1),
        (dict(introduction()), 1),
    ):
        versions.heard(OTHER, metadata)
        assert len(upgraded) == times


def test_a_published_version_outlives_a_restart_and_is_not_compared() -> None:
    backend = MemoryBackend()
    store = Store.open(backend)
    membership = _membership(store)
    store.set_conf_state(ConfState(voters=(OWN, OTHER)))
    membership.set_attributes(_record(OTHER, ""))
    store.set_applied(1, 1)
    store.commit()
    without = hash_database(backend)
    membership.set_attributes(_record(OTHER, "0.2.0"))
    store.set_applied(2, 1)
    store.commit()
    # A member of 0.1 that applied the same entry did not keep it.
    assert hash_database(backend) == without
    assert Membership(store).version_of(OTHER) == "0.2.0"
    # Started again with a version that does not say what it is.
    membership.set_attributes(_record(OTHER, ""))
    assert Membership(store).version_of(OTHER) == ""
    membership.set_attributes(_record(NEW, "0.2.0"))
    assert membership.version_of(NEW) == "", "not a member"
    store.close()


@pytest.mark.parametrize(
    ("stated", "named", "upgrade"),
    [
        (None, "", ""),
        ("1", "", ""),
        ("1/0.1", "", ""),
        ("2/0.7", "2", "raftkv 0.7 or later"),
        ("3", "3", "a later raftkv"),
        ("\n", "'\\n'", "a later raftkv"),
    ],
)
def test_a_peer_of_a_newer_format_is_refused_in_one_line(caplog, stated, named, upgrade):
    anything: Any = None
    members: Any = SimpleNamespace(members={OWN, OTHER}, removed=set())
    service = PeerService(9, OWN, members, anything, anything, {}, anything)
    metadata = dict(peer_metadata(9, OTHER, OWN))
    metadata.pop(WIRE_KEY)
    if stated is not None:
        metadata[WIRE_KEY] = stated
    refusal = (
        f"raftkv: peer format {named} is unknown to raftkv {__version__}, which reads 1: "
        f"upgrade the member that was called to {upgrade}"
    )
    assert wire_refusal(metadata) == (refusal if named else "")
    call: Any = SimpleNamespace(metadata=metadata, peer=("127.0.0.1", 1))
    if not named:
        assert service._check(call) == OTHER
        return
    for _ in range(3):
        with pytest.raises(RpcError) as refused:
            service._check(call)
        assert refused.value.text == refusal
    assert [record.getMessage() for record in caplog.records] == [
        f"rejected a peer connection from ('127.0.0.1', 1): {refusal}"
    ]
