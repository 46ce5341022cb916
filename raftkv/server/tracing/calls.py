"""Around every handler: which calls are traced, when they began, how they ended.

A call is traced if its client says that it records the trace (the flag ``sampled`` of ``traceparent``), and else, if it
brings no trace, with the probability of ``--distributed-tracing-sampling-rate``: etcd's rule.
"""

from __future__ import annotations

from collections.abc import Callable
from random import random
from time import time_ns
from typing import Any, Protocol

from raftkv.config import SAMPLING_WHOLE
from raftkv.rpc.server.calls import ServerCall, UnaryCall
from raftkv.rpc.server.listened import ListenedCall
from raftkv.rpc.server.router import Kind
from raftkv.rpc.server.stream import StreamCall
from raftkv.server.tracing.recording import SERVER, Recording, current, parse


class Exporter(Protocol):
    """Takes what has ended."""

    def add(self, recording: Recording) -> None:
        """Have it sent, or drop it."""


class TracedCalls:
    """Wraps handlers of calls.

    Arguments:
        exporter: takes recordings of calls that have ended.
        sampling_rate: of a million calls that bring no trace.
    """

    def __init__(self, exporter: Exporter, sampling_rate: int) -> None:
        self._exporter = exporter
        self._share = sampling_rate / SAMPLING_WHOLE

    def around(self, path: str, kind: Kind, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Return a handler that traces its calls (``router.Around``)."""
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
                    # The task is this call's own, and ends with it.
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
        """Begin to record a call; None if it is not traced."""
        context = parse(call.headers)
        if not (random() < self._share if context is None else context.is_sampled):
            return None
        recording = Recording(name, context, SERVER, time_ns())
        recording.address = call.peer.address
        before, exporter = call.observer, self._exporter

        def ended(code: int, answer: bytes) -> None:
            if before is not None:
                before(code, answer)
            now_ns = time_ns()
            if recording.done_ns:
                recording.add("raftkv.respond", recording.done_ns, now_ns)
            recording.end(now_ns, code)
            exporter.add(recording)

        call.observer = ended
        return recording
