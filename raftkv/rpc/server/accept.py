"""A connection from accept on: TLS handshake, choice of the protocol, then the matching protocol object.

The first bytes decide: HTTP/2's preface or anything else (HTTP/1.1). Under TLS the ALPN result decides, and the first
bytes of a client without ALPN decide as on a plain connection. Both steps have a time limit: a silent connection is
closed. If a port accepts plain text beside TLS, the first byte tells them apart: it is 22 in every handshake.

A handshake step costs up to some milliseconds of the processor, and an unfinished handshake costs memory. So a
handshake begins when its first bytes have arrived, and ``STEPS_A_TURN`` steps run in each turn, by address in turn.
Above ``unfinished_handshakes`` the oldest one of the address with most of them is ended: honest handshakes take
milliseconds (``Handshakes``).

At the connection limit, connections that were idle for ``ServerLimits.crowded_idle_s`` are closed, the longest idle
first (``ConnectionLimit``): an honest idle client opens a new connection when it needs one, and a client that only
holds connections loses them. If an idle connection can be closed at once, its place goes to the new one. A connection
that speaks HTTP/2 is closed gracefully, and the new one is refused with a GOAWAY: clients then retry a little later.
When none is idle, the address with most connections loses its newest, if it has more than the newcomer's would have.
"""

from __future__ import annotations

import asyncio
import logging
import ssl as ssl_module
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, cast

from raftkv.loop.cycle_free import forget_frames, release
from raftkv.loop.limiter import Limiter
from raftkv.rpc.http2 import PREFACE, ErrorCode, goaway_frame
from raftkv.rpc.http2.frames import settings_frame
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.server.calls import Peer
from raftkv.rpc.server.core import ServerCore, ServerH2Protocol
from raftkv.rpc.server.http1 import Http1Protocol
from raftkv.rpc.shares import Identify, Identity, Shares, identity_of_peer, queue_of
from raftkv.rpc.tls import EncryptedTransport, RefusedPeerError, Security, reason_of

if TYPE_CHECKING:
    from raftkv.rpc.server.server import Server

_log = logging.getLogger(__name__)

_SNIFF_BYTES = 4
_TLS_HANDSHAKE: Final = 22

TOO_MANY = settings_frame({}) + goaway_frame(ErrorCode.ENHANCE_YOUR_CALM, b"too_many_connections", last_stream_id=0)
"""Sent on a connection above the limit: none of its calls was served."""


class Connection(asyncio.Protocol):
    """One accepted connection. It passes its transport to the protocol object once the protocol is known.

    Arguments:
        server: server of the connection.
        security: TLS policy; None: plain text.
        plain_too: whether plain text is accepted beside TLS.
        grpc_only: whether plain HTTP is refused.
    """

    def __init__(
        self, server: Server, security: Security | None, *, plain_too: bool = False, grpc_only: bool = False
    ) -> None:
        self._plain_too = plain_too
        self._grpc_only = grpc_only
        self._server = server
        self._security = security
        self._transport: asyncio.Transport | None = None
        self._below_tls: asyncio.Transport | None = None
        self._buffer = b""
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = 0.0
        self.queue: Identity = ""
        """Queue of the client's address: the handshake waits there, and the connection is counted there."""
        self._h2: ServerH2Protocol | None = None
        self._http1: Http1Protocol | None = None
        self._handshake: asyncio.Task[None] | None = None
        self._cause: Exception | None = None
        self._forget: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin: a client has connected."""
        self._transport = cast(asyncio.Transport, transport)
        self._since_s = asyncio.get_running_loop().time()
        self.queue = queue_of(identity_of_peer(_address_of(self._transport)))
        if not self._server.add(self):
            self._refuse(self._transport)
        elif self._security is not None:
            self._below_tls = self._transport
            self._server.handshakes.add(self)
            timeout_s = self._server.limits.tls_handshake_timeout_s
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self.give_up, TimeoutError())
        else:
            self._sniff()

    def _refuse(self, transport: asyncio.Transport) -> None:
        """Send the GOAWAY for too many connections, if no handshake must come first, and close at once."""
        if self._security is None:
            transport.write(TOO_MANY)
        transport.close()

    # ---- the handshake

    @property
    def _awaits_hello(self) -> bool:
        return self._below_tls is not None and self._below_tls is self._transport and self._handshake is None

    def _begin_handshake(self) -> None:
        """Begin the handshake: it is this connection's turn, and its first bytes are here."""
        if self._awaits_hello and self._security is not None and self._transport is not None:
            self._handshake = self._server.spawn(self._start_tls(self._transport, self._security))
            self._handshake.add_done_callback(self._handshake_over)

    def _handshake_over(self, task: asyncio.Task[None]) -> None:
        """End a connection whose task was cancelled before its first step, and so cannot end it."""
        below = self._below_tls
        if task.cancelled() and below is not None:
            self._fail(below, self._cause or ConnectionAbortedError("the server is stopping"))

    def give_up(self, error: Exception) -> None:
        """End the handshake at any stage.

        Arguments:
            error: reason.
        """
        if self._handshake is not None:
            self._cause = error
            self._handshake.cancel()
        elif self._below_tls is not None:
            self._fail(self._below_tls, error)

    def _fail(self, transport: asyncio.Transport, error: BaseException) -> None:
        if self._security is not None:
            self._security.failed(_address_of(transport), reason_of(error))
        # A handshake that OpenSSL ended has an alert to send; any other connection is cut off.
        if not isinstance(error, ssl_module.SSLError):
            transport.abort()
        self.released()

    async def _start_tls(self, transport: asyncio.Transport, security: Security) -> None:
        hello, self._buffer = self._buffer, b""
        tls = EncryptedTransport(transport, security.context(), server_side=True, take_turn=self._take_turn)
        try:
            await tls.handshake(hello)
            tls.set_protocol(self)
            self._transport = tls
            await security.admit(tls.get_extra_info("ssl_object"), _address_of(transport))
        except (OSError, RefusedPeerError) as error:  # ssl.SSLError is an OSError
            forget_frames(error)
            self._fail(transport, error)
            return
        except asyncio.CancelledError:
            if self._cause is None:
                transport.abort()
                self.released()
                raise
            self._fail(transport, self._cause)
            return
        if not self._server.handshakes.done(self):
            return  # lost meanwhile
        self._forget = security.opened(tls.get_extra_info("ssl_object"), _address_of(transport), self.abort)
        self._stop_timer()
        self._since_s = asyncio.get_running_loop().time()
        self._choose_by_alpn(tls)
        tls.resume_reading()

    def _take_turn(self, step: Callable[[], None]) -> None:
        self._server.handshakes.take_turn(step, self.queue)

    def _choose_by_alpn(self, tls: asyncio.Transport) -> None:
        protocol = tls.get_extra_info("ssl_object").selected_alpn_protocol()
        if protocol == "h2":
            self._become_h2(tls)
        elif protocol == "http/1.1":
            self._become_http1(tls)
        else:
            self._sniff()

    def _sniff(self) -> None:
        timeout_s = self._server.limits.preface_timeout_s
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self.abort)
        self._decide()

    def data_received(self, data: bytes) -> None:
        """Keep the first bytes. Under TLS they may arrive before this object knows that the handshake has ended."""
        self._buffer += data
        if self._awaits_hello and self._plain_too and self._buffer[0] != _TLS_HANDSHAKE:
            self._server.handshakes.done(self)
            self._stop_timer()
            self._security = self._below_tls = None
            self._sniff()
        elif self._awaits_hello and self._transport is not None:
            self._transport.pause_reading()
            self._server.handshakes.take_turn(self._begin_handshake, self.queue)
        else:
            self._decide()

    def _decide(self) -> None:
        if len(self._buffer) < _SNIFF_BYTES or self._transport is None or self._timer is None:
            return
        if self._buffer[:_SNIFF_BYTES] == PREFACE[:_SNIFF_BYTES]:
            self._become_h2(self._transport)
        else:
            self._become_http1(self._transport)

    def _become_h2(self, transport: asyncio.Transport) -> None:
        server = self._server
        router = server.grpc_router if self._grpc_only else server.router
        core = ServerCore(router, server.limits, server.environment(), _peer_of(transport, server.identify))
        self._h2 = ServerH2Protocol(core, transport, server.cork, self.released, server.backlog())
        buffered = self._hand_over(transport, self._h2)
        if buffered:
            self._h2.feed(buffered)
        core.wake()  # our SETTINGS

    def _become_http1(self, transport: asyncio.Transport) -> None:
        if self._grpc_only:
            self.abort()
            return
        server = self._server
        self._http1 = Http1Protocol(
            server, transport, _peer_of(transport, server.identify), self.released, self._since_s
        )
        buffered = self._hand_over(transport, self._http1)
        if buffered:
            self._http1.data_received(buffered)

    def _hand_over(self, transport: asyncio.Transport, protocol: asyncio.BaseProtocol) -> bytes:
        self._stop_timer()
        transport.set_protocol(protocol)
        buffered, self._buffer = self._buffer, b""
        return buffered

    @property
    def peer(self) -> Peer | None:
        """The peer, as its calls see it; None: the connection does not speak HTTP/2 (yet)."""
        return self._h2.core.peer if self._h2 is not None else None

    @property
    def open_calls(self) -> int:
        """Number of open gRPC calls."""
        return self._h2.core.open_calls if self._h2 is not None else 0

    @property
    def idle_since_s(self) -> float | None:
        """Loop time since which the connection is idle; None: it is busy, closing, or in the handshake."""
        if self._h2 is not None:
            return None if self._h2.core.open_calls or self._h2.draining else self._h2.last_read_s
        if self._http1 is not None:
            return self._http1.idle_since_s
        return self._since_s if self._below_tls is None or self._below_tls is not self._transport else None

    def make_way(self) -> bool:
        """Close for a new connection. Returns whether the place is free now."""
        if self._h2 is not None and self._server.limits.goaway_notice_timeout_s > 0:
            self.drain()  # an abort would lose a call that is on its way
            return False
        self.end()
        return True

    def end(self) -> None:
        """Close at once and cut open calls: another address has a right to this place."""
        self.abort()
        self._server.discard(self)

    @property
    def held_bytes(self) -> int:
        """Bytes of unfinished messages."""
        return self._h2.core.held_bytes if self._h2 is not None else 0

    @property
    def reading(self) -> bool:
        """False while reading is paused, because the client does not read."""
        return self._transport is not None and self._transport.is_reading()

    def drain(self) -> None:
        """Close gracefully, as far as the protocol knows how."""
        if self._h2 is not None:
            self._h2.drain()
        elif self._http1 is not None:
            self._http1.drain()
        else:
            self.abort()

    def abort(self) -> None:
        """Abort the connection."""
        if self._h2 is not None:
            self._h2.abort()
        elif self._transport is not None:
            self._transport.abort()

    def eof_received(self) -> bool | None:
        """Close: the client left before it sent anything."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything: the client left before its protocol was known, or was refused."""
        self.released()

    def released(self) -> None:
        """Forget the connection: its protocol object has ended."""
        self._stop_timer()
        self._server.handshakes.done(self)
        self._server.discard(self)
        if self._forget is not None:
            self._forget()
            self._forget = None
        release(self._transport)
        release(self._below_tls)
        self._transport = self._below_tls = self._h2 = self._http1 = self._handshake = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _address_of(transport: asyncio.Transport) -> str:
    name = transport.get_extra_info("peername")
    if not isinstance(name, tuple):
        return "unix:"
    host = name[0].removeprefix("::ffff:")  # IPv4 on [::]
    return f"[{host}]:{name[1]}" if ":" in host else f"{host}:{name[1]}"


def _peer_of(transport: asyncio.Transport, identify: Identify) -> Peer:
    address = _address_of(transport)
    loopback = _is_loopback(transport.get_extra_info("sockname"))
    ssl_object = transport.get_extra_info("ssl_object")
    if ssl_object is None:
        return Peer(address, loopback=loopback, identity=identify(address, None))
    # Only a certificate of a trusted authority identifies the peer.
    is_verified = ssl_object.context.verify_mode == ssl_module.CERT_REQUIRED
    certificate = (ssl_object.getpeercert() or None) if is_verified else None
    return Peer(address, certificate, True, loopback, identity=identify(address, certificate))


def _is_loopback(name: object) -> bool:
    if not isinstance(name, tuple):
        return False
    host = str(name[0]).removeprefix("::ffff:")
    return host == "::1" or host.startswith("127.")


STEPS_A_TURN: Final = 8
"""Handshake steps in one turn. A signature with a 4096-bit RSA key takes 4 ms, all other steps far less."""


class Handshakes:
    """The unfinished handshakes of one server.

    Arguments:
        unfinished_max: limit on connections between accept and the end of their handshake.
    """

    def __init__(self, unfinished_max: int) -> None:
        self._unfinished: dict[Connection, None] = {}
        self._shares = Shares(unfinished_max)
        self._steps = Limiter(STEPS_A_TURN)

    def __len__(self) -> int:
        return len(self._unfinished)

    def add(self, handshake: Connection) -> None:
        """Count a new connection. If there are too many, the oldest of the greediest address is ended."""
        queue = handshake.queue
        if not self._shares.make_room(queue, 1, self._give_way):
            self._give_way(queue)
        self._unfinished[handshake] = None
        self._shares.take(queue, 1)

    def _give_way(self, queue: Identity) -> bool:
        oldest = next((one for one in self._unfinished if one.queue == queue), None)
        if oldest is None:
            return False
        self.done(oldest)
        text = f"more than {self._shares.limit} handshakes are unfinished, and this is the oldest"
        oldest.give_up(RefusedPeerError(text))
        return True

    def take_turn(self, step: Callable[[], None], queue: Identity = "") -> None:
        """Run a handshake step when its turn comes.

        Arguments:
            step: must do nothing if its handshake has ended by then.
            queue: queue of the client's address.
        """
        self._steps.add(step, queue)

    def done(self, handshake: Connection) -> bool:
        """Forget a handshake that is finished or has failed; False if it was forgotten before."""
        if self._unfinished.pop(handshake, self) is not None:
            return False
        self._shares.give_back(handshake.queue, 1)
        return True


LOG_INTERVAL_S: Final = 10.0
LOOK_S_PER_CONNECTION: Final = 1e-5
"""Rest between two scans of all connections, multiplied by the connection limit. A scan takes 1 us per connection, so
all scans together take a tenth of the time at most.
"""
LET_GO_MAX: Final = 32
"""Connections that one scan closes at most, and never more than a hundredth of all: each makes room for one only."""


class ConnectionLimit:
    """Makes room when a server has reached its connection limit.

    Attributes:
        let_go_total: number of connections closed for others.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self._shares = Shares(limits.connections)
        self._of: dict[Identity, dict[Connection, None]] = {}
        self.let_go_total = 0
        self._idle_s = limits.crowded_idle_s
        self._look_interval_s = LOOK_S_PER_CONNECTION * limits.connections
        self._let_go_max = max(1, min(LET_GO_MAX, limits.connections // 100))
        self._look_at_s = self._log_at_s = float("-inf")
        self._refused_unsaid = 0

    def add(self, connection: Connection) -> None:
        """Count a connection in the share of its address."""
        self._shares.take(connection.queue, 1)
        self._of.setdefault(connection.queue, {})[connection] = None

    def discard(self, connection: Connection) -> None:
        """Subtract a counted connection from the share of its address."""
        queue = connection.queue
        self._shares.give_back(queue, 1)
        del self._of[queue][connection]
        if not self._of[queue]:
            del self._of[queue]

    def make_room(self, connections: Iterable[Connection], newcomer: Connection) -> bool:
        """Close an idle connection for a new one, else one of the greediest address; False: refuse the new one.

        Arguments:
            connections: all open connections.
            newcomer: new connection, not counted yet.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + self._look_interval_s
            if self._let_go(connections, now_s):
                return True
        if self._shares.make_room(newcomer.queue, 1, self._end_newest):
            return True
        self._refused_unsaid += 1
        if now_s >= self._log_at_s:
            self._log_at_s = now_s + LOG_INTERVAL_S
            _log.warning(
                "rejected connections: %d; the limit of %d is reached; %d idle connections were closed so far",
                self._refused_unsaid,
                self._shares.limit,
                self.let_go_total,
            )
            self._refused_unsaid = 0
        return False

    def _end_newest(self, queue: Identity) -> bool:
        newest = next(reversed(self._of[queue]))
        self.let_go_total += 1
        newest.end()
        return True

    def _let_go(self, connections: Iterable[Connection], now_s: float) -> bool:
        """Close some idle connections, and return whether one of them was closed at once."""
        since = [(one.idle_since_s, one) for one in connections]
        idle = [(since_s, one) for since_s, one in since if since_s is not None and now_s - since_s >= self._idle_s]
        idle.sort(key=lambda pair: pair[0])
        have_gone = [connection.make_way() for _, connection in idle[: self._let_go_max]]
        self.let_go_total += len(have_gone)
        return any(have_gone)
