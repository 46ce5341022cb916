"""Names in certificates, and whether their owners are admitted.

    names = names_of(connection.getpeercert())
    names.fit("db1.example.org")

Owns etcd's rules for peers: a certificate must name the address that the connection comes from, or (in raftkv) the host
of a member's peer URL, so a certificate of the same authority for another purpose does not admit its owner as a member.
Leaves out the validity of certificates, which OpenSSL has checked before.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from raftkv.cluster_id import split_url
from raftkv.config import TLSFiles
from raftkv.errors import ConfigError
from raftkv.pb import rpc_pb2
from raftkv.rpc.tls import RefusedPeerError, common_name_of

NAMES_RESOLVED_MAX: Final = 16
"""Names of a certificate that are resolved to compare a peer's address with."""
RESOLVE_TIMEOUT_S: Final = 2.0

Hosts = Callable[[], Collection[str]]
"""Returns the current hosts of the peer URLs of all members."""


@dataclass(frozen=True, slots=True)
class Names:
    """The subject alternative names of a certificate.

    Attributes:
        dns: host names, in lower case; the first label may be ``*``.
        addresses: IP addresses.
    """

    dns: tuple[str, ...]
    addresses: tuple[str, ...]

    def fit(self, host: str) -> bool:
        """Return whether the certificate names a host (name or IP address)."""
        address = _address(host)
        if address:
            return address in self.addresses
        return any(_matches(pattern, host.lower().rstrip(".")) for pattern in self.dns)


def names_of(certificate: Mapping[str, Any]) -> Names:
    """Return the alternative names in a certificate, as ``ssl`` decodes it, without its common name."""
    found = certificate.get("subjectAltName", ())
    dns = tuple(value.lower().rstrip(".") for kind, value in found if kind == "DNS")
    return Names(dns, tuple(_address(value) for kind, value in found if kind == "IP Address"))


def names_in(path: str) -> Names:
    """Return the alternative names in a file's first certificate. Raises OSError or ValueError if it has none."""
    from cryptography import x509

    certificate = x509.load_pem_x509_certificates(Path(path).read_bytes())[0]
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return Names((), ())
    dns = tuple(name.lower().rstrip(".") for name in found.get_values_for_type(x509.DNSName))
    return Names(dns, tuple(map(str, found.get_values_for_type(x509.IPAddress))))


def check_allowed(certificate: Mapping[str, Any], files: TLSFiles) -> None:
    """Check a certificate against the names allowed by flags; without these flags all names are allowed.

    Raises:
        RefusedPeerError: it has none of the allowed names.
    """
    if files.allowed_cn and common_name_of(certificate) not in files.allowed_cn:
        raise RefusedPeerError(f"common name {common_name_of(certificate)!r} is not an allowed one")
    if files.allowed_hostname and not any(names_of(certificate).fit(host) for host in files.allowed_hostname):
        raise RefusedPeerError("the certificate is for none of the allowed host names")


async def check_peer(certificate: Mapping[str, Any], address: str, hosts: Collection[str]) -> None:
    """Check that a certificate is a member's: it must name the peer's address, or a member's host.

    Arguments:
        certificate: certificate as ``ssl`` decodes it.
        address: ``host:port`` of the peer.
        hosts: hosts of the members' peer URLs.

    Raises:
        RefusedPeerError: the certificate is not a member's.
    """
    names = names_of(certificate)
    remote = _address(address.rpartition(":")[0])
    if not remote or names.fit(remote) or any(map(names.fit, hosts)):
        return
    if await _resolve_to(names.dns, remote):
        return
    shown = ", ".join((*names.dns, *names.addresses)) or "no name"
    raise RefusedPeerError(f"the certificate has {shown}: neither {remote} nor the host of a member's peer URL")


def hosts_of(member: rpc_pb2.Member) -> set[str]:
    """Return the hosts of a member's peer URLs; malformed URLs are skipped."""
    hosts: set[str] = set()
    for url in member.peerURLs:
        with contextlib.suppress(ConfigError, ValueError):
            scheme, host, _ = split_url(url)
            hosts.update(() if scheme.startswith("unix") else (host,))
    return hosts


def check_sender(certificate: Mapping[str, Any] | None, sender: int, hosts: Mapping[int, Collection[str]]) -> None:
    """Check that a member does not show the certificate of another member.

    A certificate shared by all members passes. So does one that names no member, if it fits the address or names are
    not compared.

    Arguments:
        certificate: verified certificate; None: none was required.
        sender: id of the member that the peer claims to be.
        hosts: hosts of the members' peer URLs, by id.

    Raises:
        RefusedPeerError: the certificate names only other members.
    """
    own = hosts.get(sender)
    if certificate is None or own is None:
        return
    names = names_of(certificate)
    if any(map(names.fit, own)):
        return
    others = [member for member, found in hosts.items() if any(map(names.fit, found))]
    if others:
        raise RefusedPeerError(f"it says to be {sender:x} and has the certificate of {others[0]:x}")


async def _resolve_to(dns: Collection[str], remote: str) -> bool:
    """Return whether one of the names resolves to an address, or for wildcards, whether the address has such a name."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            for name in [name for name in dns if not name.startswith("*.")][:NAMES_RESOLVED_MAX]:
                with contextlib.suppress(socket.gaierror, UnicodeError):
                    found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
                    if remote in {_address(str(entry[4][0])) for entry in found}:
                        return True
            if any(name.startswith("*.") for name in dns):
                host, _ = await loop.getnameinfo((remote, 0), socket.NI_NAMEREQD)
                return any(_matches(pattern, host.lower()) for pattern in dns)
    return False


def _address(host: str) -> str:
    """Return an IP address in canonical form; empty: it is not one."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return ""
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _matches(pattern: str, host: str) -> bool:
    if not pattern.startswith("*."):
        return pattern == host
    label, _, rest = host.partition(".")
    return bool(label) and rest == pattern[2:]
