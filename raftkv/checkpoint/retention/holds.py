"""Holds: reasons to keep a checkpoint. Pins of readers (leased), tags, and children in other runs.

::

    async with registry.pin(checkpoint, "evaluator"):      # not deleted during the block
        ...
    await registry.tag("release", checkpoint)              # until the tag is moved or removed

All holds of one checkpoint are below one prefix. The txn that takes a hold requires the record to exist; the txn that
deletes the record requires the prefix to be empty. So the store orders them, and refuses the second.

A pin is kept alive by its process and ends with it. It counts as lost only when the cluster says so (for example after
the reader was frozen for longer than the TTL): then ``on_lost`` is called, and ``check`` and the end of the block raise
``PinLost``. ``pin_for`` holds without a process, for a time or until ``unpin``.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final
from urllib.parse import unquote

from raftkv.checkpoint.errors import CheckpointNotFound, PinLost
from raftkv.checkpoint.keys import PIN, TAG, RegistryKeys, check_durable, check_name, step_of
from raftkv.checkpoint.records import Checkpoint, Hold, Reference
from raftkv.client.arguments import instance, seconds
from raftkv.client.control import Control, Grant, txn_until_answered, until_answered
from raftkv.client.operations import Compare, Operation, delete, get, get_range, mod_revision, put
from raftkv.client.records import read, readable
from raftkv.client.values import KeyValue
from raftkv.errors import ConfigError, LeaseNotFoundError, StatusError

PIN_TTL_S: Final = 30
_OF_NO_LEASE: Final = 0
UNKNOWN: Final = Hold("unknown")
_LEASE: Final = re.compile(rb"[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class HoldInfo:
    """One reason to keep a checkpoint.

    Attributes:
        checkpoint: checkpoint.
        why: ``keys.PIN``, ``TAG`` or ``CHILD``.
        name: name of the reader, the tag, or the child.
        lease: lease with which a pin ends; 0: it stays until ``unpin``.
        holder: who took it, for people.
        time: when, by that one's wall clock.
    """

    checkpoint: Reference
    why: str
    name: str
    lease: int
    holder: str
    time: float

    def __str__(self) -> str:
        return f"{self.why} {self.name}"


class Pin:
    """A leased pin; made by ``Registry.pin``, taken by ``await`` or ``async with``.

    Arguments:
        control: the store.
        checkpoint: checkpoint that must stay.
        reader: name of the reader.
        ttl_s: how long it outlives a process that died or cannot reach the cluster.
        holder, time: for people.
        on_lost: called once, on the loop, when the cluster says that the pin is gone.

    Attributes:
        checkpoint: checkpoint.
        lost: set when it is lost.
    """

    def __init__(
        self,
        control: Control,
        checkpoint: Checkpoint,
        reader: str,
        ttl_s: int,
        *,
        holder: str = "",
        time: float = 0.0,
        on_lost: Callable[[Pin], Any] | None = None,
    ) -> None:
        self.checkpoint = instance(checkpoint, Checkpoint, "checkpoint")
        self.lost = asyncio.Event()
        self._control = control
        self._reader = check_name("reader", reader)
        self._ttl_s = ttl_s
        self._hold = Hold(holder, time)
        self._on_lost = on_lost
        self._grant: Grant | None = None
        self._taking = asyncio.Lock()

    def __repr__(self) -> str:
        state = "lost" if self.lost.is_set() else "held" if self._grant else "not held"
        return f"<Pin of {self.checkpoint.reference} for {self._reader!r}: {state}>"

    def __await__(self) -> Generator[Any, None, Pin]:
        return self.take().__await__()

    async def take(self) -> Pin:
        """Take the pin. Idempotent.

        Raises:
            CheckpointNotFound: the checkpoint is deleted, or about to be.
            PinLost: the pin was lost; make a new one.
            StatusError: the cluster refused.
        """
        async with self._taking:  # asked for by many at once, it is taken once
            self.check()
            if self._grant is None:
                self._grant = await self._take()
        return self

    async def _take(self) -> Grant:
        grant = await self._control.grant(self._ttl_s, 0.0, self._lose)
        try:
            await _put_pin(self._control, self.checkpoint, self._reader, grant.id, self._hold)
        except BaseException:
            with contextlib.suppress(StatusError):  # without keep-alives the lease ends with its TTL
                await self._control.end(grant, revoke=True)
            raise
        return grant

    def check(self) -> None:
        """Raise ``PinLost`` if the pin is known to be lost, so that files may be deleted during a read."""
        if self.lost.is_set():
            raise PinLost(
                f"the pin of {self._reader!r} on {self.checkpoint.reference} is lost: this process was away for longer "
                f"than {self._ttl_s} s; what was read may be incomplete: pin it again, and read it again"
            )

    async def release(self) -> None:
        """Release the pin; if the cluster does not answer, it ends with its TTL."""
        grant, self._grant = self._grant, None
        if grant is not None:
            try:
                await self._control.end(grant, revoke=True)
            except StatusError:
                return

    async def __aenter__(self) -> Pin:
        return await self.take()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()
        if kind is None:
            self.check()

    def _lose(self) -> None:
        self.lost.set()
        if self._on_lost is not None:
            self._on_lost(self)


async def _put_pin(control: Control, checkpoint: Checkpoint, reader: str, lease: int, hold: Hold) -> None:
    key = _pin_key(RegistryKeys(checkpoint.run_id), checkpoint.reference, reader, lease)
    try:
        await _hold_while_there(control, checkpoint, [], [put(key, hold.encode(), lease=lease or None)])
    except LeaseNotFoundError:
        raise PinLost(f"the pin on {checkpoint.reference} ended before it was taken; take it again") from None


async def _hold_while_there(
    control: Control, checkpoint: Checkpoint, seen: Sequence[Compare], then: Sequence[Operation]
) -> bool:
    """Make writes on the condition that exactly this checkpoint exists; False: ``seen`` did not hold.

    Raises:
        CheckpointNotFound: it is deleted, or another attempt has the step.
    """
    record = RegistryKeys(checkpoint.run_id).record(check_durable(checkpoint.kind), checkpoint.step)
    while True:
        found = await _read(control, record)
        if found is None or read(Checkpoint, found).id != checkpoint.id:
            raise CheckpointNotFound(f"{checkpoint.reference} is deleted, or about to be; look the latest up again")
        there = mod_revision(record) == found.mod_revision
        result = await txn_until_answered(control, [*seen, there], then, [get(record)])
        if result.succeeded:
            return True
        if result.results[0] is not None and result.results[0].mod_revision == found.mod_revision:
            return False  # else the record got another metric meanwhile, or went


def _pin_key(keys: RegistryKeys, checkpoint: Reference, reader: str, lease: int) -> str:
    """Return the key of a pin; readers with the same name have separate pins."""
    return keys.hold(checkpoint.kind, checkpoint.step, PIN, f"{reader}@{lease:x}")


async def pin_for(control: Control, checkpoint: Checkpoint, reader: str, duration_s: float, hold: Hold) -> None:
    """Hold a checkpoint for a time, also after the end of this process.

    Arguments:
        control: the store.
        checkpoint: checkpoint that must stay.
        reader: name of the reader.
        duration_s: 0: until ``unpin``.
        hold: record of the hold, for people.

    Raises:
        CheckpointNotFound: the checkpoint is deleted, or about to be.
        ConfigError: the name is not valid, or the time.
    """
    instance(checkpoint, Checkpoint, "checkpoint")
    check_name("reader", reader)
    if seconds(duration_s, "duration_s") < 0:
        raise ConfigError(f"a checkpoint is pinned for a time from 0 s on, not {duration_s} s")
    lease = await control.grant_fixed(math.ceil(duration_s)) if duration_s else _OF_NO_LEASE
    await _put_pin(control, checkpoint, reader, lease, hold)


async def unpin(control: Control, checkpoint: Reference, reader: str) -> int:
    """Remove all pins of a reader on a checkpoint; return their number.

    Arguments:
        control: the store.
        checkpoint: checkpoint.
        reader: name of the reader.
    """
    check_name("reader", reader)
    prefix = RegistryKeys(checkpoint.run_id).hold(checkpoint.kind, checkpoint.step, PIN, f"{reader}@")
    operation = get_range(prefix, prefix=True, keys_only=True)
    count = 0
    while True:
        listed = await until_answered(lambda: control.txn((), [operation]))
        # The name of another reader may begin with this one and an at sign: behind ours stands a lease, and no more.
        own = [item for item in listed.results[0].items if _LEASE.fullmatch(item.key[len(prefix.encode()) :])]
        if not own:
            return count
        for item in own:  # these, and no later ones that a late copy of this call would meet
            seen = [mod_revision(item.key) == item.mod_revision]
            count += (await txn_until_answered(control, seen, [delete(item.key)], [get(item.key)])).succeeded


async def holds(control: Control, run_id: str) -> list[HoldInfo]:
    """Return all holds on checkpoints of a run, by kind and step."""
    keys = RegistryKeys(run_id)
    result = await until_answered(lambda: control.txn((), [get_range(keys.holds, prefix=True)]))
    # One that cannot be read holds too: else a collector would decide to delete what no txn lets it delete, for ever.
    return [_info(run_id, keys, item, *readable(Hold, [item])) for item in result.results[0].items]


def _info(run_id: str, keys: RegistryKeys, item: KeyValue, hold: Hold = UNKNOWN) -> HoldInfo:
    # A foreign key there holds too: the deletion compares the whole prefix.
    kind, step, why, quoted = [*item.key.decode(errors="replace").removeprefix(keys.holds).split("/", 3), "", "", ""][
        :4
    ]
    name, number = unquote(quoted), step_of(step.encode())
    shown = name.rpartition("@")[0] if why == PIN else name
    return HoldInfo(
        Reference(run_id, kind, -1 if number is None else number), why, shown, item.lease, hold.holder, hold.time
    )


# ---- tags


def _tag_hold(run_id: str, name: str, on: Reference) -> str:
    """Return the key of a tag's hold on its checkpoint; a checkpoint of another run has a slash in its name."""
    return RegistryKeys(on.run_id).hold(on.kind, on.step, TAG, name if on.run_id == run_id else f"{run_id}/{name}")


async def tag(control: Control, run_id: str, name: str, checkpoint: Checkpoint, hold: Hold) -> None:
    """Set a tag on a checkpoint, or move it there, in one txn, so that its checkpoint always exists.

    Arguments:
        control: the store.
        run_id: run of the tag.
        name: name of the tag.
        checkpoint: checkpoint of any run.
        hold: record of the hold, for people.

    Raises:
        CheckpointNotFound: the checkpoint is deleted, or about to be.
        ConfigError: the name is not valid.
    """
    key = RegistryKeys(run_id).tag(check_name("tag", name))
    target = instance(checkpoint, Checkpoint, "checkpoint").reference
    new = _tag_hold(run_id, name, target)
    while True:
        found = await _read(control, key)
        operations: list[Operation] = [put(key, target.encode()), put(new, hold.encode())]
        olds = [_tag_hold(run_id, name, old) for old in readable(Reference, [found] if found else [])]
        operations += [delete(old) for old in olds if old != new]
        seen = mod_revision(key) == (0 if found is None else found.mod_revision)
        if await _hold_while_there(control, checkpoint, [seen], operations):
            return


async def untag(control: Control, run_id: str, name: str) -> bool:
    """Remove a tag; False: it did not exist.

    Arguments:
        control: the store.
        run_id, name: run and name of the tag.
    """
    key = RegistryKeys(run_id).tag(check_name("tag", name))
    was_there = False
    while (found := await _read(control, key)) is not None:
        was_there = True
        olds = [_tag_hold(run_id, name, old) for old in readable(Reference, [found])]
        seen, operations = [mod_revision(key) == found.mod_revision], [delete(key), *map(delete, olds)]
        await txn_until_answered(control, seen, operations)
    return was_there


async def tags(control: Control, run_id: str) -> dict[str, Reference]:
    """Return the tags of a run by name, with their checkpoints."""
    keys = RegistryKeys(run_id)
    result = await until_answered(lambda: control.txn((), [get_range(keys.tags, prefix=True)]))
    items: Sequence[KeyValue] = result.results[0].items
    return {
        unquote(item.key.decode(errors="replace").removeprefix(keys.tags)): on
        for item in items
        for on in readable(Reference, [item])
    }


async def _read(control: Control, key: str) -> KeyValue | None:
    result = await until_answered(lambda: control.txn((), [get(key)]))
    found: KeyValue | None = result.results[0]
    return found
