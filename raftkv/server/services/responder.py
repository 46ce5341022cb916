"""The common part of a member's services: parsing, refusing, proposing and answering requests.

    request = parse(call, rpc_pb2.PutRequest, data)          # None: the call was refused
    responder.propose(call, Kind.PUT, data, request)
    node.read(PendingRead(call, request, serve))             # serve(call, request), when this member is recent enough

Callbacks refuse a call with ``fail``; coroutines raise, within ``refusals()``. Leaves out the meaning of requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Final

from google.protobuf.message import DecodeError

from raftkv import errors
from raftkv.apply import ranges, wire
from raftkv.apply.applier import Applier, Outcome
from raftkv.apply.auth.rights import Rights
from raftkv.apply.wire import FIRST_KNOWN_IN, Caller, HeaderEncoder, versioned
from raftkv.loop.scheduler import HOLD_MAX_S, SHORT_KEYS, Slices, Work, hold
from raftkv.pb.services import Method
from raftkv.replica.node.admission import Admission, parse_or_raise, refusals
from raftkv.replica.node.proposals import SURE, Waiter, too_late
from raftkv.replica.node.waits import AwaitableNode
from raftkv.rpc.server.budget import CONNECTION_FULL
from raftkv.rpc.server.calls import ServerCall, UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.rpc.shares import Identity, Shares, Uses, greedier, identity_of, name_of, queue_of_call
from raftkv.rpc.status import RpcError
from raftkv.storage.mvcc_range import PinnedView

_log = logging.getLogger(__name__)

Handler = Callable[[Any, UnaryCall], Awaitable[bytes | list[bytes]]]
"""Returns the response to an admitted request, or raises its refusal."""

SLOW_READ_S: Final = 1.0
"""A read that takes longer, from its start to its answer, is logged with its identity."""

SMALL_ANSWER_BYTES: Final = 1024 * 1024
"""An answer below this size is built to its end, however much memory other answers take."""


class PendingWrite(Waiter):
    """Answers a call with the outcome of its proposal."""

    __slots__ = ("call", "request_id", "service")

    def __init__(self, service: Responder, call: UnaryCall, request: Any) -> None:
        super().__init__(request, call.identity, call.deadline)
        self.service = service
        self.call = call
        self.request_id = 0

    @property
    def is_over(self) -> bool:
        """Whether the client has left: if thousands leave together, each turn drops some."""
        return self.call.cancelled

    def finish(self, outcome: Outcome) -> None:
        """Reply, or refuse with the error of apply. An error of reading a long answer does not undo the entry."""
        if outcome.error is not None:
            fail(self.call, outcome.error)
        elif outcome.read is not None:
            self.service.answer_in_slices(self.call, outcome.read, outcome.revision)
        else:
            self.service.reply(self.call, outcome.revision, outcome.body)

    def fail(self, error: errors.StatusError) -> None:
        """Fail the call: no outcome will come."""
        fail(self.call, error)

    def cancel(self) -> None:
        """Withdraw the proposal, unless it is in progress: the client has left."""
        self.service.node.withdraw(self.request_id)


class PendingRead:
    """Serves a read once the member is recent enough."""

    __slots__ = ("call", "execute", "request")

    def __init__(self, call: UnaryCall, request: Any, execute: Callable[[UnaryCall, Any], None]) -> None:
        self.call = call
        self.request = request
        self.execute = execute

    @property
    def is_over(self) -> bool:
        """Whether the client no longer waits."""
        return self.call.cancelled

    def ready(self) -> None:
        """Serve the read."""
        self.execute(self.call, self.request)

    def fail(self, error: errors.StatusError) -> None:
        """Fail the call: the read cannot be served."""
        fail(self.call, error)


def fail(call: UnaryCall, error: errors.StatusError) -> None:
    """Answer with the code and text of an error.

    Arguments:
        call: call to answer.
        error: error of the request.
    """
    if error.trailers:
        call.fail(error.code, str(error), trailers=error.trailers)
    else:
        call.fail(error.code, str(error))


def parse(call: UnaryCall, message: type[Any], data: bytes, check: Callable[[Any], object] | None = None) -> Any | None:
    """Return the request, or None after the call was refused because of malformed bytes or a failed check.

    Arguments:
        call: call to answer.
        message: type of the request.
        data: serialized request.
        check: raises StatusError for a request that can never be done.
    """
    try:
        request = message.FromString(data)
        if check is not None:
            check(request)
    except DecodeError as error:
        call.fail(errors.INTERNAL, f"grpc: error unmarshalling request: {error}")
    except errors.StatusError as error:
        fail(call, error)
    else:
        return request
    return None


class Growth:
    """Counts the memory of an answer while it is built, and stops building one that would be refused in the end.

    If the answers of all clients are too many, only the identity with most of them is refused.

    Arguments:
        call: call to answer.
        all_bytes: bytes of all answers of the member that are being built.

    Attributes:
        held_bytes: memory of this answer.
    """

    __slots__ = ("_all_bytes", "_call", "_identity", "held_bytes")

    def __init__(self, call: UnaryCall, all_bytes: Shares) -> None:
        self._call = call
        self._identity = identity_of(call)
        self._all_bytes = all_bytes
        self.held_bytes = 0

    def __call__(self, size_bytes: int) -> None:
        """Count more bytes. Raises RpcError if they are too many."""
        shares, identity = self._all_bytes, self._identity
        self.held_bytes += size_bytes
        shares.take(identity, size_bytes)
        if self.held_bytes <= SMALL_ANSWER_BYTES or shares.used <= (room_bytes := self._call.room_bytes()):
            return
        if shares.held[identity] > room_bytes or greedier(shares.held, identity, 0) is None:
            raise RpcError(errors.RESOURCE_EXHAUSTED, CONNECTION_FULL)

    def end(self) -> None:
        """Stop counting: the answer is complete or dropped."""
        if self._identity in self._all_bytes.held:
            self._all_bytes.give_back(self._identity, self.held_bytes)
            self.held_bytes = 0


def _cannot_be(error: Exception) -> None:
    raise error


class Responder:
    """Proposes, reads and answers for the services of one member.

    Arguments:
        node, applier: node and applier of the member.
        header: encodes the header of responses.
        admission: refuses requests that this member cannot take.
        check_capable: refuses requests that need a version which not all members run.
        uses: use of the member, to which long work is charged.

    Attributes:
        caller_of: determines the current caller of a call; raises if its token has ended.
    """

    def __init__(
        self,
        node: AwaitableNode,
        applier: Applier,
        header: HeaderEncoder,
        admission: Admission,
        check_capable: Callable[[tuple[int, int]], None],
        uses: Uses,
    ) -> None:
        self.node = node
        self.applier = applier
        self.header = header
        self.admission = admission
        self._check_capable = check_capable
        self.slices = Slices(uses.weights)
        self.slices.charge = uses.charge
        self.auth = applier.auth
        self.caller_of: Callable[[ServerCall], Caller | None] = lambda call: call.caller
        self._growing = Shares(0)

    def check_again(self, call: ServerCall, check: Callable[[Rights, Caller | None], None]) -> None:
        """Check a waiting read again: users or rights may have changed since it was admitted, and may forbid it now.

        Arguments:
            call: call to answer.
            check: checks the rights of a caller.

        Raises:
            StatusError: as in ``Rights``, or the token has ended.
        """
        auth = self.auth
        if auth.is_enabled and (call.caller is None or call.caller.auth_revision != auth.revision):
            call.caller = self.caller_of(call)
            check(self.applier.rights, call.caller)

    def check_on(self, call: ServerCall, check: Callable[[Rights, Caller | None], None]) -> None:
        """Refuse to continue a long call, by the current users and roles.

        If there are very many long calls, some time passes before all have been checked (``server/auth/guard``). As
        there, a signed token that is older than a change of users may continue.

        Arguments:
            call, check: as in ``check_again``. Raises as it does.
        """
        if not self.auth.is_enabled:
            return
        caller, revision = call.caller, self.auth.revision
        if caller is None or caller.auth_revision != revision:
            self.caller_of(call)
            self.applier.rights.check_known(caller)
            check(self.applier.rights, None if caller is None else Caller(caller.user, revision))

    def revision(self) -> int:
        """Return the current revision of the store."""
        return self.applier.store.revision

    def present_header(self) -> bytes:
        """Return the header of a response with the current revision."""
        return self.header.encode(self.applier.store.revision, self.node.term)

    def reply(self, call: UnaryCall, revision: int, body: bytes = b"") -> None:
        """Answer with a header and a body.

        Arguments:
            call: call to answer.
            revision: revision for the header.
            body: rest of the response.
        """
        call.reply(self.header.encode(revision, self.node.term) + body)

    def growth(self, call: UnaryCall) -> Growth:
        """Return the counter for the bytes of an answer that is being built."""
        return Growth(call, self._growing)

    def reply_many(self, call: UnaryCall, revision: int, pieces: Sequence[bytes]) -> None:
        """Answer with a header and a body in pieces.

        Arguments:
            call: call to answer.
            revision: revision for the header.
            pieces: pieces of the body, in order.
        """
        throttle = self.admission.throttle
        if throttle is not None:
            throttle.note_pieces(call, sum(map(len, pieces)))
        call.reply_many([self.header.encode(revision, self.node.term), *pieces])

    def read_in_slices(
        self,
        call: UnaryCall,
        read: Callable[..., Work[ranges.Answer]],
        size: int,
        check: Callable[[Rights, Caller | None], None],
    ) -> None:
        """Answer a call with the result of a long read of the current state, however long it takes.

        Arguments:
            call: call to answer.
            read: starts the read on a pinned view; calls ``grow`` with the bytes that it collects, and keeps these in
                the list ``body``.
            size: approximate number of keys to read.
            check: checks the rights of a caller when the read starts: it may have waited, and the state have changed.
        """
        queue, deadline = queue_of_call(call), call.deadline
        if deadline is not None:
            wait_s = self.slices.wait_s(size, queue)
            if wait_s and wait_s > SURE * (deadline - asyncio.get_running_loop().time()):
                fail(call, too_late("reads", queue, wait_s))
                return
        self._read(call, read, size, lambda: self.check_again(call, check), self.applier.store.pin)

    def answer_in_slices(self, call: UnaryCall, read: Callable[..., Work[ranges.Answer]], revision: int) -> None:
        """Answer a call whose entry was just applied with an answer that is still to be read.

        What the entry saw is kept from now on: it may be compacted before the turn of the read comes.

        Arguments:
            call: call to answer.
            read: as in ``read_in_slices``.
            revision: revision of the entry.
        """
        view = self.applier.store.pin()
        asyncio.get_running_loop().call_later(HOLD_MAX_S, view.let_go)  # a read that never begins lets nothing go
        self._read(call, read, SHORT_KEYS + 1, lambda: None, lambda: view, revision)

    def _read(
        self,
        call: UnaryCall,
        read: Callable[..., Work[ranges.Answer]],
        size: int,
        check: Callable[[], None],
        pin: Callable[[], PinnedView],
        applied: int = 0,
    ) -> None:
        """Read in slices; ``applied``: revision for the header, if it is not the view's."""
        queue = queue_of_call(call)

        def work() -> Work[None]:
            if call.cancelled:
                return
            check()
            growth, body, began_s = self.growth(call), list[bytes](), perf_counter()
            try:
                # A lambda, since the compiled generator needs an inner function, or cannot be closed after its end.
                revision, pieces = yield from hold(pin, lambda view: read(view, grow=growth, body=body))
            except BaseException:
                # The read was stopped, or its caller has left.
                if growth.held_bytes > wire.DROPPED_BYTES:
                    self.slices.run(partial(wire.drop, body), _cannot_be, 0, queue_of_call(call))
                raise
            finally:
                growth.end()
            if perf_counter() - began_s > SLOW_READ_S:
                _log.warning("slow read: took %.1f s, from %r", perf_counter() - began_s, name_of(queue))
            self.reply_many(call, applied or revision, pieces)

        job = self.slices.run(work, partial(self.refuse_read, call), size, queue)
        if not job.is_over:
            call.on_cancel(job.cancel)

    def check_in_slices(self, call: UnaryCall, check: Callable[[], Work[None]]) -> None:
        """Check a request, however long it takes, and continue with it, or answer why not.

        Arguments:
            call: call to answer.
            check: starts the check; must not write before its last piece.
        """
        job = self.slices.run(check, partial(self.refuse_read, call), 0, queue_of_call(call))
        if not job.is_over:
            call.on_cancel(job.cancel)

    def refuse_read(self, call: UnaryCall, error: Exception) -> None:
        """Answer a read that failed. Damage that it found is reported to the node.

        A read changes nothing, so an unexpected failure affects only this request.

        Arguments:
            call: call to answer.
            error: error that ended the read.
        """
        if isinstance(error, errors.StatusError):
            fail(call, error)
            return
        if isinstance(error, RpcError):
            call.fail_with(error)
            return
        if isinstance(error, errors.CorruptionError):
            fail(call, errors.DamagedError())
            self.node.damaged(error)
            return
        call.fail(errors.INTERNAL, "internal error")
        if isinstance(error, errors.InvariantError):
            self.node.fatal(error)
        else:
            _log.error("a read request failed", exc_info=error)

    async def propose_versioned(
        self, kind: int, request: Any, caller: Caller | None, identity: Identity, work: int = 0
    ) -> Outcome:
        """Propose an entry of a kind that not every version knows.

        Arguments:
            kind: kind of the entry.
            request: message of the entry.
            caller, identity: caller and identity of the request.
            work: see ``Waiter``.

        Returns:
            The outcome; never a refusal.

        Raises:
            StatusError: some member may run a version that does not know the kind, or the request was refused.
        """
        self._check_capable(FIRST_KNOWN_IN[kind])
        body = versioned(kind, request.SerializeToString())
        outcome = await self.node.propose(kind, body, request, caller, identity=identity, work=work)
        outcome.check()
        return outcome

    def serve(self, server: Server, method: Method, handler: Handler, *, confirms: bool = False) -> None:
        """Serve a method with a coroutine: the request is parsed, a learner refuses it, and raised refusals are sent.

        Arguments:
            server: server of the client ports.
            method: method of the wire contract.
            handler: ``await handler(request, call)`` returns the response.
            confirms: whether the state must be as recent as the call.
        """

        async def handle(data: bytes, call: UnaryCall) -> bytes | list[bytes]:
            request = parse_or_raise(method.request, data)
            with refusals():
                self.admission.check_read(call, serializable=False)
                if confirms:
                    await self.node.confirm_read()
                return await handler(request, call)

        server.unary_async(method.path, handle)

    def answer(self, response: Any, revision: int | None = None) -> bytes:
        """Return a response message with its header.

        Arguments:
            response: message without its header.
            revision: revision in the header; ``None``: the present one.
        """
        head = self.present_header() if revision is None else self.header.encode(revision, self.node.term)
        body: bytes = response.SerializeToString()
        return head + body

    def propose(
        self,
        call: UnaryCall,
        kind: int,
        data: bytes,
        request: Any,
        pending: type[PendingWrite] = PendingWrite,
        work: int = 0,
    ) -> None:
        """Propose a request, or answer why not.

        Arguments:
            call: call to answer.
            kind, data, request: kind of the request, its bytes, and the parsed message.
            pending: answers the call with the outcome.
            work: see ``Waiter``.
        """
        waiter = pending(self, call, request)
        waiter.work = work
        try:
            self.admission.check_write(call, kind, data, request)
            waiter.request_id = self.node.submit(kind, data, waiter, call.caller)
        except errors.StatusError as error:
            fail(call, error)
            return
        call.on_cancel(waiter.cancel)
