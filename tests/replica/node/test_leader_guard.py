"""Streams that require a leader, with and without a task: which end without a leader, and at the member's stop."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from raftkv.raft.types import NONE
from raftkv.replica.node.leadership import ENDED_AT_ONCE, LeaderGuard
from raftkv.replica.node.node import Node
from raftkv.rpc.server.calls import ServerCall
from raftkv.rpc.status import RpcError
from tests.rpc.attacks.test_work_of_a_read import Turns
from tests.rpc.loop import failure, until

INSISTS = ((b"hasleader", b"true"),)


class Call:
    """A call: its metadata, and what it was ended with."""

    def __init__(self, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self.headers = headers
        self.ends: list[str] = []

    def abort(self, error: RpcError) -> None:
        """Implement ``ServerCall``."""
        self.ends.append(error.text)


def call(headers: tuple[tuple[bytes, bytes], ...] = ()) -> Any:
    return cast(ServerCall, Call(headers))


async def test_calls_that_insist_end_with_the_leader_and_all_with_the_member() -> None:
    node = SimpleNamespace(leader=7, settings=SimpleNamespace(election_s=0.001))
    guard = LeaderGuard(cast(Node, node))
    insisting, patient, over = call(INSISTS), call(), call(INSISTS)
    for one in (insisting, patient, over):
        guard.watch_over(one)
    guard.forget(over)
    waits, waits_long = guard.until_leader_lost(insisting), guard.until_leader_lost(patient)
    guard.leader_changed()
    await asyncio.sleep(0.01)
    assert not waits.done()
    node.leader = NONE
    guard.leader_changed()
    await until(waits.done)
    assert (await failure(waits)).text == insisting.ends[0] == "etcdserver: no leader"
    assert not waits_long.done()
    assert (patient.ends, over.ends) == ([], [])
    guard.forget(insisting)
    guard.close()
    assert (await failure(waits_long)).text == patient.ends[0] == "etcdserver: server stopped"
    assert (insisting.ends[1:], over.ends) == ([], [])


async def test_a_turn_ends_some_of_very_many_streams_and_none_when_a_leader_is_found() -> None:
    """A member that ends 60,000 streams at once hears no member for a second, and takes no part in the election."""
    node = SimpleNamespace(leader=NONE, settings=SimpleNamespace(election_s=0.001))
    guard, turns = LeaderGuard(cast(Node, node)), Turns()
    calls = [call(INSISTS) for _ in range(2_000)]
    by_turn: Counter[int] = Counter()

    def ended(how: Any) -> None:
        by_turn[turns.number] += 1
        if isinstance(how, asyncio.Future):
            how.exception()
        if by_turn.total() == 1_300:
            node.leader = 7
            guard.leader_changed()

    for one in calls[:1_000]:
        one.abort = ended
        guard.watch_over(one)
    for one in calls[1_000:]:
        guard.until_leader_lost(one).add_done_callback(ended)
    guard.leader_changed()
    await until(lambda: node.leader == 7)
    for _ in range(5):
        await asyncio.sleep(0)
    assert max(by_turn.values()) <= 2 * ENDED_AT_ONCE
    assert by_turn.total() <= 1_300 + 2 * ENDED_AT_ONCE
    turns.stop()
