"""The checker of concurrent membership changes by several operators (``workloads/roster.py``).

    R1 shown     an acknowledged change shows in all lists that its operator reads afterwards
    R2 refused   a member whose addition was refused shows in no later list
    R3 gone      a member whose removal was acknowledged shows in no later list
    R4 known     an existing member is not refused as unknown

Each operator changes only its own members, so its knowledge of them changes only with its own next change. A change
without an answer may have been made; its member's state is then unknown.
"""

from __future__ import annotations

from typing import Any

from jepsen.checkers import Violation
from jepsen.history import History

UNKNOWN = "member not found"


def check(history: History) -> list[Violation]:
    """Check the changes and the lists in the order in which they ended."""
    known = _Known()
    for event in history.events:
        if event["event"] == "change":
            known.changed(event)
        elif event["event"] == "roster":
            known.listed(event)
    return known.found


class _Known:
    """The knowledge from the answers so far."""

    def __init__(self) -> None:
        self.found: list[Violation] = []
        self._urls: dict[int, tuple[int, str]] = {}
        self._refused: dict[str, int] = {}
        self._gone: dict[int, int] = {}

    def changed(self, event: dict[str, Any]) -> None:
        """Process a change and its answer."""
        kind, member, url, answer = event["change"], event["id"], event["url"], event["answer"]
        if answer == "refused":
            if kind == "MemberAdd":
                self._refused[url] = event["at"]
            elif member in self._urls and UNKNOWN in event["text"]:
                self.found.append(Violation("R4 known", f"{kind} of {member:x}: {event['text']}"))
        elif answer == "lost" or kind == "MemberRemove":
            self._urls.pop(member, None)
            if answer == "ok":
                self._gone[member] = event["at"]
        else:
            self._urls[member] = event["operator"], url

    def listed(self, event: dict[str, Any]) -> None:
        """Compare a list with the knowledge so far."""
        members = dict(event["members"])
        for member, (operator, url) in self._urls.items():
            if operator == event["operator"] and members.get(member) != [url]:
                text = f"{member:x} at {members.get(member)}, should be at {url}"
                self.found.append(Violation("R1 shown", text))
        urls = {url for listed in members.values() for url in listed}
        self.found += [
            Violation("R2 refused", f"{url} was refused, and is there")
            for url, at in self._refused.items()
            if url in urls and at < event["call"]
        ]
        self.found += [
            Violation("R3 gone", f"{member:x} was removed, and is there")
            for member, at in self._gone.items()
            if member in members and at < event["call"]
        ]
