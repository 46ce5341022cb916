"""What happened to a member since its start: leaders, members, alarms, connections, defragmentations; the newest few.

    events = Events(replica, transport.on_noted)
    events.newest()         # [[1763869000000, "leader", "8e9e05c52164694d", "4"], ...], the oldest first

    kind                    id                   text
    leader                  of the leader, or "" its term
    joined, left, votes     of the member        joined: "learner" or ""; left: its name
    raised, cleared         of the member        the alarm
    connected, lost         of the other member  why the connection was lost
    defragmented            of this member       bytes before, bytes after, seconds

Each member keeps its own list in memory, with times of its own clock; a page merges the lists of all. What is noted is
rare: no call and no entry adds anything.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from raftkv.pb.enums import alarm_name
from raftkv.raft.types import NONE
from raftkv.replica.replica import Replica

EVENTS_MAX: Final = 25
"""Kept of one member: each record of the dashboard carries them."""
TEXT_MAX: Final = 120

Event = tuple[int, str, str, str]
"""Milliseconds since 1970, kind, id in hex, text."""


class Events:
    """The events of one member.

    Arguments:
        replica: tells of leaders, members, alarms and its database.
        on_noted: of ``Transport``: tells of connections to other members.
        clock: seconds since 1970.
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
        """Return them, the oldest first."""
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
