"""The figures of a member as one flat record: counters since its start, sizes, its position in the log, latencies.

    figures = Figures(replica, transport.peers, connections, events)
    figures.take()          # a dict of plain values, ready for JSON

Counters and gauges are those that the member keeps anyway. Latencies are measured on demand: ``take`` enables that, and
``MEASURED_S`` after the last call it is disabled again, so a member without viewers does no such work.

    fsync    each sync of the log
    write    from the arrival of a write here until it is applied here
    read     one linearizable read a second, made for this purpose: a round to a quorum

EVENTS: leaders, members, alarms, connections, defragmentations of a member; the newest few since its start.

    events = Events(replica, transport.on_noted)
    events.newest()         # [[1763869000000, "leader", "8e9e05c52164694d", "4"], ...], the oldest first

    kind                    id                   text
    leader                  of the leader, or "" its term
    joined, left, votes     of the member        joined: "learner" or ""; left: its name
    raised, cleared         of the member        the alarm
    connected, lost         of the other member  why the connection was lost
    defragmented            of this member       bytes before, bytes after, seconds

Each member keeps its own list in memory, with times of its own clock; a page merges the lists of all members. Events
are rare: calls and entries add none.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from raftkv import __version__, errors
from raftkv.pb.enums import alarm_name
from raftkv.raft.types import NONE, StateRole
from raftkv.replica.node.node import Node
from raftkv.replica.replica import Replica
from raftkv.server.peer.transport import Peer

EVENTS_MAX: Final = 25
"""Events kept per member; each record of the dashboard contains them."""
TEXT_MAX: Final = 120

Event = tuple[int, str, str, str]
"""Milliseconds since 1970, kind, id in hex, text."""


class Events:
    """The events of one member.

    Arguments:
        replica: reports leaders, members, alarms and defragmentations.
        on_noted: ``Transport.on_noted``, which reports connections to other members.
        clock: returns seconds since 1970.
    """

    def __init__(
        self, replica: Replica, on_noted: list[Callable[[int, bool, str], None]], clock: Callable[[], float] = time.time
    ) -> None:
        self._replica = replica
        self._clock = clock
        self._newest: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._members = self._known()
        replica.observe(self._leader_changed, self._members_changed)
        replica.applier.alarms.on_change.append(self._alarm_changed)
        replica.defragmenter.on_done.append(self._defragmented)
        on_noted.append(self._connection_changed)

    def newest(self) -> list[Event]:
        """Return the events, the oldest first."""
        return list(self._newest)

    def _add(self, kind: str, member_id: int, text: str = "") -> None:
        at_ms = round(self._clock() * 1000)
        self._newest.append((at_ms, kind, f"{member_id:x}" if member_id != NONE else "", text[:TEXT_MAX]))

    def _known(self) -> dict[int, tuple[str, bool]]:
        return {member.ID: (member.name, member.isLearner) for member in self._replica.membership.members.values()}

    def _leader_changed(self) -> None:
        node = self._replica.node
        self._add("leader", node.leader, str(node.raw.raft.term))

    def _members_changed(self) -> None:
        before, self._members = self._members, self._known()
        for member_id, (_, is_learner) in self._members.items():
            if member_id not in before:
                self._add("joined", member_id, "learner" if is_learner else "")
            elif before[member_id][1] and not is_learner:
                self._add("votes", member_id)
        for member_id in before.keys() - self._members.keys():
            self._add("left", member_id, before[member_id][0])

    def _alarm_changed(self, member_id: int, kind: int, is_raised: bool) -> None:
        self._add("raised" if is_raised else "cleared", member_id, alarm_name(kind))

    def _connection_changed(self, member_id: int, is_there: bool, reason: str) -> None:
        self._add("connected" if is_there else "lost", member_id, "" if is_there else reason)

    def _defragmented(self, before_bytes: int, after_bytes: int, took_s: float) -> None:
        self._add("defragmented", self._replica.durable.member_id, f"{before_bytes} {after_bytes} {took_s:.1f}")


MEASURED_S: Final = 5.0
"""How long latencies are measured after the last call of ``take``."""

WINDOW_S: Final = 30.0
"""Period of the quantiles."""

SAMPLES_MAX: Final = 4096
"""Samples of one kind; if the period has more, the newest count."""

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
"""Fields that only grow while a member runs; pages and other members derive rates from them."""


class Latencies:
    """Recent durations. ``observe`` may be called on another thread than the other methods."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES_MAX)

    def observe(self, seconds: float) -> None:
        """Add a duration."""
        self._samples.append((self._clock(), seconds))

    def clear(self) -> None:
        """Drop all durations."""
        self._samples.clear()

    def quantiles(self) -> list[float] | None:
        """Return p50 and p99 in seconds; None: there are no samples."""
        since = self._clock() - WINDOW_S
        recent = sorted(seconds for at, seconds in list(self._samples) if at >= since)
        return [_round(quantile(recent, 0.5)), _round(quantile(recent, 0.99))] if recent else None


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least the given share of all values does not exceed.

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5), quantile([1.0, 2.0, 3.0, 4.0], 0.99)
    (2.0, 4.0)
    """
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]


class Figures:
    """The figures of one member.

    Arguments:
        replica: replica of the member.
        peers: streams to the other members, by id.
        connections: returns the number of connected clients.
        events: events of the member.
    """

    def __init__(
        self, replica: Replica, peers: Mapping[int, Peer], connections: Callable[[], int], events: Events
    ) -> None:
        self._replica = replica
        self._peer_streams = peers
        self._connections = connections
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._began = self._clock()
        self._asked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._probe: asyncio.Task[None] | None = None
        self.fsync, self.write, self.read = (Latencies(self._clock) for _ in range(3))

    def take(self) -> dict[str, Any]:
        """Return the current figures, and measure latencies for a while."""
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
            "db_bytes": store.backend.size_bytes,
            "db_used_bytes": store.backend.size_in_use_bytes,
            "quota_bytes": replica.config.quota_bytes or 0,
            "pending": len(node.proposals),
            "puts": store.puts_total,
            "deletes": store.deletes_total,
            "ranges": store.reader.ranges_total,
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
        """Return the other members as seen here: connected, and on a leader, how much of the log they have."""
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
        """Stop measuring."""
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
