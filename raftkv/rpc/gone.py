"""What connections leave behind in asyncio when they have gone, and what it would hold for each that is open.

The collector hardly ever runs in a member (its pauses would be felt), so whoever opens connections and drops them must
not be able to leave reference cycles behind. This module owns the parts of that which are not our own objects:
asyncio's transports, and exceptions whose frames hold them.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import sslproto
from collections.abc import Iterable
from typing import Final

from raftkv.rpc.h2 import ErrorCode, H2Connection, H2Error, window_update_frame


class _GoneTransport(asyncio.Transport):
    """Stands in a protocol for the transport that has gone."""

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return True

    def is_reading(self) -> bool:
        return False

    def write(self, data: object) -> None:
        del data

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


GONE: Final[asyncio.Transport] = _GoneTransport()

FREE_BYTES_PER_STEP: Final = 4 * 1024 * 1024
"""Giving memory back to the system takes about 0.2 ms a MiB."""
FREE_STREAMS_PER_STEP: Final = 50
"""To end a stream takes about 20 us, however little it has queued."""


async def free_in_steps(h2: H2Connection, stream_ids: Iterable[int]) -> None:
    """Free what an engine has queued on streams, bit by bit: hundreds of MiB at once would hold the loop.

    Arguments:
        h2: of a connection that is gone; nobody else has it.
        stream_ids: those that may have something queued.
    """
    left_bytes = h2.queued_body_size()
    for number, stream_id in enumerate(stream_ids, start=1):
        while _is_large(h2, stream_id) and _take_out(h2, stream_id):
            left_bytes = h2.queued_body_size()
            await asyncio.sleep(0)
        with contextlib.suppress(H2Error):
            h2.reset(stream_id, ErrorCode.CANCEL)
            h2.data_to_send(FREE_BYTES_PER_STEP)  # the stream ends, and is freed, as its reset leaves
            h2.events()
        if number % FREE_STREAMS_PER_STEP == 0 or left_bytes - h2.queued_body_size() >= FREE_BYTES_PER_STEP:
            left_bytes = h2.queued_body_size()
            await asyncio.sleep(0)


def _is_large(h2: H2Connection, stream_id: int) -> bool:
    try:
        return h2.queued_body_size(stream_id) > FREE_BYTES_PER_STEP
    except H2Error:
        return False


def _take_out(h2: H2Connection, stream_id: int) -> bool:
    """Open the windows as the client might have, and drop what leaves; whether something did.

    A reset would free all that the stream has queued at once.
    """
    before = h2.queued_body_size(stream_id)
    try:
        if h2.stream_remote_window_size(stream_id) < FREE_BYTES_PER_STEP:
            h2.receive_data(window_update_frame(stream_id, FREE_BYTES_PER_STEP))
        if h2.remote_window_size < FREE_BYTES_PER_STEP:
            h2.receive_data(window_update_frame(0, FREE_BYTES_PER_STEP))
        h2.data_to_send(FREE_BYTES_PER_STEP)
        h2.events()
        return h2.queued_body_size(stream_id) < before
    except H2Error:
        return False


def nothing() -> None:
    """Stand for a callback that nobody needs any more."""


def release(transport: asyncio.BaseTransport | None) -> None:
    """Let go of a transport whose connection is lost.

    A socket transport of Python 3.11 and 3.12 keeps a bound method of itself, so none of them is freed by its
    reference count.
    """
    if transport is not None and hasattr(transport, "_read_ready_cb"):
        transport._read_ready_cb = None


def share_read_buffer(transport: asyncio.BaseTransport | None, buffer: memoryview) -> None:
    """Have the TLS protocol above a socket read into ``buffer``, which others use too, between two turns.

    asyncio gives each TLS connection 256 KiB of its own, from the handshake on: 10,000 of them that idle, or never
    finish the handshake, held 2.8 GB. What was read is handed to OpenSSL at once, so one buffer is enough for all.

    Args:
        transport: of the socket below TLS.
        buffer: at least as long as asyncio's own.
    """
    protocol = transport.get_protocol() if transport is not None and not transport.is_closing() else None
    if isinstance(protocol, sslproto.SSLProtocol) and hasattr(protocol, "_ssl_buffer_view"):
        vars(protocol).update(_ssl_buffer=buffer, _ssl_buffer_view=buffer)


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error that was dealt with: their frames hold the connection, and the error itself."""
    while error is not None:
        error.__traceback__ = None
        cause, error.__context__ = error.__context__, None
        error = cause
