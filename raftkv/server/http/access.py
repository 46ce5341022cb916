"""Access to plain HTTP: the Host header against DNS rebinding, and what web pages in browsers may do.

A web page from elsewhere can point its own host name at this machine, and then read the answers of this port
(CVE-2018-5702). So the host name of a plain-text request is checked: the names of the flag pass. Without the flag, at
loopback addresses only the member's own names, localhost and IP addresses pass, since an attacker on the local network
may point every other name here, even private ones. Encrypted requests prove the name.

A web page can also send requests whose answers it may not read (CVE-2018-1098). Browsers name the
origin of a page, which must be allowed for everything that changes something. JSON from browsers is accepted only with
its own content type, for which browsers send a preflight request. A member's own pages (the dashboard) may do
everything: their origin is the host name of the request, which must be one that no stranger can point here. Texts and
headers are etcd's. The defaults are not: etcd allows every name and every origin.
"""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import replace
from typing import Final

from raftkv import cluster_id
from raftkv.config import ServerConfig
from raftkv.rpc.server.http import (
    HostCheck,
    HttpHandler,
    HttpHeaders,
    HttpRequest,
    HttpResponse,
    Origins,
    host_name,
    text_response,
)
from raftkv.server.tls.identity import names_in

_MISDIRECTED: Final = """
etcd received your request, but the Host header was unrecognized.

To fix this, choose one of the following options:
- Enable TLS, then any HTTPS request will be allowed.
- Add the hostname you want to use to the whitelist in settings.
  - e.g. etcd --host-whitelist {host}

This requirement has been added to help prevent "DNS Rebinding" attacks (CVE-2018-5702).

"""


_HARMLESS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing."""

_JSON_PATHS: Final = "/v3"
"""Below this path, and below older ones such as /v3beta, requests carry JSON."""

_OF_BROWSERS: Final = ("origin", "sec-fetch-site", "sec-fetch-mode")
"""Headers that browsers send with requests of a page."""


def own_names(config: ServerConfig) -> set[str]:
    """Return the names of a member: its machine's, those in its URLs, and those in its client port's certificate.

    Arguments:
        config: settings of the member.
    """
    urls = (
        *config.listen_client_urls,
        *config.listen_client_http_urls,
        *config.advertise_client_urls,
        *config.listen_metrics_urls,
        *config.initial_advertise_peer_urls,
    )
    return {socket.gethostname(), *(cluster_id.split_url(url)[1] for url in urls), *_certified(config)}


def _certified(config: ServerConfig) -> list[str]:
    path = config.client_tls.cert_file
    with contextlib.suppress(OSError, ValueError):
        return [name for name in names_in(path).dns if not name.startswith("*")] if path else []
    return []


class HttpAccess:
    """A handler that guards another handler.

    Arguments:
        handler: answers admitted requests.
        hosts: host names allowed in plain-text requests.
        origins: origins whose pages may call.
    """

    def __init__(self, handler: HttpHandler, hosts: HostCheck, origins: Origins) -> None:
        self._handler = handler
        self._hosts = hosts
        self._origins = origins

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Refuse a request, or pass it on and add the headers that tell browsers which pages may read the answer."""
        host = host_name(request.header("host"))
        if not self._hosts.allows(request, host):
            body = _MISDIRECTED.format(host=json.dumps(host, ensure_ascii=False)).encode()
            return HttpResponse(421, body)
        origin = request.header("origin")
        headers = self._cors_headers(origin)
        if request.method == "OPTIONS":
            return HttpResponse(200, b"", headers)
        if request.method not in _HARMLESS and origin and not self._may_change(request, origin, host):
            return text_response(403, "pages of this origin may change nothing here; see --cors and --host-whitelist")
        if request.method == "POST" and request.path.startswith(_JSON_PATHS) and _is_form_of_page(request):
            return text_response(415, "the content type must be application/json")
        response = await self._handler(request)
        return replace(response, headers=response.headers + headers) if headers else response

    def _may_change(self, request: HttpRequest, origin: str, host: str) -> bool:
        """Return whether pages of an origin may change something: it must be allowed, or the member's own."""
        if self._origins.allows(origin):
            return True
        # Behind a proxy that terminates TLS, the scheme of the origin is not that of the request.
        own = Origins(f"{scheme}://{request.header('host')}" for scheme in ("http", "https"))
        return host != "" and own.allows(origin) and self._hosts.proves(request, host)

    def _cors_headers(self, origin: str) -> HttpHeaders:
        allowed = "*" if self._origins.all else origin
        if not allowed or not self._origins.allows(allowed):
            return ()
        return (
            ("access-control-allow-methods", "POST, GET, OPTIONS, PUT, DELETE"),
            ("access-control-allow-origin", allowed),
            ("access-control-allow-headers", "accept, content-type, authorization"),
        )


def _is_form_of_page(request: HttpRequest) -> bool:
    """Return whether a browser sends this for a page without a preflight: other programs send no browser headers."""
    content_type = request.header("content-type").partition(";")[0].strip().lower()
    return content_type != "application/json" and any(request.header(name) for name in _OF_BROWSERS)
