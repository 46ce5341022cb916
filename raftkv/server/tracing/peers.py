"""Trace contexts between members: beside the messages of a batch, never in them.

    follower: encoder.batches([PROPOSE, ...])   -> messages, and a TraceContext for each traced request in them
    leader:   decode(batch)                     -> the same messages; its part of those requests begins

A member that traces nothing encodes and decodes batches as usual (``replica.codec``), and ignores the field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from raftkv.apply.wire import field
from raftkv.pb import raft_pb2
from raftkv.raft.types import Message, MessageType
from raftkv.replica.codec import BatchEncoder, messages_of
from raftkv.server.tracing.recording import STATE_BYTES_MAX, Context, Recording
from raftkv.server.tracing.stages import SUBJECT, TracedStages

CONTEXTS_MAX: Final = 64
"""Contexts in one batch; further requests are traced only on the member that received them."""

_TRACES_FIELD: Final = 2
_SUBJECT_BYTES: Final = 8
_TRACE_ID_BYTES: Final = 16


class TracedEncoder(BatchEncoder):
    """Encodes messages, and next to forwarded requests the contexts of their traces.

    Arguments:
        stages: knows which requests are traced.
    """

    def __init__(self, stages: TracedStages) -> None:
        super().__init__()
        self._stages = stages

    def batches(self, messages: Iterable[Message]) -> list[bytes]:
        """Return the batches of ``BatchEncoder``; the first one has all contexts."""
        if self._stages.is_idle:
            return super().batches(messages)
        messages = list(messages)
        contexts = self._contexts(messages)
        first, *others = super().batches(messages)
        return [first + contexts, *others]

    def _contexts(self, messages: list[Message]) -> bytes:
        found = list(zip(self._traced(messages), range(CONTEXTS_MAX), strict=False))
        return b"".join(field(_TRACES_FIELD, _encode(*one).SerializeToString()) for one, _ in found)

    def _traced(self, messages: list[Message]) -> Iterator[tuple[bytes, Recording, int]]:
        stages = self._stages
        for message in messages:
            if message.type == MessageType.PROPOSE:
                for entry in message.entries:
                    if found := stages.forwarded(entry.data):
                        yield entry.data[SUBJECT], *found
            elif message.type == MessageType.READ_INDEX:
                if found := stages.round_of(message.context):
                    yield message.context, *found
            elif message.type == MessageType.READ_INDEX_RESPONSE:
                stages.answered(message.context)


def _encode(subject: bytes, recording: Recording, span_id: int) -> raft_pb2.TraceContext:
    return raft_pb2.TraceContext(
        subject=subject,
        trace_id=recording.trace_id.to_bytes(_TRACE_ID_BYTES, "big"),
        span_id=span_id.to_bytes(8, "big"),
        state=recording.state,
    )


def decoder(stages: TracedStages) -> Callable[[bytes], list[Message]]:
    """Return a function that decodes a batch, as ``replica.codec.decode``, and begins this member's traces for it.

    Arguments:
        stages: takes the contexts.
    """

    def decode(batch: bytes) -> list[Message]:
        parsed = raft_pb2.MessageBatch.FromString(batch)
        messages = messages_of(parsed)
        if parsed.traces:
            reads = {message.context for message in messages if message.type == MessageType.READ_INDEX}
            for trace in parsed.traces[:CONTEXTS_MAX]:
                if (context := _context(trace)) is not None:
                    stages.received(trace.subject, context, is_read=trace.subject in reads)
        return messages

    return decode


def _context(trace: raft_pb2.TraceContext) -> Context | None:
    """Return the context sent by another member; None if it is malformed, which is no reason to end a connection."""
    trace_id, span_id = int.from_bytes(trace.trace_id, "big"), int.from_bytes(trace.span_id, "big")
    sizes = len(trace.subject), len(trace.trace_id), len(trace.span_id)
    if sizes != (_SUBJECT_BYTES, _TRACE_ID_BYTES, 8) or not trace_id or not span_id:
        return None
    return Context(trace_id, span_id, trace.state[:STATE_BYTES_MAX])
