"""Waits for collectives that end when the group is over, also where gloo itself would wait for ever.

gloo (torch 2.13) loses a send that was queued just as its connection closed: ``UnboundBuffer::waitSend`` is then never
woken, neither by the peer's death nor by ``interrupt``, and the caller waits until the group's timeout. Seen about once
in ten breaks of a group of two in which both are in a collective. So a wait for a ``Work`` on the CPU is cut into
slices here, and given up, with ``WorkLost``, when ``is_over`` has said for ``GIVE_UP_S`` that nobody will answer.

A group with such a work cannot be destroyed: its destructor would join the thread that gloo has lost. ``leak`` keeps
it, and its threads, until the process ends.

Leaves out: waits inside C++, as those of DistributedDataParallel's reducer, which last until the group's timeout; and
NCCL, whose waits mean something else when they have a limit.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import Work

SLICE: Final = timedelta(milliseconds=50)
GIVE_UP_S: Final = 0.1
"""What gloo has for failing a collective by itself, which takes it a millisecond or two."""

_work: Final[Any] = Work
"""Its methods can be replaced, whatever its stubs say."""
_wait: Final[Callable[..., bool]] = _work.wait
_present: list[Waits] = []


class WorkLost(RuntimeError):
    """A collective of a group that is over, and that gloo does not end."""


class Waits:
    """Has waits given up once a group is over; see the module. One at a time.

    Arguments:
        is_over: asked on the waiting thread.

    Attributes:
        lost: a work was given up since ``leak``.
    """

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self.is_over = is_over
        self.lost = False
        _present.append(self)
        _work.wait = _wait_in_slices

    def leak(self, groups: Iterable[Any]) -> None:
        """If a work was lost, keep its groups for ever: their destructors must not run, at the process' end neither."""
        if self.lost:
            for group in groups:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self.lost = False

    def close(self) -> None:
        """Let waits be what they were."""
        if self in _present:
            _present.remove(self)
        if not _present:
            _work.wait = _wait


def _wait_in_slices(work: Any, timeout: timedelta = timedelta(0)) -> bool:
    """``Work.wait``; a timeout of 0 is none, as there."""
    if timeout or not _present:
        return _wait(work, timeout)
    waits = _present[-1]
    over_since = 0.0
    while not work.is_completed():
        if not waits.is_over():
            over_since = 0.0
        elif not over_since:
            over_since = time.monotonic()
        elif time.monotonic() - over_since > GIVE_UP_S:
            waits.lost = True
            raise WorkLost("gloo/transport: a collective of a generation that is over was lost")
        try:
            return _wait(work, SLICE)
        except RuntimeError:
            if work.is_completed():
                break  # it has failed, just now
    return _wait(work, timeout)
