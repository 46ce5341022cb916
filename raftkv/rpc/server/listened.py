"""A streaming call without a task: a listener takes each request as it comes, and answers now or later from the loop.

    def keep_alives(call: ListenedCall) -> None:        # called when the header has come; what it raises is the answer
        call.listen(Stream(call))

    call.send_frames_nowait(frames, count)              # answers
    call.finish(frames, count)                          # the last: this, or ``fail_with``, or the client goes

For many short streams: a task, its wake-ups and its cancellation cost three times as much as such a call.

Leaves out: waiting for room. Who answers with ``send_frames_nowait`` looks at ``send_buffer_size`` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from raftkv.rpc.server.calls import ANSWERED, OPEN
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.status import Code, Headers

if TYPE_CHECKING:
    from raftkv.rpc.server.carrier import Carrier
    from raftkv.rpc.server.router import Route

ListenedHandler = Callable[["ListenedCall"], None]
"""Gets the call as it begins, and names its listener."""


class Listener(Protocol):
    """Serves one call."""

    def receive(self, message: bytes) -> None:
        """Take a request. RpcError ends the call."""

    def half_closed(self) -> None:
        """The client has said all."""

    def released(self) -> None:
        """The call is over, in whatever way: comes once, as the last."""


class ListenedCall(StreamCall):
    """A streaming call that a listener serves."""

    __slots__ = ("_listener",)

    def __init__(self, carrier: Carrier, stream_id: int, headers: Headers, route: Route) -> None:
        super().__init__(carrier, stream_id, headers, route)
        self._listener: Listener | None = None
        self.begin(route.handler)

    def begin(self, handler: ListenedHandler) -> None:
        """Call a handler, for whoever guards it and had to wait; of a call that is over, nobody wants to know.

        Arguments:
            handler: names the listener.
        """
        if self.done:
            return
        try:
            handler(self)
        except Exception as error:
            self.fail_for(error)

    def listen(self, listener: Listener) -> None:
        """Hand what the client says to a listener: what has come already at once.

        Arguments:
            listener: of this call alone.
        """
        self._listener = listener
        self.inbox.deliver_to(listener.receive)
        if self.request_done:
            listener.half_closed()

    def finish(self, frames: bytes = b"", count: int = 0) -> None:
        """Answer OK behind what was sent, unless the call is over.

        Arguments:
            frames, count: the last answers, as for ``send_frames_nowait``.
        """
        if frames and not self._finish_whole(frames, count):
            self.send_frames_nowait(frames, count)
        self._finish_ok()

    def _finish_whole(self, frames: bytes, count: int) -> bool:
        """Send all that is answered at once, as a unary call does; whether that was possible."""
        if self._state != OPEN or self._sent_headers or not self._carrier.answer_stream(self.stream_id, frames):
            return False
        self._sent_headers = True
        self._state = ANSWERED
        self.route.counts.sent += count
        self.route.counts.answered += 1
        self._carrier.finished(self)
        if self.observer is not None:
            self.observed(Code.OK)
        return True

    def _half_closed(self) -> None:
        super()._half_closed()
        if self._listener is not None and self.request_done:
            self._listener.half_closed()

    def released(self) -> None:
        """Tell the listener, which usually holds the call."""
        super().released()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.released()
