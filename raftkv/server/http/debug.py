"""Questions of an operator to a running member: ``/debug/vars``, and with ``--enable-pprof`` ``/debug/pprof/``.

    GET /debug/vars                        command line, memory, state of Raft, limit of open files: JSON, as etcd's
    GET /debug/identities                  who uses the member, as metrics: /metrics tells no stranger names of users
    GET /debug/pprof/                      what there is
    GET /debug/pprof/profile?seconds=30    where the loop spends its time: folded stacks
    GET /debug/pprof/goroutine             stacks of all threads and tasks
    GET /debug/pprof/heap                  the largest places of allocation, where PYTHONTRACEMALLOC is set
    GET /debug/pprof/cmdline               the command line

The paths are Go's, so that scripts find them; what they answer is what a process in Python knows, as text.

Laws:

- With users on, only root may ask. etcd answers everyone; so does this member while users are off.
- One profile is taken at a time, for ``SECONDS_MAX`` at most. It ends with the connection that asked for it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import resource
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

from raftkv import errors
from raftkv.raft.describe import Status
from raftkv.raft.tracker import ProgressState
from raftkv.raft.types import StateRole
from raftkv.rpc.server.http import HttpHandler, HttpRequest, HttpResponse
from raftkv.server.http import profiles

if TYPE_CHECKING:
    from raftkv.server.auth.users import Users

SECONDS_DEFAULT: Final = 30.0
SECONDS_MAX: Final = 60.0
TASKS_MAX: Final = 1000
"""How many tasks a dump of stacks looks at."""

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
    """Answers what begins with ``/debug/`` and hands on all else.

    Arguments:
        handler: answers all else.
        users: refuses users other than root.
        status: of Raft, now.
        identities: writes who uses the member, as metrics.
        pprof: whether profiles are given out (``--enable-pprof``).
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
        """Write an object with a name a line, sorted, as Go's expvar does."""
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
                return _text(200, profiles.stacks(asyncio.all_tasks(), TASKS_MAX))
            if name == "heap":
                return _text(200, await asyncio.to_thread(profiles.heap))
            return _text(200, await asyncio.to_thread(profiles.folded, await profiles.sample(seconds)))
        except profiles.SamplingError as error:
            return _text(501, f"{error}\n")
        finally:
            self._busy = False


def _seconds(request: HttpRequest) -> float | None:
    """Return how long a profile is to take; None: what was asked for is no such time."""
    text = parse_qs(request.query, keep_blank_values=True).get("seconds", [str(SECONDS_DEFAULT)])[0]
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and 0 < seconds <= SECONDS_MAX else None


def _memory() -> dict[str, int | list[int]]:
    """Memory figures that need no walk: bytes resident, now and at most, and the collector's counts."""
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
    """Return the state of Raft as etcd's ``raft.status`` shows it.

    Arguments:
        status: of this member.
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
