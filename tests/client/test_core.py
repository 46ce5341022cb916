"""Failover, retries, deadlines and tokens, on transports with scripted answers."""

from __future__ import annotations

import asyncio
import gc

import pytest

from raftkv import errors
from raftkv.client import Client, ClientOptions
from raftkv.client.errors import UnknownStatus
from raftkv.client.rpc import methods
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError
from tests.client.fakes import FakeCluster, FakeTransport

UNREACHABLE = RpcError(errors.UNAVAILABLE, "connection refused", definite=True)
REFUSED = RpcError(
    errors.UNAVAILABLE, 'connection error: desc = "dial tcp a:1: connect: connection refused"', definite=True
)
LOST = RpcError(errors.UNAVAILABLE, "connection lost")
LEARNER = RpcError(errors.FAILED_PRECONDITION, errors.NotSupportedForLearnerError.text)
GOT = rpc_pb2.RangeResponse(count=1).SerializeToString()
PUT = rpc_pb2.PutResponse().SerializeToString()


def call(cluster, method=methods.RANGE, request=None, timeout_s=5.0, options=None, endpoints=None):
    async def run():
        names = endpoints or list(cluster.members)
        async with Client(names, options, open_transport=cluster.open) as client:
            return await client.call(method, request or rpc_pb2.RangeRequest(key=b"k"), timeout_s=timeout_s)

    return asyncio.run(run())


def test_an_answer_is_parsed_and_connections_are_closed():
    cluster = FakeCluster(a=[GOT])
    assert call(cluster).count == 1
    assert cluster.members["a"].calls[0][:2] == ("/etcdserverpb.KV/Range", b"\n\x01k")
    assert cluster.members["a"].closed


def test_the_next_endpoint_is_asked_when_one_cannot_be_reached():
    cluster = FakeCluster(a=[UNREACHABLE], b=[UNREACHABLE], c=[GOT])
    assert call(cluster).count == 1
    assert [len(member.calls) for member in cluster.members.values()] == [1, 1, 1]


def test_rounds_continue_until_a_member_answers():
    cluster = FakeCluster(a=[UNREACHABLE, REFUSED, REFUSED, GOT])
    assert call(cluster).count == 1


@pytest.mark.parametrize("method", [methods.PUT, methods.TXN, methods.DELETE_RANGE, methods.COMPACT])
def test_a_write_that_may_have_happened_is_not_repeated(method):
    cluster = FakeCluster(a=[LOST, PUT])
    with pytest.raises(UnknownStatus, match=r"^rpc error: code = Unavailable desc = connection lost$") as raised:
        call(cluster, method)
    assert (len(cluster.members["a"].calls), raised.value.definite) == (1, False)


def test_a_write_that_certainly_did_not_happen_is_repeated():
    cluster = FakeCluster(a=[UNREACHABLE, PUT])
    call(cluster, methods.PUT, rpc_pb2.PutRequest(key=b"k"))
    assert len(cluster.members["a"].calls) == 2


def test_a_read_is_repeated():
    cluster = FakeCluster(a=[LOST, RpcError(errors.UNAVAILABLE, "etcdserver: no leader"), GOT])
    assert call(cluster).count == 1


def test_a_refusal_is_told_at_once_and_by_name():
    cluster = FakeCluster(a=[RpcError(errors.OUT_OF_RANGE, errors.CompactedError.text)], b=[GOT])
    with pytest.raises(errors.CompactedError):
        call(cluster)
    assert not cluster.members["b"].calls


@pytest.mark.parametrize("method", [methods.RANGE, methods.PUT])
async def test_a_learner_is_left_for_the_next_endpoint(method):
    """Each call failed there, at once and for ever, with voters among the endpoints."""
    cluster = FakeCluster(a=[LEARNER], b=[b""])
    async with Client(list(cluster.members), open_transport=cluster.open) as client:
        for _ in range(2):
            await client.call(method, rpc_pb2.RangeRequest(key=b"k"), timeout_s=5.0)
    assert [len(member.calls) for member in cluster.members.values()] == [1, 2]


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_learners_only_is_reported(names):
    cluster = FakeCluster(**{name: [UNREACHABLE] if name == "c" else [LEARNER] for name in names})
    with pytest.raises(errors.NotSupportedForLearnerError):
        call(cluster)


def test_the_deadline_bounds_all_attempts():
    with pytest.raises(errors.ContextDeadlineExceededError, match=r"^context deadline exceeded$"):
        call(FakeCluster(a=[UNREACHABLE], b=[LOST]), timeout_s=0.1)


def test_patience_with_refused_connections_ends_when_every_endpoint_refuses():
    cluster = FakeCluster(a=[REFUSED], b=[REFUSED])
    with pytest.raises(errors.ContextDeadlineExceededError, match=r"^context deadline exceeded$"):
        call(cluster, options=ClientOptions(refused_patience_s=0.0), timeout_s=3600.0)
    assert [len(member.calls) for member in cluster.members.values()] == [1, 1]


@pytest.mark.parametrize("other", [UNREACHABLE, LOST])
def test_an_endpoint_that_fails_in_another_way_is_asked_until_the_deadline(other):
    cluster = FakeCluster(a=[REFUSED], b=[other, other, GOT])
    assert call(cluster, options=ClientOptions(refused_patience_s=0.0)).count == 1


def test_call_at_asks_no_other_member():
    cluster = FakeCluster(a=[GOT], b=[UNREACHABLE, GOT])

    async def run():
        async with Client(["a"], open_transport=cluster.open) as client:
            return await client.call_at("b", methods.STATUS, rpc_pb2.StatusRequest(), timeout_s=5)

    asyncio.run(run())
    assert [len(member.calls) for member in cluster.members.values()] == [0, 2]


USER = ClientOptions(user="root", password="secret")


def authenticate(token):
    return rpc_pb2.AuthenticateResponse(token=token).SerializeToString()


def test_a_user_gets_a_token_that_calls_carry():
    cluster = FakeCluster(a=[authenticate("t1"), GOT])
    call(cluster, options=USER)
    login, read = cluster.members["a"].calls
    assert login[0] == "/etcdserverpb.Auth/Authenticate"
    assert rpc_pb2.AuthenticateRequest.FromString(login[1]).password == "secret"
    assert read[2] == (("token", "t1"),)


def test_a_stale_token_is_renewed_once():
    stale = RpcError(errors.UNAUTHENTICATED, errors.InvalidAuthTokenError.text)
    cluster = FakeCluster(a=[authenticate("t1"), stale, authenticate("t2"), GOT])
    assert call(cluster, options=USER).count == 1
    assert cluster.members["a"].calls[-1][2] == (("token", "t2"),)
    with pytest.raises(errors.InvalidAuthTokenError):
        call(FakeCluster(a=[authenticate("t1"), stale, authenticate("t2"), stale]), options=USER)


def test_a_cluster_without_authentication_is_used_without_a_token():
    off = RpcError(errors.FAILED_PRECONDITION, errors.AuthNotEnabledError.text)
    cluster = FakeCluster(a=[off, GOT])
    assert call(cluster, options=USER).count == 1
    assert cluster.members["a"].calls[-1][2] == ()


async def test_many_calls_share_one_authentication():
    """Checking a password costs a member a tenth of a second; a crowd whose token has ended must not ask one by one."""
    stale = RpcError(errors.UNAUTHENTICATED, errors.InvalidAuthTokenError.text)
    logins = []

    def answer(path, message, metadata):
        if path.endswith("Authenticate"):
            logins.append(path)
            return authenticate(f"t{len(logins)}")
        if metadata == (("token", "t1"),) and len(cluster.members["a"].calls) > 5:
            raise stale
        return GOT

    cluster = FakeCluster(a=[answer])
    async with Client(["a"], USER, open_transport=cluster.open) as client:
        request = rpc_pb2.RangeRequest(key=b"k")
        await asyncio.gather(*(client.call(methods.RANGE, request, timeout_s=5) for _ in range(4)))
        await asyncio.gather(*(client.call(methods.RANGE, request, timeout_s=5) for _ in range(20)))
    assert len(logins) == 2


async def test_authentication_that_is_off_is_asked_about_once_and_may_be_switched_on():
    off = RpcError(errors.FAILED_PRECONDITION, errors.AuthNotEnabledError.text)
    on = RpcError(errors.INVALID_ARGUMENT, "etcdserver: user name is empty")
    cluster = FakeCluster(a=[off, GOT, GOT, on, authenticate("t1"), GOT])
    async with Client(["a"], USER, open_transport=cluster.open) as client:
        for _ in range(3):
            await client.call(methods.RANGE, rpc_pb2.RangeRequest(key=b"k"), timeout_s=5)
    paths = [path.rpartition("/")[2] for path, _, _ in cluster.members["a"].calls]
    assert paths == ["Authenticate", "Range", "Range", "Range", "Authenticate", "Range"]


@pytest.mark.parametrize(
    ("method", "is_cancelled"),
    [(methods.RANGE, True), (methods.PUT, True), (methods.TXN, True), (methods.READ_TXN, False)],
)
async def test_a_caller_that_is_cancelled_leaves_at_once_but_a_txn_that_only_reads_runs_on(method, is_cancelled):
    """etcd 3.5.1 ends if such a txn is cancelled while it runs."""
    call = asyncio.get_running_loop().create_future()

    class Transport:
        def unary(self, path, message, timeout_s=None, metadata=()):
            return call

        async def close(self):
            pass

    async with Client(["a"], open_transport=lambda endpoint, options: Transport()) as client:
        waiting = asyncio.create_task(client.call(method, rpc_pb2.TxnRequest(), timeout_s=5))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert call.cancelled() is is_cancelled
        if not is_cancelled:
            call.set_exception(RpcError(errors.UNAVAILABLE, "no caller waits for this"))


class LateTransport(FakeTransport):
    """Fails on command."""

    def __init__(self):
        super().__init__([])
        self.asked, self.let = asyncio.Event(), asyncio.Event()

    async def unary(self, path, message, timeout_s=None, metadata=()):
        self.asked.set()
        await self.let.wait()
        raise LOST


async def test_an_abandoned_call_fails_silently():
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    cluster = FakeCluster(a=[])
    late = cluster.members["a"] = LateTransport()
    async with Client(["a"], open_transport=cluster.open) as client:
        waiting = asyncio.ensure_future(client.call(methods.READ_TXN, rpc_pb2.TxnRequest(), timeout_s=5.0))
        await late.asked.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        late.let.set()
        for _ in range(5):
            await asyncio.sleep(0)
    gc.collect()
    assert told == []
