"""What reaches a collector, what becomes of spans that none takes, and what tracing costs that is off."""

from __future__ import annotations

import builtins
import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client.registry import CollectorRegistry

from raftkv.config import ServerConfig, Tracing
from raftkv.errors import ConfigError
from raftkv.server.tracing import exporter
from raftkv.server.tracing.assembly import make_tracing
from raftkv.server.tracing.exporter import SpanThread, make_exporter
from raftkv.server.tracing.recording import SERVER, Context, Recording

PATIENCE_S = 120.0


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """OTLP's service, in this process."""

    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []
        self.has_one = threading.Event()

    def export(self, request, context):
        self.requests.append(request)
        self.has_one.set()
        return trace_service_pb2.ExportTraceServiceResponse()

    Export = export


class Held(SpanExporter):
    """A collector that answers when the test lets it; ``answer`` is what it says."""

    def __init__(self) -> None:
        self.answer = SpanExportResult.FAILURE
        self.asked = threading.Semaphore(0)
        self.may_answer = threading.Semaphore(0)

    def export(self, spans):
        self.asked.release()
        self.may_answer.acquire(timeout=PATIENCE_S)
        return self.answer


def recording(code: int = 0) -> Recording:
    made = Recording("etcdserverpb.KV/Put", Context(7, 8, "a=b"), SERVER, 1_000)
    made.address = "[::1]:99"
    made.add("raftkv.check", 1_000, 2_000)
    made.end(9_000, code)
    return made


def test_a_collector_gets_the_spans_over_otlp():
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    thread = SpanThread(make_exporter(f"127.0.0.1:{port}"), Tracing(service_name="kv"), "m1")
    thread.add(recording(code=14))
    assert collector.has_one.wait(PATIENCE_S)
    thread.close()
    server.stop(0)
    (resource,) = collector.requests[0].resource_spans
    shown = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert (shown["service.name"], shown["raftkv.member"]) == ("kv", "m1")
    root, child = resource.scope_spans[0].spans
    assert (root.name, root.parent_span_id, root.trace_state) == ("etcdserverpb.KV/Put", (8).to_bytes(8, "big"), "a=b")
    assert (root.start_time_unix_nano, root.end_time_unix_nano, root.status.message) == (1_000, 9_000, "UNAVAILABLE")
    assert {pair.key for pair in root.attributes} == {
        *("rpc.system", "rpc.service", "rpc.method", "rpc.grpc.status_code"),
        *("network.peer.address", "network.peer.port"),
    }
    assert (child.name, child.parent_span_id, child.trace_id) == ("raftkv.check", root.span_id, root.trace_id)


def test_nothing_waits_for_a_collector_that_is_away(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(exporter, "WAITING_MAX", 3)
    monkeypatch.setattr(exporter, "BATCH", 1)
    monkeypatch.setattr(exporter, "GATHER_S", 0.0)
    monkeypatch.setattr(exporter, "CLOSE_S", PATIENCE_S)
    held = Held()
    thread = SpanThread(held, Tracing(address="away:4317"), "m1")
    thread.add(recording())
    assert held.asked.acquire(timeout=PATIENCE_S)
    with caplog.at_level(logging.INFO, "raftkv"):
        for _ in range(10):
            thread.add(recording())
        assert thread.dropped == 7
        for _ in range(3):
            held.may_answer.release()
            assert held.asked.acquire(timeout=PATIENCE_S)
        held.answer = SpanExportResult.SUCCESS
        held.may_answer.release()
        thread.close()
    assert [record.getMessage() for record in caplog.records] == [
        "traces: the collector at away:4317 does not accept spans; they are dropped until it does "
        "(--distributed-tracing-address)",
        "traces: the collector at away:4317 accepts spans again; the spans of 3 requests were dropped",
    ]
    values = {sample.name: sample.value for metric in thread.collect() for sample in metric.samples}
    assert (values["raftkv_tracing_sent_total"], values["raftkv_tracing_dropped_total"]) == (1, 10)


def test_an_exporter_that_raises_ends_nothing():
    class Broken(SpanExporter):
        def export(self, spans):
            raise RuntimeError("broken")

    thread = SpanThread(Broken(), Tracing(), "m1")
    thread.add(recording())
    thread.close()
    assert sum(sample.value for metric in thread.collect() for sample in metric.samples if "dropped" in sample.name)


def test_without_the_extra_the_flag_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError("No module named 'opentelemetry'")
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "raftkv.server.tracing.exporter")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError) as raised:
        make_tracing(ServerConfig(tracing=Tracing(enabled=True)), CollectorRegistry())
    assert str(raised.value) == (
        "--enable-distributed-tracing needs OpenTelemetry, which is not installed (No module named 'opentelemetry'): "
        "pip install 'raftkv[tracing]'"
    )


@pytest.mark.long
def test_a_member_and_a_client_import_nothing_for_it():
    """What runs without the flag has no module of opentelemetry, grpc or this package."""
    program = """
import sys
import raftkv.server.main, raftkv.client.library, raftkv.cli.main, raftkv.cli.server_options
print([name for name in sys.modules if name.startswith(("opentelemetry", "grpc", "raftkv.server.tracing"))])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
