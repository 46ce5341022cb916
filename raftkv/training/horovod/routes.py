"""Horovod's requests on the client port: ``GET``, ``PUT``, ``DELETE /<scope>/<key>``.

For workers with ``HOROVOD_GLOO_RENDEZVOUS_ADDR`` and ``_PORT`` in their environment; served if ``--horovod-run`` names
a run:

    PUT /global/rank_0                       -> 200
    GET /global/1                            -> 200 and the value, which may be empty; 404: absent, ask again
    DELETE /global/0                         -> 200: rank 0 has finished with the scope
    GET /rank_and_size/host-a:0              -> rank,size,local_rank,local_size,cross_rank,cross_size, once the run's
                                                generation has begun; all -1: the run has no such slot

Horovod takes 200 and 404 for answers and tries again, a few times, after anything else; its HTTP client knows header
names in their usual spelling only (``rpc/server/http1``). It names no job, so one run is served at a time. Browsers are
refused: a page must not write through the port of a member.

Where users are asked for, a request is its caller's: whose token is in ``Authorization``, or whose name is in the
certificate, and who may read and write all keys of the run's scopes. 401: nobody's; 403: may not. Horovod's own client
sends neither, so a proxy beside the workers has to add the header.

Left out: the state (``horovod.scopes``), and who may use plain HTTP at all (``http.access``). A worker that asks for
its rank while the loss of another is not known yet gets its place in the old generation; it cannot meet all others
there and asks again after Horovod's own timeout. Workers that are started anew for each generation (``raftkvctl run
exec``) never ask.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from raftkv import errors
from raftkv.client.control.records import RecordError
from raftkv.rpc.server.http import HttpHandler, HttpRequest, HttpResponse, text_response
from raftkv.training.horovod.scopes import LocalStore, Scopes

_log = logging.getLogger(__name__)

NAME_BYTES_MAX: Final = 512
"""Length of the name of a scope, and of a key: a host name and a rank."""

VALUE_BYTES_MAX: Final = 1024 * 1024
"""Size of what a worker puts: its addresses for all others, about 150 bytes each."""

RESERVED: Final = frozenset(
    {"debug", "health", "livez", "metrics", "readyz", "ui", "v2", "v3", "v3alpha", "v3beta", "version"}
)
"""First parts of paths that are not Horovod's."""

RANK_AND_SIZE: Final = "rank_and_size"

_PATH: Final = re.compile(r"/([!-.0-~]+)/([!-.0-~]+)")
_SLOT: Final = re.compile(r"(.+):(\d{1,9})")
_IDENTITY: Final = frozenset((b"token", b"authorization", b"grpcgateway-accept"))
_OCTETS: Final = (("content-type", "application/octet-stream"),)


@dataclass(slots=True)
class HttpCall:
    """On whose behalf: who calls is in the headers (``Authorization``), else in the certificate, as for gRPC.

    Attributes:
        headers: of the request, those that say who calls.
        peer: has the certificate.
        caller: as the member found out.
    """

    headers: tuple[tuple[bytes, bytes], ...]
    peer: HttpRequest
    caller: Any = None

    @classmethod
    def of(cls, request: HttpRequest) -> HttpCall:
        """Make it from a request."""
        pairs = ((name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in request.headers)
        return cls(tuple(pair for pair in pairs if pair[0] in _IDENTITY), request)


class HorovodService:
    """Answers Horovod's requests, and hands on all others.

    Arguments:
        scopes: of the run.
        otherwise: answers what is not Horovod's.
    """

    def __init__(self, scopes: Scopes, otherwise: HttpHandler) -> None:
        self._scopes = scopes
        self._otherwise = otherwise

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Answer one request."""
        match = _PATH.fullmatch(request.path)
        if match is None or match[1] in RESERVED:
            return await self._otherwise(request)
        if request.header("origin"):
            return text_response(403, "pages in browsers may not use the rendezvous")
        scope, key = match[1], match[2]
        if len(scope) > NAME_BYTES_MAX or len(key) > NAME_BYTES_MAX:
            return text_response(414, f"a scope or a key has more than {NAME_BYTES_MAX} bytes")
        call = HttpCall.of(request)
        response = await self._answer_or_refuse(call, request, scope, key)
        return response if call.caller is None else replace(response, user=call.caller.user)

    async def _answer_or_refuse(self, call: HttpCall, request: HttpRequest, scope: str, key: str) -> HttpResponse:
        try:
            return await self._answer(call, request, scope, key)
        except errors.StatusError as error:
            return text_response(_status_of(error), f"/{scope}/{key}: {error}")
        except RecordError as error:
            _log.error("horovod: a record of the run is damaged: %s", error)
            return text_response(500, f"/{scope}/{key}: a record of the run is damaged: {error}")

    async def _answer(self, call: HttpCall, request: HttpRequest, scope: str, key: str) -> HttpResponse:
        match request.method:
            case "GET" if scope == RANK_AND_SIZE:
                return await self._slot(call, key)
            case "GET":
                value = await self._scopes.get(call, scope, key)
                return HttpResponse(404 if value is None else 200, value or b"", _OCTETS)
            case "PUT" if len(request.body) > VALUE_BYTES_MAX:
                return text_response(413, f"a value has more than {VALUE_BYTES_MAX} bytes")
            case "PUT":
                await self._scopes.put(call, scope, key, request.body)
            case "DELETE":
                await self._scopes.finish(call, scope, key)
            case _:
                return HttpResponse(405, b"Method Not Allowed\n", (("allow", "GET, PUT, DELETE"),))
        return HttpResponse(200, b"", _OCTETS)

    async def _slot(self, call: HttpCall, key: str) -> HttpResponse:
        match = _SLOT.fullmatch(key)
        if match is None:
            return text_response(400, f"{key} is not <host>:<local rank>")
        slot = await self._scopes.slot(call, match[1], int(match[2]))
        return HttpResponse(200, ",".join(map(str, slot)).encode(), _OCTETS)


def extension(run_id: str) -> Callable[[LocalStore, HttpHandler], HttpHandler]:
    """Make what a member's HTTP requests go through, so that it serves Horovod's workers of a run."""
    return lambda store, otherwise: HorovodService(Scopes(store, run_id), otherwise).handle


def _status_of(error: errors.StatusError) -> int:
    if isinstance(error, errors.RequestTooLargeError):
        return 413
    if isinstance(error, errors.UserEmptyError | errors.InvalidAuthTokenError | errors.AuthOldRevisionError):
        return 401
    if isinstance(error, errors.PermissionDeniedError):
        return 403
    return 507 if isinstance(error, errors.NoSpaceError) else 503
