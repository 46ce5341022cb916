"""The small parts of the library, without a cluster: key spaces, conditions, attempts, interrupts, settings."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import itertools
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raftkv import errors
from raftkv.aio import ConfigError, EndpointsFailed, connect, create_revision, lease_of, value, version
from raftkv.client import Client as Core
from raftkv.client import ClientOptions
from raftkv.client.errors import from_status
from raftkv.client.lease import Interrupt
from raftkv.client.rpc import methods
from raftkv.client.rpc.retry import Backoff, is_transient, until_answered
from raftkv.client.scope import Space
from raftkv.pb import kv_pb2, rpc_pb2
from raftkv.rpc.status import RpcError
from tests.client.fakes import FakeCluster


@pytest.mark.parametrize("name", ["arguments", "endpoints", "errors", "scope", "values"])
def test_examples(name):
    tried = doctest.testmod(importlib.import_module(f"raftkv.client.{name}"))
    assert (tried.failed, tried.attempted > 0) == (0, True)


KEYS = st.binary(min_size=1, max_size=4)


@example(prefix=b"p", key=b"a", end=b"\0", whole=False, other=b"q")
@example(prefix=b"p", key=b"a", end=b"", whole=False, other=b"a")
@given(prefix=st.binary(max_size=3), key=KEYS, end=st.none() | st.just(b"") | KEYS, whole=st.booleans(), other=KEYS)
def test_a_view_sees_what_a_store_of_its_own_would_hold(prefix, key, end, whole, other):
    """An interval holds a key in a view exactly if it does without the view; and nothing outside of the view."""
    if whole:
        end = None
    inner = Space().interval(key, end, prefix=whole)
    outer = Space(prefix).interval(key, end, prefix=whole)
    assert holds(outer, prefix + other) == holds(inner, other)
    if not other.startswith(prefix):
        assert not holds(outer, other)


def holds(interval, key):
    first, end = interval
    if not end:
        return key == first
    return key >= first and (end == b"\0" or key < end)


def test_keys_come_back_without_the_prefix():
    kv = kv_pb2.KeyValue(key=b"jobs/a", value=b"1", version=1, create_revision=2, mod_revision=3, lease=4)
    item = Space(b"jo").inside("bs/").key_value(kv)
    assert (item.key, item.value, item.version, item.create_revision, item.mod_revision, item.lease) == (
        b"a", b"1", 1, 2, 3, 4,
    )  # fmt: skip
    event = Space(b"jobs/").event(kv_pb2.Event(type=1, kv=kv, prev_kv=kv))
    assert (event.type, event.key, event.prev_kv.key, event.revision, event.is_create) == (
        "DELETE",
        b"a",
        b"a",
        3,
        False,
    )


def test_conditions_as_messages():
    message = (lease_of("k") != 7).to_message(Space(b"p/"))
    assert (message.key, message.result, message.target, message.lease) == (
        b"p/k", rpc_pb2.Compare.NOT_EQUAL, rpc_pb2.Compare.LEASE, 7,
    )  # fmt: skip
    zero = (version("k") == 0).to_message(Space())
    assert zero.WhichOneof("target_union") == "version"
    spread = (create_revision("a", prefix=True) < 5).to_message(Space())
    assert (spread.key, spread.range_end) == (b"a", b"b")
    assert (value("k") > "x").to_message(Space()).value == b"x"


REFUSED = RpcError(
    errors.UNAVAILABLE, 'connection error: desc = "transport: dial tcp 1.2.3.4:5: connect: refused"', definite=True
)
EXPLAINED = ClientOptions(explain=True)


def ask(cluster, method=methods.PUT, timeout_s=0.1, options=EXPLAINED):
    async def run():
        async with Core(list(cluster.members), options, open_transport=cluster.open) as core:
            return await core.call(method, rpc_pb2.PutRequest(key=b"k"), timeout_s=timeout_s)

    return asyncio.run(run())


def test_every_endpoint_is_named_with_its_reason_and_whether_it_can_have_happened():
    leaderless = RpcError(errors.UNAVAILABLE, "etcdserver: no leader", definite=True)
    with pytest.raises(EndpointsFailed) as raised:
        ask(FakeCluster(a=[REFUSED], b=[leaderless]), timeout_s=1)
    assert str(raised.value) == "no answer within 1 s from a: connect: refused; b: etcdserver: no leader"
    assert raised.value.definite
    lost = RpcError(errors.UNAVAILABLE, "connection lost")
    with pytest.raises(EndpointsFailed) as raised:
        ask(FakeCluster(a=[lost]), methods.RANGE)
    assert not raised.value.definite


def test_a_time_limit_is_told_without_the_noise_of_floats():
    assert str(EndpointsFailed({}, 2.99999, definite=True)) == "no answer within 3 s from any endpoint"
    assert str(EndpointsFailed({}, 0.25, definite=True)) == "no answer within 0.25 s from any endpoint"


def test_timeout_error_names_the_requested_time(monkeypatch):
    """The calls that the first connection took."""
    ticks = itertools.count(100.0)
    monkeypatch.setattr("raftkv.client.rpc.core.monotonic", lambda: next(ticks))
    late = RpcError(errors.DEADLINE_EXCEEDED, "context deadline exceeded")
    with pytest.raises(EndpointsFailed, match=r"^no answer within 60 s from "):
        ask(FakeCluster(a=[late], b=[late]), timeout_s=60)


async def test_an_endpoint_that_is_silent_is_left_by_the_next_call():
    late = RpcError(errors.DEADLINE_EXCEEDED, "context deadline exceeded")
    cluster = FakeCluster(a=[late], b=[rpc_pb2.PutResponse().SerializeToString()])
    async with Core(list(cluster.members), EXPLAINED, open_transport=cluster.open) as core:
        request = rpc_pb2.PutRequest(key=b"k")
        with pytest.raises(
            EndpointsFailed, match=r"^no answer within 5 s from a: connected, but did not answer$"
        ) as raised:
            await core.call(methods.PUT, request, timeout_s=5)
        assert not raised.value.definite
        await core.call(methods.PUT, request, timeout_s=5)
        await asyncio.gather(*(core.call(methods.PUT, request, timeout_s=5) for _ in range(5)))
    assert [len(member.calls) for member in cluster.members.values()] == [1, 6]


async def test_many_calls_that_fail_at_once_leave_an_endpoint_once():
    answer = rpc_pb2.PutResponse().SerializeToString()
    cluster = FakeCluster(a=[REFUSED], b=[answer], c=[answer])
    async with Core(list(cluster.members), EXPLAINED, open_transport=cluster.open) as core:
        await asyncio.gather(*(core.call(methods.PUT, rpc_pb2.PutRequest(), timeout_s=5) for _ in range(10)))
        assert core.endpoint == "b"
    assert not cluster.members["c"].calls


def test_a_given_token_is_used_and_not_renewed():
    stale = RpcError(errors.UNAUTHENTICATED, errors.InvalidAuthTokenError.text)
    cluster = FakeCluster(a=[stale])
    with pytest.raises(errors.InvalidAuthTokenError):
        ask(cluster, options=ClientOptions(token="t"))
    assert [call[2] for call in cluster.members["a"].calls] == [(("token", "t"),)]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"endpoints": ""}, "at least one endpoint must be given"),
        ({"timeout_s": 0}, "timeout_s must be positive, not 0"),
        ({"password": "x"}, "a password needs a user"),
        ({"cert_file": "c.pem"}, "cert_file and key_file belong together; only one is given: c.pem"),
        ({"ca_file": "/none.pem"}, "cannot use the certificates: /none.pem: No such file or directory"),
    ],
)
def test_settings_that_cannot_be_used(settings, text):
    with pytest.raises(ConfigError) as raised:
        connect(**settings)
    assert str(raised.value) == text


def test_waits_grow_to_a_limit_and_begin_again():
    backoff = Backoff(base_s=1.0, max_s=8.0)
    waits = [backoff.next_s() for _ in range(6)]
    assert all(full / 2 <= wait <= full for wait, full in zip(waits, (1, 2, 4, 8, 8, 8), strict=True))
    backoff.reset()
    assert backoff.next_s() <= 1.0


def test_the_numbers_of_the_programs_own_generator_are_not_used_up():
    before = random.getstate()
    Backoff().next_s()
    assert random.getstate() == before, "a training job would not be the same twice"


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (errors.NoLeaderError(), True),
        (errors.TooManyRequestsError(), True),
        (errors.NotSupportedForLearnerError(), True),
        (errors.ContextDeadlineExceededError(), True),
        (from_status(errors.INTERNAL, "stream reset"), True),
        (from_status(errors.CANCELED, "context canceled"), True),
        (from_status(errors.CANCELED, "the client is closed", definite=True), False),
        (errors.NoSpaceError(), False),
        (errors.LeaseNotFoundError(), False),
        (errors.PermissionDeniedError(), False),
        (errors.CompactedError(), False),
    ],
)
def test_transient_failures_are_told_from_refusals(error, passes):
    assert is_transient(error) is passes
    assert is_transient(error, wait_for_room=True) is (passes or isinstance(error, errors.NoSpaceError))


def test_a_step_is_taken_until_it_is_answered():
    troubles = []
    outcomes = [errors.NoLeaderError(), errors.NoLeaderError(), 5]

    async def step():
        if isinstance(outcome := outcomes.pop(0), Exception):
            raise outcome
        return outcome

    assert asyncio.run(until_answered(step, max_wait_s=0.001, on_trouble=troubles.append)) == 5
    assert [str(error) for error in troubles] == ["etcdserver: no leader", "etcdserver: no leader", "None"]
    for limit_s, error in ((None, errors.PermissionDeniedError()), (0.0, errors.NoLeaderError())):
        outcomes.append(error)
        with pytest.raises(type(error)):
            asyncio.run(until_answered(step, limit_s))


class Loss:
    """A resource that can be lost."""

    def __init__(self):
        self.callbacks = []

    def subscribe(self, callback):
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)

    def block(self):
        return Interrupt(self.subscribe, lambda: RuntimeError("lost"))

    def happen(self):
        for callback in list(self.callbacks):
            callback(None)


async def test_an_interrupted_block_ends_with_its_error():
    loss = Loss()

    async def body():
        with loss.block():
            asyncio.get_running_loop().call_soon(loss.happen)
            await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="lost"):
        await body()
    assert not loss.callbacks
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)


async def test_a_cancellation_from_elsewhere_stays_one():
    loss = Loss()

    async def body():
        with loss.block():
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    both = asyncio.create_task(body())
    await asyncio.sleep(0)
    loss.happen()
    both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await both


async def test_task_that_finds_the_loss_by_itself_is_not_cancelled():
    loss = Loss()
    with loss.block() as block:
        loss.happen()
        assert not block.fired
        await asyncio.sleep(0)
