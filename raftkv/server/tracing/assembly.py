"""Tracing of one member, put together: the only way in.

tracing = make_tracing(config, registry)     # None: off, and nothing of opentelemetry is imported
Server(..., around=(..., tracing.calls.around)); Node(..., stages=tracing.stages)
await asyncio.to_thread(tracing.thread.close)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prometheus_client.registry import CollectorRegistry

from raftkv.config import ServerConfig
from raftkv.errors import ConfigError
from raftkv.raft.types import Message
from raftkv.server.tracing.calls import TracedCalls
from raftkv.server.tracing.peers import TracedEncoder, decoder
from raftkv.server.tracing.stages import TracedStages

if TYPE_CHECKING:
    from raftkv.server.tracing.exporter import SpanThread

MISSING: Final = (
    "--enable-distributed-tracing needs OpenTelemetry, which is not installed ({}): pip install 'raftkv[tracing]'"
)


@dataclass(frozen=True, slots=True)
class MemberTracing:
    """What a member that traces hands to its parts.

    Attributes:
        thread: sends spans.
        calls: wraps handlers.
        stages: hears from the node.
        encoder, decode: for the messages of members.
    """

    thread: SpanThread
    calls: TracedCalls
    stages: TracedStages
    encoder: TracedEncoder
    decode: Callable[[bytes], list[Message]]


def check_installed() -> None:
    """Import what tracing needs, before the loop begins to turn: it takes 0.2 s.

    Raises:
        ConfigError: the extra ``tracing`` is not installed.
    """
    try:
        import raftkv.server.tracing.exporter  # noqa: F401
    except ImportError as error:
        raise ConfigError(MISSING.format(error)) from None


def make_tracing(config: ServerConfig, registry: CollectorRegistry) -> MemberTracing:
    """Begin to trace.

    Arguments:
        config: of the member, with tracing enabled.
        registry: of its metrics.

    Raises:
        ConfigError: the extra ``tracing`` is not installed.
    """
    check_installed()
    from raftkv.server.tracing.exporter import SpanThread, make_exporter

    settings = config.tracing
    thread = SpanThread(make_exporter(settings.address), settings, config.name)
    registry.register(thread)
    stages = TracedStages(thread)
    calls = TracedCalls(thread, settings.sampling_rate)
    return MemberTracing(thread, calls, stages, TracedEncoder(stages), decoder(stages))
