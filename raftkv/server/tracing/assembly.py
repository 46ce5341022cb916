"""Creates and connects the parts of a member's tracing; other packages use only this module.

    tracing = make_tracing(config, registry)     # None: off, and nothing of opentelemetry is imported
    Server(..., around=(..., tracing.calls.around)); Node(..., stages=tracing.stages)
    await asyncio.to_thread(tracing.thread.close)

``TracedCalls`` wraps every handler. A call is traced if its client records the trace (the flag ``sampled`` of
``traceparent``). A call without a trace is traced with the probability of ``--distributed-tracing-sampling-rate``. This
is etcd's rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import random
from time import time_ns
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.registry import CollectorRegistry

from raftkv.config import SAMPLING_WHOLE, ServerConfig
from raftkv.errors import ConfigError
from raftkv.raft.types import Message
from raftkv.rpc.server.calls import ServerCall, UnaryCall
from raftkv.rpc.server.router import Kind
from raftkv.rpc.server.stream import ListenedCall, StreamCall
from raftkv.server.tracing.peers import TracedEncoder, decoder
from raftkv.server.tracing.recording import SERVER, Export, Recording, current, parse
from raftkv.server.tracing.stages import TracedStages

if TYPE_CHECKING:
    from raftkv.server.tracing.exporter import SpanThread


class TracedCalls:
    """Wraps handlers of calls.

    Arguments:
        export: takes recordings of calls that have ended.
        sampling_rate: number of traced calls per million calls without a trace.
    """

    def __init__(self, export: Export, sampling_rate: int) -> None:
        self._export = export
        self._share = sampling_rate / SAMPLING_WHOLE

    def around(self, path: str, kind: Kind, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper that traces the calls of a handler (``router.Around``)."""
        name = path[1:]
        if kind is Kind.LISTENED:

            def handle_listened(call: ListenedCall) -> None:
                self._begin(call, name)
                handler(call)

            return handle_listened
        if kind is Kind.STREAM:

            async def handle_stream(call: StreamCall) -> None:
                recording = self._begin(call, name)
                if recording is not None:
                    # The task belongs to this call, and ends with it.
                    current.set(recording)
                await handler(call)

            return handle_stream

        def handle(call: UnaryCall, message: bytes) -> None:
            recording = self._begin(call, name)
            if recording is None:
                handler(call, message)
                return
            token = current.set(recording)
            try:
                handler(call, message)
            finally:
                current.reset(token)

        return handle

    def _begin(self, call: ServerCall, name: str) -> Recording | None:
        """Begin to record a call; None if the call is not traced."""
        context = parse(call.headers)
        if not (random() < self._share if context is None else context.is_sampled):
            return None
        recording = Recording(name, context, SERVER, time_ns())
        recording.address = call.peer.address
        export = self._export

        def ended(code: int, answer: bytes) -> None:
            now_ns = time_ns()
            if recording.done_ns:
                recording.add("raftkv.respond", recording.done_ns, now_ns)
            recording.end(now_ns, code)
            export(recording)

        call.add_observer(ended)
        return recording


MISSING: Final = (
    "--enable-distributed-tracing needs OpenTelemetry, which is not installed ({}): pip install 'raftkv[tracing]'"
)


@dataclass(frozen=True, slots=True)
class MemberTracing:
    """The tracing parts of a member.

    Attributes:
        thread: sends spans.
        calls: wraps handlers.
        stages: called by the node.
        encoder, decode: for messages between members.
    """

    thread: SpanThread
    calls: TracedCalls
    stages: TracedStages
    encoder: TracedEncoder
    decode: Callable[[bytes], list[Message]]


def check_installed() -> None:
    """Import the modules for tracing before the loop starts: this takes 0.2 s.

    Raises:
        ConfigError: the extra ``tracing`` is not installed.
    """
    try:
        import raftkv.server.tracing.exporter  # noqa: F401
    except ImportError as error:
        raise ConfigError(MISSING.format(error)) from None


def make_tracing(config: ServerConfig, registry: CollectorRegistry) -> MemberTracing:
    """Start tracing.

    Arguments:
        config: settings of the member, with tracing enabled.
        registry: registry of its metrics.

    Raises:
        ConfigError: the extra ``tracing`` is not installed.
    """
    check_installed()
    from raftkv.server.tracing.exporter import SpanThread, make_exporter

    settings = config.tracing
    thread = SpanThread(make_exporter(settings.address), settings, config.name)
    registry.register(thread)
    stages = TracedStages(thread.add)
    calls = TracedCalls(thread.add, settings.sampling_rate)
    return MemberTracing(thread, calls, stages, TracedEncoder(stages), decoder(stages))
