"""Diagnostics of a running member: ``/debug/vars``, and with ``--enable-pprof`` ``/debug/pprof/``.

    GET /debug/vars                        command line, memory, state of Raft, limit of open files: JSON, as in etcd
    GET /debug/identities                  use of the member by identity; /metrics must not show user names to strangers
    GET /debug/pprof/                      list of profiles
    GET /debug/pprof/profile?seconds=30    where the loop spends its time: folded stacks
    GET /debug/pprof/goroutine             stacks of all threads and tasks
    GET /debug/pprof/heap                  largest places of allocation, if PYTHONTRACEMALLOC is set
    GET /debug/pprof/cmdline               command line

The paths are Go's, so that scripts find them. The answers are the closest that a Python process can give, as text.

Laws:

- With authentication on, only root may read these paths; otherwise every client may, as in etcd.
- One profile is taken at a time, for ``SECONDS_MAX`` at most. It ends with the connection that asked for it.

PROFILES of a running process: where its loop spends time, what waits, what uses memory.

    folded(await sample(5.0))        # root;...;leaf count: flamegraph.pl, speedscope, inferno
    stacks(tasks, tasks_max=1000)    # threads and tasks, equal stacks together
    heap()                           # the largest places of allocation, by tracemalloc

The profile measures processor time: a timer of the process raises a signal for each 10 ms used, and the loop records
its own stack, in 10 us. Time in a C function counts for the line that calls it. A thread that samples the loop from
outside would see little except ``select``: a busy loop releases the interpreter lock only for moments, always there.
"""

from __future__ import annotations

import asyncio
import gc
import json
import linecache
import math
import os
import resource
import signal
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

from raftkv import errors
from raftkv.raft.describe import Status
from raftkv.raft.tracker import ProgressState
from raftkv.raft.types import StateRole
from raftkv.rpc.server.http import HttpHandler, HttpRequest, HttpResponse

if TYPE_CHECKING:
    from raftkv.server.auth.users import Users


SECONDS_DEFAULT: Final = 30.0
SECONDS_MAX: Final = 60.0
TASKS_MAX: Final = 1000
"""Most tasks in a dump of stacks."""

_STATM: Final = Path("/proc/self/statm")
_VARS: Final = "/debug/vars"
_IDENTITIES: Final = "/debug/identities"
_PPROF: Final = "/debug/pprof/"
_INDEX: Final = """profile    where the loop spends its time: folded stacks; ?seconds=30
goroutine  stacks of all threads and tasks
heap       the largest places of allocation, where PYTHONTRACEMALLOC is set
cmdline    the command line, its words separated by NUL
"""
_ROLES: Final = {
    StateRole.FOLLOWER: "StateFollower",
    StateRole.CANDIDATE: "StateCandidate",
    StateRole.LEADER: "StateLeader",
    StateRole.PRE_CANDIDATE: "StatePreCandidate",
}
_STATES: Final = {
    ProgressState.PROBE: "StateProbe",
    ProgressState.REPLICATE: "StateReplicate",
    ProgressState.SNAPSHOT: "StateSnapshot",
}


class DebugService:
    """Answers requests below ``/debug/``; others go to the next handler.

    Arguments:
        handler: answers all other requests.
        users: refuses users other than root.
        status: returns the current Raft status.
        identities: returns the use of the member by identity, as metrics.
        pprof: whether profiles are available (``--enable-pprof``).
    """

    def __init__(
        self,
        handler: HttpHandler,
        users: Users,
        status: Callable[[], Status],
        identities: Callable[[], str],
        *,
        pprof: bool,
    ) -> None:
        self._handler = handler
        self._users = users
        self._status = status
        self._identities = identities
        self._pprof = pprof
        self._busy = False

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Answer one request."""
        path = request.path
        answer = {_VARS: self._vars, _IDENTITIES: self._who}.get(path)
        if answer is None and not (self._pprof and path.startswith(_PPROF)):
            return await self._handler(request)
        if request.method != "GET" and (answer is not None or request.method != "HEAD"):
            return _text(405, "Method Not Allowed\n", ("allow", "GET"))
        try:
            self._users.check_root(request)
            response = answer() if answer is not None else await self._profile(request, path.removeprefix(_PPROF))
            user = self._users.check_root(request)  # a profile takes a while
        except errors.StatusError as error:
            return _text(401 if error.code == errors.UNAUTHENTICATED else 403, f"{error}\n")
        return HttpResponse(response.status, response.body, response.headers, user)

    def _vars(self) -> HttpResponse:
        """Return an object with one name per line, sorted, like Go's expvar."""
        values = {
            "cmdline": sys.orig_argv,
            "file_descriptor_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "memstats": _memory(),
            "raft.status": raft_status(self._status()),
        }
        lines = ",\n".join(f"{json.dumps(name)}: {_compact(value)}" for name, value in values.items())
        return HttpResponse(200, f"{{\n{lines}\n}}\n".encode(), (("content-type", "application/json; charset=utf-8"),))

    def _who(self) -> HttpResponse:
        return _text(200, self._identities())

    async def _profile(self, request: HttpRequest, name: str) -> HttpResponse:
        if name == "":
            return _text(200, _INDEX)
        if name == "cmdline":
            return _text(200, "\0".join(sys.orig_argv))
        if name not in ("profile", "goroutine", "heap"):
            return _text(404, f"Unknown profile\n{_INDEX}")
        if name == "heap" and not tracemalloc.is_tracing():
            return _text(501, "allocations are not traced: start the member with PYTHONTRACEMALLOC=1\n")
        seconds = _seconds(request)
        if seconds is None:
            return _text(400, f"seconds: a number above 0, {SECONDS_MAX:g} at most\n")
        if self._busy:
            return _text(503, "a profile is being taken already: one at a time\n", ("retry-after", "1"))
        self._busy = True
        try:
            if name == "goroutine":
                return _text(200, stacks(asyncio.all_tasks(), TASKS_MAX))
            if name == "heap":
                return _text(200, await asyncio.to_thread(heap))
            return _text(200, await asyncio.to_thread(folded, await sample(seconds)))
        except SamplingError as error:
            return _text(501, f"{error}\n")
        finally:
            self._busy = False


def _seconds(request: HttpRequest) -> float | None:
    """Return the requested duration of a profile; None: it is invalid."""
    text = parse_qs(request.query, keep_blank_values=True).get("seconds", [str(SECONDS_DEFAULT)])[0]
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and 0 < seconds <= SECONDS_MAX else None


def _memory() -> dict[str, int | list[int]]:
    """Return memory figures that need no heap walk: resident bytes, now and at most, and the collector's counts."""
    virtual, resident = (int(pages) * resource.getpagesize() for pages in _STATM.read_text("ascii").split()[:2])
    return {
        "Sys": virtual,
        "Resident": resident,
        "ResidentMax": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "AllocatedBlocks": sys.getallocatedblocks(),
        "NumGC": sum(generation["collections"] for generation in gc.get_stats()),
        "GCCounts": list(gc.get_count()),
    }


def raft_status(status: Status) -> dict[str, object]:
    """Return the state of Raft in the form of etcd's ``raft.status``.

    Arguments:
        status: Raft status of this member.
    """
    return {
        "id": f"{status.id:x}",
        "term": status.term,
        "vote": f"{status.vote:x}",
        "commit": status.commit,
        "lead": f"{status.leader:x}",
        "raftState": _ROLES[status.role],
        "applied": status.applied,
        "progress": {
            f"{member:x}": {"match": each.match, "next": each.next, "state": _STATES[each.state]}
            for member, each in sorted(status.progress.items())
        },
        "leadtransferee": f"{status.transferee:x}",
    }


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _text(status: int, text: str, *headers: tuple[str, str]) -> HttpResponse:
    types = (("content-type", "text/plain; charset=utf-8"), ("x-content-type-options", "nosniff"))
    return HttpResponse(status, text.encode(), (*headers, *types))


PERIOD_S: Final = 0.01
FRAMES_MAX: Final = 200
"""Frames of one stack; deeper calls count for the last of them."""

HEAP_LINES_MAX: Final = 100

Stack = tuple[CodeType, ...]
"""Functions that were running, from the outermost to the innermost."""

Place = tuple[str, int, str]
"""File, line, function."""


class SamplingError(Exception):
    """The loop does not run in the thread that receives signals."""


async def sample(seconds: float) -> Counter[Stack]:
    """Record the stack of this loop for each 10 ms of processor time. Returns how often each stack was seen.

    Arguments:
        seconds: duration by the clock.

    Raises:
        SamplingError: the loop does not run in the main thread.
    """
    seen: Counter[Stack] = Counter()
    try:
        signal.signal(signal.SIGPROF, lambda _, frame: seen.update((_stack_of(frame),)))
    except ValueError as error:
        raise SamplingError("profiles need a loop that runs in the main thread") from error
    # System calls interrupted by the signal are resumed, also those of libraries.
    signal.siginterrupt(signal.SIGPROF, False)
    try:
        signal.setitimer(signal.ITIMER_PROF, PERIOD_S, PERIOD_S)
        await asyncio.sleep(seconds)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        # A signal may still be pending, and by default it would end the process.
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
        seen: result of ``sample``.
    """
    lines = (f"{';'.join(map(_name, stack))} {count}\n" for stack, count in seen.most_common())
    return "".join(lines)


def _name(code: CodeType) -> str:
    return f"{_module(code.co_filename)}:{code.co_qualname}"


def _module(path: str) -> str:
    """Return the end of a file's path, which names the module.

    >>> _module("/usr/lib/python3.11/asyncio/events.py")
    'asyncio/events'
    """
    return "/".join(path.removesuffix(".py").split(os.sep)[-2:])


def stacks(tasks: Iterable[asyncio.Task[object]], tasks_max: int) -> str:
    """Return the stacks of all threads, and of tasks; tasks that wait at the same place are shown together.

    Arguments:
        tasks: tasks of the loop; call this on the loop's thread.
        tasks_max: most tasks to show.
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
    # Without source lines: reading them would take longer than everything else.
    return "".join(f'  File "{path}", line {line}, in {name}\n' for path, line, name in places)


def _places(frame: FrameType | None) -> Iterator[Place]:
    """Yield the places of a thread, the innermost first."""
    for _ in range(FRAMES_MAX):
        if frame is None:
            return
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname
        frame = frame.f_back


def _waits_at(task: asyncio.Task[object]) -> Iterator[Place]:
    """Yield the places of a task, the outermost first: ``get_stack`` shows only the outermost of a waiting chain."""
    waits: object = task.get_coro()
    for _ in range(FRAMES_MAX):
        frame = getattr(waits, "cr_frame", None) or getattr(waits, "gi_frame", None)
        if frame is None:
            return
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname
        waits = getattr(waits, "cr_await", None) or getattr(waits, "gi_yieldfrom", None)


def heap() -> str:
    """Return the lines that allocated the most memory. Only while ``tracemalloc`` is on."""
    snapshot = tracemalloc.take_snapshot()
    statistics = snapshot.statistics("lineno")
    now, most = tracemalloc.get_traced_memory()
    lines = [f"heap profile: {now} bytes now, {most} at most; {len(statistics)} places, the largest first\n"]
    for entry in statistics[:HEAP_LINES_MAX]:
        frame = entry.traceback[0]
        text = linecache.getline(frame.filename, frame.lineno).strip()
        lines.append(f"{entry.size} bytes in {entry.count} blocks: {frame.filename}:{frame.lineno}: {text}\n")
    return "".join(lines)
