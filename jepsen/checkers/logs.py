"""The checker of logs: lines that a member of raftkv must never write, under any fault.

One example: another member ended its connection because of a flood; then members break their own rules. Another: a
failure for which the member has no text, but which it survives. Lines that faults do cause are allowed: lost
connections, elections, slow disks, and a member that stops because its disk lies (the checker of members reports that).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from jepsen.checkers import Violation
from jepsen.history import History

_FLOOD: Final = "GOAWAY ENHANCE_YOUR_CALM"
_UNNAMED: Final = "Traceback (most recent call last)"
_STOPPED: Final = '"level": "fatal"'
_SHORT_OF_MEMORY: Final = re.compile(r"^Traceback .*\n(?: .*\n)*MemoryError.*$|^.*MemoryError.*$", re.MULTILINE)
"""Allowed when memory runs out (``starve``): the failed operation is reported, and the member continues."""
_SHOWN_CHARACTERS: Final = 500


def signs_of_bugs(log: Path) -> list[str]:
    """Return the lines of a member's log that it must never write, each truncated for the report.

    Arguments:
        log: log of all lives of a member.
    """
    lines = _SHORT_OF_MEMORY.sub("", log.read_text(encoding="utf-8", errors="replace")).splitlines()
    return [line[:_SHOWN_CHARACTERS] for line in lines if _FLOOD in line or (_UNNAMED in line and _STOPPED not in line)]


def check(history: History) -> list[Violation]:
    """Check that no member logged such a line; the run records each as an event ``logged``."""
    return [
        Violation("sign of a bug", f"member {event['member']} logged: {event['line']}")
        for event in history.events
        if event["event"] == "logged"
    ]
