"""Profiles of a running process: where its loop spends time, what waits, what takes memory.

    folded(await sample(5.0))        # root;...;leaf count: flamegraph.pl, speedscope, inferno
    stacks(tasks, tasks_max=1000)    # threads and tasks, equal stacks together
    heap()                           # the largest places of allocation, by tracemalloc

The profile is of processor time: a timer of the process raises a signal for each 10 ms used, and the loop notes its own
stack, in 10 us. Time in a function of C counts for the line that calls it. A thread that looks at the loop from
outside would see little but ``select``: a busy loop gives the interpreter lock away only for moments, always there.

Leaves out: access, and how often (``debug``).
"""

from __future__ import annotations

import asyncio
import linecache
import os
import signal
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Final

PERIOD_S: Final = 0.01
FRAMES_MAX: Final = 200
"""Frames of one stack; what is called from deeper counts for the last of them."""

HEAP_LINES_MAX: Final = 100

Stack = tuple[CodeType, ...]
"""Functions that were running, from the outermost to the innermost."""

Place = tuple[str, int, str]
"""File, line, function."""


class SamplingError(Exception):
    """The loop does not run in the thread that signals come to."""


async def sample(seconds: float) -> Counter[Stack]:
    """Look at the stack of this loop for each 10 ms of processor time; returns how often each was seen.

    Arguments:
        seconds: for how long, by the clock.

    Raises:
        SamplingError: see there.
    """
    seen: Counter[Stack] = Counter()
    try:
        signal.signal(signal.SIGPROF, lambda _, frame: seen.update((_stack_of(frame),)))
    except ValueError as error:
        raise SamplingError("profiles need a loop that runs in the main thread") from error
    # System calls that the signal comes upon go on, those of libraries too.
    signal.siginterrupt(signal.SIGPROF, False)
    try:
        signal.setitimer(signal.ITIMER_PROF, PERIOD_S, PERIOD_S)
        await asyncio.sleep(seconds)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        # One may be on its way, and by default it would end the process.
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
    return seen


def _stack_of(frame: FrameType | None) -> Stack:
    codes: list[CodeType] = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    codes.reverse()
    return tuple(codes[:FRAMES_MAX])


def folded(seen: Counter[Stack]) -> str:
    """Return a profile as lines of ``outer;...;inner count``, the most frequent first.

    Arguments:
        seen: of ``sample``.
    """
    lines = (f"{';'.join(map(_name, stack))} {count}\n" for stack, count in seen.most_common())
    return "".join(lines)


def _name(code: CodeType) -> str:
    return f"{_module(code.co_filename)}:{code.co_qualname}"


def _module(path: str) -> str:
    """Return the end of a file's path that says which module it is.

    >>> _module("/usr/lib/python3.11/asyncio/events.py")
    'asyncio/events'
    """
    return "/".join(path.removesuffix(".py").split(os.sep)[-2:])


def stacks(tasks: Iterable[asyncio.Task[object]], tasks_max: int) -> str:
    """Return the stacks of all threads, and of tasks, those that wait at the same place together.

    Arguments:
        tasks: of the loop; call this in its thread.
        tasks_max: how many are looked at.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(thread_id, thread_id)}\n{_lines(list(_places(frame))[::-1])}\n"
        for thread_id, frame in sys._current_frames().items()
    ]
    waiting: Counter[tuple[Place, ...]] = Counter()
    left_out = 0
    for number, task in enumerate(tasks):
        if number < tasks_max:
            waiting[tuple(_waits_at(task))] += 1
        else:
            left_out += 1
    for place, count in waiting.most_common():
        parts.append(f"{count} task{'s' * (count > 1)}\n{_lines(place)}\n")
    if left_out:
        parts.append(f"{left_out} more tasks\n")
    return "".join(parts)


def _lines(places: Iterable[Place]) -> str:
    # Without the lines of the source: to read them would take longer than all the rest.
    return "".join(f'  File "{path}", line {line}, in {name}\n' for path, line, name in places)


def _places(frame: FrameType | None) -> Iterator[Place]:
    """Where a thread is, the innermost first."""
    for _ in range(FRAMES_MAX):
        if frame is None:
            return
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname
        frame = frame.f_back


def _waits_at(task: asyncio.Task[object]) -> Iterator[Place]:
    """The places of a task, the outermost first: its stack alone has only the first of those that wait."""
    waits: object = task.get_coro()
    for _ in range(FRAMES_MAX):
        frame = getattr(waits, "cr_frame", None) or getattr(waits, "gi_frame", None)
        if frame is None:
            return
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname
        waits = getattr(waits, "cr_await", None) or getattr(waits, "gi_yieldfrom", None)


def heap() -> str:
    """Return what takes the most memory, by the line that asked for it. Only while ``tracemalloc`` is on."""
    snapshot = tracemalloc.take_snapshot()
    statistics = snapshot.statistics("lineno")
    now, most = tracemalloc.get_traced_memory()
    lines = [f"heap profile: {now} bytes now, {most} at most; {len(statistics)} places, the largest first\n"]
    for entry in statistics[:HEAP_LINES_MAX]:
        frame = entry.traceback[0]
        text = linecache.getline(frame.filename, frame.lineno).strip()
        lines.append(f"{entry.size} bytes in {entry.count} blocks: {frame.filename}:{frame.lineno}: {text}\n")
    return "".join(lines)
