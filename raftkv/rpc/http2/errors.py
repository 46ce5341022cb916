"""Errors that end a stream or a connection (RFC 9113 section 5.4), and its codes (section 7)."""

from __future__ import annotations

from enum import IntEnum


class ErrorCode(IntEnum):
    """Why a stream or a connection ends, as RST_STREAM and GOAWAY carry it."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class H2Error(Exception):
    """Base of all that this package raises."""


class StreamGoneError(H2Error):
    """Something is to be sent on a stream that is closed, or whose own end has ended."""


class ConnectionGoneError(H2Error):
    """Something is to be sent on a connection that has ended."""


class ConnectionFailedError(H2Error):
    """The peer has broken a rule that ends the connection.

    Attributes:
        code: for the GOAWAY.
    """

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamFailedError(H2Error):
    """The peer has broken a rule that ends one stream.

    Attributes:
        code: for the RST_STREAM.
    """

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
