"""The thread that turns recordings into spans and sends them to the collector.

    loop: add(recording) -> queue, ``WAITING_MAX`` at most -> thread: spans -> OTLP over gRPC -> collector

The loop only appends. When the queue is full, because the collector is away or slow, recordings are dropped and
counted. One line is logged when the collector stops answering, and one when it answers again.

Importing this module imports opentelemetry and grpc, so only ``assembly`` does, when tracing is enabled.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from raftkv import __version__
from raftkv.config import Tracing
from raftkv.rpc.status import Code
from raftkv.server.tracing.recording import CLIENT, INTERNAL, SERVER, Recording, Span

_log = logging.getLogger(__name__)

WAITING_MAX: Final = 4096
"""Recordings that may wait, with some ten spans each: about 10 MiB."""

BATCH: Final = 256
"""Recordings in one request to the collector."""

GATHER_S: Final = 0.2
"""How long recordings are collected for one request."""

EXPORT_TIMEOUT_S: Final = 5.0
"""How long a batch is tried before it is dropped."""

CLOSE_S: Final = 1.0
"""Longest wait, at a stop, for a collector that does not answer."""

_KINDS: Final = {INTERNAL: SpanKind.INTERNAL, SERVER: SpanKind.SERVER, CLIENT: SpanKind.CLIENT}
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_FAULTS: Final = frozenset(
    (*(Code.UNKNOWN, Code.DEADLINE_EXCEEDED, Code.UNIMPLEMENTED, Code.INTERNAL), *(Code.UNAVAILABLE, Code.DATA_LOSS))
)
"""Codes that are the server's fault (OpenTelemetry's conventions for gRPC): the span is marked as an error."""


class SpanThread(Collector):
    """Takes recordings on the loop, and sends their spans from a thread.

    Arguments:
        exporter: sends spans; used only by the thread.
        settings: names the service of the spans.
        member: name of the member.

    Attributes:
        dropped: recordings that found the queue full.
        sent: recordings whose spans the collector has accepted.
    """

    def __init__(self, exporter: SpanExporter, settings: Tracing, member: str) -> None:
        self.dropped = 0
        self.sent = 0
        self._exporter = exporter
        self._address = settings.address
        self._resource = _resource(settings, member)
        self._scope = InstrumentationScope("raftkv", __version__)
        self._waiting: deque[Recording] = deque()
        self._lost = 0
        self._is_failing = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raftkv-tracing", daemon=True)
        self._thread.start()

    def add(self, recording: Recording) -> None:
        """Queue a recording, or drop it if too many wait.

        Arguments:
            recording: recording that has ended.
        """
        if len(self._waiting) >= WAITING_MAX:
            self.dropped += 1
            return
        self._waiting.append(recording)
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Send waiting recordings for a moment, and end the thread. Call it off the loop."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()

    def collect(self) -> Iterator[Metric]:
        """Yield the numbers of recordings sent, and of those dropped here or not accepted by the collector."""
        yield CounterMetricFamily("raftkv_tracing_sent", "Traced requests sent to the collector.", float(self.sent))
        dropped = float(self.dropped + self._lost)
        yield CounterMetricFamily("raftkv_tracing_dropped", "Traced requests that the collector lacks.", dropped)

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            self._wake.wait()
            is_closing = self._closing.wait(GATHER_S)
            self._wake.clear()
            with contextlib.suppress(MemoryError):  # the thread continues, without some spans
                while self._waiting:
                    batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                    self._send(batch)

    def _send(self, batch: Sequence[Recording]) -> None:
        try:
            spans = [span for recording in batch for span in self._spans(recording)]
            has_sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:
            # Any error of the exporter, which is another project's: the member continues without these spans.
            _log.debug("sending trace spans failed", exc_info=error)
            has_sent = False
        if has_sent:
            self.sent += len(batch)
        else:
            self._lost += len(batch)
        if has_sent == self._is_failing:
            self._is_failing = not has_sent
            if has_sent:
                _log.info(
                    "traces: the collector at %s accepts spans again; the spans of %d requests were dropped",
                    self._address,
                    self._lost,
                )
            else:
                _log.warning(
                    "traces: the collector at %s does not accept spans; they are dropped until it does "
                    "(--distributed-tracing-address)",
                    self._address,
                )

    def _spans(self, recording: Recording) -> Iterator[ReadableSpan]:
        trace_id, state = recording.trace_id, TraceState.from_header([recording.state])

        def context(span_id: int) -> SpanContext | None:
            return SpanContext(trace_id, span_id, False, _SAMPLED, state) if span_id else None

        times = recording.began_ns, recording.ended_ns
        own = Span(recording.name, recording.span_id, recording.parent_id, *times, recording.kind)
        for span in (own, *recording.spans):
            yield ReadableSpan(
                span.name,
                context(span.span_id),
                context(span.parent_id),
                self._resource,
                kind=_KINDS[span.kind],
                start_time=span.began_ns,
                end_time=span.ended_ns,
                attributes=_attributes(recording) if span is own else None,
                status=_status(recording.code if span is own else -1),
                instrumentation_scope=self._scope,
            )


def _resource(settings: Tracing, member: str) -> Resource:
    attributes = {"service.name": settings.service_name, "service.version": __version__, "raftkv.member": member}
    if settings.instance_id:
        attributes["service.instance.id"] = settings.instance_id
    return Resource.create(attributes)


def _attributes(recording: Recording) -> dict[str, str | int]:
    """Return attributes of OpenTelemetry's conventions for RPCs."""
    service, _, method = recording.name.partition("/")
    attributes: dict[str, str | int] = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
    if recording.code >= 0:
        attributes["rpc.grpc.status_code"] = int(recording.code)
    host, separator, port = recording.address.rpartition(":")
    if separator and port.isdigit():
        attributes["network.peer.address"] = host.strip("[]")
        attributes["network.peer.port"] = int(port)
    return attributes


def _status(code: int) -> Status:
    return Status(StatusCode.ERROR, Code(code).name) if code in _FAULTS else Status(StatusCode.UNSET)


def make_exporter(address: str) -> SpanExporter:
    """Return an exporter that sends spans to a collector, in plain text as etcd does.

    Arguments:
        address: ``host:port``.
    """
    # Its own log lines about each failed attempt would fill the log; ``SpanThread`` logs once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    return OTLPSpanExporter(endpoint=address, insecure=True, timeout=EXPORT_TIMEOUT_S)
