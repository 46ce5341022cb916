"""The client's unary call: the future that its caller awaits *is* the call.

One object per call and no task: the future knows its stream, resets the stream when it is cancelled, and fails at its
deadline.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from raftkv.loop.timers import Expiring, forget
from raftkv.rpc.framing import MessageAssembler, frame
from raftkv.rpc.status import Code, Headers, RpcError

if TYPE_CHECKING:
    from raftkv.rpc.client.channel import Channel
    from raftkv.rpc.client.core import ClientCore

DEADLINE_TEXT = "context deadline exceeded"
_REFUSALS_MAX = 20


class UnaryFuture(asyncio.Future[bytes]):
    """Resolves to the serialized response, or raises RpcError.

    Attributes:
        trailers: trailing metadata of the server (header form), once done.
    """

    __slots__ = (
        "assembler",
        "bucket",
        "channel",
        "core",
        "deadline",
        "headers",
        "message",
        "refusals",
        "request",
        "stream_id",
        "trailers",
        "wait_for_ready",
    )

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop, headers: Headers, request: bytes) -> None:
        super().__init__(loop=loop)
        self.assembler: MessageAssembler | None = None
        self.bucket: dict[Expiring, None] | None = None
        self.channel = channel
        self.core: ClientCore | None = None
        self.deadline: float | None = None
        self.headers = headers
        self.message: bytes | None = None
        self.refusals = 0
        self.request = request
        self.stream_id = 0
        self.trailers: Headers = ()
        self.wait_for_ready = False

    def begin(self, core: ClientCore) -> None:
        """Send the request on a connection that has a free stream."""
        self.core = core
        core.start_unary(self, self.headers, frame(self.request))

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the call: its stream is reset, or it leaves the queue."""
        if self.done():
            return False
        self._withdraw()
        return super().cancel(msg)

    def expire(self) -> None:
        """Fail the call: its deadline has passed."""
        if not self.done():
            definite = self.core is None
            self._withdraw()
            self.set_exception(RpcError(Code.DEADLINE_EXCEEDED, DEADLINE_TEXT, definite=definite))

    def _withdraw(self) -> None:
        if self.bucket is not None:
            forget(self)
        if self.core is not None:
            self.core.forget(self)
        else:
            self.channel.withdraw(self)

    # ---- called by the core

    def request_headers(self) -> Headers:
        """Return the request's header fields."""
        return self.headers

    def started(self, core: ClientCore) -> None:
        """Do nothing: the whole request has been sent."""

    def on_headers(self, headers: Headers) -> None:
        """Ignore initial metadata: a unary call has no use for it."""

    def on_message(self, message: bytes) -> None:
        """Store the complete response message."""
        if self.message is not None:
            raise RpcError(Code.INTERNAL, "cardinality violation: received multiple response messages for unary RPC")
        self.message = message

    def on_data(self, data: bytes) -> None:
        """Take a piece of the response message."""
        core = self.core
        if core is None:
            raise RuntimeError("data for a call that was never sent")
        if self.assembler is None:
            self.assembler = core.make_assembler()
        try:
            for message in self.assembler.feed(data):
                self.on_message(message)
        finally:
            core.consume(len(data), self.stream_id)

    def on_refused(self) -> bool:
        """Requeue the call that the server refused. Returns False if it was refused too often.

        A server counts a stream a little longer than its client does, so a refusal near the limit is not a fault.
        """
        self.refusals += 1
        if self.refusals > _REFUSALS_MAX or self.done():
            return False
        self.core = None
        self.channel.requeue(self)
        return True

    def on_end(self, error: RpcError | None, trailers: Headers) -> None:
        """End the call: its stream has ended."""
        if self.bucket is not None:
            forget(self)
        if self.done():
            return
        self.trailers = trailers
        if error is not None:
            self.set_exception(error)
        elif self.message is None:
            text = "cardinality violation: received no response message for unary RPC"
            self.set_exception(RpcError(Code.INTERNAL, text))
        else:
            self.set_result(self.message)

    def fail(self, error: RpcError) -> None:
        """End a call that was never sent."""
        self.on_end(error, ())
