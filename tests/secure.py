"""Clusters of raftkv or etcd under TLS: members with https URLs, and certificates for all their clients.

    certificates = Files.make(folder)
    with secured(Cluster(RAFTKV, size=3, flags=certificates.server_flags)) as cluster: ...
    raftkvctl --endpoints ... *certificates.client_flags

Health is checked on a metrics address without TLS, which both programs have.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from raftkv.client.local import is_healthy
from raftkv.server.tls.issue import CLIENT, SERVER, Authority, write_new, write_pair
from tests.procs import PATIENCE_S, Cluster, Member, free_port, wait_for

HOSTS = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Files:
    """The files of one authority: for servers and members, and for the client ``alice``."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Files:
        """Write the files."""
        authority = Authority.make("tests", days=10)
        write_new(folder / "ca.crt", authority.pair.certificate_pem)
        for name, hosts, purposes in (("server", HOSTS, (SERVER, CLIENT)), ("alice", (), (CLIENT,))):
            pair = authority.issue(name, 10, hosts, purposes)
            write_pair(pair, folder / f"{name}.crt", folder / f"{name}.key")
        return cls(folder)

    @property
    def server_flags(self) -> list[str]:
        """Flags of a member: callers must present a certificate, on both kinds of ports."""
        files = {"cert-file": "server.crt", "key-file": "server.key", "trusted-ca-file": "ca.crt"}
        flags = [f"--{kind}{flag}={self.folder / name}" for flag, name in files.items() for kind in ("", "peer-")]
        return [*flags, "--client-cert-auth", "--peer-client-cert-auth"]

    @property
    def client_flags(self) -> list[str]:
        """Flags of etcdctl and raftkvctl."""
        files = {"cacert": "ca.crt", "cert": "alice.crt", "key": "alice.key"}
        return [f"--{flag}={self.folder / name}" for flag, name in files.items()]


@dataclass
class SecureMember(Member):
    """A member whose URLs are https, except one for its health."""

    metrics_port: int = 0

    def command(self) -> list[str]:
        """Return the command that starts the member, with https instead of http."""
        secure = [word.replace("http://", "https://") for word in super().command()]
        return [*secure, "--listen-metrics-urls", f"http://127.0.0.1:{self.metrics_port}"]

    @property
    def health_endpoint(self) -> str:
        """The address of ``/health`` in plain HTTP."""
        return f"127.0.0.1:{self.metrics_port}"

    def wait_ready(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the member is healthy, on the address without TLS."""
        wait_for(lambda: is_healthy(self.health_endpoint) or not self.is_running(), "health", timeout_s)
        assert self.is_running(), self.log_tail()


def secured(cluster: Cluster) -> Cluster:
    """Let the members of a cluster that is not started yet use TLS."""
    cluster.members = [
        SecureMember(
            **{field.name: getattr(member, field.name) for field in dataclasses.fields(member)},
            metrics_port=free_port(),
        )
        for member in cluster.members
    ]
    return cluster
