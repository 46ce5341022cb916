"""Calls to a cluster: one channel an endpoint, failover between them, errors by name.

Owns the answer to "which member, and what if it does not answer":

1. Calls go to one endpoint until it fails; then to the next, round and round, with a short pause after each round.
2. A call is repeated if it certainly never reached a member, or if the member said UNAVAILABLE and the method is
   repeatable. Everything else is raised at once.
3. The deadline bounds all of it together; when it passes the error is ``context deadline exceeded``.
4. An endpoint that failed or did not answer is left by all later calls too, whoever makes them.
5. With a user name, calls carry a token; a member that does not know it any more makes the client ask for a new one,
   once a call.

Streams are opened at one endpoint and never repeated: whoever opened one knows where it stood (see ``stream``).

One event loop, no threads, no tasks of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from raftkv.client.errors import AuthenticationFailed, from_status, is_stale_token
from raftkv.client.rpc import methods
from raftkv.client.rpc.attempts import Attempts
from raftkv.client.rpc.endpoints import Endpoint, parse_endpoints
from raftkv.client.rpc.methods import Method, StreamMethod
from raftkv.client.rpc.streams import Stream
from raftkv.client.rpc.transport import Transport, open_transport
from raftkv.errors import (
    CANCELED,
    DEADLINE_EXCEEDED,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    AuthNotEnabledError,
    StatusError,
)
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError

if TYPE_CHECKING:
    import ssl

    from google.protobuf.message import Message

T = TypeVar("T", bound="Message")


@dataclass(frozen=True)
class ClientOptions:
    """How to connect. Sizes in bytes, times in seconds."""

    tls: ssl.SSLContext | None = None
    """Certificates to trust and to show; None: plain TCP unless an endpoint says https."""
    user: str = ""
    """Name to authenticate as; empty: nobody."""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    """A token that somebody else got; used as it is, never renewed unless there is a user too."""
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
    explain: bool = False
    """The text of ``EndpointsFailed`` tells which endpoints failed and why; else it is that of etcd's clients."""


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
        self._closed = False
        self._authenticating = asyncio.Lock()
        self._needs_token = False
        self._set_token(self.options.token)

    def __repr__(self) -> str:
        return f"<{self.describe()}>"

    def describe(self) -> str:
        """Return where it goes and as whom; never a password."""
        user = f" as {self.options.user}" if self.options.user else ""
        closed = ", closed" if self._closed else ""
        return f"Client of {','.join(endpoint.text for endpoint in self.endpoints)}{user}{closed}"

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def begin_close(self) -> None:
        """Let nothing new begin; what runs goes on until ``close``."""
        self._closed = True

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        transports, self._transports = list(self._transports.values()), {}
        for transport in transports:
            await transport.close()

    def call(self, method: Method[T], request: Any, *, timeout_s: float) -> Coroutine[Any, Any, T]:
        """Call a method at any endpoint.

        Arguments:
            method: what to call; see ``methods``.
            request: its request message.
            timeout_s: for all attempts together.

        Raises:
            StatusError: the cluster refused, or could not be reached in time.
        """
        return self._call(self.endpoints, method, request, timeout_s)

    async def call_at(self, endpoint: str, method: Method[T], request: Any, *, timeout_s: float) -> T:
        """Call a method at one endpoint and no other; as ``call``.

        Arguments:
            endpoint: where.
            method, request, timeout_s: as for ``call``.
        """
        return await self._call(parse_endpoints([endpoint]), method, request, timeout_s)

    async def stream(
        self,
        method: StreamMethod[T],
        endpoint: str | None = None,
        *,
        metadata: tuple[tuple[str, str], ...] = (),
        timeout_s: float | None = None,
        eager: bool = False,
    ) -> Stream[T]:
        """Open a streaming call; whether a member is there shows at the first ``receive``.

        A stream that ends with UNAVAILABLE is opened again by its caller, who knows from where to go on; first it says
        ``next_endpoint(stream.endpoint)``, so that this and all later calls go elsewhere.

        Arguments:
            method: what to call; see ``methods``.
            endpoint: where; None: the endpoint that calls go to at present.
            metadata: more of it, e.g. ``(("hasleader", "true"),)``.
            timeout_s: for the whole stream; None: for ever.
            eager: do not let an earlier failure to connect delay the next try, for callers who pace themselves.

        Raises:
            StatusError: the user could not be authenticated.
        """
        endpoints = self.endpoints if endpoint is None else parse_endpoints([endpoint])
        if self._needs_token:
            await self._authenticate(endpoints, monotonic() + self.options.dial_timeout_s, "")
        chosen = endpoints[self._current % len(endpoints)]
        try:
            transport = self._transport(chosen)
            if eager:
                transport.reconnect_now()
            call = transport.stream(method.path, self._metadata + metadata, timeout_s)
        except RpcError as error:
            raise from_status(error.code, error.text, definite=error.definite) from None
        return Stream(call, method.response, chosen.text)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    @property
    def endpoint(self) -> str:
        """Where calls and streams go at present, as ``endpoints`` write it."""
        return self.endpoints[self._current % len(self.endpoints)].text

    def next_endpoint(self, failed: str) -> None:
        """Let calls and streams go to the next endpoint, if ``failed`` is the one they go to at present."""
        if self.endpoint == failed:
            self._current = (self._current + 1) % len(self.endpoints)

    def forget_token(self, error: StatusError) -> bool:
        """Tell if a stream was refused for a token that can be renewed; the next call or stream then does it."""
        stale = bool(self.options.user) and not self._needs_token and is_stale_token(error)
        if stale:
            self._set_token("")
        return stale

    def renew_token(self) -> bool:
        """Let the next call or stream ask for a new token; False: there is no user to ask for."""
        if self.options.user:
            self._set_token("")
        return bool(self.options.user)

    async def _call(self, endpoints: list[Endpoint], method: Method[T], request: Any, timeout_s: float) -> T:
        body = request.SerializeToString()
        if len(body) > self.options.max_request_bytes:
            raise self._too_large(len(body))
        # Not the loop's clock: to ask for the running loop is a system call in Python 3.11.
        deadline = monotonic() + timeout_s
        if self._needs_token:
            await self._authenticate(endpoints, deadline, "")
        # The usual case costs one await: no task, no timer of its own, the same timeout in every header block.
        endpoint, token = endpoints[self._current % len(endpoints)], self._token
        try:
            answer = await self._transport(endpoint).unary(method.path, body, timeout_s, self._metadata)
        except RpcError as error:
            attempts = Attempts(deadline, timeout_s, explain=self.options.explain, token=token)
            answer = await self._recover(attempts, error, endpoint, endpoints, method, body)
        return _parse(method, answer)

    def _too_large(self, size_bytes: int) -> StatusError:
        limit = self.options.max_request_bytes
        text = f"trying to send message larger than max ({size_bytes} vs. {limit})"
        return from_status(RESOURCE_EXHAUSTED, text, definite=True)

    async def _recover(
        self,
        attempts: Attempts,
        error: RpcError,
        endpoint: Endpoint,
        endpoints: list[Endpoint],
        method: Method[Any],
        body: bytes,
    ) -> bytes:
        """After a first failure: go on elsewhere, or with a new token, or tell the caller."""
        try:
            self._note(attempts, error, endpoint, method)
            return await self._attempt(attempts, endpoints, method, body)
        except StatusError as refusal:
            if not self.options.user or not is_stale_token(refusal):
                raise
            self._needs_token = not self._token  # it was off, and has been switched on
            await self._authenticate(endpoints, attempts.deadline, attempts.token)
            return await self._attempt(attempts, endpoints, method, body)

    async def _attempt(self, attempts: Attempts, endpoints: list[Endpoint], method: Method[Any], body: bytes) -> bytes:
        """Try endpoint after endpoint until one answers, refuses, or the deadline passes."""
        while True:
            await attempts.pause(len(endpoints))
            endpoint = endpoints[self._current % len(endpoints)]
            try:
                transport = self._transport(endpoint)
                return await transport.unary(method.path, body, attempts.remaining_s(), self._metadata)
            except RpcError as error:
                self._note(attempts, error, endpoint, method)

    def _note(self, attempts: Attempts, error: RpcError, endpoint: Endpoint, method: Method[Any]) -> None:
        if error.code in (UNAVAILABLE, DEADLINE_EXCEEDED):
            self.next_endpoint(endpoint.text)
        attempts.note(error, endpoint.text, repeatable=method.repeatable)

    async def _authenticate(self, endpoints: list[Endpoint], deadline: float, stale: str) -> None:
        """Get a token instead of the stale one. One call asks for all: members pay dearly for checking a password."""
        async with self._authenticating:
            if (self._token != stale) if self._token else not self._needs_token:
                return  # another call has found out meanwhile
            self._set_token("")
            request = rpc_pb2.AuthenticateRequest(name=self.options.user, password=self.options.password)
            limit = min(deadline, monotonic() + self.options.dial_timeout_s)
            attempts = Attempts(limit, self.options.dial_timeout_s, explain=self.options.explain)
            try:
                answer = await self._attempt(attempts, endpoints, methods.AUTHENTICATE, request.SerializeToString())
            except AuthNotEnabledError:
                self._needs_token = False
                return
            except StatusError as error:
                raise AuthenticationFailed(error) from None
            self._set_token(_parse(methods.AUTHENTICATE, answer).token)

    def _set_token(self, token: str) -> None:
        self._token = token
        self._metadata = (("token", token),) if token else ()
        self._needs_token = bool(self.options.user) and not token

    def _transport(self, endpoint: Endpoint) -> Transport:
        transport = self._transports.get(endpoint.text)
        if transport is None:
            if self._closed:
                raise RpcError(CANCELED, "the client is closed", definite=True)
            transport = self._transports[endpoint.text] = self._open(endpoint, self.options)
        return transport


def _parse(method: Method[T], answer: bytes) -> T:
    return method.response.FromString(answer)
