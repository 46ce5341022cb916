"""Spans of the client's calls, for programs that use OpenTelemetry; their context goes to the members.

    metadata: traceparent: 00-<trace>-<span>-01, and tracestate if there is one (W3C Trace Context)

Owns the test whether anybody traces: ``opentelemetry.trace`` is loaded, because the program (or ``tracing=True``) has
imported it. This module imports nothing of it, so a program without it pays one look into a dict for a call.

A call is a span of kind client, below the span that is current where the call is made; it is current nowhere itself.
Streams carry no context: those of watches and keep-alives are shared by all that the client does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from raftkv.errors import ConfigError, StatusError

T = TypeVar("T")

Pairs = tuple[tuple[str, str], ...]
"""Metadata: names and values."""

API: Final = "opentelemetry.trace"
loaded = sys.modules
"""Has ``API`` as soon as the program uses OpenTelemetry."""

_tracer: Any = None
_provider: Any = None


def require() -> None:
    """Load OpenTelemetry's API, for a program that asks for spans and has not imported it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import opentelemetry.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"tracing needs OpenTelemetry: pip install opentelemetry-api ({error})") from None


def traced(path: str, metadata: Pairs, call: Callable[[Pairs], Coroutine[Any, Any, T]]) -> Coroutine[Any, Any, T]:
    """Make a call that is a span, below the current one.

    Arguments:
        path: of the method.
        metadata: of the call.
        call: makes it, with the metadata that it is given.
    """
    api = loaded[API]
    tracer = _find_tracer(api)
    if tracer is None:
        return call(metadata)
    service, _, method = path[1:].partition("/")
    span = tracer.start_span(
        path[1:],
        kind=api.SpanKind.CLIENT,
        attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": method},
    )
    context = span.get_span_context()
    if context.is_valid:
        metadata += _headers(context)
    made = call(metadata)
    return _until_end(api, span, made) if span.is_recording() else made


def _find_tracer(api: Any) -> Any:
    """Return the tracer of the present provider; None while another thread is still importing the API."""
    global _tracer, _provider
    find = getattr(api, "get_tracer_provider", None)
    provider = None if find is None else find()
    if provider is not _provider:
        _provider, _tracer = provider, None if provider is None else provider.get_tracer("raftkv")
    return _tracer


def _headers(context: Any) -> Pairs:
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 0xFF:02x}"
    state = context.trace_state.to_header() if context.trace_state else ""
    return (("traceparent", parent), ("tracestate", state)) if state else (("traceparent", parent),)


async def _until_end(api: Any, span: Any, made: Coroutine[Any, Any, T]) -> T:
    try:
        answer = await made
    except StatusError as error:
        span.set_attribute("rpc.grpc.status_code", int(error.code))
        span.set_status(api.Status(api.StatusCode.ERROR, str(error)))
        raise
    else:
        span.set_attribute("rpc.grpc.status_code", 0)
        return answer
    finally:
        span.end()
