"""Admission of plain HTTP requests, and CORS headers."""

from __future__ import annotations

import asyncio

import pytest

from raftkv.rpc.server.http import HostCheck, HttpHeaders, HttpRequest, HttpResponse, Origins, host_name
from raftkv.server.http.access import HttpAccess

REBINDABLE = (
    *("evil.local", "wifi", "x.internal", "x.home.arpa", "x.localhost", "evil.svc", "evil..", ".", "evil.1", "1.2.3"),
    *("evil.example.", "1.2.3.4.5", "[evil]", "[::1%25e].evil", "١٢٧.0.0.1"),
)
"""Names that a stranger on the local network can point here (mDNS, DHCP), and texts that only look like addresses."""


async def _serve(_request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, b"served")


def _access(hosts: tuple[str, ...] = ("*",), cors: tuple[str, ...] = ("*",), own: tuple[str, ...] = ()) -> HttpAccess:
    return HttpAccess(_serve, HostCheck(hosts, own), Origins(cors))


def _ask(
    access: HttpAccess,
    headers: HttpHeaders,
    method: str = "GET",
    *,
    tls: bool = False,
    loopback: bool = False,
    path: str = "/health",
) -> tuple[int, bytes, dict[str, str]]:
    response = asyncio.run(access.handle(HttpRequest(method, path, headers, tls=tls, loopback=loopback)))
    assert isinstance(response.body, bytes)
    return response.status, response.body, dict(response.headers)


@pytest.mark.parametrize(
    ("header", "name"),
    [("a.example:1", "a.example"), ("a.example", "a.example"), ("[::1]:2", "::1"), ("[::1]", "::1"), ("", "")],
)
def test_the_name_in_a_host_header(header: str, name: str) -> None:
    assert host_name(header) == name


@pytest.mark.parametrize("hosts", [("*",), ("evil.example",), ("EVIL.example",), ("a", "*")])
@pytest.mark.parametrize("loopback", [False, True])
def test_hosts_that_are_named_pass(hosts: tuple[str, ...], loopback: bool) -> None:
    assert _ask(_access(hosts), (("host", "evil.example:80"),), loopback=loopback)[:2] == (200, b"served")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:2379", 200),
        ("LOCALHOST", 200),
        ("localhost.", 200),
        ("node.localhost", 421),
        ("127.0.0.1:2379", 200),
        ("10.1.2.3", 200),
        ("[::1]:2379", 200),
        ("[fe80::1%25eth0]:2379", 200),
        ("raftkv-0:2379", 421),
        ("raftkv-0.raftkv.default.svc.cluster.local:2379", 421),
        ("raftkv.default.svc:2379", 421),
        ("db1.corp.internal", 421),
        ("db1.corp.example", 200),
        ("", 200),
        ("evil.example:2379", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421),
        ("db1.corp.example.evil", 421),
        ("local", 421),
        *((name, 421) for name in REBINDABLE),
        ("evillocal.example", 421),
    ],
)
def test_names_that_cannot_be_rebound_pass_where_nothing_is_named(host: str, status: int) -> None:
    """A page's own name, made to point at this machine, arrives at its loopback address."""
    access = _access((), own=("db1.corp.example",))
    assert _ask(access, (("host", host),), loopback=True)[0] == status
    assert _ask(access, (("host", host),), loopback=True, tls=True)[0] == 200
    # Who reaches a port of the network needs no browser for it; etcd's default holds there.
    assert _ask(access, (("host", host),))[0] == 200


@pytest.mark.parametrize("method", ["GET", "OPTIONS", "POST"])
def test_another_host_is_refused(method: str) -> None:
    access = _access(("good.example",))
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
        (("http://a:80",), "http://a", "http://a"),
        ((), "http://a:1", None),
        ((), "", None),
    ],
)
def test_cors_headers(cors: tuple[str, ...], origin: str, allow_origin: str | None) -> None:
    access = _access(cors=cors)
    status, body, headers = _ask(access, (("origin", origin),) if origin else ())
    assert (status, body, headers.get("access-control-allow-origin")) == (200, b"served", allow_origin)
    assert _ask(access, (("origin", origin),), "OPTIONS")[:2] == (200, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize(
    ("cors", "origin", "status"),
    [
        ((), "http://a:1", 403),
        ((), "null", 403),
        (("http://b:1",), "http://a:1", 403),
        (("http://a:1",), "http://a:1", 200),
        (("*",), "null", 200),
        ((), "", 200),
    ],
)
def test_pages_of_other_origins_change_nothing(method: str, cors: tuple[str, ...], origin: str, status: int) -> None:
    access = _access(cors=cors)
    assert _ask(access, (("origin", origin),) if origin else (), method)[0] == status


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/JSON; charset=utf-8", 200),
        ("", 415),
        ("text/plain", 415),
        ("text/plain; application/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/jsonx", 415),
    ],
)
def test_json_is_taken_only_under_its_name(content_type: str, status: int) -> None:
    """Forms of pages can be sent anywhere, without asking; their content types are these (CVE-2018-1098)."""
    headers = (("content-type", content_type),) if content_type else ()
    of_page = (*headers, ("origin", "http://page.example"))
    access = _access(cors=("http://page.example",))
    assert _ask(access, of_page, "POST", path="/v3/kv/put")[0] == status
    assert _ask(access, (*headers, ("sec-fetch-site", "same-site")), "POST", path="/v3/kv/put")[0] == status
    assert _ask(access, of_page, "POST", path="/health")[0] == 200
    assert _ask(access, headers, "POST", path="/v3/kv/put")[0] == 200, "curl says that its JSON is a form"


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:2379", "http://127.0.0.1:2379", 200),
        ("localhost:2379", "http://LOCALHOST:2379", 200),
        ("db1.corp.example", "https://db1.corp.example", 200),  # a proxy before it ends TLS
        ("named.example:2379", "http://named.example:2379", 200),
        ("127.0.0.1:2379", "http://127.0.0.1:8000", 403),
        ("127.0.0.1:2379", "http://localhost:2379", 403),
        ("127.0.0.1:2379", "null", 403),
        ("evil.example:2379", "http://evil.example:2379", 403),
        ("", "http://", 403),
    ],
)
def test_the_members_own_pages_may_change_things(host: str, origin: str, status: int) -> None:
    """A page whose name was made to point here has that name's origin too: only names that prove something count."""
    hosts = HostCheck(("named.example", "*"), own=("db1.corp.example",))
    access = HttpAccess(_serve, hosts, Origins())
    headers = (("host", host), ("origin", origin), ("content-type", "application/json"))
    assert _ask(access, headers, "POST", path="/v3/kv/put")[0] == status


@pytest.mark.parametrize("loopback", [False, True])
@pytest.mark.parametrize("host", REBINDABLE)
def test_a_page_under_a_name_of_the_local_network_changes_nothing(host: str, loopback: bool) -> None:
    access = HttpAccess(_serve, HostCheck((), own=("db1.corp.example",)), Origins())
    headers = (("host", host), ("origin", f"http://{host}"), ("content-type", "application/json"))
    assert _ask(access, headers, "POST", path="/v3/kv/put", loopback=loopback)[0] in (403, 421)


def test_under_tls_the_own_origin_is_proved() -> None:
    access = HttpAccess(_serve, HostCheck(("*",)), Origins())
    for origin, status in (("https://db.example:2379", 200), ("https://evil.example", 403)):
        headers = (("host", "db.example:2379"), ("origin", origin))
        assert _ask(access, headers, "PUT", tls=True)[0] == status
