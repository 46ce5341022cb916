"""Streams that insist on a leader, with and without a task: which end when there is none, and when the member stops."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from raftkv.raft.types import NONE
from raftkv.rpc.server.calls import ServerCall
from raftkv.rpc.status import RpcError
from raftkv.server.node.node import Node
from raftkv.server.services.leader_guard import LeaderGuard
from tests.rpc.loop import failure, on_loop, until

INSISTS = ((b"hasleader", b"true"),)


class Call:
    """A call: its metadata, and what it was ended with."""

    def __init__(self, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self.headers = headers
        self.ends: list[str] = []

    def abort(self, error: RpcError) -> None:
        """See ``ServerCall``."""
        self.ends.append(error.text)


def call(headers: tuple[tuple[bytes, bytes], ...] = ()) -> Any:
    return cast(ServerCall, Call(headers))


@on_loop
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
