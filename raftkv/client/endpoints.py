r"""Service discovery: the addresses of a service's servers as keys, in the format of etcd's ``naming/endpoints``.

::

    greeter = kv.endpoints("greeter")
    async with greeter.register("10.0.0.1:50051"):                  # on a server: the key exists during this block
        await serve()

    async for servers in greeter.watch():                           # on a client: all servers at each change
        channel.use([server.addr for server in servers.values()])

A key ``greeter/10.0.0.1:50051`` holds ``{"Op":0,"Addr":"10.0.0.1:50051","Metadata":null}``, byte for byte what Go's
``endpoints.Manager`` writes. So Go's resolver (``etcd:///greeter``) finds servers registered here, and this module
finds servers registered by Go. When a server dies, its lease expires and the key is deleted; a server that was
partitioned puts the key again.

Invariants:

- ``watch`` yields states in order, each once, and never misses the last one: it reads, watches from the next
  revision, and reads again after history was compacted.
- An invalid value is logged once for each look, and does not hide other values.
- Keys are those below ``SERVICE/``. (Go's manager lists the prefix ``SERVICE``, and so mixes ``greeter`` with
  ``greeter-2``.)

Not here: load balancing over the servers; ``examples/grpc_endpoints.py`` does it for grpcio.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

from raftkv.client.kv import KV, Txn
from raftkv.client.lease import Session
from raftkv.client.operations import Delete, LeaseLike, Put
from raftkv.client.rpc.retry import until_answered
from raftkv.client.scope import Scope
from raftkv.client.values import DELETE, KeyValue
from raftkv.client.watch import Watches
from raftkv.errors import CompactedError

_log = logging.getLogger(__name__)

# Go's encoder escapes these characters, so that JSON can be embedded in HTML.
_ESCAPED: Final = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


class Endpoint(NamedTuple):
    """The address of a server.

    Attributes:
        addr: address for clients, ``host:port``.
        metadata: information about the server: any JSON value; None: none.
    """

    addr: str
    metadata: Any = None


def encode(endpoint: Endpoint) -> bytes:
    r"""Return the value of an endpoint's key.

    >>> encode(Endpoint("10.0.0.1:80", {"zone": "a&b"}))
    b'{"Op":0,"Addr":"10.0.0.1:80","Metadata":{"zone":"a\\u0026b"}}'

    Raises:
        ValueError: the address is empty, or the metadata cannot be encoded as JSON.
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
        ValueError: the value is not an endpoint.
    """
    try:
        found = json.loads(value)
    except RecursionError:
        raise ValueError("brackets in brackets without end") from None
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object is expected, not {type(found).__name__}")
    # Go's decoder ignores the case of names, and values written by hand use various cases.
    named = {name.lower(): item for name, item in found.items()}
    addr = named.get("addr", "")
    if not isinstance(addr, str):
        raise ValueError(f"Addr must be a text, not {addr!r}")
    return Endpoint(addr, named.get("metadata"))


class Endpoints:
    """The servers of one service; created by ``Client.endpoints``.

    Attributes:
        service: name of the service.
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
        """Register an endpoint for the block, with a separate session; the endpoint is removed at the end of the block.

        Arguments:
            addr: address of this server for clients.
            metadata: information about the server.
            name: name of the key below the service's; empty: the address.
            ttl: seconds after which a dead or partitioned server is removed.

        Raises:
            StatusError: the cluster refused, or could not be reached at the start.
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
        """Add or replace an endpoint.

        Arguments:
            addr, metadata, name: as for ``register``.
            lease: lease that the endpoint ends with; None: the endpoint stays until it is deleted.
            timeout_s: None: the client's.

        Raises:
            LeaseLost: the lease is no longer safe to use.
            StatusError: the cluster refused, or the outcome is unknown; the call may be repeated.
            ValueError: the address is empty, or the metadata cannot be encoded as JSON.
        """
        await self.update({name or addr: Endpoint(addr, metadata)}, lease=lease, timeout_s=timeout_s)

    async def delete(self, name: str, *, timeout_s: float | None = None) -> None:
        """Delete an endpoint; does nothing if it does not exist.

        Arguments:
            name: name of the endpoint's key; by default the address.
            timeout_s: None: the client's.

        Raises:
            StatusError: the cluster refused, or the outcome is unknown; the call may be repeated.
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
        """Add and delete several endpoints in one revision: no reader sees a part of the change.

        Arguments:
            add: endpoints by the names of their keys.
            delete: names of the keys to delete.
            lease: lease that the added endpoints end with; None: they stay until deleted.
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
        """Return all endpoints by the names of their keys, without the service's prefix.

        Raises:
            StatusError: the cluster refused, or could not be reached.
        """
        return self._read(await KV(self._scope).range(self._prefix, prefix=True, timeout_s=timeout_s))

    async def watch(self) -> AsyncGenerator[dict[str, Endpoint], None]:
        """Yield all endpoints at once, and all of them again after each change; never ends by itself.

        During an outage of the cluster nothing is yielded: the last known endpoints remain in use.

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
                _log.warning(
                    "ignored key %r of service %s, which is not an endpoint: %s", item.key, self.service, error
                )
        return found
