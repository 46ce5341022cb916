"""MemberAdd, Remove, Update and Promote of one member: each answer of raftkv is that of etcd 3.5.1.

Both live through the same requests from their first start. Ids hold the time at which a member was added, so members
are compared by their peer URLs. Left out: an update of a learner, after which etcd lists it as a voter that it is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from raftkv import cluster_id
from raftkv.pb import rpc_pb2
from tests.compat.wire import Answer, Wire
from tests.procs import ETCD_FAST, RAFTKV, Cluster

UNKNOWN_ID = 0x1234


@dataclass
class Side:
    """One server, and the ids of the members that were added to it."""

    wire: Wire
    own_url: str
    own_id: int
    ids: dict[str, int] = field(default_factory=dict)

    def call(self, name: str, request: Any) -> Answer:
        return self.wire.call(f"etcdserverpb.Cluster/Member{name}", request)

    def call_etcd(self, name: str, request: Any) -> Answer:
        """Call, and once more if no answer comes: on a busy machine etcd does not always answer a promotion."""
        answer = self.call(name, request)
        return self.call(name, request) if answer.code == "DEADLINE_EXCEEDED" else answer

    def seen(self, answer: Answer) -> object:
        """What is compared of an answer."""
        if answer.code != "OK":
            return answer.code, answer.text
        message = answer.message
        added = self._seen(message.member) if "member" in message.DESCRIPTOR.fields_by_name else None
        return added, sorted(map(self._seen, message.members)), message.header.revision

    def _seen(self, member: Any) -> tuple[object, ...]:
        urls = tuple(url.replace(self.own_url, "OWN") for url in member.peerURLs)
        return urls, bool(member.name), len(member.clientURLs), member.isLearner


Step = tuple[str, Callable[[Side], Any]]


def add(*urls: str, learner: bool = False) -> Step:
    return "Add", lambda side: rpc_pb2.MemberAddRequest(
        peerURLs=[url.replace("OWN", side.own_url) for url in urls], isLearner=learner
    )


def remove(who: str) -> Step:
    return "Remove", lambda side: rpc_pb2.MemberRemoveRequest(ID=_id(side, who))


def update(who: str, *urls: str) -> Step:
    return "Update", lambda side: rpc_pb2.MemberUpdateRequest(
        ID=_id(side, who), peerURLs=[url.replace("OWN", side.own_url) for url in urls]
    )


def promote(who: str) -> Step:
    return "Promote", lambda side: rpc_pb2.MemberPromoteRequest(ID=_id(side, who))


def _id(side: Side, who: str) -> int:
    return {"own": side.own_id, "unknown": UNKNOWN_ID, **side.ids}[who]


A, B, C = (f"http://127.0.0.1:{port}" for port in (5, 6, 7))
STEPS: list[Step] = [
    add(),
    add(""),
    add("nonsense"),
    add("http://127.0.0.1"),
    add("ftp://127.0.0.1:1"),
    add("http://127.0.0.1:1/path"),
    add(A, "nonsense"),
    add(f"{A},{B}"),
    add(f"{A}/"),
    add("OWN"),
    add("OWN", learner=True),
    remove("unknown"),
    remove("own"),
    update("unknown", A),
    update("unknown", "bad"),
    update("unknown"),
    promote("unknown"),
    promote("own"),
    add(B, A, learner=True),
    add(C, learner=True),
    add(A, learner=True),
    promote(A),
    update(A, "OWN"),
    update("own", C),
    remove(A),
    remove(A),
    promote(A),
    update(A, A),
    add(C, B, learner=True),
    add(B, learner=True),
    remove(B),
    # From here on there is no quorum: a voter that does not run. What waits for one ends here by itself, in etcd never.
    add(A),
    add(B),
    add(B, learner=True),
]


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    """etcd and raftkv, each with one member."""
    with (
        Cluster(ETCD_FAST) as etcd,
        Cluster(RAFTKV) as raftkv,
        Wire(etcd.endpoints) as theirs,
        Wire(raftkv.endpoints) as ours,
    ):
        yield _side(etcd, theirs), _side(raftkv, ours)


def _side(cluster: Cluster, wire: Wire) -> Side:
    listed = wire.call("etcdserverpb.Cluster/MemberList", rpc_pb2.MemberListRequest()).message.members
    return Side(wire, cluster.members[0].peer_url, listed[0].ID)


def _note_ids(side: Side, answer: Answer) -> None:
    if answer.code == "OK":
        for member in answer.message.members:
            if side.own_id != member.ID:
                side.ids[sorted(member.peerURLs)[0]] = member.ID


@pytest.mark.long
def test_every_answer_is_etcds(sides: tuple[Side, Side]) -> None:
    for number, (name, make) in enumerate(STEPS):
        etcd, raftkv = sides
        answers = []
        for side, call in ((etcd, etcd.call_etcd), (raftkv, raftkv.call)):
            answer = call(name, make(side))
            if name == "Add":
                _note_ids(side, answer)
            answers.append(side.seen(answer))
        assert answers[1] == answers[0], (number, name, make(sides[0]))


@pytest.mark.long
def test_the_id_of_a_member_is_made_as_by_etcd(sides: tuple[Side, Side]) -> None:
    """An id is made of the URLs and the second, without the token."""
    for side in sides:
        answer = side.call("Add", rpc_pb2.MemberAddRequest(peerURLs=[B, A], isLearner=True))
        assert list(answer.message.member.peerURLs) == [A, B]
        now = range(int(time.time()) - 20, int(time.time()) + 2)
        assert answer.message.member.ID in {cluster_id.member_id((A, B), "", second) for second in now}
