"""The receiving half of a stream: messages in, one reader, window credit returned as the reader takes messages.

Both ends use it. Bytes of finished messages keep the window closed until they are read. Bytes of an unfinished message
are returned as they arrive, otherwise a message larger than the window could never arrive. When it is finished, nothing
more is returned until the reader has caught up with that advance. One stream thus holds at most its window plus one
message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from copy import copy

from raftkv.rpc.framing import PREFIX_BYTES, MessageAssembler

MESSAGE_OVERHEAD_BYTES = 56
"""Cost of a message beyond its bytes: otherwise a stream of empty messages would cost nothing."""


class Inbox:
    """Messages of one stream, read by one task.

    Attributes:
        consume: called with the number of bytes that may be returned to the peer's window.
        tap: called once with each message, just before the reading task gets it.
    """

    __slots__ = (
        "_again",
        "_error",
        "_listener",
        "_messages",
        "_received",
        "_returned",
        "_waiter",
        "assembler",
        "consume",
        "ended",
        "tap",
        "unread",
    )

    def __init__(self, assembler: MessageAssembler, consume: Callable[[int], None]) -> None:
        self.assembler = assembler
        self.tap: Callable[[bytes], None] | None = None
        self.unread = 0
        self.consume = consume
        self._again = False
        """Whether the next message was read before (``put_back``)."""
        self._listener: Callable[[bytes], None] | None = None
        self._messages: deque[bytes] = deque()
        self._received = 0
        self._returned = 0
        self.ended = False
        """True once the peer has half-closed."""
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def deliver_to(self, listener: Callable[[bytes], None]) -> None:
        """Pass every message to ``listener`` as it arrives, not to a reading task; ``get`` then returns only the end.

        This saves a task switch per message. The listener must keep up: its messages never keep the window closed.
        """
        self._listener = listener
        while self._messages and self._listener is not None:
            listener(self._take())

    def feed(self, data: bytes) -> int:
        """Take a DATA payload, and return how many messages it completed. Raises as ``MessageAssembler.feed``."""
        self._received += len(data)
        if self._listener is not None:
            try:
                messages = self.assembler.feed(data)
                for message in messages:
                    if self._listener is not None:  # the message before may have ended the call
                        self._listener(message)
            finally:
                self._settle()
            return len(messages)
        try:
            messages = self.assembler.feed(data)
            for message in messages:
                self._messages.append(message)
                self.unread += PREFIX_BYTES + len(message)
        finally:
            self._settle()
        self._wake()
        return len(messages)

    def end(self) -> None:
        """Note that the peer has sent its last message."""
        self.ended = True
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Make later reads raise ``error``, after the messages that arrived before."""
        if self._error is None:
            self._error = error
        self._wake()

    def discard(self) -> None:
        """Drop unread messages, and return all their bytes to the window."""
        self._messages.clear()
        self.unread = 0
        self._settle()

    def release(self) -> None:
        """Deliver nothing more. This breaks a cycle: the listener usually holds the call, and the call this inbox."""
        self._listener = self.tap = None

    @property
    def held_bytes(self) -> int:
        """Memory in use beyond the bytes that keep the window closed.

        It includes the unfinished message, the cost of messages as objects, and bytes of unread messages that were
        returned to the window before their message was whole, or that decompression added.
        """
        held, count = self.assembler.held_bytes, len(self._messages)
        if count:
            held += MESSAGE_OVERHEAD_BYTES * count + max(0, self.unread - self._received + self._returned)
        return held

    async def get(self) -> bytes | None:
        """Return the next message; None after the last. Raises the error passed to ``fail``."""
        while not self._messages:
            if self._error is not None:
                # A copy: a raised error holds the frames that it passes, and those hold this inbox.
                raise copy(self._error)
            if self.ended:
                return None
            await self._wait()
        return self._take()

    def put_back(self, message: bytes) -> None:
        """Put a message back in front of all others, to be read again."""
        self._messages.appendleft(message)
        self._again = True
        self.unread += PREFIX_BYTES + len(message)

    def _take(self) -> bytes:
        message = self._messages.popleft()
        self.unread -= PREFIX_BYTES + len(message)
        self._settle()
        if self.tap is not None and not self._again:
            self.tap(message)
        self._again = False
        return message

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RuntimeError("two tasks read one stream")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _settle(self) -> None:
        # Negative when a finished message is unread, and its first part was returned early.
        amount = self._received - self.unread - self._returned
        if amount > 0:
            self._returned += amount
            self.consume(amount)
