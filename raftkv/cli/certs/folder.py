"""The directory of ``raftkv certs``.

    ca.crt ca.key             who signs the certificates of client ports and of clients
    peer-ca.crt peer-ca.key   who signs those of peer ports: a client's certificate is none of a peer
    ca.crl peer-ca.crl        what is revoked, once something is
    members/a/                all that member a needs: server.crt server.key peer.crt peer.key ca.crt peer-ca.crt
    clients/alice.crt .key    the user alice, where --client-cert-auth names users

Nothing is written over, except by ``renew`` and the lists by ``revoke``. Names are checked before the first file is
written.
"""

from __future__ import annotations

import datetime
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from raftkv.errors import ConfigError
from raftkv.server.tls.certificates import decoding
from raftkv.server.tls.issue import (
    CLIENT,
    SERVER,
    Authority,
    check_host,
    name_directory,
    private_directory,
    replace_files,
    write_new,
    write_pair,
)

HERE: Final = ("localhost", "127.0.0.1", "::1")
"""Hosts that a member's certificate for clients has beside the member's own."""
CRL_DAYS: Final = 3650
"""Until a list of revoked certificates ought to be renewed; members go by it after that too, and warn."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


@dataclass(frozen=True, slots=True)
class Made:
    """One certificate.

    Attributes:
        kind: ``authority``, ``server``, ``peer`` or ``client``.
        name: common name.
        hosts: names and addresses in it.
        expires: when it ends.
        path: of its file.
    """

    kind: str
    name: str
    hosts: tuple[str, ...]
    expires: datetime.datetime
    path: Path


class Folder:
    """A directory of certificates.

    Arguments:
        path: of it.
        is_new: make it if it is not there: who looks for something does not want an empty one.

    Raises:
        ConfigError, StorageError: it cannot be used.
    """

    def __init__(self, path: str, *, is_new: bool) -> None:
        if not is_new and not Path(path).exists():
            raise ConfigError(f"{path} is not there")
        self._path = private_directory(Path(path))

    def make(self, members: Mapping[str, Sequence[str]], clients: Sequence[str], days: int, ca_days: int) -> list[Made]:
        """Make authorities, unless they are there, and certificates for members and clients that have none.

        Arguments:
            members: name to hosts.
            clients: names of users.
            days: that certificates are valid.
            ca_days: that authorities are valid.

        Raises:
            ConfigError: something is there already or cannot be written, or a name cannot be one; all is as it was.
        """
        for name in (*members, *clients):
            _check_name(name)
        for host in (host for hosts in members.values() for host in hosts):
            check_host(host)
        for path in (*map(self._member, members), *map(self._client, clients)):
            if path.exists():
                raise ConfigError(f"{path} is there already, and is not written over; `raftkv certs renew` renews it")
        made: list[Made] = []
        try:
            for authority in ("ca", "peer-ca"):
                made += self._authority(authority, ca_days)
            for name, hosts in members.items():
                made += self._make_member(name, hosts, days)
            for name in clients:
                made += self._make_client(name, days)
        except BaseException:
            # All of a call or nothing: the words for members of the next one would not name those that are left.
            for one in made:
                self._take_back(one)
            raise
        return made

    def _take_back(self, one: Made) -> None:
        """Delete a certificate that was made just now, with its key; of a member all of its files."""
        if one.kind in ("server", "peer"):
            shutil.rmtree(one.path.parent, ignore_errors=True)
            return
        for path in (one.path, one.path.with_suffix(".key")):
            path.unlink(missing_ok=True)

    def _authority(self, name: str, days: int) -> list[Made]:
        certificate, key = self._path / f"{name}.crt", self._path / f"{name}.key"
        if certificate.exists() or key.exists():
            self._load(name)
            return []
        write_pair(Authority.make(f"raftkv {name}", days).pair, certificate, key)
        return [_read("authority", certificate)]

    def _make_client(self, name: str, days: int) -> list[Made]:
        private_directory(self._path / "clients")
        certificate = self._client(name)
        write_pair(self._load("ca").issue(name, days), certificate, certificate.with_suffix(".key"))
        return [_read("client", certificate)]

    def _load(self, name: str) -> Authority:
        return Authority.load(self._path / f"{name}.crt", self._path / f"{name}.key")

    def _make_member(self, name: str, hosts: Sequence[str], days: int) -> list[Made]:
        server = self._load("ca").issue(name, days, list(dict.fromkeys((*hosts, *HERE))), (SERVER,))
        peer = self._load("peer-ca").issue(name, days, hosts, (SERVER, CLIENT))
        # All of it or nothing: what has half of its files can be neither made nor renewed.
        making, folder = self._path / f".{name}.new", self._member(name)
        shutil.rmtree(making, ignore_errors=True)
        private_directory(making)
        try:
            write_pair(server, making / "server.crt", making / "server.key")
            write_pair(peer, making / "peer.crt", making / "peer.key")
            for authority in ("ca.crt", "peer-ca.crt"):
                write_new(making / authority, (self._path / authority).read_bytes())
            private_directory(folder.parent)
            name_directory(making, folder)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
        return [_read("server", folder / "server.crt"), _read("peer", folder / "peer.crt")]

    def renew(self, members: Sequence[str], clients: Sequence[str], days: int) -> list[Made]:
        """Replace certificates and keys by new ones for the same names. Running members take them up by themselves.

        Raises:
            ConfigError: one is not there.
        """
        made = []
        for kind, certificate in self._files(members, clients):
            old = _read(kind, certificate)
            purposes = {"server": (SERVER,), "peer": (SERVER, CLIENT), "client": (CLIENT,)}[kind]
            pair = self._load(_signer(kind)).issue(old.name, days, old.hosts, purposes)
            key = certificate.with_suffix(".key")
            replace_files({key: pair.key_pem, certificate: pair.certificate_pem})
            made.append(_read(kind, certificate))
        return made

    def revoke(self, members: Sequence[str], clients: Sequence[str]) -> list[Path]:
        """Put the present certificates of members and clients on the lists of revoked ones; the lists.

        Raises:
            ConfigError: one is not there.
        """
        lists = []
        for kind, certificate in self._files(members, clients):
            signer = _signer(kind)
            path = self._path / f"{signer}.crl"
            _add_revoked(path, self._load(signer), certificate)
            lists.append(path)
        return list(dict.fromkeys(lists))

    def remove(self, members: Sequence[str], clients: Sequence[str]) -> None:
        """Delete the files of members and clients, so that their names can be given again."""
        for name in members:
            shutil.rmtree(self._member(name))
        for name in clients:
            self._client(name).unlink()
            self._client(name).with_suffix(".key").unlink(missing_ok=True)

    def all(self) -> list[Made]:
        """Return all certificates."""
        found = [
            _read("authority", path) for name in ("ca", "peer-ca") if (path := self._path / f"{name}.crt").exists()
        ]
        for member in sorted((self._path / "members").glob("*/")):
            found += [_read(kind, member / f"{kind}.crt") for kind in ("server", "peer")]
        return found + [_read("client", path) for path in sorted((self._path / "clients").glob("*.crt"))]

    def hosts(self) -> dict[str, tuple[str, ...]]:
        """Return the hosts of each member that has certificates here, the advertised one first."""
        servers = [_read("server", path) for path in sorted((self._path / "members").glob("*/server.crt"))]
        return {one.name: one.hosts for one in servers}

    def member_folder(self, name: str) -> Path:
        """Return the directory of a member."""
        return self._member(name)

    def _member(self, name: str) -> Path:
        return self._path / "members" / name

    def _client(self, name: str) -> Path:
        return self._path / "clients" / f"{name}.crt"

    def _files(self, members: Sequence[str], clients: Sequence[str]) -> list[tuple[str, Path]]:
        """Kind and file of each certificate of members and clients; all are there."""
        for name in (*members, *clients):
            _check_name(name)
        found = [(kind, self._member(name) / f"{kind}.crt") for name in members for kind in ("server", "peer")]
        found += [("client", self._client(name)) for name in clients]
        for _, path in found:
            if not path.exists():
                raise ConfigError(f"there is no {path}; `raftkv certs list` shows what is there")
        return found


def _signer(kind: str) -> str:
    return "peer-ca" if kind == "peer" else "ca"


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be a name: letters, digits and . _ @ -, at most 64")


def _read(kind: str, path: Path) -> Made:
    try:
        with decoding():
            found = x509.load_pem_x509_certificate(path.read_bytes())
            end = found.not_valid_after_utc
            subject = found.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
            names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            hosts = tuple(str(name.value) for name in names)
    except x509.ExtensionNotFound:
        hosts = ()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no certificate: {error}") from None
    if not subject:
        raise ConfigError(f"{path} is no certificate of `raftkv certs`: it has no common name")
    return Made(kind, str(subject[0].value), hosts, end, path)


def _add_revoked(path: Path, authority: Authority, certificate: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    try:
        with decoding():
            serial = x509.load_pem_x509_certificate(certificate.read_bytes()).serial_number
    except ValueError as error:
        raise ConfigError(f"{certificate} is no certificate: {error}") from None
    try:
        with decoding():
            known = list(x509.load_pem_x509_crl(path.read_bytes())) if path.exists() else []
    except ValueError as error:
        raise ConfigError(
            f"{path} is no list of revoked certificates: {error}; put it aside and revoke again"
        ) from None
    builder = x509.CertificateRevocationListBuilder().issuer_name(authority.pair.certificate.subject)
    builder = builder.last_update(now).next_update(now + datetime.timedelta(days=CRL_DAYS))
    new = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
    for revoked in [*(one for one in known if one.serial_number != new.serial_number), new]:
        builder = builder.add_revoked_certificate(revoked)
    signed = builder.sign(authority.pair.key, hashes.SHA256())
    replace_files({path: signed.public_bytes(serialization.Encoding.PEM)})
