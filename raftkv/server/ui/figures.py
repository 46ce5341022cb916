"""The figures of a member as one flat record: counters since its start, sizes, its place in the log, latencies.

    figures = Figures(replica, transport.peers, connections, events)
    figures.take()          # a dict of plain values, ready for JSON

Counters and gauges are those that the member keeps anyway. Latencies are measured on demand: ``take`` turns
that on, and ``MEASURED_S`` after the last call it is turned off again, so a member without viewers does no such work.

    fsync    each sync of the log
    write    from the arrival of a write here until it is applied here
    read     of one linearizable read a second, which is made for it: a round to a quorum
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from raftkv import __version__, errors
from raftkv.raft.types import NONE, StateRole
from raftkv.replica.node.node import Node
from raftkv.replica.replica import Replica
from raftkv.server.peer.transport import Peer
from raftkv.server.ui.events import Events

MEASURED_S: Final = 5.0
"""How long latencies are measured after the last question."""

WINDOW_S: Final = 30.0
"""How far back quantiles look."""

SAMPLES_MAX: Final = 4096
"""Samples of one kind; when there are more in the window, the newest count."""

COUNTERS: Final = (
    "puts",
    "deletes",
    "ranges",
    "txns",
    "events",
    "keepalives",
    "applied",
    "leader_changes",
    "slow_reads",
)
"""Fields that only grow while a member runs: a page, or another member, makes rates of them."""


class Latencies:
    """Durations of the last while. ``observe`` may be called by another thread than the rest."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES_MAX)

    def observe(self, seconds: float) -> None:
        """Note one."""
        self._samples.append((self._clock(), seconds))

    def clear(self) -> None:
        """Forget all."""
        self._samples.clear()

    def quantiles(self) -> list[float] | None:
        """Return p50 and p99 in seconds; None: there was none."""
        since = self._clock() - WINDOW_S
        recent = sorted(seconds for at, seconds in list(self._samples) if at >= since)
        return [_round(quantile(recent, 0.5)), _round(quantile(recent, 0.99))] if recent else None


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the least value that a share of the values does not exceed.

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5), quantile([1.0, 2.0, 3.0, 4.0], 0.99)
    (2.0, 4.0)
    """
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]


class Figures:
    """The figures of one member.

    Arguments:
        replica: has them.
        peers: streams to the other members, by id.
        connections: how many clients are connected.
        events: what happened to the member.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        replica: Replica,
        peers: Mapping[int, Peer],
        connections: Callable[[], int],
        events: Events,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._replica = replica
        self._peer_streams = peers
        self._connections = connections
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._clock = clock or self._loop.time
        self._began = self._clock()
        self._asked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._probe: asyncio.Task[None] | None = None
        self.fsync, self.write, self.read = (Latencies(self._clock) for _ in range(3))

    def take(self) -> dict[str, Any]:
        """Return the figures now, and measure latencies for a while."""
        self._measure()
        replica = self._replica
        node, store, hub, leases = replica.node, replica.store, replica.hub, replica.lessor.times
        return {
            "uptime_s": round(self._clock() - self._began, 1),
            "version": __version__,
            "role": _role(node),
            "leader": f"{node.leader:x}" if node.leader != NONE else "",
            "term": node.term,
            "index": node.raw.raft.log.last_index,
            "committed": node.committed,
            "applied": node.applied,
            "revision": store.revision,
            "compact_revision": max(0, store.compact_revision),
            "keys": store.key_count,
            "db_bytes": store.size_bytes,
            "db_used_bytes": store.size_in_use_bytes,
            "quota_bytes": replica.config.quota_bytes or 0,
            "pending": len(node.proposals),
            "puts": store.puts_total,
            "deletes": store.deletes_total,
            "ranges": store.ranges_total,
            "txns": node.applying.times.txns,
            "events": hub.events_total,
            "keepalives": leases.renewed_total,
            "leader_changes": node.leader_changes,
            "slow_reads": node.reads.rounds_retried,
            "leases": len(leases),
            "watchers": hub.watcher_count,
            "slow_watchers": hub.unsynced_count,
            "watch_streams": len(hub.streams),
            "connections": self._connections(),
            "fsync_s": self.fsync.quantiles(),
            "write_s": self.write.quantiles(),
            "read_s": self.read.quantiles(),
            "peers": self._peers(),
            "happened": self._events.newest(),
        }

    def _peers(self) -> dict[str, dict[str, Any]]:
        """The other members as this one sees them: connected, and, while it leads, how much of the log they have."""
        node = self._replica.node
        progress = node.raw.raft.tracker.progress if node.role == StateRole.LEADER else {}
        found: dict[str, dict[str, Any]] = {}
        for peer_id, peer in self._peer_streams.items():
            known: dict[str, Any] = {"connected": peer.active_since is not None}
            if (each := progress.get(peer_id)) is not None:
                known |= {"match": each.match, "state": each.state.value}
            found[f"{peer_id:x}"] = known
        return found

    # -- latencies ---------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        self._asked_at = self._clock()
        if self._timer is None:
            self._replica.disk.observer = self.fsync.observe
            self._replica.node.proposals.observe(self.write.observe, self._loop.time)
            self._timer = self._loop.call_later(MEASURED_S, self._rest)
        if self._probe is None or self._probe.done():
            self._probe = self._loop.create_task(self._read())

    async def _read(self) -> None:
        began = self._clock()
        with suppress(errors.StatusError):
            await self._replica.node.confirm_read()
            self.read.observe(self._clock() - began)

    def _rest(self) -> None:
        """Stop measuring, unless ``take`` was called meanwhile."""
        left_s = self._asked_at + MEASURED_S - self._clock()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._rest)
        else:
            self.close()

    def close(self) -> None:
        """Measure nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._replica.disk.observer = None
            self._replica.node.proposals.observe(None, self._loop.time)
            for one in (self.fsync, self.write, self.read):
                one.clear()
        if self._probe is not None:
            self._probe.cancel()


def _role(node: Node) -> str:
    if node.settings.member_id in node.conf_state.learners:
        return "learner"
    return StateRole(node.role).name.lower().replace("_", "-")


def _round(seconds: float) -> float:
    return float(f"{seconds:.3g}")
