"""The recording of one traced request on one member: a list of times, which a thread turns into spans.

    context = parse(call.headers)                    # the client's context; None: the client traces nothing
    recording = Recording("etcdserverpb.KV/Put", context, SERVER, time_ns())
    recording.add("raftkv.check", began_ns, ended_ns)
    recording.end(time_ns())

Times are nanoseconds since the epoch. Ids are random and need not be secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import InitVar, dataclass, field
from random import getrandbits
from typing import Final, NamedTuple

INTERNAL, SERVER, CLIENT = range(3)
"""Kinds of spans: inside a process; on the answering side; on the asking side."""

STATE_BYTES_MAX: Final = 512
"""A longer ``tracestate`` is dropped, as W3C Trace Context allows."""

SPANS_MAX: Final = 64
"""Spans of one recording: of a call with more proposals (a lock that waits for long) the first ones are kept."""

_PARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1


class Context(NamedTuple):
    """The span that a request belongs to, in this process or another.

    Attributes:
        trace_id, span_id: 128 and 64 bits.
        state: text of ``tracestate``, forwarded unchanged.
        is_sampled: whether the sender records the trace.
    """

    trace_id: int
    span_id: int
    state: str = ""
    is_sampled: bool = True


def parse(headers: Iterable[tuple[bytes, bytes]]) -> Context | None:
    """Return the context of a request; None if there is none or it is malformed (W3C Trace Context).

    Arguments:
        headers: headers of the request.
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
    """Return a random span id."""
    return getrandbits(64) or 1


@dataclass(eq=False, slots=True)
class Recording:
    """One traced request, or one member's part of a forwarded request.

    Arguments:
        name: name of its span.
        parent: parent span; None: a trace begins here.
        kind: kind of its span.
        began_ns: begin of its span.

    Attributes:
        spans: child spans that have ended.
        asked_ns: when it last requested a proposal or a confirmation; initially its begin.
        done_ns: when that request was fulfilled; 0: not yet.
        code: gRPC code, once it has ended; -1 for a part without one.
        address: address of the client.
        is_over: whether it has ended, after which nothing is added.
    """

    name: str
    parent: InitVar[Context | None]
    kind: int
    began_ns: int
    trace_id: int = field(init=False)
    parent_id: int = field(init=False)
    state: str = field(init=False)
    span_id: int = field(default_factory=new_id)
    spans: list[Span] = field(default_factory=list)
    asked_ns: int = 0
    done_ns: int = 0
    ended_ns: int = 0
    code: int = -1
    address: str = ""
    is_over: bool = False

    def __post_init__(self, parent: Context | None) -> None:
        self.asked_ns = self.began_ns
        self.trace_id, self.parent_id, self.state, _ = parent or Context(getrandbits(128) or 1, 0)

    def add(self, name: str, began_ns: int, ended_ns: int, kind: int = INTERNAL, span_id: int = 0) -> None:
        """Add a child span.

        Arguments:
            name, kind: of the span.
            began_ns, ended_ns: times of the span.
            span_id: id of the span, if others know it already; 0: a random one.
        """
        if not self.is_over and len(self.spans) < SPANS_MAX:
            self.spans.append(Span(name, span_id or new_id(), self.span_id, began_ns, ended_ns, kind))

    def end(self, ended_ns: int, code: int = -1) -> None:
        """End the recording; later spans are not added.

        Arguments:
            ended_ns: time of the end.
            code: gRPC code.
        """
        self.ended_ns, self.code, self.is_over = ended_ns, code, True


current: ContextVar[Recording | None] = ContextVar("raftkv_recording", default=None)
"""The recording of the current traced call, in its handler and in its tasks."""

Export = Callable[[Recording], None]
"""Sends a recording that has ended, or drops it."""
