"""The Lease service: grant, revoke, keep alive, time to live, leases.

Owns the path of a request through this member, and the requests that other members send it while it leads
(``for_members``); the lessor does the work.

    grant, revoke        through the log, like any write
    keep alive           ``keep_alives``: one callback per message, no task
    time to live         answered by the leader, wherever the client is connected
    leases               from the state applied here
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
from raftkv.server.services.responder import Responder, fail, parse
from raftkv.server.streams.keep_alives import WAITING_MAX, KeepAliveStream, MemberBatch

T = TypeVar("T", bound=Any)
LeaderHandler = Callable[[Any], Awaitable[list[bytes]]]
"""Does work that only the leader can do. Returns the pieces of the response."""

_log = logging.getLogger(__name__)
_METHODS: Final = SERVICES["etcdserverpb.Lease"]
LEASES_PER_PIECE: Final = 64
"""Leases of a list that are checked between two pauses: 1 ms."""
KNOWN_MAX: Final = 100_000
"""Parsed requests that are remembered: a client sends the same few bytes again and again."""

KNOWN_BYTES_MAX: Final = 1 + 10 + 2 + 5
"""Size of an ordinary request: an id, and a grace of up to months, each with its tag."""


class _Keys(list[bytes]):
    """The keys of a lease, shared by all requests for them at one revision: listing a million takes 16 ms."""


class LeaseService:
    """Handlers of etcdserverpb.Lease, and of requests that other members forward.

    Arguments:
        responder: shared parts of the member.
        lessor: lessor of the member.
        guard: ends streams that require a leader.
        cork: flushes streams at the end of a turn.
        live: checks whether a client may keep a lease alive; None: callers are not authenticated.
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
        self.graces = Graces(self._loop.time, lessor.connections_lost, lessor.may_keep)
        self._listed: WeakValueDictionary[int, _Keys] = WeakValueDictionary()
        self._listed_at = -1

    def register(self, server: Server) -> None:
        """Register the handlers for clients."""
        server.unary(_METHODS["LeaseGrant"].path, self.grant)
        server.unary(_METHODS["LeaseRevoke"].path, self.revoke)
        self._responder.serve(server, _METHODS["LeaseTimeToLive"], self.time_to_live)
        self._responder.serve(server, _METHODS["LeaseLeases"], self.leases)
        server.listened(_METHODS["LeaseKeepAlive"].path, self.keep_alives)

    # -- writes ------------------------------------------------------------------------------------------------------

    def grant(self, call: UnaryCall, data: bytes) -> None:
        """Grant a lease.

        Arguments:
            call: call to answer.
            data: serialized LeaseGrantRequest.
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
        self._responder.propose(call, Kind.LEASE_GRANT, request.SerializeToString(), request)

    def revoke(self, call: UnaryCall, data: bytes) -> None:
        """End a lease and delete its keys.

        Arguments:
            call: call to answer.
            data: serialized LeaseRevokeRequest.
        """
        request = parse(call, rpc_pb2.LeaseRevokeRequest, data)
        if request is not None:
            work = self._responder.applier.store.attachments.count(request.ID)
            self._responder.propose(call, Kind.LEASE_REVOKE, data, request, work=work)

    # -- questions ---------------------------------------------------------------------------------------------------

    async def time_to_live(self, request: rpc_pb2.LeaseTimeToLiveRequest, call: UnaryCall) -> list[bytes]:
        """Return the remaining time of a lease, and its keys, as known to the leader."""
        encode = _lease_key
        if self.auth.is_enabled:
            rights, caller = self._responder.applier.rights, self._responder.caller_of(call)
            encode = partial(_readable_key, rights, caller)
        pieces = await self._time_left(request, encode, queue_of_call(call))
        if self.auth.is_enabled:
            if encode is _lease_key:  # authentication was off when the call came
                raise errors.AuthOldRevisionError
            self._responder.applier.rights.check_user(self._responder.caller_of(call))
        return [self.header(), *pieces]

    async def leases(self, _request: rpc_pb2.LeaseLeasesRequest, call: UnaryCall) -> list[bytes]:
        """Return the ids of all leases known to this member, the first to end first."""
        times, is_checked = self._lessor.times, self.auth.is_enabled
        ends: Iterable[tuple[float, int]] = times.ends()
        if is_checked:
            check = partial(_readable, self._responder.applier.rights, call.caller, ends)
            ends = await self._responder.slices.result(check, len(times), queue_of_call(call))
        size, head, queue = len(times), self.header(), queue_of_call(call)
        pieces = await self._responder.slices.result(lambda: _listed(head, ends, _lease_status), size, queue)
        if self.auth.is_enabled:
            if not is_checked:  # authentication was off when the call came
                raise errors.AuthOldRevisionError
            self._responder.applier.rights.check_user(call.caller)  # as of the revision of the check
        return pieces

    def when_checked(
        self, left: Work[None], done: Callable[[], None], failed: Callable[[errors.StatusError], None], queue: Identity
    ) -> None:
        """Do the rest of a check.

        Arguments:
            left: the rest.
            done: called at its end.
            failed: called with the refusal instead.
            queue: queue of the caller (``rpc/shares``).
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
        """Return the pieces of a response without its header.

        A lease may have very many keys, and there may be many calls for them: they are listed when a call's turn comes.
        """
        found = await self._lessor.time_to_live(request, is_local=is_local)
        if isinstance(found, bytes):
            return [found] if encode is _lease_key else await self._checked_keys(found, encode, queue)
        store, make = self._responder.applier.store, found

        def work() -> Work[list[bytes]]:
            while not self._lessor.is_whole:
                yield
            return (yield from _listed(make(), self._keys_of(request.ID) if request.keys else [], encode))

        size = store.attachments.count(request.ID) if request.keys else 0
        return await self._responder.slices.result(work, size, queue)

    async def _checked_keys(self, found: bytes, encode: Callable[[bytes], bytes], queue: Identity) -> list[bytes]:
        """Return the pieces of the leader's response, with its keys checked by users and roles at least as recent."""
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
            keys = _Keys(self._responder.applier.store.attachments.keys_unordered(lease_id))
            self._listed[lease_id] = keys
        return keys

    # -- keep-alives -------------------------------------------------------------------------------------------------

    def keep_alives(self, call: ListenedCall) -> None:
        """Renew leases until the client has sent all its requests.

        Arguments:
            call: stream of keep-alives.
        """
        try:
            self._admission.check_read(call, serializable=False)
        except errors.StatusError as error:
            raise RpcError(error.code, str(error), trailers=error.trailers) from None
        self.leader_guard.watch_over(call)
        call.listen(KeepAliveStream(self, call))

    def check_lease(self, call: ServerCall, lease_id: int) -> Left:
        """Check whether a client may keep a lease alive. Returns the rest of the check; raises StatusError."""
        return None if self._live is None else self._live.of(call).check_lease(lease_id)

    def parse_keep_alive(self, data: bytes) -> tuple[int, bytes, int]:
        """Return the lease id of a request, the response field that repeats it, and the requested grace.

        Raises:
            RpcError: the bytes are not a request.
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
        """Return the handlers, by path, of requests from other members to the leader, for the peer port."""
        handlers: dict[Method, LeaderHandler] = {
            RENEW: self._renew,
            TIME_TO_LIVE: self._time_to_live,
            SHORTEN: self._shorten,
        }
        return {method.path: partial(_handle, method, handler) for method, handler in handlers.items()}

    async def _renew(self, request: raft_pb2.LeaseRenewRequest) -> list[bytes]:
        auth = self.auth

        def refusal() -> errors.StatusError | None:
            """Leave the decision to the sender, once it knows the current users and roles."""
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
        # A member of an earlier version names no users. An empty user name would stand for a member.
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
    """Build a response with a list of any length, with pauses.

    Arguments:
        head: response without the list.
        items: items in any order.
        encode: returns the response field of one item.
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
    """Return the ends of leases, with pauses, if the caller may read the keys of all leases; raises otherwise."""
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
    _log.error("a permission check of a lease stream failed", exc_info=error)


def _readable_key(rights: Rights, caller: Caller | None, key: bytes) -> bytes:
    """Return the encoded key, if the caller may read it: it may have been attached after the call was admitted."""
    rights.check_read(caller, key, b"")
    return _lease_key(key)
