"""TLS contexts from certificate files."""

from __future__ import annotations

import ssl
from typing import Final

from raftkv.config import TLSFiles
from raftkv.errors import ConfigError

_VERSIONS: Final = {"TLS1.2": ssl.TLSVersion.TLSv1_2, "TLS1.3": ssl.TLSVersion.TLSv1_3}


def server_context(files: TLSFiles, min_version: str = "TLS1.2", max_version: str = "") -> ssl.SSLContext | None:
    """For listening; None where no certificate is configured.

    Arguments:
        files: certificates.
        min_version, max_version: TLS1.2 or TLS1.3; no maximum if empty.

    Raises:
        ConfigError: a file cannot be read, or the key does not fit the certificate.
    """
    if files.is_empty:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = _VERSIONS[min_version]
    if max_version:
        context.maximum_version = _VERSIONS[max_version]
    _load(context, files.cert_file, files.key_file)
    if files.trusted_ca_file:
        _trust(context, files.trusted_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED if files.client_cert_auth else ssl.CERT_OPTIONAL
    return context


def client_context(files: TLSFiles) -> ssl.SSLContext | None:
    """For connecting to https peers; None where nothing is configured."""
    if files.is_empty and not files.trusted_ca_file:
        return None
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.trusted_ca_file:
        _trust(context, files.trusted_ca_file)
    certificate = files.client_cert_file or files.cert_file
    if certificate:
        _load(context, certificate, files.client_key_file or files.key_file)
    return context


def _load(context: ssl.SSLContext, certificate: str, key: str) -> None:
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use certificate {certificate} with key {key}: {error}") from error


def _trust(context: ssl.SSLContext, authorities: str) -> None:
    try:
        context.load_verify_locations(authorities)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use certificate authorities {authorities}: {error}") from error
