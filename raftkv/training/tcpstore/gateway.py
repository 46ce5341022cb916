"""The TCPStore gateway: torch's own store protocol, replicated in raftkv.

::

    raftkv tcpstore-gateway --listen 127.0.0.1:29400 --endpoints h1:2379,h2:2379,h3:2379
    torchrun --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29400 --rdzv-conf=is_host=0 ...

For whatever knows only TCPStore: torchrun's c10d, NCCL's own threads, C++. Such a client never connects again, so a
gateway belongs on the node of its clients, and it is the gateway that goes from member to member of raftkv. Gateways of
one name, on any number of nodes, serve one store.

Reading order: ``tcpstore.wire`` (bytes), ``tcpstore.connection`` (a client),
``tcpstore.budget`` (what all clients may hold), ``tcpstore.store`` (what an operation means),
``tcpstore.writer`` (exactly once), ``tcpstore.lifetime`` (how long keys live).
"""

from __future__ import annotations

import asyncio
import logging
import resource
from dataclasses import dataclass
from typing import Final

from raftkv import aio
from raftkv.errors import ConfigError, StatusError
from raftkv.training.tcpstore.budget import Budgets
from raftkv.training.tcpstore.connection import Connection
from raftkv.training.tcpstore.lifetime import LINGER_S, StoreLifetime
from raftkv.training.tcpstore.store import ReplicatedStore

ROOT: Final = "/raftkv/tcpstore/"
CONNECTIONS_MAX: Final = 4096
DESCRIPTORS_RESERVED: Final = 64
"""For what is not a client: connections to members, standard streams, files that are opened for a moment."""
_DRAIN_S: Final = 5.0
_CHECK_INTERVAL_S: Final = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What a gateway serves.

    Attributes:
        host, port: to listen on; port 0: any that is free.
        prefix: of the store's keys; ends with a slash.
        linger_s: see ``tcpstore.lifetime``.
        fresh: begin with an empty store whoever else serves it.
    """

    host: str = "127.0.0.1"
    port: int = 29400
    prefix: str = f"{ROOT}default/"
    linger_s: int = LINGER_S
    fresh: bool = False

    def __post_init__(self) -> None:
        if not self.prefix.endswith("/"):
            raise ConfigError(f"the prefix of a store ends with a slash: {self.prefix!r}")
        if self.linger_s < 1:
            raise ConfigError(f"linger must be at least 1 s, not {self.linger_s}")


class Gateway:
    """A running gateway; made by ``start``.

    Arguments:
        kv: the client; it stays its owner's.
        config: what to serve.
    """

    def __init__(self, kv: aio.Client, config: GatewayConfig) -> None:
        self._config = config
        self._trouble = _Trouble()
        self._store = ReplicatedStore(kv, config.prefix, on_trouble=self._trouble.note)
        self._lifetime = StoreLifetime(
            kv, config.prefix, config.linger_s, fresh=config.fresh, on_trouble=self._trouble.note
        )
        self._connections: set[Connection] = set()
        self._connections_max = connections_allowed()
        self._is_full = False
        self._budgets = Budgets()
        self._checking: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        if self._server is None:
            raise ConfigError("the gateway does not listen yet")
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def start(self) -> None:
        """Listen, once raftkv has answered.

        Raises:
            OSError: the address cannot be listened on.
            StatusError: raftkv refuses for good.
        """
        loop = asyncio.get_running_loop()
        # The address first: whether it is free is known at once.
        self._server = await loop.create_server(
            self._connection, self._config.host, self._config.port, backlog=1024, start_serving=False
        )
        if await self._lifetime.begin():
            _log.info("the store below %s begins empty", self._config.prefix)
        await self._server.start_serving()
        self._checking = loop.create_task(self._check())

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            now = asyncio.get_running_loop().time()
            for connection in list(self._connections):
                connection.check(now)

    async def close(self) -> None:
        """Listen no more, do what clients have written, close their connections, move out."""
        if self._checking is not None:
            self._checking.cancel()
        if self._server is not None:
            self._server.close()
        connections = list(self._connections)
        try:
            async with asyncio.timeout(_DRAIN_S):
                for connection in connections:
                    await connection.finished()
                await self._store.close()
                await self._lifetime.end()
        except TimeoutError:
            _log.warning("raftkv does not answer: some of what clients wrote last may be lost")
        for connection in connections:
            connection.close()

    def _connection(self) -> asyncio.Protocol:
        if len(self._connections) >= self._connections_max:
            if not self._is_full:
                _log.warning("connections are refused: there are %d, which is the limit", self._connections_max)
            self._is_full = True
            return _Refusal()
        self._is_full = False
        connection = Connection(self._store, self._connections.discard, self._budgets)
        self._connections.add(connection)
        return connection


def connections_allowed() -> int:
    """Compute how many clients there may be: with no descriptor left, the gateway could not reach raftkv either."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    return max(1, min(CONNECTIONS_MAX, soft - DESCRIPTORS_RESERVED))


class _Refusal(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        transport.close()


class _Trouble:
    """One line when raftkv stops answering, one when it answers again, whatever the number of calls."""

    def __init__(self) -> None:
        self._is_known = False

    def note(self, error: StatusError | None) -> None:
        """Note that an attempt failed, or (None) that what had failed works."""
        if error is None and self._is_known:
            _log.warning("raftkv answers again")
        elif error is not None and not self._is_known:
            _log.warning("raftkv does not answer, clients wait: %s", error)
        self._is_known = error is not None
