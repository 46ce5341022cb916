"""The asyncio server: listeners, connections, and registration of methods.

::

    server = Server()
    server.unary("/pkg.Echo/Say", lambda call, message: call.reply(message))
    await server.listen("127.0.0.1", 2379)
    …
    await server.close(grace_s=5)

One port serves gRPC over HTTP/2 (recognized by its preface, or by ALPN under TLS) and HTTP/1.1 (``http1``). One
callback per loop turn flushes all connections with output (``cork``).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl as ssl_module
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from raftkv.loop.cork import Cork
from raftkv.loop.limiter import Backlog, Limiter
from raftkv.loop.timers import DeadlineWheel, WheelTimer
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.server.accept import Connection, ConnectionLimit, Handshakes
from raftkv.rpc.server.budget import AnswerBudget
from raftkv.rpc.server.calls import AsyncUnaryHandler, Environment, Traffic, UnaryCall, UnaryHandler
from raftkv.rpc.server.http import HttpHandler, HttpRequest, HttpResponse, Origins
from raftkv.rpc.server.http2_plain import http_route
from raftkv.rpc.server.router import Around, Kind, Route, Router
from raftkv.rpc.server.stream import ListenedCall, ListenedHandler, StreamCall, StreamHandler, TaskCall
from raftkv.rpc.shares import Identify, identity_of_peer, queue_of, queue_of_call
from raftkv.rpc.sockets import Acceptor, Poller, open_poller
from raftkv.rpc.status import RpcError
from raftkv.rpc.tls import SERVER_PROTOCOLS, Security, fixed

_log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the kernel queues until the server accepts them."""

HTTP_IN_A_TURN = 32
"""Plain HTTP requests that begin in one loop turn. Hundreds may arrive in one pass over the sockets, and one takes up
to a millisecond, not counting work that is done in steps."""

TARGET_AS_A_REQUEST = 512
"""A plain HTTP request counts as one more for each 512 characters of its target: queries are parsed at once."""

BEGUN_IN_A_TURN = 32
"""Calls with tasks that begin in one loop turn. One read may bring 1,900 of them. Creating the tasks takes little time,
so it does not end the turn, but the first steps of all tasks would run in one turn."""

BYTES_AS_A_CALL = 16 * 1024
"""A request counts as one more call for each 16 KiB of its size: large ones take longer to parse and to check."""


def _bind_both(port: int) -> socket.socket | None:
    """Bind a port of IPv6 and, as etcd does on ``[::]``, of IPv4; None: another listener has the port."""
    both = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    try:
        both.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        both.bind(("::", port))  # not yet listening: a client that connects now is refused, and tries another member
    except OSError:
        both.close()
        return None  # asyncio binds IPv6 alone, beside a listener on 0.0.0.0
    return both


class Server:
    """Serves registered methods on any number of listeners.

    Arguments:
        limits: limits on connections.
        http_handler: answers HTTP requests that are not gRPC; None refuses them.
        report: called with exceptions that escape from handlers (method path, exception); default: log them.
        translate: returns the RpcError for an exception of a handler; None: INTERNAL "internal error".
        answers: budget of waiting answers; servers of one process may share it.
        cork: flushes connections at the end of a turn; may be shared too.
        origins: origins whose web pages may call methods; default: none. ``http_handler`` does its own check.
        around: wrappers of every method's handler, applied at registration; the outermost first.
        identify: returns the identity of a connection, in whose share it counts until a call names its user.

    Methods are registered before ``listen``.
    """

    def __init__(
        self,
        limits: ServerLimits | None = None,
        http_handler: HttpHandler | None = None,
        *,
        report: Callable[[str, BaseException], None] | None = None,
        translate: Callable[[BaseException], RpcError | None] | None = None,
        answers: AnswerBudget | None = None,
        cork: Cork | None = None,
        origins: Origins | None = None,
        around: Sequence[Around] = (),
        identify: Identify = identity_of_peer,
    ) -> None:
        self.identify = identify
        self.limits = limits or ServerLimits()
        self.answers = answers or AnswerBudget(self.limits)
        self.http_handler = None if http_handler is None else self._paced(http_handler)
        self.connections: set[Connection] = set()
        self.traffic = Traffic()
        self._connection_limit = ConnectionLimit(self.limits)
        self._around = tuple(around)
        # Even with few connections: clients that cannot finish a handshake must not keep out those that can.
        self.handshakes = Handshakes(min(self.limits.unfinished_handshakes, max(1, self.limits.connections // 2)))
        self.router = Router()
        if origins is not None:
            self.router.origins = origins
        if self.http_handler is not None:
            self.router.http = http_route(self.http_handler)
        self.report = report or _log_exception
        self._translate = translate or (lambda error: None)
        self._bound: list[asyncio.Server] = []
        self._acceptors: list[Acceptor] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.cork = cork or Cork()
        self._environment: Environment | None = None
        self._timer: WheelTimer | None = None
        self._poller: Poller | None = None
        self._backlog: Backlog | None = None
        self._requests = Limiter(HTTP_IN_A_TURN)
        self._beginnings = Limiter(BEGUN_IN_A_TURN)
        self._idle: asyncio.Event | None = None

    @property
    def grpc_router(self) -> Router:
        """The methods without the plain HTTP handler."""
        return replace(self.router, http=None)

    # ---- registration

    def unary(self, path: str, handler: UnaryHandler) -> None:
        """Register a unary method.

        Arguments:
            path: ``/package.Service/Method``.
            handler: ``handler(call, message)`` is called on the loop and must not block.
        """
        self.router.add(Route(path, UnaryCall, self._wrapped(path, Kind.UNARY, handler)))

    def unary_async(self, path: str, handler: AsyncUnaryHandler) -> None:
        """Register a unary method whose handler is a coroutine; each call is a task.

        Arguments:
            path: ``/package.Service/Method``.
            handler: ``await handler(message, call)`` returns the response message.
        """

        def start(call: UnaryCall, message: bytes) -> None:
            call.keep_request(len(message))
            task = self.spawn(self._run_async(handler, call, message))
            call.on_cancel(task.cancel)

        self.unary(path, start)

    def stream(self, path: str, handler: StreamHandler) -> None:
        """Register a streaming method of any kind; each call is a task.

        Arguments:
            path: ``/package.Service/Method``.
            handler: ``await handler(call)`` receives and sends.
        """
        wrapped = self._wrapped(path, Kind.STREAM, handler)

        async def paced(call: StreamCall) -> None:
            await self._beginnings.enter(1, queue_of_call(call))
            await wrapped(call)

        self.router.add(Route(path, TaskCall, paced))

    def listened(self, path: str, handler: ListenedHandler) -> None:
        """Register a streaming method whose calls are served without tasks.

        Arguments:
            path: ``/package.Service/Method``.
            handler: ``handler(call)`` sets the listener of a call (``stream``) and must not block.
        """
        self.router.add(Route(path, ListenedCall, self._wrapped(path, Kind.LISTENED, handler)))

    def _wrapped(self, path: str, kind: Kind, handler: Callable[..., Any]) -> Callable[..., Any]:
        for around in reversed(self._around):
            handler = around(path, kind, handler)
        return handler

    async def _run_async(self, handler: AsyncUnaryHandler, call: UnaryCall, message: bytes) -> None:
        try:
            await self._beginnings.enter(1 + len(message) // BYTES_AS_A_CALL, queue_of_call(call))
            work = handler(message, call)
            del message  # the call may be long
            response = await work
        except asyncio.CancelledError:
            if not call.done:
                call.fail(14, "the server is stopping")
            raise
        except Exception as error:
            call.fail_for(error)
        else:
            if not call.done:
                if isinstance(response, bytes):
                    call.reply(response)
                else:
                    call.reply_many(response)

    # ---- life

    async def listen(
        self,
        host: str | None,
        port: int = 0,
        ssl: ssl_module.SSLContext | Security | None = None,
        *,
        unix: str | None = None,
        accepting: bool = True,
        plain_too: bool = False,
        grpc_only: bool = False,
    ) -> list[tuple[str, int]]:
        """Open a listener, and return its addresses.

        Arguments:
            host: name or address; None for all interfaces (ignored with ``unix``).
            port: TCP port; 0: a free one.
            ssl: TLS context or policy; the ALPN protocols of a context are set to h2 and http/1.1.
            unix: path of a unix socket to listen on instead.
            accepting: False: connections wait in the kernel for ``start_accepting``.
            plain_too: accept plain text beside TLS.
            grpc_only: refuse plain HTTP.

        Raises:
            OSError: the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        security = fixed(ssl, SERVER_PROTOCOLS) if ssl is not None else None
        self.environment()

        def factory() -> Connection:
            return Connection(self, security, plain_too=plain_too, grpc_only=grpc_only)

        both = _bind_both(port) if host == "::" and unix is None else None
        if unix is not None:
            bound = await loop.create_unix_server(factory, unix, start_serving=False)
        elif both is not None:
            bound = await loop.create_server(factory, sock=both, start_serving=False)
        else:
            bound = await loop.create_server(factory, host, port, start_serving=False)
        self._bound.append(bound)
        acceptors = self._acceptors_of(bound, factory)
        self._acceptors += acceptors
        if accepting:
            for acceptor in acceptors:
                acceptor.start()
        if unix is not None:
            return [(unix, 0)]
        return [(name[0], name[1]) for name in (sock.getsockname() for sock in bound.sockets)]

    def _acceptors_of(self, bound: asyncio.Server, factory: Callable[[], Connection]) -> list[Acceptor]:
        """Listen on the addresses that asyncio has bound but does not serve."""
        loop, poller = asyncio.get_running_loop(), self.poller()
        acceptors = []
        for sock in bound.sockets:
            listening = sock.dup()
            listening.listen(BACKLOG)
            listening.setblocking(False)
            acceptors.append(Acceptor(loop, poller, listening, factory))
        return acceptors

    def start_accepting(self) -> None:
        """Accept connections at listeners opened with ``accepting=False``, waiting and future ones."""
        for acceptor in self._acceptors:
            acceptor.start()

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop: refuse new connections, send GOAWAY, wait ``grace_s`` seconds for open calls, then abort everything."""
        self.stop_listening()
        self.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._wait_idle()
        except TimeoutError:
            pass
        for connection in list(self.connections):
            connection.abort()
        await self._stop_tasks()
        await self._wait_idle()
        if self._timer is not None:
            self._timer.close()
        if self._poller is not None:
            self._poller.close()

    def stop_listening(self) -> None:
        """Close the listeners; connections stay."""
        for acceptor in self._acceptors:
            acceptor.close()
        for bound in self._bound:
            bound.close()
        self._acceptors.clear()
        self._bound.clear()

    def drain(self) -> None:
        """Ask every client to leave: send GOAWAY now, and close each connection after its last call."""
        for connection in list(self.connections):
            connection.drain()

    async def _stop_tasks(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_idle(self) -> None:
        while self.connections:
            self._idle = asyncio.Event()
            await self._idle.wait()

    # ---- called by connections

    def environment(self) -> Environment:
        """Return the environment of this server's cores, created at first use, on the running loop."""
        if self._environment is None:
            loop = asyncio.get_running_loop()
            self._timer = WheelTimer(loop)
            self._environment = Environment(
                clock=loop.time,
                wheel=self._timer.wheel,
                spawn=self.spawn,
                report=self.report,
                translate=self._translate,
                answers=self.answers,
                traffic=self.traffic,
            )
        return self._environment

    def poller(self) -> Poller:
        """Return the poller of this server's sockets, created at first use, on the running loop."""
        if self._poller is None:
            self._poller = open_poller(asyncio.get_running_loop(), self.cork, self.answers.uses.weights)
        return self._poller

    def backlog(self) -> Backlog:
        """Return the queue of connections with unprocessed input, created at first use, on the running loop."""
        if self._backlog is None:
            self._backlog = Backlog(self.cork, asyncio.get_running_loop(), self.answers.uses.weights)
        return self._backlog

    @property
    def wheel(self) -> DeadlineWheel:
        """The deadlines of all calls."""
        return self.environment().wheel

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task that ``close`` waits for."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _paced(self, handler: HttpHandler) -> HttpHandler:
        """Make plain HTTP requests wait for a loop turn that has room for one more."""

        async def paced(request: HttpRequest) -> HttpResponse:
            weight = 1 + len(request.target) // TARGET_AS_A_REQUEST
            await self._requests.enter(weight, queue_of(request.identity))
            return await handler(request)

        return paced

    def add(self, connection: Connection) -> bool:
        """Count a new connection; False if there are too many, and none was closed for it."""
        limit = self._connection_limit
        if len(self.connections) >= self.limits.connections and not limit.make_room(self.connections, connection):
            return False
        self.connections.add(connection)
        limit.add(connection)
        return True

    def discard(self, connection: Connection) -> None:
        """Forget a closed connection."""
        if connection in self.connections:
            self.connections.remove(connection)
            self._connection_limit.discard(connection)
        if not self.connections and self._idle is not None:
            self._idle.set()


def _log_exception(path: str, error: BaseException) -> None:
    _log.error("unhandled exception in %s", path, exc_info=error)
