"""The client of a recipe, a service built of other requests, on the member that serves it.

The Lock and Election services keep no state of their own: all of it is keys. A recipe reads and writes these through
the same checks and the same log as any client, only without a wire between:

    outcome = await recipe.txn(call, request)      # through the log; what is refused is raised
    await recipe.confirm(queue)                    # this member is now as recent as the cluster was at the call
    await recipe.oldest(b"name/", queue)           # the state that is applied here
    await recipe.changed(b"name/a", b"name/b")     # one of these keys may have changed here

Invariants
- A call that ends, however, leaves no watcher and no wait behind. ``close`` ends all waits at once: the member stops.
- Refusals arrive as UNKNOWN, as from etcd, whose recipes are clients that pass on the text of an error but
  not its code. That the member stops, has no leader or was not in time stays UNAVAILABLE or DEADLINE_EXCEEDED here
  (in etcd that is UNKNOWN too), since clients turn to another member by the code.

Leaves out what the recipes mean: ``recipes.lock``, ``election``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from raftkv import errors
from raftkv.apply import check, ranges
from raftkv.apply.applier import Outcome
from raftkv.apply.wire import MEMBER, Caller, Kind
from raftkv.loop.fair import MEMBER as MEMBER_WORK
from raftkv.loop.limiter import Limiter
from raftkv.loop.scheduler import Work, hold
from raftkv.pb import kv_pb2, rpc_pb2
from raftkv.pb.services import Method
from raftkv.replica.lease.lessor import Lessor
from raftkv.replica.node.admission import parse_or_raise, refusals
from raftkv.replica.watch.hub import WatchHub
from raftkv.replica.watch.stream import WatchStream
from raftkv.rpc.framing import MessageAssembler
from raftkv.rpc.server.calls import ServerCall, UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.rpc.shares import Identity, identity_of, queue_of
from raftkv.rpc.status import RpcError
from raftkv.server.services.responder import Responder

KEYS_AT_ONCE: Final = 128
"""Keys below a prefix that are looked at without a pause."""

CALLED_AT_ONCE: Final = 100
"""Waiters that go on in a turn of the loop: about 5 ms."""

CONFIRMED_AT_ONCE: Final = 50
"""Recipes that go on in a turn of the loop once their read is confirmed, with 0.2 ms of reading each: one round may
have had all observers of a member that came back."""

BEGUN_AT_ONCE: Final = 64
"""Txns of recipes that are made in a turn of the loop, with 0.1 ms each: the leases that they waited for were granted
by entries which are applied together, and waiters leave together."""
BYTES_AS_A_TXN: Final = 4096
"""A txn counts as one more for so many bytes of a name, which stands in it several times."""

OPERATIONS_MAX: Final = 4
"""No txn of a recipe has more."""

_KEPT_CODES: Final = frozenset({errors.UNAVAILABLE, errors.DEADLINE_EXCEEDED})


class Recipe:
    """Reads and writes on the member that serves a recipe.

    Arguments:
        responder: the member's shared parts.
        hub: calls back when keys were changed.
        leases: grants leases.
    """

    def __init__(self, responder: Responder, hub: WatchHub, leases: Lessor) -> None:
        self.responder = responder
        self.hub = hub
        self.leases = leases
        self.store = responder.applier.store
        self._waits: set[Callable[[errors.StatusError], None]] = set()
        self._deletions: set[asyncio.Task[None]] = set()
        self._due = Limiter(CALLED_AT_ONCE)
        self._confirmed: Limiter | None = None
        self._beginnings: Limiter | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """Waits under way."""
        return len(self._waits)

    @property
    def deleting(self) -> int:
        """Background deletions under way."""
        return len(self._deletions)

    def close(self) -> None:
        """Fail all waits: the member stops."""
        self._closed = True
        for fail in list(self._waits):
            fail(errors.StoppedError())

    def begin_wait(self, fail: Callable[[errors.StatusError], None]) -> None:
        """Have a wait failed when the member stops.

        Raises:
            StoppedError: it does already.
        """
        if self._closed:
            raise errors.StoppedError
        self._waits.add(fail)

    def end_wait(self, fail: Callable[[errors.StatusError], None]) -> None:
        """The wait is over."""
        self._waits.discard(fail)

    # -- serving -----------------------------------------------------------------------------------------------------

    def serve(self, server: Server, method: Method, handler: Callable[[UnaryCall, Any], Awaitable[bytes]]) -> None:
        """Register a unary method of a recipe.

        Arguments:
            server: answers it.
            method: of the wire contract.
            handler: ``handler(call, request)`` returns the response's bytes or raises StatusError.
        """

        async def run(message: bytes, call: UnaryCall) -> bytes:
            request = self.admit(call, method, message)
            del message  # the call may last
            with self.refusals():
                return await handler(call, request)

        server.unary_async(method.path, run)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Within the block, end the call as etcd's recipes do, and hand damage and broken invariants to the member.

        Raises:
            RpcError: in place of every StatusError.
        """
        try:
            yield
        except errors.StatusError as error:
            raise refusal(error) from None
        except errors.CorruptionError as error:
            self.responder.node.damaged(error)
            raise refusal(errors.DamagedError()) from None
        except errors.InvariantError as error:
            self.responder.node.fatal(error)
            raise

    def admit(self, call: ServerCall, method: Method, message: bytes | None) -> Any:
        """Parse a request, and check that this member serves its caller.

        Arguments:
            call: whose metadata are checked.
            method: gives the type.
            message: the bytes; None: there were none.

        Raises:
            RpcError: it is not one, or not served here; with the code that every service gives.
        """
        request = parse_or_raise(method.request, message)
        with refusals():
            self.responder.admission.check_read(call, serializable=False)
        return request

    def answer(self, revision: int, response: Any) -> bytes:
        """Make the bytes of a response.

        Arguments:
            revision: for its header.
            response: the message, without a header.
        """
        header = self.responder.header.encode(revision, self.responder.node.term)
        body: bytes = response.SerializeToString()
        return header + body

    # -- writing -----------------------------------------------------------------------------------------------------

    async def begin(self, name: bytes, queue: Identity) -> None:
        """Wait for a turn of the loop that has room for a txn: before it is made.

        Arguments:
            name: or key that it is about.
            queue: of the caller (``rpc/shares``).
        """
        if self._beginnings is None:
            self._beginnings = Limiter(BEGUN_AT_ONCE)
        weight = 1 + len(name) // BYTES_AS_A_TXN
        if not self._beginnings.try_enter(weight):
            await self._beginnings.enter(weight, queue)

    async def txn(
        self, call: ServerCall, request: rpc_pb2.TxnRequest, undo: Callable[[Outcome], None] | None = None
    ) -> tuple[int, rpc_pb2.TxnResponse]:
        """Execute a txn; the revision and the response.

        Arguments:
            call: on whose behalf.
            request: what to execute.
            undo: called with the outcome if the caller left before it came, or gets no answer because that was too much
                work: the txn may have happened all the same.

        Raises:
            StatusError: it was refused, or was not applied in time, or has no answer.
        """
        check.check_txn(request, OPERATIONS_MAX)
        data = request.SerializeToString()
        self.responder.admission.check_write(call, Kind.TXN, data, request)
        outcome = await self.responder.node.propose(
            *(Kind.TXN, data, request, call.caller, undo or _ignore_outcome),
            identity=identity_of(call),
            deadline=call.deadline,
        )
        outcome.check()
        if outcome.unanswered is not None:
            if undo is not None:
                undo(outcome)
            raise outcome.unanswered
        return outcome.revision, rpc_pb2.TxnResponse.FromString(outcome.body)

    def check_size(self, size_bytes: int) -> None:
        """Refuse a request that will be too large, before it is made. Raises RequestTooLargeError."""
        self.responder.admission.check_size(size_bytes)

    def delete_if_same(
        self, key: bytes, create_revision: int, identity: Identity, caller: Caller | None = MEMBER
    ) -> None:
        """Delete a key in the background unless it is gone or was made anew; retried until decided.

        As this member, if the call has made the key: who has lost the right to a lock, or the token, may not leave a
        waiter behind for which all others wait. As the caller, if the call has found it: then others may wait by it.

        Arguments:
            key: to be deleted.
            create_revision: of the key that is meant.
            identity: of the call that has ended.
            caller: who deletes it.
        """
        task = asyncio.get_running_loop().create_task(self._delete(key, create_revision, identity, caller))
        self._deletions.add(task)
        task.add_done_callback(self._deletions.discard)

    async def _delete(self, key: bytes, create_revision: int, identity: Identity, caller: Caller | None) -> None:
        """Propose a deletion until it is decided: to repeat it is safe, as it cannot happen twice."""
        await self.begin(key, queue_of(identity))  # a connection that ends may have had hundreds of waiters
        request = deletion(key, create_revision)
        node, data = self.responder.node, request.SerializeToString()
        while not node.stopped:
            try:
                await node.propose(Kind.TXN, data, request, caller, _ignore_outcome, identity=identity)
                return  # a refusal too: the lease ends the key
            except errors.TooManyRequestsError:
                return  # no room for more: the lease ends the key
            except errors.StatusError:
                pass  # it may have happened, or not

    async def lease(self, call: ServerCall, lease_id: int, ttl_s: int) -> int:
        """Return the lease that was given, or grant a new one.

        Arguments:
            call: on whose behalf.
            lease_id: 0: none was given.
            ttl_s: of a new one, in seconds.
        """
        return lease_id or await self.leases.grant(ttl_s, call.caller, identity_of(call))

    def let_in(
        self, call: Any, *, reads: Iterable[tuple[bytes, bytes]] = (), writes: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        """Find who makes a call that came by no guard, and refuse who may not read and write intervals of keys.

        Arguments:
            call: has headers, and a peer with a certificate; gets its caller, and that one's identity.
            reads, writes: the intervals, ends as on the wire.

        Raises:
            StatusError: as of ``Rights``.
        """
        if self.responder.auth.is_enabled:
            rights = self.responder.applier.rights
            caller = call.caller = self.responder.caller_of(call)
            for key, range_end in reads:
                rights.check_read(caller, key, range_end)
            for key, range_end in writes:
                rights.check_write(caller, key, range_end)
            if caller is not None:
                call.identity = caller.user

    def check_reads_on(self, call: ServerCall, prefix: bytes) -> None:
        """Refuse to show a call more of the keys below a prefix, once it may not read them. Raises as of ``Rights``."""
        self.responder.check_on(call, lambda rights, caller: rights.check_read(caller, prefix, prefix_end(prefix)))

    # -- reading -----------------------------------------------------------------------------------------------------

    async def confirm(self, queue: Identity) -> None:
        """Wait until the applied state is at least as new as now.

        Arguments:
            queue: of the caller (``rpc/shares``).

        Raises:
            RequestTimeoutError, StoppedError: it was not in time.
        """
        await self.responder.node.confirm_read()
        if self._confirmed is None:
            self._confirmed = Limiter(CONFIRMED_AT_ONCE)
        if not self._confirmed.try_enter():
            await self._confirmed.enter(1, queue)

    def find(self, request: rpc_pb2.RangeRequest) -> list[kv_pb2.KeyValue]:
        """Read the state applied here at once: of single keys, or of few."""
        _, body = ranges.execute(self.store, request)
        return list(rpc_pb2.RangeResponse.FromString(body).kvs)

    async def find_all(self, request: rpc_pb2.RangeRequest, queue: Identity) -> tuple[int, list[kv_pb2.KeyValue]]:
        """Read the state applied here, in slices if it is many keys: any client may write below a prefix.

        Arguments:
            request: what to read.
            queue: of the caller (``rpc/shares``).

        Returns:
            the revision of what was read, which may be an older one by now, and the keys.
        """
        size = self.store.known_count(request.key, request.range_end)
        if size <= KEYS_AT_ONCE:
            return self.store.revision, self.find(request)

        def read() -> Work[ranges.Answer]:
            return hold(self.store.pin, lambda view: ranges.in_pieces(view, request))

        revision, pieces = await self.responder.slices.result(read, size, queue)
        return revision, list(rpc_pb2.RangeResponse.FromString(b"".join(pieces)).kvs)

    async def oldest(self, prefix: bytes, queue: Identity, revision: int = 0) -> tuple[int, kv_pb2.KeyValue | None]:
        """Find the key below a prefix that was created first.

        Arguments:
            prefix: ends with a slash.
            queue: of the caller (``rpc/shares``).
            revision: as of this one; 0: now.

        Returns:
            the revision of the store then, and the key.
        """
        request = rpc_pb2.RangeRequest(
            key=prefix,
            range_end=prefix_end(prefix),
            revision=revision,
            limit=1,
            sort_target="CREATE",
            sort_order="ASCEND",
        )
        now, kvs = await self.find_all(request, queue)
        return now, next(iter(kvs), None)

    async def changed(self, *keys: bytes) -> None:
        """Wait until one of these keys may have changed in the state applied here.

        Raises:
            StoppedError: the member stops.
        """
        wait: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def end() -> None:
            if not wait.done():
                wait.set_result(None)

        def wake() -> None:
            self.soon(end)

        def fail(error: errors.StatusError) -> None:
            if not wait.done():
                wait.set_exception(error)

        self.begin_wait(fail)
        cancels = [self.hub.on_change(key, wake) for key in keys]
        try:
            await wait
        finally:
            self.end_wait(fail)
            for cancel in cancels:
                cancel()

    def soon(self, callback: Callable[[], None]) -> None:
        """Call back in a turn of the loop that has room for it: thousands may wait for the same key.

        Arguments:
            callback: what it makes others do should take 0.1 ms; called once, however often that was asked for.
        """
        self._due.add(callback, MEMBER_WORK)


def _ignore_outcome(outcome: Outcome) -> None:
    """Ignore the outcome: the request of a caller that left may be executed all the same."""


def created_at(key: bytes, revision: int) -> rpc_pb2.Compare:
    """Make a compare that holds while the key is the one made at a revision.

    Arguments:
        key: of the compare.
        revision: create revision; 0: there is no such key.
    """
    return rpc_pb2.Compare(key=key, target="CREATE", result="EQUAL", create_revision=revision)


def deletion(key: bytes, create_revision: int | None = None) -> rpc_pb2.TxnRequest:
    """Make the request that deletes a key; with a create revision, only the key that was made then."""
    compare = [] if create_revision is None else [created_at(key, create_revision)]
    delete = rpc_pb2.DeleteRangeRequest(key=key)
    return rpc_pb2.TxnRequest(compare=compare, success=[rpc_pb2.RequestOp(request_delete_range=delete)])


def prefix_end(prefix: bytes) -> bytes:
    """End of the interval of keys that begin with a prefix, which ends with a slash."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def refusal(error: errors.StatusError) -> RpcError:
    """Return the error as a recipe passes it on."""
    return RpcError(error.code if error.code in _KEPT_CODES else errors.UNKNOWN, str(error))


# -- local_watch ----------------------------------------------------------------------------------------------------
#
# A watch of this process: a client's watch stream without a wire between it and the hub.
#
#     watch = LocalWatch(hub, b"name/", b"name0", 8, recipe.soon, identity)
#     response = await watch.next()          # rpc_pb2.WatchResponse with events
#     watch.close()
#
# It is a ``WatchStream`` whose call is here, so it keeps every promise to clients: order, no gaps, catching up from
# history. Unread responses count as bytes not sent: beyond a limit the watch falls behind and is served from history
# later, so an idle reader costs a bounded amount of memory.

_MESSAGE_MAX_BYTES: Final = 2**31 - 1
_RESPONSE_OVERHEAD_BYTES: Final = 64


class LocalWatch:
    """Watches an interval from within the member.

    Arguments:
        hub: of the member.
        key, range_end: the interval, its end as on the wire.
        start_revision: the first revision wanted.
        soon: calls back in a turn that has room for another reader to go on.
        identity: in whose share it falls.
    """

    def __init__(
        self,
        hub: WatchHub,
        key: bytes,
        range_end: bytes,
        start_revision: int,
        soon: Callable[[Callable[[], None]], None],
        identity: Identity,
    ) -> None:
        self._arrived = asyncio.Event()
        self._soon = soon
        self._assembler = MessageAssembler(_MESSAGE_MAX_BYTES)
        self._error: errors.StatusError | None = None
        self._on_room: Callable[[], None] | None = None
        self._queue: deque[tuple[int, bytes]] = deque()
        self._queued_bytes = 0
        self._stream = WatchStream(hub, self, 0, self.fail, identity=identity)
        create = rpc_pb2.WatchCreateRequest(key=key, range_end=range_end, start_revision=start_revision)
        self._stream.receive(rpc_pb2.WatchRequest(create_request=create).SerializeToString())

    async def next(self) -> rpc_pb2.WatchResponse:
        """Return the next response with events.

        Raises:
            CompactedError: history that was still to come is gone.
            StatusError: the watch was ended, as by ``fail``, or refused: there is no room for another.
        """
        while True:
            while not self._queue:
                if self._error is not None:
                    raise self._error
                self._arrived.clear()
                await self._arrived.wait()
            response = self._take()
            if response.canceled and not response.compact_revision:
                raise errors.TooManyRequestsError(response.cancel_reason)
            if response.canceled:
                raise errors.CompactedError(response.compact_revision)
            if response.events:
                return response

    def _take(self) -> rpc_pb2.WatchResponse:
        size_bytes, message = self._queue.popleft()
        self._queued_bytes -= size_bytes
        if self._on_room is not None:
            self._on_room()
        return rpc_pb2.WatchResponse.FromString(message)

    def fail(self, error: errors.StatusError) -> None:
        """End the watch: ``next`` raises once what came before is taken."""
        self._stream.flush()
        self._error = error
        self._arrived.set()

    def close(self) -> None:
        """Let go of the watch."""
        self._stream.close()

    # -- what the stream uses ----------------------------------------------------------------------------------------

    @property
    def send_buffer_size(self) -> int:
        """Unread bytes."""
        return self._queued_bytes

    @property
    def connection_send_buffer_size(self) -> int:
        """Unread bytes: there is no connection beside this stream."""
        return self._queued_bytes

    @property
    def crowded(self) -> bool:
        """Never."""
        return False

    def send_frames_nowait(self, frames: bytes, count: int) -> None:
        """Take responses."""
        for message in self._assembler.feed(frames):
            size_bytes = len(message) + _RESPONSE_OVERHEAD_BYTES
            self._queued_bytes += size_bytes
            self._queue.append((size_bytes, message))
        self._soon(self._arrived.set)

    def on_room(self, callback: Callable[[], None] | None) -> None:
        """Call back each time something was taken; None to stop."""
        self._on_room = callback
