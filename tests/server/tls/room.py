"""Certificates for the tests of TLS, and a server and a client that show them to each other.

room.issue("a", hosts=["127.0.0.1"])          files a.crt and a.key of the authority "ca"
async with serving(room.security("a")) as target:
    assert await asked(target, room.dialing()) == "..."
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from raftkv.config import TLSFiles
from raftkv.rpc import Channel, ChannelOptions, Server, ServerLimits, UnaryCall
from raftkv.rpc.tls import Security, common_name_of
from raftkv.server.tls.context import Rules
from raftkv.server.tls.issue import CLIENT, SERVER, Authority, Pair
from raftkv.server.tls.ports import PortSecurity

WHO = "/test.Who/Am"
HERE = ("127.0.0.1", "localhost")
QUICK = ChannelOptions(connect_timeout_s=5, settings_timeout_s=5)


@dataclass
class Room:
    """A folder with an authority, and what it has signed."""

    folder: Path
    authorities: dict[str, Authority] = field(default_factory=dict)

    def path(self, name: str) -> str:
        """Return the path of a file."""
        return str(self.folder / name)

    def read(self, *names: str) -> bytes:
        """Return what files hold, one after the other."""
        return b"".join((self.folder / name).read_bytes() for name in names)

    def put(self, name: str, data: bytes, mode: int = 0o600) -> str:
        """Write a file over; its path."""
        (self.folder / name).write_bytes(data)
        (self.folder / name).chmod(mode)
        return self.path(name)

    def damage(self, name: str, damage: str) -> None:
        """Spoil a file."""
        path = self.folder / name
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(b"" if damage == "not PEM" else self.read("other.key"))

    def authority(self, name: str = "ca") -> Authority:
        """Return an authority, made at first use with its file."""
        if name not in self.authorities:
            made = Authority.make(name, days=400)
            self.authorities[name] = made
            (self.folder / f"{name}.crt").write_bytes(made.pair.certificate_pem)
        return self.authorities[name]

    def issue(
        self,
        name: str,
        hosts: Sequence[str] = HERE,
        *,
        by: str = "ca",
        days: int = 100,
        common_name: str | None = None,
        is_server: bool = True,
    ) -> Pair:
        """Write a certificate and its key, in the place of those of the same name."""
        authority = self.authority(by)
        purposes = (SERVER, CLIENT) if is_server else (CLIENT,)
        pair = authority.issue(name if common_name is None else common_name, days, hosts, purposes)
        self.write(name, pair)
        return pair

    def write(self, name: str, pair: Pair) -> None:
        """Write the files of a certificate."""
        for suffix, data in (("key", pair.key_pem), ("crt", pair.certificate_pem)):
            path = self.folder / f"{name}.{suffix}"
            path.unlink(missing_ok=True)
            path.write_bytes(data)
            path.chmod(0o600)

    def revoke(self, name: str, *pairs: Pair, by: str = "ca", signed_by: str = "", der: bool = False) -> str:
        """Write a list of revoked certificates; its path."""
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateRevocationListBuilder().issuer_name(self.authority(by).pair.certificate.subject)
        builder = builder.last_update(now).next_update(now + datetime.timedelta(days=5))
        for pair in pairs:
            revoked = x509.RevokedCertificateBuilder().serial_number(pair.certificate.serial_number)
            builder = builder.add_revoked_certificate(revoked.revocation_date(now).build())
        signed = builder.sign(self.authority(signed_by or by).pair.key, hashes.SHA256())
        encoding = serialization.Encoding.DER if der else serialization.Encoding.PEM
        path = self.folder / name
        path.unlink(missing_ok=True)
        path.write_bytes(signed.public_bytes(encoding))
        return str(path)

    def files(self, name: str = "", ca: str = "ca", **more: object) -> TLSFiles:
        """Return the settings that show a certificate and trust an authority; empty names leave them out."""
        given: dict[str, Any] = dict(more)
        if name:
            given |= {"cert_file": self.path(f"{name}.crt"), "key_file": self.path(f"{name}.key")}
        if ca:
            self.authority(ca)
            given["trusted_ca_file"] = self.path(f"{ca}.crt")
        return replace(TLSFiles(), **given)

    def security(
        self,
        name: str = "",
        ca: str = "ca",
        hosts: Collection[str] | None = None,
        rules: Rules | None = None,
        wall_clock: Callable[[], float] = time.time,
        **more: object,
    ) -> PortSecurity:
        """Make the security of a port from files."""
        known = None if hosts is None else lambda: hosts
        return PortSecurity("peer", self.files(name, ca, **more), rules or Rules(), known, wall_clock=wall_clock)


class Serving:
    """A server that answers with the common name of the caller."""

    def __init__(self, security: PortSecurity, limits: ServerLimits | None = None) -> None:
        self.server = Server(limits)
        self.server.unary(WHO, self._who)
        self.certificates: list[object] = []
        self.security = security
        self.target = ""

    def _who(self, call: UnaryCall, message: bytes) -> None:
        self.certificates.append(call.peer.certificate)
        call.reply(common_name_of(call.peer.certificate).encode())


@contextlib.asynccontextmanager
async def serving(security: PortSecurity, limits: ServerLimits | None = None) -> AsyncIterator[Serving]:
    """Run a server with the listening half of a port."""
    served = Serving(security, limits)
    ((host, port),) = await served.server.listen("127.0.0.1", 0, security.listening)
    served.target = f"{host}:{port}"
    try:
        yield served
    finally:
        await served.server.close()


async def asked(target: str, security: Security) -> str:
    """Ask a server, over a connection of its own, who it takes the caller for."""
    async with Channel(target, security, QUICK) as channel:
        return (await channel.unary(WHO, b"", 20)).decode()
