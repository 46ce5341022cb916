"""Calls to a cluster: one channel per endpoint, failover between endpoints, errors by name.

Decides which member to call, and what to do if it does not answer:

1. Calls go to one endpoint until it fails, then to the next, in rounds, with a short pause after each round. A race for
   the first connection decides which endpoint comes first (``transport.race``).
2. A call is repeated if it certainly never reached a member, if the member answered UNAVAILABLE and the method is
   repeatable, or, at another endpoint, if the member is a learner. Any other failure is raised at once.
3. The deadline bounds all attempts together; when it passes, the error is ``context deadline exceeded``.
4. After an endpoint has failed, has not answered or is a learner, later calls avoid it too.
5. With a user, calls carry a token (``login``). A call refused because of its token, or because permissions changed
   while it was in progress, was not executed: it is repeated, once with a new token, or until its deadline if only
   permissions changed.

Streams are opened at one endpoint and never repeated, because only the reader knows the position (see ``stream``).

One event loop, no threads, and no tasks except for the race.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import math
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from raftkv.client.credentials import NO_SECRET, Secret
from raftkv.client.errors import (
    ANOTHER_LOOP,
    CLIENT_CLOSED,
    AuthenticationFailed,
    EndpointsFailed,
    WireStatus,
    from_status,
)
from raftkv.client.rpc import methods
from raftkv.client.rpc.methods import Method, StreamMethod, parse_answer
from raftkv.client.rpc.retry import Attempts, is_of_learner, is_transient
from raftkv.client.rpc.transport import Transport, open_transport, race
from raftkv.errors import (
    CANCELED,
    DEADLINE_EXCEEDED,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    AuthNotEnabledError,
    AuthOldRevisionError,
    ConfigError,
    ContextDeadlineExceededError,
    InvalidAuthTokenError,
    StatusError,
    UserEmptyError,
)
from raftkv.loop.outcomes import outcome_of, take_outcome
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError
from raftkv.urls import Endpoint, parse_endpoints

if TYPE_CHECKING:
    import ssl

    from google.protobuf.message import Message

    from raftkv.rpc.client.stream import ClientStream

# -- login ----------------------------------------------------------------------------------------------------------
#
# The token of a client: its source, and its renewal.
#
# Rules of logging in:
#
# 1. At the first need, not before; never without a user, or for a user identified only by a certificate.
# 2. One login at a time for all calls and streams of a client, because each costs a member 60 ms of a core. A
#    call in the meantime waits for the same answer, until its own deadline.
# 3. A token with an expiry time (a JWT) is renewed before it expires; others when a member refuses them.
# 4. A cluster with authentication disabled is used without a token, until it requires one.
#
# A given token is used unchanged. One from a file or a function is read again when it is refused.
#
# Nothing here reveals a password or a token: no error contains one, and no frame of a traceback holds one.


class LoginRequest:
    """The bytes of an ``AuthenticateRequest``, in a wrapper that hides them from tools that print frames.

    Arguments:
        user, password: credentials.
    """

    __slots__ = ("_body",)

    def __init__(self, user: str, password: str) -> None:
        self._body = rpc_pb2.AuthenticateRequest(name=user, password=password).SerializeToString()

    def to_bytes(self) -> bytes:
        """Return the encoded request."""
        return self._body


Ask = Callable[[LoginRequest, float], Awaitable[str]]
"""Sends the request to a member, with a deadline on the ``monotonic`` clock; returns the token."""

EARLY_S: Final = 30.0
"""Seconds before its expiry at which a token is renewed, at most a tenth of its remaining time."""
RETRY_S: Final = 1.0
"""Pause after a renewal that no member answered, while the old token is still valid."""

_NEVER: Final = math.inf
_NOW: Final = -math.inf


class Login:
    """The identity of a client towards the members.

    Arguments:
        user: user to log in as; empty: no user.
        password: password of the user.
        token: token to use instead of logging in; with a user, until it is refused.

    Attributes:
        token: token of calls; empty: none.
        metadata: the token as metadata of calls.
        renew_at: time, by ``time.monotonic``, from which calls wait for ``renew``.
    """

    __slots__ = ("_flight", "_is_off", "_password", "_source", "_user", "metadata", "renew_at", "token")

    def __init__(self, user: str, password: Secret, token: Secret) -> None:
        self._user = user
        self._password = password
        self._source = token
        self._flight: asyncio.Future[StatusError | None] | None = None
        self._is_off = False
        self._set(token.text())

    def _set(self, token: str) -> None:
        self.token = token
        self.metadata: tuple[tuple[str, str], ...] = (("token", token),) if token else ()
        if not token:
            self.renew_at = _NOW if self._can_renew and not self._is_off else _NEVER
        else:
            self.renew_at = _renewal(token) if self._can_renew else _NEVER

    @property
    def _can_renew(self) -> bool:
        return bool(self._user) or (bool(self._source) and not self._source.is_fixed)

    def void(self, token: str) -> bool:
        """Make the next call or stream get a new token; return False if there is no source of tokens.

        Arguments:
            token: refused token. If another token is in use by now, that one counts as new.
        """
        if self._can_renew and token == self.token:
            self._is_off = False
            self._set("")
        return self._can_renew

    def helps(self, refusal: StatusError, token: str) -> bool:
        """Return whether a refused call or stream, which was not executed, may be tried again.

        The next attempt needs another token, unless ``is_about_rights`` returns True.

        Arguments:
            refusal: error of the call or stream.
            token: token that it carried.
        """
        if self.is_about_rights(refusal, token):
            return True
        if isinstance(refusal, UserEmptyError):
            return self._can_renew and not token  # authentication was enabled after the client found it disabled
        return self._can_renew and isinstance(refusal, InvalidAuthTokenError | AuthOldRevisionError)

    def is_about_rights(self, refusal: StatusError, token: str) -> bool:
        """Return whether users or roles changed during the call, and the token does not contain the old ones.

        Arguments:
            refusal, token: as for ``helps``.
        """
        return isinstance(refusal, AuthOldRevisionError) and not _claims(token)

    async def renew(self, ask: Ask, deadline: float) -> None:
        """Get a token, or wait while another call gets one.

        Arguments:
            ask: requests a token from the cluster.
            deadline: deadline of the caller.

        Raises:
            AuthenticationFailed: the cluster refused, or a file or a function failed.
            EndpointsFailed: the deadline has passed.
        """
        while monotonic() >= self.renew_at:
            if self._flight is None:
                await self._fly(ask, deadline)
                return
            landed, _ = await asyncio.wait((self._flight,), timeout=max(deadline - monotonic(), 0.0))
            if not landed:
                raise EndpointsFailed({}, 0.0, definite=True, explain=False)
            if (failure := landed.pop().result()) is not None:
                raise AuthenticationFailed(failure)

    async def _fly(self, ask: Ask, deadline: float) -> None:
        flight = self._flight = asyncio.get_running_loop().create_future()
        failure: StatusError | None = None
        try:
            self._set(await self._new_token(ask, deadline))
        except AuthNotEnabledError:
            self._is_off = True
            self._set("")
        except ConfigError as error:  # from a file or a function: it may work the next time
            raise AuthenticationFailed(WireStatus(UNAVAILABLE, str(error))) from error
        except StatusError as error:
            failure = error
            if self.token and is_transient(failure):
                self.renew_at = monotonic() + RETRY_S  # the old token is still valid
            else:
                raise AuthenticationFailed(failure) from None
        finally:
            self._flight = None
            # A waiter with a later deadline tries again by itself if the failure was transient.
            flight.set_result(failure if failure is not None and not is_transient(failure) else None)

    async def _new_token(self, ask: Ask, deadline: float) -> str:
        if self._source and not self._source.is_fixed:
            return await self._source.reveal()
        return await ask(LoginRequest(self._user, await self._password.reveal()), deadline)


def _renewal(token: str) -> float:
    """Return the ``monotonic`` time for a token's renewal: before its expiry, or infinity if it has none.

    An expiry in the past is ignored: this machine's clock is then wrong, or the token's file is outdated.
    """
    ends = _claims(token).get("exp")
    remaining_s = ends - time.time() if isinstance(ends, int | float) else 0.0
    return monotonic() + remaining_s - min(EARLY_S, remaining_s / 10) if remaining_s > 0 else _NEVER


def _claims(token: str) -> dict[str, object]:
    """Return the unverified claims of a JWT; empty if the token is not a JWT."""
    parts = token.split(".")
    if len(parts) != 3:
        return {}
    try:
        found = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


T = TypeVar("T", bound="Message")

Pairs = tuple[tuple[str, str], ...]
"""Metadata: names and values."""

_SHORTEST_S: Final = 0.001
LOGIN_TIMEOUT_S: Final = 10.0
"""Longest wait for the token of a stream: many clients may log in at once."""


@dataclass(frozen=True)
class ClientOptions:
    """Connection settings. Sizes in bytes, times in seconds."""

    tls: ssl.SSLContext | None = None
    """TLS context; None: plain TCP unless an endpoint says https."""
    server_name: str = ""
    """Expected name in the members' certificates; empty: for each endpoint, its host."""
    user: str = ""
    """User name; empty: the name in the certificate, or none."""
    password: Secret | str = field(default=NO_SECRET, repr=False)
    """The password of the user; see ``credentials``."""
    token: Secret | str = field(default=NO_SECRET, repr=False)
    """A token from another source. A text is used unchanged, and never renewed unless there is a user too."""
    dial_timeout_s: float = 2.0
    """Time limit of one connection attempt."""
    keepalive_time_s: float | None = None
    """Idle time after which the connection is probed, at least 10 s; None: never."""
    keepalive_timeout_s: float = 6.0
    """Time limit of the answer to a probe."""
    max_request_bytes: int = 2 * 1024 * 1024
    """Size limit of requests; larger ones fail without being sent."""
    max_response_bytes: int = 2**31 - 1
    """Size limit of answers."""
    tracing: bool | None = None
    """Whether to trace calls and send the context; None: if the program has imported OpenTelemetry."""
    refused_patience_s: float | None = None
    """Time limit of a call while all endpoints refuse connections; None: the call's deadline."""
    explain: bool = False
    """Whether the text of ``EndpointsFailed`` names the failed endpoints and the reasons; if False, it is etcd's
    text."""


OpenTransport = Callable[[Endpoint, ClientOptions], Transport]


class Client:
    """A client of one cluster.

    Arguments:
        endpoints: addresses of members, any number; see ``endpoints``.
        options: connection settings.
        open_transport: opens the connection to an endpoint; for tests.

    Raises:
        ConfigError: an endpoint is malformed.
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
        if self.options.tracing:
            require_tracing()
        self._open = open_transport
        self._transports: dict[str, Transport] = {}
        self._current = 0
        self._undecided = len(self.endpoints) > 1
        self._race: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._login = Login(self.options.user, Secret(self.options.password), Secret(self.options.token))

    def __repr__(self) -> str:
        return f"<{self.describe()}>"

    def describe(self) -> str:
        """Return the endpoints and the user, never a password."""
        user = f" as {self.options.user}" if self.options.user else ""
        closed = ", closed" if self._closed else ""
        return f"Client of {','.join(endpoint.text for endpoint in self.endpoints)}{user}{closed}"

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def begin_close(self) -> None:
        """Refuse new calls; calls in progress continue until ``close``."""
        self._closed = True

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        if self._race is not None:
            self._race.cancel()
            await asyncio.wait([self._race])
        transports, self._transports = list(self._transports.values()), {}
        for transport in transports:
            await transport.close()

    def call(
        self, method: Method[T], request: Any, *, timeout_s: float, metadata: Pairs = ()
    ) -> Coroutine[Any, Any, T]:
        """Call a method at any endpoint.

        Arguments:
            method: method to call; see ``methods``.
            request: request message.
            timeout_s: limit for all attempts together.
            metadata: further metadata, e.g. ``(("raftkv-max-staleness-ms", "500"),)``.

        Raises:
            StatusError: the cluster refused, or could not be reached in time.
        """
        if TRACING_API in loaded_modules and self.options.tracing is not False:
            return traced(
                method.path, metadata, lambda pairs: self._call(self.endpoints, method, request, timeout_s, pairs)
            )
        return self._call(self.endpoints, method, request, timeout_s, metadata)

    async def call_at(self, endpoint: str, method: Method[T], request: Any, *, timeout_s: float) -> T:
        """Call a method at one endpoint only; errors as for ``call``.

        Arguments:
            endpoint: endpoint to call.
            method, request, timeout_s: as for ``call``.
        """
        return await self._call(parse_endpoints([endpoint]), method, request, timeout_s)

    async def stream(
        self,
        method: StreamMethod[T],
        endpoint: str | None = None,
        *,
        metadata: Pairs = (),
        timeout_s: float | None = None,
        eager: bool = False,
    ) -> Stream[T]:
        """Open a streaming call; a connection failure is reported at the first ``receive``.

        After UNAVAILABLE, the caller opens a new stream, because only the caller knows where to continue; before that,
        it calls ``next_endpoint(stream.endpoint)``, so that this and all later calls use another endpoint.

        Arguments:
            method: method to call; see ``methods``.
            endpoint: endpoint to use; None: the current endpoint of calls.
            metadata: further metadata, e.g. ``(("hasleader", "true"),)``.
            timeout_s: limit for the whole stream; None: no limit.
            eager: whether to connect at once even after a failed attempt, for callers with their own pauses.

        Raises:
            StatusError: the user could not be authenticated.
        """
        self.check_loop()
        endpoints = self.endpoints if endpoint is None else parse_endpoints([endpoint])
        if self._undecided and endpoint is None:
            await self._wait_first_connection(timeout_s)
        if (now := monotonic()) >= self._login.renew_at:
            await self._renew(endpoints, now + LOGIN_TIMEOUT_S)
        login = self._login
        chosen = endpoints[self._current % len(endpoints)]
        try:
            transport = self._transport(chosen)
            if eager:
                transport.reconnect_now()
            call = transport.stream(method.path, login.metadata + metadata, timeout_s)
        except RpcError as error:
            raise from_status(error.code, error.text, definite=error.definite) from None
        return Stream(call, method.response, chosen.text, login.token)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    @property
    def is_stranded(self) -> bool:
        """Whether the event loop of its connections is closed, which ends the connections too."""
        return self._loop is not None and self._loop.is_closed()

    def check_loop(self) -> None:
        """Raise RuntimeError on another event loop than that of its connections, before anything is sent."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError(ANOTHER_LOOP)

    @property
    def endpoint(self) -> str:
        """The current endpoint of calls and streams, as in ``endpoints``."""
        return self.endpoints[self._current % len(self.endpoints)].text

    def next_endpoint(self, failed: str) -> None:
        """Move calls and streams to the next endpoint, if ``failed`` is the current one."""
        if self.endpoint == failed:
            self._current = (self._current + 1) % len(self.endpoints)

    def forget_token(self, error: StatusError, token: str) -> bool:
        """Return whether a new stream may succeed, because its token or changed permissions ended the old one.

        Arguments:
            error: error that ended the stream.
            token: token that the stream was opened with (``Stream.token``).
        """
        login = self._login
        return login.helps(error, token) and (login.is_about_rights(error, token) or login.void(token))

    async def fetch_token(self, timeout_s: float) -> str:
        """Return the current token, for calls that bypass this client; empty: none.

        Arguments:
            timeout_s: time limit of getting a token.

        Raises:
            AuthenticationFailed: the cluster refused.
        """
        deadline = monotonic() + timeout_s
        if self._undecided:
            await self._wait_first_connection(timeout_s)
        await self._renew(self.endpoints, deadline)
        return self._login.token

    def renew_token(self) -> bool:
        """Make the next call or stream get a new token; return False if there is no source of tokens."""
        return self._login.void(self._login.token)

    async def _call(
        self, endpoints: list[Endpoint], method: Method[T], request: Any, timeout_s: float, metadata: Pairs = ()
    ) -> T:
        self.check_loop()
        body = request.SerializeToString()
        if len(body) > (limit := self.options.max_request_bytes):
            text = f"trying to send message larger than max ({len(body)} vs. {limit})"
            raise from_status(RESOURCE_EXHAUSTED, text, definite=True)
        if timeout_s <= 0:
            # As with a Go context whose deadline has passed, nothing is sent, even if it might finish in time.
            raise ContextDeadlineExceededError
        # Not the loop's clock: in Python 3.11, looking up the running loop is a system call.
        now = monotonic()
        asked_s = timeout_s
        deadline = now + timeout_s
        login = self._login
        if self._undecided and endpoints is self.endpoints:
            await self._wait_first_connection(timeout_s)
            timeout_s = max(deadline - monotonic(), _SHORTEST_S)
        if now >= login.renew_at:
            await self._renew(endpoints, deadline)
            timeout_s = max(deadline - monotonic(), _SHORTEST_S)
        # The usual case costs one await: no task, no separate timer, and the same timeout in every header block.
        endpoint, token = endpoints[self._current % len(endpoints)], login.token
        try:
            answer = await self._send(endpoint, method, body, timeout_s, login.metadata + metadata)
        except RpcError as error:
            attempts = self._attempts(deadline, asked_s, token, metadata)
            answer = await self._recover(attempts, error, endpoint, endpoints, method, body)
        return parse_answer(method.response, answer)

    def _attempts(self, deadline: float, timeout_s: float, token: str = "", metadata: Pairs = ()) -> Attempts:
        explain, patience_s = self.options.explain, self.options.refused_patience_s
        return Attempts(deadline, timeout_s, explain=explain, patience_s=patience_s, token=token, metadata=metadata)

    def _send(
        self, endpoint: Endpoint, method: Method[Any], body: bytes, timeout_s: float, metadata: Pairs = ()
    ) -> Awaitable[bytes]:
        call = self._transport(endpoint).unary(method.path, body, timeout_s, metadata)
        if method.cancellable:
            return call
        return outcome_of(asyncio.ensure_future(call))

    async def _recover(
        self,
        attempts: Attempts,
        error: RpcError,
        endpoint: Endpoint,
        endpoints: list[Endpoint],
        method: Method[Any],
        body: bytes,
    ) -> bytes:
        """Handle a first failure: continue at another endpoint or with a new token, or raise the error."""
        first: RpcError | None = error
        while True:
            try:
                if first is not None:
                    self._note(attempts, first, endpoint, endpoints, method)
                return await self._attempt(attempts, endpoints, method, body)
            except StatusError as refusal:
                first = None
                await self._answer_refusal(refusal, attempts, endpoints)

    async def _answer_refusal(self, refusal: StatusError, attempts: Attempts, endpoints: list[Endpoint]) -> None:
        """Prepare another attempt of a refused call, which was not executed; otherwise raise the refusal."""
        login = self._login
        changed = isinstance(refusal, AuthOldRevisionError)
        if not login.helps(refusal, attempts.token) or (attempts.renewed and not changed):
            raise refusal
        if changed and not await attempts.pause_for_rights():
            raise refusal
        if not login.is_about_rights(refusal, attempts.token):
            attempts.renewed = True
            login.void(attempts.token)
            await self._renew(endpoints, attempts.deadline)

    async def _attempt(
        self, attempts: Attempts, endpoints: list[Endpoint], method: Method[Any], body: bytes | LoginRequest
    ) -> bytes:
        """Try one endpoint after another until one answers or refuses, or the deadline passes."""
        while True:
            await attempts.pause(len(endpoints))
            endpoint = endpoints[self._current % len(endpoints)]
            try:
                if isinstance(body, LoginRequest):
                    return await self._send(endpoint, method, body.to_bytes(), attempts.remaining_s())
                attempts.token, metadata = self._login.token, self._login.metadata + attempts.metadata
                return await self._send(endpoint, method, body, attempts.remaining_s(), metadata)
            except RpcError as error:
                self._note(attempts, error, endpoint, endpoints, method)

    def _note(
        self, attempts: Attempts, error: RpcError, endpoint: Endpoint, endpoints: list[Endpoint], method: Method[Any]
    ) -> None:
        if error.code in (UNAVAILABLE, DEADLINE_EXCEEDED) or is_of_learner(error):
            self.next_endpoint(endpoint.text)
        attempts.note(error, endpoint.text, repeatable=method.repeatable, round_length=len(endpoints))

    async def _renew(self, endpoints: list[Endpoint], deadline: float) -> None:
        """Get a token if none is valid; see ``Login.renew``."""
        await self._login.renew(functools.partial(self._ask_token, endpoints), deadline)

    async def _ask_token(self, endpoints: list[Endpoint], request: LoginRequest, deadline: float) -> str:
        attempts = self._attempts(deadline, deadline - monotonic())
        answer = await self._attempt(attempts, endpoints, methods.AUTHENTICATE, request)
        return parse_answer(methods.AUTHENTICATE.response, answer).token

    async def _wait_first_connection(self, timeout_s: float | None) -> None:
        """Let the endpoints race until one is connected, all have failed, or the time is up."""
        if self._race is None and not self._closed:
            self._race = asyncio.create_task(self._run_race())
            self._race.add_done_callback(take_outcome)
        if self._race is not None:
            await asyncio.wait([self._race], timeout=timeout_s)

    async def _run_race(self) -> None:
        try:
            winner, transports = await race(self.endpoints, lambda endpoint: self._open(endpoint, self.options))
            for endpoint, transport in transports.items():
                # A call to one endpoint, or one that timed out in between, may have opened another transport.
                if self._transports.setdefault(endpoint.text, transport) is not transport:
                    await transport.close()
            if winner is not None:
                self._current = self.endpoints.index(winner)
        finally:
            self._undecided = False

    def _transport(self, endpoint: Endpoint) -> Transport:
        transport = self._transports.get(endpoint.text)
        if transport is None:
            if self._closed:
                raise RpcError(CANCELED, CLIENT_CLOSED, definite=True)
            transport = self._transports[endpoint.text] = self._open(endpoint, self.options)
        return transport


# -- streams --------------------------------------------------------------------------------------------------------
#
# A streaming call of the client: sends request messages, receives parsed messages, raises errors by name.
#
# ::
#
#     async with await client.stream(methods.WATCH) as stream:
#         await stream.send(rpc_pb2.WatchRequest(create_request=...))
#         async for answer in stream:
#             ...
#
# The iteration ends when the member ends the call with OK, and raises ``StatusError`` otherwise. Nothing is repeated
# here. Only one task may read a stream. Unread answers fill the flow-control window of this stream only.


class Stream(Generic[T]):
    """One streaming call, as ``Client.stream`` returns it.

    Attributes:
        endpoint: its endpoint, as in the client's ``endpoints``.
        call: underlying call, which transfers bytes.
        token: token that it was opened with; empty: none.
    """

    __slots__ = ("_response", "call", "endpoint", "token")

    def __init__(self, call: ClientStream, response: type[T], endpoint: str, token: str = "") -> None:
        self.call = call
        self.endpoint = endpoint
        self.token = token
        self._response = response

    async def send(self, request: Any) -> None:
        """Send a request message after waiting for space in the send buffer.

        Raises:
            StatusError: the call has ended.
        """
        try:
            await self.call.send(request.SerializeToString())
        except RpcError as error:
            raise from_status(error.code, error.text, definite=error.definite) from None

    def send_nowait(self, request: Any) -> None:
        """Send a request message without waiting for space in the send buffer."""
        try:
            self.call.send_nowait(request.SerializeToString())
        except RpcError as error:
            raise from_status(error.code, error.text, definite=error.definite) from None

    async def receive(self) -> T | None:
        """Return the next message; None after the last.

        Raises:
            StatusError: the call has failed; after UNAVAILABLE, another endpoint may work.
        """
        try:
            message = await self.call.receive()
        except RpcError as error:
            raise from_status(error.code, error.text, definite=error.definite) from None
        if message is None:
            return None
        return parse_answer(self._response, message)

    def half_close(self) -> None:
        """Send no more requests; the member sees the end of the requests."""
        self.call.half_close()

    def cancel(self) -> None:
        """Cancel the call at the member, and drop unread messages."""
        self.call.cancel()

    @property
    def connected(self) -> bool:
        """Whether it has a connection; before that, nothing was sent."""
        return self.call.under_way

    @property
    def done(self) -> bool:
        """Whether the call has ended."""
        return self.call.done

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        message = await self.receive()
        if message is None:
            raise StopAsyncIteration
        return message

    async def __aenter__(self) -> Stream[T]:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()


# -- tracing --------------------------------------------------------------------------------------------------------
#
# Spans of the client's calls, for programs that use OpenTelemetry; the context is sent to the members.
#
#     metadata: traceparent: 00-<trace>-<span>-01, and tracestate if there is one (W3C Trace Context)
#
# The program uses tracing if ``opentelemetry.trace`` is loaded, because the program (or ``tracing=True``) has imported
# it. This module does not import it, so that without tracing a call costs only one dict lookup.
#
# A call is a span of kind client, whose parent is the caller's current span; it never becomes the current span itself.
# Streams carry no context, because watches and keep-alives share theirs.

Answer = TypeVar("Answer")

TRACING_API: Final = "opentelemetry.trace"
loaded_modules = sys.modules
"""Contains ``TRACING_API`` once the program uses OpenTelemetry."""

_tracer: Any = None
_provider: Any = None


def require_tracing() -> None:
    """Load OpenTelemetry's API, for a program that requests spans without importing it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import opentelemetry.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"tracing needs OpenTelemetry: pip install opentelemetry-api ({error})") from None


def traced(
    path: str, metadata: Pairs, call: Callable[[Pairs], Coroutine[Any, Any, Answer]]
) -> Coroutine[Any, Any, Answer]:
    """Make a call as a span whose parent is the current span.

    Arguments:
        path: method path.
        metadata: metadata of the call.
        call: makes the call with the given metadata.
    """
    api = loaded_modules[TRACING_API]
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
    """Return the tracer of the current provider; None while another thread is still importing the API."""
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


async def _until_end(api: Any, span: Any, made: Coroutine[Any, Any, Answer]) -> Answer:
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
