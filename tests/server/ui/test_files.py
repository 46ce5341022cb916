"""What a browser gets below /ui, and what else is asked of the client port."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raftkv.pb import rpc_pb2
from raftkv.rpc.server.http import HttpRequest, HttpResponse, text_response
from raftkv.server.ui import service
from raftkv.server.ui.cluster import Identity
from raftkv.server.ui.service import Dashboard

STATIC = Path(__file__).parents[3] / "raftkv" / "ui" / "static"
BUNDLE_BYTES_MAX = 200_000
"""All files together, as they are sent."""


async def _otherwise(request: HttpRequest) -> HttpResponse:
    return text_response(404, "404 page not found")


class ClusterFigures:
    """Figures of no member."""

    async def collect(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


@pytest.fixture
def users() -> Any:
    return SimpleNamespace(is_enabled=False)


@pytest.fixture
def dashboard(users: Any) -> Dashboard:
    members = [rpc_pb2.Member(ID=0xA, name="a", clientURLs=["http://a.example:2379"]), rpc_pb2.Member(ID=0xB)]
    applier: Any = SimpleNamespace(membership=SimpleNamespace(list=lambda: members), auth=users, rights=None)
    unused: Any = None
    figures: Any = ClusterFigures()
    return Dashboard(Identity(0xC0, 0xA, "a"), figures, applier, unused, unused)


async def _ask(dashboard: Dashboard, request: HttpRequest) -> HttpResponse:
    return await dashboard.around(_otherwise)(request)


def _get(dashboard: Dashboard, target: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    given = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    response = asyncio.run(_ask(dashboard, HttpRequest(method, target, given)))
    assert isinstance(response.body, bytes)
    return response.status, dict(response.headers), response.body


def test_the_page_may_load_nothing_from_elsewhere(dashboard: Dashboard) -> None:
    status, headers, body = _get(dashboard, "/ui/?theme=dark")
    assert (status, headers["content-type"], body) == (200, "text/html; charset=utf-8", _read("index.html"))
    assert headers["content-security-policy"] == (
        "default-src 'self'; connect-src 'self' http://a.example:2379; img-src 'self' data:; object-src 'none'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def _read(path: str) -> bytes:
    return (STATIC / path).read_bytes()


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("frame/app.js", "text/javascript; charset=utf-8"),
        ("frame/frame.css", "text/css; charset=utf-8"),
        ("icon.svg", "image/svg+xml"),
    ],
)
def test_files_have_their_types(dashboard: Dashboard, path: str, content_type: str) -> None:
    status, headers, body = _get(dashboard, f"/ui/{path}")
    assert (status, headers["content-type"], body) == (200, content_type, _read(path))


def test_a_browser_that_has_a_file_gets_it_not_again(dashboard: Dashboard) -> None:
    _, headers, _ = _get(dashboard, "/ui/frame/app.js")
    etag = headers["etag"]
    assert headers["cache-control"] == "no-cache"
    for known in (etag, f'"other", W/{etag}', "*"):
        status, again, body = _get(dashboard, "/ui/frame/app.js", if_none_match=known)
        assert (status, body, again["etag"]) == (304, b"", etag)
    assert _get(dashboard, "/ui/frame/app.js", if_none_match='"other"')[0] == 200


def test_files_are_sent_compressed_to_clients_that_accept_it(dashboard: Dashboard) -> None:
    _, plain, _ = _get(dashboard, "/ui/frame/app.js")
    status, headers, body = _get(dashboard, "/ui/frame/app.js", accept_encoding="gzip, deflate, br")
    assert (status, headers["content-encoding"], headers["vary"]) == (200, "gzip", "accept-encoding")
    assert gzip.decompress(body) == _read("frame/app.js")
    assert "content-encoding" not in plain
    assert plain["etag"] != headers["etag"]
    known = _get(dashboard, "/ui/frame/app.js", accept_encoding="gzip", if_none_match=headers["etag"])
    assert (known[0], known[2]) == (304, b"")


@pytest.mark.parametrize(
    "path",
    ["../__init__.py", "..%2f__init__.py", "frame", "frame/", "nothing.js", "%2e%2e/x", "/etc/passwd", "frame/../../x"],
)
def test_only_files_of_the_bundle_are_found(dashboard: Dashboard, path: str) -> None:
    status, _, body = _get(dashboard, f"/ui/{path}")
    assert (status, body) == (404, f"/ui/{path} is not a page of the dashboard; begin at /ui/\n".encode())


@pytest.mark.parametrize(
    ("target", "accept", "status"),
    [
        ("/", "text/html,application/xhtml+xml,*/*;q=0.8", 302),
        ("/", "*/*", 404),
        ("/", "", 404),
        ("/ui", "", 302),
        ("/uix", "text/html", 404),
        ("/health", "text/html", 404),
    ],
)
def test_browsers_are_led_to_the_page(dashboard: Dashboard, target: str, accept: str, status: int) -> None:
    got, headers, _ = _get(dashboard, target, accept=accept)
    assert (got, headers.get("location")) == (status, "/ui/" if status == 302 else None)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_is_changed_below_ui(dashboard: Dashboard, method: str) -> None:
    status, headers, _ = _get(dashboard, "/ui/", method)
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert _get(dashboard, "/ui/", "HEAD")[0] == 200


def test_strangers_learn_where_members_are_only_without_users(dashboard: Dashboard, users: Any) -> None:
    about = json.loads(_get(dashboard, "/ui/about")[2])
    assert (about["name"], about["member_id"], about["cluster_id"], about["users"]) == ("a", "a", "c0", False)
    assert about["members"][0] == {"id": "a", "name": "a", "client_urls": ["http://a.example:2379"]}
    users.is_enabled = True
    about = json.loads(_get(dashboard, "/ui/about")[2])
    assert (about["users"], about["members"]) == (True, [])
    assert "a.example" not in _get(dashboard, "/ui/")[1]["content-security-policy"]


def _sources() -> Iterator[tuple[str, str]]:
    for path in sorted(STATIC.rglob("*")):
        if path.is_file():
            yield str(path.relative_to(STATIC)), path.read_text(encoding="utf-8")


def test_the_bundle_is_small_and_loads_nothing_from_elsewhere() -> None:
    texts = dict(_sources())
    assert set(texts) == set(service.read_all())
    assert max(name.count("/") for name in texts) == 1, "setup.py packs two levels"
    assert sum(len(file.packed) for file in service.read_all().values()) < BUNDLE_BYTES_MAX
    elsewhere = {
        name: re.findall(r"""(?:src|href|from|import|url)\W{1,3}https?://""", text) for name, text in texts.items()
    }
    assert {name: found for name, found in elsewhere.items() if found} == {}


def test_scripts_stay_readable_and_make_no_markup_of_texts() -> None:
    scripts = {name: text for name, text in _sources() if name.endswith(".js")}
    assert {name: lines for name, text in scripts.items() if (lines := text.count("\n")) > 400} == {}
    unsafe = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\(.style."
    )
    assert {name for name, text in scripts.items() if unsafe.search(text)} == set()


def test_module_imports_exist() -> None:
    for name, text in _sources():
        for target in re.findall(r"""(?:from|import) "(\.[^"]+)";""", text):
            assert (STATIC / name).parent.joinpath(target).is_file(), f"{name} imports {target}"
