"""Metrics of gRPC calls: grpc_server_*, with the names of go-grpc-prometheus, and etcd's counts of requests and bytes.

Every method of the client ports is there from the start, with 0 for every code, so the rate of a series that was never
counted is 0 instead of missing. Counts are those of the routes (``rpc.server.router.CallCounts``). A unary call has
one message in each direction, so its messages equal its calls.

Users and answers to health probes are counted here too.

With ``--metrics=extensive`` ``CallTimes`` wraps the handlers; otherwise calls are not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from raftkv.apply.auth.store import AuthStore
from raftkv.errors import CODE_NAMES
from raftkv.histograms import Buckets, counter, counters, doubling, gauge, gauges, histogram_family
from raftkv.pb.services import SERVICES
from raftkv.replica.node.admission import Admission
from raftkv.rpc.server.calls import ServerCall, UnaryCall
from raftkv.rpc.server.router import CallCounts, Kind
from raftkv.rpc.server.server import Server
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.status import Code
from raftkv.server.http.routes import HttpService

_LABELS: Final = ("grpc_method", "grpc_service", "grpc_type")
_HANDLING_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_REQUEST_S: Final = doubling(0.001, 14)
_SUCCESS: Final = ("false", "true")
_REQUESTS: Final = {
    **{f"/etcdserverpb.KV/{name}": name for name in ("Range", "Put", "DeleteRange", "Txn")},
    "/etcdserverpb.KV/Compact": "Compaction",
    "/etcdserverpb.Maintenance/Alarm": "Alarm",
    **{f"/etcdserverpb.Lease/{name}": name for name in ("LeaseGrant", "LeaseRevoke")},
    **{
        f"/etcdserverpb.Auth/{name}": name if name.startswith("Auth") else f"Auth{name}"
        for name in SERVICES["etcdserverpb.Auth"]
    },
}
"""Calls by etcd's names for requests in its log."""

_STREAMS: Final = {"/etcdserverpb.Watch/Watch": "watch", "/etcdserverpb.Lease/LeaseKeepAlive": "lease-keepalive"}

Counted = dict[tuple[str, ...], CallCounts]
"""Counts by method, service and type."""


def call_metrics(server: Server, admission: Admission) -> Iterator[Metric]:
    """Yield the metrics of calls of the client ports.

    Arguments:
        server: server whose routes are counted.
        admission: counts the versions that clients report.
    """
    counts: Counted = {_labels_of(route.path): route.counts for route in server.router.routes.values()}
    yield _family("started", "Total number of RPCs started on the server.", counts, lambda one: one.started)
    text = "Total number of RPCs completed on the server, regardless of success or failure."
    handled = {
        (name, *labels): one.failed.get(code, 0) if code else one.answered
        for labels, one in counts.items()
        for code, name in CODE_NAMES.items()
    }
    yield counter("grpc_server_handled_total", text, handled, ["grpc_code", *_LABELS])
    unary = {labels for labels in counts if labels[2] == "unary"}
    received = {labels: one.started if labels in unary else one.received for labels, one in counts.items()}
    text = "Total number of RPC stream messages received on the server."
    yield counter("grpc_server_msg_received_total", text, received, _LABELS)
    sent = {labels: one.answered if labels in unary else one.sent for labels, one in counts.items()}
    text = "Total number of gRPC stream messages sent by the server."
    yield counter("grpc_server_msg_sent_total", text, sent, _LABELS)
    yield from _clients(server, admission, counts)


def _clients(server: Server, admission: Admission, counts: Counted) -> Iterator[Metric]:
    yield from counters(
        (
            "etcd_network_client_grpc_received_bytes_total",
            "The total number of bytes received from grpc clients.",
            server.traffic.received_bytes,
        ),
        (
            "etcd_network_client_grpc_sent_bytes_total",
            "The total number of bytes sent to grpc clients.",
            server.traffic.sent_bytes,
        ),
    )
    found: dict[tuple[str, ...], float] = {}
    for kind, is_unary in (("unary", True), ("stream", False)):
        all_calls = sum(one.started for labels, one in counts.items() if (labels[2] == "unary") == is_unary)
        versions = admission.client_versions.items()
        named = {value.decode(): count for (unary, value), count in versions if unary == is_unary}
        found |= {(kind, version): count for version, count in named.items()}
        found[kind, "unknown"] = max(0, all_calls - sum(named.values()))
    text = "The total number of client requests per client version."
    yield counter("etcd_server_client_requests_total", text, found, ["type", "client_api_version"])
    failures = {
        (api, "receive"): sum(count for code, count in one.failed.items() if code != Code.CANCELLED)
        for path, api in _STREAMS.items()
        for one in [counts[_labels_of(path)]]
    }
    text = "The total number of stream failures from the local server."
    yield counter("etcd_network_server_stream_failures_total", text, failures, ["API", "Type"])
    refused = {
        (CODE_NAMES[code],): sum(one.failed.get(code, 0) for one in counts.values())
        for code in (Code.PERMISSION_DENIED, Code.UNAUTHENTICATED)
    }
    yield counter("raftkv_auth_refused_calls_total", "Calls refused for want of a right or a login.", refused, ["code"])
    login = counts[_labels_of("/etcdserverpb.Auth/Authenticate")]
    logins = {("accepted",): login.answered, ("refused",): sum(login.failed.values())}
    yield counter("raftkv_auth_logins_total", "Logins with a password, by outcome.", logins, ["result"])


class CallTimes(Collector):
    """Times every call, for --metrics=extensive: an observer around each handler, about 2 us per call."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, ...], Buckets] = {}
        self._requests: dict[tuple[str, ...], Buckets] = {}

    def around(self, path: str, kind: Kind, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper that times the calls of a handler (``router.Around``); it belongs inside of the audit.

        Arguments:
            path, kind, handler: as registered by the server.
        """
        buckets = self._buckets[_labels_of(path)] = Buckets(_HANDLING_S)
        if kind is not Kind.UNARY:

            def stream(call: StreamCall) -> Any:
                _observe(call, buckets)
                return handler(call)

            return stream

        kind_of_request = _REQUESTS.get(path)
        requests = None
        if kind_of_request is not None:
            requests = tuple(Buckets(_REQUEST_S) for _ in _SUCCESS)
            self._requests |= {(kind_of_request, said): one for said, one in zip(_SUCCESS, requests, strict=True)}

        def unary(call: UnaryCall, message: bytes) -> None:
            _observe(call, buckets, requests)
            handler(call, message)

        return unary

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        text = "Histogram of response latency (seconds) of gRPC that had been application-level handled by the server."
        yield histogram_family("grpc_server_handling_seconds", text, self._buckets, _LABELS)
        text = "Response latency distribution in seconds for each type."
        seen = {labels: one for labels, one in self._requests.items() if one.count}
        yield histogram_family("etcd_server_request_duration_seconds", text, seen, ["type", "success"])


def _observe(call: ServerCall, buckets: Buckets, requests: tuple[Buckets, ...] | None = None) -> None:
    began_s = perf_counter()

    def ended(code: int, answer: bytes) -> None:
        taken_s = perf_counter() - began_s
        buckets.observe(taken_s)
        if requests is not None:
            requests[code == 0].observe(taken_s)

    call.add_observer(ended)


def _labels_of(path: str) -> tuple[str, str, str]:
    """Return method, service and type of a path."""
    service, _, name = path[1:].rpartition("/")
    method = SERVICES[service][name]
    sides = (method.client_streaming, method.server_streaming)
    kinds = {(False, False): "unary", (True, False): "client_stream", (False, True): "server_stream"}
    return name, service, kinds.get(sides, "bidi_stream")


def _family(name: str, text: str, counts: Counted, value: Callable[[CallCounts], int]) -> Metric:
    return counter(f"grpc_server_{name}_total", text, {labels: value(one) for labels, one in counts.items()}, _LABELS)


def auth_metrics(auth: AuthStore) -> Iterator[Metric]:
    """Yield the revision of users and roles.

    Arguments:
        auth: applied users and roles.
    """
    yield from gauges(("etcd_debugging_auth_revision", "The current revision of auth store.", auth.revision))


def health_metrics(http: HttpService) -> Iterator[Metric]:
    """Yield the metrics of health probes.

    Arguments:
        http: HTTP service of the member.
    """
    yield from counters(
        ("etcd_server_health_success", "The total number of successful health checks", http.healthy),
        ("etcd_server_health_failures", "The total number of failed health checks", http.unhealthy),
    )
    yield gauge(
        "etcd_server_healthcheck",
        "The result of each kind of healthcheck.",
        {(kind, name): not failed for (kind, name), failed in http.failing.items()},
        ["type", "name"],
    )
    yield counter(
        "etcd_server_healthchecks_total",
        "The total number of each kind of healthcheck.",
        {(kind, name, "error" if failed else "success"): n for (kind, name, failed), n in http.checks.items()},
        ["type", "name", "status"],
    )
