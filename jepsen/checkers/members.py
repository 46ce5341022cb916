"""Judges of the members: do they hold the same, and does each one's revision only grow?"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from jepsen.checkers import Violation
from jepsen.history import History, Operation


def check_hashes(history: History) -> list[Violation]:
    """At every quiet point all members gave the same hash and compact revision. No answer is not an equal one."""
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


def check_monotone(history: History) -> list[Violation]:
    """A process never answers with an older revision than it answered before the request was called."""
    lives: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    for operation in history.operations:
        if operation.kind == "ok" and operation.lives[0] == operation.lives[1] > 0:
            lives[operation.member, operation.lives[0]].append(operation)
    found = []
    for group in lives.values():
        found += _going_back(group)
    return found


def _going_back(group: list[Operation]) -> list[Violation]:
    by_call = sorted(group, key=lambda operation: operation.call)
    by_return = sorted(group, key=lambda operation: operation.returned)
    highest: Operation | None = None
    position = 0
    found = []
    for operation in by_call:
        while position < len(by_return) and by_return[position].returned < operation.call:
            if highest is None or by_return[position].rev > highest.rev:
                highest = by_return[position]
            position += 1
        if highest is not None and operation.rev < highest.rev:
            text = f"member {operation.member} answered revision {operation.rev} after {highest.rev}"
            found.append(Violation("revision went back", text, (highest.id, operation.id)))
    return found
