"""/livez, /readyz and related paths as in etcd 3.6: checks made and checks excluded."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raftkv import errors
from raftkv.pb import rpc_pb2
from raftkv.rpc.server.http import HttpRequest, HttpResponse
from raftkv.server.http.routes import HttpService

LEARNER = f"[-]non_learner failed: {errors.NotSupportedForLearnerError.text}\n\n"
NOSNIFF = ("x-content-type-options", "nosniff")


async def _confirmed() -> None:
    pass


async def _metrics() -> bytes:
    return b"metrics"


def service(*, is_leaderless: bool = False, is_learner: bool = False, alarms: tuple[int, ...] = ()) -> HttpService:
    raised = [rpc_pb2.AlarmMember(memberID=1, alarm=cast(Any, alarm)) for alarm in alarms]
    return HttpService(
        cast(Any, SimpleNamespace(is_leaderless=is_leaderless, confirm_read=_confirmed)),
        cast(Any, SimpleNamespace(alarms=SimpleNamespace(raised=lambda: raised))),
        cast(Any, SimpleNamespace(is_ready=True)),
        cast(Any, SimpleNamespace(is_learner=is_learner)),
        _metrics,
    )


def ask(http: HttpService, target: str, method: str = "GET") -> HttpResponse:
    return asyncio.run(http.handle(HttpRequest(method, target)))


@pytest.mark.parametrize(
    ("target", "status", "body"),
    [
        ("/livez", 200, "ok\n"),
        ("/livez?verbose", 200, "[+]serializable_read ok\nok\n"),
        ("/livez/non_learner", 404, "404 page not found\n"),
        ("/livez/", 404, "404 page not found\n"),
        ("/readyz", 503, f"[+]data_corruption ok\n[+]linearizable_read ok\n{LEARNER[:-1]}[+]serializable_read ok\n\n"),
        ("/readyz?exclude=non_learner", 200, "ok\n"),
        ("/readyz?exclude=nothing&exclude=non_learner&exclude=", 200, "ok\n"),
        ("/readyz/non_learner", 503, LEARNER),
        # A check by its own path is never left out.
        ("/readyz/non_learner?exclude=non_learner", 503, LEARNER),
        ("/readyz/data_corruption?exclude=data_corruption&verbose", 200, "[+]data_corruption ok\nok\n"),
    ],
)
def test_checks_of_a_learner(target: str, status: int, body: str) -> None:
    answer = ask(service(is_learner=True), target)
    assert (answer.status, answer.body.decode() if isinstance(answer.body, bytes) else "") == (status, body)
    assert NOSNIFF in answer.headers


def test_data_corruption_is_a_check_of_readiness_alone() -> None:
    corrupt = service(alarms=(rpc_pb2.CORRUPT,))
    answer = ask(corrupt, "/readyz/data_corruption")
    assert (answer.status, answer.body) == (503, b"[-]data_corruption failed: alarm activated: CORRUPT\n\n")
    assert ask(corrupt, "/livez").status == 200


def test_health_is_written_as_gos_http_error_does() -> None:
    answer = ask(service(is_leaderless=True), "/health")
    assert (answer.status, answer.body) == (503, b'{"health":"false","reason":"RAFT NO LEADER"}\n')
    assert NOSNIFF in answer.headers


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_metrics_are_answered_for_every_method(method: str) -> None:
    assert ask(service(), "/metrics", method).status == 200


@pytest.mark.parametrize("path", ["/health", "/version", "/livez", "/readyz", "/readyz/non_learner"])
@pytest.mark.parametrize("method", ["HEAD", "POST"])
def test_all_else_is_for_get(path: str, method: str) -> None:
    answer = ask(service(), path, method)
    assert answer.status == 405
    assert answer.headers[0] == ("allow", "GET")
    assert NOSNIFF in answer.headers


def test_answers_are_counted() -> None:
    http = service(alarms=(rpc_pb2.CORRUPT,))
    for target in ("/health", "/health?exclude=CORRUPT", "/readyz", "/livez", "/livez/serializable_read"):
        ask(http, target)
    assert (http.healthy, http.unhealthy) == (1, 1)
    assert http.checks["readyz", "data_corruption", 1] == 1
    assert http.checks["readyz", "linearizable_read", 0] == 1
    assert http.checks["livez", "serializable_read", 0] == 2
    assert [name for name, failed in http.failing.items() if failed] == [("readyz", "data_corruption")]
