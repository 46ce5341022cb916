"""Creates certificates: of authorities, signed by authorities, and self-signed ones of members.

    authority = Authority.make("raftkv ca", days=3650)
    member = authority.issue("a", hosts=["10.0.0.1", "a.example.org"], days=365)
    write_pair(member, Path("a.crt"), Path("a.key"))

Keys are elliptic curve keys (P-256), in files that only their owner may read. Existing files are never overwritten.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from raftkv import cluster_id
from raftkv.config import ServerConfig, TLSFiles
from raftkv.errors import ConfigError
from raftkv.storage.datadir import ensure_private_directory, sync_directory

SERVER: Final = "server"
CLIENT: Final = "client"
_PURPOSES: Final = {SERVER: ExtendedKeyUsageOID.SERVER_AUTH, CLIENT: ExtendedKeyUsageOID.CLIENT_AUTH}
DAYS_OF_YEAR: Final = 365
_HOST_NAME: Final = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
_NEW: Final = ".new"
_OTHER_USES: Final = (
    *("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
)
_BACKDATED: Final = datetime.timedelta(minutes=5)
"""How much before its creation a certificate becomes valid: clocks differ."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key.

    Attributes:
        certificate: the certificate.
        key: its private key.
    """

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        """The certificate in PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """The key in PEM, not encrypted."""
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


@dataclass(frozen=True, slots=True)
class Authority:
    """An authority that signs certificates.

    Attributes:
        pair: certificate and key of the authority.
    """

    pair: Pair

    @classmethod
    def make(cls, name: str, days: int) -> Authority:
        """Create a new authority.

        Arguments:
            name: common name.
            days: validity in days.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(name, None, key, days, is_authority=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        return cls(Pair(builder.sign(key, hashes.SHA256()), key))

    @classmethod
    def load(cls, certificate: Path, key: Path) -> Authority:
        """Read an authority from its files.

        Raises:
            ConfigError: the files are not an authority.
        """
        try:
            loaded = serialization.load_pem_private_key(key.read_bytes(), None)
            authority = x509.load_pem_x509_certificate(certificate.read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{certificate} and {key} are not a certificate authority: {error}") from None
        if not isinstance(loaded, ec.EllipticCurvePrivateKey) or loaded.public_key() != authority.public_key():
            raise ConfigError(f"{key} is not the key of {certificate}")
        return cls(Pair(authority, loaded))

    def issue(self, name: str, days: int, hosts: Sequence[str] = (), purposes: Sequence[str] = (CLIENT,)) -> Pair:
        """Sign a new certificate.

        Arguments:
            name: common name; for a client certificate, the name of its user.
            days: validity in days, limited by that of the authority.
            hosts: names and addresses of the server.
            purposes: ``SERVER`` to be shown to clients, ``CLIENT`` to be shown to servers.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self.pair.certificate
        builder = _builder(name, issuer, key, days).add_extension(_purposes(purposes), critical=False)
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.pair.key.public_key())
        builder = builder.add_extension(authority_key, critical=False)
        if hosts:
            builder = builder.add_extension(_alternative_names(hosts), critical=False)
        return Pair(builder.sign(self.pair.key, hashes.SHA256()), key)


def self_signed(hosts: Sequence[str], days: int) -> Pair:
    """Create a self-signed certificate: it allows encryption, and proves nothing.

    Arguments:
        hosts: names and addresses of the server.
        days: validity in days.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder("raftkv", None, key, days).add_extension(_purposes((SERVER, CLIENT)), critical=False)
    builder = builder.add_extension(_alternative_names(hosts), critical=False)
    return Pair(builder.sign(key, hashes.SHA256()), key)


def with_self_signed(config: ServerConfig) -> ServerConfig:
    """Return the settings with the certificates of ``--auto-tls`` and ``--peer-auto-tls``, created if missing.

    As in etcd they are stored in ``fixtures`` below the data directory, and kept. Expired ones are replaced.

    Arguments:
        config: settings of the member.

    Raises:
        ConfigError, StorageError: the files cannot be written.
    """
    client, peer = config.client_tls, config.peer_tls
    if client.self_signed:
        hosts = _hosts((*config.listen_client_urls, *config.listen_client_http_urls), config.advertise_client_urls)
        client = _own(config, "client", client, hosts)
    if peer.self_signed:
        hosts = _hosts(config.listen_peer_urls, config.initial_advertise_peer_urls)
        peer = _own(config, "peer", peer, hosts)
    return replace(config, client_tls=client, peer_tls=peer)


def _own(config: ServerConfig, kind: str, files: TLSFiles, hosts: Sequence[str]) -> TLSFiles:
    private_directory(config.data_dir)
    folder = private_directory(Path(config.data_dir) / "fixtures" / kind)
    certificate, key = folder / "cert.pem", folder / "key.pem"
    if not (certificate.exists() and key.exists()) or _is_over(certificate):
        certificate.unlink(missing_ok=True)
        key.unlink(missing_ok=True)
        write_pair(self_signed(hosts, config.self_signed_validity_years * DAYS_OF_YEAR), certificate, key)
    return replace(files, cert_file=str(certificate), key_file=str(key))


def _is_over(certificate: Path) -> bool:
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
    except ValueError:
        return True
    return found.not_valid_after_utc <= datetime.datetime.now(datetime.UTC)


def _hosts(*urls: Iterable[str]) -> list[str]:
    found = [cluster_id.split_url(url) for group in urls for url in group]
    hosts = [host for scheme, host, _ in found if not scheme.startswith("unix") and host]
    return list(dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"]))


def write_pair(pair: Pair, certificate: Path, key: Path) -> None:
    """Write both files durably, readable only by their owner.

    Arguments:
        pair: certificate and key.
        certificate, key: paths of the files, which must not exist.

    Raises:
        ConfigError: a file exists, or cannot be written.
    """
    write_new(key, pair.key_pem)
    try:
        write_new(certificate, pair.certificate_pem)
    except ConfigError:
        key.unlink(missing_ok=True)  # a key without a certificate would only be in the way
        raise


def write_new(path: Path, data: bytes) -> None:
    """Write a file that does not exist yet.

    Arguments:
        path: path of the file.
        data: contents of the file.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} already exists and is not overwritten") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        sync_directory(str(path.parent))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def private_directory(path: str | Path) -> Path:
    """Create a directory that only its owner may use, with its parents; return its path."""
    return Path(ensure_private_directory(path))


def name_directory(made: Path, path: Path) -> None:
    """Rename a directory of new files durably.

    Arguments:
        made: current path of the directory.
        path: new path, which must not exist.

    Raises:
        ConfigError: the directory cannot be renamed.
    """
    try:
        made.rename(path)
        sync_directory(str(path.parent))
    except OSError as error:
        raise ConfigError(f"cannot move {made} to {path}: {error.strerror}") from None


def replace_files(files: Mapping[Path, bytes]) -> None:
    """Replace files, in this order. At any moment each path has the whole old file or the whole new one.

    Arguments:
        files: contents by path.

    Raises:
        ConfigError: a file cannot be written.
    """
    for path, data in files.items():
        new = path.with_name(path.name + _NEW)
        new.unlink(missing_ok=True)
        write_new(new, data)
    for path in files:
        path.with_name(path.name + _NEW).replace(path)
        sync_directory(str(path.parent))


def _builder(
    name: str,
    issuer: x509.Certificate | None,
    key: ec.EllipticCurvePrivateKey,
    days: int,
    *,
    is_authority: bool = False,
) -> x509.CertificateBuilder:
    """Begin a certificate: for an authority or for traffic. Without an issuer it is self-signed."""
    try:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    except ValueError as error:
        raise ConfigError(f"{name!r} cannot be the name in a certificate: {error}") from None
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        **dict.fromkeys(_OTHER_USES, False),
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(end if issuer is None else min(end, issuer.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(usage, critical=True)
    )


def _purposes(purposes: Iterable[str]) -> x509.ExtendedKeyUsage:
    return x509.ExtendedKeyUsage([_PURPOSES[purpose] for purpose in purposes])


def _alternative_names(hosts: Iterable[str]) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([general_name(host) for host in hosts])


def general_name(host: str) -> x509.GeneralName:
    """Return a host name or address in the form of a certificate.

    Raises:
        ConfigError: the host is neither.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]").partition("%")[0]))
    except ValueError:
        pass
    if not _HOST_NAME.fullmatch(host):
        raise ConfigError(f"{host!r} is neither a host name nor an IP address")
    return x509.DNSName(host)
