"""Commands that look at each endpoint: all are asked side by side, dead ones too, and the output keeps their order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from raftkv import errors
from raftkv.cli.ctl.members import ask_each, endpoints_of, find_leader
from raftkv.cli.ctl.session import REFUSED_PATIENCE_S
from raftkv.cli.ctl.session import Session as CtlSession
from raftkv.cli.program import CommandError
from raftkv.client import Client, ClientOptions
from raftkv.client.rpc import methods
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError
from tests.cli.runner import run_ctl
from tests.client.fakes import FakeTransport

NAMES = ("a", "b", "c")
REFUSED = RpcError(
    errors.UNAVAILABLE, 'connection error: desc = "dial tcp b:1: connect: connection refused"', definite=True
)


def status(member_id: int = 1, leader: int = 1) -> bytes:
    header = rpc_pb2.ResponseHeader(member_id=member_id)
    return rpc_pb2.StatusResponse(header=header, leader=leader).SerializeToString()


class Dead(FakeTransport):
    """An endpoint at which nothing listens."""

    def __init__(self) -> None:
        super().__init__([REFUSED])

    async def first_attempt(self) -> bool:
        return False


class Member(FakeTransport):
    """An endpoint that answers a status when others have been asked, too; its other calls must not overlap theirs."""

    def __init__(self, all_asked: asyncio.Barrier, in_turn: asyncio.Semaphore, answer: bytes) -> None:
        super().__init__([answer])
        self._all_asked, self._in_turn = all_asked, in_turn

    async def unary(self, path: str, message: bytes, timeout_s: Any = None, metadata: Any = ()) -> bytes:
        if path == methods.STATUS.path:
            await self._all_asked.wait()
            return await super().unary(path, message, timeout_s, metadata)
        assert not self._in_turn.locked()
        async with self._in_turn:
            return await super().unary(path, message, timeout_s, metadata)


class Silent(FakeTransport):
    """An endpoint that takes calls and never answers."""

    async def unary(self, path: str, message: bytes, timeout_s: Any = None, metadata: Any = ()) -> bytes:
        return await asyncio.get_running_loop().create_future()


class Session:
    """A session of a client whose endpoints are played; ``play`` makes their transports, on the client's loop."""

    endpoints, timeout_s = list(NAMES), 3600.0

    def __init__(self, play: Callable[[], list[FakeTransport]], **options: Any) -> None:
        self._play = play
        self._options = ClientOptions(refused_patience_s=0.0, **options)
        self.members: dict[str, FakeTransport] = {}

    def run(self, use: Callable[[Client], Any]) -> Any:
        async def with_client() -> Any:
            self.members = dict(zip(NAMES, self._play(), strict=True))

            def open_transport(endpoint: Any, options: Any) -> FakeTransport:
                return self.members[endpoint.host]

            async with Client(NAMES, self._options, open_transport=open_transport) as client:
                return await asyncio.wait_for(use(client), 120)

        return asyncio.run(with_client())

    def ask(self, method: Any, request: Any, *, in_turn: bool = False) -> tuple[list[str], list[str]]:
        done: list[str] = []
        session: Any = self
        invocation: Any = {"cluster": False}
        told = done.append if in_turn else None
        answers, errors = ask_each(session, invocation, method, request, "failed: {}", in_turn=told)
        assert done in ([], [answer.endpoint for answer in answers])
        return [answer.endpoint for answer in answers], errors

    def leader(self) -> str | None:
        found = self.run(lambda client: find_leader(client, NAMES, self.timeout_s))
        return found and found[0]


def members(count: int) -> list[FakeTransport]:
    all_asked, in_turn = asyncio.Barrier(count), asyncio.Semaphore(1)
    return [Member(all_asked, in_turn, status()) for _ in range(count)]


def one_dead() -> list[FakeTransport]:
    first, last = members(2)
    return [first, Dead(), last]


def test_all_endpoints_are_asked_side_by_side() -> None:
    session = Session(lambda: members(3))
    assert session.ask(methods.STATUS, rpc_pb2.StatusRequest()) == (list(NAMES), [])


def test_calls_in_turn_never_overlap_and_leave_out_the_dead(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(one_dead)
    done, failures = session.ask(methods.DEFRAGMENT, rpc_pb2.DefragmentRequest(), in_turn=True)
    assert (done, failures) == (["a", "c"], ["context deadline exceeded"])
    status_and_defragment = [methods.STATUS.path, methods.DEFRAGMENT.path]
    assert [[path for path, _, _ in each.calls] for each in session.members.values()] == [
        status_and_defragment,
        [methods.STATUS.path],
        status_and_defragment,
    ]
    assert capsys.readouterr().err.splitlines() == [
        "failed: b (context deadline exceeded)",
        "raftkvctl: no answer from b: connect: connection refused",
    ]


def test_the_token_of_all_calls_comes_from_an_endpoint_that_lives() -> None:
    token = rpc_pb2.AuthenticateResponse(token="t").SerializeToString()
    session = Session(
        lambda: [Dead(), FakeTransport([token, status()]), FakeTransport([status()])], user="root", password="x"
    )
    assert session.ask(methods.STATUS, rpc_pb2.StatusRequest()) == (["b", "c"], ["context deadline exceeded"])
    assert [path for path, _, _ in session.members["a"].calls] == [methods.STATUS.path]


def test_the_leader_is_found_beside_endpoints_that_do_not_answer() -> None:
    assert Session(lambda: [Dead(), Silent([b""]), FakeTransport([status()])]).leader() == "c"


def test_no_leader_is_told_only_if_every_endpoint_answers() -> None:
    def follower() -> FakeTransport:
        return FakeTransport([status(member_id=2)])

    assert Session(lambda: [follower(), follower(), follower()]).leader() is None
    with pytest.raises(errors.ContextDeadlineExceededError):
        Session(lambda: [follower(), Dead(), follower()]).leader()


def test_without_a_quorum_the_members_are_those_that_one_member_lists(capsys: pytest.CaptureFixture[str]) -> None:
    class Call:
        def call(self, method: Any, request: Any) -> rpc_pb2.MemberListResponse:
            if request.linearizable:
                raise CommandError("context deadline exceeded")
            return rpc_pb2.MemberListResponse(members=[rpc_pb2.Member(clientURLs=["http://a:1", "http://a:2"])])

    session: Any = Call()
    invocation: Any = {"cluster": True}
    assert endpoints_of(session, invocation) == ["http://a:1", "http://a:2"]
    assert capsys.readouterr().err.startswith("raftkvctl: no quorum confirms the list of members")


@pytest.mark.parametrize(
    ("words", "environment", "patience_s"),
    [
        (["endpoint", "status"], {}, REFUSED_PATIENCE_S),
        (["endpoint", "hashkv"], {}, REFUSED_PATIENCE_S),
        (["defrag"], {}, REFUSED_PATIENCE_S),
        (["move-leader", "1"], {}, REFUSED_PATIENCE_S),
        (["cluster", "roll", "--restart=true"], {}, REFUSED_PATIENCE_S),
        (["top", "--once"], {}, 0.0),
        (["get", "a"], {}, 2.0),
        (["put", "a", "b", "--dial-timeout=1s"], {}, 1.0),
        (["get", "a", "--command-timeout=9s"], {}, None),
        (["endpoint", "status", "--command-timeout=9s"], {}, None),
        (["endpoint", "status"], {"ETCDCTL_COMMAND_TIMEOUT": "9s"}, None),
    ],
)
def test_a_given_time_limit_holds_for_refused_connections_too(monkeypatch, words, environment, patience_s):
    seen: list[float | None] = []

    def run(session: CtlSession, use: object) -> None:
        seen.append(session.options.refused_patience_s)
        raise CommandError("seen")

    monkeypatch.setattr(CtlSession, "run", run)
    run_ctl(words, environment=environment)
    assert seen == [patience_s]
