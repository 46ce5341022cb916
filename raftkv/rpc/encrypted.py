"""TLS over a transport: a protocol for the socket below, and a transport for the protocol above.

    tls = EncryptedTransport(below, context, server_side=True)
    below.set_protocol(tls)
    await tls.handshake(first_bytes)
    tls.set_protocol(protocol)
    tls.resume_reading()

asyncio has the same; this one exists for what that does not do:

1. Whoever is refused learns why: an alert leaves before the connection ends, in both directions.
2. What a turn writes is encrypted and sent in one go, and all records that one read brought are handed over together.
   A small request and its answer cost a third of what they do in asyncio.
3. Connections share one buffer for what they read: asyncio keeps 256 KiB for each.

Nothing is read between the end of the handshake and ``resume_reading``. The end of the connection needs no goodbye: the
protocols above have their own, and ``close`` says one without waiting for the other's.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Final, cast

from raftkv.loop.cycle_free import forget_frames
from raftkv.rpc.protocol import READ_BYTES, read_buffer

_RECORD_BYTES: Final = 16 * 1024
READ_MAX_BYTES: Final = 32 * 1024
"""Most that is decrypted at a time: filled with changes of keys, it costs OpenSSL some 20 ms."""
SHARE_MIN: Final = 8
"""A full read of which less than one part in so many is data ends the connection; one-frame records are one in four."""
ANSWERS_MAX_BYTES: Final = 64 * 1024
"""What TLS itself may have waiting for a peer that does not read: answers to changes of keys."""


class EncryptedTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """One connection under TLS.

    Arguments:
        below: the transport of the socket; its protocol becomes this one.
        context: of the handshake.
        server_side: whether the other end connected to us.
        server_hostname: the name that its certificate must have, where we connected.
        take_turn: calls back when a step of the handshake may be done; None: at once.
    """

    def __init__(
        self,
        below: asyncio.Transport,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        server_hostname: str | None = None,
        take_turn: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        super().__init__()
        self._below = below
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side, server_hostname)
        self._buffer = read_buffer()
        self._answered_bytes = 0
        self._protocol: asyncio.BaseProtocol | None = None
        self._is_buffered = False
        self._paused = False
        self._closing = False
        self._ended = False
        self._error: Exception | None = None
        self._shaken: asyncio.Future[None] | None = None
        self._take_turn = take_turn
        below.set_protocol(self)

    # ---- the handshake

    async def handshake(self, first: bytes = b"") -> None:
        """Shake hands; reading is paused after that.

        Arguments:
            first: what the other end has sent already.

        Raises:
            OSError: it failed (``ssl.SSLError``), or the connection has gone. The transport below is closing.
        """
        self._shaken = asyncio.get_running_loop().create_future()
        self._incoming.write(first)
        self._shake()
        try:
            await self._shaken
        finally:
            self._shaken = None

    def _shake(self) -> None:
        shaken = self._shaken
        if shaken is None or shaken.done():
            return
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send()
            self._below.resume_reading()
            return
        except ssl.SSLError as error:
            self._send()  # the alert
            self._below.close()
            shaken.set_exception(error)
            return
        self._send()
        self.pause_reading()
        shaken.set_result(None)

    def _send(self) -> None:
        if self._outgoing.pending:
            self._below.write(self._outgoing.read())

    # ---- what the socket brings

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the socket shall put what it reads."""
        return self._buffer[:READ_MAX_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have been read: decrypt them, and hand them over."""
        self._incoming.write(self._buffer[:nbytes])
        if self._shaken is not None and self._take_turn is not None:
            self._below.pause_reading()
            self._take_turn(self._shake)
        elif self._shaken is not None:
            self._shake()
        elif self._protocol is not None:
            count = self._deliver()
            if nbytes == READ_MAX_BYTES and count * SHARE_MIN < nbytes and not self._paused:
                self.abort()  # nobody has a reason to send so much that is no data

    def _deliver(self) -> int:
        """Decrypt and hand over what is here; how many bytes of data it was."""
        total = 0
        while not self._paused and not self._ended and not self._closing:
            count = self._read_some()
            total += count
            if count < READ_BYTES - _RECORD_BYTES:
                break
        if self._outgoing.pending:
            self._answer()
        return total

    def _fail(self, error: ssl.SSLError) -> None:
        """The other end has broken the connection: say so, unless it does not read what it was sent before."""
        forget_frames(error)  # they hold this, and the error
        self._error = error
        self._closing = True  # OpenSSL takes nothing to be encrypted any more either
        if self._below.get_write_buffer_size():
            self._below.abort()  # nobody watches a connection for long that is closing
        self._send()
        self._below.close()

    def _answer(self) -> None:
        """Send what TLS itself has to say, such as to a change of keys; not without end to who does not read."""
        self._answered_bytes = self._outgoing.pending + (self._answered_bytes if self.get_write_buffer_size() else 0)
        if self._answered_bytes > ANSWERS_MAX_BYTES:
            self.abort()
        else:
            self._send()

    def _read_some(self) -> int:
        """Hand over all records that are here, as far as the buffer has room; how many bytes."""
        protocol = self._protocol
        buffer = self._buffer
        if protocol is None:
            return 0
        if self._is_buffered:
            buffer = cast(memoryview, cast(asyncio.BufferedProtocol, protocol).get_buffer(READ_BYTES))
        tls, incoming = self._tls, self._incoming
        count = 0
        is_over = False
        broken: ssl.SSLError | None = None
        while count <= READ_BYTES - _RECORD_BYTES:
            try:
                read = cast(int, tls.read(_RECORD_BYTES, buffer[count:]))
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError as error:
                broken = error  # what came before it is sound
                break
            if not read:  # its goodbye
                is_over = True
                break
            count += read
            if not incoming.pending and not tls.pending():
                break
        if count and self._is_buffered:
            cast(asyncio.BufferedProtocol, protocol).buffer_updated(count)
        elif count:
            cast(asyncio.Protocol, protocol).data_received(bytes(buffer[:count]))
        if broken is not None:
            self._fail(broken)
        elif is_over:
            self._end()
        return count

    def _end(self) -> None:
        """The other end says that nothing more comes."""
        if not self._ended:
            self._ended = True
            protocol = cast(asyncio.Protocol, self._protocol)
            if protocol is None or not protocol.eof_received():
                self.close()

    def eof_received(self) -> bool:
        """The other end closed its connection."""
        if self._shaken is None and self._protocol is not None:
            self._end()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has gone."""
        self._closing = self._ended = True
        if self._shaken is not None and not self._shaken.done():
            self._shaken.set_exception(exc or ConnectionResetError("connection reset by peer"))
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(self._error or exc)
        self._error = None

    def pause_writing(self) -> None:
        """The socket takes no more."""
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """The socket takes more again."""
        if self._protocol is not None:
            self._protocol.resume_writing()

    # ---- what the protocol above asks for

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send; a connection that this fails on ends, as it would if its socket had failed."""
        if self._closing or not data:
            return
        try:
            self._tls.write(data)
        except ssl.SSLError as error:
            self._error = error
            self.abort()
            return
        self._below.write(self._outgoing.read())

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand what is read to a protocol."""
        self._protocol = protocol
        self._is_buffered = isinstance(protocol, asyncio.BufferedProtocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return what was set."""
        return cast(asyncio.BaseProtocol, self._protocol)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the ``ssl_object``, or what the socket knows."""
        return self._tls if name == "ssl_object" else self._below.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or about to be."""
        return self._closing or self._below.is_closing()

    def close(self) -> None:
        """Send what is written, and a goodbye, and close."""
        if self._closing:
            return
        self._closing = True
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            pass  # it waits for the other's goodbye, which nobody needs
        self._send()
        self._below.close()

    def abort(self) -> None:
        """Cut the connection."""
        self._closing = True
        self._below.abort()

    def is_reading(self) -> bool:
        """Return whether the socket is read."""
        return not self._paused and self._below.is_reading()

    def pause_reading(self) -> None:
        """Read no more for now."""
        self._paused = True
        self._below.pause_reading()

    def resume_reading(self) -> None:
        """Read again, what is here already first."""
        self._paused = False
        self._below.resume_reading()
        if self._protocol is not None:
            self._deliver()

    def get_write_buffer_size(self) -> int:
        """Bytes that wait for the socket, encrypted."""
        return self._below.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set when ``pause_writing`` is called; of encrypted bytes."""
        self._below.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return what was set."""
        return self._below.get_write_buffer_limits()

    def can_write_eof(self) -> bool:
        """TLS has no half-closed connections that anybody uses."""
        return False
