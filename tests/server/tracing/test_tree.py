"""The spans of requests to real members: what is below what, and that nothing else is in a trace."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from raftkv import aio
from raftkv.config import Tracing
from raftkv.pb import rpc_pb2
from raftkv.raft.types import StateRole
from raftkv.rpc.client.channel import Channel
from tests.server.tracing.members import running

PUT, RANGE = "/etcdserverpb.KV/Put", "/etcdserverpb.KV/Range"
TRACE = int("4bf92f3577b34da6a3ce929d0e0e4736", 16)
PARENT = int("00f067aa0ba902b7", 16)
SAMPLED = (("traceparent", f"00-{TRACE:032x}-{PARENT:016x}-01"), ("tracestate", "shop=basket"))
UNSAMPLED = (("traceparent", f"00-{TRACE:032x}-{PARENT:016x}-00"),)
ON = Tracing(enabled=True)


def tree(spans: list[ReadableSpan]) -> dict[str, str]:
    """Name and member of each span, with those of its parent."""
    names = {span.context.span_id: name_of(span) for span in spans}
    parents = {name_of(span): span.parent.span_id if span.parent else 0 for span in spans}
    return {name: names.get(parent, f"{parent:x}") for name, parent in parents.items()}


def name_of(span: ReadableSpan) -> str:
    return f"{span.resource.attributes['raftkv.member']} {span.name.removeprefix('raftkv.')}"


async def call(endpoint: str, path: str, request, metadata=()) -> bytes:
    channel = Channel([endpoint])
    try:
        return await channel.unary(path, request.SerializeToString(), 20.0, metadata)
    finally:
        await channel.close()


async def test_a_put_to_a_follower_is_one_tree_through_the_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with running(tmp_path, monkeypatch, [ON, ON, ON]) as (members, endpoints, spans):
        follower = next(at for at, member in enumerate(members) if member.node.role != StateRole.LEADER)
        leader = next(at for at, member in enumerate(members) if member.node.role == StateRole.LEADER)
        # Requests of others are under way meanwhile: they leave no trace.
        for endpoint in endpoints:
            await call(endpoint, PUT, rpc_pb2.PutRequest(key=b"other"))
        await call(endpoints[follower], PUT, rpc_pb2.PutRequest(key=b"secret-key", value=b"secret-value"), SAMPLED)
        await call(endpoints[leader], PUT, rpc_pb2.PutRequest(key=b"other"), UNSAMPLED)
        await spans.wait(lambda: len(spans.all) >= 12)
        one, other = f"m{follower}", f"m{leader}"
        put, part = f"{one} etcdserverpb.KV/Put", f"{other} Peer/Propose"
        own = ("check", "propose", "forward", "wal.sync", "replicate", "apply", "respond")
        assert tree(spans.all) == {
            put: f"{PARENT:x}",
            **{f"{one} {name}": put for name in own},
            part: f"{one} forward",
            **{f"{other} {name}": part for name in ("propose", "wal.sync", "replicate")},
        }
        assert {span.context.trace_id for span in spans.all} == {TRACE}
        assert {span.context.trace_state.get("shop") for span in spans.all} == {"basket"}
        for span in spans.all:
            assert span.start_time <= span.end_time, span.name
        (root,) = spans.of("etcdserverpb.KV/Put")
        assert dict(root.attributes) | {"network.peer.port": 0} == {
            "rpc.system": "grpc",
            "rpc.service": "etcdserverpb.KV",
            "rpc.method": "Put",
            "rpc.grpc.status_code": 0,
            "network.peer.address": "127.0.0.1",
            "network.peer.port": 0,
        }
        assert "secret" not in "".join(span.to_json() for span in spans.all)


async def test_the_librarys_call_is_above_the_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with running(tmp_path, monkeypatch, [ON]) as (_, endpoints, spans):
        provider = TracerProvider(resource=Resource({"raftkv.member": "program"}))
        provider.add_span_processor(SimpleSpanProcessor(spans))
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
        async with aio.connect(endpoints[0]) as kv:
            with provider.get_tracer("program").start_as_current_span("work"):
                await kv.put("a", "b")
        await spans.wait(lambda: len(spans.all) >= 9)
        assert {name: parent for name, parent in tree(spans.all).items() if "KV/Put" in name} == {
            "program etcdserverpb.KV/Put": "program work",
            "m0 etcdserverpb.KV/Put": "program etcdserverpb.KV/Put",
        }
        assert len({span.context.trace_id for span in spans.all}) == 1


async def test_a_read_of_a_follower_shows_the_leaders_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with running(tmp_path, monkeypatch, [ON, ON, ON]) as (members, endpoints, spans):
        follower = next(at for at, member in enumerate(members) if member.node.role != StateRole.LEADER)
        leader = next(at for at, member in enumerate(members) if member.node.role == StateRole.LEADER)
        await call(endpoints[follower], RANGE, rpc_pb2.RangeRequest(key=b"a"), SAMPLED)
        await spans.wait(lambda: len(spans.all) >= 5)
        read = f"m{follower} etcdserverpb.KV/Range"
        assert tree(spans.all) == {
            read: f"{PARENT:x}",
            **{f"m{follower} {name}": read for name in ("check", "read_index", "respond")},
            f"m{leader} Peer/ReadIndex": f"m{follower} read_index",
        }


async def test_untraced_members_serve_traced_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with running(tmp_path, monkeypatch, [ON, Tracing(), Tracing()]) as (members, endpoints, spans):
        node = members[0].node
        if node.role == StateRole.LEADER:
            node.transfer_leader(next(peer for peer in node.conf_state.voters if peer != node.settings.member_id))
            await node.wait_until(lambda: node.role != StateRole.LEADER and node.leader != 0)
        await call(endpoints[0], PUT, rpc_pb2.PutRequest(key=b"a", value=b"1"), SAMPLED)
        await call(endpoints[0], RANGE, rpc_pb2.RangeRequest(key=b"a"), SAMPLED)
        await call(endpoints[1], PUT, rpc_pb2.PutRequest(key=b"a", value=b"1"), SAMPLED)
        await spans.wait(lambda: len(spans.all) >= 12)
        assert {span.resource.attributes["raftkv.member"] for span in spans.all} == {"m0"}
        assert len(spans.of("raftkv.forward")) == 1


async def test_refusals_cancellations_and_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    always = Tracing(enabled=True, sampling_rate=1_000_000, service_name="kv", instance_id="i-1")
    async with running(tmp_path, monkeypatch, [always]) as (_members, endpoints, spans):
        await call(endpoints[0], PUT, rpc_pb2.PutRequest(key=b"a"))
        await spans.wait(lambda: len(spans.of("etcdserverpb.KV/Put")) == 1)
        root = spans.of("etcdserverpb.KV/Put")[0]
        assert root.parent is None
        assert (root.resource.attributes["service.name"], root.resource.attributes["service.instance.id"]) == (
            "kv",
            "i-1",
        )
        with pytest.raises(Exception, match="key is not provided"):
            await call(endpoints[0], PUT, rpc_pb2.PutRequest())
        await call(endpoints[0], "/etcdserverpb.Lease/LeaseGrant", rpc_pb2.LeaseGrantRequest(TTL=60))
        await spans.wait(lambda: len(spans.of("etcdserverpb.Lease/LeaseGrant")) == 1)
        refused = spans.of("etcdserverpb.KV/Put")[1]
        assert refused.attributes["rpc.grpc.status_code"] == 3
        assert refused.status.is_unset  # the client's fault
        grant = spans.of("etcdserverpb.Lease/LeaseGrant")[0]
        below = [span.name for span in spans.all if span.parent and span.parent.span_id == grant.context.span_id]
        assert {"raftkv.propose", "raftkv.apply"} <= set(below)


async def test_json_gateway_calls_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with running(tmp_path, monkeypatch, [ON]) as (_, endpoints, spans):
        host, _, port = endpoints[0].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"key": "YQ=="}'
        fields = [f"{name}: {value}" for name, value in SAMPLED] + [f"content-length: {len(body)}", "connection: close"]
        head = "\r\n".join(["POST /v3/kv/put HTTP/1.1", f"host: {endpoints[0]}", *fields, "", ""])
        writer.write(head.encode() + body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        await spans.wait(lambda: len(spans.all) >= 7)
        assert tree(spans.of("etcdserverpb.KV/Put")) == {"m0 etcdserverpb.KV/Put": f"{PARENT:x}"}
        assert len(spans.of("raftkv.wal.sync")) == 1
