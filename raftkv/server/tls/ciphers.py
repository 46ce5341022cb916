"""Cipher suites by the names that Go and etcd use, and what OpenSSL calls them.

Those of TLS 1.3 cannot be chosen, there as here: all of them are always on, and naming them changes nothing.
Suites that Go lists as insecure are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from raftkv.errors import ConfigError

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
    """Return OpenSSL's names of the suites up to TLS 1.2 among these; empty if all are of TLS 1.3.

    Arguments:
        suites: Go's names.

    Raises:
        ConfigError: a name that is not known, or is of a suite that is not safe.
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
