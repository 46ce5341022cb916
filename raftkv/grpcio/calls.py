"""The calls of a stub, one class for each kind: unary or with a stream of answers, on ``grpc`` or on ``grpc.aio``.

Besides the request and ``timeout_s``, calls take grpcio's own arguments: ``metadata``, ``credentials``,
``wait_for_ready``, ``compression``. ``plain`` is grpcio's object under a stub's method, for features not offered here,
such as ``plain.future``; it raises grpcio's own errors.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from operator import methodcaller
from typing import Any, Final, Generic, TypeVar

import grpc
import grpc.aio

from raftkv.client.rpc import methods
from raftkv.client.rpc.retry import BASE_S, MAX_S
from raftkv.grpcio.failures import error_of
from raftkv.pb.services import SERVICES, Method

Request = TypeVar("Request")
Answer = TypeVar("Answer")

_PEERS: Final = "raftkvpb.Peer"
"""The only service that clients do not call."""

_serialized: Final = methodcaller("SerializeToString")


class _Call:
    """A method of a stub.

    Attributes:
        plain: grpcio's callable.
    """

    def __init__(self, channel: Any, method: Method) -> None:
        asked, answered = ("stream" if many else "unary" for many in (method.client_streaming, method.server_streaming))
        make = getattr(channel, f"{asked}_{answered}")
        self.plain: Any = make(method.path, _serialized, method.response.FromString)


class _Answers:
    """The answers of a stream.

    Attributes:
        call: grpcio's call object.
    """

    def __init__(self, call: Any) -> None:
        self.call = call
        self._is_left = False

    def cancel(self) -> None:
        """End the call; the iteration ends."""
        self._is_left = True
        self.call.cancel()


class Unary(_Call, Generic[Request, Answer]):
    """A call with one answer."""

    def __call__(self, request: Request, timeout_s: float | None = None, **how: Any) -> Answer:
        """Make the call and return the answer.

        Arguments:
            request: request message.
            timeout_s: time limit of the answer; None: no limit.
            **how: further arguments of grpcio.

        Raises:
            StatusError: the call failed.
        """
        try:
            answer: Answer = self.plain(request, timeout_s, **how)
        except grpc.RpcError as failure:
            raise error_of(failure) from failure
        return answer


class Stream(_Call, Generic[Request, Answer]):
    """A call with a stream of answers."""

    def __call__(self, request: Request, timeout_s: float | None = None, **how: Any) -> Answers[Answer]:
        """Start the call and return its answers.

        Arguments:
            request: request message; for a watch and for keep-alives, an iterator of messages.
            timeout_s: time limit of the whole stream; None: no limit.
            **how: further arguments of grpcio.
        """
        return Answers(self.plain(request, timeout_s, **how))


class Answers(_Answers, Iterator[Answer]):
    """The answers of a stream, as they arrive; as a context manager, it ends the call."""

    def __next__(self) -> Answer:
        try:
            answer: Answer = next(self.call)
        except grpc.RpcError as failure:
            if self._is_left:
                raise StopIteration from None
            raise error_of(failure) from failure
        return answer

    def __enter__(self) -> Answers[Answer]:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class AsyncUnary(_Call, Generic[Request, Answer]):
    """``Unary`` for asyncio."""

    async def __call__(self, request: Request, timeout_s: float | None = None, **how: Any) -> Answer:
        """Make the call and return the answer; see ``Unary``.

        Raises:
            StatusError: the call failed.
        """
        try:
            answer: Answer = await self.plain(request, timeout=timeout_s, **how)
        except grpc.RpcError as failure:
            raise error_of(failure) from failure
        return answer


class AsyncStream(_Call, Generic[Request, Answer]):
    """``Stream`` for asyncio."""

    def __call__(self, request: Request, timeout_s: float | None = None, **how: Any) -> AsyncAnswers[Answer]:
        """Start the call; see ``Stream``. The requests of a watch may be an async iterator."""
        return AsyncAnswers(self.plain(request, timeout=timeout_s, **how))


class AsyncAnswers(_Answers, AsyncIterator[Answer]):
    """``Answers`` for asyncio."""

    async def __anext__(self) -> Answer:
        try:
            answer: Answer = await self.call.read()
        except grpc.RpcError as failure:
            raise error_of(failure) from failure
        except asyncio.CancelledError:
            if self._is_left:
                raise StopAsyncIteration from None
            raise
        if answer is grpc.aio.EOF:
            raise StopAsyncIteration
        return answer

    async def __aenter__(self) -> AsyncAnswers[Answer]:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


# -- services --------------------------------------------------------------------------------------------------------


def name_of(method: str) -> str:
    """Return raftkv's name for a method.

    >>> name_of("LeaseTimeToLive"), name_of("HashKV")
    ('lease_time_to_live', 'hash_kv')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", method).lower()


def stubs(module: str, unary: type[Any], stream: type[Any]) -> dict[str, type[Any]]:
    """Return the stub classes of all services for clients.

    Arguments:
        module: module of the classes.
        unary, stream: classes of their calls.
    """
    return {
        service.rpartition(".")[2]: _stub(service, found, module, unary, stream)
        for service, found in SERVICES.items()
        if service != _PEERS
    }


def _stub(service: str, found: dict[str, Method], module: str, unary: type[Any], stream: type[Any]) -> type[Any]:
    def init(self: Any, channel: Any) -> None:
        for name, method in found.items():
            kind = stream if method.server_streaming else unary
            setattr(self, name_of(name), kind(channel, method))

    attributes = {"__init__": init, "__module__": module, "__doc__": f"Call the methods of ``{service}``."}
    return type(service.rpartition(".")[2], (), attributes)


def _repeated() -> str:
    """Return the retry policy for grpcio, which is the library's: repeatable calls that no member could serve."""
    of_path: dict[str, bool] = {}
    for method in vars(methods).values():
        if isinstance(method, methods.Method):
            of_path[method.path] = of_path.get(method.path, True) and method.repeatable
    parts = [path[1:].split("/") for path, is_repeatable in of_path.items() if is_repeatable]
    policy = {
        "maxAttempts": 5,
        "initialBackoff": f"{BASE_S}s",
        "maxBackoff": f"{MAX_S}s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    names = [{"service": service, "method": name} for service, name in parts]
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy}]})


OPTIONS: Final = (("grpc.service_config", _repeated()), ("grpc.max_receive_message_length", -1))
"""Channel options that give grpcio the library's behaviour: retry repeatable calls, and do not limit answers."""
