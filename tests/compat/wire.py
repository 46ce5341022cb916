"""The grpcio side of the compatibility tests: identical bytes out, an `Answer` in.

grpcio is the independent gRPC implementation here: nothing of `raftkv.rpc` or `raftkv.client` is used, so a
mistake shared by our server and our client cannot hide. Requests are serialised once and sent as raw bytes, so
every server under comparison gets the very same ones.

    with Wire(["127.0.0.1:2379"]) as wire:
        answer = wire.call("etcdserverpb.KV/Put", rpc_pb2.PutRequest(key=b"k"))
        assert answer.code == "OK"
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc

from raftkv.pb import services

DEADLINE_S = 120.0
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    # Without this a new channel inherits the pause that an older one makes before it tries a restarted member again.
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True)
class Answer:
    """What a server said: status code by name, status text, and the response (None after an error)."""

    code: str
    text: str
    message: Any

    @property
    def revision(self) -> int:
        """The revision in the response's header, 0 if there is none."""
        return self.message.header.revision if self.message is not None else 0


@dataclass(frozen=True)
class Pending:
    """A call under way."""

    method: str
    future: Any

    @property
    def done(self) -> bool:
        """Whether the call has ended."""
        return bool(self.future.done())

    def answer(self) -> Answer:
        """Wait for the end of the call and return its answer."""
        status = self.future.code().name
        if status != "OK":
            return Answer(status, self.future.details() or "", None)
        return Answer("OK", "", response_class(self.method).FromString(self.future.result()))


def response_class(method: str) -> Any:
    """Return the response's message class of `package.Service/Method`."""
    service, _, name = method.partition("/")
    return services.SERVICES[service][name].response


class Wire:
    """Channels to the members of one cluster, one TCP connection each."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self.endpoints = list(endpoints)
        self._connect()

    def _connect(self) -> None:
        self._channels = [grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS) for endpoint in self.endpoints]
        self._calls: dict[tuple[int, str], Any] = {}

    def channel(self, member: int = 0) -> grpc.Channel:
        """The connection to a member, for calls that stream."""
        return self._channels[member]

    def reconnect(self) -> None:
        """Begin with new connections: an old one would wait before it tries again to reach a restarted member."""
        self.close()
        self._connect()

    def start(
        self,
        method: str,
        payload: bytes,
        member: int = 0,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        timeout_s: float = DEADLINE_S,
    ) -> Pending:
        """Send `payload` to `package.Service/Method` of a member and return without waiting."""
        call = self._calls.get((member, method))
        if call is None:
            call = self._calls[member, method] = self._channels[member].unary_unary(f"/{method}")
        return Pending(method, call.future(payload, timeout=timeout_s, metadata=metadata))

    def call(
        self, method: str, request: Any, member: int = 0, metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> Answer:
        """Call and wait."""
        payload = request if isinstance(request, bytes) else request.SerializeToString()
        return self.start(method, payload, member, metadata).answer()

    def stream(self, method: str, request: Any, member: int = 0) -> tuple[Answer, list[Any]]:
        """Call a method that answers with a stream; return how it ended (without a message) and what came."""
        call = self._channels[member].unary_stream(f"/{method}")(request.SerializeToString(), timeout=DEADLINE_S)
        messages: list[Any] = []
        try:
            messages.extend(response_class(method).FromString(part) for part in call)
        except grpc.RpcError:
            pass  # the status is read below
        return Answer(call.code().name, call.details() or "", None), messages

    def close(self) -> None:
        """Close every connection."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
