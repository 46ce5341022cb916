"""Certificates of a member, or of this client: when they end, whom they name, whether the keys are private."""

from __future__ import annotations

import ipaddress
import ssl
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from raftkv.cli.doctor.finding import Finding, failure, ok, warning
from raftkv.cluster_id import split_url
from raftkv.config import ServerConfig, TLSFiles
from raftkv.errors import ConfigError
from raftkv.server.tls.certificates import WARNING_S, ends_of, is_open_to_others

_DAY_S: Final = 86_400


def check_certificates(config: ServerConfig) -> list[Finding]:
    """Look at the files that a member is configured with.

    Arguments:
        config: of the member.
    """
    found: list[Finding] = []
    for subject, files, urls in (
        ("client port", config.client_tls, config.advertise_client_urls),
        ("peer port", config.peer_tls, config.initial_advertise_peer_urls),
    ):
        found += check_files(f"certificates of the {subject}", files, _hosts(urls))
    return found


def check_files(subject: str, files: TLSFiles, hosts: Iterable[str] = ()) -> list[Finding]:
    """Look at certificates of one use; nothing, if there are none.

    Arguments:
        subject: what they are of.
        files: where they are.
        hosts: that the certificate must name.
    """
    if not any(files.paths):
        return []
    try:
        found = [_check_end(f"{subject}: {end.what}", end.path, end.time_s) for end in ends_of(files, None).values()]
        keys = filter(None, (files.key_file, files.client_key_file))
        found += [_check_mode(f"{subject}: key", key) for key in keys]
        if files.cert_file and files.key_file:
            _check_pair(files.cert_file, files.key_file)
    except ConfigError as error:
        return [failure(subject, str(error), "mend the file; raftkv certs makes new ones")]
    except OSError as error:
        return [failure(subject, f"{error.filename}: {error.strerror}", "name files that this user can read")]
    if files.cert_file and hosts:
        found.append(_check_names(f"{subject}: names", files.cert_file, hosts))
    return found


def _check_end(subject: str, path: str, ends_s: float) -> Finding:
    days = (ends_s - time.time()) / _DAY_S
    advice = "raftkv certs renew, or have your authority make new ones: members take them up while they run"
    if days < 0:
        return failure(subject, f"{path} ended {-days:.0f} days ago", advice)
    figure = f"{path} ends in {days:.0f} days"
    return warning(subject, figure, advice) if days * _DAY_S < WARNING_S else ok(subject, figure)


def _check_mode(subject: str, key: str) -> Finding:
    if is_open_to_others(key):
        return warning(subject, f"other users of this machine may read {key}", f"chmod 0600 {key}")
    return ok(subject, f"{key} is private")


def _check_pair(certificate: str, key: str) -> None:
    try:
        # An empty password: a key that has one would ask for it here, and in every handshake.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"certificate {certificate} and key {key} cannot be used together") from None


def _check_names(subject: str, path: str, hosts: Iterable[str]) -> Finding:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificates(Path(path).read_bytes())[0]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return failure(subject, f"{path} names nobody", "make one with the names and addresses of the member")
    known = {str(name).lower() for name in names.get_values_for_type(x509.DNSName)}
    known |= {str(address) for address in names.get_values_for_type(x509.IPAddress)}
    missing = sorted({host for host in hosts if not _is_named(host, known)})
    if missing:
        figure = f"{path} does not name {', '.join(missing)}"
        return failure(subject, figure, "make one that names the host of every URL that the member advertises")
    return ok(subject, ", ".join(sorted(known)))


def _is_named(host: str, known: set[str]) -> bool:
    try:
        return str(ipaddress.ip_address(host)) in known
    except ValueError:
        return host.lower() in known or f"*.{host.lower().partition('.')[2]}" in known


def _hosts(urls: Iterable[str]) -> list[str]:
    parts = [split_url(url) for url in urls]
    return [host.strip("[]") for scheme, host, _ in parts if scheme == "https"]
