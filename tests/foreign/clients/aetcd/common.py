"""What the scenarios of aetcd 1.0 share: a client, events and errors as facts, waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aetcd
from report import WAIT_S, Report, text


@asynccontextmanager
async def connect(report: Report, **options: Any) -> AsyncIterator[aetcd.Client]:
    """Give a client of the first endpoint; `report.base` becomes the store's revision."""
    async with aetcd.Client(host=report.host, port=report.port, timeout=60, **options) as client:
        report.base = (await client.get_prefix(b"\x00none")).header.revision
        yield client


def key(report: Report, name: str) -> bytes:
    """Return a key of this scenario; aetcd takes bytes."""
    return report.key(name).encode()


def failure(error: BaseException) -> Any:
    """Describe an error by class and text."""
    return [type(error).__name__, str(error)]


def event(report: Report, raw: Any) -> list[Any]:
    """Describe an event: kind, key, value, revision from the scenario's start, version, previous value."""
    previous = text(raw.prev_kv.value) if raw.prev_kv and raw.prev_kv.mod_revision else None
    kv = raw.kv
    return [raw.kind, report.name(kv.key), text(kv.value), report.rev(kv.mod_revision), kv.version, previous]


async def take(events: AsyncIterator[Any], count: int) -> list[Any]:
    """Take `count` items from a watch."""
    return [await asyncio.wait_for(anext(events), WAIT_S) for _ in range(count)]


async def next_events(report: Report, events: AsyncIterator[Any], count: int) -> list[list[Any]]:
    """Take and describe `count` events."""
    return [event(report, one) for one in await take(events, count)]


async def until(condition: Callable[[], Awaitable[bool]], client: aetcd.Client, report: Report) -> None:
    """Ask again until `condition` holds; between two tries, wait for a key that is never written."""
    for _ in range(int(WAIT_S / 0.1)):
        if await condition():
            return
        try:
            await client.watch_once(key(report, "never written"), timeout=0.1)
        except aetcd.WatchTimeoutError:
            pass
    raise TimeoutError("the condition never came true")
