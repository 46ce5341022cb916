"""When certificates end, and the warnings before that: in the log at each start, reload and day, and as metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from raftkv.config import TLSFiles
from raftkv.errors import ConfigError
from raftkv.server.tls.decoding import decoding
from raftkv.server.tls.revocation import Revocations

_log = logging.getLogger(__name__)

WARNING_S: Final = 30 * 86_400.0
"""Certificates are warned of so long before their end."""


@dataclass(frozen=True, slots=True)
class End:
    """What ends.

    Attributes:
        what: in words.
        path: of the file.
        time_s: Unix time.
    """

    what: str
    path: str
    time_s: float


def ends_of(files: TLSFiles, revocations: Revocations | None) -> dict[str, End]:
    """Return what ends when, by use; of several certificates of a file the first to end.

    Arguments:
        files: that have been loaded already.
        revocations: of ``files.crl_file``.
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
    """Log what ends within ``WARNING_S``.

    Arguments:
        ends: by use.
    """
    now_s = time.time()
    for end in dict.fromkeys(ends.values()):
        left_s = end.time_s - now_s
        date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(end.time_s))
        if left_s <= 0:
            _log.error("%s %s has expired on %s: put a new one in its place", end.what, end.path, date)
        elif left_s < WARNING_S:
            _log.warning("%s %s expires in %d days, on %s", end.what, end.path, left_s // 86_400, date)
