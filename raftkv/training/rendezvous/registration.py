"""A node's registration: its lease and its leased key, while it takes part in a run.

Owns the value of the node's key. The key says which generations this node may be in. It always describes this process
correctly, also when it is written again because the lease was lost:

    registered               want = 1, running = 0         it runs nothing
    declared in n            want = n + 1, running = 0     it has stopped everything up to n
    lost and back in n       want = n, running = n         it still runs n, unaware that its lease had ended

Each write has the previous one (the key's mod_revision) as its condition, so a delayed attempt cannot undo a later
write.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from raftkv.client.control import Control, Grant, OnTrouble, until_answered
from raftkv.client.errors import is_client_closed
from raftkv.client.kv import Txn
from raftkv.client.operations import Get, Operation, Put, lease_of, mod_revision, version
from raftkv.client.values import TxnResult
from raftkv.errors import LeaseNotFoundError, StatusError
from raftkv.training.config import RunConfig
from raftkv.training.records import GATHERING, HEARTBEAT_LOST, PARTITION, Fault, Node, RunKeys, State

_log = logging.getLogger(__name__)

OUTAGE_S: Final = 3.0
"""If a lease was not confirmed for this long beyond its TTL, the store was unreachable, probably for others too. An
election is shorter and ends no live node's lease, so it must not extend the time of dead nodes."""


class Registration:
    """The leased key of a node, written again when its lease was lost.

    Arguments:
        control: the store.
        config: configuration of this node.
        node: the value of its key.
        on_registered: called at each registration with what the store held: record, calls and revision.
        on_lost: called when the lease is lost; the node registers again by itself.
        on_outage: called at every beat at which the store is unreachable.

    Attributes:
        node: node as registered.
        grant: the lease; None while it is lost.
        registered: set while the node's key exists, as far as is known.
        refusal: why the key cannot be written again; None: it exists, or is being written.
        generation: generation that runs here; 0: none.
    """

    def __init__(
        self,
        control: Control,
        config: RunConfig,
        node: Node,
        *,
        on_registered: Callable[[TxnResult], None],
        on_lost: Callable[[], None],
        on_outage: Callable[[], None],
    ) -> None:
        self.node = node
        self.grant: Grant | None = None
        self.registered = asyncio.Event()
        self.refusal: StatusError | None = None
        self.generation = 0
        self._control = control
        self._config = config
        self._keys = RunKeys(config.run_id)
        self._on_registered = on_registered
        self._on_lost = on_lost
        self._on_outage = on_outage
        self._revision = 0
        self._since = 0
        self._declared = False
        self._left = False
        self._again: asyncio.Task[None] | None = None
        self._endings: set[asyncio.Task[None]] = set()
        self._settled = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._beat_at = 0.0
        self._stood_still_s = 0.0

    async def open(self, on_trouble: OnTrouble | None = None) -> None:
        """Register for the first time.

        Arguments:
            on_trouble: see ``rpc.retry.until_answered``.

        Raises:
            StatusError: the store cannot be reached within ``connect_timeout_s``, or refused.
        """
        await until_answered(self._register, self._config.connect_timeout_s, on_trouble)
        self._beat()

    async def wait(self) -> None:
        """Wait until the node's key exists, or ``leave`` is called.

        Raises:
            StatusError: the store refuses to write the key again, or the client is closed.
        """
        while not self.registered.is_set() and not self._left:
            if self.refusal is not None:
                raise self.refusal
            await self._settled.wait()

    async def leave(self, *, revoke: bool = True) -> None:
        """End the registration.

        Arguments:
            revoke: False: the store does not answer, so the lease ends with its TTL.
        """
        self._left = True
        self._settled.set()
        if self._again is not None:
            self._again.cancel()
        if self.grant is not None:
            grant, self.grant = self.grant, None
            await self._drop(grant, revoke=revoke)

    def was_there(self, revision: int) -> bool:
        """Return whether the node's key exists, as far as is known, and has existed since before a revision."""
        return self.registered.is_set() and self._since < revision

    def starts(self, generation: int) -> None:
        """Record that a world begins to run here."""
        self.generation = generation
        self._declared = False

    async def declare(self, want: int) -> None:
        """Write that nothing before the generation ``want`` runs here any more, unless the key says so already.

        Raises:
            StatusError: the store refuses, or the client is closed.
        """
        while not self._left and (not self._declared or self.node.want < want):
            self.node = replace(self.node, want=max(want, self.node.want), running=0)
            self._declared = True  # if the lease is lost meanwhile, this value is registered again
            await self.wait()
            grant = self.grant
            if grant is None:
                self._declared = False
                continue
            if not await self._write(grant):
                self._declared = False
                self.lose(grant.id)
                # An operator may have deleted only the key of an arbiter: no other key may keep that lease.
                ending = self._loop.create_task(self._drop(grant))
                self._endings.add(ending)
                ending.add_done_callback(self._endings.discard)

    async def _write(self, grant: Grant) -> bool:
        """Write ``node`` into the node's key; False: the key ended with its lease."""
        key, value = self._keys.node(self.node.id), self.node.encode()
        put = [Put(key, value, lease=grant.id)]
        while True:
            try:
                result = await until_answered(
                    lambda: self._control.txn([mod_revision(key) == self._revision], put, [Get(key)])
                )
            except LeaseNotFoundError:
                return False
            if result.succeeded:
                self._revision = result.revision
                return True
            found = result.results[0]
            if found is None:
                return False
            self._revision = found.mod_revision
            if found.value == value:
                return True  # written by an attempt whose answer was lost

    def lose(self, lease_id: int) -> None:
        """Register again if a lease that the cluster has ended is this node's; its keys were deleted with it."""
        if self._left or self.grant is None or self.grant.id != lease_id:
            return
        self.grant = None
        self._revision = 0
        self._on_lost()
        if self.registered.is_set():
            self.registered.clear()
            self._settled.clear()
            self.refusal = None
            self._again = self._loop.create_task(self._register_again())

    # -- registering

    async def _register(self) -> None:
        """Register under a new lease. Only one call runs at a time; if ``lose`` is called meanwhile, this one starts
        again."""
        key = self._keys.node(self.node.id)
        while True:
            grant = self.grant = await self._new_grant()
            try:
                result = await self._control.txn(
                    [mod_revision(key) == self._revision], self._registration(grant), [Get(key)]
                )
            except LeaseNotFoundError:
                self._forget(grant)  # it ended between its grant and its use: the process was paused
                continue
            except StatusError:
                # The write may have happened and made this node the arbiter, so no key of this lease may outlive this
                # attempt.
                self._forget(grant)
                await self._drop(grant)
                raise
            if result.succeeded and self.grant is grant:
                break
            if not result.succeeded:
                # Overwrite a key that an attempt, which failed here, wrote under a lease that is ending.
                found = result.results[0]
                self._revision = found.mod_revision if found is not None else 0
            self._forget(grant)
            await self._drop(grant)
        self._revision = self._since = result.revision
        self._declared = self.node.running == 0
        self._on_registered(result)
        self.registered.set()
        self._settled.set()

    async def _new_grant(self) -> Grant:
        config = self._config
        grant = await self._control.grant(config.lease_ttl_s, config.disconnect_grace_s, lambda: self.lose(grant.id))
        return grant

    def _forget(self, grant: Grant) -> None:
        if self.grant is grant:
            self.grant = None

    def _registration(self, grant: Grant) -> list[Operation]:
        """Return the operations: put the node's key, and state and arbiter if absent; read the existing records."""
        config, keys = self._config, self._keys
        state = State(0, GATHERING, min_nodes=config.min_nodes, max_nodes=config.max_nodes, time=time.time())
        return [
            Put(keys.node(self.node.id), self.node.encode(), lease=grant.id),
            Txn().when(version(keys.state) == 0).then(Put(keys.state, state.encode())),
            Txn().when(lease_of(keys.arbiter) == 0).then(Put(keys.arbiter, self.node.id, lease=grant.id)),
            *keys.record.reads(),
            *keys.calls.reads(),
        ]

    async def _drop(self, grant: Grant, *, revoke: bool = True) -> None:
        try:
            await self._control.end(grant, revoke=revoke)
        except StatusError:
            return  # without keep-alives it ends with its TTL

    async def _register_again(self) -> None:
        running = 0 if self._declared else self.generation
        self.node = replace(self.node, running=running, want=running or self.node.want, time=time.time())
        stood_still_s, self._stood_still_s = self._stood_still_s, 0.0
        try:
            await until_answered(self._register)
            if running:
                await self._explain(running, stood_still_s)
        except StatusError as error:
            self.refusal = error
            self._settled.set()
            if not is_client_closed(error):  # as at the end of a program that does not leave its run
                run_id = self._config.run_id
                _log.error("raftkv: node %s cannot register again in run %s: %s", self.node.id, run_id, error)

    async def _explain(self, generation: int, stood_still_s: float) -> None:
        """Write into the fault that the arbiter recorded why the lease of this live node ended; no other node knows."""
        if stood_still_s >= self._config.lease_ttl_s:
            cause, message = HEARTBEAT_LOST, f"the process stood still for {stood_still_s:.1f} s"
        else:
            cause, message = PARTITION, "it was cut off from the store, and is back"
        fault = Fault(generation, self.node.id, self.node.host, cause=cause, message=message, time=time.time())
        key = self._keys.faults(generation) + fault.key
        await until_answered(lambda: self._control.txn([version(key) > 0], [Put(key, fault.encode())]))

    # -- time

    def _beat(self) -> None:
        """Detect that this process was paused, or that the store was unreachable."""
        if self._left:
            return
        now, interval_s = self._loop.time(), self._config.lease_ttl_s / 2
        pause_s = now - self._beat_at if self._beat_at else 0.0
        if pause_s > 2 * interval_s:
            self._stood_still_s = pause_s
        elif self.grant is not None and self.grant.silent_s < pause_s:
            self._stood_still_s = 0.0  # the lease was confirmed since, so a later end has another cause
        self._beat_at = now
        if self.grant is None or self.grant.silent_s > self.grant.ttl_s + OUTAGE_S:
            self._on_outage()
        self._loop.call_later(interval_s, self._beat)
