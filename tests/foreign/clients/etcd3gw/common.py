"""What the scenarios of etcd3gw 2.7 and tooz 9.1 share: a client of the JSON gateway, errors as facts, waiting."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable
from typing import Any

import etcd3gw
from report import WAIT_S, Report, text


def connect(report: Report) -> etcd3gw.Etcd3Client:
    """Return a client of the first endpoint; `report.base` becomes the store's revision."""
    client = etcd3gw.client(host=report.host, port=report.port, timeout=int(WAIT_S))
    answer = client.post(client.get_url("/kv/range"), json={"key": "YW55", "count_only": True})
    report.base = int(answer["header"]["revision"])
    return client


def failure(error: BaseException) -> Any:
    """Describe an error: the library's own by class, reason and the body of the answer."""
    body = getattr(error, "detail_text", None) or ""
    try:
        told = json.loads(body)
    except (TypeError, ValueError):
        told = str(body)
    return [type(error).__name__, told]


def event(report: Report, raw: Any) -> list[Any]:
    """Describe an event: its kind, key, value, revision from the scenario's start, version."""
    kv = raw["kv"]
    revision = report.rev(int(kv["mod_revision"]))
    return [raw.get("type", "PUT"), report.name(kv["key"]), text(kv.get("value", b"")), revision, kv.get("version")]


def until(condition: Callable[[], bool]) -> None:
    """Ask again and again until something holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("waited in vain")


class Inbox:
    """Keeps what a watch has told."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()

    def __call__(self, raw: Any) -> None:
        self._queue.put(raw)

    def take(self, count: int) -> list[Any]:
        """Return the next `count` events."""
        return [self._queue.get(timeout=WAIT_S) for _ in range(count)]
