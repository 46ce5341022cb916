"""Certificates of the attacks: an authority, a member, clients, one that was revoked, and the list that says so."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from raftkv.server.tls.issue import CLIENT, SERVER, Authority, write_pair

NAMES = ("member", "alice", "root", "revoked", "later")
HOSTS = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Files:
    """Where they are."""

    folder: Path

    def __call__(self, name: str) -> str:
        return str(self.folder / name)


def make(folder: Path) -> Files:
    """Make them all in a folder."""
    authority = Authority.make("authority", 2)
    write_pair(authority.pair, folder / "ca.crt", folder / "ca.key")
    pairs = {name: authority.issue(name, 2, HOSTS, (SERVER, CLIENT)) for name in NAMES}
    for name, pair in pairs.items():
        write_pair(pair, folder / f"{name}.crt", folder / f"{name}.key")
    elsewhere = authority.issue("elsewhere", 2, ["elsewhere.example"], (SERVER, CLIENT))
    write_pair(elsewhere, folder / "elsewhere.crt", folder / "elsewhere.key")
    (folder / "other.crt").write_bytes(Authority.make("other", 2).pair.certificate_pem)
    files = Files(folder)
    revoke(files, "revoked")
    return files


def revoke(files: Files, *names: str) -> None:
    """Write the list of revoked certificates: those, and no others."""
    authority = Authority.load(files.folder / "ca.crt", files.folder / "ca.key")
    now = datetime.now(UTC)
    shown = [x509.load_pem_x509_certificate((files.folder / f"{name}.crt").read_bytes()) for name in names]
    entries = [x509.RevokedCertificateBuilder(one.serial_number, now).build() for one in shown]
    issuer = authority.pair.certificate.subject
    builder = x509.CertificateRevocationListBuilder(issuer, now, now + timedelta(days=1), [], entries)
    made = files.folder / "list.new"
    made.write_bytes(builder.sign(authority.pair.key, hashes.SHA256()).public_bytes(Encoding.PEM))
    made.replace(files.folder / "list.crl")
