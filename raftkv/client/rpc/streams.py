"""A streaming call of the client: request messages out, parsed messages in, errors by name.

::

    async with await client.stream(methods.WATCH) as stream:
        await stream.send(rpc_pb2.WatchRequest(create_request=...))
        async for answer in stream:
            ...

The iteration ends when the member ends the call well, and raises ``StatusError`` otherwise. Nothing is repeated here.
One task reads a stream. Answers that nobody reads stay in the connection's window: they close it for this stream alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from raftkv.client.errors import from_status
from raftkv.client.rpc.methods import parse_answer
from raftkv.rpc.status import RpcError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from raftkv.rpc.client.stream import ClientStream

T = TypeVar("T", bound="Message")


class Stream(Generic[T]):
    """One streaming call, as ``Client.stream`` returns it.

    Attributes:
        endpoint: where it goes, as the client's ``endpoints`` write it.
        call: the call below, which deals in bytes.
        token: that it was opened with; empty: none.
    """

    __slots__ = ("_response", "call", "endpoint", "token")

    def __init__(self, call: ClientStream, response: type[T], endpoint: str, token: str = "") -> None:
        self.call = call
        self.endpoint = endpoint
        self.token = token
        self._response = response

    async def send(self, request: Any) -> None:
        """Send a request message, after waiting for room in the send buffer.

        Raises:
            StatusError: the call has ended.
        """
        try:
            await self.call.send(request.SerializeToString())
        except RpcError as error:
            raise from_status(error.code, error.text, definite=error.definite) from None

    def send_nowait(self, request: Any) -> None:
        """Send a request message without waiting for room, whatever is queued already."""
        try:
            self.call.send_nowait(request.SerializeToString())
        except RpcError as error:
            raise from_status(error.code, error.text, definite=error.definite) from None

    async def receive(self) -> T | None:
        """Return the next message; None after the last.

        Raises:
            StatusError: the call has failed; with UNAVAILABLE another endpoint may do better.
        """
        try:
            message = await self.call.receive()
        except RpcError as error:
            raise from_status(error.code, error.text, definite=error.definite) from None
        if message is None:
            return None
        return parse_answer(self._response, message)

    def half_close(self) -> None:
        """Send no more; the member sees the end of the requests."""
        self.call.half_close()

    def cancel(self) -> None:
        """Give up the call: cancel it at the member, drop what was not read."""
        self.call.cancel()

    @property
    def connected(self) -> bool:
        """Whether it has found a connection; until then nothing of it has been sent."""
        return self.call.under_way

    @property
    def done(self) -> bool:
        """Whether the call has ended."""
        return self.call.done

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        message = await self.receive()
        if message is None:
            raise StopAsyncIteration
        return message

    async def __aenter__(self) -> Stream[T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
