"""Hashes: those for clients are computed one at a time, concurrently with those for members."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from raftkv.apply.applier import Applier
from raftkv.apply.wire import HeaderEncoder
from raftkv.errors import StorageError
from raftkv.pb import rpc_pb2
from raftkv.replica.maintenance import hashes as hashes_module
from raftkv.replica.maintenance.defragmentation import Defragmenter
from raftkv.replica.maintenance.hashes import Hashes
from raftkv.replica.node.admission import Admission
from raftkv.replica.node.node import Node
from raftkv.rpc.server.calls import UnaryCall
from raftkv.rpc.shares import Uses
from raftkv.server.maintenance.service import MaintenanceService
from raftkv.server.services.responder import Responder
from tests.apply.machine import Machine
from tests.compat.store import put
from tests.rpc.loop import until
from tests.server.recipes.recipes import Granted, ManualNode, NoAdmission


def _parts() -> tuple[Hashes, MaintenanceService]:
    """Make what hashes a store of one key."""
    machine = Machine()
    machine.apply(put(b"k"))
    applier = Applier(machine.store, machine.alarms, machine.membership, Granted())
    admission = cast(Admission, NoAdmission())
    responder = Responder(
        cast(Node, ManualNode()), applier, HeaderEncoder(1, 2), admission, lambda needed: None, Uses()
    )
    hashes = Hashes(machine.store, 1, pytest.fail)
    service = MaintenanceService(responder, machine.store, 0, cast(Defragmenter, None), hashes)
    return hashes, service


@pytest.mark.parametrize("method", ["hash", "hash_kv"])
async def test_clients_hash_one_at_a_time_and_members_wait_for_none_of_them(method, monkeypatch):
    # Sixteen at once took a turn of 60 ms, a put of 149 ms and all threads that the member has for what may block.
    hashes, service = _parts()
    go_on, running, most = asyncio.Event(), 0, 0

    async def on_thread(job: Any, *arguments: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go_on.wait()
        running -= 1
        return job(*arguments)

    monkeypatch.setattr(hashes_module.asyncio, "to_thread", on_thread)
    request = rpc_pb2.HashKVRequest()
    clients = [asyncio.ensure_future(getattr(service, method)(request, cast(UnaryCall, None))) for _ in range(5)]
    await until(lambda: running)
    for _ in range(20):
        await asyncio.sleep(0)
    assert running == 1
    member = asyncio.ensure_future(hashes.at(0))
    await until(lambda: running == 2)
    go_on.set()
    answers = await asyncio.gather(*clients)
    await member
    assert len(set(answers)) == 1
    assert most == 2


@pytest.mark.parametrize("method", ["hash", "hash_kv"])
async def test_a_client_that_leaves_has_its_hash_end_before_the_next_begins(method, monkeypatch):
    """Calls with short deadlines had the database read as often at once as the member has threads for what may block:
    each scan went on without its client, and the next began.
    """
    _, service = _parts()
    threads: list[asyncio.Future[None]] = []
    ended: list[BaseException | None] = []

    async def on_thread(job: Any, *arguments: Any) -> Any:
        """A thread cannot be cancelled."""
        threads.append(asyncio.get_running_loop().create_future())
        await asyncio.wait([threads[-1]])
        try:
            found = job(*arguments)
        except StorageError as error:
            ended.append(error)
            raise
        ended.append(None)
        return found

    monkeypatch.setattr(hashes_module.asyncio, "to_thread", on_thread)
    request = rpc_pb2.HashKVRequest()
    calls = [asyncio.ensure_future(getattr(service, method)(request, cast(UnaryCall, None))) for _ in range(3)]
    await until(lambda: bool(threads))
    calls[0].cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(threads) == 1, "its thread is at work still"
    threads[0].set_result(None)
    await until(lambda: len(threads) == 2)
    assert str(ended[0]) == "a hash was given up"
    threads[1].set_result(None)
    await until(lambda: len(threads) == 3)
    threads[2].set_result(None)
    assert await calls[1] == await calls[2]
    assert calls[0].cancelled()
