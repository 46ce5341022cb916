"""``raftkv certs``: create, list, renew and revoke the certificates of a small cluster, as files in one directory.

    raftkv certs tls a=10.0.0.1 b=10.0.0.2 c=10.0.0.3 --client alice

Exit codes: 0 done, 1 failed (one line says what; no file was overwritten), 2 an invalid flag.

Certificates are created by ``server.tls.issue``, which members also use for ``--auto-tls``. Not supported: certificates
for other purposes, keys with passwords, signing requests for another authority.
"""

from __future__ import annotations

import datetime
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from raftkv.cli import daemon
from raftkv.cli.pflag import BOOL, LIST, UINT, Flag
from raftkv.cli.program import BAD_FLAGS, ERROR, SUCCESS, CommandError
from raftkv.cli.table import render, tell
from raftkv.errors import ConfigError, RaftKVError
from raftkv.server.tls.certificates import decoding
from raftkv.server.tls.issue import (
    CLIENT,
    SERVER,
    Authority,
    general_name,
    name_directory,
    private_directory,
    replace_files,
    write_new,
    write_pair,
)
from raftkv.urls import join_address

# -- folder ---------------------------------------------------------------------------------------------------------
#
# The directory of ``raftkv certs``.
#
#     ca.crt ca.key             authority of client ports and of clients
#     peer-ca.crt peer-ca.key   authority of peer ports, separate so that a client's certificate is not valid for a peer
#     ca.crl peer-ca.crl        lists of revoked certificates, after the first revocation
#     members/a/                all files for member a: server.crt server.key peer.crt peer.key ca.crt peer-ca.crt
#     clients/alice.crt .key    the user alice, if --client-cert-auth names users
#
# No file is overwritten, except by ``renew``, and the lists by ``revoke``. All names are checked before the first file
# is written.

HERE: Final = ("localhost", "127.0.0.1", "::1")
"""Hosts in a member's certificate for clients, besides the member's own."""
CRL_DAYS: Final = 3650
"""Days after which a list of revoked certificates should be renewed; members then still use it, but warn."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


@dataclass(frozen=True, slots=True)
class Made:
    """One certificate.

    Attributes:
        kind: ``authority``, ``server``, ``peer`` or ``client``.
        name: common name.
        hosts: names and addresses in the certificate.
        expires: end of its validity.
        path: path of its file.
    """

    kind: str
    name: str
    hosts: tuple[str, ...]
    expires: datetime.datetime
    path: Path


class Folder:
    """A directory of certificates.

    Arguments:
        path: path of the directory.
        is_new: whether to create the directory if it does not exist; False for commands that only read.

    Raises:
        ConfigError, StorageError: the directory cannot be used.
    """

    def __init__(self, path: str, *, is_new: bool) -> None:
        if not is_new and not Path(path).exists():
            raise ConfigError(f"{path} does not exist")
        self._path = private_directory(path)

    def make(self, members: Mapping[str, Sequence[str]], clients: Sequence[str], days: int, ca_days: int) -> list[Made]:
        """Create the authorities, unless they exist, and certificates for new members and clients.

        Arguments:
            members: hosts of each member, by name.
            clients: names of users.
            days: validity of certificates.
            ca_days: validity of authorities.

        Raises:
            ConfigError: a file exists already or cannot be written, or a name is invalid; nothing is changed.
        """
        for name in (*members, *clients):
            _check_name(name)
        for host in (host for hosts in members.values() for host in hosts):
            general_name(host)
        for path in (*map(self.member_folder, members), *map(self._client, clients)):
            if path.exists():
                raise ConfigError(f"{path} already exists and is not overwritten; `raftkv certs renew` renews it")
        made: list[Made] = []
        try:
            for authority in ("ca", "peer-ca"):
                made += self._authority(authority, ca_days)
            for name, hosts in members.items():
                made += self._make_member(name, hosts, days)
            for name in clients:
                made += self._make_client(name, days)
        except BaseException:
            # All or nothing: otherwise the printed command lines of a second call would miss members created by this
            # one.
            for one in made:
                self._take_back(one)
            raise
        return made

    def _take_back(self, one: Made) -> None:
        """Delete a certificate that was just created, with its key; for a member, all of its files."""
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
        # All or nothing: a member with half of its files could be neither created nor renewed.
        making, folder = self._path / f".{name}.new", self.member_folder(name)
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
        """Replace certificates and keys with new ones for the same names. Running members reload them automatically.

        Raises:
            ConfigError: a certificate does not exist.
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
        """Revoke the present certificates of members and clients; return the paths of the lists.

        Raises:
            ConfigError: a certificate does not exist.
        """
        lists = []
        for kind, certificate in self._files(members, clients):
            signer = _signer(kind)
            path = self._path / f"{signer}.crl"
            _add_revoked(path, self._load(signer), certificate)
            lists.append(path)
        return list(dict.fromkeys(lists))

    def remove(self, members: Sequence[str], clients: Sequence[str]) -> None:
        """Delete the files of members and clients, so that their names can be used again."""
        for name in members:
            shutil.rmtree(self.member_folder(name))
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
        """Return the directory for a member's files."""
        return self._path / "members" / name

    def _client(self, name: str) -> Path:
        return self._path / "clients" / f"{name}.crt"

    def _files(self, members: Sequence[str], clients: Sequence[str]) -> list[tuple[str, Path]]:
        """Return the kind and the file of each certificate of members and clients; all must exist."""
        for name in (*members, *clients):
            _check_name(name)
        found = [(kind, self.member_folder(name) / f"{kind}.crt") for name in members for kind in ("server", "peer")]
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
        raise ConfigError(f"{path} is not a certificate: {error}") from None
    if not subject:
        raise ConfigError(f"{path} is not a certificate of `raftkv certs`: it has no common name")
    return Made(kind, str(subject[0].value), hosts, end, path)


def _add_revoked(path: Path, authority: Authority, certificate: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    try:
        with decoding():
            serial = x509.load_pem_x509_certificate(certificate.read_bytes()).serial_number
    except ValueError as error:
        raise ConfigError(f"{certificate} is not a certificate: {error}") from None
    try:
        with decoding():
            known = list(x509.load_pem_x509_crl(path.read_bytes())) if path.exists() else []
    except ValueError as error:
        raise ConfigError(f"{path} is not a revocation list: {error}; move it away and revoke again") from None
    builder = x509.CertificateRevocationListBuilder().issuer_name(authority.pair.certificate.subject)
    builder = builder.last_update(now).next_update(now + datetime.timedelta(days=CRL_DAYS))
    new = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
    for revoked in [*(one for one in known if one.serial_number != new.serial_number), new]:
        builder = builder.add_revoked_certificate(revoked)
    signed = builder.sign(authority.pair.key, hashes.SHA256())
    replace_files({path: signed.public_bytes(serialization.Encoding.PEM)})


CLIENT_PORT: Final = 2379
PEER_PORT: Final = 2380

_JSON = Flag("json", BOOL, usage="print JSON")
_DAYS = Flag("days", UINT, 365, usage="validity of certificates in days", least=1, most=99_999)
_MEMBERS = Flag("member", LIST, usage="members by name, comma-separated")
_CLIENTS = Flag("client", LIST, usage="clients by name, comma-separated")
FLAGS: Final[dict[str, tuple[Flag, ...]]] = {
    "": (
        Flag(
            "client",
            LIST,
            usage="names of client certificates to make, comma-separated: each is the user with that name",
        ),
        _DAYS,
        Flag("ca-days", UINT, 3650, usage="validity of authorities in days", least=1, most=99_999),
        _JSON,
    ),
    "list": (_JSON,),
    "renew": (_MEMBERS, _CLIENTS, _DAYS, _JSON),
    "revoke": (_MEMBERS, _CLIENTS, _JSON),
}
_USAGE = """\
Usage:
  raftkv certs DIRECTORY NAME=HOST[,HOST...]... [flags]   make authorities, and certificates of members and clients
  raftkv certs list DIRECTORY                             print the certificates and their expiry
  raftkv certs renew DIRECTORY [flags]                    replace certificates with new ones for the same names
  raftkv certs revoke DIRECTORY [flags]                   add certificates to the revocation lists, and delete them

HOST is a name or IP address at which a member is reached, without a port; the first is advertised. The
command prints the flags to start the members with. Run again, it adds to DIRECTORY and overwrites nothing;
added members join the others with `raftkv join`, and need a client certificate until they vote.
Copy DIRECTORY/members/NAME to the host of the member NAME, and keep ca.key and peer-ca.key away from all of them.
Running members reload renewed certificates and revocation lists (--client-crl-file, --peer-crl-file).

Examples:
  raftkv certs tls a=10.0.0.1 b=10.0.0.2 c=10.0.0.3,c.example.org --client root,alice
  raftkv certs tls --client bob
  raftkv certs renew tls --member a
  raftkv certs revoke tls --client alice"""


def main(words: Sequence[str]) -> int:
    """Run ``raftkv certs``.

    Arguments:
        words: the command line after ``certs``.

    Returns:
        The exit code.

    Raises:
        CommandError: the command failed; the text is one line.
    """
    found = daemon.parse_command(FLAGS, words, _USAGE)
    if found is None:
        return SUCCESS
    command, parsed = found
    if not parsed.arguments:
        raise CommandError(f"certs {command}".strip() + " takes a directory; see raftkv certs --help", BAD_FLAGS)
    if command and len(parsed.arguments) > 1:
        names = "" if command == "list" else ": name members with --member, clients with --client"
        raise CommandError(f"certs {command} takes only a directory{names}", BAD_FLAGS)
    members = _members(parsed.arguments[1:])
    for flag in ("member", "client"):
        for name, times in Counter(parsed.values.get(flag, ())).items():
            if times > 1:
                raise CommandError(f"certs: {flag} {name} is given twice", BAD_FLAGS)
    if command in ("renew", "revoke") and not (parsed.values["member"] or parsed.values["client"]):
        raise CommandError(f"certs {command}: --member or --client says which", BAD_FLAGS)

    try:
        return _run(command, Folder(parsed.arguments[0], is_new=not command), members, parsed.values)
    except RaftKVError as error:
        raise CommandError(f"certs: {' '.join(str(error).split())}", ERROR) from None


def _members(words: Sequence[str]) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    for word in words:
        name, separator, hosts = word.partition("=")
        found = [host.strip().strip("[]") for host in hosts.split(",") if host.strip()]
        if not separator or not found:
            raise CommandError(f"certs: {word!r} is not NAME=HOST[,HOST...]", BAD_FLAGS)
        if name in members:
            raise CommandError(f"certs: member {name} is given twice", BAD_FLAGS)
        members[name] = found
    return members


def _run(command: str, folder: Folder, members: Mapping[str, Sequence[str]], values: Mapping[str, Any]) -> int:
    is_json = values["json"]
    if command == "list":
        _print(folder.all(), {}, is_json=is_json)
    elif command == "renew":
        _print(folder.renew(values["member"], values["client"], values["days"]), {}, is_json=is_json)
    elif command == "revoke":
        lists = [str(path) for path in folder.revoke(values["member"], values["client"])]
        folder.remove(values["member"], values["client"])
        tell(is_json, {"lists": lists}, "\n".join(f"revoked by {path}" for path in lists))
    else:
        others = folder.hosts()
        made = folder.make(members, values["client"], values["days"], values["ca-days"])
        _print(made, {name: _start(folder, name, members, others) for name in members}, is_json=is_json)
        if not is_json:
            _print_notes(members, others)
    return SUCCESS


def _print_notes(members: Mapping[str, Sequence[str]], others: Mapping[str, Sequence[str]]) -> None:
    """Print hints that the printed command lines do not show."""
    if members and _contact(others):
        print(
            "\nUntil it votes, each needs a client's certificate (root's, if there are users): RAFTKV_CERT, RAFTKV_KEY"
        )
    alike = Counter(hosts[0] for hosts in members.values())
    if alike and max(alike.values()) > 1:
        print("\nMembers on the same host need ports of their own: change them in all the commands.")


def _contact(others: Mapping[str, Sequence[str]]) -> str:
    """Return a host of an existing member; empty: there is none."""
    return next((host for hosts in others.values() for host in hosts if "*" not in host), "")


def _start(
    folder: Folder, name: str, members: Mapping[str, Sequence[str]], others: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the command line that starts a member with its certificates, as a founder or to join existing members."""
    at = folder.member_folder(name)
    client = f"https://{join_address(members[name][0], CLIENT_PORT)}"
    contact = _contact(others)
    peers = {member: f"https://{join_address(hosts[0], PEER_PORT)}" for member, hosts in members.items()}
    flags = {
        "name": name,
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peers[name],
        "initial-advertise-peer-urls": peers[name],
        "initial-cluster": "" if contact else ",".join(f"{member}={url}" for member, url in peers.items()),
        "cert-file": at / "server.crt",
        "key-file": at / "server.key",
        "trusted-ca-file": at / "ca.crt",
        "peer-cert-file": at / "peer.crt",
        "peer-key-file": at / "peer.key",
        "peer-trusted-ca-file": at / "peer-ca.crt",
    }
    program = ["raftkv", "join", f"https://{join_address(contact, CLIENT_PORT)}"] if contact else ["raftkv"]
    return [*program, *(word for flag, value in flags.items() if value for word in (f"--{flag}", str(value)))]


def _print(made: Sequence[Made], starts: Mapping[str, Sequence[str]], *, is_json: bool) -> None:
    certificates = [{**asdict(one), "expires": one.expires.isoformat(), "path": str(one.path)} for one in made]
    now = datetime.datetime.now(datetime.UTC)
    ends = [f"{one.expires:%Y-%m-%d}{' (expired)' if one.expires <= now else ''}" for one in made]
    rows = [[one.kind, one.name, ",".join(one.hosts), end, str(one.path)] for one, end in zip(made, ends, strict=True)]
    table = render(["kind", "name", "hosts", "expires", "file"], rows)
    words = [f"\n{shlex.join(start)}" for start in starts.values()]
    tell(is_json, {"certificates": certificates, "start": starts}, "\n".join([table, *words]))
