"""The stubs for grpcio: the same answers and errors as the library's, row by row, on ``grpc`` and on ``grpc.aio``."""

from __future__ import annotations

import ast
import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest

from raftkv import errors, grpcio
from raftkv.client import Client
from raftkv.client.errors import ConnectionLost, MessageTooLarge, ReceivedTooLarge, WrongPort
from raftkv.client.rpc import methods
from raftkv.client.rpc.methods import StreamMethod
from raftkv.pb import admin_pb2, election_pb2, health_pb2, lock_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from tests.procs import RAFTKV, Cluster

TIMEOUT_S = 120.0


class Row(NamedTuple):
    """A call: class of the service, raftkv's name of the method, and the request."""

    service: str
    method: str
    requests: tuple[Any, ...]


def row(service: str, method: str, *requests: Any) -> Row:
    return Row(service, method, requests)


def _put_op(key: bytes) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=b"t"))


def _watch(**fields: Any) -> rpc_pb2.WatchRequest:
    return rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(**fields))


TABLE = (
    row("KV", "put", rpc_pb2.PutRequest(key=b"a", value=b"1")),
    row("KV", "put", rpc_pb2.PutRequest(key=b"a", value=b"2", prev_kv=True)),
    row("KV", "put", rpc_pb2.PutRequest(value=b"1")),
    row("KV", "put", rpc_pb2.PutRequest(key=b"none", ignore_value=True)),
    row("KV", "put", rpc_pb2.PutRequest(key=b"a", lease=99)),
    row("KV", "put", rpc_pb2.PutRequest(key=b"a", value=bytes(1_700_000))),
    row("KV", "put", rpc_pb2.PutRequest(key=b"large", value=bytes(1_000_000))),
    row("KV", "range", rpc_pb2.RangeRequest(key=b"a", range_end=b"m")),
    row("KV", "range", rpc_pb2.RangeRequest(key=b"a", revision=99)),
    row("KV", "range", rpc_pb2.RangeRequest(key=b"a", sort_target=9)),
    row("KV", "range_stream", rpc_pb2.RangeRequest(key=b"\0", range_end=b"\0")),
    row("KV", "range_stream", rpc_pb2.RangeRequest(key=b"a", range_end=b"z", sort_order=rpc_pb2.RangeRequest.DESCEND)),
    row("KV", "txn", rpc_pb2.TxnRequest(success=[_put_op(b"t"), _put_op(b"u")])),
    row("KV", "txn", rpc_pb2.TxnRequest(success=[_put_op(b"t"), _put_op(b"t")])),
    row("KV", "txn", rpc_pb2.TxnRequest(success=[_put_op(b"%d" % n) for n in range(129)])),
    row("KV", "delete_range", rpc_pb2.DeleteRangeRequest(key=b"t", prev_kv=True)),
    row("KV", "compact", rpc_pb2.CompactionRequest(revision=3)),
    row("KV", "compact", rpc_pb2.CompactionRequest(revision=3)),
    row("KV", "range", rpc_pb2.RangeRequest(key=b"a", revision=2)),
    row("Watch", "watch", _watch(key=b"a", start_revision=2)),
    row("Watch", "watch", _watch(key=b"b", range_end=b"a"), _watch(key=b"a")),
    row("Watch", "watch", _watch(key=b"a", watch_id=5), _watch(key=b"a", watch_id=5)),
    row("Lease", "lease_grant", rpc_pb2.LeaseGrantRequest(ID=7, TTL=600)),
    row("Lease", "lease_grant", rpc_pb2.LeaseGrantRequest(ID=7, TTL=600)),
    row("Lease", "lease_grant", rpc_pb2.LeaseGrantRequest(TTL=10**12)),
    row("Lease", "lease_keep_alive", rpc_pb2.LeaseKeepAliveRequest(ID=7)),
    row("Lease", "lease_keep_alive", rpc_pb2.LeaseKeepAliveRequest(ID=8)),
    row("Lease", "lease_leases", rpc_pb2.LeaseLeasesRequest()),
    row("Lease", "lease_time_to_live", rpc_pb2.LeaseTimeToLiveRequest(ID=8)),
    row("Lease", "lease_revoke", rpc_pb2.LeaseRevokeRequest(ID=7)),
    row("Lease", "lease_revoke", rpc_pb2.LeaseRevokeRequest(ID=7)),
    row("Cluster", "member_add", rpc_pb2.MemberAddRequest(peerURLs=["nonsense"])),
    row("Cluster", "member_remove", rpc_pb2.MemberRemoveRequest(ID=1)),
    row("Cluster", "member_promote", rpc_pb2.MemberPromoteRequest(ID=1)),
    row("Maintenance", "alarm", rpc_pb2.AlarmRequest()),
    row("Maintenance", "hash_kv", rpc_pb2.HashKVRequest()),
    row("Maintenance", "move_leader", rpc_pb2.MoveLeaderRequest(targetID=1)),
    row("Maintenance", "downgrade", rpc_pb2.DowngradeRequest(version="nonsense")),
    row("Auth", "authenticate", rpc_pb2.AuthenticateRequest(name="root", password="secret")),
    row("Auth", "auth_enable", rpc_pb2.AuthEnableRequest()),
    row("Auth", "user_add", rpc_pb2.AuthUserAddRequest(name="root", password="secret")),
    row("Auth", "user_add", rpc_pb2.AuthUserAddRequest(name="root", password="secret")),
    row("Auth", "user_get", rpc_pb2.AuthUserGetRequest(name="nobody")),
    row("Auth", "role_add", rpc_pb2.AuthRoleAddRequest(name="reader")),
    row(
        "Auth",
        "role_grant_permission",
        rpc_pb2.AuthRoleGrantPermissionRequest(name="reader", perm={"key": b"b", "range_end": b"a"}),
    ),
    row("Auth", "role_get", rpc_pb2.AuthRoleGetRequest(role="root")),
    row("Auth", "auth_status", rpc_pb2.AuthStatusRequest()),
    row("Lock", "unlock", lock_pb2.UnlockRequest(key=b"none")),
    row("Lock", "lock", lock_pb2.LockRequest(name=b"name", lease=99)),
    row("Election", "leader", election_pb2.LeaderRequest(name=b"none")),
    row("Election", "proclaim", election_pb2.ProclaimRequest()),
    row("Health", "check", health_pb2.HealthCheckRequest(service="none")),
    row("Admin", "quota_set", admin_pb2.QuotaSetRequest(prefix=b"q/", keys_max=1)),
    row("KV", "put", rpc_pb2.PutRequest(key=b"q/1")),
    row("KV", "put", rpc_pb2.PutRequest(key=b"q/2")),
    row("Admin", "quota_list", admin_pb2.QuotaListRequest()),
    row("Admin", "quota_remove", admin_pb2.QuotaRemoveRequest(prefix=b"none/")),
)
"""Played in this order, to one member for each face."""


@pytest.fixture(scope="module")
def members() -> Iterator[list[str]]:
    with Cluster(RAFTKV) as first, Cluster(RAFTKV) as second, Cluster(RAFTKV) as third:
        yield [one.endpoints[0] for one in (first, second, third)]


def _told(message: Any) -> str:
    """A message, without what each member makes up."""
    for part in (message, getattr(message, "range_response", message)):
        if hasattr(part, "header") and part.HasField("header"):
            for name in ("cluster_id", "member_id", "raft_term"):
                part.header.ClearField(name)
    return f"{message.DESCRIPTOR.full_name}: {message}"


def _failed(error: errors.StatusError) -> tuple[Any, ...]:
    return type(error), error.code, str(error), error.definite, grpcio.is_transient(error)


def _path(row: Row) -> tuple[str, Any]:
    service = next(found for name, found in SERVICES.items() if name.endswith(f".{row.service}"))
    method = next(one for name, one in service.items() if name.lower() == row.method.replace("_", ""))
    return method.path, method


async def _by_library(endpoint: str) -> list[Any]:
    told: list[Any] = []
    async with Client([endpoint]) as client:
        for one in TABLE:
            path, method = _path(one)
            try:
                if method.server_streaming:
                    told.append(await _streamed(client, StreamMethod(path, method.response), one))
                else:
                    kind = methods.Method(path, method.response, repeatable=False)
                    told.append(_told(await client.call(kind, one.requests[0], timeout_s=TIMEOUT_S)))
            except errors.StatusError as error:
                told.append(_failed(error))
    return told


async def _streamed(client: Client, method: StreamMethod[Any], row: Row) -> list[str]:
    stream = await client.stream(method, timeout_s=TIMEOUT_S)
    try:
        for request in row.requests:
            await stream.send(request)
        if row.method != "watch":
            stream.half_close()
        told = []
        while (answer := await stream.receive()) is not None:
            told.append(_told(answer))
            if _is_last(row, len(told)):
                break
        return told
    finally:
        stream.cancel()


def _is_last(row: Row, count: int) -> bool:
    """Whether all was told that the requests of a watch bring at once."""
    return row.method == "watch" and count == 2


def _by_stubs(endpoint: str) -> list[Any]:
    told: list[Any] = []
    with grpc.insecure_channel(endpoint, options=grpcio.OPTIONS) as channel:
        for one in TABLE:
            call = getattr(getattr(grpcio, one.service)(channel), one.method)
            try:
                if isinstance(call, grpcio.Unary):
                    told.append(_told(call(one.requests[0], TIMEOUT_S)))
                else:
                    told.append(_iterated(call, one))
            except errors.StatusError as error:
                told.append(_failed(error))
    return told


def _iterated(call: Any, row: Row) -> list[str]:
    is_open = futures.Future[None]()

    def requests() -> Iterator[Any]:
        yield from row.requests
        if row.method == "watch":
            is_open.result(TIMEOUT_S)

    told: list[str] = []
    try:
        with call(row.requests[0] if row.service == "KV" else requests(), TIMEOUT_S) as answers:
            for answer in answers:
                told.append(_told(answer))
                if _is_last(row, len(told)):
                    answers.cancel()
    finally:
        is_open.set_result(None)
    return told


async def _by_aio_stubs(endpoint: str) -> list[Any]:
    told: list[Any] = []
    async with grpc.aio.insecure_channel(endpoint, options=grpcio.OPTIONS) as channel:
        for one in TABLE:
            call = getattr(getattr(grpcio.aio, one.service)(channel), one.method)
            try:
                if isinstance(call, grpcio.AsyncUnary):
                    told.append(_told(await call(one.requests[0], TIMEOUT_S)))
                else:
                    told.append(await _awaited(call, one))
            except errors.StatusError as error:
                told.append(_failed(error))
    return told


async def _awaited(call: Any, row: Row) -> list[str]:
    async def requests() -> AsyncIterator[Any]:
        for request in row.requests:
            yield request
        if row.method == "watch":
            await asyncio.Event().wait()

    told: list[str] = []
    async with call(row.requests[0] if row.service == "KV" else requests(), TIMEOUT_S) as answers:
        async for answer in answers:
            told.append(_told(answer))
            if _is_last(row, len(told)):
                answers.cancel()
    return told


@pytest.mark.long
def test_stubs_answer_as_the_library_does(members: list[str]) -> None:
    by_library = asyncio.run(_by_library(members[0]))
    assert len({one[0] for one in by_library if isinstance(one, tuple)}) > 20, "many kinds of errors"
    for answers in (_by_stubs(members[1]), asyncio.run(_by_aio_stubs(members[2]))):
        for one, expected, found in zip(TABLE, by_library, answers, strict=True):
            assert found == expected, one


# -- what is not a member's word -------------------------------------------------------------------------------------


def _call_both(target: str, options: tuple[Any, ...], request: Any, timeout_s: float) -> list[errors.StatusError]:
    """The errors of one put, of both kinds of stubs."""
    with grpc.insecure_channel(target, options=options) as channel, pytest.raises(errors.StatusError) as first:
        grpcio.KV(channel).put(request, timeout_s)

    async def awaited() -> errors.StatusError:
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            with pytest.raises(errors.StatusError) as second:
                await grpcio.aio.KV(channel).put(request, timeout_s)
            return second.value

    return [first.value, asyncio.run(awaited())]


def test_a_call_that_left_nowhere_is_definite() -> None:
    for error in _call_both("127.0.0.1:1", (), rpc_pb2.PutRequest(key=b"k"), TIMEOUT_S):
        assert (error.code, error.definite, grpcio.is_transient(error)) == (errors.UNAVAILABLE, True, True)


class Server(grpc.GenericRpcHandler):
    """Refuses each call a number of times, or never answers it."""

    def __init__(self, refusals: int = 0, answer: Callable[[Any], bytes] | None = None) -> None:
        self.refusals = refusals
        self.seen: list[str] = []
        self.metadata: dict[str, Any] = {}
        self._answer = answer or (lambda context: rpc_pb2.PutResponse().SerializeToString())

    def service(self, details: Any) -> Any:
        self.seen.append(details.method)
        self.metadata = dict(details.invocation_metadata)

        def handle(request: bytes, context: Any) -> bytes:
            if self.seen.count(details.method) <= self.refusals:
                context.abort(grpc.StatusCode.UNAVAILABLE, errors.NoLeaderError.text)
            return self._answer(context)

        return grpc.unary_unary_rpc_method_handler(handle)

    def start(self) -> tuple[Any, str]:
        server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(self,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return server, f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("option", "kind"),
    [("grpc.max_receive_message_length", ReceivedTooLarge), ("grpc.max_send_message_length", MessageTooLarge)],
)
def test_limits_of_the_channel_are_the_librarys_errors(option: str, kind: type[errors.StatusError]) -> None:
    server, target = Server(answer=lambda _: bytes(100)).start()
    for error in _call_both(target, ((option, 50),), rpc_pb2.PutRequest(key=b"k" * 100), TIMEOUT_S):
        assert type(error) is kind
        assert "larger than max (" in str(error)
        assert isinstance(error.__cause__, grpc.RpcError)
    server.stop(None).wait()


def test_a_deadline_is_not_definite() -> None:
    def late(context: Any) -> bytes:
        context.add_callback(lambda: None)
        while context.is_active():
            context.time_remaining()
            futures.wait([], timeout=0.01)
        return b""

    server, target = Server(answer=late).start()
    for error in _call_both(target, (), rpc_pb2.PutRequest(key=b"k"), 0.2):
        assert type(error) is errors.ContextDeadlineExceededError
        assert not error.definite
    server.stop(None).wait()


def test_only_repeatable_calls_are_retried() -> None:
    """The library's table of methods says which: grpcio does it, by the options of the channel."""
    handler = Server(refusals=2)
    server, target = handler.start()
    with grpc.insecure_channel(target, options=grpcio.OPTIONS) as channel:
        kv = grpcio.KV(channel)
        kv.range(rpc_pb2.RangeRequest(key=b"k"), TIMEOUT_S)
        for write, request in ((kv.put, rpc_pb2.PutRequest(key=b"k")), (kv.txn, rpc_pb2.TxnRequest())):
            with pytest.raises(errors.NoLeaderError):
                write(request, TIMEOUT_S)
    assert handler.seen == ["/etcdserverpb.KV/Range"] * 3 + ["/etcdserverpb.KV/Put", "/etcdserverpb.KV/Txn"]
    server.stop(None).wait()


def test_repeated_methods_are_the_librarys() -> None:
    (config,) = json.loads(dict(grpcio.OPTIONS)["grpc.service_config"])["methodConfig"]
    names = {f"/{one['service']}/{one['method']}" for one in config["name"]}
    known = [one for one in vars(methods).values() if isinstance(one, methods.Method)]
    assert names == {one.path for one in known if one.repeatable} - {methods.TXN.path}


class Interceptor(grpc.UnaryUnaryClientInterceptor):
    def __init__(self) -> None:
        self.paths: list[str] = []

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        self.paths.append(details.method)
        return continuation(details, request)


def test_interceptors_and_metadata_of_the_program_stay() -> None:
    handler, interceptor = Server(), Interceptor()
    server, target = handler.start()
    with grpc.insecure_channel(target) as channel:
        kv = grpcio.KV(grpc.intercept_channel(channel, interceptor))
        kv.put(rpc_pb2.PutRequest(key=b"k"), TIMEOUT_S, metadata=(("token", "t"),))
        assert kv.put.plain.future(rpc_pb2.PutRequest(key=b"k")).result(TIMEOUT_S) == rpc_pb2.PutResponse()
    assert interceptor.paths == ["/etcdserverpb.KV/Put"] * 2
    assert handler.seen == interceptor.paths
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("code", "text", "kind", "definite"),
    [
        ("UNAVAILABLE", "Socket closed", ConnectionLost, False),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer", ConnectionLost, False),
        ("UNAVAILABLE", "etcdserver: no leader", errors.NoLeaderError, errors.NoLeaderError.definite),
        ("UNAVAILABLE", "failed to connect to all addresses; last error: x", None, True),
        ("UNAVAILABLE", "something else", None, False),
        ("UNIMPLEMENTED", "unknown service etcdserverpb.KV", WrongPort, True),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", errors.ContextDeadlineExceededError, False),
    ],
)
def test_words_of_grpcio(code: str, text: str, kind: type[errors.StatusError] | None, definite: bool) -> None:
    class Failure(grpc.RpcError):
        def code(self) -> Any:
            return getattr(grpc.StatusCode, code)

        def details(self) -> str:
            return text

    error = grpcio.error_of(Failure())
    assert kind is None or type(error) is kind
    assert (error.code, error.definite) == (getattr(grpc.StatusCode, code).value[0], definite)


# -- names, types, and the package without grpcio --------------------------------------------------------------------


def test_stubs_have_the_methods_that_their_types_name() -> None:
    for module in ("services", "aio"):
        source = (Path(grpcio.__file__).parent / f"{module}.pyi").read_text()
        typed = {
            node.name: {line.target.id for line in node.body if isinstance(line, ast.AnnAssign)}
            for node in ast.parse(source).body
            if isinstance(node, ast.ClassDef)
        }
        found = vars(sys.modules[f"raftkv.grpcio.{module}"])
        with grpc.insecure_channel("127.0.0.1:1") as channel:
            assert {name: set(vars(found[name](channel))) for name in typed} == typed
        assert {"KV", "Watch", "Admin"} <= set(typed)
        assert typed["Lease"] >= {"lease_time_to_live", "lease_keep_alive"}


def test_messages_of_other_packages_are_taken() -> None:
    """Two programs' messages of one name live in two pools; their bytes are the same."""

    class Foreign:
        def SerializeToString(self) -> bytes:  # noqa: N802
            return rpc_pb2.PutRequest(key=b"k").SerializeToString()

    server, target = Server().start()
    with grpc.insecure_channel(target) as channel:
        grpcio.KV(channel).put(Foreign(), TIMEOUT_S)  # type: ignore[arg-type]
    server.stop(None).wait()


def test_grpcio_is_needed_by_its_package_alone() -> None:
    program = (
        "import sys; sys.modules['grpc'] = None\n"
        "import raftkv, raftkv.aio, raftkv.client.rpc.core\n"
        "try:\n    import raftkv.grpcio\n"
        "except raftkv.ConfigError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "raftkv.grpcio needs grpcio: pip install 'raftkv[grpcio]'\n"
