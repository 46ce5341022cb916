"""The TLS of both kinds of ports of a member, as its settings ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from raftkv.config import ServerConfig
from raftkv.pb import rpc_pb2
from raftkv.server.tls.context import Rules
from raftkv.server.tls.expiry import warn
from raftkv.server.tls.identity import Hosts, hosts_of
from raftkv.server.tls.security import PortSecurity

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
