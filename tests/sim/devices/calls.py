"""Calls of clients and other members without sockets: the calls as services see them, and the registry of handlers.

An answer is sent at the end of the turn that made it (``Outbox``), as on a corked connection; answers not sent when a
member dies are lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raftkv.apply.wire import MEMBER, Caller
from raftkv.errors import StatusError
from raftkv.loop.cork import Cork
from raftkv.rpc.framing import MessageAssembler
from raftkv.rpc.server.calls import Peer
from raftkv.rpc.server.stream import Listener
from raftkv.rpc.status import RpcError

if TYPE_CHECKING:
    from tests.sim.member import Member

Answer = Callable[[bytes | None, RpcError | None], None]
ROOM_BYTES = 1 << 30


CALLER = "sim-user"
"""Metadata that names the user."""

IDENTITY = "sim-identity"
"""Metadata that names in whose share a call falls; without it, all share one."""


class Handlers:
    """The part of ``rpc.server.Server`` that services register with."""

    def __init__(self) -> None:
        self.by_path: dict[str, Any] = {}
        self.listened_paths: set[str] = set()

    def unary(self, path: str, handler: Any) -> None:
        self.by_path[path] = handler

    stream = unary

    def listened(self, path: str, handler: Any) -> None:
        self.by_path[path] = handler
        self.listened_paths.add(path)

    def unary_async(self, path: str, handler: Any) -> None:
        async def answer(call: Call, request: bytes) -> None:
            try:
                response = await handler(request, call)
                call.reply(response if isinstance(response, bytes) else b"".join(response))
            except RpcError as error:
                call.fail_with(error)
            except StatusError as error:
                call.fail(error.code, str(error))

        tasks: set[asyncio.Task[None]] = set()

        def start(call: Call, request: bytes) -> None:
            task = asyncio.get_running_loop().create_task(answer(call, request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        self.by_path[path] = start


class Outbox:
    """The connections of one life of a member: queued data is sent when the turn ends.

    Arguments:
        cork: of the member.
    """

    def __init__(self, cork: Cork) -> None:
        self._cork = cork
        self._is_lost = False
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def put(self, deliver: Callable[..., None], *arguments: Any) -> None:
        """Send when the turn ends."""
        if self._is_lost:
            return
        if not self._waiting:
            self._cork.mark(self)
        self._waiting.append((deliver, arguments))

    def flush(self) -> None:
        """Send all queued data."""
        waiting, self._waiting = self._waiting, []
        for deliver, arguments in waiting:
            deliver(*arguments)

    def lose(self) -> None:
        """Drop all queued data, because the process is gone."""
        self._is_lost, self._waiting = True, []


class Call:
    """A unary call as its handler sees it.

    Arguments:
        outbox: of the member that answers.
        answer: gets the response, or the error.
        metadata: of the caller.
    """

    peer = Peer("simulated", identity="simulated")
    severed = cancelled = False
    caller: Caller | None = None
    deadline: float | None = None

    def __init__(self, outbox: Outbox, answer: Answer, metadata: dict[str, str] | None = None) -> None:
        self.metadata = metadata or {}
        if IDENTITY in self.metadata:
            self.peer = Peer("simulated", identity=self.metadata[IDENTITY])
        self.identity = self.peer.identity
        self.headers = tuple((name.encode(), value.encode()) for name, value in self.metadata.items())
        self.done = False
        self._outbox = outbox
        self._answer = answer

    def reply(self, message: bytes, trailers: object = ()) -> None:
        self._end(message, None)

    def reply_many(self, pieces: list[bytes]) -> None:
        self._end(b"".join(pieces), None)

    def fail(self, code: int, text: str = "", **_more: object) -> None:
        self._end(None, RpcError(code, text))

    def fail_with(self, error: RpcError) -> None:
        self._end(None, error)

    def _end(self, message: bytes | None, error: RpcError | None) -> None:
        if not self.done:
            self.done = True
            self._outbox.put(self._answer, message, error)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Ignore the callback: simulated clients do not cancel."""

    def room_bytes(self) -> int:
        return ROOM_BYTES


class Stream:
    """A streaming call: the handler's interface, and the actions of its client.

    Arguments:
        number: orders streams, as the seed decides.
        take: gets each response.
        ended: called at the end, with the error if there was one.
    """

    headers: tuple[tuple[bytes, bytes], ...] = ()
    peer = Peer("simulated", identity="simulated")
    caller = MEMBER
    crowded = False
    connection_send_buffer_size = 0

    def __init__(
        self, number: int, take: Callable[[bytes], None], ended: Callable[[BaseException | None], None]
    ) -> None:
        self.number = number
        self.severed = False
        self.is_over = False
        self.done = False
        """The member has answered, or the client is gone: what its handler sees."""
        self.is_stalled = False
        """The client does not read: what is sent waits."""
        self._take = take
        self._ended = ended
        self._assembler = MessageAssembler(ROOM_BYTES)
        self._listener: Callable[[bytes], None] | None = None
        self._served_by: Listener | None = None
        """Who is to hear that the call is over, if it has no task."""
        self._unread: list[bytes] = []
        self._on_room: Callable[[], None] | None = None
        self._task: asyncio.Task[None] | None = None

    # -- the handler's side ---------------------------------------------------------------------------------

    async def receive(self) -> bytes | None:
        return await self._requests.get()

    def deliver_to(self, listener: Callable[[bytes], None]) -> None:
        self._listener = listener
        while not self._requests.empty():
            data = self._requests.get_nowait()
            if data is not None:
                listener(data)

    def listen(self, listener: Listener) -> None:
        self._served_by = listener
        self.deliver_to(listener.receive)

    def finish(self, frames: bytes = b"", count: int = 0) -> None:
        if frames:
            self.send_frames_nowait(frames, count)
        self._answer(None)

    def fail_with(self, error: RpcError) -> None:
        self._answer(error)

    abort = fail_with

    def _answer(self, error: RpcError | None) -> None:
        self.done = True
        self._release()
        self._outbox.put(self._finish, error)

    def _release(self) -> None:
        listener, self._served_by = self._served_by, None
        if listener is not None:
            listener.released()

    def send_frames_nowait(self, frames: bytes, count: int) -> None:
        if self.is_stalled:
            self._unread.append(frames)
        else:
            self._outbox.put(self._arrive, frames)

    @property
    def send_buffer_size(self) -> int:
        """Unread bytes; each counts as 64 KiB, so that watchers fall behind soon."""
        return sum(map(len, self._unread)) << 16

    def on_room(self, callback: Callable[[], None] | None) -> None:
        self._on_room = callback

    # -- the client's side ----------------------------------------------------------------------------------

    def start(self, member: Member, path: str) -> None:
        """Begin; on the member's loop."""
        self._outbox = member.outbox
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        handler = member.handlers.by_path[path]
        if path not in member.handlers.listened_paths:
            self._task = asyncio.get_running_loop().create_task(handler(self))
            self._task.add_done_callback(self._over)
            return
        try:
            handler(self)
        except RpcError as error:
            self._answer(error)

    def send(self, message: bytes) -> None:
        """Send a request. Runs on the member's loop."""
        if self.is_over:
            return
        if self._listener is None:
            self._requests.put_nowait(message)
            return
        try:
            self._listener(message)
        except RpcError as error:
            self._release()
            self._finish(error)

    def close(self, *, severed: bool = True) -> None:
        """End the call, or break the client's connection. Runs on the member's loop."""
        self.severed, self.is_over, self.done = severed, True, True
        self._release()
        if self._task is not None:
            self._task.cancel()

    def stall(self) -> None:
        """Stop reading at the client."""
        self.is_stalled = True

    def read_again(self) -> None:
        """Read the waiting responses and continue. Runs on the member's loop."""
        self.is_stalled = False
        unread, self._unread = self._unread, []
        for frames in unread:
            self._arrive(frames)
        if self._on_room is not None:
            self._on_room()

    def broke(self, *, severed: bool = False) -> None:
        """Handle the loss of the member or of its connection."""
        self._finish(ConnectionResetError("severed") if severed else ConnectionError("the member is gone"))

    def _arrive(self, frames: bytes) -> None:
        for message in self._assembler.feed(frames):
            if not self.is_over:
                self._take(message)

    def _over(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        self._outbox.put(self._finish, error)

    def _finish(self, error: BaseException | None) -> None:
        if not self.is_over:
            self.is_over = True
            self._ended(error)
