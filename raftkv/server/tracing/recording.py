"""The recording of one traced request on one member: times, until a thread makes spans of them.

    context = parse(call.headers)                    # of the client; None: it traces nothing
    recording = Recording("etcdserverpb.KV/Put", context, SERVER, time_ns())
    recording.add("raftkv.check", began_ns, ended_ns)
    recording.end(time_ns())

Times are nanoseconds since the epoch. Ids are drawn here and need not be secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from random import getrandbits
from typing import Final, NamedTuple

INTERNAL, SERVER, CLIENT = range(3)
"""Kinds of spans: within a process; the answering end; the asking end."""

STATE_BYTES_MAX: Final = 512
"""A longer ``tracestate`` is dropped, as W3C Trace Context allows."""

SPANS_MAX: Final = 64
"""Spans of one recording: a call that proposes more often (a lock that waits long) shows its first ones."""

_PARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1


class Context(NamedTuple):
    """The span that a request belongs to, in this process or another.

    Attributes:
        trace_id, span_id: 128 and 64 bits.
        state: text of ``tracestate``, passed on as it is.
        is_sampled: whether its maker records it.
    """

    trace_id: int
    span_id: int
    state: str = ""
    is_sampled: bool = True


def parse(headers: Iterable[tuple[bytes, bytes]]) -> Context | None:
    """Return the context that a request brings, None if there is none or it cannot be read (W3C Trace Context).

    Arguments:
        headers: of the request.
    """
    parent = state = b""
    for name, value in headers:
        if name == b"traceparent":
            parent = value
        elif name == b"tracestate":
            state = value
    if not parent:
        return None
    match = _PARENT.fullmatch(parent)
    if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    text = state.decode("ascii", "ignore") if len(state) <= STATE_BYTES_MAX else ""
    return Context(trace_id, span_id, text, bool(int(match[4], 16) & _SAMPLED))


class Span(NamedTuple):
    """One span that has ended."""

    name: str
    span_id: int
    parent_id: int
    began_ns: int
    ended_ns: int
    kind: int = INTERNAL


def new_id() -> int:
    """Draw the id of a span."""
    return getrandbits(64) or 1


class Recording:
    """One traced request, or one part of a request of another member.

    Arguments:
        name: of its span.
        parent: where it belongs; None: a trace begins here.
        kind: of its span.
        began_ns: when it began.

    Attributes:
        spans: those below it that have ended.
        asked_ns: when it last asked for something to be proposed or confirmed, or began.
        done_ns: when what it asked for was there; 0: not yet.
        code: of gRPC, once it has ended; -1 for a part that has none.
        address: of the client.
        is_over: whether it has ended; nothing more is added then.
    """

    __slots__ = (
        "address",
        "asked_ns",
        "began_ns",
        "code",
        "done_ns",
        "ended_ns",
        "is_over",
        "kind",
        "name",
        "parent_id",
        "span_id",
        "spans",
        "state",
        "trace_id",
    )

    def __init__(self, name: str, parent: Context | None, kind: int, began_ns: int) -> None:
        self.name = name
        self.trace_id = parent.trace_id if parent is not None else getrandbits(128) or 1
        self.parent_id = parent.span_id if parent is not None else 0
        self.state = parent.state if parent is not None else ""
        self.span_id = new_id()
        self.kind = kind
        self.began_ns = self.asked_ns = began_ns
        self.ended_ns = self.done_ns = 0
        self.spans: list[Span] = []
        self.code = -1
        self.address = ""
        self.is_over = False

    def add(self, name: str, began_ns: int, ended_ns: int, kind: int = INTERNAL, span_id: int = 0) -> None:
        """Note a span below this one.

        Arguments:
            name, kind: of the span.
            began_ns, ended_ns: its times.
            span_id: of the span, if others know it already; 0: draw one.
        """
        if not self.is_over and len(self.spans) < SPANS_MAX:
            self.spans.append(Span(name, span_id or new_id(), self.span_id, began_ns, ended_ns, kind))

    def end(self, ended_ns: int, code: int = -1) -> None:
        """Note the end; what comes later is not added.

        Arguments:
            ended_ns: when.
            code: of gRPC.
        """
        self.ended_ns, self.code, self.is_over = ended_ns, code, True


current: ContextVar[Recording | None] = ContextVar("raftkv_recording", default=None)
"""The traced call whose handler runs, in its own code and in its tasks."""

Export = Callable[[Recording], None]
"""Has a recording that has ended sent, or drops it."""
