r"""Addresses of the servers of a service, as keys that end with them, in the format of etcd's ``naming/endpoints``.

::

    greeter = kv.endpoints("greeter")
    async with greeter.register("10.0.0.1:50051"):                  # a server: the key lives while this block does
        await serve()

    async for servers in greeter.watch():                           # a client: all servers, now and after each change
        channel.use([server.addr for server in servers.values()])

A key ``greeter/10.0.0.1:50051`` holds ``{"Op":0,"Addr":"10.0.0.1:50051","Metadata":null}``, byte for byte what Go's
``endpoints.Manager`` writes, so Go's resolver (``etcd:///greeter``) finds servers that are registered here, and the
other way round. A server that dies takes its key with it when its lease ends; one that was cut off puts it again.

Invariants:

- ``watch`` shows each state once, in order, and misses no last state: it reads, watches from the next revision on, and
  reads again when history was compacted.
- A value that is no endpoint is named in the log once a look, and hides no other.
- Keys are those below ``SERVICE/``: Go's manager lists ``SERVICE`` itself as a prefix, and so mixes ``greeter`` with
  ``greeter-2``.

Leaves out how calls are spread over the servers: ``examples/grpc_endpoints.py`` does it for grpcio.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from raftkv.client.kv import KV, Txn
from raftkv.client.lease import Session
from raftkv.client.operations import Delete, Put
from raftkv.client.rpc.retry import until_answered
from raftkv.client.scope import Scope
from raftkv.client.values import DELETE
from raftkv.client.watch import Watches
from raftkv.errors import CompactedError

if TYPE_CHECKING:
    from raftkv.client.operations import LeaseLike
    from raftkv.client.values import KeyValue

_log = logging.getLogger(__name__)

# Go's encoder writes these so that JSON may stand in a page of HTML.
_ESCAPED: Final = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


class Endpoint(NamedTuple):
    """Where a server is.

    Attributes:
        addr: as clients dial it, ``host:port``.
        metadata: what the server says of itself: anything that JSON can hold; None: nothing.
    """

    addr: str
    metadata: Any = None


def encode(endpoint: Endpoint) -> bytes:
    r"""Return the value of an endpoint's key.

    >>> encode(Endpoint("10.0.0.1:80", {"zone": "a&b"}))
    b'{"Op":0,"Addr":"10.0.0.1:80","Metadata":{"zone":"a\\u0026b"}}'

    Raises:
        ValueError: it has no address, or JSON cannot hold the metadata.
    """
    if not endpoint.addr:
        raise ValueError("an endpoint needs an address, as host:port")
    try:
        # Go's encoder sorts the keys of maps.
        text = json.dumps(endpoint.metadata, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
        addr = json.dumps(endpoint.addr, ensure_ascii=False)
        return f'{{"Op":0,"Addr":{addr},"Metadata":{text}}}'.translate(_ESCAPED).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the endpoint {endpoint.addr} cannot be written as JSON: {error}") from None


def decode(value: bytes) -> Endpoint:
    """Read the value of an endpoint's key.

    >>> decode(b'{"Addr":"10.0.0.1:80"}')
    Endpoint(addr='10.0.0.1:80', metadata=None)

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(value)
    except RecursionError:
        raise ValueError("brackets in brackets without end") from None
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object is expected, not {type(found).__name__}")
    # Go's decoder takes names in any case; what is written by hand has them in many.
    named = {name.lower(): item for name, item in found.items()}
    addr = named.get("addr", "")
    if not isinstance(addr, str):
        raise ValueError(f"Addr must be a text, not {addr!r}")
    return Endpoint(addr, named.get("metadata"))


class Endpoints:
    """The servers of one service; made by ``Client.endpoints``.

    Attributes:
        service: its name.
    """

    def __init__(self, scope: Scope, service: str) -> None:
        if not isinstance(service, str) or not service or service.endswith("/"):
            raise ValueError(f"a service needs a name without a slash at its end, not {service!r}")
        self.service = service
        self._scope = scope
        self._prefix = f"{service}/"

    def __repr__(self) -> str:
        return f"<Endpoints of {self.service!r}>"

    @asynccontextmanager
    async def register(
        self, addr: str, metadata: Any = None, *, name: str = "", ttl: float = 10
    ) -> AsyncIterator[Session]:
        """Be an endpoint for a block, with a session of its own; clients lose sight of it at the end of the block.

        Arguments:
            addr: where this server is, as clients dial it.
            metadata: what it says of itself.
            name: of its key below the service's; empty: the address.
            ttl: seconds after which a server that has died, or is cut off, is one no more.

        Raises:
            StatusError: the cluster refused, or could not be reached to begin with.
            ValueError: as for ``add``.
        """
        value = encode(Endpoint(addr, metadata))
        async with Session(self._scope, ttl, None, None) as session:
            await session.keep(self._key(name or addr), value)
            yield session

    async def add(
        self,
        addr: str,
        metadata: Any = None,
        *,
        name: str = "",
        lease: LeaseLike | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Add an endpoint, or put another in its place.

        Arguments:
            addr, metadata, name: as for ``register``.
            lease: it ends with this one; None: it stays until it is deleted.
            timeout_s: None: the client's.

        Raises:
            LeaseLost: the lease cannot be relied on.
            StatusError: the cluster refused, or it is unknown what happened; may be done again.
            ValueError: it has no address, or JSON cannot hold the metadata.
        """
        await self.update({name or addr: Endpoint(addr, metadata)}, lease=lease, timeout_s=timeout_s)

    async def delete(self, name: str, *, timeout_s: float | None = None) -> None:
        """Delete an endpoint; does nothing if there is none.

        Arguments:
            name: of its key below the service's; the address, unless it was given another.
            timeout_s: None: the client's.

        Raises:
            StatusError: the cluster refused, or it is unknown what happened; may be done again.
        """
        await self.update(delete=(name,), timeout_s=timeout_s)

    async def update(
        self,
        add: Mapping[str, Endpoint] | None = None,
        *,
        delete: Iterable[str] = (),
        lease: LeaseLike | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Add and delete several in one step: no reader sees a part of it.

        Arguments:
            add: endpoints by the names of their keys below the service's.
            delete: names.
            lease: the added ones end with it; None: they stay.
            timeout_s: None: the client's.

        Raises:
            LeaseLost, StatusError, ValueError: as for ``add``.
        """
        values = {name: encode(endpoint) for name, endpoint in (add or {}).items()}
        puts = [Put(self._key(name), value, lease) for name, value in values.items()]
        deletes = [Delete(self._key(name)) for name in delete]
        if puts or deletes:
            await Txn(self._scope).then(*puts, *deletes).commit(timeout_s=timeout_s)

    async def list(self, *, timeout_s: float | None = None) -> dict[str, Endpoint]:
        """Return all endpoints by the names of their keys, without the service's.

        Raises:
            StatusError: the cluster refused, or could not be reached.
        """
        return self._read(await KV(self._scope).range(self._prefix, prefix=True, timeout_s=timeout_s))

    async def watch(self) -> AsyncGenerator[dict[str, Endpoint], None]:
        """Follow the endpoints: all of them at once, and all of them again after each change; never ends by itself.

        An outage of the cluster shows nothing: the endpoints stay as they were last known.

        Raises:
            StatusError: the cluster refuses.
        """
        shown: dict[str, Endpoint] | None = None
        while True:
            page = await until_answered(lambda: KV(self._scope).range(self._prefix, prefix=True))
            found = self._read(page)
            if found != shown:
                yield dict(shown := found)
            watch = Watches(self._scope).watch(self._prefix, prefix=True, start_revision=page.revision + 1)
            try:
                while events := await watch.next_batch():
                    found = dict(shown)
                    for event in events:
                        found.pop(self._name(event.key), None)
                        if event.type != DELETE:
                            found |= self._read([event.kv])
                    if found != shown:
                        yield dict(shown := found)
                return
            except CompactedError:
                continue
            finally:
                watch.cancel()

    def _key(self, name: str) -> bytes:
        if not name:
            raise ValueError(f"an endpoint of {self.service} needs a name")
        return f"{self._prefix}{name}".encode()

    def _name(self, key: bytes) -> str:
        return key.decode(errors="backslashreplace").removeprefix(self._prefix)

    def _read(self, items: Iterable[KeyValue]) -> dict[str, Endpoint]:
        found = {}
        for item in items:
            try:
                found[self._name(item.key)] = decode(item.value)
            except ValueError as error:
                _log.warning("the key %r of service %s is no endpoint: %s", item.key, self.service, error)
        return found
