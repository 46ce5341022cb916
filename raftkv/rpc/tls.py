"""What connections under TLS need from outside: a context for each handshake, and a word on who was met by it.

A plain ``ssl.SSLContext`` will do where nothing changes (``fixed``). Certificates that are replaced while a process
runs, revoked ones and names that are let in are the business of whoever implements ``Security`` (a member:
``server.tls.ports``).
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

SERVER_PROTOCOLS: Final = ("h2", "http/1.1")
CLIENT_PROTOCOLS: Final = ("h2",)


class RefusedPeerError(Exception):
    """The other end has a valid certificate and is not let in all the same; the text says why."""


class Security(Protocol):
    """The TLS of one listener, or of one way out."""

    def context(self) -> ssl.SSLContext:
        """Return the context of the next handshake, its ALPN protocols set."""

    async def admit(self, tls: ssl.SSLObject, address: str) -> None:
        """Look at who is at the other end of a finished handshake.

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
        """Whoever the context let in."""

    def opened(self, tls: ssl.SSLObject, address: str, cut: Callable[[], None]) -> Callable[[], None]:
        return forget_nothing

    def failed(self, address: str, reason: str) -> None:
        """Nobody asked."""


def forget_nothing() -> None:
    """Forget a connection that nothing was noted of."""


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
