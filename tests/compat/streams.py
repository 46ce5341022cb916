"""Streaming calls to one cluster: what came on each, and waiting for it.

grpcio reads each stream in a thread of its own. All streams of a `Streams` tell one condition, so a test waits for any
state of any of them:

    streams = Streams(wire)
    watch = streams.open("etcdserverpb.Watch/Watch")
    watch.send(rpc_pb2.WatchRequest(...))
    streams.wait(lambda: len(watch.messages) > 0, "the answer")
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from tests.compat.wire import Answer, Wire, response_class

WAIT_MAX_S = 120.0
CALL_MAX_S = 240.0


class NothingCameError(Exception):
    """What was waited for did not come in time; the text says what that was."""


class Stream:
    """One call: the messages that came, and how it ended.

    Attributes:
        messages: what came, in order.
        ended: code and text, once the server has ended the call or it was closed here.
    """

    def __init__(self, streams: Streams, method: str, member: int, metadata: tuple[tuple[str, str], ...]) -> None:
        self.messages: list[Any] = []
        self.ended: Answer | None = None
        self._streams = streams
        self._message = response_class(method)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # On the wire a call that streams in one direction only looks the same, with one message in the other.
        call = streams.wire.channel(member).stream_stream(f"/{method}")
        self._call: Any = call(self._outgoing(), timeout=streams.call_max_s, metadata=metadata)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _outgoing(self) -> Iterator[bytes]:
        while (payload := self._requests.get()) is not None:
            yield payload

    def _read(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for payload in self._call:
                with self._streams.changed:
                    self.messages.append(self._message.FromString(payload))
                    self._streams.changed.notify_all()
        with self._streams.changed:
            self.ended = Answer(self._call.code().name, self._call.details() or "", None)
            self._streams.changed.notify_all()

    def send(self, request: Any) -> None:
        """Send one message."""
        self._requests.put(request if isinstance(request, bytes) else request.SerializeToString())

    def half_close(self) -> None:
        """Say that no more messages come from here."""
        self._requests.put(None)

    def close(self) -> None:
        """Cancel the call and wait for its thread."""
        self._requests.put(None)
        self._call.cancel()
        self._thread.join(WAIT_MAX_S)


class Streams:
    """The streaming calls to one cluster, each with a deadline."""

    def __init__(self, wire: Wire, call_max_s: float = CALL_MAX_S) -> None:
        self.wire = wire
        self.call_max_s = call_max_s
        self.changed = threading.Condition()
        self._open: list[Stream] = []

    def open(self, method: str, member: int = 0, metadata: tuple[tuple[str, str], ...] = ()) -> Stream:
        """Begin a call."""
        stream = Stream(self, method, member, metadata)
        self._open.append(stream)
        return stream

    def forget(self, stream: Stream) -> None:
        """Take no more care of a call that is over."""
        self._open.remove(stream)

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float | None = None) -> None:
        """Wait until a condition on what came holds.

        Raises:
            NothingCameError: it does not after `timeout_s`, or `WAIT_MAX_S`.
        """
        timeout_s = WAIT_MAX_S if timeout_s is None else timeout_s
        with self.changed:
            if not self.changed.wait_for(condition, timeout_s):
                raise NothingCameError(f"waited {timeout_s:g} s in vain for {what}")

    def tell(self, _: object = None) -> None:
        """Have `wait` look again, after something else than a message has changed."""
        with self.changed:
            self.changed.notify_all()

    def close(self) -> None:
        """Cancel every call."""
        for stream in self._open:
            stream.close()
        self._open.clear()

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
