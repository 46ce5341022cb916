"""``make-mirror``: copy the keys of a prefix to another cluster, then follow every change.

Two phases: the copy reads one revision of the source in pages, and the watch starts at the next revision, so no change
is missed. A revision of the source becomes one transaction at the destination, unless it is larger than
``--max-txn-ops`` or than the destination's limit. The number of copied keys is printed every 30 seconds, and standard
error reports a cluster that does not answer. Because a watch of unchanging keys is silent too, the source is probed
from time to time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from raftkv.cli.command import Invocation
from raftkv.cli.ctl.session import client_options, connection_settings, open_session, remark
from raftkv.cli.ctl.watch import watching
from raftkv.cli.pflag import text_bytes
from raftkv.cli.program import BAD_ARGUMENTS, BAD_CONNECTION, CommandError, refused
from raftkv.client import Client, Method
from raftkv.client.paging import read_pages
from raftkv.client.rpc import methods
from raftkv.client.scope import prefix_end
from raftkv.client.watch import Request, Watcher, responses
from raftkv.errors import ConfigError, RequestTooLargeError, StatusError, TooManyOperationsError
from raftkv.pb import kv_pb2, rpc_pb2

if TYPE_CHECKING:
    from google.protobuf.message import Message

M = TypeVar("M", bound="Message")

PAGE_KEYS: Final = 1000
TXN_BYTES: Final = 1536 * 1024 - 4096
"""Limit of a transaction's bytes: the members' default, minus their own overhead."""
LARGER: Final = "message larger than max"
"""Part of gRPC's error for a message that is too large, at either end."""
FRAME_BYTES: Final = 8
"""Maximum number of bytes that a transaction adds to each of its operations."""
REPORT_S: Final = 30.0
PATIENCE_S: Final = 60.0
"""Time for which either cluster may be unreachable before the mirror ends."""

SILENCE_S: Final = 5.0
"""Time without an answer to a call after which standard error reports the cluster."""
PROBE_S: Final = 3.0
"""Interval between probes of the source while it is watched."""

_TXN: Final = Method(methods.TXN.path, rpc_pb2.TxnResponse, True)
"""Repeatable: only the mirror writes there, and its writes may be executed twice."""


@dataclass
class Cluster:
    """One of the two clusters; each outage is reported once on standard error.

    Attributes:
        name: role and address of the cluster.
        client: client of the cluster.
    """

    name: str
    client: Client
    _is_noted: bool = False

    async def call(self, method: Method[M], request: Any) -> M:
        """Call any endpoint.

        Raises:
            StatusError: the call failed.
        """
        timer = asyncio.get_running_loop().call_later(SILENCE_S, self._note)
        try:
            answer = await self.client.call(method, request, timeout_s=PATIENCE_S)
        finally:
            timer.cancel()
        self._is_noted = False
        return answer

    def _note(self) -> None:
        if not self._is_noted:
            self._is_noted = True
            remark(f"no answer from the {self.name} for {SILENCE_S:.0f} s; the mirror continues when it answers")


@dataclass
class Mirror:
    """The source, the destination, and the number of copied keys."""

    source: Cluster
    destination: Cluster
    prefix: bytes
    new_prefix: bytes
    operations_max: int
    copied: int = 0

    def _target(self, key: bytes) -> bytes:
        return self.new_prefix + key[len(self.prefix) :]

    def _put(self, pair: kv_pb2.KeyValue) -> rpc_pb2.RequestOp:
        return rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=self._target(pair.key), value=pair.value))

    def _operation(self, event: kv_pb2.Event) -> rpc_pb2.RequestOp:
        if event.type == kv_pb2.Event.PUT:
            return self._put(event.kv)
        request = rpc_pb2.DeleteRangeRequest(key=self._target(event.kv.key))
        return rpc_pb2.RequestOp(request_delete_range=request)

    async def copy(self) -> int:
        """Copy the existing keys; return the revision of the copy."""
        revision = 0
        key, end = self._range()
        request = rpc_pb2.RangeRequest(key=key, range_end=end)
        async with aclosing(read_pages(partial(self.source.call, methods.RANGE), request, PAGE_KEYS)) as pages:
            async for page in pages:
                revision = revision or page.header.revision
                for batch in self._batches(map(self._put, page.kvs)):
                    await self._commit(batch)
        return revision

    def _range(self) -> tuple[bytes, bytes]:
        return (self.prefix, prefix_end(self.prefix)) if self.prefix else (b"\0", b"\0")

    async def probe(self) -> None:
        """Read one key of the source at intervals, for ever; a missing answer does not end the mirror."""
        request = rpc_pb2.RangeRequest(key=self._range()[0], keys_only=True)
        while True:
            await asyncio.sleep(PROBE_S)
            with suppress(StatusError):
                await self.source.call(methods.RANGE, request)

    async def follow(self, start_revision: int) -> None:
        """Apply each change of the source, from a revision on, until the watch ends.

        Raises:
            StatusError: the watch has ended.
        """
        watcher = Watcher(Request(*self._range(), start_revision))
        async with watching(self.source.client) as hub, aclosing(responses(hub, watcher)) as changes:
            async for response in changes:
                for operations in self._by_revision(response.events):
                    await self._commit(operations)

    def _by_revision(self, events: Iterable[kv_pb2.Event]) -> Iterator[list[rpc_pb2.RequestOp]]:
        # If one revision puts and deletes a key, the last operation counts: the destination refuses both in one
        # transaction.
        operations: dict[bytes, rpc_pb2.RequestOp] = {}
        revision = 0
        for event in events:
            if event.kv.mod_revision != revision:
                yield from self._batches(operations.values())
                operations = {}
            revision = event.kv.mod_revision
            operations[event.kv.key] = self._operation(event)
        yield from self._batches(operations.values())

    def _batches(self, operations: Iterable[rpc_pb2.RequestOp]) -> Iterator[list[rpc_pb2.RequestOp]]:
        """Yield operations in as few transactions as the destination accepts by default; a large one is alone."""
        batch, size_bytes = list[rpc_pb2.RequestOp](), 0
        for operation in operations:
            more_bytes = operation.ByteSize() + FRAME_BYTES
            if batch and (len(batch) >= self.operations_max or size_bytes + more_bytes > TXN_BYTES):
                yield batch
                batch, size_bytes = [], 0
            batch.append(operation)
            size_bytes += more_bytes
        if batch:
            yield batch

    async def _commit(self, operations: list[rpc_pb2.RequestOp]) -> None:
        try:
            await self.destination.call(_TXN, rpc_pb2.TxnRequest(success=operations))
        except StatusError as error:
            if len(operations) == 1 or not _is_too_much(error):
                raise
            half = len(operations) // 2
            await self._commit(operations[:half])
            await self._commit(operations[half:])
        else:
            self.copied += len(operations)


def _is_too_much(error: StatusError) -> bool:
    """Return whether the destination may accept half of a transaction that it refused as a whole."""
    return isinstance(error, RequestTooLargeError | TooManyOperationsError) or LARGER in str(error)


def make_mirror(invocation: Invocation) -> None:
    """Copy, then follow until an error or a signal."""
    there = invocation.argument("make-mirror takes one destination argument")
    prefix, new_prefix = text_bytes(invocation["prefix"]), text_bytes(invocation["dest-prefix"])
    if invocation["no-dest-prefix"] and new_prefix:
        text = "`--dest-prefix` and `--no-dest-prefix` cannot be set at the same time, choose one"
        raise CommandError(text, BAD_ARGUMENTS)
    if not new_prefix and not invocation["no-dest-prefix"]:
        new_prefix = prefix
    session = open_session(invocation)
    destination = _of_destination(invocation)
    options = client_options(destination, connection_settings(destination, {}))

    async def mirror(source: Client) -> None:
        with refused(ConfigError, BAD_CONNECTION):
            made = Client([there], options)
        async with made as destination:
            here = Cluster(f"source ({', '.join(session.endpoints)})", source)
            far, operations_max = Cluster(f"destination ({there})", destination), max(1, invocation["max-txn-ops"])
            work = Mirror(here, far, prefix, new_prefix, operations_max)
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(_report(work))]
                try:
                    start = invocation["rev"] or await work.copy() + 1
                    beside.append(tasks.create_task(work.probe()))
                    await work.follow(start)
                finally:
                    for task in beside:
                        task.cancel()

    async def unwrapped(source: Client) -> None:
        try:
            await mirror(source)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    session.run(unwrapped)


def _of_destination(invocation: Invocation) -> Invocation:
    """Return the invocation with the destination's flags as the global ones."""
    names = ("cert", "key", "cacert", "insecure-transport", "user", "password")
    values = invocation.values | {name: invocation[f"dest-{name}"] for name in names}
    values |= {"auth-jwt-token": "", "discovery-srv": ""}
    changed = {name for name in names if f"dest-{name}" in invocation.changed}
    return Invocation(values, changed)


async def _report(mirror: Mirror) -> None:
    while True:
        await asyncio.sleep(REPORT_S)
        print(mirror.copied, flush=True)
