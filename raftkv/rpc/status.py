"""gRPC status: codes, the error that carries one, and how a status crosses HTTP/2.

Owns the translation between a status and its header form (``grpc-status``, ``grpc-message``,
``grpc-status-details-bin``) and the tables that turn an HTTP/2 reset or an HTTP status into a gRPC code.
Sources: gRPC's PROTOCOL-HTTP2.md ("Responses", "Errors") and http-grpc-status-mapping.md.
"""

from __future__ import annotations

import base64
import binascii
import enum
import re
from collections.abc import Iterable, Sequence
from urllib.parse import unquote_to_bytes

CLOSED_TEXT = "grpc: the client connection is closing"
"""Message of calls that end because their channel was closed here, as in Go."""
Headers = tuple[tuple[bytes, bytes], ...]
"""Header fields in transmission order, names in lower case."""


class Code(enum.IntEnum):
    """The seventeen gRPC status codes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class RpcError(Exception):
    """A call that ended with a status other than OK.

    Raised by client calls, and raised by server handlers to choose the status of their answer.

    Attributes:
        code: gRPC status code (``Code``, or a plain integer if the peer invented one).
        text: human-readable message.
        details: serialized ``google.rpc.Status``, or empty.
        trailers: trailing metadata received, or to be sent, with the status.
        definite: True only if the request certainly never reached a handler, so a retry cannot do it twice.
    """

    def __init__(
        self, code: int, text: str = "", *, details: bytes = b"", trailers: Headers = (), definite: bool = False
    ) -> None:
        super().__init__(code, text)
        self.code = as_code(code)
        self.text = text
        self.details = details
        self.trailers = trailers
        self.definite = definite

    def __str__(self) -> str:
        name = self.code.name if isinstance(self.code, Code) else str(self.code)
        return f"{name}: {self.text}"


def as_code(number: int) -> int:
    """Return ``Code(number)``, or the number itself when gRPC has no such code."""
    try:
        return Code(number)
    except ValueError:
        return number


_UNSAFE = re.compile(rb"[^\x20-\x24\x26-\x7e]")


def encode_message(text: str) -> bytes:
    """Percent-encode a status message: printable ASCII but ``%`` stays, all other UTF-8 bytes become ``%XX``."""
    return _UNSAFE.sub(lambda match: b"%%%02X" % match[0][0], text.encode("utf-8", "replace"))


def decode_message(value: bytes) -> str:
    """Undo ``encode_message``. Never raises: broken escapes and broken UTF-8 stay readable."""
    return unquote_to_bytes(value).decode("utf-8", "replace")


def encode_binary(value: bytes) -> bytes:
    """Return the header form of a ``-bin`` value: base64 without padding."""
    return base64.b64encode(value).rstrip(b"=")


def decode_binary(value: bytes) -> bytes:
    """Return the bytes of a ``-bin`` header value, with or without padding; ValueError if it is not base64."""
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {value[:64]!r}") from error


def status_headers(code: int, text: str, details: bytes = b"", trailers: Sequence[tuple[bytes, bytes]] = ()) -> Headers:
    """Return the trailer fields of a status, in gRPC's order: status, message, details, then user metadata.

    Arguments:
        code, text: code and message of the status.
        details: serialized ``google.rpc.Status``.
        trailers: user metadata in header form.
    """
    fields: list[tuple[bytes, bytes]] = [(b"grpc-status", b"%d" % code)]
    if text:
        fields.append((b"grpc-message", encode_message(text)))
    if details:
        fields.append((b"grpc-status-details-bin", encode_binary(details)))
    return (*fields, *trailers)


def status_of(fields: dict[bytes, bytes], headers: Iterable[tuple[bytes, bytes]]) -> RpcError | None:
    """Read a status from trailers: None for OK, otherwise the error. A missing or malformed status is UNKNOWN.

    Arguments:
        fields: trailers by name.
        headers: the same trailers in order.
    """
    raw = fields.get(b"grpc-status")
    if raw == b"0":
        return None
    text = decode_message(fields.get(b"grpc-message", b""))
    trailers = tuple((name, value) for name, value in headers if name not in _STATUS_FIELDS)
    if raw is None:
        return RpcError(Code.UNKNOWN, "the server sent trailers without grpc-status", trailers=trailers)
    if not raw.isdigit() or len(raw) > 9:
        return RpcError(Code.UNKNOWN, f"the server sent a malformed grpc-status {raw[:32]!r}", trailers=trailers)
    return RpcError(int(raw), text, details=_details_of(fields), trailers=trailers)


_STATUS_FIELDS = frozenset((b"grpc-status", b"grpc-message", b"grpc-status-details-bin", b":status", b"content-type"))


def _details_of(fields: dict[bytes, bytes]) -> bytes:
    try:
        return decode_binary(fields.get(b"grpc-status-details-bin", b""))
    except ValueError:
        return b""


CODE_OF_RESET = {
    0x00: Code.INTERNAL,  # NO_ERROR
    0x01: Code.INTERNAL,  # PROTOCOL_ERROR
    0x02: Code.INTERNAL,  # INTERNAL_ERROR
    0x03: Code.INTERNAL,  # FLOW_CONTROL_ERROR
    0x04: Code.INTERNAL,  # SETTINGS_TIMEOUT
    0x05: Code.UNKNOWN,  # STREAM_CLOSED: no mapping in the protocol
    0x06: Code.INTERNAL,  # FRAME_SIZE_ERROR
    0x07: Code.UNAVAILABLE,  # REFUSED_STREAM: never processed
    0x08: Code.CANCELLED,  # CANCEL
    0x09: Code.INTERNAL,  # COMPRESSION_ERROR
    0x0A: Code.INTERNAL,  # CONNECT_ERROR
    0x0B: Code.RESOURCE_EXHAUSTED,  # ENHANCE_YOUR_CALM
    0x0C: Code.PERMISSION_DENIED,  # INADEQUATE_SECURITY
    0x0D: Code.UNKNOWN,  # HTTP_1_1_REQUIRED: no mapping in the protocol
}
"""gRPC code for a RST_STREAM without a status (PROTOCOL-HTTP2.md, "Errors")."""

CODE_OF_HTTP_STATUS = {
    400: Code.INTERNAL,
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.UNIMPLEMENTED,
    429: Code.UNAVAILABLE,
    502: Code.UNAVAILABLE,
    503: Code.UNAVAILABLE,
    504: Code.UNAVAILABLE,
}
"""gRPC code for an HTTP status without ``grpc-status``; all other HTTP statuses are UNKNOWN."""
