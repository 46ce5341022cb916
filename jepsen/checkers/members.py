"""The checkers of members: all hold the same data, and each one's revision never decreases."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from jepsen.checkers import Violation
from jepsen.history import History


def check_hashes(history: History) -> list[Violation]:
    """Check that at every quiet point all members gave the same hash and compact revision.

    A missing answer counts as a difference.
    """
    found = []
    for event in history.events:
        if event["event"] == "hashes":
            found += _compare(event)
        elif event["event"] == "unhealthy":
            found.append(Violation("not live", event["why"]))
        elif event["event"] == "died":
            found.append(Violation("died", f"member {event['member']} ended by itself: {event['why']}"))
    if not any(event["event"] == "hashes" for event in history.events):
        found.append(Violation("no quiet point", "the members were never compared"))
    return found


def _compare(event: dict[str, Any]) -> list[Violation]:
    answers = event["members"]
    silent = [name for name, answer in answers.items() if answer is None]
    if silent:
        return [Violation("hash unknown", f"no hash at revision {event['rev']} from {', '.join(silent)}")]
    if len({tuple(answer) for answer in answers.values()}) > 1:
        return [Violation("members differ", f"hash and compact revision at {event['rev']}: {answers}")]
    return []


@dataclass(frozen=True, slots=True)
class _Shown:
    """One moment at which a member showed its progress. ``id`` is that of the operation, 0 for a Status."""

    call: int
    returned: int
    position: int
    id: int = 0


def check_monotone(history: History) -> list[Violation]:
    """Check that a member's revision and applied index never decrease, under any fault of its process.

    An answer is compared with those that returned before its request was called. Kills and restarts in between are no
    excuse, because clients of a member cannot see them.
    """
    revisions: dict[int, list[_Shown]] = defaultdict(list)
    applied: dict[int, list[_Shown]] = defaultdict(list)
    for operation in history.operations:
        if operation.kind == "ok" and operation.rev > 0:
            shown = _Shown(operation.call, operation.returned, operation.rev, operation.id)
            revisions[operation.member].append(shown)
    for event in history.events:
        if event["event"] == "status":
            revisions[event["member"]].append(_Shown(event["call"], event["at"], event["rev"]))
            applied[event["member"]].append(_Shown(event["call"], event["at"], event["applied"]))
    found = []
    for name, groups in (("revision", revisions), ("applied index", applied)):
        for member, group in groups.items():
            found += _going_back(name, member, group)
    return found


def _going_back(name: str, member: int, group: list[_Shown]) -> list[Violation]:
    by_return = sorted(group, key=lambda shown: shown.returned)
    highest: _Shown | None = None
    position = 0
    found = []
    for shown in sorted(group, key=lambda shown: shown.call):
        while position < len(by_return) and by_return[position].returned < shown.call:
            if highest is None or by_return[position].position > highest.position:
                highest = by_return[position]
            position += 1
        if highest is not None and shown.position < highest.position:
            text = f"member {member} answered {name} {shown.position} after {highest.position}"
            operations = tuple(one.id for one in (highest, shown) if one.id)
            found.append(Violation(f"{name} went back", text, operations))
    return found
