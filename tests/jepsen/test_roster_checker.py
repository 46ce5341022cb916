"""The checker of membership changes on hand-made histories, each breaking one rule."""

from __future__ import annotations

from typing import Any

import pytest

from jepsen.checkers import roster
from jepsen.history import History

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def change(at: int, kind: str, member: int, url: str = "", answer: str = "ok", **details: Any) -> dict[str, Any]:
    event = {"event": "change", "at": at, "operator": 0, "change": kind, "id": member, "url": url, "answer": answer}
    return {**event, "text": "", "took_s": 0.1, **details}


def listed(call: int, operator: int = 0, **members: str) -> dict[str, Any]:
    found = [[int(name[1:]), [url]] for name, url in members.items()]
    return {"event": "roster", "at": call + 1, "call": call, "operator": operator, "members": found}


ADDED = change(10, "MemberAdd", 1, A)
LOST_MOVE = change(20, "MemberUpdate", 1, B, "lost")
REFUSED = change(10, "MemberAdd", 0, A, "refused")
REMOVED = change(20, "MemberRemove", 1)
UNKNOWN = change(20, "MemberUpdate", 1, B, "refused", text="etcdserver: member not found")


@pytest.mark.parametrize(
    ("events", "rules"),
    [
        ([ADDED, listed(11, m1=A)], []),
        ([ADDED, listed(11)], ["R1 shown"]),
        ([ADDED, listed(11, m1=B)], ["R1 shown"]),
        ([ADDED, listed(11, operator=1)], []),
        ([ADDED, change(20, "MemberUpdate", 1, B), listed(21, m1=A)], ["R1 shown"]),
        ([ADDED, LOST_MOVE, listed(21, m1=A), listed(23, m1=B)], []),
        ([REFUSED, listed(11, m1=A)], ["R2 refused"]),
        ([REFUSED, listed(9, operator=1, m1=A)], []),
        ([ADDED, REMOVED, listed(21, operator=1, m1=A)], ["R3 gone"]),
        ([ADDED, REMOVED, listed(19, operator=1, m1=A), listed(21)], []),
        ([ADDED, UNKNOWN], ["R4 known"]),
        ([ADDED, LOST_MOVE, UNKNOWN], []),
        ([change(10, "MemberAdd", 0, A, "lost"), listed(11, m1=A), change(20, "MemberRemove", 1), listed(21)], []),
    ],
)
def test_each_rule(events: list[dict[str, Any]], rules: list[str]) -> None:
    assert [violation.rule for violation in roster.check(History([], events))] == rules
