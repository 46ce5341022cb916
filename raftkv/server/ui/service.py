"""The paths of the dashboard on the client port, and who may use them.

    GET /             -> /ui/, for browsers
    GET /ui/          the page; /ui/frame/..., /ui/views/...: its modules    everyone
    GET /ui/about     which member this is, whether users are on             everyone; where others are: not with users
    GET /ui/live      figures, a record a second (``live``)                  with users on: any user, as for Status
    GET /ui/watchers  who watches which keys (``watchers``)                  with users on: root

Only ``Authorization`` names the user, as for ``/v3``: a certificate may be that of a proxy, which says nothing about
its users (CVE-2018-16886). A page asks for all other data on ``/v3``, in its own user's name.
"""

from __future__ import annotations

import json
from typing import Any, Final

from raftkv import __version__, errors
from raftkv.apply.applier import Applier
from raftkv.pb import rpc_pb2
from raftkv.replica.watch.hub import WatchHub
from raftkv.rpc.server.http import HttpHandler, HttpHeaders, HttpRequest, HttpResponse, text_response
from raftkv.rpc.shares import identity_of_peer
from raftkv.server.auth.users import Users
from raftkv.server.ui.cluster import ClusterFigures, Identity
from raftkv.server.ui.files import SAFE_HEADERS, Bundle, answer
from raftkv.server.ui.live import Live, TooManyViewersError
from raftkv.server.ui.watchers import Watching

ROOT: Final = "/ui"
_JSON: Final[HttpHeaders] = (("content-type", "application/json"), ("cache-control", "no-store"), *SAFE_HEADERS)
_EVENTS: Final[HttpHeaders] = (
    ("content-type", "text/event-stream"),
    ("cache-control", "no-store"),
    ("x-accel-buffering", "no"),
    *SAFE_HEADERS,
)
_READING: Final = ("GET", "HEAD")


class Gate:
    """Access to more than the files.

    Arguments:
        users: authenticates requests.
        applier: whether users are asked for, and what they may.
    """

    def __init__(self, users: Users, applier: Applier) -> None:
        self._users = users
        self._auth = applier.auth
        self._rights = applier.rights

    @property
    def is_open(self) -> bool:
        """Whether users are off: no login is needed."""
        return not self._auth.is_enabled

    def check_user(self, request: HttpRequest) -> bytes:
        """Return the name of the user, empty while users are off. Raises StatusError: no user, or an unknown one."""
        if self.is_open:
            return b""
        caller = self._users.caller_over_http(request)
        self._rights.check_user(caller)
        return b"" if caller is None else caller.user

    def check_root(self, request: HttpRequest) -> bytes:
        """Return the name of the user. Raises StatusError: it does not have the role root."""
        return self._users.check_root(request)


class Dashboard:
    """Answers what is asked below ``/ui``, and hands on all else.

    Arguments:
        identity: of this member.
        cluster: figures of all members.
        applier: members, users and rights, as applied.
        users: authenticates requests.
        hub: of the watches.
    """

    def __init__(
        self, identity: Identity, cluster: ClusterFigures, applier: Applier, users: Users, hub: WatchHub
    ) -> None:
        self._bundle = Bundle()
        self._identity = identity
        self._membership = applier.membership
        self._gate = Gate(users, applier)
        self._cluster = cluster
        self._watching = Watching(hub)
        self.live = Live(cluster.collect)

    def around(self, otherwise: HttpHandler) -> HttpHandler:
        """Return the handler that serves the dashboard, and all else by another.

        Arguments:
            otherwise: answers what is not the dashboard's.
        """

        async def handle(request: HttpRequest) -> HttpResponse:
            path = request.path
            if path == "/" and "text/html" in request.header("accept"):
                return _moved()
            if path != ROOT and not path.startswith(ROOT + "/"):
                return await otherwise(request)
            return await self.answer(request)

        return handle

    async def answer(self, request: HttpRequest) -> HttpResponse:
        """Answer a request for ``/ui`` or below."""
        if request.method not in _READING:
            headers = (("allow", "GET, HEAD"), ("content-type", "text/plain; charset=utf-8"), *SAFE_HEADERS)
            return HttpResponse(405, b"Method Not Allowed\n", headers)
        if request.path == ROOT:
            return _moved()
        name = request.path.removeprefix(ROOT + "/")
        try:
            match name:
                case "about":
                    return _json(self._about())
                case "live":
                    return self._live(request)
                case "watchers":
                    self._gate.check_root(request)
                    text = await self._watching.text()
                    return HttpResponse(200, text, _JSON, self._gate.check_root(request))  # it may have taken a while
        except errors.StatusError as error:
            return _refused(error)
        file = await self._bundle.find(name)
        if file is None:
            return text_response(404, f"{request.path} is no page of the dashboard; begin at {ROOT}/")
        return answer(file, request, (url for member in self._members() for url in member.clientURLs))

    def _live(self, request: HttpRequest) -> HttpResponse:
        user = self._gate.check_user(request)
        try:
            identity = user or identity_of_peer(request.peer, request.certificate)
            return HttpResponse(200, self.live.look(lambda: self._may_look(request), identity), _EVENTS, user)
        except TooManyViewersError as error:
            return text_response(503, f"{error}: close a page, or ask another member")

    def _may_look(self, request: HttpRequest) -> bool:
        try:
            self._gate.check_user(request)
        except errors.StatusError:
            return False
        return True

    def _members(self) -> list[rpc_pb2.Member]:
        """Return the members while users are off."""
        return self._membership.list() if self._gate.is_open else []

    def _about(self) -> dict[str, Any]:
        me = self._identity
        return {
            "member_id": f"{me.member_id:x}",
            "name": me.name,
            "cluster_id": f"{me.cluster_id:x}",
            "version": __version__,
            "users": not self._gate.is_open,
            "members": [
                {"id": f"{member.ID:x}", "name": member.name, "client_urls": list(member.clientURLs)}
                for member in self._members()
            ],
        }

    def close(self) -> None:
        """End the streams: the member stops."""
        self.live.close()
        self._cluster.close()


def _json(body: dict[str, Any]) -> HttpResponse:
    return HttpResponse(200, json.dumps(body, separators=(",", ":")).encode(), _JSON)


def _refused(error: errors.StatusError) -> HttpResponse:
    """Refuse as the gateway does: 401 without a user, 403 without the right."""
    status = 403 if isinstance(error, errors.PermissionDeniedError) else 401
    code = errors.PERMISSION_DENIED if status == 403 else errors.UNAUTHENTICATED
    body = {"error": str(error), "message": str(error), "code": int(code)}
    return HttpResponse(status, json.dumps(body).encode(), _JSON)


def _moved() -> HttpResponse:
    return HttpResponse(302, b"", (("location", f"{ROOT}/"), ("cache-control", "no-store"), *SAFE_HEADERS))
