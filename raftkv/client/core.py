"""Calls to a cluster: one channel an endpoint, failover between them, errors by name.

Owns the answer to "which member, and what if it does not answer":

1. Calls go to one endpoint until it fails; then to the next, round and round, with a short pause after each round.
2. A call is repeated if it certainly never reached a member, or if the member said UNAVAILABLE and the method is
   repeatable. Everything else is told to the caller at once.
3. The deadline bounds all of it together; when it passes the error is ``context deadline exceeded``.
4. With a user name, calls carry a token; a member that does not know it any more makes the client ask for a new one,
   once a call.

Streams are opened at one endpoint and never repeated: whoever opened one knows where it stood (see ``stream``).

One event loop, no threads, no tasks of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from raftkv.client import methods
from raftkv.client.endpoints import Endpoint, parse_endpoints
from raftkv.client.errors import AuthenticationFailed, from_status
from raftkv.client.methods import Method, StreamMethod
from raftkv.client.streams import Stream
from raftkv.client.transport import Transport, open_transport
from raftkv.errors import (
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    AuthNotEnabledError,
    ContextDeadlineExceededError,
    InvalidAuthTokenError,
    StatusError,
)
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")

ROUND_PAUSE_S = 0.025
"""Pause after every endpoint has failed once; etcd's clients wait as long."""
_OLD_REVISION = "etcdserver: revision of auth store is old"


@dataclass(frozen=True)
class ClientOptions:
    """How to connect. Sizes in bytes, times in seconds."""

    tls: ssl.SSLContext | None = None
    """Certificates to trust and to show; None: plain TCP unless an endpoint says https."""
    user: str = ""
    """Name to authenticate as; empty: nobody."""
    password: str = ""
    dial_timeout_s: float = 2.0
    """Time for one connection."""
    keepalive_time_s: float | None = None
    """Silence after which the connection is probed, at least 10 s; None: never."""
    keepalive_timeout_s: float = 6.0
    """Time for the answer to a probe."""
    max_request_bytes: int = 2 * 1024 * 1024
    """Largest request that is sent; larger ones fail here."""
    max_response_bytes: int = 2**31 - 1
    """Largest answer that is accepted."""


OpenTransport = Callable[[Endpoint, ClientOptions], Transport]


class Client:
    """A client of one cluster.

    Arguments:
        endpoints: addresses of members, any number; see ``endpoints``.
        options: how to connect.
        open_transport: makes the connection to an endpoint; for tests.

    Raises:
        ConfigError: an endpoint cannot be understood.
    """

    def __init__(
        self,
        endpoints: str | Iterable[str],
        options: ClientOptions | None = None,
        *,
        open_transport: OpenTransport = open_transport,
    ) -> None:
        self.endpoints = parse_endpoints(endpoints)
        self.options = options or ClientOptions()
        self._open = open_transport
        self._transports: dict[str, Transport] = {}
        self._current = 0
        self._token = ""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        transports, self._transports = list(self._transports.values()), {}
        for transport in transports:
            await transport.close()

    async def call(self, method: Method[T], request: Any, *, timeout_s: float) -> T:
        """Call a method at any endpoint.

        Arguments:
            method: what to call; see ``methods``.
            request: its request message.
            timeout_s: for all attempts together.

        Raises:
            StatusError: the cluster refused, or could not be reached in time.
        """
        return await self._call(self.endpoints, method, request, timeout_s)

    async def call_at(self, endpoint: str, method: Method[T], request: Any, *, timeout_s: float) -> T:
        """Call a method at one endpoint and no other; as ``call``."""
        return await self._call(parse_endpoints([endpoint]), method, request, timeout_s)

    async def stream(
        self,
        method: StreamMethod[T],
        endpoint: str | None = None,
        *,
        metadata: tuple[tuple[str, str], ...] = (),
        timeout_s: float | None = None,
    ) -> Stream[T]:
        """Open a streaming call; whether a member is there shows at the first ``receive``.

        A stream that ends with UNAVAILABLE is opened again by its caller, who knows from where to go on; first it says
        ``next_endpoint(stream.endpoint)``, so that this and all later calls go elsewhere.

        Arguments:
            method: what to call; see ``methods``.
            endpoint: where; None: the endpoint that calls go to at present.
            metadata: more of it, e.g. ``(("hasleader", "true"),)``.
            timeout_s: for the whole stream; None: for ever.

        Raises:
            StatusError: the user could not be authenticated.
        """
        endpoints = self.endpoints if endpoint is None else parse_endpoints([endpoint])
        if self.options.user and not self._token:
            deadline = asyncio.get_running_loop().time() + self.options.dial_timeout_s
            await self._authenticate(endpoints, deadline)
        chosen = endpoints[self._current % len(endpoints)]
        token = (("token", self._token),) if self._token else ()
        call = self._transport(chosen).stream(method.path, (*token, *metadata), timeout_s)
        return Stream(call, method.response, chosen.text)

    def next_endpoint(self, failed: str) -> None:
        """Let calls and streams go to the next endpoint, if ``failed`` is the one they go to at present."""
        if self.endpoints[self._current % len(self.endpoints)].text == failed:
            self._current = (self._current + 1) % len(self.endpoints)

    def forget_token(self, error: StatusError) -> bool:
        """Tell if a stream was refused for its token; the next call or stream then asks for a new one."""
        stale = bool(self._token) and _is_stale_token(error)
        if stale and self.options.user:
            self._token = ""
        return stale

    async def _call(self, endpoints: list[Endpoint], method: Method[T], request: Any, timeout_s: float) -> T:
        body = request.SerializeToString()
        if len(body) > self.options.max_request_bytes:
            limit = self.options.max_request_bytes
            text = f"trying to send message larger than max ({len(body)} vs. {limit})"
            raise from_status(RESOURCE_EXHAUSTED, text, definite=True)
        deadline = asyncio.get_running_loop().time() + timeout_s
        if self.options.user and not self._token:
            await self._authenticate(endpoints, deadline)
        try:
            answer = await self._attempt(endpoints, method, body, deadline)
        except StatusError as error:
            if not self._token or not _is_stale_token(error):
                raise
            await self._authenticate(endpoints, deadline)
            answer = await self._attempt(endpoints, method, body, deadline)
        return _parse(method, answer)

    async def _attempt(self, endpoints: list[Endpoint], method: Method[Any], body: bytes, deadline: float) -> bytes:
        """Try endpoint after endpoint until one answers, refuses, or the deadline passes."""
        loop = asyncio.get_running_loop()
        failures = 0
        while (remaining_s := deadline - loop.time()) > 0:
            endpoint = endpoints[self._current % len(endpoints)]
            metadata = (("token", self._token),) if self._token else ()
            try:
                return await self._transport(endpoint).unary(
                    method.path, body, timeout_s=remaining_s, metadata=metadata
                )
            except RpcError as error:
                if not _may_repeat(error, method):
                    raise from_status(error.code, error.text, definite=error.definite) from None
            self._current = (self._current + 1) % len(endpoints)
            failures += 1
            if failures % len(endpoints) == 0:
                await asyncio.sleep(min(ROUND_PAUSE_S, max(deadline - loop.time(), 0.0)))
        raise ContextDeadlineExceededError

    async def _authenticate(self, endpoints: list[Endpoint], deadline: float) -> None:
        self._token = ""
        request = rpc_pb2.AuthenticateRequest(name=self.options.user, password=self.options.password)
        loop = asyncio.get_running_loop()
        limit = min(deadline, loop.time() + self.options.dial_timeout_s)
        try:
            answer = await self._attempt(endpoints, methods.AUTHENTICATE, request.SerializeToString(), limit)
        except AuthNotEnabledError:
            return
        except StatusError as error:
            raise AuthenticationFailed(error) from None
        self._token = _parse(methods.AUTHENTICATE, answer).token

    def _transport(self, endpoint: Endpoint) -> Transport:
        transport = self._transports.get(endpoint.text)
        if transport is None:
            transport = self._transports[endpoint.text] = self._open(endpoint, self.options)
        return transport


def _may_repeat(error: RpcError, method: Method[Any]) -> bool:
    return error.code == UNAVAILABLE and (method.repeatable or error.definite)


def _is_stale_token(error: StatusError) -> bool:
    return isinstance(error, InvalidAuthTokenError) or str(error) == _OLD_REVISION


def _parse(method: Method[T], answer: bytes) -> T:
    # Every generated message class has it; the type of a message class does not say so.
    parsed: T = method.response.FromString(answer)  # type: ignore[attr-defined]
    return parsed
