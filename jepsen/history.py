"""The requests of all clients and their answers: the history of a run, in memory and as JSON lines.

One operation per line, in order of completion, times in nanoseconds of the monotonic clock:

    {"id": 7, "client": "c1", "member": 0, "life": [2, 2], "call": 120, "return": 950,
     "request": ["put", "k", "v", false], "rev": 9, "by": 1234, "result": ["put_result", null]}
    {"id": 8, ..., "error": {"code": "UNAVAILABLE", "text": "...", "definite": false}}

and, between them, events of the nemesis (``{"event": "kill", ...}``), the content of the store at the end
(``{"store": ...}``, see ``checkers/replay.py``) and the messages to watchers (``{"stream": ...}``, ``watches.py``).
Invariants: a client has at most one operation outstanding; an operation is written once, when it has ended. An
operation without an answer is of kind ``info``: it may have happened at any time after its call, or never.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jepsen.ops import KeyValue, Request, Result, decode, did_write, encode
from jepsen.outcome import Failure
from jepsen.watches import Stream

Kind = Literal["ok", "fail", "info"]


@dataclass(slots=True)
class Operation:
    """One request of one client, and its outcome.

    ``member`` is the number of the member asked, ``by`` the member id in the answer's header. ``lives`` are the numbers
    of starts of the member at call and at return; if they are equal, one process served the request.
    """

    id: int
    client: str
    member: int
    call: int
    request: Request
    lives: tuple[int, int] = (0, 0)
    returned: int = 0
    rev: int = 0
    by: int = 0
    result: Result | None = None
    failure: Failure | None = None

    @property
    def kind(self) -> Kind:
        """``ok``: answered. ``fail``: certainly did not happen. ``info``: unknown."""
        if self.result is not None:
            return "ok"
        return "fail" if self.failure is not None and self.failure.definite else "info"

    @property
    def wrote(self) -> bool:
        """Whether it certainly changed the store."""
        return self.result is not None and did_write(self.request, self.result)


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one revision as read from the store: keys written, and keys deleted (if that was looked up)."""

    kvs: tuple[KeyValue, ...]
    deleted: tuple[str, ...] = ()


@dataclass(slots=True)
class StoreRecord:
    """The store as read back: the change of each revision, whole states at some revisions, and the last revision."""

    last: int = 1
    changes: dict[int, Change] = field(default_factory=dict)
    states: dict[int, tuple[KeyValue, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class History:
    """A finished run: operations, events, the store as read back, and the messages to watchers."""

    operations: list[Operation]
    events: list[dict[str, Any]] = field(default_factory=list)
    store: StoreRecord | None = None
    streams: list[Stream] = field(default_factory=list)


class Recorder:
    """The record of a run in progress; tasks can wait for its progress."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.events: list[dict[str, Any]] = []
        self.acked_calls: list[int] = []
        self.streams: list[Stream] = []
        self.outstanding = 0
        self._next_id = 0
        self._progress = asyncio.Condition()

    def begin(self, client: str, member: int, life: int, request: Request) -> Operation:
        """Record that a client is about to send a request, and return the operation.

        Arguments:
            client: name of the client.
            member: number of the member asked.
            life: number of starts of that member.
            request: the request.
        """
        self._next_id += 1
        self.outstanding += 1
        return Operation(self._next_id, client, member, time.monotonic_ns(), request, (life, life))

    async def end(self, operation: Operation, life: int) -> None:
        """Record the end of an operation (``result`` or ``failure`` is set).

        Arguments:
            operation: operation from ``begin``.
            life: number of starts of the member by now.
        """
        operation.returned = time.monotonic_ns()
        operation.lives = (operation.lives[0], life)
        self.operations.append(operation)
        self.outstanding -= 1
        if operation.wrote:
            self.acked_calls.append(operation.call)
        async with self._progress:
            self._progress.notify_all()

    def event(self, name: str, **details: Any) -> None:
        """Record an action of the nemesis or the runner."""
        self.events.append({"event": name, "at": time.monotonic_ns(), **details})

    async def wait_acked(self, count: int, timeout_s: float) -> bool:
        """Wait until a number of further writes have been called *and* acknowledged.

        Arguments:
            count: number of further writes.
            timeout_s: seconds to wait.

        Returns:
            False on timeout.
        """
        now = time.monotonic_ns()
        looked_at = len(self.acked_calls)
        left = count

        def enough() -> bool:
            nonlocal looked_at, left
            left -= sum(1 for call in self.acked_calls[looked_at:] if call > now)
            looked_at = len(self.acked_calls)
            return left <= 0

        return await self._wait(enough, timeout_s)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is outstanding; return False after ``timeout_s`` seconds."""
        return await self._wait(lambda: self.outstanding == 0, timeout_s)

    async def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s), self._progress:
                await self._progress.wait_for(condition)
        except TimeoutError:
            return False
        return True


def save(history: History, path: Path) -> None:
    """Write a history as JSON lines.

    Arguments:
        history: history of a finished run.
        path: path of the file, which is replaced if it exists.
    """
    with path.open("w", encoding="utf-8") as file:
        for line in _lines(history):
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def load(path: Path) -> History:
    """Load a history from a file."""
    history = History([])
    with path.open(encoding="utf-8") as file:
        for text in file:
            line = json.loads(text)
            if "event" in line:
                history.events.append(line)
            elif "stream" in line:
                history.streams.append(Stream.from_json(line["stream"]))
            elif "store" in line:
                history.store = _store_from_json(line["store"])
            else:
                history.operations.append(_operation_from_json(line))
    return history


def _lines(history: History) -> Iterable[dict[str, Any]]:
    timed: list[tuple[int, dict[str, Any]]] = [(event["at"], event) for event in history.events]
    timed += [(operation.returned, _operation_to_json(operation)) for operation in history.operations]
    yield from (line for _, line in sorted(timed, key=lambda pair: pair[0]))
    yield from ({"stream": stream.to_json()} for stream in history.streams)
    if history.store is not None:
        yield {"store": _store_to_json(history.store)}


def _operation_to_json(operation: Operation) -> dict[str, Any]:
    line: dict[str, Any] = {
        "id": operation.id,
        "client": operation.client,
        "member": operation.member,
        "life": list(operation.lives),
        "call": operation.call,
        "return": operation.returned,
        "request": encode(operation.request),
    }
    if operation.result is not None:
        return line | {"rev": operation.rev, "by": operation.by, "result": encode(operation.result)}
    failure = operation.failure
    if failure is None:
        return line
    return line | {"error": {"code": failure.code, "text": failure.text, "definite": failure.definite}}


def _operation_from_json(line: dict[str, Any]) -> Operation:
    first_life, last_life = line["life"]
    operation = Operation(line["id"], line["client"], line["member"], line["call"], decode(line["request"]))
    operation.lives = (first_life, last_life)
    operation.returned = line["return"]
    if "result" in line:
        operation.rev, operation.by, operation.result = line["rev"], line["by"], decode(line["result"])
    elif "error" in line:
        operation.failure = Failure(**line["error"])
    return operation


def _store_to_json(store: StoreRecord) -> dict[str, Any]:
    return {
        "last": store.last,
        "changes": [[rev, encode(c.kvs), list(c.deleted)] for rev, c in sorted(store.changes.items())],
        "states": [[rev, encode(kvs)] for rev, kvs in sorted(store.states.items())],
    }


def _store_from_json(data: dict[str, Any]) -> StoreRecord:
    changes = {rev: Change(decode(kvs), tuple(deleted)) for rev, kvs, deleted in data["changes"]}
    return StoreRecord(data["last"], changes, {rev: decode(kvs) for rev, kvs in data["states"]})
