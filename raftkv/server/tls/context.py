"""TLS contexts from certificate files, for listening and for connecting.

Invariants:

1. A configured authority implies verification: if there is one, or ``client_cert_auth`` is on, every client must show a
   certificate of it. There is nothing in between, so the certificate of a connection is always a verified one.
2. A configured authority is the only one. The system's authorities are trusted only if none is configured, and only for
   outgoing connections.
3. Sessions are not resumed: every connection is verified with the current certificates.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from raftkv.config import TLSFiles
from raftkv.errors import ConfigError
from raftkv.rpc.tls import CLIENT_PROTOCOLS, SERVER_PROTOCOLS

# -- ciphers --------------------------------------------------------------------------------------------------------
#
# Cipher suites by the names of Go and etcd, and OpenSSL's names for them. Suites of TLS 1.3 cannot be chosen, as in Go:
# all of them are always on, and naming them has no effect. Suites that Go lists as insecure are refused.

_TLS_1_3: Final = frozenset({"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"})
_TLS_1_2: Final = {
    "TLS_RSA_WITH_AES_128_CBC_SHA": "AES128-SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA": "AES256-SHA",
    "TLS_RSA_WITH_AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    **{
        f"TLS_ECDHE_{key}_WITH_{go}": f"ECDHE-{key}-{openssl}"
        for key in ("ECDSA", "RSA")
        for go, openssl in (
            ("AES_128_CBC_SHA", "AES128-SHA"),
            ("AES_256_CBC_SHA", "AES256-SHA"),
            ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
            ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
            ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
            ("CHACHA20_POLY1305", "CHACHA20-POLY1305"),
        )
    },
}
_INSECURE: Final = frozenset(
    {
        "TLS_RSA_WITH_RC4_128_SHA",
        "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
        "TLS_RSA_WITH_AES_128_CBC_SHA256",
        "TLS_ECDHE_ECDSA_WITH_RC4_128_SHA",
        "TLS_ECDHE_RSA_WITH_RC4_128_SHA",
        "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA",
        "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256",
        "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
    }
)


def openssl_names(suites: Iterable[str]) -> list[str]:
    """Return OpenSSL's names of the given suites up to TLS 1.2; empty if all are TLS 1.3 suites.

    Arguments:
        suites: Go's names.

    Raises:
        ConfigError: a name is unknown, or its suite is not safe.
    """
    found = []
    for name in suites:
        if name in _INSECURE:
            raise ConfigError(f"--cipher-suites: {name} is not safe, and raftkv does not speak it")
        if name not in _TLS_1_2 and name not in _TLS_1_3:
            raise ConfigError(f'unexpected TLS cipher suite "{name}"')
        if name in _TLS_1_2:
            found.append(_TLS_1_2[name])
    return found


_VERSIONS: Final = {"TLS1.2": ssl.TLSVersion.TLSv1_2, "TLS1.3": ssl.TLSVersion.TLSv1_3}


@dataclass(frozen=True, slots=True)
class Rules:
    """TLS settings of every connection, incoming or outgoing.

    Attributes:
        min_version, max_version: TLS1.2 or TLS1.3; no maximum if empty.
        cipher_suites: Go's names; empty: OpenSSL's choice.
    """

    min_version: str = "TLS1.2"
    max_version: str = ""
    cipher_suites: tuple[str, ...] = ()


def server_context(files: TLSFiles, rules: Rules) -> ssl.SSLContext:
    """Create a context for listening.

    Arguments:
        files: certificate files; there must be a certificate to show.
        rules: TLS rules of the member.

    Raises:
        ConfigError: a file cannot be read or used; a one-line message for the user.
    """
    context = _new(ssl.PROTOCOL_TLS_SERVER, rules, SERVER_PROTOCOLS)
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET | ssl.OP_CIPHER_SERVER_PREFERENCE
    _load(context, files.cert_file, files.key_file)
    if files.verifies:
        _trust(context, files.trusted_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TLSFiles, rules: Rules) -> ssl.SSLContext:
    """Create a context for connecting. The server must show a certificate for the name that the client connects to.

    Arguments:
        files: certificate files.
        rules: TLS rules of the member.

    Raises:
        ConfigError: as in ``server_context``.
    """
    context = _new(ssl.PROTOCOL_TLS_CLIENT, rules, CLIENT_PROTOCOLS)
    context.hostname_checks_common_name = False
    if files.self_signed:
        # A self-signed certificate has no authority that others know.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif files.trusted_ca_file:
        _trust(context, files.trusted_ca_file)
    else:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    certificate = files.client_cert_file or files.cert_file
    if certificate:
        _load(context, certificate, files.client_key_file or files.key_file)
    return context


def _new(protocol: int, rules: Rules, alpn: tuple[str, ...]) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = _VERSIONS[rules.min_version]
    if rules.max_version:
        context.maximum_version = _VERSIONS[rules.max_version]
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    # As in Go, every certificate in the file of authorities is trusted, even an intermediate one.
    context.verify_flags |= ssl.VERIFY_X509_TRUSTED_FIRST | ssl.VERIFY_X509_PARTIAL_CHAIN
    if rules.cipher_suites:
        _choose_suites(context, rules)
    context.set_alpn_protocols(list(alpn))
    return context


def _choose_suites(context: ssl.SSLContext, rules: Rules) -> None:
    names = openssl_names(rules.cipher_suites)
    if not names:
        if rules.max_version == "TLS1.2":
            raise ConfigError("--cipher-suites names suites of TLS1.3 only, and --tls-max-version is TLS1.2")
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return
    try:
        context.set_ciphers(":".join(names))
    except ssl.SSLError:
        raise ConfigError(
            f"--cipher-suites: this machine's OpenSSL has none of {','.join(rules.cipher_suites)}"
        ) from None


def _load(context: ssl.SSLContext, certificate: str, key: str) -> None:
    try:
        # A key with a password would ask for it on the terminal, in the middle of a handshake.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except ssl.SSLError as error:
        reason = "they do not belong together" if error.reason == "KEY_VALUES_MISMATCH" else "they are not PEM"
        raise ConfigError(f"cannot use certificate {certificate} with key {key}: {reason}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot use certificate {certificate} with key {key}: {reason}") from None


def _trust(context: ssl.SSLContext, authorities: str) -> None:
    try:
        context.load_verify_locations(authorities)
    except ssl.SSLError:
        raise ConfigError(f"cannot use certificate authorities {authorities}: it is not PEM") from None
    except OSError as error:
        raise ConfigError(f"cannot use certificate authorities {authorities}: {error.strerror}") from None
    if not context.get_ca_certs() and not context.cert_store_stats()["x509"]:
        raise ConfigError(f"cannot use certificate authorities {authorities}: there is no certificate in it")
