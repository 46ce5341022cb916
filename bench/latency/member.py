"""A member that notes when the functions on the way of a put run; else it is ``python -m raftkv``.

A note costs about half a microsecond, and a put makes nine of them on the leader. They are written to
``stamps-<pid>.json`` in the working directory when the member stops.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.latency.stages import Stamps
from raftkv.cli.main import main
from raftkv.raft.raw_node import RawNode
from raftkv.server.node.disk import Disk
from raftkv.server.node.node import Node
from raftkv.server.peer.transport import Transport
from raftkv.server.services.kv import KVService
from raftkv.server.services.responder import PendingWrite

PLACES = {
    "received": (KVService, "put"),
    "checked": (Node, "submit"),
    "proposed": (RawNode, "propose_batch"),
    "sent": (Transport, "send"),
    "synced": (Disk, "note_sync"),
    "heard": (Node, "receive"),
    "applied": (Node, "applied_up_to"),
    "answered": (PendingWrite, "finish"),
}
"""What is noted, by name; the standard names of the stages are in ``stages``. A sync is noted when it has ended, inline
or beside the loop: see ``stamped_sync``."""


def stamped(call: Callable[..., Any], stamps: list[tuple[float, float]]) -> Callable[..., Any]:
    """Return the same function, with a note of when it began and ended."""

    @functools.wraps(call)
    def noted(*arguments: Any, **named: Any) -> Any:
        began_at = perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            stamps.append((began_at, perf_counter()))

    return noted


def stamped_sync(note: Callable[[Disk, float], None], stamps: list[tuple[float, float]]) -> Callable[..., None]:
    """Return the same function, called when a sync has ended with when it began, with a note of both."""

    @functools.wraps(note)
    def noted(disk: Disk, began_at: float) -> None:
        stamps.append((began_at, perf_counter()))
        note(disk, began_at)

    return noted


def take_stamps() -> Callable[[], None]:
    """Wrap all the places; return what writes the notes to a file."""
    stamps: Stamps = {name: [] for name in PLACES}
    for name, (owner, function) in PLACES.items():
        wrap = stamped_sync if name == "synced" else stamped
        setattr(owner, function, wrap(getattr(owner, function), stamps[name]))
    path = Path(f"stamps-{os.getpid()}.json").absolute()

    def write() -> None:
        path.write_text(json.dumps(stamps), encoding="ascii")

    return write


def write_when_stopped(write: Callable[[], None]) -> None:
    """Write the notes when the node stops: a member ends itself by the signal that stopped it."""
    stop = Node.stop

    def stop_and_write(self: Node) -> None:
        stop(self)
        write()

    Node.stop = stop_and_write


if __name__ == "__main__":
    write_when_stopped(take_stamps())
    sys.exit(main())
