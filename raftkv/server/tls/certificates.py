"""Files of certificates, keys and revocation lists: whether they can be read, and when they expire.

Revocation lists are those of ``--client-crl-file`` and ``--peer-crl-file``: one PEM file with any number of lists, or
one list in DER. A certificate is revoked if a list of its issuer has its serial number; every certificate of a chain is
checked. The signature of a list is checked when the list is loaded. An overdue list is still used, as in etcd, and
``warn`` logs that it is overdue.

Certificates and lists that expire soon are logged at each start, at each reload and once a day, and exported as
metrics.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raftkv.config import TLSFiles
from raftkv.errors import ConfigError

if TYPE_CHECKING:
    from datetime import datetime

    from cryptography import x509


_log = logging.getLogger(__name__)


@contextmanager
def decoding() -> Iterator[None]:
    """Turn every decoding error of cryptography within the block into ValueError.

    cryptography decodes a field when it is read, and some of its errors are plain ``Exception`` (``InvalidVersion``).

    Raises:
        ValueError: with cryptography's text.
    """
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    refusals = (x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, UnsupportedAlgorithm)
    try:
        yield
    except (*refusals, TypeError) as error:
        raise ValueError(str(error)) from error


_OTHERS_READ: Final = stat.S_IRGRP | stat.S_IROTH


def is_open_to_others(path: str) -> bool:
    """Return whether other users may read a private key, by the permissions of its file.

    A group may read root's keys, since some systems share keys with services this way. A file whose permissions cannot
    be read counts as closed. A key that others may read is used, with a line in the log: etcd accepts it, and secret
    volumes have mode 0644 by default. ``--secure`` does not start with such a key.

    Arguments:
        path: path of the key.
    """
    try:
        found = os.stat(path)
    except OSError:
        return False
    allowed = stat.S_IRGRP if found.st_uid == 0 != os.geteuid() else 0
    return bool(found.st_mode & _OTHERS_READ & ~allowed)


_BEGIN = b"-----BEGIN X509 CRL-----"


class Revocations:
    """Revoked certificates, by issuer and serial number.

    Arguments:
        path: file of the lists.
        trusted_ca_file: authorities, in PEM.

    Attributes:
        next_update_s: when the first of the lists should be renewed, in Unix time; None: no list says.

    Raises:
        ConfigError: the file cannot be read, or a list in it is forged or damaged.
    """

    def __init__(self, path: str, trusted_ca_file: str) -> None:
        from cryptography import x509

        try:
            with decoding():
                lists = [_decoded(part) for part in _parts(Path(path).read_bytes())]
                authorities = x509.load_pem_x509_certificates(Path(trusted_ca_file).read_bytes())
                names = [(authority, authority.subject) for authority in authorities]
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no list of revoked certificates, in PEM or DER"
            raise ConfigError(f"cannot use the revoked certificates of {path}: {reason}") from None
        for found in lists:
            _check(found, [authority for authority, name in names if name == found.issuer], path)
        self._serials: dict[x509.Name, set[int]] = {}
        for found in lists:
            self._serials.setdefault(found.issuer, set()).update(found.serials)
        dates = [found.next_update for found in lists]
        self.next_update_s = min((date.timestamp() for date in dates if date is not None), default=None)

    def revoked(self, tls: ssl.SSLObject) -> str:
        """Return the serial number (hexadecimal) of a revoked certificate of the peer; empty: none is revoked.

        Arguments:
            tls: TLS object of a finished handshake.

        Raises:
            ValueError: a certificate cannot be decoded: OpenSSL accepts more than cryptography does.
        """
        from cryptography import x509

        with decoding():
            for encoded in chain_of(tls):
                certificate = x509.load_der_x509_certificate(encoded)
                if certificate.serial_number in self._serials.get(certificate.issuer, ()):
                    return f"{certificate.serial_number:x}"
        return ""


def chain_of(tls: ssl.SSLObject) -> list[bytes]:
    """Return the peer's certificates in DER, its own first; empty: it has shown none.

    Arguments:
        tls: TLS object of a finished handshake.
    """
    if hasattr(tls, "get_verified_chain"):  # from Python 3.13 on
        chain: list[bytes] = tls.get_verified_chain()
        return chain
    inner: Any = getattr(tls, "_sslobj", None)
    if inner is not None and hasattr(inner, "get_verified_chain"):
        return [ssl.PEM_cert_to_DER_cert(found.public_bytes()) for found in inner.get_verified_chain() or ()]
    encoded = tls.getpeercert(binary_form=True)
    return [encoded] if encoded else []


def authorities_of(path: str) -> frozenset[bytes]:
    """Return the certificates of a PEM file in DER.

    Raises:
        ConfigError: the file cannot be decoded.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    try:
        with decoding():
            found = x509.load_pem_x509_certificates(Path(path).read_bytes())
            return frozenset(one.public_bytes(Encoding.DER) for one in found)
    except ValueError as error:
        raise ConfigError(f"cannot read the certificates of {path}: {error}") from None


def _parts(data: bytes) -> list[bytes]:
    if _BEGIN not in data:
        return [data]
    return [_BEGIN + part for part in data.split(_BEGIN)[1:]]


@dataclass(frozen=True, slots=True)
class _List:
    """One list, decoded completely: cryptography decodes a field when it is read, so later reads could raise."""

    signed: x509.CertificateRevocationList
    issuer: x509.Name
    serials: set[int]
    next_update: datetime | None


def _decoded(data: bytes) -> _List:
    from cryptography import x509

    load = x509.load_pem_x509_crl if data.startswith(_BEGIN) else x509.load_der_x509_crl
    found = load(data)
    return _List(found, found.issuer, {revoked.serial_number for revoked in found}, found.next_update_utc)


def _check(found: _List, known: list[x509.Certificate], path: str) -> None:
    """Refuse a list that names a known authority as its issuer but was not signed by it."""
    from cryptography.exceptions import InvalidSignature

    for authority in known:
        try:
            with decoding():
                key: Any = authority.public_key()
                if found.signed.is_signature_valid(key):
                    return
        except (InvalidSignature, ValueError):
            continue
    if known:
        raise ConfigError(f"cannot use the revoked certificates of {path}: {known[0].subject} has not signed them")


WARNING_S: Final = 30 * 86_400.0
"""How long before their expiry certificates are logged."""


@dataclass(frozen=True, slots=True)
class End:
    """The expiry of a certificate, an authority or a revocation list.

    Attributes:
        what: description of the item.
        path: path of the file.
        time_s: Unix time of the expiry.
    """

    what: str
    path: str
    time_s: float


def ends_of(files: TLSFiles, revocations: Revocations | None) -> dict[str, End]:
    """Return the expiries by use; of several certificates in a file, the earliest.

    Arguments:
        files: files that have been loaded before.
        revocations: revocations in ``files.crl_file``.
    """
    named = {
        "server": ("certificate", files.cert_file),
        "client": ("certificate", files.client_cert_file),
        "ca": ("certificate authority", files.trusted_ca_file),
    }
    ends = {use: End(what, path, _end_of(path)) for use, (what, path) in named.items() if path}
    if revocations is not None and revocations.next_update_s is not None:
        ends["crl"] = End("list of revoked certificates", files.crl_file, revocations.next_update_s)
    return ends


def _end_of(path: str) -> float:
    from cryptography import x509

    try:
        with decoding():
            found = x509.load_pem_x509_certificates(Path(path).read_bytes())
            return min(certificate.not_valid_after_utc.timestamp() for certificate in found)
    except ValueError as error:
        raise ConfigError(f"cannot read when the certificates of {path} end: {error}") from None


def warn(ends: Mapping[str, End]) -> None:
    """Log what expires within ``WARNING_S``.

    Arguments:
        ends: expiries by use.
    """
    now_s = time.time()
    for end in dict.fromkeys(ends.values()):
        left_s = end.time_s - now_s
        date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(end.time_s))
        if left_s <= 0:
            _log.error("%s %s expired on %s: replace the file", end.what, end.path, date)
        elif left_s < WARNING_S:
            _log.warning(
                "%s %s expires in %d days, on %s: replace the file before then",
                end.what,
                end.path,
                left_s // 86_400,
                date,
            )
