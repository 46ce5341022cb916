"""What the fields of a message must be (RFC 9113 sections 8.2 and 8.3): a malformed message ends its stream.

Octets are looked at where they are decoded (``hpack``); here are pseudo-header fields and those that belong to one
connection only.
"""

from __future__ import annotations

import re
from typing import Final

from raftkv.rpc.http2.errors import ErrorCode, StreamFailedError
from raftkv.rpc.http2.hpack import Headers

_OF_CONNECTION: Final = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
"""Section 8.2.2."""

_OF_REQUEST: Final = frozenset((b":method", b":scheme", b":authority", b":path"))
_WITHOUT_BODY: Final = frozenset((b"204", b"304"))
"""Statuses whose content-length speaks of another response (RFC 9110 section 8.6)."""

_is_token: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch
_is_scheme: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.\-]*").fullmatch
_is_path: Final = re.compile(rb"/[^\x00-\x20\x7f]*").fullmatch
"""RFC 3986 section 3.3 has fewer octets for it; those that end a word of a request line are in none."""
_is_authority: Final = re.compile(rb"[!#$%&'()*+,\-./0-9:;=@A-Z\[\]_a-z~]*").fullmatch
"""Octets that RFC 3986 section 3.2 has for it, and two more: etcd's client 3.5.0 says ``#initially=[http://host:port]``."""

_NEEDED: Final = frozenset((b":method", b":scheme", b":path"))


def malformed(text: str) -> StreamFailedError:
    """Return the error of a message that is malformed (section 8.1.1)."""
    return StreamFailedError(ErrorCode.PROTOCOL_ERROR, f"malformed message: {text}")


def check_request(fields: Headers) -> int | None:
    """Check the fields of a request (section 8.3.1).

    Arguments:
        fields: whose octets are sound.

    Returns:
        What content-length says; None: there is none.

    Raises:
        StreamFailedError: they are not those of a request.
    """
    pseudo = _pseudo(fields)
    names = pseudo.keys()
    if not names <= _OF_REQUEST:
        raise malformed("a pseudo-header field that requests do not have")
    if pseudo.get(b":method") == b"CONNECT":
        if names != {b":method", b":authority"}:
            raise malformed("CONNECT has a method and an authority")
    elif not names >= _NEEDED:
        raise malformed("a request needs :method, :scheme and :path")
    elif not _is_token(pseudo[b":method"]) or not _is_scheme(pseudo[b":scheme"]) or not _is_target(pseudo):
        raise malformed("a method, scheme or path that is none")
    if not _is_authority(pseudo.get(b":authority", b"")):
        raise malformed("an authority that is none")
    return _content_length(fields)


def _is_target(pseudo: dict[bytes, bytes]) -> bool:
    """Return whether the path is absolute, or the asterisk of OPTIONS."""
    path = pseudo[b":path"]
    return _is_path(path) is not None or (path == b"*" and pseudo[b":method"] == b"OPTIONS")


def check_response(fields: Headers) -> tuple[int, int | None]:
    """Check the fields of a response (section 8.3.2).

    Arguments:
        fields: whose octets are sound.

    Returns:
        The status, and what content-length says of a body; None: it says nothing.

    Raises:
        StreamFailedError: they are not those of a response.
    """
    pseudo = _pseudo(fields)
    status = pseudo.get(b":status", b"")
    if len(pseudo) != 1 or len(status) != 3 or not status.isdigit() or status[:1] == b"0" or status == b"101":
        raise malformed("a response needs a :status of three digits, and nothing else that begins with a colon")
    length = _content_length(fields)
    return int(status), None if status in _WITHOUT_BODY else length


def check_trailers(fields: Headers) -> None:
    """Check the fields at the end of a message: no pseudo-header fields (section 8.1).

    Arguments:
        fields: whose octets are sound.

    Raises:
        StreamFailedError: they are not trailers.
    """
    if _pseudo(fields):
        raise malformed("a pseudo-header field among trailers")


def _pseudo(fields: Headers) -> dict[bytes, bytes]:
    """Return the fields whose names begin with a colon; all others are checked."""
    found: dict[bytes, bytes] = {}
    is_past = False
    for name, value in fields:
        if name[:1] == b":":
            if is_past or name in found:
                raise malformed("a pseudo-header field twice, or after other fields")
            found[name] = value
            continue
        is_past = True
        if name in _OF_CONNECTION or (name == b"te" and value.lower() != b"trailers"):
            raise malformed(f"{name.decode('ascii')} belongs to connections of HTTP/1.1")
    return found


def _content_length(fields: Headers) -> int | None:
    """Section 8.1.1: the sum of the DATA frames must be what the message says, if it says so."""
    found = {value for name, value in fields if name == b"content-length"}
    if not found:
        return None
    value = found.pop()
    if found or not value.isdigit() or len(value) > 18:
        raise malformed("content-length is one number")
    return int(value)
