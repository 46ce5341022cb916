"""Who may use plain HTTP: the Host header against DNS rebinding, and the CORS headers for browsers.

A page that a browser loaded from elsewhere can point its own name at this machine and then read what answers here
(CVE-2018-5702). So the name that a plain-text request asks for can be limited; encrypted ones prove the name already.
Texts and headers are etcd's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from raftkv.rpc.server.http import HttpHandler, HttpHeaders, HttpRequest, HttpResponse

_MISDIRECTED: Final = """
etcd received your request, but the Host header was unrecognized.

To fix this, choose one of the following options:
- Enable TLS, then any HTTPS request will be allowed.
- Add the hostname you want to use to the whitelist in settings.
  - e.g. etcd --host-whitelist {host}

This requirement has been added to help prevent "DNS Rebinding" attacks (CVE-2018-5702).

"""


class HttpAccess:
    """A handler that guards another.

    Arguments:
        handler: answers what is let through.
        host_whitelist: names that plain-text requests may ask for; ``*`` or nothing: all.
        cors: origins that browsers may call from; ``*`` or nothing: all.
    """

    def __init__(self, handler: HttpHandler, host_whitelist: Iterable[str], cors: Iterable[str]) -> None:
        self._handler = handler
        self._hosts = frozenset(host_whitelist)
        self._origins = frozenset(cors)

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Refuse, or pass on and add the headers by which browsers decide who may read the answer."""
        host = host_name(request.header("host"))
        if not request.tls and not _allows(self._hosts, host):
            body = _MISDIRECTED.format(host=json.dumps(host, ensure_ascii=False)).encode()
            return HttpResponse(421, body)
        headers = self._cors_headers(request.header("origin"))
        if request.method == "OPTIONS":
            return HttpResponse(200, b"", headers)
        response = await self._handler(request)
        return replace(response, headers=response.headers + headers)

    def _cors_headers(self, origin: str) -> HttpHeaders:
        allowed = "*" if _allows(self._origins, "*") else origin
        if not _allows(self._origins, allowed):
            return ()
        return (
            ("access-control-allow-methods", "POST, GET, OPTIONS, PUT, DELETE"),
            ("access-control-allow-origin", allowed),
            ("access-control-allow-headers", "accept, content-type, authorization"),
        )


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets.

    >>> host_name("[::1]:2379"), host_name("a.example")
    ('::1', 'a.example')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _allows(allowed: frozenset[str], name: str) -> bool:
    return not allowed or "*" in allowed or name in allowed
