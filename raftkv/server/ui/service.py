"""The paths of the dashboard on the client port, and their access rules.

    GET /             -> /ui/, for browsers
    GET /ui/          the page; /ui/frame/..., /ui/views/...: its modules    everyone
    GET /ui/about     this member, and whether authentication is on          everyone; members only while it is off
    GET /ui/live      figures, a record a second (``Live``)                  authentication on: any user, as for Status
    GET /ui/watchers  watchers and their keys (``watchers``)                 authentication on: root

Only ``Authorization`` names the user, as for ``/v3``: a certificate may be that of a proxy, which says nothing about
its users (CVE-2018-16886). A page gets all other data from ``/v3``, in its own user's name.

FILES

All files are read and compressed at the first request, on a thread, and kept (a few hundred kilobytes). A request is a
lookup in a dictionary: no path of a request ever reaches a file system. An ETag, the digest of the file, lets a browser
keep unchanged files. The browser revalidates them each time, so pages and modules of one version are used together
after an upgrade.

>>> sorted(read_all())[:2]
['frame/app.js', 'frame/bytes.js']

LIVE FIGURES: one record a second for all viewers, encoded once.

    GET /ui/live      text/event-stream: "data: {...}\\n\\n" each second

    while there are viewers, each second:   own figures + those of the other members -> one record -> every viewer

Invariants
- Without viewers there is no task, no timer and no request to another member.
- A viewer holds one record, the newest: a slow reader misses some records, and costs no more memory.
- At most ``VIEWERS_MAX`` viewers at a time, in shares (``rpc/shares``): the oldest page of the greediest identity ends.
- The right of each viewer is checked again with every record: a viewer that signs out, or loses its token or user, is
  disconnected within a second.

WATCHERS of this member, for root: their streams, clients, keys, and how far they are behind.

    GET /ui/watchers      with authentication on: only root, since watched keys may be secret

A request reads at most ``STREAMS_MAX`` streams, those with the most watchers first, and ``WATCHERS_MAX`` watchers in
all, and shows ``SHOWN_BYTES_MAX`` of a key: its cost is bounded, however many watchers there are, and however long
their keys. That is still 30 ms, so the list is built in slices and shared by concurrent requests.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import heapq
import json
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import islice
from typing import Any, Final

from raftkv import __version__, errors
from raftkv.apply.applier import Applier
from raftkv.loop.limiter import SharedText
from raftkv.pb import rpc_pb2
from raftkv.replica.watch.hub import WatchHub
from raftkv.replica.watch.stream import WatchStream
from raftkv.rpc.server.http import HttpHandler, HttpHeaders, HttpRequest, HttpResponse, text_response
from raftkv.rpc.shares import Identity, Shares, refusal
from raftkv.server.auth.users import Users
from raftkv.server.ui.cluster import ClusterFigures
from raftkv.server.ui.cluster import Identity as MemberIdentity

PAGE: Final = "index.html"

_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "ico": "image/x-icon",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
    "webmanifest": "application/manifest+json",
}
_SELF: Final = "'self'"
_URL: Final = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")

SAFE_HEADERS: Final = (
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("x-frame-options", "DENY"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
)
"""Headers of every answer below /ui."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of the bundle.

    Attributes:
        body: content of the file.
        content_type: derived from its name.
        digest: digest of its content.
        packed: compressed content.
    """

    body: bytes
    content_type: str
    digest: str
    packed: bytes


class Bundle:
    """The files below ``raftkv/ui/static``."""

    def __init__(self) -> None:
        self._by_path: dict[str, File] | None = None

    async def find(self, path: str) -> File | None:
        """Return the file at a path below /ui/; the empty path is the page.

        Arguments:
            path: path without a leading slash.
        """
        if self._by_path is None:
            self._by_path = await asyncio.to_thread(read_all)
        return self._by_path.get(path or PAGE)


def read_all() -> dict[str, File]:
    """Return all files of the bundle, by their path below /ui/."""
    return dict(_read(files("raftkv.ui").joinpath("static"), ""))


def answer(file: File, request: HttpRequest, others: Iterable[str]) -> HttpResponse:
    """Return a file, or 304 if the browser has it.

    Arguments:
        file: requested file.
        request: may name the version that the browser has.
        others: client URLs of the other members, which a page may try when this member is lost.
    """
    takes_packed = "gzip" in request.header("accept-encoding")
    etag = f'"{file.digest}-gzip"' if takes_packed else f'"{file.digest}"'
    headers: HttpHeaders = (
        ("content-security-policy", policy(others)),
        ("etag", etag),
        ("cache-control", "no-cache"),
        ("vary", "accept-encoding"),
        *SAFE_HEADERS,
    )
    known = request.header("if-none-match")
    if known == "*" or etag in {tag.strip().removeprefix("W/") for tag in known.split(",")}:
        return HttpResponse(304, b"", headers)
    headers = (("content-type", file.content_type), *headers)
    if takes_packed:
        return HttpResponse(200, file.packed, (("content-encoding", "gzip"), *headers))
    return HttpResponse(200, file.body, headers)


def policy(others: Iterable[str]) -> str:
    """Return the content security policy: a page may load from this member, and probe the other members.

    >>> policy(["http://b:2379", "http://c:1; script-src *"])[:54]
    "default-src 'self'; connect-src 'self' http://b:2379; "
    """
    named = sorted({url for url in others if _URL.fullmatch(url)})
    return (
        f"default-src 'self'; connect-src {' '.join((_SELF, *named))}; img-src 'self' data:; object-src 'none'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _read(folder: Traversable, prefix: str) -> Iterator[tuple[str, File]]:
    for entry in folder.iterdir():
        path = prefix + entry.name
        if entry.is_dir():
            yield from _read(entry, f"{path}/")
        elif (content_type := _TYPES.get(entry.name.rpartition(".")[2])) is not None:
            body = entry.read_bytes()
            yield path, File(body, content_type, hashlib.sha256(body).hexdigest()[:32], gzip.compress(body, mtime=0))


_log = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0
VIEWERS_MAX: Final = 64
"""Open pages that may show one member: a few for each operator, and one or two wall displays."""


class TooManyViewersError(Exception):
    """The limit of viewers is reached, and this identity has its share, as the text says."""


class Viewer:
    """One page that shows live figures.

    Arguments:
        may_look: returns whether it still may.
        identity: identity whose share it uses.
    """

    def __init__(self, may_look: Callable[[], bool], identity: Identity) -> None:
        self.identity = identity
        self._may_look = may_look
        self._record: bytes | None = None
        self._has_news = asyncio.Event()
        self.is_over = False

    def offer(self, record: bytes) -> None:
        """Set the newest record, which replaces one that has not been read."""
        self._record = record
        self._has_news.set()

    def end(self) -> None:
        """End the stream of records."""
        self.is_over = True
        self._has_news.set()

    async def records(self) -> AsyncIterator[bytes]:
        """Yield records as they come, until the viewer is ended or may look no longer."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            if self.is_over or not self._may_look():
                return
            record, self._record = self._record, None
            if record is not None:
                yield record


class Live:
    """Sends records to viewers.

    Arguments:
        collect: returns a record; called each second while there are viewers.
    """

    def __init__(self, collect: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._collect = collect
        self._viewers: dict[Viewer, None] = {}
        self._shares = Shares(VIEWERS_MAX)
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_running(self) -> bool:
        """Whether records are being collected."""
        return self._task is not None

    def look(self, may_look: Callable[[], bool], identity: Identity) -> AsyncIterator[bytes]:
        """Return the records from now on, as server-sent events.

        Arguments:
            may_look: returns whether the viewer still may; called before each record.
            identity: identity whose share the page uses.

        Raises:
            TooManyViewersError: there is no room: some open page has to be closed first.
        """
        if self._is_closed or not self._shares.make_room(identity, 1, self._end_oldest):
            raise TooManyViewersError(refusal(identity, f"{self._shares.limit} pages that may look at one member"))
        return self._serve(Viewer(may_look, identity))

    def _end_oldest(self, identity: Identity) -> bool:
        viewer = next(viewer for viewer in self._viewers if viewer.identity == identity)
        viewer.end()
        self._leave(viewer)
        return True

    def _leave(self, viewer: Viewer) -> None:
        if viewer in self._viewers:
            del self._viewers[viewer]
            self._shares.give_back(viewer.identity, 1)

    async def _serve(self, viewer: Viewer) -> AsyncIterator[bytes]:
        # Not in ``look``: a page that left before the first byte never became a viewer.
        if self._is_closed or not self._shares.make_room(viewer.identity, 1, self._end_oldest):
            return
        self._viewers[viewer] = None
        self._shares.take(viewer.identity, 1)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        try:
            yield b"retry: 1000\n\n"
            async for record in viewer.records():
                yield record
        finally:
            self._leave(viewer)
            if not self._viewers:
                self._stop()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                record = encode(await self._collect())
            except Exception:
                # A figure that cannot be read is no reason to stop: the page shows that it gets no data.
                _log.exception("reading the figures for the dashboard failed")
            else:
                for viewer in self._viewers:
                    viewer.offer(record)
            await asyncio.sleep(max(0.1, INTERVAL_S - (loop.time() - began)))

    def close(self) -> None:
        """End all streams: the member stops."""
        self._is_closed = True
        for viewer in list(self._viewers):
            viewer.end()
        self._stop()


def encode(record: dict[str, Any]) -> bytes:
    """Return a record as a server-sent event.

    >>> encode({"at": 1})
    b'data: {"at":1}\\n\\n'
    """
    return b"data: %s\n\n" % json.dumps(record, separators=(",", ":")).encode()


STREAMS_MAX: Final = 200
WATCHERS_MAX: Final = 4_000
RANGES_MAX: Final = 20
"""Ranges shown for one stream, those with the most watchers."""
SHOWN_BYTES_MAX: Final = 256
"""Shown bytes of a key; ``is_cut`` marks longer ones."""

_encoded: Final = json.JSONEncoder(separators=(",", ":")).encode


def watchers(hub: WatchHub) -> Iterator[str]:
    """Yield the list of the watchers as JSON, in parts."""
    head = _encoded(
        {
            "streams_total": len(hub.streams),
            "watchers": hub.watcher_count,
            "slow_watchers": hub.unsynced_count,
            "bytes": hub.shares.used,
            "revision": hub.revision,
        }
    )
    streams = heapq.nlargest(STREAMS_MAX, hub.streams, key=lambda stream: len(stream.watchers))
    yield head[:-1] + ',"streams":['
    left, comma = WATCHERS_MAX, ""
    for stream in streams:
        yield comma + _encoded(_stream(stream, left))
        left, comma = max(RANGES_MAX, left - len(stream.watchers)), ","
    yield "]}"


def _stream(stream: WatchStream, watchers_max: int) -> dict[str, Any]:
    counts = Counter((one.key, one.range_end) for one in islice(stream.watchers.values(), watchers_max))
    address, user = stream.client
    return {
        "client": address,
        "user": user,
        "watchers": len(stream.watchers),
        "slow_watchers": stream.unsynced_count,
        "bytes": stream.watcher_bytes,
        "unread_bytes": stream.unread_bytes,
        "ranges_total": len(counts),
        "ranges": [
            {
                "key": _text(key),
                "range_end": _text(end),
                "watchers": number,
                "is_cut": max(len(key), len(end)) > SHOWN_BYTES_MAX,
            }
            for (key, end), number in counts.most_common(RANGES_MAX)
        ],
    }


def _text(data: bytes) -> str:
    return base64.b64encode(data[:SHOWN_BYTES_MAX]).decode()


ROOT: Final = "/ui"
_JSON: Final[HttpHeaders] = (("content-type", "application/json"), ("cache-control", "no-store"), *SAFE_HEADERS)
_EVENTS: Final[HttpHeaders] = (
    ("content-type", "text/event-stream"),
    ("cache-control", "no-store"),
    ("x-accel-buffering", "no"),
    *SAFE_HEADERS,
)
_READING: Final = ("GET", "HEAD")


class Dashboard:
    """Answers requests below ``/ui``; others go to the next handler.

    Arguments:
        identity: identity of this member.
        cluster: figures of all members.
        applier: applied members, users and rights.
        users: authenticates requests.
        hub: watch hub of the member.
    """

    def __init__(
        self, identity: MemberIdentity, cluster: ClusterFigures, applier: Applier, users: Users, hub: WatchHub
    ) -> None:
        self._bundle = Bundle()
        self._identity = identity
        self._membership = applier.membership
        self._users, self._auth = users, applier.auth
        self._cluster = cluster
        self._watchers = SharedText(lambda: watchers(hub))
        self.live = Live(cluster.collect)

    def around(self, otherwise: HttpHandler) -> HttpHandler:
        """Return a handler that serves the dashboard, and passes other requests on.

        Arguments:
            otherwise: answers all other requests.
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
                    self._users.check_root(request)
                    text = await self._watchers()
                    return HttpResponse(200, text, _JSON, self._users.check_root(request))  # checked again: it waited
        except errors.StatusError as error:
            return _refused(error)
        file = await self._bundle.find(name)
        if file is None:
            return text_response(404, f"{request.path} is not a page of the dashboard; begin at {ROOT}/")
        return answer(file, request, (url for member in self._members() for url in member.clientURLs))

    def _live(self, request: HttpRequest) -> HttpResponse:
        user = self._users.check_user(request)
        try:
            identity = user or request.identity
            return HttpResponse(200, self.live.look(lambda: self._may_look(request), identity), _EVENTS, user)
        except TooManyViewersError as error:
            return text_response(503, f"{error}: close a page, or ask another member")

    def _may_look(self, request: HttpRequest) -> bool:
        try:
            self._users.check_user(request)
        except errors.StatusError:
            return False
        return True

    def _members(self) -> list[rpc_pb2.Member]:
        """Return the members while authentication is off, else nothing."""
        return [] if self._auth.is_enabled else self._membership.list()

    def _about(self) -> dict[str, Any]:
        me = self._identity
        return {
            "member_id": f"{me.member_id:x}",
            "name": me.name,
            "cluster_id": f"{me.cluster_id:x}",
            "version": __version__,
            "users": self._auth.is_enabled,
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
    """Refuse like the gateway: 401 without a user, 403 without the right."""
    status = 403 if isinstance(error, errors.PermissionDeniedError) else 401
    code = errors.PERMISSION_DENIED if status == 403 else errors.UNAUTHENTICATED
    body = {"error": str(error), "message": str(error), "code": int(code)}
    return HttpResponse(status, json.dumps(body).encode(), _JSON)


def _moved() -> HttpResponse:
    return HttpResponse(302, b"", (("location", f"{ROOT}/"), ("cache-control", "no-store"), *SAFE_HEADERS))
