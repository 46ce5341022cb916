"""Open connections of one kind of port: each ends when its certificate is revoked, or at the end of its time.

    forget = connections.add(tls, "10.0.0.7:4711", cut)     # let in a moment ago
    connections.check_all()                                 # what is revoked or trusted has changed
    connections.look()                                      # each second: whose time is over?

A handshake looks at a certificate once, and a watch, a peer's stream or a pool of connections may stay open for months.
So what a handshake would refuse now ends here. Few connections are looked at in a turn of the loop.
"""

from __future__ import annotations

import logging
import math
import ssl
from collections.abc import Callable
from typing import Final

from raftkv.loop.cycle_free import nothing
from raftkv.loop.limiter import Limiter
from raftkv.rpc.tls import RefusedPeerError
from raftkv.server.tls.certificates import chain_of, decoding

_log = logging.getLogger(__name__)

CHECKED_A_TURN: Final = 16
"""Connections that a turn of the loop looks at, 0.1 ms each."""


class _Open:
    """One connection; to call it is to look at it."""

    __slots__ = ("_connections", "address", "cut", "ends_at", "tls")

    def __init__(self, connections: OpenConnections, tls: ssl.SSLObject, address: str, cut: Callable[[], None]) -> None:
        self._connections = connections
        self.tls = tls
        self.address = address
        self.cut = cut
        self.ends_at = end_of(tls)

    def __call__(self) -> None:
        self._connections.check(self)


class OpenConnections:
    """Those whose other end has shown a certificate that was verified.

    Arguments:
        check: raises RefusedPeerError if a certificate is not let in any more.
        ended: told the address and the reason when a connection ends here.
        wall_clock: Unix time in seconds.
    """

    def __init__(
        self, check: Callable[[ssl.SSLObject], None], ended: Callable[[str, str], None], wall_clock: Callable[[], float]
    ) -> None:
        self._check = check
        self._ended = ended
        self._wall_clock = wall_clock
        self._open: dict[_Open, None] = {}
        self._first_end = math.inf
        self._checks = Limiter(CHECKED_A_TURN)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, tls: ssl.SSLObject, address: str, cut: Callable[[], None]) -> Callable[[], None]:
        """Note a connection that was checked in this turn of the loop.

        Arguments:
            tls, address: of the connection.
            cut: ends it.

        Returns:
            Forgets it: to be called when it has ended, for any reason.
        """
        if tls.context.verify_mode != ssl.CERT_REQUIRED:
            return nothing
        opened = _Open(self, tls, address, cut)
        self._open[opened] = None
        self._first_end = min(self._first_end, opened.ends_at)
        return lambda: self._forget(opened)

    def _forget(self, opened: _Open) -> None:
        self._open.pop(opened, None)

    def check_all(self) -> None:
        """End the connections that would not be let in now."""
        self._checks.begin(list(self._open))

    def look(self) -> None:
        """End the connections whose certificates have ended."""
        now = self._wall_clock()
        if now >= self._first_end:
            self._first_end = min((opened.ends_at for opened in self._open if opened.ends_at > now), default=math.inf)
            self._checks.begin([opened for opened in self._open if opened.ends_at <= now])

    def check(self, opened: _Open) -> None:
        """End a connection if it may not stay."""
        if opened not in self._open:
            return
        try:
            if opened.ends_at <= self._wall_clock():
                raise RefusedPeerError("its certificate has expired")
            self._check(opened.tls)
        except RefusedPeerError as error:
            self._end(opened, str(error))
        except Exception as error:
            _log.error("the certificate of an open connection could not be checked", exc_info=error)
            self._end(opened, "its certificate could not be checked")

    def _end(self, opened: _Open, reason: str) -> None:
        self._forget(opened)
        self._ended(opened.address, reason)
        opened.cut()


def end_of(tls: ssl.SSLObject) -> float:
    """Return when the first certificate of the other end's chain ends, Unix time.

    Arguments:
        tls: of a finished handshake that verified the chain.
    """
    from cryptography import x509

    try:
        with decoding():
            chain = map(x509.load_der_x509_certificate, chain_of(tls))
            return min((one.not_valid_after_utc.timestamp() for one in chain), default=math.inf)
    except ValueError:  # OpenSSL takes more than cryptography does
        own = (tls.getpeercert() or {}).get("notAfter")
        return float(ssl.cert_time_to_seconds(own)) if isinstance(own, str) else math.inf
