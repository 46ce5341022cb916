"""Spans of the client: one per call, below the caller's span, and no spans elsewhere."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from raftkv.client.rpc import methods
from raftkv.client.rpc.core import Client, ClientOptions
from raftkv.client.sync.loop import LoopThread
from raftkv.errors import UNAVAILABLE, StatusError
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError
from tests.client.fakes import FakeCluster

GET = rpc_pb2.RangeRequest(key=b"k")


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Enable tracing and collect ended spans."""
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return memory


def one(*answers, **options) -> tuple[Client, FakeCluster]:
    cluster = FakeCluster(a=list(answers) or [b""])
    return Client("a:1", ClientOptions(**options), open_transport=cluster.open), cluster


def get(client: Client, metadata=()):
    return client.call(methods.RANGE, GET, timeout_s=5.0, metadata=metadata)


async def test_a_call_is_a_span_below_the_callers_and_tells_the_member(spans: InMemorySpanExporter):
    client, cluster = one()
    with trace.get_tracer_provider().get_tracer("program").start_as_current_span("work") as work:
        await get(client, (("raftkv-max-staleness-ms", "5"),))
    call, program = spans.get_finished_spans()
    assert (call.name, call.kind, call.parent.span_id) == (
        "etcdserverpb.KV/Range",
        trace.SpanKind.CLIENT,
        work.get_span_context().span_id,
    )
    assert dict(call.attributes) == {
        "rpc.system": "grpc",
        "rpc.service": "etcdserverpb.KV",
        "rpc.method": "Range",
        "rpc.grpc.status_code": 0,
    }
    ((_, _, metadata),) = cluster.members["a"].calls
    assert metadata[0] == ("raftkv-max-staleness-ms", "5")
    found = trace.get_current_span(TraceContextTextMapPropagator().extract(dict(metadata))).get_span_context()
    assert (found.trace_id, found.span_id) == (program.context.trace_id, call.context.span_id)
    assert found.trace_flags.sampled


async def test_a_failure_is_the_spans(spans: InMemorySpanExporter):
    client, _ = one(RpcError(3, "etcdserver: key is not provided"))
    with pytest.raises(StatusError):
        await get(client)
    (call,) = spans.get_finished_spans()
    assert (call.attributes["rpc.grpc.status_code"], call.status.is_ok) == (3, False)


async def test_attempts_at_other_members_are_one_span(spans: InMemorySpanExporter):
    cluster = FakeCluster(a=[RpcError(UNAVAILABLE, "away")], b=[b""])
    client = Client("a:1,b:1", open_transport=cluster.open)
    await get(client)
    assert len(spans.get_finished_spans()) == 1
    first, second = (cluster.members[name].calls[0][2] for name in "ab")
    assert dict(first)["traceparent"] == dict(second)["traceparent"]


async def test_off_means_off(spans: InMemorySpanExporter):
    client, cluster = one(tracing=False)
    with trace.get_tracer_provider().get_tracer("program").start_as_current_span("work"):
        await get(client)
    assert cluster.members["a"].calls[0][2] == ()
    assert [span.name for span in spans.get_finished_spans()] == ["work"]


@pytest.mark.parametrize("way", ["run", "run_taskless"])
def test_blocking_calls_belong_to_the_span_of_their_own_thread(spans: InMemorySpanExporter, way: str):
    """Calls of many threads share wake-ups of one loop, and no context."""
    loop, (client, _) = LoopThread("test"), one()
    tracer = trace.get_tracer_provider().get_tracer("program")

    def work(name: str) -> None:
        for _ in range(20):
            with tracer.start_as_current_span(name):
                getattr(loop, way)(get_later(client))

    async def get_later(client: Client) -> None:
        await get(client)

    threads = [threading.Thread(target=work, args=(f"thread {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    getattr(loop, way)(get_later(client))
    for thread in threads:
        thread.join()
    loop.close()
    ended = spans.get_finished_spans()
    names = {span.context.span_id: span.name for span in ended}
    calls = [span for span in ended if span.name.startswith("etcdserverpb")]
    assert len(calls) == 81
    assert [
        names.get(span.parent.span_id) for span in calls if span.parent is not None and span.parent.span_id not in names
    ] == []
    below = [span.parent.span_id for span in calls if span.parent is not None]
    assert len(below) == len(set(below)) == 80


def test_without_opentelemetry_nothing_is_loaded():
    program = """
import sys, asyncio
from raftkv.client.rpc.core import Client, ClientOptions
from raftkv.client.rpc import core, methods
from raftkv.errors import ConfigError
from raftkv.pb import rpc_pb2
from tests.client.fakes import FakeCluster
cluster = FakeCluster(a=[b""])
async def main():
    await Client("a:1", open_transport=cluster.open).call(methods.RANGE, rpc_pb2.RangeRequest(key=b"k"), timeout_s=5)
asyncio.run(main())
assert cluster.members["a"].calls[0][2] == ()
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
Client("a:1", ClientOptions(tracing=True))
assert core.TRACING_API in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
