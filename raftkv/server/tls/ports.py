"""The TLS of a member's client and peer ports, according to its settings: contexts, admission, expiry, failures.

OPEN CONNECTIONS of one kind of port: each ends when its certificate is revoked or expires.

    forget = connections.add(tls, "10.0.0.7:4711", cut)     # just admitted
    connections.check_all()                                 # the revocation list or the authorities have changed
    connections.look()                                      # each second: end connections with expired certificates

A handshake checks a certificate once, but a watch, a peer's stream or a pooled connection may stay open for months. So
this module ends connections that a handshake would refuse now. A few connections are checked per loop turn.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import ssl
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from raftkv.config import ServerConfig, TLSFiles
from raftkv.errors import ConfigError
from raftkv.loop.cycle_free import nothing
from raftkv.loop.limiter import Limiter
from raftkv.pb import rpc_pb2
from raftkv.rpc.tls import RefusedPeerError
from raftkv.server.tls.certificates import Revocations, authorities_of, chain_of, decoding, ends_of, warn
from raftkv.server.tls.context import Rules, client_context, server_context
from raftkv.server.tls.identity import Hosts, check_allowed, check_peer, hosts_of

_log = logging.getLogger(__name__)

CHECKED_A_TURN: Final = 16
"""Connections checked in one loop turn, 0.1 ms each."""


@dataclass(eq=False, slots=True)
class _Open:
    """One connection; calling the object checks it."""

    connections: OpenConnections
    tls: ssl.SSLObject
    address: str
    cut: Callable[[], None]
    ends_at: float

    def __call__(self) -> None:
        self.connections.check(self)


class OpenConnections:
    """The open connections with a verified certificate of the peer.

    Arguments:
        check: raises RefusedPeerError if a certificate is no longer accepted.
        ended: called with address and reason when a connection is ended here.
        wall_clock: returns Unix time in seconds.
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
        """Register a connection that was checked in this loop turn.

        Arguments:
            tls, address: TLS object of the connection, and address of the peer.
            cut: ends the connection.

        Returns:
            A function to be called when the connection has ended, for any reason.
        """
        if tls.context.verify_mode != ssl.CERT_REQUIRED:
            return nothing
        opened = _Open(self, tls, address, cut, end_of(tls))
        self._open[opened] = None
        self._first_end = min(self._first_end, opened.ends_at)
        return lambda: self._forget(opened)

    def _forget(self, opened: _Open) -> None:
        self._open.pop(opened, None)

    def check_all(self) -> None:
        """End the connections that would be refused now."""
        self._checks.begin(list(self._open))

    def look(self) -> None:
        """End the connections whose certificates have expired."""
        now = self._wall_clock()
        if now >= self._first_end:
            self._first_end = min((opened.ends_at for opened in self._open if opened.ends_at > now), default=math.inf)
            self._checks.begin([opened for opened in self._open if opened.ends_at <= now])

    def check(self, opened: _Open) -> None:
        """End a connection if its certificate is no longer accepted."""
        if opened not in self._open:
            return
        try:
            if opened.ends_at <= self._wall_clock():
                raise RefusedPeerError("its certificate has expired")
            self._check(opened.tls)
        except RefusedPeerError as error:
            self._end(opened, str(error))
        except Exception as error:
            _log.error("checking the certificate of an open connection failed", exc_info=error)
            self._end(opened, "its certificate could not be checked")

    def _end(self, opened: _Open, reason: str) -> None:
        self._forget(opened)
        self._ended(opened.address, reason)
        opened.cut()


def end_of(tls: ssl.SSLObject) -> float:
    """Return when the first certificate of the peer's chain expires, in Unix time.

    Arguments:
        tls: TLS object of a finished handshake that verified the chain.
    """
    from cryptography import x509

    try:
        with decoding():
            chain = map(x509.load_der_x509_certificate, chain_of(tls))
            return min((one.not_valid_after_utc.timestamp() for one in chain), default=math.inf)
    except ValueError:  # OpenSSL accepts more than cryptography does
        own = (tls.getpeercert() or {}).get("notAfter")
        return float(ssl.cert_time_to_seconds(own)) if isinstance(own, str) else math.inf


# -- security -------------------------------------------------------------------------------------------------------
#
# PortSecurity: the TLS of one kind of port, and of connections to other members. It reloads changed files.
#
#     security = PortSecurity("peer", config.peer_tls, rules)
#     await server.listen(host, port, security.listening)
#     Channel("10.0.0.2:2380", security.dialing)
#
# Invariants:
#
# 1. A replaced file is used from the next handshake on, without a restart: each handshake checks the times of the
#    files (a few microseconds). New contexts are created and replace the old ones as a whole.
# 2. New files that cannot be used change nothing: the old ones stay in use, and one line is logged. This includes the
#    moment between the replacements of the certificate and of its key, which are two files. Loading is retried every
#    ``RETRY_S``, since the cause may be outside of the files: they may belong to another user for a moment, or the
#    process may have no free descriptor.
# 3. Revoked certificates are refused by all ports that listen with the same files, and by all connections that this
#    member opens. Open connections with them are ended (``OpenConnections``), and so are open connections whose
#    certificate expires or whose authority is removed.


RETRY_S: Final = 10.0
"""Time between attempts to load files that could not be used."""

Stamp = tuple[tuple[int, int, int, int], ...]
_ABSENT: Final = (0, 0, 0, 0)


class PortSecurity:
    """The current certificates of one kind of port.

    Arguments:
        kind: ``client`` or ``peer``, for the log and the metrics.
        files: paths of the files; without a certificate to show, nothing can listen.
        rules: TLS rules of the member.
        hosts: returns the hosts of the members' peer URLs, for a peer port whose callers must be members; None: names
            are not compared.
        clock: returns monotonic seconds.
        wall_clock: returns Unix time in seconds.

    Attributes:
        listening: security of listeners; None: there is no certificate to show.
        dialing: security of outgoing connections.
        ends: expiries of the files' contents, by use.
        rejected, failed: failed handshakes begun by others, and by this member.
        ended: connections that were open when their certificate was revoked or expired.
        connections: open connections.

    Raises:
        ConfigError: the files cannot be used.
    """

    def __init__(
        self,
        kind: str,
        files: TLSFiles,
        rules: Rules,
        hosts: Hosts | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.kind = kind
        self._files = files
        self._rules = rules
        self._paths = tuple(filter(None, files.paths))
        self._stamp = tuple(map(_stat, self._paths))
        self._clock = clock
        self._failure = ""
        """Why the changed files cannot be used; empty: the current files are in use."""
        self._retry_at = 0.0
        self._load()
        self.rejected = FailureLog(f"rejected a connection from %s to a {kind} port: %s", clock)
        self.failed = FailureLog(f"cannot connect to %s over TLS, as a {kind}: %s", clock)
        self.ended = FailureLog(f"ended the connection with %s as a {kind}: %s", clock)
        self.connections = OpenConnections(self._check_open, self.ended.note, wall_clock)
        self.listening = (
            None
            if files.is_empty
            else Side(self, lambda: self.server, self.rejected, hosts if self._checks_names else None)
        )
        self.dialing = Side(self, lambda: self.client, self.failed)

    def _load(self) -> None:
        files, rules = self._files, self._rules
        server = None if files.is_empty else server_context(files, rules)
        client = client_context(files, rules) if self._paths else None
        revocations = Revocations(files.crl_file, files.trusted_ca_file) if files.crl_file else None
        ends = ends_of(files, revocations)
        trusted = authorities_of(files.trusted_ca_file) if files.trusted_ca_file else None
        # All or nothing: unusable files have raised before this line.
        self.server, self._client, self.revocations, self.ends = server, client, revocations, ends
        self._trusted = trusted

    def refresh(self) -> None:
        """Reload the files if one has changed. Files that cannot be used are logged once, and tried again later."""
        stamp = tuple(map(_stat, self._paths))
        if stamp == self._stamp and not (self._failure and self._clock() >= self._retry_at):
            return
        before, self._stamp = self._stamp, stamp
        try:
            self._load()
        except (ConfigError, OSError, ValueError) as error:
            known, self._failure = self._failure, str(error) or type(error).__name__
            self._retry_at = self._clock() + RETRY_S
            if stamp != before or self._failure != known:
                text = "the changed TLS files of the %s port cannot be loaded, the previous ones stay in use: %s"
                _log.error(text, self.kind, self._failure)
        else:
            self._failure = ""
            _log.info("reloaded the changed TLS files of the %s port", self.kind)
            warn(self.ends)
            self.connections.check_all()

    @property
    def client(self) -> ssl.SSLContext:
        """The context for connecting; without files it is created at first use, with the system's authorities."""
        if self._client is None:
            self._client = client_context(self._files, self._rules)
        return self._client

    def check(self, tls: ssl.SSLObject) -> None:
        """Refuse a peer by the revocation lists and the allowed names.

        Raises:
            RefusedPeerError: the peer is refused.
        """
        if self.revocations is not None:
            try:
                serial = self.revocations.revoked(tls)
            except ValueError as error:
                raise RefusedPeerError(f"certificate cannot be looked up among the revoked ones: {error}") from None
            if serial:
                raise RefusedPeerError(f"certificate {serial} is revoked")
        check_allowed(tls.getpeercert() or {}, self._files)

    def _check_open(self, tls: ssl.SSLObject) -> None:
        """Refuse a connection that a handshake would refuse now. Raises as ``check``."""
        self.check(tls)
        chain = chain_of(tls)
        if self._trusted is not None and len(chain) > 1 and chain[-1] not in self._trusted:
            raise RefusedPeerError("its authority is no longer trusted")

    @property
    def _checks_names(self) -> bool:
        """Whether callers must have the name of a member."""
        return self._files.verifies and not self._files.skip_san_verification


class Side:
    """The security of a listener, or of channels that show the same certificate (``rpc.tls.Security``).

    Arguments:
        security: security of the port.
        context: returns the context of the current files; None: there is no certificate to show.
        failures: logs failures of this side.
        hosts: as in ``PortSecurity``; None: names are not compared.
    """

    def __init__(
        self,
        security: PortSecurity,
        context: Callable[[], ssl.SSLContext | None],
        failures: FailureLog,
        hosts: Hosts | None = None,
    ) -> None:
        self._security = security
        self._context = context
        self._hosts = hosts
        self.failed = failures.note
        self.opened = security.connections.add

    def context(self) -> ssl.SSLContext:
        """Return the context of the current files."""
        self._security.refresh()
        context = self._context()
        if context is None:
            raise AssertionError("a port without a certificate listens under TLS")
        return context

    async def admit(self, tls: ssl.SSLObject, address: str) -> None:
        """Refuse certificates that are revoked, have no allowed name, or (on a peer port) belong to no member."""
        self._security.check(tls)
        if self._hosts is not None:
            await check_peer(tls.getpeercert() or {}, address, self._hosts())
            self._security.check(tls)  # the lists may have changed during the lookup of names


def _stat(path: str) -> tuple[int, int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return _ABSENT
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode


WARN_INTERVAL_S: Final = 86_400.0
LOOK_INTERVAL_S: Final = 1.0
"""Time between checks of the files and of expired certificates of open connections: a few microseconds each."""


@dataclass(frozen=True, slots=True, eq=False)
class Ports(Collector):
    """The security of the client and peer ports, and its metrics.

    Attributes:
        client, peer: security of the client ports and of the peer ports.
    """

    client: PortSecurity
    peer: PortSecurity

    @classmethod
    def of(cls, config: ServerConfig, hosts: Hosts | None = None) -> Ports:
        """Create them from the settings of a member.

        Arguments:
            config: settings of the member; its self-signed certificates exist already (``issue.with_self_signed``).
            hosts: returns the hosts of the members' peer URLs; None: nothing listens.

        Raises:
            ConfigError: files cannot be used; a one-line message for the user.
        """
        rules = rules_of(config)
        return cls(
            PortSecurity("client", config.client_tls, rules), PortSecurity("peer", config.peer_tls, rules, hosts)
        )

    async def watch(self) -> None:
        """Reload files, end connections with expired certificates, and warn once a day of certificates that expire."""
        loop = asyncio.get_running_loop()
        warn_at = loop.time()
        while True:
            is_due = loop.time() >= warn_at
            warn_at += WARN_INTERVAL_S if is_due else 0.0
            for port in (self.client, self.peer):
                port.refresh()
                port.connections.look()
                if is_due:
                    warn(port.ends)
            await asyncio.sleep(LOOK_INTERVAL_S)

    def collect(self) -> Iterable[Metric]:
        """Yield expiries of certificates, and counts of failed handshakes."""
        text = "When a certificate, or a list of revoked ones, ends: seconds of Unix time."
        ends = GaugeMetricFamily("raftkv_certificate_expires_seconds", text, labels=("port", "use"))
        text = "Connections that failed over TLS: by port, and whether the other end (in) or this one (out) began."
        failures = CounterMetricFamily("raftkv_tls_failures", text, labels=("port", "way"))
        for port in (self.client, self.peer):
            for use, end in port.ends.items():
                ends.add_metric((port.kind, use), end.time_s)
            for way, log in (("in", port.rejected), ("out", port.failed)):
                failures.add_metric((port.kind, way), log.count)
        return ends, failures


def rules_of(config: ServerConfig) -> Rules:
    """Return the TLS rules in the settings of a member, for all connections.

    Raises:
        ConfigError: no cipher suite is left.
    """
    return Rules(config.tls_min_version, config.tls_max_version, config.cipher_suites)


def peer_hosts(members: Mapping[int, rpc_pb2.Member]) -> Collection[str]:
    """Return the hosts of the peer URLs of members.

    Arguments:
        members: members by id.
    """
    return set().union(*map(hosts_of, members.values()))


# -- failures -------------------------------------------------------------------------------------------------------
#
# Any host can cause failed TLS handshakes, so they share log lines. A remote host and a reason get one line per
# ``INTERVAL_S``, which also counts the others. Only ``REMEMBERED_MAX`` of these pairs are kept apart; further failures
# share one line. All are counted in the metrics.

INTERVAL_S: Final = 10.0
REMEMBERED_MAX: Final = 256
_OTHERS: Final = ("", "")


class FailureLog:
    """Counts and logs failed handshakes of one kind of port.

    Arguments:
        text: log line, with ``%s`` for the address and for the reason.
        clock: returns monotonic seconds.

    Attributes:
        count: number of all failures.
        listener: called with address and reason of each logged failure; None: no listener.
    """

    def __init__(self, text: str, clock: Callable[[], float]) -> None:
        self._text = text
        self._clock = clock
        self._seen: dict[tuple[str, str], list[float]] = {}
        self.count = 0
        self.listener: Callable[[str, str], None] | None = None

    def note(self, address: str, reason: str) -> None:
        """Count a failure, and log it unless the same was logged a moment ago.

        Arguments:
            address: address of the peer.
            reason: a few words.
        """
        self.count += 1
        now_s = self._clock()
        key = (address.rpartition(":")[0], reason)
        if key not in self._seen and len(self._seen) >= REMEMBERED_MAX:
            self._forget(now_s)
        if key not in self._seen and len(self._seen) >= REMEMBERED_MAX:
            key, address, reason = _OTHERS, "other addresses", "many reasons"
        told = self._seen.get(key)
        if told is not None and now_s - told[0] < INTERVAL_S:
            told[1] += 1
            return
        more = f" ({told[1]:.0f} more like it since the last line)" if told is not None and told[1] else ""
        self._seen[key] = [now_s, 0]
        _log.warning(self._text + "%s", address, reason, more)
        if self.listener is not None:
            self.listener(address, reason + more)

    def _forget(self, now_s: float) -> None:
        for key in [key for key, told in self._seen.items() if now_s - told[0] >= INTERVAL_S]:
            del self._seen[key]
