"""TLS of a connection: its policy (``Security``), and a transport that encrypts (``EncryptedTransport``).

    tls = EncryptedTransport(below, context, server_side=True)
    below.set_protocol(tls)
    await tls.handshake(first_bytes)
    tls.set_protocol(protocol)
    tls.resume_reading()

``Security`` provides a context for each handshake, and admits or refuses the peer. A plain ``ssl.SSLContext`` is enough
if neither changes (``fixed``). Implementations also handle replaced certificates, revoked certificates and allowed
names (for a member: ``server.tls.ports``).

``EncryptedTransport`` is a protocol for the socket below and a transport for the protocol above, like asyncio's. It
does three things that asyncio's does not:

1. A refused peer learns why: an alert is sent before the connection ends, in both directions.
2. The output of a turn is encrypted and sent at once, and all records of one read are delivered together. A small
   request and its answer cost a third of what they cost in asyncio.
3. Connections share one read buffer: asyncio keeps 256 KiB for each.

No bytes are read between the end of the handshake and ``resume_reading``. A connection may end without close_notify:
the protocols above have their own end marks. ``close`` sends a close_notify and does not wait for the peer's.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, cast

from raftkv.loop.cycle_free import forget_frames, nothing
from raftkv.loop.fair import Identity
from raftkv.rpc.protocol import READ_BYTES, read_buffer

SERVER_PROTOCOLS: Final = ("h2", "http/1.1")
CLIENT_PROTOCOLS: Final = ("h2",)


class RefusedPeerError(Exception):
    """The peer has a valid certificate and is refused all the same; the text says why."""


class Security(Protocol):
    """The TLS policy of one listener, or of outgoing connections."""

    def context(self) -> ssl.SSLContext:
        """Return the context for the next handshake, with its ALPN protocols."""

    async def admit(self, tls: ssl.SSLObject, address: str) -> None:
        """Check the peer of a finished handshake.

        Arguments:
            tls: TLS object of the connection.
            address: ``host:port`` of the peer, or ``unix:``.

        Raises:
            RefusedPeerError: the peer is refused.
        """

    def opened(self, tls: ssl.SSLObject, address: str, cut: Callable[[], None]) -> Callable[[], None]:
        """Note an admitted connection. Called in the same loop turn in which ``admit`` returned.

        Arguments:
            tls, address: as in ``admit``.
            cut: ends the connection; called when its certificate expires or is revoked.

        Returns:
            A function to be called when the connection has ended.
        """

    def failed(self, address: str, reason: str) -> None:
        """Note a failed handshake.

        Arguments:
            address: address of the peer.
            reason: a few words.
        """


class _Fixed:
    def __init__(self, context: ssl.SSLContext, protocols: tuple[str, ...]) -> None:
        context.set_alpn_protocols(list(protocols))
        self._context = context

    def context(self) -> ssl.SSLContext:
        return self._context

    async def admit(self, tls: ssl.SSLObject, address: str) -> None:
        """Admit every peer that the context accepted."""

    def opened(self, tls: ssl.SSLObject, address: str, cut: Callable[[], None]) -> Callable[[], None]:
        return nothing

    def failed(self, address: str, reason: str) -> None:
        """Ignore it."""


def fixed(tls: ssl.SSLContext | Security, protocols: tuple[str, ...]) -> Security:
    """Return a ``Security`` that always uses the same context.

    Arguments:
        tls: context; a ``Security`` is returned unchanged.
        protocols: ALPN protocols.
    """
    return _Fixed(tls, protocols) if isinstance(tls, ssl.SSLContext) else tls


def common_name_of(certificate: Mapping[str, Any] | None) -> str:
    """Return the common name of a certificate's subject; empty if there is none, or more than one.

    Arguments:
        certificate: certificate as decoded by ``ssl``.
    """
    subject = (certificate or {}).get("subject", ())
    names = [value for part in subject for kind, value in part if kind == "commonName"]
    return str(names[0]) if len(names) == 1 else ""


def reason_of(error: BaseException) -> str:
    """Return why a handshake failed, in a few words and without line numbers of OpenSSL's source.

    Arguments:
        error: error of the handshake.
    """
    if isinstance(error, RefusedPeerError):
        return str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message.rstrip('.')}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return _ALERTS.get(error.reason, error.reason.lower().replace("_", " "))
    if isinstance(error, ConnectionResetError):
        return "connection reset by peer"
    if isinstance(error, TimeoutError):
        return "the handshake was not finished in time"
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()


_ALERTS: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client showed no certificate",
    "HTTP_REQUEST": "the client speaks plain HTTP",
    "WRONG_VERSION_NUMBER": "the other end does not speak TLS",
    "NO_SHARED_CIPHER": "no cipher suite in common",
    "UNSUPPORTED_PROTOCOL": "no version of TLS in common",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the other end refused the version of TLS",
    "TLSV1_ALERT_UNKNOWN_CA": "the other end does not know the authority of our certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the other end refused our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the other end says that our certificate has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "the other end says that our certificate is revoked",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the other end refused our certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the other end requires a certificate, and none was shown",
}


_RECORD_BYTES: Final = 16 * 1024
READ_MAX_BYTES: Final = 32 * 1024
"""Most bytes decrypted at once: OpenSSL takes some 20 ms if all of them are key updates."""
SHARE_MIN: Final = 8
"""A full read with less than one eighth of data ends the connection. Records of one frame each are one quarter data."""
ANSWERS_MAX_BYTES: Final = 64 * 1024
"""TLS's own output (answers to key updates) that may wait for a peer that does not read."""


class EncryptedTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """One connection under TLS.

    Arguments:
        below: transport of the socket; its protocol is replaced by this object.
        context: TLS context of the handshake.
        server_side: whether the peer connected to us.
        server_hostname: name that the peer's certificate must have, if we connected.
        take_turn: calls back when a handshake step may run; None: run it at once.
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
        """Do the handshake. Reading is paused when it returns.

        Arguments:
            first: bytes already received from the peer.

        Raises:
            OSError: the handshake failed (``ssl.SSLError``), or the connection is lost. The transport below is closing.
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

    @property
    def queue(self) -> Identity | None:
        """Queue in which input from the socket waits for its turn, if the protocol above knows one."""
        return getattr(self._protocol, "queue", None)

    # ---- input from the socket

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer that the socket reads into."""
        return self._buffer[:READ_MAX_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Decrypt received bytes, and deliver them."""
        self._incoming.write(self._buffer[:nbytes])
        if self._shaken is not None and self._take_turn is not None:
            self._below.pause_reading()
            self._take_turn(self._shake)
        elif self._shaken is not None:
            self._shake()
        elif self._protocol is not None:
            count = self._deliver()
            if nbytes == READ_MAX_BYTES and count * SHARE_MIN < nbytes and not self._paused:
                self.abort()  # no honest peer sends so much without data

    def _deliver(self) -> int:
        """Decrypt and deliver received bytes. Returns the number of data bytes."""
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
        """End a connection that the peer broke. Sends an alert, unless the peer does not read earlier output."""
        forget_frames(error)  # they hold this object, and the error
        self._error = error
        self._closing = True  # OpenSSL takes nothing to be encrypted any more either
        if self._below.get_write_buffer_size():
            self._below.abort()  # no timer watches a closing connection for long
        self._send()
        self._below.close()

    def _answer(self) -> None:
        """Send TLS's own output, such as the answer to a key update; bounded if the peer does not read."""
        self._answered_bytes = self._outgoing.pending + (self._answered_bytes if self.get_write_buffer_size() else 0)
        if self._answered_bytes > ANSWERS_MAX_BYTES:
            self.abort()
        else:
            self._send()

    def _read_some(self) -> int:
        """Deliver received records, as far as the buffer has room. Returns the number of bytes."""
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
                broken = error  # the bytes before it are valid
                break
            if not read:  # close_notify
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
        """Handle the peer's close_notify."""
        if not self._ended:
            self._ended = True
            protocol = cast(asyncio.Protocol, self._protocol)
            if protocol is None or not protocol.eof_received():
                self.close()

    def eof_received(self) -> bool:
        """End: the peer closed its connection."""
        if self._shaken is None and self._protocol is not None:
            self._end()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """End: the connection is lost."""
        self._closing = self._ended = True
        if self._shaken is not None and not self._shaken.done():
            self._shaken.set_exception(exc or ConnectionResetError("connection reset by peer"))
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(self._error or exc)
        self._error = None

    def pause_writing(self) -> None:
        """Pass on that the socket is full."""
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Pass on that the socket has room again."""
        if self._protocol is not None:
            self._protocol.resume_writing()

    def all_sent(self) -> None:
        """Pass on that the socket has taken all waiting bytes."""
        getattr(self._protocol, "all_sent", nothing)()

    # ---- called by the protocol above

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send. If encrypting fails, the connection ends, as after an error of its socket."""
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
        """Deliver received data to a protocol."""
        self._protocol = protocol
        self._is_buffered = isinstance(protocol, asyncio.BufferedProtocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol above."""
        return cast(asyncio.BaseProtocol, self._protocol)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the ``ssl_object``, or what the socket knows."""
        return self._tls if name == "ssl_object" else self._below.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or about to be."""
        return self._closing or self._below.is_closing()

    def close(self) -> None:
        """Send the written data and a close_notify, then close."""
        if self._closing:
            return
        self._closing = True
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            pass  # it expects the peer's close_notify, which is not needed
        self._send()
        self._below.close()

    def abort(self) -> None:
        """Abort the connection."""
        self._closing = True
        self._below.abort()

    def is_reading(self) -> bool:
        """Return whether the socket is read."""
        return not self._paused and self._below.is_reading()

    def pause_reading(self) -> None:
        """Stop reading for now."""
        self._paused = True
        self._below.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading. Bytes that were already received are delivered first."""
        self._paused = False
        self._below.resume_reading()
        if self._protocol is not None:
            self._deliver()

    def get_write_buffer_size(self) -> int:
        """Return the encrypted bytes that wait for the socket."""
        return self._below.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set how many encrypted bytes may wait before ``pause_writing`` is called."""
        self._below.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return the limits of the transport below."""
        return self._below.get_write_buffer_limits()
