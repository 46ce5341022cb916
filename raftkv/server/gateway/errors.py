"""How calls that failed are answered: HTTP status and body, as grpc-gateway 1.16 gives them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from raftkv.rpc.status import Code
from raftkv.server.gateway.encoder import encode_string

HTTP_STATUS: Final[dict[int, int]] = {
    Code.OK: 200,
    Code.CANCELLED: 408,
    Code.UNKNOWN: 500,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.OUT_OF_RANGE: 400,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.DATA_LOSS: 500,
    Code.UNAUTHENTICATED: 401,
}


def http_status(code: int) -> int:
    """Return the HTTP status of a gRPC code.

    Arguments:
        code: of gRPC.
    """
    return HTTP_STATUS.get(code, 500)


def error_body(code: int, text: str) -> bytes:
    """Return the body of an answer that failed.

    >>> error_body(3, "etcdserver: key is not provided").decode()
    '{"error":"etcdserver: key is not provided","code":3,"message":"etcdserver: key is not provided"}'
    """
    shown = encode_string(text)
    return f'{{"error":{shown},"code":{int(code)},"message":{shown}}}'.encode()


def stream_error(code: int, text: str) -> bytes:
    """Return the last line of a stream that failed.

    Arguments:
        code, text: of the status.
    """
    status = http_status(code)
    phrase = encode_string(HTTPStatus(status).phrase)
    return (
        f'{{"error":{{"grpc_code":{int(code)},"http_code":{status},'
        f'"message":{encode_string(text)},"http_status":{phrase}}}}}'
    ).encode()
