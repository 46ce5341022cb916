"""The client of a recipe (a service built from other requests), inside the member that serves it.

The Lock and Election services keep no state except keys. A recipe reads and writes keys through the same checks and the
same log as any client, only without a connection:

    outcome = await recipe.txn(call, request)      # through the log; refusals are raised
    await recipe.confirm(queue)                    # this member is now as recent as the cluster was at the call
    await recipe.oldest(b"name/", queue)           # reads the state applied here
    await recipe.changed(b"name/a", b"name/b")     # one of these keys may have changed here

Invariants
- A call that ends, for any reason, leaves no watcher and no wait behind. ``close`` ends all waits: the member stops.
- Refusals have the code UNKNOWN, as in etcd, whose recipes are clients that pass on the text of an error but not its
  code. If the member stops, has no leader or times out, the code stays UNAVAILABLE or DEADLINE_EXCEEDED (etcd: UNKNOWN
  too), since clients use it to turn to another member.

Leaves out the recipes themselves: ``recipes.lock``, ``election``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

from raftkv import errors
from raftkv.apply import check, ranges, txn
from raftkv.apply.applier import Outcome
from raftkv.apply.auth.rights import Rights
from raftkv.apply.wire import MEMBER, Caller, Kind, PlainGet
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
from raftkv.rpc.shares import Identity, identity_of, queue_of, queue_of_call
from raftkv.rpc.status import RpcError
from raftkv.server.services.responder import Responder
from raftkv.storage.selection import finish

KEYS_AT_ONCE: Final = 128
"""Keys below a prefix that are read without a pause."""

CALLED_AT_ONCE: Final = 100
"""Waiters that continue in one loop turn: about 5 ms."""

CONFIRMED_AT_ONCE: Final = 50
"""Recipes that continue in one loop turn after their read is confirmed, with 0.2 ms of reading each. One round of
confirmation may serve all observers of a member that came back."""

BEGUN_AT_ONCE: Final = 64
"""Transactions of recipes that are created in one loop turn, 0.1 ms each. Many may be due together: leases that they
waited for are granted by entries applied together, and waiters leave together."""
BYTES_AS_A_TXN: Final = 4096
"""A transaction counts as one more for each 4 KiB of its name, which it contains several times."""

OPERATIONS_MAX: Final = 4
"""Most operations in a transaction of a recipe."""

_KEPT_CODES: Final = frozenset({errors.UNAVAILABLE, errors.DEADLINE_EXCEEDED})


class Recipe:
    """Reads and writes on the member that serves a recipe.

    Arguments:
        responder: shared parts of the member.
        hub: calls back when keys have changed.
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
        self._confirmed = Limiter(CONFIRMED_AT_ONCE)
        self._beginnings = Limiter(BEGUN_AT_ONCE)
        self._closed = False

    @property
    def waiting(self) -> int:
        """Number of waits in progress."""
        return len(self._waits)

    @property
    def deleting(self) -> int:
        """Number of background deletions in progress."""
        return len(self._deletions)

    def close(self) -> None:
        """Fail all waits: the member stops."""
        self._closed = True
        for fail in list(self._waits):
            fail(errors.StoppedError())

    def begin_wait(self, fail: Callable[[errors.StatusError], None]) -> None:
        """Register a wait, which fails when the member stops.

        Raises:
            StoppedError: the member is already stopping.
        """
        if self._closed:
            raise errors.StoppedError
        self._waits.add(fail)

    def end_wait(self, fail: Callable[[errors.StatusError], None]) -> None:
        """Remove a wait that has ended."""
        self._waits.discard(fail)

    # -- serving -----------------------------------------------------------------------------------------------------

    def serve(self, server: Server, method: Method, handler: Callable[[UnaryCall, Any], Awaitable[bytes]]) -> None:
        """Register a unary method of a recipe.

        Arguments:
            server: server of the client ports.
            method: method of the wire contract.
            handler: ``handler(call, request)`` returns the response's bytes or raises StatusError.
        """

        async def run(message: bytes, call: UnaryCall) -> bytes:
            request = self.admit(call, method, message)
            del message  # the call may be long
            with self.refusals():
                return await handler(call, request)

        server.unary_async(method.path, run)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Translate errors within the block into those of etcd's recipes; report damage and broken invariants.

        Raises:
            RpcError: replaces every StatusError.
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
            call: call whose metadata is checked.
            method: method of the request.
            message: serialized request, or None.

        Raises:
            RpcError: the bytes are not a request, or it is not served here; with the usual codes of services.
        """
        request = parse_or_raise(method.request, message)
        with refusals():
            self.responder.admission.check_read(call, serializable=False)
        return request

    def answer(self, revision: int, response: Any) -> bytes:
        """Serialize a response.

        Arguments:
            revision: revision for its header.
            response: message without a header.
        """
        return self.responder.answer(response, revision)

    # -- writing -----------------------------------------------------------------------------------------------------

    async def begin(self, name: bytes, queue: Identity) -> None:
        """Wait for a loop turn with room for a transaction, before it is created.

        Arguments:
            name: name or key in the transaction.
            queue: queue of the caller (``rpc/shares``).
        """
        await self._beginnings.enter(1 + len(name) // BYTES_AS_A_TXN, queue)

    async def txn(
        self, call: ServerCall, request: rpc_pb2.TxnRequest, undo: Callable[[Outcome], None] | None = None
    ) -> tuple[int, rpc_pb2.TxnResponse]:
        """Execute a transaction. Returns the revision and the response.

        Arguments:
            call: call of the caller.
            request: transaction.
            undo: called with the outcome if the caller left before the answer was read, or if it cannot be read: the
                transaction may have been applied all the same.

        Raises:
            StatusError: it was refused, or not applied in time, or has no answer.
        """
        check.check_txn(request, OPERATIONS_MAX)
        data = request.SerializeToString()
        self.responder.admission.check_write(call, Kind.TXN, data, request)
        outcome = await self.responder.node.propose(
            *(Kind.TXN, data, request, call.caller, undo or _ignore_outcome),
            identity=identity_of(call),
            deadline=call.deadline,
            work=finish(txn.work_of(self.store, request)),
        )
        outcome.check()
        body, read = outcome.body, outcome.read
        if read is not None:
            try:
                slices, queue = self.responder.slices, queue_of_call(call)
                _, pieces = await slices.result(lambda: hold(self.store.pin, read), 0, queue)
            except BaseException:
                if undo is not None:
                    undo(outcome)
                raise
            body = b"".join(pieces)
        return outcome.revision, rpc_pb2.TxnResponse.FromString(body)

    def delete_if_same(
        self, key: bytes, create_revision: int, identity: Identity, caller: Caller | None = MEMBER
    ) -> None:
        """Delete a key in the background, unless it is gone or was created again; retried until decided.

        If the call created the key, this member deletes it: a caller that has lost its right or its token must not
        leave behind a waiter that blocks all others. If the call found the key, the caller deletes it, since others
        may wait with the same key.

        Arguments:
            key: key to delete.
            create_revision: create revision of that key.
            identity: identity of the call that has ended.
            caller: caller in whose name it is deleted.
        """
        task = asyncio.get_running_loop().create_task(self._delete(key, create_revision, identity, caller))
        self._deletions.add(task)
        task.add_done_callback(self._deletions.discard)

    async def _delete(self, key: bytes, create_revision: int, identity: Identity, caller: Caller | None) -> None:
        """Propose a deletion until it is decided. Repeating it is safe: the compare makes it happen only once."""
        await self.begin(key, queue_of(identity))  # a closed connection may have had hundreds of waiters
        request = deletion(key, create_revision)
        node, data = self.responder.node, request.SerializeToString()
        while not node.stopped:
            try:
                await node.propose(Kind.TXN, data, request, caller, _ignore_outcome, identity=identity)
                return  # a refusal is a decision too: the lease will delete the key
            except errors.TooManyRequestsError:
                return  # no room for more: the lease will delete the key
            except errors.StatusError:
                pass  # it may have been applied, or not

    async def lease(self, call: ServerCall, lease_id: int, ttl_s: int) -> int:
        """Return the given lease, or grant a new one.

        Arguments:
            call: call of the caller.
            lease_id: given lease; 0: none.
            ttl_s: TTL of a new lease, in seconds.
        """
        return lease_id or await self.leases.grant(ttl_s, call.caller, identity_of(call))

    def let_in(
        self, call: Any, *, reads: Sequence[tuple[bytes, bytes]] = (), writes: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        """Set the caller of a call that passed no guard, check its right to read and write ranges, and its rate.

        Arguments:
            call: has headers and a peer; its caller and identity are set. The rate is that of its first range.
            reads, writes: ranges, with ends as on the wire.

        Raises:
            StatusError: as in ``Rights``.
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
        throttle = self.responder.admission.throttle
        if throttle is not None:
            key, _ = next(chain(reads, writes))
            throttle.admit(call, 0, PlainGet(key, False))

    def check_on(self, call: ServerCall, prefix: bytes, key: bytes = b"") -> None:
        """Refuse to answer a call that waited if it may no longer read all keys below a prefix, or write a key.

        Arguments:
            call: call to answer.
            prefix, key: ends with a slash; empty: none. Raises as ``Rights``.
        """

        def check(rights: Rights, caller: Caller | None) -> None:
            rights.check_read(caller, prefix, prefix_end(prefix))
            if key:
                rights.check_write(caller, key, b"")

        self.responder.check_on(call, check)

    # -- reading -----------------------------------------------------------------------------------------------------

    async def confirm(self, queue: Identity) -> None:
        """Wait until the applied state is at least as new as now.

        Arguments:
            queue: queue of the caller (``rpc/shares``).

        Raises:
            RequestTimeoutError, StoppedError: the confirmation did not arrive in time.
        """
        await self.responder.node.confirm_read()
        await self._confirmed.enter(1, queue)

    def find(self, request: rpc_pb2.RangeRequest) -> list[kv_pb2.KeyValue]:
        """Read a few keys of the state applied here, at once."""
        _, body = ranges.execute(self.store, request)
        return list(rpc_pb2.RangeResponse.FromString(body).kvs)

    async def find_all(self, request: rpc_pb2.RangeRequest, queue: Identity) -> tuple[int, list[kv_pb2.KeyValue]]:
        """Read the state applied here, in slices if there are many keys: any client may write below a prefix.

        Arguments:
            request: range to read.
            queue: queue of the caller (``rpc/shares``).

        Returns:
            the revision that was read, which may be outdated by now, and the keys.
        """
        size = self.store.known_count(request.key, request.range_end)
        if size <= KEYS_AT_ONCE:
            return self.store.revision, self.find(request)

        def read() -> Work[ranges.Answer]:
            return hold(self.store.pin, lambda view: ranges.in_pieces(view, request))

        revision, pieces = await self.responder.slices.result(read, size, queue)
        return revision, list(rpc_pb2.RangeResponse.FromString(b"".join(pieces)).kvs)

    async def oldest(self, prefix: bytes, queue: Identity, revision: int = 0) -> tuple[int, kv_pb2.KeyValue | None]:
        """Find the oldest key below a prefix, by create revision.

        Arguments:
            prefix: ends with a slash.
            queue: queue of the caller (``rpc/shares``).
            revision: revision to read at; 0: the current one.

        Returns:
            the current revision of the store, and the key.
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
        """Wait until one of the keys may have changed in the state applied here.

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
        """Call back in a loop turn with room for it: thousands may wait for the same key.

        Arguments:
            callback: should cause about 0.1 ms of work; called once, however often it was added.
        """
        self._due.add(callback, MEMBER_WORK)


def _ignore_outcome(outcome: Outcome) -> None:
    """Ignore the outcome: the request of a caller that has left may be executed all the same."""


def created_at(key: bytes, revision: int) -> rpc_pb2.Compare:
    """Return a compare that holds while the key is the one created at a revision.

    Arguments:
        key: key to compare.
        revision: create revision; 0: the key does not exist.
    """
    return rpc_pb2.Compare(key=key, target="CREATE", result="EQUAL", create_revision=revision)


def deletion(key: bytes, create_revision: int | None = None) -> rpc_pb2.TxnRequest:
    """Return the transaction that deletes a key; with a create revision, only the key created then."""
    compare = [] if create_revision is None else [created_at(key, create_revision)]
    delete = rpc_pb2.DeleteRangeRequest(key=key)
    return rpc_pb2.TxnRequest(compare=compare, success=[rpc_pb2.RequestOp(request_delete_range=delete)])


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range of keys that begin with a prefix, which ends with a slash."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def refusal(error: errors.StatusError) -> RpcError:
    """Return an error as recipes report it."""
    return RpcError(error.code if error.code in _KEPT_CODES else errors.UNKNOWN, str(error))


# -- local_watch ----------------------------------------------------------------------------------------------------
#
# A watch inside this process: a client's watch stream without a connection to the hub.
#
#     watch = LocalWatch(hub, b"name/", b"name0", 8, recipe.soon, identity)
#     changes = await watch.next()           # hashes of keys, and revisions
#     watch.close()
#
# ``LocalWatch`` plays the call of a ``WatchStream``, so it has every guarantee of clients: order, no gaps, catching up
# from history. Unread responses count as unsent bytes: beyond a limit the watch falls behind and is served from history
# later. There may be thousands of idle readers, and keys may be long, so only their hashes wait.

_MESSAGE_MAX_BYTES: Final = 2**31 - 1
RESPONSE_BYTES: Final = 8 * 1024
"""What an unread response counts as: after 32 of them a watch falls behind."""

Change = tuple[int, int]
"""Hash of a key, and the revision that changed it."""


class LocalWatch:
    """Watches a range from within the member.

    Arguments:
        hub: watch hub of the member.
        key, range_end: the range, with its end as on the wire.
        start_revision: first revision to receive.
        soon: calls back in a loop turn with room for another reader.
        identity: identity whose share the watch uses.
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
        self._queue: deque[list[Change] | errors.StatusError] = deque()
        self._stream = WatchStream(hub, self, 0, self.fail, identity=identity)
        create = rpc_pb2.WatchCreateRequest(key=key, range_end=range_end, start_revision=start_revision, keys_only=True)
        self._stream.receive(rpc_pb2.WatchRequest(create_request=create).SerializeToString())

    async def next(self) -> list[Change]:
        """Return the next changes, in order.

        Raises:
            CompactedError: history that was not received yet is gone.
            StatusError: the watch was ended, for example by ``fail``, or refused because there is no room for another.
        """
        while True:
            while not self._queue:
                if self._error is not None:
                    raise self._error
                self._arrived.clear()
                await self._arrived.wait()
            response = self._queue.popleft()
            if self._on_room is not None:
                self._on_room()
            if isinstance(response, errors.StatusError):
                raise response
            if response:
                return response

    def fail(self, error: errors.StatusError) -> None:
        """End the watch. ``next`` raises the error after the earlier responses are taken."""
        self._stream.flush()
        self._error = error
        self._arrived.set()

    def close(self) -> None:
        """Close the watch."""
        self._stream.close()

    # -- called by the stream ----------------------------------------------------------------------------------------

    @property
    def send_buffer_size(self) -> int:
        """Unread bytes, roughly."""
        return RESPONSE_BYTES * len(self._queue)

    @property
    def connection_send_buffer_size(self) -> int:
        """Unread bytes: there is no connection other than this stream."""
        return self.send_buffer_size

    @property
    def crowded(self) -> bool:
        """Always False."""
        return False

    def send_frames_nowait(self, frames: bytes, count: int) -> None:
        """Take responses."""
        for message in self._assembler.feed(frames):
            response = rpc_pb2.WatchResponse.FromString(message)
            if not response.canceled:
                self._queue.append([(hash(event.kv.key), event.kv.mod_revision) for event in response.events])
            elif response.compact_revision:
                self._queue.append(errors.CompactedError(response.compact_revision))
            else:
                self._queue.append(errors.TooManyRequestsError(response.cancel_reason))
        self._soon(self._arrived.set)

    def on_room(self, callback: Callable[[], None] | None) -> None:
        """Call back each time a response was taken; None to stop."""
        self._on_room = callback
