"""Who watches, as the dashboard shows it: a bounded part of it, made in steps, for all who ask together."""

from __future__ import annotations

import asyncio
import base64
import json
from types import SimpleNamespace
from typing import Any

import pytest

from raftkv import errors
from raftkv.loop import limiter
from raftkv.server.ui import service
from raftkv.server.ui.service import SHOWN_BYTES_MAX, STREAMS_MAX, WATCHERS_MAX, Dashboard, watchers


def hub_of(*streams: list[tuple[bytes, bytes]]) -> Any:
    """A hub with streams, each of watchers on these intervals."""
    found = [
        SimpleNamespace(
            watchers={number: SimpleNamespace(key=key, range_end=end) for number, (key, end) in enumerate(intervals)},
            client=("10.0.0.1:5", "alice"),
            unsynced_count=0,
            watcher_bytes=1,
            unread_bytes=2,
        )
        for intervals in streams
    ]
    return SimpleNamespace(
        streams=found,
        watcher_count=sum(map(len, streams)),
        unsynced_count=0,
        shares=SimpleNamespace(used=3),
        revision=4,
    )


def watching(hub: Any) -> Any:
    """Return the answer about a hub."""
    return json.loads(asyncio.run(_text(hub)))


async def _text(hub: Any) -> bytes:
    return await limiter.SharedText(lambda: watchers(hub))()


def test_intervals_of_a_stream_are_shown_the_frequent_first() -> None:
    found = watching(hub_of([(b"a", b""), (b"p/", b"p0"), (b"p/", b"p0")]))
    (stream,) = found["streams"]
    assert (stream["client"], stream["user"], stream["watchers"]) == ("10.0.0.1:5", "alice", 3)
    assert stream["ranges"] == [
        {"key": "cC8=", "range_end": "cDA=", "watchers": 2, "is_cut": False},
        {"key": "YQ==", "range_end": "", "watchers": 1, "is_cut": False},
    ]


def test_long_keys_are_cut() -> None:
    """Any user may watch thousands of keys of a megabyte; who looks at it is not to pay for that, nor is the loop."""
    long = b"k" * 20_000
    streams = [[(b"%d" % number + long, b"l" + long) for number in range(30)] for _ in range(5)]
    found = watching(hub_of(*streams))
    assert len(json.dumps(found)) < 200_000
    one = found["streams"][0]["ranges"][0]
    assert (one["is_cut"], len(base64.b64decode(one["key"])), len(base64.b64decode(one["range_end"]))) == (
        True,
        SHOWN_BYTES_MAX,
        SHOWN_BYTES_MAX,
    )


def test_watcher_list_is_limited() -> None:
    streams = [[(b"%d" % number, b"") for number in range(30)] for _ in range(STREAMS_MAX + 10)]
    found = watching(hub_of(*streams))
    assert len(found["streams"]) == STREAMS_MAX
    assert found["streams_total"] == STREAMS_MAX + 10
    assert sum(stream["ranges_total"] for stream in found["streams"]) <= WATCHERS_MAX + 20 * STREAMS_MAX


async def test_watcher_list_is_built_once_in_slices_for_concurrent_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 requests for 200 streams of 20 intervals were one turn of 0.9 s."""
    made: list[int] = []
    turn = 0

    def one(stream: Any, watchers_max: int) -> dict[str, Any]:
        made.append(turn)
        return {"watchers": len(stream.watchers)}

    monkeypatch.setattr(service, "_stream", one)
    monkeypatch.setattr(limiter, "TEXT_SLICE_S", -1.0)
    hub = hub_of(*[[(b"k", b"")] for _ in range(STREAMS_MAX)])
    text = limiter.SharedText(lambda: watchers(hub))
    asked = [asyncio.create_task(text()) for _ in range(64)]
    while not all(task.done() for task in asked):
        turn += 1
        await asyncio.sleep(0)
    texts = await asyncio.gather(*asked)
    assert len(made) <= 2 * STREAMS_MAX
    assert max(map(made.count, made)) == 1
    assert len(set(texts)) == 1


def test_slow_list_is_withheld_from_user_who_lost_the_right() -> None:
    answers = iter([b"root", errors.PermissionDeniedError()])

    def check_root(request: object) -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    parts: Any = SimpleNamespace(
        collect=None, check_root=check_root, auth=SimpleNamespace(is_enabled=True), rights=None, membership=None
    )
    dashboard = Dashboard(parts, parts, parts, parts, hub_of([(b"secret", b"")]))
    request: Any = SimpleNamespace(method="GET", path="/ui/watchers")
    response = asyncio.run(dashboard.answer(request))
    assert (response.status, b"c2VjcmV0" in response.body) == (403, False)
