"""Each request has its own deadline, also where what its header asks for was found out for another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from raftkv.loop.timers import DeadlineWheel
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.server.budget import AnswerBudget
from raftkv.rpc.server.calls import Environment, Peer, UnaryCall
from raftkv.rpc.server.core import ServerCore
from raftkv.rpc.server.router import Route, Router
from tests.rpc import raw

NOW_S = 1000.0


def _core(calls: list[UnaryCall], clock: Callable[[], float] = lambda: NOW_S) -> ServerCore:
    router, limits = Router(), ServerLimits()
    router.add(Route("/test.Echo/Unary", UnaryCall, lambda call, message: calls.append(call)))
    environment = Environment(
        clock=clock,
        wheel=DeadlineWheel(lambda when: None),
        spawn=asyncio.ensure_future,
        report=lambda path, error: None,
        translate=lambda error: None,
        answers=AnswerBudget(limits),
    )
    core = ServerCore(router, limits, environment, Peer(identity="address 127.0.0.1"))
    core.receive(raw.PREFACE + raw.settings())
    return core


def _ask(stream_id: int, *timeouts: bytes) -> bytes:
    fields = raw.grpc_headers("/test.Echo/Unary", *((b"grpc-timeout", timeout) for timeout in timeouts))
    return raw.headers(stream_id, fields) + raw.message(stream_id, bytes(5), raw.END_STREAM)


def test_deadlines_of_one_kind() -> None:
    calls: list[UnaryCall] = []
    core = _core(calls)
    for number, timeouts in enumerate(((b"1S",), (b"2S",), (), (b"9S", b"3S"))):
        core.receive(_ask(2 * number + 1, *timeouts))
    assert [call.deadline for call in calls] == [NOW_S + 1, NOW_S + 2, None, NOW_S + 3]
    assert [dict(call.headers).get(b"grpc-timeout") for call in calls] == [b"1S", b"2S", None, b"3S"]


def test_request_whose_time_is_over_is_not_executed() -> None:
    calls: list[UnaryCall] = []
    core = _core(calls)
    core.receive(_ask(1, b"0n") + _ask(3, b"00S") + _ask(5, b"1n") + _ask(7, b"1m"))
    assert [call.stream_id for call in calls] == [7]
    assert core.pull(1 << 20).count(b"context deadline exceeded") == 3


def test_call_is_over_when_its_deadline_passes_before_it_is_answered() -> None:
    """A turn ends some of thousands of calls whose deadlines pass together; previously the others were still served."""
    calls: list[UnaryCall] = []
    now_s = [NOW_S]
    core = _core(calls, lambda: now_s[0])
    core.receive(_ask(1, b"1S") + _ask(3) + _ask(5, b"1H"))
    assert [call.cancelled for call in calls] == [False] * 3
    now_s[0] += 1
    assert [call.cancelled for call in calls] == [True, False, False]
    calls[0].expire()
    calls[2].reply(b"")
    now_s[0] += 3600
    assert [call.cancelled for call in calls] == [True, False, False], "one that was answered is not cancelled"


def test_a_malformed_timeout_of_a_kind_that_is_known() -> None:
    calls: list[UnaryCall] = []
    core = _core(calls)
    core.receive(_ask(1, b"1S") + _ask(3, b"soon"))
    assert [call.stream_id for call in calls if not call.done] == [1]
    assert b"malformed grpc-timeout" in core.pull(1 << 20)
