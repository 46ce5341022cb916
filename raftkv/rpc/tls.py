"""TLS of a connection: what decides about it (``Security``), and a transport that encrypts (``EncryptedTransport``).

    tls = EncryptedTransport(below, context, server_side=True)
    below.set_protocol(tls)
    await tls.handshake(first_bytes)
    tls.set_protocol(protocol)
    tls.resume_reading()

``Security`` gives a context for each handshake, and admits or refuses the peer. A plain ``ssl.SSLContext`` is enough
where neither changes (``fixed``). Certificates that are replaced while a process runs, revoked ones and allowed names
are the business of its implementation (of a member: ``server.tls.ports``).

``EncryptedTransport`` is a protocol for the socket below and a transport for the protocol above, as asyncio has one.
This one exists for what asyncio's does not do:

1. A peer that is refused learns why: an alert leaves before the connection ends, in both directions.
2. The output of a turn is encrypted and sent in one go, and all records of one read are handed over together. A small
   request and its answer cost a third of what they do in asyncio.
3. Connections share one buffer for what they read: asyncio keeps 256 KiB for each.

No bytes are read between the end of the handshake and ``resume_reading``. The end of the connection needs no goodbye:
the protocols above have their own, and ``close`` says one without waiting for the other's.
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
    """The other end has a valid certificate and is not let in all the same; the text says why."""


class Security(Protocol):
    """The TLS of one listener, or of one way out."""

    def context(self) -> ssl.SSLContext:
        """Return the context of the next handshake, its ALPN protocols set."""

    async def admit(self, tls: ssl.SSLObject, address: str) -> None:
        """Check the peer of a finished handshake.

        Arguments:
            tls: of the connection.
            address: ``host:port`` of the other end, or ``unix:``.

        Raises:
            RefusedPeerError: it is not let in.
        """

    def opened(self, tls: ssl.SSLObject, address: str, cut: Callable[[], None]) -> Callable[[], None]:
        """Note a connection that was let in, in the turn of the loop in which ``admit`` has returned.

        Arguments:
            tls, address: as of ``admit``.
            cut: ends the connection, when its certificate is revoked or has expired.

        Returns:
            Forgets it: to be called when it has ended.
        """

    def failed(self, address: str, reason: str) -> None:
        """Note a handshake that failed.

        Arguments:
            address: of the other end.
            reason: in a few words.
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
    """Return a ``Security`` that always has the same context.

    Arguments:
        tls: the context; a ``Security`` is returned as it is.
        protocols: for ALPN.
    """
    return _Fixed(tls, protocols) if isinstance(tls, ssl.SSLContext) else tls


def common_name_of(certificate: Mapping[str, Any] | None) -> str:
    """Return the common name of a certificate's subject; empty if there is none, or more than one.

    Arguments:
        certificate: as ``ssl`` decodes it.
    """
    subject = (certificate or {}).get("subject", ())
    names = [value for part in subject for kind, value in part if kind == "commonName"]
    return str(names[0]) if len(names) == 1 else ""


def reason_of(error: BaseException) -> str:
    """Return why a handshake failed, in a few words and without the numbers of lines in OpenSSL's source.

    Arguments:
        error: what it raised.
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
"""Most that is decrypted at a time: filled with changes of keys, it costs OpenSSL some 20 ms."""
SHARE_MIN: Final = 8
"""A full read of which less than one part in so many is data ends the connection; one-frame records are one in four."""
ANSWERS_MAX_BYTES: Final = 64 * 1024
"""Output of TLS itself that may wait for a peer that does not read: answers to changes of keys."""


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

    @property
    def queue(self) -> Identity | None:
        """In which what the socket brings waits for its turn, as far as the protocol above knows."""
        return getattr(self._protocol, "queue", None)

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
                self.abort()  # no honest peer sends so much that is no data

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
            self._below.abort()  # no timer watches a closing connection for long
        self._send()
        self._below.close()

    def _answer(self) -> None:
        """Send the output of TLS itself, such as the answer to a change of keys; bounded if the peer does not read."""
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
            pass  # it waits for the other's goodbye, which is not needed
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
        """Set how many encrypted bytes may wait before ``pause_writing`` is called."""
        self._below.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return what was set."""
        return self._below.get_write_buffer_limits()

    def can_write_eof(self) -> bool:
        """Return False: half-closed connections are not used with TLS."""
        return False
