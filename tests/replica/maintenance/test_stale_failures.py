"""When a failed commit raises the NOSPACE alarm, and when the failure is older than the room made since."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from raftkv import errors
from raftkv.replica.node.housekeeping import SPACE_FAILURES_MAX, Housekeeping


class _Disk:
    """A disk with room or none, and the reasons for an alarm."""

    def __init__(self) -> None:
        self.has_room = True
        self.told: list[str] = []
        self.store = SimpleNamespace(space_error=None)
        admission = SimpleNamespace(finds_no_room=lambda: not self.has_room)
        parts: Any = (None, self.store, None, admission, None)
        self._housekeeping = Housekeeping(
            *parts,
            commit_interval_s=0.1,
            compaction_pause_s=0.1,
            compaction_keys=1,
            on_no_space=self.told.append,
            auto_compaction=None,
        )

    def fail(self, text: str) -> None:
        """A commit fails, and that is looked at."""
        self.store.space_error = errors.SpaceError(text)
        self._housekeeping._note_space()


def test_a_failure_from_before_there_was_room_is_not_told() -> None:
    """The operator has made room, and disarmed the alarm: it was raised anew by what had failed before."""
    disk = _Disk()
    disk.has_room = False
    for number in range(SPACE_FAILURES_MAX + 2):
        disk.fail(f"failure {number}")
    assert len(disk.told) == SPACE_FAILURES_MAX + 2
    disk.told.clear()
    disk.has_room = True
    disk.fail("begun before there was room")
    assert disk.told == []


def test_a_disk_with_room_that_takes_nothing_is_told() -> None:
    disk = _Disk()
    for number in range(SPACE_FAILURES_MAX - 1):
        disk.fail(f"failure {number}")
    assert disk.told == []
    disk.fail("no quota left")
    assert disk.told == ["no quota left"]
