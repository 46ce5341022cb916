"""What a client trusts and shows under TLS, from files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import ssl

_makers: WeakKeyDictionary[ssl.SSLContext, Callable[[], ssl.SSLContext]] = WeakKeyDictionary()
"""How each context was made that is in use."""


def tls_context(ca_file: str = "", cert_file: str = "", key_file: str = "", *, verify: bool = True) -> ssl.SSLContext:
    """Return a context that verifies servers as Go's clients do.

    The host must be among the names or IP addresses in the server's certificate (a common name is none), and what is
    in the file of authorities is one, an intermediate one too.

    Arguments:
        ca_file: authorities; empty: this machine's.
        cert_file, key_file: certificate to show, and its key; empty: none.
        verify: False: whoever answers is believed.

    Raises:
        OSError: a file cannot be read or used (``ssl.SSLError`` is one).
    """
    import ssl

    context = ssl.create_default_context(cafile=ca_file or None)
    context.hostname_checks_common_name = False
    # Strict checks are Python's default from 3.13 on; they refuse authorities that etcd and openssl have long made.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if cert_file:
        context.load_cert_chain(cert_file, key_file)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    _makers[context] = partial(tls_context, ca_file, cert_file, key_file, verify=verify)
    return context


def for_http(context: ssl.SSLContext) -> ssl.SSLContext:
    """Return a context like one of ``tls_context``, for HTTP/1.1 beside it: a channel has that one speak HTTP/2 alone.

    Arguments:
        context: that a channel may have; one of somebody else's making is returned as it is.

    Raises:
        OSError: a file cannot be read or used any more.
    """
    make = _makers.get(context)
    return context if make is None else make()
