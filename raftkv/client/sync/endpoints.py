"""Endpoints of services for programs without an event loop; see ``client.endpoints`` for what they are.

::

    with kv.endpoints("greeter").register("10.0.0.1:50051"):
        serve()

    for servers in kv.endpoints("greeter").watch():
        channel.use([server.addr for server in servers.values()])
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from raftkv.client import endpoints as aio_endpoints
from raftkv.client.endpoints import Endpoint
from raftkv.client.sync.blocking import Blocking, blocking
from raftkv.client.sync.iteration import Drawn, Stream
from raftkv.client.sync.session import Session

if TYPE_CHECKING:
    from raftkv.client.sync.library import Client


class Endpoints(Blocking[aio_endpoints.Endpoints]):
    """The servers of one service; made by ``Client.endpoints``."""

    def __init__(self, client: Client, service: str) -> None:
        loop, kv = client.target()
        super().__init__(client, loop, kv.endpoints(service))
        self._client = client
        self._service = service

    @property
    def service(self) -> str:
        """Its name."""
        return self._service

    @contextmanager
    def register(self, addr: str, metadata: Any = None, *, name: str = "", ttl: float = 10) -> Iterator[Session]:
        """Be an endpoint for a block, with a session of its own; clients lose sight of it at the end of the block.

        Arguments:
            addr: where this server is, as clients dial it.
            metadata: what it says of itself.
            name: of its key below the service's; empty: the address.
            ttl: seconds after which a server that has died, or is cut off, is one no more.

        Raises:
            StatusError: the cluster refused, or could not be reached to begin with.
            ValueError: it has no address, or JSON cannot hold the metadata.
        """
        value = aio_endpoints.encode(Endpoint(addr, metadata))
        with self._client.session(ttl) as session:
            session.keep(f"{self._service}/{name or addr}", value)
            yield session

    add = blocking(aio_endpoints.Endpoints.add)
    delete = blocking(aio_endpoints.Endpoints.delete)
    update = blocking(aio_endpoints.Endpoints.update)
    list = blocking(aio_endpoints.Endpoints.list)

    def watch(self) -> Stream[dict[str, Endpoint]]:
        """Follow the endpoints: all of them at once, and again after each change; a ``Stream`` that never ends."""
        return Stream(self, self._loop, Drawn(self._inner.watch()))
