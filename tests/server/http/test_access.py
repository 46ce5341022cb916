"""Which plain HTTP requests are let through, and which CORS headers browsers get."""

from __future__ import annotations

import asyncio

import pytest

from raftkv.rpc.server.http import HttpHeaders, HttpRequest, HttpResponse
from raftkv.server.http.access import HttpAccess, host_name


async def _serve(_request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, b"served")


def _ask(
    access: HttpAccess, headers: HttpHeaders, method: str = "GET", tls: bool = False
) -> tuple[int, bytes, dict[str, str]]:
    response = asyncio.run(access.handle(HttpRequest(method, "/health", headers, tls=tls)))
    assert isinstance(response.body, bytes)
    return response.status, response.body, dict(response.headers)


@pytest.mark.parametrize(
    ("header", "name"),
    [("a.example:1", "a.example"), ("a.example", "a.example"), ("[::1]:2", "::1"), ("[::1]", "::1"), ("", "")],
)
def test_the_name_in_a_host_header(header: str, name: str) -> None:
    assert host_name(header) == name


@pytest.mark.parametrize("hosts", [(), ("*",), ("evil.example",), ("a", "*")])
def test_hosts_that_pass(hosts: tuple[str, ...]) -> None:
    access = HttpAccess(_serve, hosts, ("*",))
    assert _ask(access, (("host", "evil.example:80"),))[:2] == (200, b"served")


@pytest.mark.parametrize("method", ["GET", "OPTIONS", "POST"])
def test_another_host_is_refused(method: str) -> None:
    access = HttpAccess(_serve, ("good.example",), ("*",))
    status, body, headers = _ask(access, (("host", 'evil"ex'),), method)
    assert status == 421
    assert "access-control-allow-origin" not in headers
    assert body == (
        b"\netcd received your request, but the Host header was unrecognized.\n\n"
        b"To fix this, choose one of the following options:\n"
        b"- Enable TLS, then any HTTPS request will be allowed.\n"
        b"- Add the hostname you want to use to the whitelist in settings.\n"
        b'  - e.g. etcd --host-whitelist "evil\\"ex"\n\n'
        b'This requirement has been added to help prevent "DNS Rebinding" attacks (CVE-2018-5702).\n\n'
    )
    assert _ask(access, (), method)[0] == 421
    assert _ask(access, (("host", "evil.example"),), method, tls=True)[0] == 200


@pytest.mark.parametrize(
    ("cors", "origin", "allow_origin"),
    [
        (("*",), "", "*"),
        (("*",), "http://b:1", "*"),
        (("http://a:1",), "http://a:1", "http://a:1"),
        (("http://a:1",), "http://b:1", None),
        (("http://a:1",), "", None),
    ],
)
def test_which_cors_header_browsers_get(cors: tuple[str, ...], origin: str, allow_origin: str | None) -> None:
    access = HttpAccess(_serve, ("*",), cors)
    status, body, headers = _ask(access, (("origin", origin),) if origin else ())
    assert (status, body, headers.get("access-control-allow-origin")) == (200, b"served", allow_origin)
    assert _ask(access, (("origin", origin),), "OPTIONS")[:2] == (200, b"")
