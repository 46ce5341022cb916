"""A member that records when the functions on the path of a put run; otherwise it is ``python -m raftkv``.

A record costs about 0.5 us, and a put causes nine of them on the leader. They are written to ``stamps-<pid>.json`` in
the working directory when the member stops.
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
from raftkv.loop.cork import Cork
from raftkv.replica.node.admission import Admission
from raftkv.replica.node.disk import Disk
from raftkv.replica.node.node import Node
from raftkv.rpc.server.calls import UnaryCall
from raftkv.server import member
from raftkv.server.peer.transport import Transport
from raftkv.server.services.kv import KVService

PLACES = {
    "received": (KVService, "put"),
    "checked": (Admission, "check_write"),
    "proposed": (Node, "_turn"),
    "sent": (Transport, "send"),
    "heard": (Node, "receive"),
    "applied": (Cork, "expect"),
    "answered": (UnaryCall, "reply"),
}
"""Recorded functions, by name; the standard names of the stages are in ``stages``. Each function is called by name from
a part that is not compiled together with it; calls within a compiled part bypass the wrapper."""

SYNCED = "synced"
"""Recorded by the disk when a sync has ended, inline or concurrent with the loop."""

NAMES = (*PLACES, SYNCED)


def stamped(call: Callable[..., Any], stamps: list[tuple[float, float]]) -> Callable[..., Any]:
    """Return a wrapper of a function that records its start and end."""

    @functools.wraps(call)
    def noted(*arguments: Any, **named: Any) -> Any:
        began_at = perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            stamps.append((began_at, perf_counter()))

    return noted


def syncs_of(stamps: list[tuple[float, float]]) -> Callable[[float], None]:
    """Return a function that records a sync that has just ended, given its duration."""

    def note(seconds: float) -> None:
        now = perf_counter()
        stamps.append((now - seconds, now))

    return note


def take_stamps() -> None:
    """Wrap all functions, and let the disk report its syncs; write the records to a file when the node stops."""
    stamps: Stamps = {name: [] for name in NAMES}
    for name, (owner, function) in PLACES.items():
        setattr(owner, function, stamped(getattr(owner, function), stamps[name]))
    path, stop = Path(f"stamps-{os.getpid()}.json").absolute(), Node.stop

    def make_disk(*arguments: Any) -> Disk:
        disk = Disk(*arguments)
        disk.observer = syncs_of(stamps[SYNCED])
        return disk

    def stop_and_write(self: Node) -> None:
        stop(self)  # a member ends itself by the signal that stopped it
        path.write_text(json.dumps(stamps), encoding="ascii")

    setattr(member, Disk.__name__, make_disk)
    Node.stop = stop_and_write


if __name__ == "__main__":
    take_stamps()
    sys.exit(main())
