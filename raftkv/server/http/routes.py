"""Plain HTTP on the client port: /health, /livez, /readyz, /version, /metrics.

Answers are etcd's, byte for byte where probes and load balancers compare them. The client port is not answered before
the member is ready. The metrics addresses are, and report that the member is not ready.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import parse_qs

from raftkv import __version__, errors
from raftkv.apply.applier import Applier
from raftkv.config import ETCD_VERSION
from raftkv.pb import rpc_pb2
from raftkv.pb.enums import alarm_name
from raftkv.replica.membership.presence import Readiness
from raftkv.replica.node.admission import Admission
from raftkv.replica.node.node import Node
from raftkv.rpc.server.http import HttpRequest, HttpResponse

_JSON: Final = (("content-type", "application/json"),)
_TEXT: Final = (("content-type", "text/plain; charset=utf-8"),)
_CHECKED: Final = (*_TEXT, ("x-content-type-options", "nosniff"))
CHECKS: Final = {
    "/livez": ("serializable_read",),
    "/readyz": ("data_corruption", "linearizable_read", "non_learner", "serializable_read"),
}
NOT_READY: Final = "the member is not ready: it has yet to apply its log, or to hear from a quorum"

_METRICS: Final = (("content-type", "text/plain; version=0.0.4; charset=utf-8"),)


class HttpService:
    """The handler of plain HTTP requests on the RPC server.

    Arguments:
        node: knows the leader, and confirms reads.
        applier: knows the alarms.
        readiness: whether clients are served yet.
        admission: whether this member is a learner.
        metrics: returns the text of /metrics.

    Attributes:
        healthy, unhealthy: numbers of answers of /health.
        checks: number of outcomes of the checks of /livez and /readyz, by kind, name and whether it failed.
        failing: whether the last check of a kind and name failed.
    """

    def __init__(
        self,
        node: Node,
        applier: Applier,
        readiness: Readiness,
        admission: Admission,
        metrics: Callable[[], Awaitable[bytes]],
    ) -> None:
        self._node = node
        self._applier = applier
        self._readiness = readiness
        self._admission = admission
        self._metrics = metrics
        self.healthy = self.unhealthy = 0
        self.checks = {(kind[1:], name, failed): 0 for kind in CHECKS for name in CHECKS[kind] for failed in (0, 1)}
        self.failing = {(kind[1:], name): False for kind in CHECKS for name in CHECKS[kind]}

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Answer one request."""
        if request.path == "/metrics":
            return HttpResponse(200, await self._metrics(), _METRICS)
        checks = _checks_of(request.path)
        if checks is None and request.path not in ("/health", "/version"):
            return HttpResponse(404, b"404 page not found\n", _CHECKED)
        if request.method != "GET":
            return HttpResponse(405, b"Method Not Allowed\n", (("allow", "GET"), *_CHECKED))
        if request.path == "/version":
            answer = _json(200, _version(self._applier.downgrade.cluster_version))
            # `raftkv doctor` compares versions of raftkv by this header: the body has only the version of etcd.
            return HttpResponse(200, answer.body, (*answer.headers, ("server", f"raftkv/{__version__}")))
        if checks is not None:
            return await self._check(request.path, checks, parse_qs(request.query, keep_blank_values=True))
        return await self._health(request)

    async def _check(self, path: str, checks: tuple[str, ...], query: dict[str, list[str]]) -> HttpResponse:
        """Answer /livez or /readyz: ``ok``, or the failed checks with reasons; with ``verbose`` one line per check.

        Excluded checks need not exist, so a probe may name checks of a later version. A check that is requested by its
        own path is never excluded.
        """
        excluded = set(query.get("exclude", [])) if path in CHECKS else set()
        failures = {name: await self._failure(name) for name in checks if name not in excluded}
        kind = path[1:].partition("/")[0]
        for name, failure in failures.items():
            self.failing[kind, name] = bool(failure)
            self.checks[kind, name, int(bool(failure))] += 1
        lines = [f"[-]{name} failed: {reason}\n" if reason else f"[+]{name} ok\n" for name, reason in failures.items()]
        if any(failures.values()):
            return HttpResponse(503, "".join([*lines, "\n"]).encode(), _CHECKED)
        return HttpResponse(200, "".join([*(lines if "verbose" in query else []), "ok\n"]).encode(), _CHECKED)

    async def _failure(self, check: str) -> str:
        """Return why a check fails; empty if it does not."""
        if check == "data_corruption":
            corrupt = any(alarm.alarm == rpc_pb2.CORRUPT for alarm in self._applier.alarms.raised())
            return "alarm activated: CORRUPT" if corrupt else ""
        if check == "non_learner":
            return str(errors.NotSupportedForLearnerError()) if self._admission.is_learner else ""
        if not self._readiness.is_ready:
            return NOT_READY
        return await self._read_reason() if check == "linearizable_read" else ""

    async def _health(self, request: HttpRequest) -> HttpResponse:
        query = parse_qs(request.query)
        reason = self._alarm_reason(set(query.get("exclude", [])))
        serializable = query.get("serializable") == ["true"]
        if not reason and serializable and not self._readiness.is_ready:
            reason = NOT_READY
        if not reason and not serializable:
            reason = await self._read_reason()
        if reason:
            self.unhealthy += 1
        else:
            self.healthy += 1
        body = {"health": "false" if reason else "true", "reason": reason}
        text = json.dumps(body, separators=(",", ":")).encode()
        return HttpResponse(503, text + b"\n", _CHECKED) if reason else HttpResponse(200, text, _TEXT)

    def _alarm_reason(self, excluded: set[str]) -> str:
        for alarm in self._applier.alarms.raised():
            name = alarm_name(alarm.alarm)
            if name not in excluded:
                return "ALARM UNKNOWN" if name.lstrip("-").isdecimal() else f"ALARM {name}"
        return ""

    async def _read_reason(self) -> str:
        if self._node.is_leaderless:
            return "RAFT NO LEADER"
        try:
            await self._node.confirm_read()
        except errors.StatusError as error:
            return f"RANGE ERROR:{error}"
        return ""


def _checks_of(path: str) -> tuple[str, ...] | None:
    """Return the checks of a path: all of /livez or /readyz, or one below them; None: the path has none."""
    root, slash, name = path[1:].partition("/")
    checks = CHECKS.get("/" + root)
    if checks is None or not slash:
        return checks
    return (name,) if name in checks else None


def _version(cluster_version: str) -> dict[str, str]:
    return {"etcdserver": ETCD_VERSION, "etcdcluster": cluster_version, "storage": cluster_version}


def _json(status: int, body: dict[str, str]) -> HttpResponse:
    return HttpResponse(status, json.dumps(body, separators=(",", ":")).encode(), _JSON)
