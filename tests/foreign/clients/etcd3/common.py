"""What the scenarios of python etcd3 0.12 share: a client, the store's revision, its errors as facts, waiting."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import etcd3
import grpc
from report import WAIT_S, Report, text


def connect(report: Report, **options: Any) -> etcd3.Etcd3Client:
    """Return a client of the first endpoint; `report.base` becomes the store's revision."""
    client = etcd3.client(host=report.host, port=report.port, timeout=60, **options)
    report.base = client.get_response("any").header.revision
    return client


def failure(error: BaseException) -> Any:
    """Describe an error: a gRPC error by code and text, the library's own by class and text."""
    if isinstance(error, grpc.RpcError):
        return [error.code().name, error.details()]
    return [type(error).__name__, str(error)]


def event(report: Report, raw: Any) -> list[Any]:
    """Describe an event: its kind, key, value, revisions from the scenario's start, previous value."""
    kind = type(raw).__name__.removesuffix("Event")
    previous = text(raw.prev_value) if raw._event.HasField("prev_kv") else None
    return [kind, report.name(raw.key), text(raw.value), report.rev(raw.mod_revision), raw.version, previous]


def take(events: Iterator[Any], count: int) -> list[Any]:
    """Take `count` items from a watch."""
    return [next(events) for _ in range(count)]


class Inbox:
    """A watch callback that keeps what it gets."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()

    def __call__(self, response: Any) -> None:
        self._queue.put(response)

    def next(self) -> Any:
        """Return the next response or error.

        :raises queue.Empty: none came in time.
        """
        return self._queue.get(timeout=WAIT_S)

    def events(self, count: int) -> list[Any]:
        """Return the next `count` events."""
        found: list[Any] = []
        while len(found) < count:
            response = self.next()
            if isinstance(response, Exception):
                raise response
            found.extend(response.events)
        return found


def metadata(report: Report, raw: Any) -> list[int]:
    """Describe a key's revisions and version."""
    return [report.rev(raw.create_revision), report.rev(raw.mod_revision), raw.version, raw.lease_id]


def until(condition: Callable[[], bool], client: etcd3.Etcd3Client, report: Report) -> None:
    """Ask again until `condition` holds; between two tries, wait for a key that is never written."""
    for _ in range(int(WAIT_S / 0.1)):
        if condition():
            return
        try:
            client.watch_once(report.key("never written"), timeout=0.1)
        except etcd3.exceptions.WatchTimedOut:
            pass
    raise TimeoutError("the condition never came true")
