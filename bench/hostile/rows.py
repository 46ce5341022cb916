"""The rows: one kind of attack each, in the order of the table at the end.

An attack is a coroutine function with an attacker as its argument. Code shared by many rows is a function with further
leading arguments, which the table binds with ``partial``.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, repeat
from typing import Any, Final

from bench.hostile.attacker import AUTH, EVERYTHING, KV, Attacker, RawConnection, grpc_request
from raftkv.pb import auth_pb2, rpc_pb2
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.client.stream import ClientStream
from raftkv.rpc.framing import frame as message_of
from raftkv.rpc.http2.hpack import Encoder
from raftkv.rpc.status import RpcError
from tests.rpc import raw

Act = Callable[[Attacker], Awaitable[None]]

_WATCH: Final = "/etcdserverpb.Watch/Watch"
_LEASE: Final = "/etcdserverpb.Lease/"
_MAINTENANCE: Final = "/etcdserverpb.Maintenance/"
_ANSWER_TIMEOUT_S: Final = 60.0
_CONNECT_TIMEOUT_S: Final = 5.0
_RECONNECT_PAUSE_S: Final = 0.01
_FRAMES_PER_WRITE: Final = 1000
_OPERATIONS_MAX: Final = 128
_BURST_BYTES: Final = 400_000
"""Bytes that each connection of a burst delivers at once; the kernel keeps them until the member reads."""
_LEASE_ID: Final = 7_000_000
_TTL_S: Final = 3600
_PASSWORD: Final = "a password of the bench"


async def _nothing(attacker: Attacker) -> None:
    """No preparation."""


@dataclass(frozen=True)
class Row:
    """One kind of attack.

    Attributes:
        name: name for ``--row``.
        what: description for people, at full scale.
        attack: one round of the attack.
        prepare: preparation, which is not measured.
        repeats: whether rounds are repeated until the time is up; False: one round.
        users: whether it needs a cluster with authentication; attacker and honest client are then root.
    """

    name: str
    what: str
    attack: Act
    prepare: Act = _nothing
    repeats: bool = True
    users: bool = False

    async def repeat(self, attacker: Attacker) -> None:
        """Attack until the time is up, or once if rounds are not repeated."""
        await self.attack(attacker)
        while self.repeats and not attacker.is_over():
            await self.attack(attacker)


async def _fill(count: int, least: int, value: bytes, attacker: Attacker) -> None:
    """Write ``count`` keys, see ``Attacker.fill``."""
    await attacker.fill(attacker.count(count, least), value=value)


async def _calls(path: str, request: Any, times: int, attacker: Attacker) -> None:
    """Make the same call ``times`` times, concurrently."""
    await asyncio.gather(*[attacker.call(path, request) for _ in range(times)])


def _each(
    attacker: Attacker, path: str, requests: Iterable[Any], in_flight: int = 32, channel: Channel | None = None
) -> Awaitable[None]:
    """Make the same call with each request."""
    return attacker.each((partial(attacker.call, path, request, channel) for request in requests), in_flight)


# ---- reads over many keys: sorted, counted, hashed


_everything = partial(rpc_pb2.RangeRequest, key=EVERYTHING, range_end=EVERYTHING)
_sorted = partial(_everything, limit=1, sort_order=rpc_pb2.RangeRequest.DESCEND)
_BY_REVISION = _sorted(sort_target=rpc_pb2.RangeRequest.MOD)
_NONE_PASSES = _everything(limit=1, min_create_revision=1 << 60)
"""Nothing is returned: the whole cost is in the scan."""


async def _hashed(attacker: Attacker) -> None:
    await asyncio.gather(
        attacker.call(_MAINTENANCE + "Hash", rpc_pb2.HashRequest()),
        attacker.call(_MAINTENANCE + "HashKV", rpc_pb2.HashKVRequest()),
    )


# ---- writes with expensive work in apply, on every member


_GREATER = rpc_pb2.Compare(
    key=b"fill/", range_end=b"fill0", target=rpc_pb2.Compare.MOD, result=rpc_pb2.Compare.GREATER, mod_revision=0
)
_COMPARES = rpc_pb2.TxnRequest(compare=[_GREATER] * _OPERATIONS_MAX)
"""All conditions hold, so that each examines every key."""
_PUT = rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"fill/00000000", value=b"v"))
_RANGE = rpc_pb2.RequestOp(request_range=_BY_REVISION)
_RANGES = rpc_pb2.TxnRequest(success=[_PUT] + [_RANGE] * (_OPERATIONS_MAX - 1))
"""Sorted ranges, with a put that makes the txn an entry of the log."""
_DELETE_ALL = rpc_pb2.DeleteRangeRequest(key=b"fill/", range_end=b"fill0")


async def _nested(outer: int, middle: int, inner: tuple[int, ...], key_bytes: int, attacker: Attacker) -> None:
    """Put different keys in nested txns, with the given number of operations in each txn of a level.

    The limit of 128 applies to each path from the outermost txn to an operation, not to the total.
    """
    fan_outs = (outer, attacker.count(middle, 2), *inner)
    request = rpc_pb2.TxnRequest()
    layer = [request]
    for fan_out in fan_outs[:-1]:
        layer = [txn.success.add().request_txn for txn in layer for _ in range(fan_out)]
    for number, txn in enumerate(txn for txn in layer for _ in range(fan_outs[-1])):
        txn.success.add().request_put.key = b"n%0*x" % (key_bytes - 1, number)
    await attacker.call(KV + "Txn", request)


async def _nested_deletes(attacker: Attacker) -> None:
    """Deletes of one range in each txn: worst case for a check that compares all pairs."""
    delete = rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=b"none/", range_end=b"none0"))
    inner = rpc_pb2.RequestOp(request_txn=rpc_pb2.TxnRequest(success=[delete] * attacker.count(64, 2)))
    await attacker.call(KV + "Txn", rpc_pb2.TxnRequest(success=[inner] * 64))


async def _churned_and_read(attacker: Attacker) -> None:
    put, delete = rpc_pb2.PutRequest(key=b"churn", value=b"v"), rpc_pb2.DeleteRangeRequest(key=b"churn")
    channel = attacker.channel()

    async def pair() -> None:
        await attacker.call(KV + "Put", put, channel)
        await attacker.call(KV + "DeleteRange", delete, channel)

    await attacker.each((pair for _ in range(attacker.count(40_000, 100))), in_flight=256)
    await _each(attacker, KV + "Range", [_everything(revision=2)] * 100)


# ---- watches: very many on one stream, and a long history


def _watch(key: bytes, range_end: bytes = b"", **options: Any) -> bytes:
    create = rpc_pb2.WatchCreateRequest(key=key, range_end=range_end, **options)
    return rpc_pb2.WatchRequest(create_request=create).SerializeToString()


async def _read(stream: ClientStream, responses: int, attacker: Attacker) -> None:
    """Read a number of answers, or to the end of the stream."""
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            for _ in range(responses):
                message = await stream.receive()
                if message is None:
                    return
                if len(message) < 1000 and (response := rpc_pb2.WatchResponse.FromString(message)).canceled:
                    attacker.refused(response.cancel_reason)
    except TimeoutError:
        attacker.refused("no answer on the watch stream in time")


async def _watchers_then_progress(attacker: Attacker) -> None:
    """Create many watchers, which is part of the attack, then request progress."""
    watchers, asked = attacker.count(200_000, 100), attacker.count(500, 5)
    async with attacker.stream(_WATCH) as stream:
        reading = asyncio.create_task(_read(stream, watchers, attacker))
        for number in range(watchers):
            await stream.send(_watch(b"w%d" % number))
            if number % 1000 == 0:
                await asyncio.sleep(0)
        await reading
        progress = rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest()).SerializeToString()
        reading = asyncio.create_task(_read(stream, asked, attacker))
        for _ in range(asked):
            await stream.send(progress)
        await asyncio.wait_for(reading, _ANSWER_TIMEOUT_S)


async def _fill_history(attacker: Attacker) -> None:
    for round_number in range(2):
        await attacker.fill(attacker.count(100_000, 100), b"history/", b"%d" % round_number * 64)


async def _replay(attacker: Attacker) -> None:
    """Ten connections of ten streams, each from revision 1, all read at full speed."""
    channels = [attacker.channel() for _ in range(10)]

    async def replay(number: int) -> None:
        try:
            async with attacker.stream(_WATCH, channels[number % 10]) as stream:
                await stream.send(_watch(EVERYTHING, EVERYTHING, start_revision=1))
                while not attacker.is_over():
                    if await asyncio.wait_for(stream.receive(), _ANSWER_TIMEOUT_S) is None:
                        return
        except TimeoutError:
            attacker.refused("no event of the history in time")

    await asyncio.gather(*[replay(number) for number in range(100)])


async def _unread(attacker: Attacker) -> None:
    """A thousand watchers of one key that is being written; their clients read nothing."""
    channels, puts = [attacker.channel() for _ in range(10)], attacker.channel()
    streams = [channels[number % 10].stream(_WATCH) for number in range(attacker.count(1000, 10))]
    try:
        for stream in streams:
            await stream.send(_watch(b"unread", prev_kv=True))
        while not attacker.is_over():
            await attacker.call(KV + "Put", rpc_pb2.PutRequest(key=b"unread", value=b"v" * 100_000), puts)
    except RpcError as error:
        attacker.refused(str(error))
    finally:
        for stream in streams:
            stream.cancel()


async def _delete_watched(attacker: Attacker) -> None:
    """Ten watchers of all deleted keys, half of them with previous values; everything is read."""
    channels = [attacker.channel() for _ in range(5)]
    async with AsyncExitStack() as stack:
        reading = []
        for number in range(10):
            stream = await stack.enter_async_context(channels[number % 5].stream(_WATCH))
            await stream.send(_watch(b"fill/", b"fill0", prev_kv=number % 2 == 0))
            await _read(stream, 1, attacker)
            reading.append(asyncio.create_task(_read(stream, 1, attacker)))
        await attacker.call(KV + "DeleteRange", _DELETE_ALL)
        await asyncio.gather(*reading)


# ---- leases: very many, and one with very many keys


async def _lease_with_keys(attacker: Attacker) -> None:
    await attacker.must(_LEASE + "LeaseGrant", rpc_pb2.LeaseGrantRequest(ID=_LEASE_ID, TTL=_TTL_S))
    await attacker.fill(attacker.count(50_000, 100), b"leased/", lease=_LEASE_ID)


async def _revoke(attacker: Attacker) -> None:
    await _calls(_LEASE + "LeaseTimeToLive", rpc_pb2.LeaseTimeToLiveRequest(ID=_LEASE_ID, keys=True), 16, attacker)
    await attacker.call(_LEASE + "LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=_LEASE_ID))


async def _grant_many(attacker: Attacker) -> None:
    numbers = range(attacker.count(100_000, 100))
    grants = (rpc_pb2.LeaseGrantRequest(ID=_LEASE_ID + number, TTL=_TTL_S) for number in numbers)
    await _each(attacker, _LEASE + "LeaseGrant", grants, 500)
    await _each(attacker, _LEASE + "LeaseLeases", [rpc_pb2.LeaseLeasesRequest()] * 20)


# ---- hand-written frames: floods of small ones, and answers that cannot be sent


async def _connect(attacker: Attacker, window_bytes: int | None = None) -> RawConnection:
    """Connect; raise OSError (TimeoutError is a subclass) after a pause if the member does not accept."""
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            return await attacker.connect(window_bytes)
    except OSError as error:
        attacker.refused(f"connect: {error.strerror or 'timed out'}")
        await asyncio.sleep(0.1)
        raise


@asynccontextmanager
async def _opened(
    attacker: Attacker, count: int, window_bytes: int | None = None, bytes_per_s: float | None = None
) -> AsyncIterator[list[RawConnection]]:
    """Open ``count`` connections, or as many as the member accepts, and close them at the end of the block.

    Answers are read, at a limited rate if one is given, and discarded.
    """
    connections: list[RawConnection] = []
    try:
        with suppress(OSError):
            while len(connections) < count:
                connections.append(await _connect(attacker, window_bytes))
                connections[-1].discard_answers(bytes_per_s)
        yield connections
    finally:
        for connection in connections:
            connection.close()


async def _flood(pieces: Callable[[], Iterable[bytes]], attacker: Attacker) -> None:
    """Send pieces as fast as the member accepts them, reconnecting each time the member closes the connection."""
    while not attacker.is_over():
        await asyncio.sleep(_RECONNECT_PAUSE_S)
        async with _opened(attacker, 1) as connections:
            for connection in connections:
                await connection.send_until(pieces(), attacker.until)
                attacker.refused("connection closed")


def _again(frames: bytes, first: bytes = b"") -> Act:
    """Return a flood of the same frames."""
    return partial(_flood, lambda: chain([first], repeat(frames * _FRAMES_PER_WRITE)))


def _of_calls(call: Callable[[int], bytes], ids_each: int, at_once: int) -> Act:
    """Return a flood of calls; stream ids cannot be reused on a connection, so each call has a new one."""
    firsts = partial(count, 1, ids_each * at_once)
    return partial(
        _flood,
        lambda: (b"".join(map(call, range(first, first + ids_each * at_once, ids_each))) for first in firsts()),
    )


def _window_update(stream_id: int) -> bytes:
    return raw.frame(raw.WINDOW_UPDATE, 0, stream_id, (1).to_bytes(4, "big"))


_TINY_HEAD = raw.headers(1, raw.grpc_headers(KV + "Put")) + raw.message(1, b"\0" + (1 << 20).to_bytes(4, "big"))
"""The beginning of a message of 1 MB; its bytes follow one per frame until the window is full; then a new
connection."""


def _reset_call(stream_id: int) -> bytes:
    return grpc_request(stream_id, KV + "Range", _everything(limit=10)) + raw.reset(stream_id)


async def _packed(attacker: Attacker) -> None:
    """Messages of 2 MB that are 2 KB on the wire, one after another: puts, and requests of keep-alive streams."""
    data = gzip.compress(rpc_pb2.PutRequest(key=b"k", value=bytes(2_000_000)).SerializeToString())
    message = b"\1" + len(data).to_bytes(4, "big") + data
    extra = (b"grpc-encoding", b"gzip")
    put, keep = (raw.grpc_headers(path, extra) for path in (KV + "Put", _LEASE + "LeaseKeepAlive"))

    def calls(number: int) -> bytes:
        puts = raw.headers(number, put) + raw.message(number, message, raw.END_STREAM)
        return puts + raw.headers(number + 2, keep) + raw.message(number + 2, message * 7) + raw.reset(number + 2)

    flood = _of_calls(calls, 4, 10)
    await asyncio.gather(*[flood(attacker) for _ in range(attacker.count(20, 5))])


async def _closed_window(attacker: Attacker) -> None:
    """Full reads whose answers get no window: 500 requests, 74 KB in total, for 10 GB of answers."""
    async with _opened(attacker, 1, window_bytes=0) as (connection,):
        for number in range(attacker.count(100, 10)):
            await connection.send(grpc_request(2 * number + 1, KV + "Range", _everything()))
        await attacker.until_over()


async def _slow_readers(attacker: Attacker) -> None:
    """Twenty connections that request every large value and read 200 KB per second."""
    async with _opened(attacker, 20, 1 << 20, bytes_per_s=200_000) as connections:
        for connection in connections:
            for number in range(attacker.count(1_000, 5)):
                request = rpc_pb2.RangeRequest(key=b"fill/%08d" % number)
                if not await connection.send(grpc_request(2 * number + 1, KV + "Range", request)):
                    break
        await attacker.until_over()


async def _halves(attacker: Attacker) -> None:
    """Ten connections with a hundred unfinished puts of 1 MB each."""
    body = b"\0" + (1_000_000).to_bytes(4, "big") + b"x" * 16_000
    async with _opened(attacker, 10) as connections:
        for connection in connections:
            for stream_id in range(1, 2 * attacker.count(100, 5), 2):
                frames = raw.headers(stream_id, raw.grpc_headers(KV + "Put")) + raw.message(stream_id, body)
                if not await connection.send(frames):
                    attacker.refused("connection closed")
                    break
        await attacker.until_over()


# ---- very many small requests at once, on many connections


def _burst(method: str, request: Any, size_bytes: int) -> bytes:
    """Return ``size_bytes`` bytes of the same request; from the second on, its header takes only a few octets."""
    fields = raw.grpc_headers(KV + method)
    encoder = Encoder(frozenset(name for name, _ in fields))
    body = message_of(request.SerializeToString())
    found = bytearray()
    stream_id = 1
    while len(found) < size_bytes:
        head = raw.frame(raw.HEADERS, raw.END_HEADERS, stream_id, encoder.encode(fields))
        found += head + raw.message(stream_id, body, raw.END_STREAM)
        stream_id += 2
    return bytes(found)


async def _bursts(method: str, request: Any, attacker: Attacker) -> None:
    burst = _burst(method, request, attacker.count(_BURST_BYTES, 4_000))
    while not attacker.is_over():
        async with _opened(attacker, attacker.count(100, 5)) as connections:
            await asyncio.gather(*[connection.send(burst) for connection in connections])
            await asyncio.sleep(0.5)


_TXN = rpc_pb2.TxnRequest(
    success=[rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"burst/%d" % number)) for number in range(40)]
)


# ---- connections: very many idle ones, and very many short ones


async def _idle_and_churn(attacker: Attacker) -> None:
    """A thousand idle connections, and concurrent handshakes that end at once."""

    async def churn() -> None:
        while not attacker.is_over():
            with suppress(OSError):
                (await _connect(attacker)).close()
            await asyncio.sleep(0.001)

    async with _opened(attacker, attacker.count(1_000, 5)):
        await asyncio.gather(*[churn() for _ in range(16)])


# ---- users, roles and tokens: logins that cost a hash each, very many permissions, changes with many watches


async def _two_users(attacker: Attacker) -> None:
    users = (rpc_pb2.AuthUserAddRequest(name=name, password=_PASSWORD) for name in ("u0", "u1"))
    await _each(attacker, AUTH + "UserAdd", users, 1)


def _login(name: str, password: str = _PASSWORD) -> rpc_pb2.AuthenticateRequest:
    return rpc_pb2.AuthenticateRequest(name=name, password=password)


async def _logins(attacker: Attacker) -> None:
    """Wrong and right passwords, of existing and unknown users."""
    numbers = range(attacker.count(10_000, 4))
    logins = (_login(f"u{number % 20}", "wrong" if number % 2 else _PASSWORD) for number in numbers)
    await _each(attacker, AUTH + "Authenticate", logins, 500)


def _permission(key: bytes) -> auth_pb2.Permission:
    return auth_pb2.Permission(permType=auth_pb2.Permission.READWRITE, key=key)


def _grants(role: str, permissions: Iterable[Any]) -> Iterable[Any]:
    return (rpc_pb2.AuthRoleGrantPermissionRequest(name=role, perm=one) for one in permissions)


async def _permissions(attacker: Attacker) -> None:
    """Grant a role a million keys, each slightly different from the last, until this is refused; then one of 1 MB."""
    await attacker.call(AUTH + "RoleAdd", rpc_pb2.AuthRoleAddRequest(name="wide"))
    many = (_permission(b"%08d" % (2 * number)) for number in range(attacker.count(11_000, 10)))
    long = (_permission(b"%02d" % number + b"k" * 1_000_000) for number in range(attacker.count(20, 1)))
    for permissions, in_flight in ((many, 1), (long, 32)):
        await _each(attacker, AUTH + "RoleGrantPermission", _grants("wide", permissions), in_flight)
    asked = [rpc_pb2.AuthRoleGetRequest(role="wide")] * attacker.count(50, 1)
    await _each(attacker, AUTH + "RoleGet", asked)


async def _users_of_one_role(attacker: Attacker) -> None:
    """Change a role of thousands of users; each change affects all of them.

    The changes are sequential, because each outdates the auth revision with which concurrent ones were admitted.
    """
    await attacker.call(AUTH + "RoleAdd", rpc_pb2.AuthRoleAddRequest(name="all"))
    names = [f"all{number}" for number in range(attacker.count(2_000, 5))]
    users = (rpc_pb2.AuthUserAddRequest(name=name, options={"no_password": True}) for name in names)
    await _each(attacker, AUTH + "UserAdd", users, 1)
    grants = (rpc_pb2.AuthUserGrantRoleRequest(user=name, role="all") for name in names)
    await _each(attacker, AUTH + "UserGrantRole", grants, 1)


async def _change_role(attacker: Attacker) -> None:
    await _each(attacker, AUTH + "RoleGrantPermission", _grants("all", map(_permission, (b"a", b"b", b"c"))), 1)
    await attacker.call(AUTH + "UserList", rpc_pb2.AuthUserListRequest())
    await attacker.call(AUTH + "RoleDelete", rpc_pb2.AuthRoleDeleteRequest(role="all"))


async def _watches_and_changes(attacker: Attacker) -> None:
    """Many watches, and repeated changes of permissions: each change makes the member check every watch again."""

    async def drain(stream: ClientStream) -> None:
        while await stream.receive() is not None:
            pass

    async with attacker.stream(_WATCH, attacker.channel()) as stream:
        reading = asyncio.create_task(drain(stream))
        for _ in range(attacker.count(10_000, 10)):
            await stream.send(_watch(b"watched", b"watchee"))
        number = 0
        while not attacker.is_over():
            number += 1
            await attacker.call(AUTH + "RoleAdd", rpc_pb2.AuthRoleAddRequest(name=f"change{number}"))
            await attacker.call(AUTH + "RoleDelete", rpc_pb2.AuthRoleDeleteRequest(role=f"change{number}"))
        reading.cancel()


# ---- the table

_of_users = partial(Row, repeats=False, users=True)
_once = partial(Row, repeats=False)
_fill_20k, _fill_50k, _fill_300k = (partial(_fill, count, 100, b"v" * 16) for count in (20_000, 50_000, 300_000))
_fill_20mb, _fill_1gb = partial(_fill, 2_000, 10, b"v" * 10_000), partial(_fill, 1_000, 5, b"v" * 1_000_000)
_ranges, _txns = partial(partial, _calls, KV + "Range"), partial(partial, _calls, KV + "Txn")
_small_read = rpc_pb2.RangeRequest(key=b"a", serializable=True)
_small_put = rpc_pb2.PutRequest(key=b"burst/a", value=b"v")
_stream_head = raw.headers(1, raw.grpc_headers(_WATCH))

ROWS: Final = (
    Row("sort-modify", "range sorted by MODIFY, limit 1, over 300,000 keys, in a loop",
        _ranges(_BY_REVISION, 1), _fill_300k),
    Row("sort-50", "50 sorted ranges at once over 50,000 keys", _ranges(_BY_REVISION, 50), _fill_50k),
    Row("sort-value", "4 ranges at once sorted by VALUE over 50,000 keys",
        _ranges(_sorted(sort_target=rpc_pb2.RangeRequest.VALUE), 4), _fill_50k),
    Row("filter", "4 ranges at once of which no key of 300,000 passes the filter",
        _ranges(_NONE_PASSES, 4), _fill_300k),
    Row("count-only", "64 counts at once of 300,000 keys", _ranges(_everything(count_only=True), 64), _fill_300k),
    Row("hash", "Hash and HashKV of 300,000 keys in a loop", _hashed, _fill_300k),
    Row("txn-compares", "a txn of 128 compares over 20,000 keys, in a loop", _txns(_COMPARES, 1),
        _fill_20k),
    Row("txn-ranges", "a txn of a put and 127 sorted ranges over 20,000 keys, in a loop",
        _txns(_RANGES, 1), _fill_20k),
    _once("delete-300k", "delete of 300,000 keys in one entry",
          partial(_calls, KV + "DeleteRange", _DELETE_ALL, 1), _fill_300k),
    Row("txn-nested", "a nested txn of 64 x 64 puts (188 KB), in a loop", partial(_nested, 64, 64, (), 40)),
    Row("txn-nested-many", "a nested txn of 43 x 43 x 42 puts (1 MB), in a loop", partial(_nested, 43, 43, (42,), 6)),
    Row("txn-nested-deletes", "a nested txn of 64 x 64 equal range deletes, in a loop", _nested_deletes),
    _once("churn-key", "put and delete of one key 40,000 times, then read", _churned_and_read),
    _once("watch-progress", "500 progress requests on a stream with 200,000 watchers", _watchers_then_progress),
    Row("watch-history", "100 watches of everything from revision 1 over 200,000 events", _replay, _fill_history),
    _once("delete-300k-watched", "delete of 300,000 keys in one entry, which 10 watch, half with previous values",
          _delete_watched, _fill_300k),
    Row("watch-unread", "1,000 watchers of a key of 100 kB that is written, nothing is read", _unread),
    _once("lease-50k-keys", "a lease with 50,000 keys asked for its keys, then revoked", _revoke, _lease_with_keys),
    _once("leases-100k", "100,000 leases granted, then all listed 20 times", _grant_many),
    Row("flood-ping", "PING frames as fast as they are taken",
        _again(raw.frame(raw.PING, 0, 0, b"12345678"))),
    Row("flood-settings", "SETTINGS frames as fast as they are taken",
        _again(raw.settings((3, 100)))),
    Row("flood-window-update", "WINDOW_UPDATE frames of one byte as fast as they are taken",
        _again(_window_update(0) + _window_update(1), _stream_head)),
    Row("flood-tiny-data", "DATA frames of one byte as fast as they are taken",
        _again(raw.message(1, b"x"), _TINY_HEAD)),
    Row("flood-reset", "requests that are reset at once, as fast as they are taken",
        _of_calls(_reset_call, 2, 100)),
    Row("closed-window", "100 reads of 20 MB each that have no window for the answers", _closed_window, _fill_20mb),
    Row("slow-readers", "20 clients read 1,000 values of 1 MB, 200 KB a second", _slow_readers, _fill_1gb),
    Row("gzip", "20 connections with compressed messages of 2 KB that are 2 MB", _packed),
    Row("unfinished", "1,000 puts of 1 MB of which 16 KB come", _halves),
    Row("burst-ranges", "100 connections that each bring 400 KB of small serializable reads at once",
        partial(_bursts, "Range", _small_read)),
    Row("burst-puts", "100 connections that each bring 400 KB of small puts at once",
        partial(_bursts, "Put", _small_put)),
    Row("burst-txns", "100 connections that each bring 400 KB of txns of 40 puts at once",
        partial(_bursts, "Txn", _TXN)),
    Row("connections", "1,000 idle connections, and handshakes without end", _idle_and_churn),
    _of_users("logins-10k", "10,000 logins at once, half of them wrong", _logins, _two_users),
    _of_users("permissions", "a role of very many, and very long, permissions", _permissions),
    _of_users("role-of-2k-users", "a role that 2,000 users have is changed and deleted", _change_role,
              _users_of_one_role),
    _of_users("watches-10k-changes", "roles change while 10,000 watches are open", _watches_and_changes),
)  # fmt: skip
