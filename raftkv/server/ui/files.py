"""The files of the dashboard, as a browser gets them.

All are read and compressed at the first request, on a thread, and kept (they are a few hundred kilobytes). A request is
a lookup in a dictionary: no path of a request ever reaches a file system. An ETag, the digest of the file, lets a
browser keep what has not changed; it asks each time, so pages and modules of one version come together after an
upgrade.

>>> sorted(read_all())[:2]
['frame/app.js', 'frame/bytes.js']
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from raftkv.rpc.server.http import HttpHeaders, HttpRequest, HttpResponse

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
    """One file.

    Attributes:
        body: its bytes.
        content_type: by its name.
        digest: of its bytes.
        packed: its bytes, compressed.
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
        """Return the file of a path below /ui/; the empty path is the page.

        Arguments:
            path: without a slash before it.
        """
        if self._by_path is None:
            self._by_path = await asyncio.to_thread(read_all)
        return self._by_path.get(path or PAGE)


def read_all() -> dict[str, File]:
    """Return all files of the bundle, by the path below /ui/."""
    return dict(_read(files("raftkv.ui").joinpath("static"), ""))


def answer(file: File, request: HttpRequest, others: Iterable[str]) -> HttpResponse:
    """Return a file, or that the browser has it.

    Arguments:
        file: that is asked for.
        request: may name what the browser has.
        others: client URLs of the other members, which a page may look for when this one is lost.
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
    """Return what the page may load and whom it may ask: this member, and whether other members answer.

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
