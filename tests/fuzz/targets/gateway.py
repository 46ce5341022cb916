"""Bodies of the JSON gateway: Python's parser and the reader with Go's rules must agree wherever both read one."""

from __future__ import annotations

import json
from typing import Any, Final

from raftkv.pb import rpc_pb2
from raftkv.server.gateway import decoder, syntax
from raftkv.server.gateway.encoder import encode
from raftkv.server.gateway.json_to_message import read_message
from raftkv.server.gateway.syntax import JsonError
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
        b'"',
        b"\\u",
        b"\\ud800",
        b"null",
        b"true",
        b"1e999",
        b"-0",
        b"-",
        b"00",
        b"[[[[",
        b"}}",
        b'"":',
        b"\xff",
        b"\xef\xbb\xbf",
    ),
    *(b'"range_end"', b'"rangeEnd"', b"NaN", b"=", b"9" * 30, b'"9223372036854775808"'),
)


def _by_gos_rules(body: bytes, message_type: Any) -> Any:
    start = syntax.skip_space(body, 0)
    if start >= len(body):
        return None
    steps = syntax.scan(body, start)
    try:
        while True:
            next(steps)
    except StopIteration as done:
        whole = done.value
    message = message_type()
    for _ in read_message(body, whole, start, message):
        pass
    return message


def _parse(data: bytes) -> None:
    message_type = _TYPES[data[0] % len(_TYPES)] if data else _TYPES[0]
    body = data[1:]
    usual = decoder.read_usual(body, message_type)
    if usual is not None:
        try:
            exact = _by_gos_rules(body, message_type)
        except JsonError as error:
            raise AssertionError(f"read although {error}") from error
        assert usual == exact
    else:
        exact = _by_gos_rules(body, message_type)
    if exact is not None:
        text = encode(exact)
        json.loads(text)
        assert decoder.read_usual(text.encode(), message_type) in (exact, None)
        assert _by_gos_rules(text.encode(), message_type) == exact


TARGETS = (Target("gateway-json", lambda directory: _parse, lambda: _SAMPLES, (JsonError,), tokens=_TOKENS),)
