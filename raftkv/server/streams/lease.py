"""The Lease service: grant, revoke, keep alive, time to live, leases.

Owns the way of a request through this member, and what other members may ask of it while it leads (``for_members``);
the lessor does the work.

    grant, revoke        through the log, like any write
    keep alive           ``keep_alives``: one callback a message, no task
    time to live         the leader's answer, wherever the client is connected
    leases               what is applied here
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from itertools import chain, repeat
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from raftkv import errors
from raftkv.apply.auth.rights import Left, Rights
from raftkv.apply.wire import Caller, Kind, field, integer
from raftkv.loop.cork import Cork
from raftkv.loop.scheduler import Work, encoded, in_order
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.pb.services import SERVICES, Method
from raftkv.replica.lease.graces import ConnectionLost, Graces
from raftkv.replica.lease.lessor import Lessor
from raftkv.replica.lease.on_leader import RENEW, SHORTEN, TIME_TO_LIVE
from raftkv.replica.node.admission import parse_or_raise, refusals
from raftkv.replica.node.leadership import LeaderGuard
from raftkv.rpc.server.calls import AsyncUnaryHandler, ServerCall, UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.rpc.server.stream import ListenedCall
from raftkv.rpc.shares import Identity, Shares, identity_of, queue_of_call
from raftkv.rpc.status import RpcError
from raftkv.server.auth.guard import LiveCalls
from raftkv.server.services.responder import PendingWrite, Responder, fail, parse
from raftkv.server.streams.keep_alives import WAITING_MAX, KeepAliveStream, MemberBatch

T = TypeVar("T", bound=Any)
LeaderHandler = Callable[[Any], Awaitable[list[bytes]]]
"""Does what only the leader can: from the request to the pieces of the response."""

_log = logging.getLogger(__name__)
_METHODS: Final = SERVICES["etcdserverpb.Lease"]
LEASES_PER_PIECE: Final = 64
"""Leases of a list that are looked at between two pauses: 1 ms."""
KNOWN_MAX: Final = 100_000
"""Requests whose meaning is remembered: a client sends the same few bytes again and again."""

KNOWN_BYTES_MAX: Final = 1 + 10 + 2 + 5
"""An id, and a grace of up to months, each behind its tag: what an ordinary request has."""


class _Keys(list[bytes]):
    """The keys of a lease, shared by all who ask for them at one revision: a million take 16 ms to list."""


class LeaseService:
    """Handlers of etcdserverpb.Lease, and of what other members pass on.

    Arguments:
        responder: the member's shared parts.
        lessor: of the member.
        guard: ends streams that insist on a leader.
        cork: flushes streams at the end of a turn.
        live: whether a client may keep a lease alive; None: callers are not authenticated.
    """

    def __init__(
        self, responder: Responder, lessor: Lessor, guard: LeaderGuard, cork: Cork, live: LiveCalls | None = None
    ) -> None:
        self.cork = cork
        self._lessor = lessor
        self.keep_alive = lessor.keep_alive
        self.renew_at_once = lessor.renew_at_once
        self.header = responder.present_header
        self.known: dict[bytes, tuple[int, bytes, int]] = {}
        self.waiting = Shares(WAITING_MAX)
        self.auth = responder.auth
        self._live = live
        self._responder = responder
        self._admission = responder.admission
        self.leader_guard = guard
        self._loop = asyncio.get_running_loop()
        self.graces = Graces(self._loop.time, lessor.connections_lost)
        self._listed: WeakValueDictionary[int, _Keys] = WeakValueDictionary()
        self._listed_at = -1

    def register(self, server: Server) -> None:
        """Serve clients."""
        server.unary(_METHODS["LeaseGrant"].path, self.grant)
        server.unary(_METHODS["LeaseRevoke"].path, self.revoke)
        self._responder.serve(server, _METHODS["LeaseTimeToLive"], self.time_to_live)
        self._responder.serve(server, _METHODS["LeaseLeases"], self.leases)
        server.listened(_METHODS["LeaseKeepAlive"].path, self.keep_alives)

    # -- writes ------------------------------------------------------------------------------------------------------

    def grant(self, call: UnaryCall, data: bytes) -> None:
        """Grant a lease.

        Arguments:
            call: to be answered.
            data: a LeaseGrantRequest.
        """
        asked = parse(call, rpc_pb2.LeaseGrantRequest, data)
        if asked is None:
            return
        try:
            self._admission.check_write(call, Kind.LEASE_GRANT, data, asked)
            request = self._lessor.grant_request(asked.TTL, asked.ID, exact=asked.exact_ttl)
            self._lessor.granters.admit(request.ID, identity_of(call))
        except errors.StatusError as error:
            fail(call, error)
            return
        waiter = PendingWrite(self._responder, call, request)
        self._responder.propose(call, Kind.LEASE_GRANT, request.SerializeToString(), waiter)

    def revoke(self, call: UnaryCall, data: bytes) -> None:
        """End a lease and delete its keys.

        Arguments:
            call: to be answered.
            data: a LeaseRevokeRequest.
        """
        request = parse(call, rpc_pb2.LeaseRevokeRequest, data)
        if request is not None:
            self._responder.propose(call, Kind.LEASE_REVOKE, data, PendingWrite(self._responder, call, request))

    # -- questions ---------------------------------------------------------------------------------------------------

    async def time_to_live(self, request: rpc_pb2.LeaseTimeToLiveRequest, call: UnaryCall) -> list[bytes]:
        """Return how long a lease has left, and its keys, as the leader sees it."""
        encode = _lease_key
        if self.auth.is_enabled:
            rights, caller = self._responder.applier.rights, self._responder.caller_of(call)
            encode = partial(_readable_key, rights, caller)
        pieces = await self._time_left(request, encode, queue_of_call(call))
        if self.auth.is_enabled:
            if encode is _lease_key:  # users were not asked for when the call came
                raise errors.AuthOldRevisionError
            self._responder.applier.rights.check_user(self._responder.caller_of(call))
        return [self.header(), *pieces]

    async def leases(self, _request: rpc_pb2.LeaseLeasesRequest, call: UnaryCall) -> list[bytes]:
        """Return the ids of all leases, as this member knows them, the first to end first."""
        times = self._lessor.times
        ends: Iterable[tuple[float, int]] = times.ends()
        if self.auth.is_enabled:
            check = partial(_readable, self._responder.applier.rights, call.caller, ends)
            ends = await self._responder.slices.result(check, len(times), queue_of_call(call))
        size, head, queue = len(times), self.header(), queue_of_call(call)
        return await self._responder.slices.result(lambda: _listed(head, ends, _lease_status), size, queue)

    def when_checked(
        self, left: Work[None], done: Callable[[], None], failed: Callable[[errors.StatusError], None], queue: Identity
    ) -> None:
        """Do what is left of a check.

        Arguments:
            left: the rest.
            done: called at its end.
            failed: called with the refusal instead.
            queue: of the caller (``rpc/shares``).
        """

        def work() -> Work[None]:
            try:
                yield from left
            except errors.StatusError as error:
                failed(error)
            else:
                done()

        self._responder.slices.run(work, _report, 0, queue)

    async def _time_left(
        self,
        request: rpc_pb2.LeaseTimeToLiveRequest,
        encode: Callable[[bytes], bytes],
        queue: Identity,
        *,
        is_local: bool = True,
    ) -> list[bytes]:
        """The pieces of a response without its header.

        The keys of a lease may be very many, and calls for them too: they are looked at when it is a call's turn.
        """
        found = await self._lessor.time_to_live(request, is_local=is_local)
        if isinstance(found, bytes):
            return [found] if encode is _lease_key else await self._checked_keys(found, encode, queue)
        store, make = self._responder.applier.store, found

        def work() -> Work[list[bytes]]:
            while not self._lessor.is_whole:
                yield
            return (yield from _listed(make(), self._keys_of(request.ID) if request.keys else [], encode))

        size = store.lease_key_count(request.ID) if request.keys else 0
        return await self._responder.slices.result(work, size, queue)

    async def _checked_keys(self, found: bytes, encode: Callable[[bytes], bytes], queue: Identity) -> list[bytes]:
        """The pieces of the leader's response, whose keys are checked by users and roles no older than it is."""
        await self._responder.node.confirm_read()
        response = rpc_pb2.LeaseTimeToLiveResponse.FromString(found)
        keys = list(response.keys)
        response.ClearField("keys")
        head = response.SerializeToString()
        return await self._responder.slices.result(lambda: _listed(head, keys, encode), len(keys), queue)

    def _keys_of(self, lease_id: int) -> Collection[bytes]:
        revision = self._responder.revision()
        if revision != self._listed_at:
            self._listed_at = revision
            self._listed.clear()
        keys = self._listed.get(lease_id)
        if keys is None:
            keys = _Keys(self._responder.applier.store.lease_keys_unordered(lease_id))
            self._listed[lease_id] = keys
        return keys

    # -- keep-alives -------------------------------------------------------------------------------------------------

    def keep_alives(self, call: ListenedCall) -> None:
        """Renew leases until the client has said all.

        Arguments:
            call: to be listened to.
        """
        try:
            self._admission.check_read(call, serializable=False)
        except errors.StatusError as error:
            raise RpcError(error.code, str(error), trailers=error.trailers) from None
        self.leader_guard.watch_over(call)
        call.listen(KeepAliveStream(self, call))

    def check_lease(self, call: ServerCall, lease_id: int) -> Left:
        """Refuse to keep a lease alive where users are asked for. Raises StatusError; returns what is left to check."""
        return None if self._live is None else self._live.of(call).check_lease(lease_id)

    def parse_keep_alive(self, data: bytes) -> tuple[int, bytes, int]:
        """Lease id of a request, the field of the response that repeats it, and the grace that it asks for.

        Raises:
            RpcError: the bytes are no request.
        """
        request = parse_or_raise(rpc_pb2.LeaseKeepAliveRequest, data)
        parsed = request.ID, integer(2, request.ID), request.disconnect_grace_ms
        if len(self.known) >= KNOWN_MAX:
            self.known.clear()
        if len(data) <= KNOWN_BYTES_MAX:
            self.known[data] = parsed
        return parsed

    # -- for other members -------------------------------------------------------------------------------------------

    def for_members(self) -> dict[str, AsyncUnaryHandler]:
        """Return what other members may ask this one while it leads: handlers by path, for the peer port."""
        handlers: dict[Method, LeaderHandler] = {
            RENEW: self._renew,
            TIME_TO_LIVE: self._time_to_live,
            SHORTEN: self._shorten,
        }
        return {method.path: partial(_handle, method, handler) for method, handler in handlers.items()}

    async def _renew(self, request: raft_pb2.LeaseRenewRequest) -> list[bytes]:
        auth = self.auth

        def refusal() -> errors.StatusError | None:
            """Leave it to the sender, once it knows the users and roles of now, whether its clients still may."""
            is_old = not request.asks_users or request.auth_revision < auth.revision
            return errors.AuthOldRevisionError() if auth.is_enabled and request.auth_revision and is_old else None

        batch = MemberBatch(request.ids, refusal)
        self._lessor.renew_for_member(batch.pending)
        ttls = await batch.answered if request.ids else []
        return [raft_pb2.LeaseRenewResponse(ttls=ttls).SerializeToString()]

    async def _time_to_live(self, request: rpc_pb2.LeaseTimeToLiveRequest) -> list[bytes]:
        return await self._time_left(request, _lease_key, "", is_local=False)

    async def _shorten(self, request: raft_pb2.LeaseShortenRequest) -> list[bytes]:
        now = self._loop.time()
        named = zip(request.users, request.auth_revisions, strict=False)
        # A member of an earlier version names no users. A user without a name would be a member.
        callers = chain((Caller(user, revision) if user else None for user, revision in named), repeat(None))
        lost = [
            ConnectionLost(lease_id, grace_ms / 1000, now - age_us / 1_000_000, caller)
            for lease_id, grace_ms, age_us, caller in zip(
                request.ids, request.graces_ms, request.ages_us, callers, strict=False
            )
        ]
        await self._lessor.shorten(lost, is_local=False)
        return [b""]


async def _handle(method: Method, handler: LeaderHandler, data: bytes, _call: UnaryCall) -> list[bytes]:
    request = parse_or_raise(method.request, data)
    with refusals():
        return await handler(request)


def _listed(head: bytes, items: Iterable[T], encode: Callable[[T], bytes]) -> Work[list[bytes]]:
    """Put a response with a list of any length together, with pauses.

    Arguments:
        head: the response without the list.
        items: the list, in any order.
        encode: makes an element of the response's field of an item.
    """
    ordered = yield from in_order(items)
    return [head, *(yield from encoded(ordered, encode))]


def _lease_status(end: tuple[float, int]) -> bytes:
    """Return an element of field 2 of a LeaseLeasesResponse."""
    return field(2, integer(1, end[1]))


def _lease_key(key: bytes) -> bytes:
    """Return an element of field 5 of a LeaseTimeToLiveResponse."""
    return field(5, key)


def _readable(
    rights: Rights, caller: Caller | None, ends: Iterable[tuple[float, int]]
) -> Work[list[tuple[float, int]]]:
    """The ends of leases, with pauses, for a caller that may read all keys of all of them: else it sees none."""
    seen: list[tuple[float, int]] = []
    for end in ends:
        left = rights.check_lease(caller, end[1], write=False)
        if left is not None:
            yield from left
        seen.append(end)
        if len(seen) % LEASES_PER_PIECE == 0:
            yield
    return seen


def _report(error: Exception) -> None:
    _log.error("a check failed", exc_info=error)


def _readable_key(rights: Rights, caller: Caller | None, key: bytes) -> bytes:
    """Return the same, if the caller may read the key: it may have been attached since the call was let in."""
    rights.check_read(caller, key, b"")
    return _lease_key(key)
