"""Debug pages for operators: access, contents, and one profile at a time."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from raftkv import errors
from raftkv.raft.describe import ProgressStatus, Status
from raftkv.raft.tracker import ProgressState
from raftkv.raft.types import ConfState, StateRole
from raftkv.rpc.server.http import HttpRequest, HttpResponse, text_response
from raftkv.server.http import debug
from raftkv.server.http.debug import DebugService, raft_status
from tests.server.auth.world import World

PROGRESS = ProgressStatus(4, 5, ProgressState.REPLICATE, False, 0, True, False, 0, 0)
STATUS = Status(0xA1, 2, 0xA1, 4, 4, 4, 0xA1, StateRole.LEADER, 0, ConfState(voters=(0xA1,)), {0xA1: PROGRESS})


WHO = 'raftkv_identity_watches{identity="user alice"} 2\n'


async def _else(_request: HttpRequest) -> HttpResponse:
    return text_response(404, "404 page not found")


class Nobody:
    """Users of a cluster without auth."""

    def check_root(self, request: HttpRequest) -> bytes:
        return b""


def service(users: object = Nobody(), *, pprof: bool = True) -> DebugService:
    return DebugService(_else, users, lambda: STATUS, lambda: WHO, pprof=pprof)


async def ask(debug: DebugService, target: str, method: str = "GET", token: str = "") -> HttpResponse:
    headers = (("authorization", token),) if token else ()
    return await debug.handle(HttpRequest(method, target, headers))


def test_vars_have_etcds_form() -> None:
    answer = asyncio.run(ask(service(pprof=False), "/debug/vars"))
    assert (answer.status, dict(answer.headers)) == (200, {"content-type": "application/json; charset=utf-8"})
    values = json.loads(answer.body)
    assert list(values) == ["cmdline", "file_descriptor_limit", "memstats", "raft.status"]
    assert values["cmdline"] == sys.orig_argv
    assert values["memstats"]["Resident"] > 1_000_000
    # As real etcd 3.5.1 showed it, but for the ids.
    assert values["raft.status"] == {
        "id": "a1",
        "term": 2,
        "vote": "a1",
        "commit": 4,
        "lead": "a1",
        "raftState": "StateLeader",
        "applied": 4,
        "progress": {"a1": {"match": 4, "next": 5, "state": "StateReplicate"}},
        "leadtransferee": "0",
    }


def test_every_role_and_state_has_a_name() -> None:
    for role in StateRole:
        for state in ProgressState:
            progress = ProgressStatus(1, 2, state, False, 0, True, False, 0, 0)
            status = Status(1, 1, 0, 1, 1, 1, 0, role, 0, ConfState(), {2: progress})
            assert raft_status(status)["raftState"] == f"State{role.name.title().replace('_C', 'C')}"


def test_identities_are_shown_as_metrics() -> None:
    answer = asyncio.run(ask(service(pprof=False), "/debug/identities"))
    assert (answer.status, answer.body) == (200, WHO.encode())


@pytest.mark.parametrize("path", ["/debug/pprof/", "/debug/pprof/cmdline", "/debug/pprof/goroutine"])
def test_profiles_require_their_flag(path: str) -> None:
    assert asyncio.run(ask(service(pprof=False), path)).status == 404
    assert asyncio.run(ask(service(), path)).status == 200


@pytest.mark.parametrize(
    ("target", "method", "status"),
    [
        ("/debug/vars", "POST", 405),
        ("/debug/vars", "HEAD", 405),
        ("/debug/vars/", "GET", 404),
        ("/debug/pprof/", "HEAD", 200),
        ("/debug/pprof/", "POST", 405),
        ("/debug/pprof/nothing", "GET", 404),
        ("/debug/pprof/profile?seconds=0", "GET", 400),
        ("/debug/pprof/profile?seconds=61", "GET", 400),
        ("/debug/pprof/profile?seconds=nan", "GET", 400),
        ("/debug/pprof/profile?seconds=x", "GET", 400),
        ("/debug/pprof/heap", "GET", 501),
        ("/debug/other", "GET", 404),
    ],
)
def test_refused_debug_requests(target: str, method: str, status: int) -> None:
    assert asyncio.run(ask(service(), target, method)).status == status


async def test_profile_shows_loop_work() -> None:
    task = asyncio.ensure_future(ask(service(), "/debug/pprof/profile?seconds=0.5"))
    begin_s = time.process_time()
    while not task.done() or time.process_time() - begin_s < 0.5:
        _spin()
        await asyncio.sleep(0)
    answer = await task
    assert answer.status == 200
    assert isinstance(answer.body, bytes)
    parts = (line.rpartition(" ") for line in answer.body.decode().splitlines())
    counts = {stack: int(count) for stack, _, count in parts}
    assert any(stack.endswith("http/test_debug:_spin") for stack in counts), counts


def _spin() -> None:
    sum(range(20_000))


async def test_single_profile_ends_with_its_caller() -> None:
    debug = service()
    first = asyncio.ensure_future(ask(debug, "/debug/pprof/profile?seconds=60"))
    await asyncio.sleep(0)
    for name in ("profile", "goroutine"):
        assert (await ask(debug, f"/debug/pprof/{name}")).status == 503
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await ask(debug, "/debug/pprof/goroutine")).status == 200


def test_nothing_is_left_of_a_profile() -> None:
    assert asyncio.run(ask(service(), "/debug/pprof/profile?seconds=0.01")).status == 200
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    signal.raise_signal(signal.SIGPROF)  # one that comes late ends nothing


def test_a_loop_that_gets_no_signals_cannot_be_profiled() -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: asyncio.run(ask(service(), "/debug/pprof/profile?seconds=1"))).result()
    assert answer.status == 501


async def test_stacks_of_tasks_that_wait_at_the_same_place_are_one() -> None:
    async def waits(event: asyncio.Event) -> None:
        await event.wait()

    event = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(waits(event)) for _ in range(7)]
        await asyncio.sleep(0)
        text = debug.stacks(tasks, 5)
        event.set()
    assert "thread MainThread\n" in text
    _, _, waiting = text.partition("5 tasks\n")
    assert "in test_stacks_of_tasks_that_wait_at_the_same_place_are_one.<locals>.waits\n" in waiting
    assert "in Event.wait\n" in waiting
    assert text.endswith("2 more tasks\n")


def test_the_heap_where_it_is_traced() -> None:
    tracemalloc.start()
    try:
        kept = [bytes(100_000) for _ in range(100)]
        answer = asyncio.run(ask(service(), "/debug/pprof/heap"))
    finally:
        tracemalloc.stop()
    assert answer.status == 200
    assert isinstance(answer.body, bytes)
    largest = answer.body.decode().splitlines()[1]
    assert int(largest.split()[0]) >= sum(map(len, kept))
    assert "kept = [bytes(100_000)" in largest


async def test_only_root_may_profile_under_auth() -> None:
    world = World()
    debug = service(world.users)
    assert (await ask(debug, "/debug/vars")).status == 200
    world.user("alice", ("READ", b"a", b"b"))
    world.enable()
    for path in ("/debug/vars", "/debug/identities", "/debug/pprof/goroutine"):
        assert (await ask(debug, path)).status == 403
        assert (await ask(debug, path, token="nonsense")).status == 401
        answer = await ask(debug, path, token=world.token("alice"))
        assert (answer.status, answer.body) == (403, f"{errors.PermissionDeniedError.text}\n".encode())
        answer = await ask(debug, path, token=f"Bearer {world.token('root')}")
        assert (answer.status, answer.user) == (200, b"root")


async def test_proxy_certificate_is_not_a_user() -> None:
    """A proxy that is named like root passes on what callers without a token ask (CVE-2018-16886)."""
    world = World()
    world.user("root", role="root")
    world.user("alice")
    world.enable()
    debug, by_root = service(users=world.users), {"subject": ((("commonName", "root"),),)}
    for path in ("/debug/vars", "/debug/identities", "/debug/pprof/cmdline"):
        answer = await debug.handle(HttpRequest("GET", path, certificate=by_root))
        assert (answer.status, answer.body) == (403, f"{errors.UserEmptyError.text}\n".encode())
        for name, status in (("alice", 403), ("root", 200)):
            headers = (("authorization", world.token(name)),)
            answer = await debug.handle(HttpRequest("GET", path, headers, certificate=by_root))
            assert answer.status == status
    request = HttpRequest("GET", "/ui/", certificate=by_root)
    for check in (world.users.check_user, world.users.check_root):
        with pytest.raises(errors.UserEmptyError):
            check(request)


def test_profile_is_withheld_when_caller_lost_root() -> None:
    class Once(Nobody):
        asked = 0

        def check_root(self, request: HttpRequest) -> bytes:
            self.asked += 1
            if self.asked > 1:
                raise errors.PermissionDeniedError
            return b"root"

    answer = asyncio.run(ask(service(users=Once()), "/debug/pprof/profile?seconds=0.01"))
    assert (answer.status, answer.body) == (403, b"etcdserver: permission denied\n")
