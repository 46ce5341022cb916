"""Routing and the refusals' exact texts."""

from __future__ import annotations

import pytest

from raftkv.rpc.server.http import Origins
from raftkv.rpc.server.router import Route, Router, refuse
from raftkv.rpc.status import Code

ROUTE = Route("/pkg.Service/Method", print, print)
GOOD = {b":method": b"POST", b":path": b"/pkg.Service/Method", b"content-type": b"application/grpc"}


def router() -> Router:
    made = Router()
    made.add(ROUTE)
    return made


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (b"/pkg.Service/Other", "unknown method Other for service pkg.Service"),
        (b"/pkg.Other/Method", "unknown service pkg.Other"),
        (b"/a/b/c", "unknown service a/b"),
        (b"/nothing", 'malformed method name: "/nothing"'),
        (b"no/slash", 'malformed method name: "no/slash"'),
        (b"", 'malformed method name: ""'),
    ],
)
def test_unknown_paths(path: bytes, text: str) -> None:
    error = router().unknown(path)
    assert (error.code, error.text) == (Code.UNIMPLEMENTED, text)


@pytest.mark.parametrize(
    ("changed", "http_status", "code", "text"),
    [
        ({b"content-type": b"text/html"}, 415, 3, 'invalid gRPC request content-type "text/html"'),
        ({b"content-type": b"application/grpc-web+proto"}, 415, 3, None),
        ({b":method": b"PUT"}, 405, 13, 'Received a HEADERS frame with :method "PUT" which should be POST'),
        (
            {b"origin": b"http://evil.example"},
            403,
            7,
            'web pages may not call this server: origin "http://evil.example" is not allowed',
        ),
        ({b"grpc-encoding": b"snappy"}, 200, 12, 'grpc: Decompressor is not installed for grpc-encoding "snappy"'),
    ],
)
def test_refusals(changed: dict[bytes, bytes], http_status: int, code: int, text: str | None) -> None:
    refusal = refuse({**GOOD, **changed}, ROUTE, router())
    assert refusal is not None
    assert (refusal.http_status, refusal.error.code) == (http_status, code)
    assert text is None or refusal.error.text == text


@pytest.mark.parametrize(
    ("allowed", "origin", "passes"),
    [
        ((), "http://a.example", False),
        ((), "null", False),
        (("*",), "null", True),
        (("http://a.example:80",), "http://a.example", True),
        (("http://a.example:80",), "http://a.example:80", True),
        (("http://A.example",), "http://a.example:80", True),
        (("https://a.example:443",), "https://a.example", True),
        (("http://a.example:80",), "https://a.example", False),
        (("http://a.example:8080",), "http://a.example", False),
        (("http://a.example:80",), "http://a.example.evil.example", False),
        (("http://a.example:80",), "http://a.example:80:80", False),
    ],
)
def test_origins(allowed: tuple[str, ...], origin: str, passes: bool) -> None:
    """Browsers leave out the port of a scheme, which flags name."""
    assert Origins(allowed).allows(origin) is passes
    fields = {**GOOD, b"origin": origin.encode()}
    made = router()
    made.origins = Origins(allowed)
    assert (refuse(fields, ROUTE, made) is None) is passes


@pytest.mark.parametrize("more", [b"", b"+proto", b"+json", b";charset=utf-8", b"+proto; charset=utf-8"])
def test_good_requests_are_not_refused(more: bytes) -> None:
    """Take what etcd 3.5.1 takes: only the beginning of the content type counts, and messages are protobuf's."""
    assert refuse({**GOOD, b"content-type": b"application/grpc" + more}, ROUTE, router()) is None


@pytest.mark.parametrize("path", ["pkg.Service/Method", "/Method", "/pkg.Service/", "//"])
def test_paths_that_cannot_be_registered(path: str) -> None:
    with pytest.raises(ValueError, match="not a gRPC path"):
        Router().add(Route(path, print, print))


def test_a_path_is_registered_once() -> None:
    with pytest.raises(ValueError, match="registered already"):
        router().add(ROUTE)
