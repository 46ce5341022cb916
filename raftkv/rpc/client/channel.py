"""The asyncio client: a channel keeps one connection to one of its targets, and runs any number of calls over it.

::

    channel = Channel("127.0.0.1:2379")
    response = await channel.unary("/etcdserverpb.KV/Range", request, timeout_s=5)
    await channel.close()

The connection is opened at the first call (or by ``connect``), and reopened whenever it is lost, with growing, jittered
waits. Calls without a connection or a free stream wait in one queue, in order. While connecting *fails*, calls fail at
once (unless they ask to wait), and these failures are ``definite``.
Requests of one loop turn leave in one write. Nothing is retried here: the client library decides about that.
"""

from __future__ import annotations

import asyncio
import enum
import random
import ssl as ssl_module
from collections import OrderedDict
from collections.abc import Callable, Sequence

from raftkv.loop.timers import WheelTimer
from raftkv.rpc.client.calls import UnaryFuture
from raftkv.rpc.client.connect import ClientConnection, ConnectError, connect
from raftkv.rpc.client.core import TIMED_PING, ClientCore
from raftkv.rpc.client.stream import ClientStream
from raftkv.rpc.framing import MessageAssembler, Metadata, encode_metadata, encode_timeout
from raftkv.rpc.limits import ChannelOptions
from raftkv.rpc.status import CLOSED_TEXT, Code, Headers, RpcError
from raftkv.rpc.tls import CLIENT_PROTOCOLS, Security, fixed


class ChannelState(enum.Enum):
    """The state of a channel's connection."""

    IDLE = "idle"
    CONNECTING = "connecting"
    READY = "ready"
    TRANSIENT_FAILURE = "transient failure"
    SHUTDOWN = "shutdown"


_STEADY_S = 1.0
"""A connection that lived this long was good: the waits between attempts start again from the shortest."""


class Channel:
    """Runs calls to one server, or to any of several equal ones.

    Arguments:
        target: ``host:port``, ``unix:/path``, or several of them, tried in turn.
        ssl: use TLS; the ALPN protocol of a context is set to h2.
        options: limits and timings.
        metadata: name and value pairs of every call, before its own.
        on_state: called at every change of state.
        on_refused: called once after each connection when every target refuses the next one: nothing listens there.
        rng: source of the jitter; pass a seeded one for reproducible runs.

    Create the channel on the loop that it runs on.
    """

    def __init__(
        self,
        target: str | Sequence[str],
        ssl: ssl_module.SSLContext | Security | None = None,
        options: ChannelOptions | None = None,
        *,
        metadata: Metadata = (),
        on_state: Callable[[ChannelState], None] | None = None,
        on_refused: Callable[[], object] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.options = options or ChannelOptions()
        self.state = ChannelState.IDLE
        self.targets = [target] if isinstance(target, str) else list(target)
        self._ssl = fixed(ssl, CLIENT_PROTOCOLS) if ssl is not None else None
        self._on_state = on_state
        self._on_refused = on_refused
        self._rng = rng or random.Random()
        self._loop = asyncio.get_running_loop()
        self._timer = WheelTimer(self._loop)
        self.failed_connects = 0
        """Number of failed attempts: each attempt begins with the next address of its target's name."""
        self._core: ClientCore | None = None
        self._connections: set[ClientConnection] = set()
        self._queue: OrderedDict[UnaryFuture | ClientStream, None] = OrderedDict()
        self._failure: RpcError | None = None
        self._failures = 0
        # Consecutive refusals, and whether they have been reported.
        self._refusals = 0
        self._is_refused = False
        self.keepalive_time_s = self.options.keepalive_time_s
        """Silence before a ping; it grows when a server complains about too many pings."""
        self._task: asyncio.Task[None] | None = None
        self._skip_wait = asyncio.Event()
        self._attempted = asyncio.Event()
        self._metadata = encode_metadata(metadata)
        self._base_headers: dict[str, Headers] = {}
        self._timeouts: dict[float, tuple[bytes, bytes]] = {}

    # ---- calls

    def unary(
        self,
        path: str,
        message: bytes,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        *,
        wait_for_ready: bool | None = None,
    ) -> UnaryFuture:
        """Start a unary call, and return the future of its response.

        Cancelling the future cancels the call. Failures are RpcError.

        Arguments:
            path: ``/package.Service/Method``.
            message: serialized request.
            timeout_s: seconds from now, also sent to the server; None: no limit.
            metadata: name and value pairs.
            wait_for_ready: whether to wait while connecting fails; None: the channel's option.
        """
        headers = self._headers(path, timeout_s, metadata)
        call = UnaryFuture(self, self._loop, headers, message)
        self._start(call, timeout_s, wait_for_ready)
        return call

    def stream(
        self, path: str, metadata: Metadata = (), timeout_s: float | None = None, *, wait_for_ready: bool | None = None
    ) -> ClientStream:
        """Start a streaming call of any kind.

        Arguments:
            path: ``/package.Service/Method``.
            metadata: name and value pairs.
            timeout_s: seconds from now, also sent to the server; None: no limit.
            wait_for_ready: whether to wait while connecting fails; None: the channel's option.
        """
        assembler = MessageAssembler(self.options.max_receive_message_bytes, on_server=False)
        call = ClientStream(self, self._headers(path, timeout_s, metadata), assembler)
        self._start(call, timeout_s, wait_for_ready)
        return call

    def _start(self, call: UnaryFuture | ClientStream, timeout_s: float | None, wait_for_ready: bool | None) -> None:
        """Start a call, or queue it until there is a connection with a free stream."""
        if timeout_s is not None:
            now = self._loop.time()
            self._timer.wheel.add(call, now + timeout_s, now)
        core = self._core
        if core is not None and not self._queue and core.has_room():
            call.begin(core)
        else:
            self._enqueue(call, wait_for_ready)

    def _headers(self, path: str, timeout_s: float | None, metadata: Metadata) -> Headers:
        headers = self._base_headers.get(path)
        if headers is None:
            headers = self._base_headers[path] = self._make_headers(path)
        if timeout_s is not None:
            field = self._timeouts.get(timeout_s)
            headers = (*headers, field or self._timeout_field(timeout_s))
        headers = headers + self._metadata if self._metadata else headers
        return headers + encode_metadata(metadata) if metadata else headers

    def _make_headers(self, path: str) -> Headers:
        return (
            (b":method", b"POST"),
            (b":scheme", b"https" if self._ssl is not None else b"http"),
            (b":path", path.encode("ascii")),
            (b":authority", self._authority().encode("ascii")),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", self.options.user_agent.encode("ascii")),
        )

    def _authority(self) -> str:
        target = self.targets[0]
        return self.options.authority or ("localhost" if target.startswith("unix:") else target)

    def _timeout_field(self, timeout_s: float) -> tuple[bytes, bytes]:
        if len(self._timeouts) >= _TIMEOUTS_KEPT:
            self._timeouts.clear()
        field = self._timeouts[timeout_s] = (b"grpc-timeout", encode_timeout(timeout_s))
        return field

    # ---- the queue

    def _enqueue(self, call: UnaryFuture | ClientStream, wait_for_ready: bool | None) -> None:
        call.wait_for_ready = self.options.wait_for_ready if wait_for_ready is None else wait_for_ready
        if self.state is ChannelState.SHUTDOWN:
            call.fail(RpcError(Code.CANCELLED, CLOSED_TEXT, definite=True))
        elif self._failure is not None and not call.wait_for_ready:
            call.fail(self._failure_now())
        elif len(self._queue) >= self.options.queued_calls:
            call.fail(RpcError(Code.RESOURCE_EXHAUSTED, "too many calls are waiting for a connection", definite=True))
        else:
            self._queue[call] = None
            self.connect()

    @property
    def failure_text(self) -> str:
        """Why the last attempt to connect failed; empty if it succeeded."""
        return self._failure.text if self._failure is not None else ""

    def _failure_now(self) -> RpcError:
        return RpcError(Code.UNAVAILABLE, self.failure_text or "no connection", definite=True)

    def requeue(self, call: UnaryFuture) -> None:
        """Queue a call again that the server has refused. It starts when another call ends."""
        self._queue[call] = None
        if self._core is not None and not self._core.calls:
            self._loop.call_soon(self.start_queued)

    def withdraw(self, call: UnaryFuture | ClientStream) -> None:
        """Remove a call from the queue."""
        self._queue.pop(call, None)

    def start_queued(self) -> None:
        """Start waiting calls while the connection has free streams."""
        core = self._core
        while self._queue and core is not None and core.has_room():
            call, _none = self._queue.popitem(last=False)
            call.begin(core)

    def _fail_queued(self) -> None:
        for call in [call for call in self._queue if not call.wait_for_ready]:
            del self._queue[call]
            call.fail(self._failure_now())

    # ---- connecting

    def connect(self) -> None:
        """Start connecting, unless that has been started; calls do it by themselves."""
        if self._task is None and self.state is not ChannelState.SHUTDOWN:
            self._task = self._loop.create_task(self._keep_connected())

    async def first_attempt(self) -> bool:
        """Connect, and wait for the end of the first attempt. Returns whether there is a connection."""
        self.connect()
        await self._attempted.wait()
        return self.state is ChannelState.READY

    def reconnect_now(self) -> None:
        """Skip the wait before the next attempt: the server is known to be back."""
        self._failures = 0
        self._skip_wait.set()

    async def _keep_connected(self) -> None:
        turn = 0
        while True:
            self._set_state(ChannelState.CONNECTING)
            started_s = self._loop.time()
            try:
                await self._run_one(self.targets[turn % len(self.targets)])
            except ConnectError as error:
                self._refusals = self._refusals + 1 if error.is_refusal else 0
                self._note_failure(str(error), is_last=(turn + 1) % len(self.targets) == 0)
            turn += 1
            if self._loop.time() - started_s > _STEADY_S and self._failure is None:
                self._failures = 0
            elif turn % len(self.targets) == 0:
                await self._wait_before_retry()

    async def _run_one(self, target: str) -> None:
        """Connect to one target, and wait until its connection takes no more calls."""
        connection = await connect(target, self._ssl, self)
        self._failure = None
        self._refusals, self._is_refused = 0, False
        self._core = connection.core
        self._set_state(ChannelState.READY)
        self.start_queued()
        await connection.gone.wait()
        self.retired(connection)

    def _note_failure(self, text: str, is_last: bool) -> None:
        if not is_last:
            return
        self._failure = RpcError(Code.UNAVAILABLE, f"connection error: {text}", definite=True)
        # The first attempt after a loss may still succeed: a dying process closes its connections before its port.
        if self._refusals >= len(self.targets) and not self._is_refused:
            self._is_refused = True
            if self._on_refused is not None:
                self._on_refused()
        self._set_state(ChannelState.TRANSIENT_FAILURE)
        self._fail_queued()

    async def _wait_before_retry(self) -> None:
        options = self.options
        wait_s = min(options.backoff_base_s * options.backoff_factor**self._failures, options.backoff_max_s)
        wait_s *= 1 + options.backoff_jitter * self._rng.uniform(-1, 1)
        self._failures += 1
        self._skip_wait.clear()
        try:
            async with asyncio.timeout(wait_s):
                await self._skip_wait.wait()
        except TimeoutError:
            pass

    def _set_state(self, state: ChannelState) -> None:
        # While connecting fails, attempts do not change the state: the failure stays until one succeeds.
        if self._failure is not None and state is ChannelState.CONNECTING:
            return
        if state is not ChannelState.CONNECTING:
            self._attempted.set()
        if state is not self.state:
            self.state = state
            if self._on_state is not None:
                self._on_state(state)

    def time_ping(self, on_answer: Callable[[float], None]) -> None:
        """Ping the server, and call back with the seconds until its answer; does nothing without a connection.

        Arguments:
            on_answer: replaces that of an earlier ping; not called if the connection is lost.
        """
        core = self._core
        if core is not None:
            sent_s = self._loop.time()
            core.on_timed_ping = lambda: on_answer(self._loop.time() - sent_s)
            core.ping(TIMED_PING)

    # ---- called by connections

    def opened(self, connection: ClientConnection) -> None:
        """Add a connection."""
        self._connections.add(connection)

    def closed(self, connection: ClientConnection) -> None:
        """Remove a lost connection."""
        self._connections.discard(connection)
        self.retired(connection)

    def retired(self, connection: ClientConnection) -> None:
        """Send no more calls over a connection."""
        if self._core is connection.core:
            self._core = None

    def slow_down_pings(self) -> None:
        """Ping half as often from now on: the server has complained about pings."""
        if self.keepalive_time_s is not None:
            self.keepalive_time_s *= 2

    # ---- the end

    async def close(self) -> None:
        """End every call with CANCELLED, and close the connection."""
        self._set_state(ChannelState.SHUTDOWN)
        self.state = ChannelState.SHUTDOWN
        self._core = None
        queued, self._queue = self._queue, OrderedDict()
        for call in queued:
            call.fail(RpcError(Code.CANCELLED, CLOSED_TEXT, definite=True))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        connections = list(self._connections)
        for connection in connections:
            connection.close(CLOSED_TEXT)
        for connection in connections:
            await connection.lost.wait()
        self._timer.close()

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


_TIMEOUTS_KEPT = 1024
