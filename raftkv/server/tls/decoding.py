"""What cryptography raises over a certificate or list that it cannot decode, as one kind of error.

It decodes a field when it is read, and some of its refusals are plain ``Exception`` (``InvalidVersion``). Example::

    with decoding():
        issuer = x509.load_der_x509_crl(data).issuer
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def decoding() -> Iterator[None]:
    """Turn what cannot be decoded in the block into ValueError.

    Raises:
        ValueError: with what cryptography says.
    """
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    refusals = (x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, UnsupportedAlgorithm)
    try:
        yield
    except (*refusals, TypeError) as error:
        raise ValueError(str(error)) from error
