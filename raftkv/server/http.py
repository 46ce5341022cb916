"""Plain HTTP on the client port: /health, /version, /metrics.

Answers are etcd's, byte for byte where probes and load balancers look at them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final
from urllib.parse import parse_qs

from raftkv import errors
from raftkv.apply.applier import Applier
from raftkv.pb.enums import alarm_name
from raftkv.raft.types import NONE
from raftkv.rpc.http import HttpRequest, HttpResponse, text_response
from raftkv.server.node import Node
from raftkv.server.version import ETCD_CLUSTER_VERSION, ETCD_STORAGE_VERSION, ETCD_VERSION
from raftkv.server.waits import read_confirmed

_JSON: Final = (("content-type", "application/json"),)
_METRICS: Final = (("content-type", "text/plain; version=0.0.4; charset=utf-8"),)


class HttpService:
    """The handler that the RPC server hands plain HTTP requests to.

    Arguments:
        node: for the leader, and to read.
        applier: for the alarms.
        metrics: makes the text of /metrics.
    """

    def __init__(self, node: Node, applier: Applier, metrics: Callable[[], bytes]) -> None:
        self._node = node
        self._applier = applier
        self._metrics = metrics

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Answer one request."""
        if request.path not in ("/health", "/version", "/metrics"):
            return text_response(404, "404 page not found")
        if request.method != "GET":
            return HttpResponse(405, b"Method Not Allowed\n", (("allow", "GET"), *_text_type()))
        if request.path == "/version":
            return _json(200, _version())
        if request.path == "/metrics":
            return HttpResponse(200, self._metrics(), _METRICS)
        return await self._health(request)

    async def _health(self, request: HttpRequest) -> HttpResponse:
        query = parse_qs(request.query)
        reason = self._alarm_reason(set(query.get("exclude", [])))
        serializable = query.get("serializable") == ["true"]
        if not reason and not serializable:
            reason = await self._read_reason()
        body = {"health": "false" if reason else "true", "reason": reason}
        return _json(503 if reason else 200, body)

    def _alarm_reason(self, excluded: set[str]) -> str:
        for alarm in self._applier.alarms.raised():
            name = alarm_name(alarm.alarm)
            if name not in excluded:
                return "ALARM UNKNOWN" if name.lstrip("-").isdecimal() else f"ALARM {name}"
        return ""

    async def _read_reason(self) -> str:
        if self._node.leader == NONE:
            return "RAFT NO LEADER"
        try:
            await read_confirmed(self._node)
        except errors.StatusError as error:
            return f"RANGE ERROR:{error}"
        return ""


def _version() -> dict[str, str]:
    return {
        "etcdserver": ETCD_VERSION,
        "etcdcluster": ETCD_CLUSTER_VERSION,
        "storage": ETCD_STORAGE_VERSION,
    }


def _text_type() -> tuple[tuple[str, str], ...]:
    return (("content-type", "text/plain; charset=utf-8"),)


def _json(status: int, body: dict[str, str]) -> HttpResponse:
    return HttpResponse(status, json.dumps(body, separators=(",", ":")).encode(), _JSON)
