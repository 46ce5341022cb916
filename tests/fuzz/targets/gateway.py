"""Bodies of the JSON gateway: one that can be read becomes the same message again once it was written."""

from __future__ import annotations

import json
from typing import Any, Final

from raftkv.pb import rpc_pb2
from raftkv.server.gateway.decoder import JsonError, Reader
from raftkv.server.gateway.encoder import encode
from tests.fuzz.target import Target

_TYPES: Final[tuple[Any, ...]] = (
    rpc_pb2.RangeRequest,
    rpc_pb2.TxnRequest,
    rpc_pb2.WatchRequest,
    rpc_pb2.AuthUserAddRequest,
)
_PUT: Final = b'{"request_put":{"key":"Zm9v","value":"YmE=","lease":"-1","ignoreLease":true}}'
_SAMPLES: Final = [
    b'\0{"key":"Zm9v","range_end":"AA==","limit":"7","sort_order":"DESCEND","sortTarget":2,"keysOnly":false}',
    b'\1{"compare":[{"target":"VERSION","key":"YQ==","version":"0"}],"success":[' + _PUT + b'],"x":[1,{"y":null}]}',
    b'\2{"create_request":{"key":"Zm9v","filters":["NOPUT",1],"watchId":"9223372036854775807"}} {}',
    b'\3{"name":"a\\u00e4\\ud83d\\ude00\\n","options":{"no_password":true}}',
]
_TOKENS: Final = (
    *(
        b'"', b"\\u", b"\\ud800", b"null", b"true", b"1e999", b"-0", b"-", b"00", b"[[[[", b"}}", b'"":', b"\xff",
        b"\xef\xbb\xbf",
    ),
    *(b'"range_end"', b'"rangeEnd"', b"NaN", b"=", b"9" * 30, b'"9223372036854775808"'),
)  # fmt: skip


def _read(body: bytes, message_type: Any) -> Any:
    steps = Reader(body).next(message_type)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value


def _parse(data: bytes) -> None:
    message_type = _TYPES[data[0] % len(_TYPES)] if data else _TYPES[0]
    message = _read(data[1:], message_type)
    if message is not None:
        text = encode(message)
        json.loads(text)
        assert _read(text.encode(), message_type) == message


TARGETS = (Target("gateway-json", lambda directory: _parse, lambda: _SAMPLES, (JsonError,), tokens=_TOKENS),)
