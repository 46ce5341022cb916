"""The checker of logs: some lines a member of raftkv must never write, under any fault.

That another member ended its connection for a flood is one, for then members break their own rules; a failure that
it knows no words for, and survives, is another. Leaves out what faults of a run do bring: lost connections, elections,
slow disks, and a member that stops since its disk lies, which the checker of members reports.
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
"""Told as it is met: of what failed for it, the rest goes on (``starve``)."""
_SHOWN_CHARACTERS: Final = 500


def signs_of_bugs(log: Path) -> list[str]:
    """Return the lines of a member's log that it never has a reason to write, each cut to what fits a report.

    Arguments:
        log: of all lives of a member.
    """
    lines = _SHORT_OF_MEMORY.sub("", log.read_text(encoding="utf-8", errors="replace")).splitlines()
    return [line[:_SHOWN_CHARACTERS] for line in lines if _FLOOD in line or (_UNNAMED in line and _STOPPED not in line)]


def check(history: History) -> list[Violation]:
    """Check that no member logged such a line; the run notes each as an event ``logged``."""
    return [
        Violation("sign of a bug", f"member {event['member']} logged: {event['line']}")
        for event in history.events
        if event["event"] == "logged"
    ]
