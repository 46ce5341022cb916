"""The watchers of this member, for root: streams, where they come from, which keys, how far behind.

    GET /ui/watchers      with users on: root alone, since keys that others watch are theirs

A question looks at ``STREAMS_MAX`` streams, those with the most watchers first, and ``WATCHERS_MAX`` watchers in all,
and shows ``SHOWN_BYTES_MAX`` of a key: its cost is bounded, however many there are, and however long their keys. That
is still 30 ms, so the list is built in slices and shared by concurrent requests.
"""

from __future__ import annotations

import base64
import heapq
import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from raftkv.loop.limiter import SharedText
from raftkv.replica.watch.hub import WatchHub
from raftkv.replica.watch.stream import WatchStream

STREAMS_MAX: Final = 200
WATCHERS_MAX: Final = 4_000
RANGES_MAX: Final = 20
"""Ranges that are named of one stream, those with the most watchers."""
SHOWN_BYTES_MAX: Final = 256
"""Bounds what is shown of a key; one that is cut says so."""

_encoded: Final = json.JSONEncoder(separators=(",", ":")).encode


class Watching:
    """Lists the watchers.

    Arguments:
        hub: of the member.
    """

    def __init__(self, hub: WatchHub) -> None:
        self._hub = hub
        self.text = SharedText(self._parts)
        """The list as JSON, made on demand."""

    def _parts(self) -> Iterator[str]:
        hub = self._hub
        head = _encoded(
            {
                "streams_total": len(hub.streams),
                "watchers": hub.watcher_count,
                "slow_watchers": hub.unsynced_count,
                "bytes": hub.watcher_bytes,
                "revision": hub.revision,
            }
        )
        streams = heapq.nlargest(STREAMS_MAX, hub.streams, key=lambda stream: len(stream.watchers))
        yield head[:-1] + ',"streams":['
        left, comma = WATCHERS_MAX, ""
        for stream in streams:
            yield comma + _encoded(_stream(stream, left))
            left, comma = max(RANGES_MAX, left - len(stream.watchers)), ","
        yield "]}"


def _stream(stream: WatchStream, watchers_max: int) -> dict[str, Any]:
    counts = Counter((one.key, one.range_end) for one in islice(stream.watchers.values(), watchers_max))
    address, user = stream.client
    return {
        "client": address,
        "user": user,
        "watchers": len(stream.watchers),
        "slow_watchers": stream.unsynced_count,
        "bytes": stream.watcher_bytes,
        "unread_bytes": stream.unread_bytes,
        "ranges_total": len(counts),
        "ranges": [
            {
                "key": _text(key),
                "range_end": _text(end),
                "watchers": number,
                "is_cut": max(len(key), len(end)) > SHOWN_BYTES_MAX,
            }
            for (key, end), number in counts.most_common(RANGES_MAX)
        ],
    }


def _text(data: bytes) -> str:
    return base64.b64encode(data[:SHOWN_BYTES_MAX]).decode()
