"""The common part of a member's services: how a request is parsed, refused, proposed and answered.

    request = parse(call, rpc_pb2.PutRequest, data)          # None: the call was refused
    responder.propose(call, Kind.PUT, data, PendingWrite(responder, call, request))
    node.read(PendingRead(call, request, serve))             # serve(call, request), when this member is recent enough

Callbacks answer their call with ``fail``; coroutines raise, within ``refusals()``. Leaves out what requests mean.
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
from raftkv.loop.scheduler import Slices, Work, hold
from raftkv.pb.services import Method
from raftkv.replica.node.admission import Admission, parse_or_raise, refusals
from raftkv.replica.node.proposals import SURE, Waiter, too_late
from raftkv.replica.node.waits import AwaitableNode
from raftkv.rpc.server.budget import CONNECTION_FULL
from raftkv.rpc.server.calls import ServerCall, UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.rpc.shares import Identity, identity_of, name_of, queue_of_call
from raftkv.rpc.status import RpcError

_log = logging.getLogger(__name__)

Handler = Callable[[Any, UnaryCall], Awaitable[bytes | list[bytes]]]
"""Returns the response to a request that was let in, or raises its refusal."""

SLOW_READ_S: Final = 1.0
"""For a read that takes longer, from its turn to its answer, the log says whose it was."""

SMALL_ANSWER_BYTES: Final = 1024 * 1024
"""An answer that is being put together is not given up below this size for what others take."""


class PendingWrite(Waiter):
    """Answers a call with the outcome of its proposal."""

    __slots__ = ("_growth", "_refusal", "call", "request_id", "service")

    def __init__(self, service: Responder, call: UnaryCall, request: Any) -> None:
        super().__init__(request, identity_of(call), call.deadline)
        self.service = service
        self.call = call
        self.request_id = 0
        self._growth: Growth | None = None
        self._refusal: RpcError | None = None

    @property
    def is_over(self) -> bool:
        """Whether its client has left: of thousands that leave together, each turn lets some go."""
        return self.call.cancelled

    def has_room(self, size_bytes: int) -> bool:
        """Count what the answer takes; False once it would not be taken in the end, or the client is gone."""
        growth = self._growth
        if growth is None:
            growth = self._growth = self.service.growth(self.call)
        try:
            growth(size_bytes)
        except RpcError as error:
            error.__traceback__ = None
            self._refusal = error
            growth.end()
        return self._refusal is None and not self.call.cancelled

    def finish(self, outcome: Outcome) -> None:
        """Reply, or refuse as applying refused."""
        self._end_growth()
        if outcome.error is not None:
            fail(self.call, outcome.error)
        elif self._refusal is not None:
            # It was done all the same; only the answer is too large.
            self.call.fail_with(self._refusal)
        elif outcome.unanswered is not None:
            fail(self.call, outcome.unanswered)
        elif len(outcome.pieces) == 1:
            self.service.reply(self.call, outcome.revision, outcome.pieces[0])
        else:
            self.service.reply_many(self.call, outcome.revision, outcome.pieces)

    def fail(self, error: errors.StatusError) -> None:
        """Answer that no outcome will come."""
        self._end_growth()
        fail(self.call, error)

    def _end_growth(self) -> None:
        if self._growth is not None:
            self._growth.end()

    def cancel(self) -> None:
        """The client is gone: forget the proposal if it is not under way yet."""
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
        """Return whether its client does not wait any more."""
        return self.call.cancelled

    def ready(self) -> None:
        """Serve it."""
        self.execute(self.call, self.request)

    def fail(self, error: errors.StatusError) -> None:
        """Answer that it cannot be served."""
        fail(self.call, error)


def fail(call: UnaryCall, error: errors.StatusError) -> None:
    """Answer with an error's own code and text.

    Arguments:
        call: to be answered.
        error: has both.
    """
    if error.trailers:
        call.fail(error.code, str(error), trailers=error.trailers)
    else:
        call.fail(error.code, str(error))


def parse(call: UnaryCall, message: type[Any], data: bytes, check: Callable[[Any], object] | None = None) -> Any | None:
    """Return the request, or None after the call was refused, because its bytes are none or a check refused it.

    Arguments:
        call: to be refused.
        message: type of the request.
        data: its bytes.
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
    """Counts what an answer takes while it is put together, and gives it up when it would not be taken in the end.

    Arguments:
        call: whose answer it is.
        all_bytes: what all answers of the member take that are being put together, in one cell.

    Attributes:
        held_bytes: what it takes.
    """

    __slots__ = ("_all_bytes", "_call", "held_bytes")

    def __init__(self, call: UnaryCall, all_bytes: list[int]) -> None:
        self._call = call
        self._all_bytes = all_bytes
        self.held_bytes = 0

    def __call__(self, size_bytes: int) -> None:
        """Note so many bytes more. Raises RpcError when it is too much."""
        self.held_bytes += size_bytes
        self._all_bytes[0] += size_bytes
        if self.held_bytes > SMALL_ANSWER_BYTES and self._all_bytes[0] > self._call.room_bytes():
            raise RpcError(errors.RESOURCE_EXHAUSTED, CONNECTION_FULL)

    def end(self) -> None:
        """The answer is made, or given up."""
        self._all_bytes[0] -= self.held_bytes
        self.held_bytes = 0


def _cannot_be(error: Exception) -> None:
    raise error


class Responder:
    """Proposes, reads and answers for the services of one member.

    Arguments:
        node, applier: of the member.
        header: makes the header of responses.
        admission: refuses what this member cannot take.
        check_capable: refuses what needs a version that not all members run.

    Attributes:
        caller_of: finds out once more who makes a call; raises for a token that has ended.
    """

    def __init__(
        self,
        node: AwaitableNode,
        applier: Applier,
        header: HeaderEncoder,
        admission: Admission,
        check_capable: Callable[[tuple[int, int]], None],
    ) -> None:
        self.node = node
        self.applier = applier
        self.header = header
        self.admission = admission
        self._check_capable = check_capable
        self.slices = Slices()
        self.auth = applier.auth
        self.caller_of: Callable[[ServerCall], Caller | None] = lambda call: call.caller
        self._growing_bytes = [0]

    def check_again(self, call: ServerCall, check: Callable[[Rights, Caller | None], None]) -> None:
        """Refuse a read that waited, if users or rights have changed since its call was let in and forbid it now.

        Arguments:
            call: to be answered.
            check: asks the rights of a caller.

        Raises:
            StatusError: as of ``Rights``; the token has ended.
        """
        auth = self.auth
        if auth.is_enabled and (call.caller is None or call.caller.auth_revision != auth.revision):
            call.caller = self.caller_of(call)
            check(self.applier.rights, call.caller)

    def check_on(self, call: ServerCall, check: Callable[[Rights, Caller | None], None]) -> None:
        """Refuse to go on with a call that lasts, by the users and roles of now.

        Where very many calls last, some time passes before all are looked at (``server/auth/guard``). As there, a
        signed token that is older than a change of users goes on.

        Arguments:
            call, check: as of ``check_again``. Raises as it.
        """
        if not self.auth.is_enabled:
            return
        caller, revision = call.caller, self.auth.revision
        if caller is None or caller.auth_revision != revision:
            self.applier.rights.check_known(caller)
            check(self.applier.rights, None if caller is None else Caller(caller.user, revision))

    def revision(self) -> int:
        """Current revision of the store."""
        return self.applier.store.revision

    def present_header(self) -> bytes:
        """Return the header of a response about this moment."""
        return self.header.encode(self.applier.store.revision, self.node.term)

    def reply(self, call: UnaryCall, revision: int, body: bytes = b"") -> None:
        """Answer with a header and a body.

        Arguments:
            call: to be answered.
            revision: for the header.
            body: the rest of the response.
        """
        call.reply(self.header.encode(revision, self.node.term) + body)

    def growth(self, call: UnaryCall) -> Growth:
        """Return what counts the bytes of an answer that is being put together."""
        return Growth(call, self._growing_bytes)

    def reply_many(self, call: UnaryCall, revision: int, pieces: Sequence[bytes]) -> None:
        """Answer with a header and a body in pieces.

        Arguments:
            call: to be answered.
            revision: for the header.
            pieces: of the body, in order.
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
        """Answer a call with what a long read finds in the present, however long it takes.

        Arguments:
            call: to be answered.
            read: begins it on a view of the present; calls ``grow`` with the bytes that it gathers, and keeps these in
                the list ``body``.
            size: about how many keys it looks at.
            check: asks the rights of a caller, when the read begins: it may have waited, and the present have changed.
        """

        def work() -> Work[None]:
            if call.cancelled:
                return
            self.check_again(call, check)
            growth, body, began_s = self.growth(call), list[bytes](), perf_counter()
            try:
                # A lambda: the compiled generator needs a function within it, or cannot be closed once it has ended.
                revision, pieces = yield from hold(
                    self.applier.store.pin, lambda view: read(view, grow=growth, body=body)
                )
            except BaseException:
                # It is given up, or its caller has gone.
                if growth.held_bytes > wire.DROPPED_BYTES:
                    self.slices.run(partial(wire.drop, body), _cannot_be, 0, queue_of_call(call))
                raise
            finally:
                growth.end()
            if perf_counter() - began_s > SLOW_READ_S:
                _log.warning("a read took %.1f s: of %r", perf_counter() - began_s, name_of(queue))
            self.reply_many(call, revision, pieces)

        queue, deadline = queue_of_call(call), call.deadline
        if deadline is not None:
            wait_s = self.slices.wait_s(size, queue)
            if wait_s and wait_s > SURE * (deadline - asyncio.get_running_loop().time()):
                fail(call, too_late("reads", queue, wait_s))
                return
        job = self.slices.run(work, partial(self.refuse_read, call), size, queue)
        if not job.is_over:
            call.on_cancel(job.cancel)

    def check_in_slices(self, call: UnaryCall, check: Callable[[], Work[None]]) -> None:
        """Check a request for as long as it takes, and go on with it, or answer why not.

        Arguments:
            call: to be answered.
            check: begins it; nothing may be written before its last piece.
        """
        job = self.slices.run(check, partial(self.refuse_read, call), 0, queue_of_call(call))
        if not job.is_over:
            call.on_cancel(job.cancel)

    def refuse_read(self, call: UnaryCall, error: Exception) -> None:
        """Answer a read that failed: as it says; what is to be done about damage that it found is not its business.

        A read changes nothing, so an unforeseen failure is this request's alone.

        Arguments:
            call: to be answered.
            error: what ended the read.
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
            _log.error("a read failed", exc_info=error)

    async def propose_versioned(self, kind: int, request: Any, caller: Caller | None, identity: Identity) -> Outcome:
        """Put a request into the log, in an entry of a kind that not every version knows.

        Arguments:
            kind: of the entry.
            request: its message.
            caller, identity: whose it is.

        Returns:
            Its outcome, which is no refusal.

        Raises:
            StatusError: not all members are known to run a version that knows it, or it was refused.
        """
        self._check_capable(FIRST_KNOWN_IN[kind])
        body = versioned(kind, request.SerializeToString())
        outcome = await self.node.propose(kind, body, request, caller, identity=identity)
        outcome.check()
        return outcome

    def serve(self, server: Server, method: Method, handler: Handler, *, confirms: bool = False) -> None:
        """Serve a method by a coroutine: its request is parsed, a learner refuses it, and refusals are raised.

        Arguments:
            server: of the client ports.
            method: of the wire contract.
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

    def answer(self, response: Any) -> bytes:
        """Return a response about this moment, with its header."""
        body: bytes = response.SerializeToString()
        return self.present_header() + body

    def propose(self, call: UnaryCall, kind: int, data: bytes, waiter: PendingWrite) -> None:
        """Put a request into the log, or answer why not.

        Arguments:
            call: to be answered.
            kind, data: the request.
            waiter: answers the call with the outcome.
        """
        try:
            self.admission.check_write(call, kind, data, waiter.request)
            waiter.request_id = self.node.submit(kind, data, waiter, call.caller)
        except errors.StatusError as error:
            fail(call, error)
            return
        call.on_cancel(waiter.cancel)
