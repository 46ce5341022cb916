"""What the scenarios of etcd-client-py (Rust's etcd-client under Python) share: a client, a watch, errors as facts."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from typing import Any, NoReturn

from etcd_client import Client, CondVar, ConnectOptions, GRPCStatusError, Txn
from report import WAIT_S, Report, text
from report import run as run_in_turn


def run(*scenarios: Callable[[Report], Any]) -> NoReturn:
    """Play every scenario in order and end the process at once.

    Threads of this client's tokio that go on while the interpreter ends may abort it, after all steps were reported:
    that says nothing of the server.
    """
    run_in_turn(*scenarios, around=asyncio.run)
    os._exit(0)


def connect(report: Report) -> Any:
    """Return a connection to all endpoints, an async context manager."""
    return client(report).connect(ConnectOptions().with_timeout(10.0))


def client(report: Report) -> Client:
    """Return a client of all endpoints."""
    return Client([f"http://{endpoint}" for endpoint in report.endpoints])


def key(report: Report, name: str) -> bytes:
    """Return a key of this scenario; this client takes bytes."""
    return report.key(name).encode()


async def revision(connection: Any) -> int:
    """Return the store's revision: only the text form of a transaction's answer tells it."""
    found = re.search(r"revision: (\d+)", repr(await connection.txn(Txn())))
    return int(found[1]) if found else 0


def failure(error: BaseException) -> Any:
    """Describe an error: a gRPC error by code and text, any other by class and text."""
    if isinstance(error, GRPCStatusError):
        return [error.args[0]["code"], error.args[0]["message"]]
    return [type(error).__name__, str(error)]


def event(report: Report, raw: Any) -> list[Any]:
    """Describe an event."""
    kind = "PUT" if raw.event == type(raw.event).PUT else "DELETE"
    return [kind, report.name(raw.key), text(raw.value), None if raw.prev_value is None else text(raw.prev_value)]


class Watched:
    """A watch that runs in a task of its own from when the server has created it, and keeps what it tells."""

    def __init__(self, open_watch: Callable[..., Any]) -> None:
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self._ready = CondVar()
        self._task = asyncio.create_task(self._read(open_watch))

    async def _read(self, open_watch: Callable[..., Any]) -> None:
        try:
            async for raw in open_watch(ready_event=self._ready):
                self.events.put_nowait(raw)
        except GRPCStatusError as error:
            self.events.put_nowait(error)

    async def opened(self) -> Watched:
        """Wait until the server has created the watch; raise what became of it instead."""
        ready = asyncio.ensure_future(self._ready.wait())
        await asyncio.wait([ready, self._task], timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            raise self.events.get_nowait() if self._task.done() else TimeoutError("the watch was not created")
        return self

    async def aclose(self) -> None:
        """End the watch."""
        self._task.cancel()
        try:
            await self._task
        except asyncio.CancelledError:
            pass

    async def __aenter__(self) -> Watched:
        return await self.opened()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def take(self, count: int) -> list[Any]:
        """Return the next `count` events."""
        return [await asyncio.wait_for(self.events.get(), WAIT_S) for _ in range(count)]
