"""Websockets of the JSON gateway on etcd 3.5.1 and on raftkv: the same frames to both, and the same answers."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from tests import websocket as ws
from tests.compat.gateway.requests import Side, add_users, sides
from tests.procs import RAFTKV, Cluster

BEARER = "sec-websocket-protocol"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@contextmanager
def _opened(side: Side, path: str, *more: tuple[str, str]) -> Iterator[ws.Client]:
    client = ws.Client(side.host, side.port, f"/v3/{path}", *more)
    try:
        yield client
    finally:
        client.close()


def _told(client: ws.Client) -> Any:
    """The next message, without what each server makes up."""
    message = client.receive()
    message.get("result", {}).pop("header", None)
    return message


def _watch(side: Side) -> list[Any]:
    """Two watches on one socket, an event of each, one cancelled, progress."""
    with _opened(side, "watch") as client:
        told: list[Any] = [client.status, client.headers["sec-websocket-accept"], client.headers.get(BEARER)]
        client.send({"create_request": {"key": _text(b"socket")}})
        told.append(_told(client))
        client.send_frame(ws.BINARY, b'{"create_request":{"key":"%s","watch_id":"7"}}' % _text(b"other").encode())
        told.append(_told(client))
        for key in (b"socket", b"other"):
            side.must("kv/put", key=_text(key), value=_text(b"v"))
            told.append(_told(client)["result"]["events"][0]["kv"]["key"])
        client.send_frame(ws.PING, b"there?")
        told.append(client.frame())
        client.send_frame(ws.TEXT, b'{"cancel_request":', is_final=False)
        client.send_frame(ws.PING)
        told.append(client.frame())
        client.send_frame(ws.CONTINUATION, b'{"watch_id":"7"}} {"progress_request":{}}')
        told += [_told(client), _told(client)]
        client.send_frame(ws.CLOSE, struct.pack(">H", 1000))
        return [*told, client.frame()]


def _keep_alive(side: Side) -> list[Any]:
    side.must("lease/grant", ID="77", TTL="60")
    with _opened(side, "lease/keepalive") as client:
        client.send({"ID": "77"})
        told = [_told(client)]
        client.send({"ID": 78})
        told.append(_told(client))
    side.must("lease/revoke", ID="77")
    return told


def _errors(side: Side) -> list[Any]:
    told: list[Any] = []
    for path, message in (("watch", b"x"), ("lease/keepalive", b'{"ID":"x"}')):
        with _opened(side, path) as client:
            client.send_frame(ws.TEXT, message)
            told.append(client.receive())
    with _opened(side, "watch") as client:
        client.send_frame(ws.TEXT, b"{}", mask=b"")
        told.append(client.frame())
    for more in ((("sec-websocket-key", ""),), (("sec-websocket-version", "8"),)):
        with _opened(side, "watch", *more) as client:
            told.append((client.status, client.headers.get("sec-websocket-version"), client.headers["content-type"]))
    return told


def _large(side: Side) -> list[Any]:
    value = _text(b"x" * 1_000_000)
    with _opened(side, "watch") as client:
        client.send({"create_request": {"key": _text(b"large")}})
        told: list[Any] = [_told(client)]
        side.must("kv/put", key=_text(b"large"), value=value)
        told.append(client.receive()["result"]["events"][0]["kv"]["value"] == value)
        return told


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Side, Side]]:
    with sides() as both:
        yield both


@pytest.mark.parametrize("play", [_watch, _keep_alive, _errors, _large])
def test_websockets_tell_what_etcds_do(pair: tuple[Side, Side], play: Callable[[Side], list[Any]]) -> None:
    first, second = map(play, pair)
    assert second == first


def test_a_websocket_has_the_rights_of_its_token() -> None:
    """Test raftkv alone: etcd 3.5.1 takes the word ``Bearer`` for a part of the token, and refuses all."""
    told = []
    with Cluster(RAFTKV) as cluster, closing(Side(cluster.endpoints[0])) as side:
        add_users(side)
        for user in ("root", "carol"):
            for field in ((BEARER, f"Bearer, {side.tokens[user]}"), ("cookie", f"token={side.tokens[user]}")):
                with _opened(side, "watch", field) as client:
                    client.send({"create_request": {"key": _text(b"z")}})
                    told.append((client.headers.get(BEARER), client.receive()["result"].get("cancel_reason")))
    denied = "rpc error: code = PermissionDenied desc = etcdserver: permission denied"
    assert told == [("Bearer", None), (None, None), ("Bearer", denied), (None, denied)]
