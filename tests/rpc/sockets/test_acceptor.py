"""Connections are taken, a few a turn, and again after the system had nothing left for one."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import pytest

from raftkv.loop.cork import Cork
from raftkv.rpc import sockets
from raftkv.rpc.sockets import ACCEPTS_A_TURN, Acceptor, EpollPoller
from tests.rpc.loop import until


class Listening:
    """A listening socket that may have nothing left for a connection."""

    def __init__(self, errors: Sequence[int]) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=100)
        self._socket.setblocking(False)
        self.address = self._socket.getsockname()
        self.errors = list(errors)

    def accept(self) -> tuple[socket.socket, Any]:
        if self.errors:
            raise OSError(self.errors.pop(0), "planted")
        return self._socket.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class Taken(asyncio.Protocol):
    """Closes at once, and counts."""

    count = 0
    options: ClassVar[set[tuple[bool, int]]] = set()

    def connection_made(self, transport: Any) -> None:
        Taken.count += 1
        taken = transport.get_extra_info("socket")
        Taken.options.add((taken.getblocking(), taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
        transport.close()


@contextmanager
def _accepting(*errors: int) -> Iterator[tuple[Listening, Acceptor]]:
    Taken.count = 0
    Taken.options.clear()
    loop = asyncio.get_running_loop()
    listening, poller = Listening(errors), EpollPoller(loop, Cork())
    acceptor = Acceptor(loop, poller, cast(socket.socket, listening), Taken)
    acceptor.start()
    yield listening, acceptor
    acceptor.close()
    poller.close()


async def test_many_are_taken_over_several_turns() -> None:
    with _accepting() as (listening, _):
        clients = [socket.create_connection(listening.address) for _ in range(3 * ACCEPTS_A_TURN)]
        counts = []
        while Taken.count < len(clients):
            await asyncio.sleep(0)
            counts.append(Taken.count)
        steps = {after - before for before, after in zip([0, *counts], counts, strict=False)}
        assert max(steps) == ACCEPTS_A_TURN
        assert Taken.options == {(False, 1)}
        for client in clients:
            client.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(listening.address)


@pytest.mark.parametrize("lack", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_a_lack_is_said_and_tried_again_later(lack: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "RETRY_S", 0.01)
    contexts: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: contexts.append(context))
    with _accepting(lack, lack) as (listening, _), socket.create_connection(listening.address):
        await until(lambda: Taken.count)
    assert [(each["message"], each["exception"].errno) for each in contexts] == [
        ("socket.accept() out of system resource", lack)
    ] * 2


async def test_no_node_is_taken_during_a_shortage() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    with _accepting(*[errno.EMFILE] * 50) as (listening, _), socket.create_connection(listening.address):
        await until(lambda: len(listening.errors) < 50)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(listening.errors) == 49


@pytest.mark.parametrize("passing", [errno.ECONNABORTED, errno.EPROTO, errno.EPERM])
async def test_one_that_has_gone_before_it_was_taken_does_not_matter(passing: int) -> None:
    with _accepting(passing) as (listening, _), socket.create_connection(listening.address):
        await until(lambda: Taken.count)


async def test_nothing_is_tried_again_after_the_end() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    with _accepting(errno.EMFILE) as (listening, acceptor), socket.create_connection(listening.address):
        await until(lambda: not listening.errors)
        retry = acceptor._retry
        assert retry is not None
    assert retry.cancelled()
