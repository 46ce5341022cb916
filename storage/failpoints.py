"""Failpoints: named points at each durable step where a test can stop, delay or fail the member.

This module has the list of all points and the armed ones. A point in the code is one line,
``failpoint("walBeforeSync")``, which costs 35 ns while no point is armed; code on the path of every request checks
``failpoints.armed`` first to save the call. Where etcd has the same step, the name is etcd's, so that its test
scenarios can be compared.

Failpoints are armed from the environment, before the process starts::

    RAFTKV_FAILPOINTS="raftBeforeSave=panic;walBeforeSync=1-in-10 sleep(100);walBeforeCut=after-3 error(ENOSPC)"

or by a test with ``arm(name, spec)`` and ``disarm_all()``. A spec is ``[1-in-N | after-N] action``:

    panic        exit at once, as if killed: no buffers are flushed, no handlers run (exit status 66)
    raise        raise ``FailpointPanic``, for tests in one process; no code catches it
    error(NAME)  raise ``OSError`` with that errno (default ``EIO``), as the next system call would
    sleep(MS)    wait that many milliseconds in the calling thread
    count        only count the hits, for ``hits(name)``

``1-in-N`` acts on a random one of N hits (``RAFTKV_FAILPOINTS_SEED`` fixes the random choice); ``after-N`` acts on each
hit after the first N. Arming a name that is not declared here fails; a test walks the sources and fails if a point in
the code is not declared.
"""

from __future__ import annotations

import errno
import os
import random
import re
import threading
from collections.abc import Callable, Mapping
from typing import Final

from raftkv.errors import ConfigError

ENVIRONMENT: Final = "RAFTKV_FAILPOINTS"
ENVIRONMENT_SEED: Final = "RAFTKV_FAILPOINTS_SEED"
PANIC_EXIT_STATUS: Final = 66

SITES: Final[dict[str, str]] = {
    # the loop of the member
    "raftBeforeSave": "entries and hard state are about to go to the write-ahead log",
    "raftAfterSave": "entries and hard state are durable",
    "raftBeforeLeaderSend": "a leader is about to send, in parallel with its own disk",
    "raftBeforeFollowerSend": "a follower is about to acknowledge what it has made durable",
    "raftBeforeSaveSnap": "a received snapshot is about to be recorded in the log",
    "raftAfterSaveSnap": "a received snapshot is recorded in the log",
    "raftBeforeApplySnap": "a received snapshot is about to replace the state",
    "raftAfterApplySnap": "a received snapshot has replaced the state",
    "raftBeforeWALRelease": "old segments of the log are about to go",
    "raftAfterWALRelease": "old segments of the log are gone",
    "raftBeforeAdvance": "a Ready is carried out, the core does not know it yet",
    "snapshotBeforeCopySync": "a copy of the database is written, not synced",
    "snapshotAfterPiece": "a piece of a database that comes is written, not synced",
    # apply
    "applyBeforeOpenSnapshot": "the received database is about to be opened",
    "beforeApplyOneEntryNormal": "one committed request is about to be applied",
    "afterApplyOneEntryNormal": "one committed request is applied",
    "beforeApplyOneConfChange": "one committed membership change is about to be applied",
    "afterApplyOneConfChange": "one committed membership change is applied",
    # the backend
    "beforeCommit": "a write transaction of the backend is about to commit",
    "afterCommit": "a write transaction of the backend is durable",
    "beforeWritebackBuf": "committed revisions are about to leave the overlay of the readers",
    "afterWritebackBuf": "committed revisions have left the overlay of the readers",
    "defragBeforeCopy": "an online compacting copy is about to begin",
    "defragAfterCopy": "the compacted copy is durable, but not as new as the database any more",
    "defragBeforeRename": "the compacted copy is about to take the database's place",
    "defragAfterRename": "the compacted copy has the database's name and is not in use yet",
    "replaceBeforeRename": "a received database is about to take the place of the member's own",
    "snapshotBeforeRename": "a received database is whole and verified, and about to take its name",
    "snapshotAfterRename": "a received database has its name, which is not durable yet",
    "snapshotBeforeSend": "a copy for another member is made and about to be sent",
    "restoreBeforeRename": "a data directory made from a snapshot file is whole, and about to take its name",
    "restoreBeforeRenameLog": "it has its name, and its log, which lies elsewhere, is about to take its own",
    # compaction of the key space
    "compactBeforeCommitScheduledCompact": "the revision to compact to is about to be recorded",
    "compactAfterCommitScheduledCompact": "the revision to compact to is recorded",
    "compactBeforeCommitBatch": "one batch of compacted revisions is about to be deleted",
    "compactAfterCommitBatch": "one batch of compacted revisions is deleted",
    "compactBeforeSetFinishedCompact": "the compaction is about to be recorded as finished",
    "compactAfterSetFinishedCompact": "the compaction is recorded as finished",
    # the write-ahead log
    "walBeforeWrite": "a batch is encoded and about to be written",
    "walAfterWrite": "a batch is written and not yet durable",
    "walBeforeSync": "written batches are about to be made durable",
    "walAfterSync": "written batches are durable",
    "walBeforeCut": "a full segment is about to be followed by a new one",
    "walBeforeCutRename": "the new segment has its head and not yet its name",
    "walAfterCut": "the new segment is in use",
    "walBeforeRepair": "the torn tail of the last segment is about to be cut",
    "walAfterRepairCopy": "the torn tail is saved beside the segment and not yet cut",
    "walAfterRepair": "the torn tail is cut",
    "walBeforeUnlink": "one old segment is about to be deleted",
    "walAfterUnlink": "one old segment is deleted",
}
"""Every failpoint, with the state of the disk when the code reaches it."""


class FailpointPanic(BaseException):
    """A simulated death of the process in a test. Not an ``Exception``, so that product code does not catch it."""


_SPEC: Final = re.compile(r"(?:(1-in|after)-(\d+)\s+)?(panic|raise|error|sleep|count)(?:\((\w+)\))?")


class _Armed:
    """The action of one armed point, and its number of hits."""

    def __init__(self, name: str, act: Callable[[str], None], acts_now: Callable[[int], bool]) -> None:
        self.name = name
        self.act = act
        self.acts_now = acts_now
        self.hits = 0

    def hit(self) -> None:
        self.hits += 1
        if self.acts_now(self.hits):
            self.act(self.name)


_points: dict[str, _Armed] = {}
armed = False
"""Whether any point is armed. Code on the path of every request checks this before calling ``failpoint``."""


def failpoint(name: str) -> None:
    """Mark a failpoint; does nothing unless ``name`` is armed."""
    if armed:
        point = _points.get(name)
        if point is not None:
            point.hit()


def arm(name: str, spec: str, seed: int | None = None) -> None:
    """Arm a failpoint.

    Arguments:
        name: one of ``SITES``.
        spec: action, in the grammar of the module docstring.
        seed: seed of the random choice of ``1-in-N``; ``None`` for an unseeded one.

    Raises:
        ConfigError: the name or the spec is unknown.
    """
    global armed
    if name not in SITES:
        raise ConfigError(f"unknown failpoint {name!r}")
    _points[name] = _parse(name, spec, random.Random(seed))
    armed = True


def arm_call(name: str, call: Callable[[str], None]) -> None:
    """Arm the failpoint ``name`` with a function of a simulation, which may raise ``FailpointPanic``.

    Raises:
        ConfigError: the name is unknown.
    """
    global armed
    if name not in SITES:
        raise ConfigError(f"unknown failpoint {name!r}")
    _points[name] = _Armed(name, call, lambda _hits: True)
    armed = True


def disarm(name: str) -> None:
    """Disarm the failpoint ``name``."""
    global armed
    _points.pop(name, None)
    armed = bool(_points)


def disarm_all() -> None:
    """Disarm all failpoints."""
    global armed
    _points.clear()
    armed = False


def hits(name: str) -> int:
    """Return the number of hits of a failpoint since it was armed; 0 when it is not armed."""
    point = _points.get(name)
    return 0 if point is None else point.hits


def arm_from(environment: Mapping[str, str]) -> None:
    """Arm the failpoints in ``RAFTKV_FAILPOINTS``: ``name=spec`` joined by ``;``.

    Raises:
        ConfigError: a name or a spec is unknown; one line for the user.
    """
    seed_text = environment.get(ENVIRONMENT_SEED)
    if seed_text is not None and not seed_text.isdecimal():
        raise ConfigError(f"{ENVIRONMENT_SEED}: {seed_text!r} is not a number")
    seed = None if seed_text is None else int(seed_text)
    for item in filter(None, (part.strip() for part in environment.get(ENVIRONMENT, "").split(";"))):
        name, equals, spec = item.partition("=")
        if not equals:
            raise ConfigError(f"{ENVIRONMENT}: {item!r} is not name=action")
        arm(name.strip(), spec.strip(), seed)


def _parse(name: str, spec: str, rng: random.Random) -> _Armed:
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ConfigError(f"failpoint {name}: cannot read the action {spec!r}")
    prefix, number, action, argument = match.groups()
    return _Armed(name, _action(name, action, argument), _condition(name, prefix, number, rng))


def _condition(name: str, prefix: str | None, number: str | None, rng: random.Random) -> Callable[[int], bool]:
    count = int(number or 0)
    if prefix == "1-in":
        if count < 1:
            raise ConfigError(f"failpoint {name}: 1-in-0 never acts")
        return lambda _hits: rng.randrange(count) == 0
    return lambda hits: hits > count


def _action(name: str, action: str, argument: str | None) -> Callable[[str], None]:
    if action == "error":
        return _raise_os_error(name, argument or "EIO")
    if action == "sleep":
        if argument is None or not argument.isdecimal():
            raise ConfigError(f"failpoint {name}: sleep needs milliseconds, as in sleep(100)")
        return _wait(int(argument))
    if argument is not None:
        raise ConfigError(f"failpoint {name}: {action} takes no argument")
    return {"panic": _panic, "raise": _raise_panic, "count": lambda _name: None}[action]


def _raise_os_error(name: str, errno_name: str) -> Callable[[str], None]:
    number = getattr(errno, errno_name, None)
    if not isinstance(number, int):
        raise ConfigError(f"failpoint {name}: {errno_name!r} is not the name of an errno")

    def act(point: str) -> None:
        raise OSError(number, f"{os.strerror(number)} (failpoint {point})")

    return act


def _wait(milliseconds: int) -> Callable[[str], None]:
    def act(_point: str) -> None:
        threading.Event().wait(milliseconds / 1000)  # an event that is never set

    return act


def _panic(name: str) -> None:
    os.write(2, f"failpoint {name}: panic\n".encode())
    # Not ``sys.exit``: no handler runs and no buffer is flushed, as when the process is killed.
    os._exit(PANIC_EXIT_STATUS)


def _raise_panic(name: str) -> None:
    raise FailpointPanic(name)


def _arm_at_import() -> None:
    """Arm before other code of the process can reach a point. A malformed list ends the process with one line."""
    try:
        arm_from(os.environ)
    except ConfigError as error:
        raise SystemExit(f"raftkv: {error}") from error


_arm_at_import()
