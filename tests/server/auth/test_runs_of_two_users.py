"""A rendezvous and a checkpoint of one user's run, while another user writes the records of that run as its own.

Alice has the role of ``run grant alice team-a-*``, and Mallory that of ``team-m-*``. Mallory copies each record of
Alice's run below its own names, so that claims, nodes, places and copies name her run, and tries to write hers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from raftkv.checkpoint.commit.attempt import Means
from raftkv.checkpoint.registry import Registry
from raftkv.cli.runs import Pattern, needs
from raftkv.client.control import OnEvents, OnLost
from raftkv.client.errors import from_status
from raftkv.client.kv import txn
from raftkv.client.operations import Compare, Operation
from raftkv.client.scope import Space, Text, to_bytes
from raftkv.client.values import DELETE, PUT, Event, KeyValue, TxnResult
from raftkv.pb import kv_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.training.config import RunConfig
from raftkv.training.rendezvous.participant import Participant
from tests.checkpoint.world import KIND, saved
from tests.server.auth.members import Members
from tests.server.auth.world import Call, World

KV, LEASE = "etcdserverpb.KV", "etcdserverpb.Lease"
LOOK_S = 0.02
RUN = "team-a-1"


class Kept:
    """A lease that is kept alive."""

    silent_s = 0.0

    def __init__(self, lease_id: int, ttl_s: int, task: asyncio.Task[None]) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self.task = task


class UserControl:
    """``Control`` of a program of one user, which runs on the loop of the member that it asks."""

    def __init__(self, world: Members, user: str) -> None:
        self._world = world
        self._token = world.token(user)

    def _start(self, method: str, request: Any) -> Call:
        return World.start(self._world, method, request, self._token)

    async def _ask(self, method: str, request: Any) -> Any:
        call = self._start(method, request)
        await call.over
        if call.status is not None and call.status[0]:
            raise from_status(*call.status, definite=True)
        service, _, name = method.partition("/")
        return SERVICES[service][name].response.FromString(call.answers[0])

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        """Implement ``Control.txn``."""
        built = txn().when(*compares).then(*then).otherwise(*otherwise)
        answer = await self._ask(f"{KV}/Txn", built.request(Space()))
        return built.result(answer, Space(), answer.header.revision)

    async def grant_fixed(self, ttl_s: int) -> int:
        """Implement ``Control.grant_fixed``."""
        return int((await self._ask(f"{LEASE}/LeaseGrant", rpc_pb2.LeaseGrantRequest(TTL=ttl_s))).ID)

    async def grant(self, ttl_s: int, grace_s: float, on_lost: Callable[[], None]) -> Kept:
        """Implement ``Control.grant``."""
        lease_id = await self.grant_fixed(ttl_s)
        request = rpc_pb2.LeaseKeepAliveRequest(ID=lease_id, disconnect_grace_ms=int(1000 * grace_s))
        call = self._start(f"{LEASE}/LeaseKeepAlive", request)

        async def beat() -> None:
            while not call.done:
                await asyncio.sleep(ttl_s / 3)
                call.ask(request)
            on_lost()

        task = asyncio.get_running_loop().create_task(beat())
        return Kept(lease_id, ttl_s, task)

    async def end(self, grant: Any, *, revoke: bool) -> None:
        """Implement ``Control.end``."""
        grant.task.cancel()
        if revoke:
            await self._ask(f"{LEASE}/LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=grant.id))

    def watch(
        self, key: Text, end: Text, start_revision: int, on_events: OnEvents, on_lost: OnLost, *,
        deletes: bool = True, cluster_id: int = 0,
    ) -> Callable[[], None]:  # fmt: skip
        """Implement ``Control.watch``."""
        filters = [] if deletes else ["NODELETE"]
        create = {"key": to_bytes(key), "range_end": to_bytes(end), "start_revision": start_revision}
        call = self._start(
            "etcdserverpb.Watch/Watch", rpc_pb2.WatchRequest(create_request={**create, "filters": filters})
        )

        async def read() -> None:
            while True:
                while call.answers:
                    response = rpc_pb2.WatchResponse.FromString(call.answers.pop(0))
                    if response.canceled:
                        on_lost(from_status(7, response.cancel_reason))
                        return
                    if response.events:
                        on_events(response.header.revision, [_event(event) for event in response.events])
                await asyncio.sleep(LOOK_S)

        return asyncio.get_running_loop().create_task(read()).cancel


def _event(event: kv_pb2.Event) -> Event:
    kv = event.kv
    item = KeyValue(kv.key, kv.value, kv.version, kv.create_revision, kv.mod_revision, kv.lease)
    return Event(DELETE if event.type == kv_pb2.Event.DELETE else PUT, item)


async def _nothing(*_: object) -> None:
    """Keep the files of checkpoints nowhere."""


async def story(control: UserControl) -> list[Any]:
    """Two nodes come together, save two checkpoints, and leave."""
    heard: list[Any] = []
    means = Means(control, _nothing, _nothing, lambda: 1_800_000_000.0, random.Random(7).randrange)
    registry = Registry.from_parts(means, RUN, uri=f"memory://{RUN}")
    configs = [RunConfig(run_id=RUN, host=f"h{number}", min_nodes=2, max_nodes=2) for number in range(2)]
    nodes = [await Participant.start(control, config) for config in configs]
    worlds = await asyncio.gather(*[node.next_world() for node in nodes])
    heard += [(one.generation, one.rank, one.world_size, [each.host for each in one.members]) for one in worlds]
    claim = await registry.claim()
    for step in (1, 2):
        checkpoint = await saved(registry, claim, step, {"loss": 1.0 / step}, ranks=len(nodes))
        heard += [checkpoint.step, await registry.latest(KIND) == checkpoint]
    heard += [each.step for each in await registry.checkpoints(KIND)]
    for node in nodes:
        await node.leave()
    return heard


@pytest.mark.interpreted
def test_records_that_name_a_run_of_another_user_change_nothing_there() -> None:
    alone = play(is_beside=False)
    assert alone[2:] == [1, True, 2, True, 1, 2]
    assert play(is_beside=True) == alone


def play(*, is_beside: bool) -> list[Any]:
    """Return what Alice's programs heard."""
    world = Members()
    for user, team in (("alice", "a"), ("mallory", "m")):
        rights = [(one.kind.upper(), one.key, one.range_end) for one in needs(Pattern.of_runs(f"team-{team}-*"))]
        world.user(user, *rights)
    world.enable()
    mallory = world.token("mallory")
    alice = world.run(story(UserControl(world, "alice")))
    for _ in range(400):
        world.wait(0.1)
        if is_beside:
            _imitate(world, mallory)
        if alice.done():
            break
    heard = alice.result()
    world.close()
    return heard


def _imitate(world: Members, token: str) -> None:
    everything = rpc_pb2.RangeRequest(key=b"/raftkv/", range_end=b"/raftkv0")
    read = world.start(f"{KV}/Range", everything, world.token("root"))
    world.wait(0.01)
    for kv in rpc_pb2.RangeResponse.FromString(read.answers[0]).kvs:
        for key in {kv.key, kv.key.replace(b"team-a-", b"team-m-")}:
            for lease in {0, kv.lease}:
                world.start(f"{KV}/Put", rpc_pb2.PutRequest(key=key, value=kv.value, lease=lease), token)
        world.start(f"{KV}/DeleteRange", rpc_pb2.DeleteRangeRequest(key=kv.key), token)
