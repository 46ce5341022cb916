"""Claims: the right to write the checkpoints of a run.

::

    claim = await claim_generation(control, "job", source=round_source(run.world), world=run.fence, at_least=7)
    await control.txn([], [guarded(claim, conditions, then, otherwise)])

The fence is one key: its mod_revision, and its value, because a cluster that was restored from a backup may give the
same revision to another claim. A generation of a run claims once: its first rank writes the key, and the
others find their generation there. Programs outside a run claim under a new name, and pass the claim to their other
ranks (``token``). A new claim ends all previous ones: their writes raise ``FenceBroken``. A claim of a run also carries
the run's fence, so a rank that was frozen when its generation ended can neither claim nor write.

When to claim is decided in ``Registry.claim``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from raftkv.checkpoint.errors import FenceBroken
from raftkv.checkpoint.keys import RegistryKeys
from raftkv.checkpoint.records import FenceRecord
from raftkv.client.arguments import limit
from raftkv.client.control import Control, Interval, Reflector, Sparse, until_answered
from raftkv.client.kv import txn
from raftkv.client.operations import Compare, Operation, get, mod_revision, put, value
from raftkv.client.records import read
from raftkv.client.scope import Space
from raftkv.client.values import Event, KeyValue, TxnResult
from raftkv.errors import ConfigError
from raftkv.pb import rpc_pb2

CLAIM_NAME: Final = "claim/"
"""Prefix of the source of a claim outside of a run."""


class WorldConditions(Protocol):
    """The fence of a generation of a run; ``training.rendezvous.world.WorldFence`` is one.

    Attributes:
        watched: keys whose changes show its end before a write is refused.
    """

    @property
    def watched(self) -> Sparse:
        """Return these keys."""
        ...

    def why_over(self, items: Mapping[bytes, KeyValue]) -> str | None:
        """Return why it has ended; None: it lasts.

        Arguments:
            items: the keys that are ``watched``.
        """
        ...

    @property
    def conditions(self) -> tuple[Compare, ...]:
        """Return conditions that hold while the generation lasts."""
        ...

    def broken(self, reason: str = "") -> Exception:
        """Make the error for a write, or a wait, after its end."""
        ...


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write the checkpoints of a run, until the next claim. Usable as ``fence=`` of a client's calls.

    Attributes:
        run_id: run id.
        generation: number in the path of everything written under the claim; increases with every claim.
        revision, value: mod revision and content of the key that says so.
        world: generation of the run on which the claim is based; None: the claim is outside of a run.
    """

    run_id: str
    generation: int
    revision: int
    value: bytes
    world: WorldConditions | None = None

    @property
    def conditions(self) -> tuple[Compare, ...]:
        """Return conditions for a write under this claim."""
        key = RegistryKeys(self.run_id).fence
        own = (mod_revision(key) == self.revision, value(key) == self.value)
        return own if self.world is None else (*own, *self.world.conditions)

    def is_in(self, fence: KeyValue | None) -> bool:
        """Return whether the key, as read, is that of this claim."""
        return fence is not None and (fence.mod_revision, fence.value) == (self.revision, self.value)

    def compares(self) -> list[rpc_pb2.Compare]:
        """Implement ``client.operations.Conditions.compares``."""
        return [condition.to_message(Space()) for condition in self.conditions]

    def broken(self, reason: str = "") -> Exception:
        """Make the error of a write that was refused, or of a wait that ended, because the claim has ended.

        Arguments:
            reason: reason why its generation ended, if known.
        """
        return FenceBroken(self.run_id, self.generation) if self.world is None else self.world.broken(reason)

    @property
    def token(self) -> str:
        """Text for other ranks, which make the same claim from it with ``from_token``."""
        return json.dumps([self.run_id, self.generation, self.revision, self.value.decode()])

    @classmethod
    def from_token(cls, token: str, world: WorldConditions | None = None) -> Claim:
        """Return the claim that another rank has made.

        Arguments:
            token: value of ``token``.
            world: generation of the run of this rank; None: none.

        Raises:
            ConfigError: the text is not a token.
        """
        try:
            run_id, generation, revision, content = json.loads(token)
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"{token!r} is not a claim token: {error}") from None
        are_texts = isinstance(run_id, str) and isinstance(content, str)
        if not (are_texts and isinstance(generation, int) and isinstance(revision, int)):
            raise ConfigError(f"{token!r} is not a claim token")
        return cls(run_id, generation, revision, content.encode(), world)


async def claim_generation(
    control: Control,
    run_id: str,
    source: str,
    *,
    at_least: int = 1,
    world: WorldConditions | None = None,
    holder: str = "",
    now: Callable[[], float],
) -> Claim:
    """Claim the checkpoints of a run, or return the existing claim of the same source.

    Arguments:
        control: the store.
        run_id: run id.
        source: what the claim is based on; the same text gives the same claim.
        at_least: generation to use if it is above the last.
        world: generation of the run on which the claim is based; None: the claim is outside of a run.
        holder: who claims, for people.
        now: the wall clock, for people.

    Raises:
        GenerationOver: the generation of the run has ended.
        StatusError: the cluster refused.
    """
    key = RegistryKeys(run_id).fence
    while True:
        found = await _read(control, key, world)
        known = None if found is None else read(FenceRecord, found)
        if found is not None and known is not None and known.source == source:
            return Claim(run_id, known.generation, found.mod_revision, found.value, world)
        generation = max(at_least, 0 if known is None else known.generation + 1)
        record = FenceRecord(generation, source, holder, now())
        seen = mod_revision(key) == (0 if found is None else found.mod_revision)
        result = await _put(control, key, record, seen, world)
        if result is None:
            raise (FenceBroken(run_id, generation) if world is None else world.broken())
        if result.succeeded:
            return Claim(run_id, generation, result.revision, record.encode(), world)


async def _read(control: Control, key: str, world: WorldConditions | None) -> KeyValue | None:
    result = await until_answered(lambda: control.txn(() if world is None else world.conditions, [get(key)]))
    if not result.succeeded and world is not None:
        raise world.broken()
    found: KeyValue | None = result.results[0]
    return found


async def _put(
    control: Control, key: str, record: FenceRecord, seen: Compare, world: WorldConditions | None
) -> TxnResult | None:
    """Put the fence; None: the world has ended. The caller checks whether an earlier copy has succeeded."""
    conditions = () if world is None else world.conditions
    inner = txn().when(seen).then(put(key, record.encode()))
    result = await until_answered(lambda: control.txn(conditions, [inner]))
    answered: TxnResult | None = result.results[0] if result.succeeded else None
    return answered


async def under(
    control: Control,
    claim: Claim,
    compares: Sequence[Compare],
    then: Sequence[Operation],
    otherwise: Sequence[Operation] = (),
) -> TxnResult:
    """Execute an idempotent txn under a claim, repeated until it is answered.

    Arguments:
        control: the store.
        claim: the fence.
        compares, then, otherwise: parts of the inner txn, whose result is returned.

    Raises:
        FenceBroken, GenerationOver: the claim has ended; nothing was written.
        StatusError: the cluster refused.
    """
    inner = txn().when(*compares).then(*then).otherwise(*otherwise)
    result = await until_answered(lambda: control.txn(claim.conditions, [inner]))
    if not result.succeeded:
        raise claim.broken()
    answered: TxnResult = result.results[0]
    return answered


# ---- waiting: ranks follow copies of a few keys while their claim lasts
#
# A claim of a run also ends with its generation, as soon as that is known: the next claim may come much later, because
# the next generation waits for the rank that waits here.

Items = Mapping[bytes, KeyValue]


class Watching:
    """A copy of some keys of a run, kept current while a claim lasts; for ``async with``.

    Arguments:
        control: the store.
        claim: claim whose end ends the wait.
        intervals: disjoint intervals of keys.
    """

    def __init__(self, control: Control, claim: Claim, *intervals: Interval) -> None:
        self._claim = claim
        self._changed = asyncio.Event()
        self._refusal: Exception | None = None
        self._fence = self._follow(control, (RegistryKeys(claim.run_id).fence, ""))
        self._world = None if claim.world is None else self._follow(control, claim.world.watched)
        self._copies = [self._follow(control, interval) for interval in intervals]

    def _follow(self, control: Control, interval: Interval | Sparse) -> Reflector:
        return Reflector(control, interval, self._look, on_refused=self._refuse)

    @property
    def items(self) -> Items:
        """The keys as far as they are known."""
        found: dict[bytes, KeyValue] = {}
        for copy in self._copies:
            found |= copy.items
        return found

    @property
    def why_over(self) -> str | None:
        """Return why the claim has ended; empty: for an unknown reason; None: it lasts, as far as is known."""
        world = self._claim.world
        reason = None if world is None or self._world is None else world.why_over(self._world.items)
        fence = self._fence.get(RegistryKeys(self._claim.run_id).fence)
        return "" if reason is None and not self._claim.is_in(fence) else reason

    @property
    def _everything(self) -> list[Reflector]:
        return [self._fence, *([] if self._world is None else [self._world]), *self._copies]

    async def __aenter__(self) -> Watching:
        for reflector in self._everything:
            reflector.start()
        try:
            await self._until(lambda: all(reflector.is_following for reflector in self._everything))
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        for reflector in self._everything:
            reflector.close()

    async def holds(self, is_so: Callable[[Items], bool]) -> bool:
        """Wait until the keys satisfy a condition or the claim ends; return whether they satisfy it.

        Raises:
            StatusError: the cluster refuses to show the keys, or the client was closed.
        """
        await self._until(lambda: is_so(self.items) or self.why_over is not None)
        if not is_so(self.items):  # each copy has a separate watch: changes before the end may not have arrived yet
            await asyncio.gather(*(copy.refresh() for copy in self._copies))
        return is_so(self.items)

    async def until(self, is_so: Callable[[Items], bool]) -> Items:
        """Wait until the keys satisfy a condition; return them.

        Raises:
            FenceBroken, GenerationOver: the claim ended before.
            StatusError: the cluster refuses to show the keys, or the client was closed.
        """
        if not await self.holds(is_so):
            raise self._claim.broken(self.why_over or "")
        return self.items

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._changed.clear()
            if self._refusal is not None:
                raise self._refusal
            await self._changed.wait()

    def _look(self, _: Sequence[Event]) -> None:
        self._changed.set()

    def _refuse(self, error: Exception) -> None:
        self._refusal = error
        self._changed.set()


@asynccontextmanager
async def limited(timeout_s: float | None, what: str) -> AsyncIterator[None]:
    """Limit the time of a block; None: no limit.

    Raises:
        TimeoutError: the block took longer; the message says what did not happen.
    """
    try:
        async with asyncio.timeout(limit(timeout_s, "timeout_s")):
            yield
    except TimeoutError:
        if timeout_s is None:
            raise
        raise TimeoutError(f"{what} within {timeout_s:g} s") from None
