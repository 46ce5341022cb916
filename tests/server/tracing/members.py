"""Members that trace, in one event loop on loopback ports, and the spans that they have sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from raftkv.config import ServerConfig, Tracing
from raftkv.server import member as member_module
from raftkv.server.member import Member
from raftkv.server.tracing import exporter
from tests.procs import free_port

PATIENCE_S = 60.0
POLL_S = 0.1


class Spans(InMemorySpanExporter):
    """What all members have sent."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._have_come = asyncio.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        self._loop.call_soon_threadsafe(self._have_come.set)
        return result

    @property
    def all(self) -> Sequence[ReadableSpan]:
        return self.get_finished_spans()

    def of(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    async def wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._have_come.clear()
                await self._have_come.wait()

    def shutdown(self) -> None:
        """Take spans as before: members share it, and the first that stops shuts it down."""


@asynccontextmanager
async def running(
    root: Path, monkeypatch: pytest.MonkeyPatch, tracing: Sequence[Tracing], **settings: Any
) -> AsyncIterator[tuple[list[Member], list[str], Spans]]:
    """Run a member for each setting of tracing, with further settings; yield them, their endpoints and their spans."""
    spans = Spans()
    monkeypatch.setattr(exporter, "make_exporter", lambda address: spans)
    monkeypatch.setattr(exporter, "GATHER_S", 0.01)
    monkeypatch.setattr(member_module, "hand_over", AsyncMock())  # all stop: it would wait for an election
    clients, peers = ([free_port() for _ in tracing] for _ in range(2))
    cluster = ",".join(f"m{number}=http://127.0.0.1:{port}" for number, port in enumerate(peers))
    members = [
        Member(
            ServerConfig(
                name=f"m{number}",
                data_dir=str(root / f"m{number}"),
                listen_client_urls=(f"http://127.0.0.1:{clients[number]}",),
                advertise_client_urls=(f"http://127.0.0.1:{clients[number]}",),
                listen_peer_urls=(f"http://127.0.0.1:{peers[number]}",),
                initial_advertise_peer_urls=(f"http://127.0.0.1:{peers[number]}",),
                initial_cluster=cluster,
                heartbeat_interval_s=0.1,
                election_timeout_s=PATIENCE_S / 2,  # a stall of a loaded machine elects no other leader
                tracing=setting,
                unsafe_no_fsync=True,
                **settings,
            )
        )
        for number, setting in enumerate(tracing)
    ]
    async with asyncio.TaskGroup() as group:
        for member in members:
            group.create_task(member.run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await _elect(members)
            yield members, [f"127.0.0.1:{port}" for port in clients], spans
        finally:
            for member in members:
                member.stop()


async def _elect(members: Sequence[Member]) -> None:
    """Have the first member stand for election until all follow it: others may not be there yet to vote."""
    for member in members:
        node = member.node
        while node.leader == 0 or node.applied <= 1:
            members[0].node.campaign()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await node.wait_until(lambda node=node: node.leader != 0 and node.applied > 1)
