"""What a member notes of leaders, members, alarms, connections and its database."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raftkv.pb import rpc_pb2
from raftkv.server.ui.figures import EVENTS_MAX, TEXT_MAX, Events


@pytest.fixture
def replica() -> Any:
    raw = SimpleNamespace(raft=SimpleNamespace(term=4))
    observers: list[Any] = []
    return SimpleNamespace(
        observers=observers,
        observe=lambda *callbacks: observers.extend(callbacks),
        node=SimpleNamespace(leader=0, raw=raw),
        applier=SimpleNamespace(alarms=SimpleNamespace(on_change=[])),
        defragmenter=SimpleNamespace(on_done=[]),
        membership=SimpleNamespace(members={0xA: rpc_pb2.Member(ID=0xA, name="a")}),
        durable=SimpleNamespace(member_id=0xA),
    )


def test_each_change_is_noted_once_with_its_time(replica: Any) -> None:
    noted: list[Any] = []
    events = Events(replica, noted, clock=lambda: 7.5)
    leader, members = replica.observers
    leader()
    replica.node.leader = 0xA
    leader()
    members()  # voters changed, members did not
    replica.membership.members = {0xA: rpc_pb2.Member(ID=0xA, name="a"), 0xB: rpc_pb2.Member(ID=0xB, isLearner=True)}
    members()
    replica.membership.members = {0xB: rpc_pb2.Member(ID=0xB, name="b")}
    members()
    (alarm,), (done,), (connection,) = replica.applier.alarms.on_change, replica.defragmenter.on_done, noted
    alarm(0xB, rpc_pb2.NOSPACE, True)
    alarm(0xB, rpc_pb2.NOSPACE, False)
    connection(0xB, True, "an earlier reason")
    connection(0xB, False, "reset")
    done(2048, 1024, 0.25)
    assert events.newest() == [
        (7500, "leader", "", "4"),
        (7500, "leader", "a", "4"),
        (7500, "joined", "b", "learner"),
        (7500, "votes", "b", ""),
        (7500, "left", "a", "a"),
        (7500, "raised", "b", "NOSPACE"),
        (7500, "cleared", "b", "NOSPACE"),
        (7500, "connected", "b", ""),
        (7500, "lost", "b", "reset"),
        (7500, "defragmented", "a", "2048 1024 0.2"),
    ]


def test_only_the_newest_are_kept_and_texts_of_others_are_cut(replica: Any) -> None:
    noted: list[Any] = []
    events = Events(replica, noted)
    for number in range(EVENTS_MAX + 3):
        noted[0](0xB, False, f"{number:03}" + "x" * 1000)
    texts = [text for _, _, _, text in events.newest()]
    assert (len(texts), texts[0][:3], {len(text) for text in texts}) == (EVENTS_MAX, "003", {TEXT_MAX})
