"""The TLS of both kinds of ports of a member, as its settings ask for it: contexts, admission, expiry, failures.

OPEN CONNECTIONS of one kind of port: each ends when its certificate is revoked, or at the end of its time.

    forget = connections.add(tls, "10.0.0.7:4711", cut)     # let in a moment ago
    connections.check_all()                                 # what is revoked or trusted has changed
    connections.look()                                      # each second: whose time is over?

A handshake looks at a certificate once, and a watch, a peer's stream or a pool of connections may stay open for months.
So what a handshake would refuse now ends here. Few connections are looked at in a turn of the loop.
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


# -- security -------------------------------------------------------------------------------------------------------
#
# PortSecurity: the TLS of one port, and of the connections to other members, following the files that it is made of.
#
#     security = PortSecurity("peer", config.peer_tls, rules)
#     await server.listen(host, port, security.listening)
#     Channel("10.0.0.2:2380", security.dialing)
#
# Invariants:
#
# 1. A replaced file counts from the next handshake on, without a restart: each handshake looks at the times of the
#    files (a few microseconds). Contexts are made anew and exchanged whole.
# 2. New files that cannot be used change nothing: the old ones stay in use, and the log has one line about it.
#    Certificate and key are two files, so the moment between their replacements is such a case. Loading is tried again
#    each ``RETRY_S``, because the cause may lie outside the files: they belong to another user for a moment, or the
#    process has no descriptor left.
# 3. Revoked certificates are refused by all ports that listen with the same files, and by all connections that this
#    member opens. Open connections with them end (``OpenConnections``); so do open connections whose certificate ends
#    or whose authority is taken away.


RETRY_S: Final = 10.0
"""Time between attempts to load files that could not be used."""

Stamp = tuple[tuple[int, int, int, int], ...]
_ABSENT: Final = (0, 0, 0, 0)


class PortSecurity:
    """Certificates of one kind of port, as they are now.

    Arguments:
        kind: ``client`` or ``peer``; it stands in the log and in metrics.
        files: where they are; there is a certificate, or something to connect with.
        rules: of the member.
        hosts: of the members' peer URLs, for a peer port whose callers must be members; None: names are not compared.
        clock: monotonic seconds.
        wall_clock: Unix time in seconds.

    Attributes:
        listening: for listeners; None: there is no certificate to show.
        dialing: for connecting.
        ends: when the files' contents end, by use.
        rejected, failed: failed handshakes that others began, and that this member began.
        ended: connections that were open when their certificate was revoked, or ended.
        connections: those that are open.

    Raises:
        ConfigError: the files cannot be used as they are.
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
        self._stamp = _stamp_of(self._paths)
        self._clock = clock
        self._failure = ""
        """Why the present files cannot be used; empty: they are in use."""
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
        # All or nothing: unusable files have raised by now.
        self.server, self._client, self.revocations, self.ends = server, client, revocations, ends
        self._trusted = trusted

    def refresh(self) -> None:
        """Load the files again if one has changed; what cannot be used is logged once, and tried again later."""
        stamp = _stamp_of(self._paths)
        if stamp == self._stamp and not (self._failure and self._clock() >= self._retry_at):
            return
        before, self._stamp = self._stamp, stamp
        try:
            self._load()
        except (ConfigError, OSError, ValueError) as error:
            known, self._failure = self._failure, str(error) or type(error).__name__
            self._retry_at = self._clock() + RETRY_S
            if stamp != before or self._failure != known:
                text = "TLS files of the %s port have changed and cannot be used, the old go on: %s"
                _log.error(text, self.kind, self._failure)
        else:
            self._failure = ""
            _log.info("TLS files of the %s port have changed: the new ones are used from now on", self.kind)
            warn(self.ends)
            self.connections.check_all()

    @property
    def client(self) -> ssl.SSLContext:
        """The context for connecting; without files it is made at first use, with the system's authorities."""
        if self._client is None:
            self._client = client_context(self._files, self._rules)
        return self._client

    def check(self, tls: ssl.SSLObject) -> None:
        """Refuse whom the lists and the allowed names do not let in.

        Raises:
            RefusedPeerError: it is not let in.
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
        """Refuse what a handshake would refuse now. Raises as ``check``."""
        self.check(tls)
        chain = chain_of(tls)
        if self._trusted is not None and len(chain) > 1 and chain[-1] not in self._trusted:
            raise RefusedPeerError("its authority is trusted no more")

    @property
    def _checks_names(self) -> bool:
        """Whether callers must have the name of a member."""
        return self._files.verifies and not self._files.skip_san_verification


class Side:
    """The security of a listener, or of the channels that show the same certificate (``rpc.tls.Security``).

    Arguments:
        security: of the port.
        context: of the present files; None: there is no certificate to show.
        failures: logs what has failed on this side.
        hosts: see ``PortSecurity``; None: names are not compared.
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
        """Return the context of the files as they are now."""
        self._security.refresh()
        context = self._context()
        if context is None:
            raise AssertionError("a port without a certificate listens under TLS")
        return context

    async def admit(self, tls: ssl.SSLObject, address: str) -> None:
        """Refuse certificates that are revoked, or not of an allowed name, or (on a peer port) not a member's."""
        self._security.check(tls)
        if self._hosts is not None:
            await check_peer(tls.getpeercert() or {}, address, self._hosts())
            self._security.check(tls)  # names were looked up meanwhile, and the lists may be others


def _stamp_of(paths: Iterable[str]) -> Stamp:
    return tuple(map(_stat, paths))


def _stat(path: str) -> tuple[int, int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return _ABSENT
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode


WARN_INTERVAL_S: Final = 86_400.0
LOOK_INTERVAL_S: Final = 1.0
"""Time between looks at the files and at the ends of the certificates of open connections: a few microseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Ports(Collector):
    """The security of the ports for clients and for members, and what ``/metrics`` tells of it.

    Attributes:
        client, peer: their security.
    """

    client: PortSecurity
    peer: PortSecurity

    @classmethod
    def of(cls, config: ServerConfig, hosts: Hosts | None = None) -> Ports:
        """Make them from the settings of a member.

        Arguments:
            config: of the member; certificates of its own are made already (``issue.with_self_signed``).
            hosts: of the members' peer URLs; None: nothing listens.

        Raises:
            ConfigError: files that cannot be used; one line for the user.
        """
        rules = rules_of(config)
        return cls(
            PortSecurity("client", config.client_tls, rules), PortSecurity("peer", config.peer_tls, rules, hosts)
        )

    async def watch(self) -> None:
        """Follow the files, end connections whose certificates have ended, and warn of what ends soon, once a day."""
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
        """Ends of certificates, and counts of handshakes that failed."""
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
    """Return what the settings of a member say of TLS on every connection.

    Raises:
        ConfigError: no cipher suite is left.
    """
    return Rules(config.tls_min_version, config.tls_max_version, config.cipher_suites)


def peer_hosts(members: Mapping[int, rpc_pb2.Member]) -> Collection[str]:
    """Return the hosts of the peer URLs of members.

    Arguments:
        members: by id.
    """
    return set().union(*map(hosts_of, members.values()))


# -- failures -------------------------------------------------------------------------------------------------------
#
# Failed TLS handshakes share log lines, because any host can cause them: one line for a remote host and reason in
# ``INTERVAL_S``, which says how many more there were, and ``REMEMBERED_MAX`` of these pairs, beyond which failures
# share a line. All are counted in the metrics.

INTERVAL_S: Final = 10.0
REMEMBERED_MAX: Final = 256
_OTHERS: Final = ("", "")


class FailureLog:
    """Failed handshakes of one kind of port.

    Arguments:
        text: the line, with ``%s`` for the address and for the reason.
        clock: monotonic seconds.

    Attributes:
        count: of all failures.
        listener: hears of each that has a line, address and reason; None: no listener.
    """

    def __init__(self, text: str, clock: Callable[[], float]) -> None:
        self._text = text
        self._clock = clock
        self._seen: dict[tuple[str, str], list[float]] = {}
        self.count = 0
        self.listener: Callable[[str, str], None] | None = None

    def note(self, address: str, reason: str) -> None:
        """Count a failure, and tell of it unless the same was told a moment ago.

        Arguments:
            address: of the other end.
            reason: in a few words.
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
