"""Planted bugs: each takes one rule out of the registry, and the simulator must notice.

with MUTANTS["no fence in prepare"].planted():
    outcome = MUTANTS["no fence in prepare"].hunt(range(1, 201))
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from raftkv.checkpoint import registry
from raftkv.checkpoint.commit import attempt, summary
from raftkv.checkpoint.commit import attempt as attempts
from raftkv.checkpoint.commit import claim as claims
from raftkv.checkpoint.commit.attempt import Attempt, Means, Taken
from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.copies import catalogue
from raftkv.checkpoint.copies.holder import Shelf
from raftkv.checkpoint.errors import AttemptOver, CheckpointExists, PrepareConflict, RanksMissing, StaleStep
from raftkv.checkpoint.find import Commits
from raftkv.checkpoint.keys import LATEST, AttemptId
from raftkv.checkpoint.records import AttemptRecord, Checkpoint, CopyRecord, FenceRecord, Prepared
from raftkv.checkpoint.retention import collector, holds, policy
from raftkv.checkpoint.retention.collector import Collector
from raftkv.client.operations import Compare, Put, create_revision, get, mod_revision, version
from raftkv.errors import RaftKVError

from .memory import run_memory_seed
from .run import Outcome
from .swarm import run_seed


class Patches:
    """Replaces attributes and puts them back."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Put ``value`` in the place of ``owner.name``; returns what was there."""
        old = owner.__dict__[name]
        setattr(owner, name, value)
        self._stack.callback(setattr, owner, name, old)
        return old


Plant = Callable[[Patches], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug; ``rule`` is what it takes out, ``run`` plays a seed of the simulation that has to find it."""

    rule: str
    plant: Plant
    run: Callable[[int], Outcome] = run_seed

    def hunt(self, seeds: Iterable[int]) -> Outcome | None:
        """Run seeds until one finds a violation."""
        return next((found for seed in seeds if (found := self.run(seed)).violation is not None), None)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is in the code for as long as the context lasts."""
        with ExitStack() as stack:
            self.plant(Patches(stack))
            yield


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, rule: str, run: Callable[[int], Outcome] = run_seed) -> Callable[[Plant], Plant]:
    """Register a planted bug."""

    def register(plant: Plant) -> Plant:
        MUTANTS[name] = Mutant(rule, plant, run)
        return plant

    return register


class NoFence(Claim):
    """A claim that holds for ever."""

    __slots__ = ()

    @property
    def conditions(self) -> tuple[Compare, ...]:
        return ()


def unfenced(claim: Claim) -> Claim:
    return NoFence(claim.run_id, claim.generation, claim.revision, claim.world)


def without_fence(patches: Patches, name: str) -> None:
    """Take the fence out of a method of ``Attempt``."""

    async def call(self: Attempt, *args: Any, **kwargs: Any) -> Any:
        other = copy.copy(self)
        other._claim = unfenced(self._claim)
        return await original(other, *args, **kwargs)

    original = patches.set(Attempt, name, call)


def blind(patches: Patches, owner: Any, name: str, is_blind: Callable[[str], bool]) -> None:
    """Make conditions on some keys hold always."""

    class Always:
        def __init__(self, key: str) -> None:
            self.always = version(key) > -1

        def __eq__(self, _: object) -> Compare:  # type: ignore[override]
            return self.always

        def __lt__(self, _: object) -> Compare:
            return self.always

        __gt__ = __lt__
        __hash__ = None  # type: ignore[assignment]

    real = {"mod_revision": mod_revision, "version": version, "create_revision": create_revision}[name]

    def compare(key: Any, **more: Any) -> Any:
        text = key.decode() if isinstance(key, bytes) else key
        return Always(text) if is_blind(text) else real(key, **more)

    patches.set(owner, name, compare)


# ---- fences


@mutant("no fence in prepare", "a rank prepares only while its generation lasts")
def _prepare_unfenced(patches: Patches) -> None:
    without_fence(patches, "prepare")


@mutant("no fence in commit", "nothing is committed after its fence has ended")
def _commit_unfenced(patches: Patches) -> None:
    without_fence(patches, "_try_commit")


@mutant("no fence in begin", "nothing begins after its fence has ended")
def _begin_unfenced(patches: Patches) -> None:
    async def begin(means: Means, claim: Claim, *args: Any) -> Attempt:
        attempt: Attempt = await original(means, unfenced(claim), *args)
        attempt._claim = claim
        return attempt

    original = patches.set(attempt, "begin", begin)


@mutant("no fence in abort", "a dead generation gives nothing up")
def _abort_unfenced(patches: Patches) -> None:
    without_fence(patches, "abort")


@mutant("a claim takes the fence whoever has it by now", "a claim is made on what was seen")
def _claim_unconditional(patches: Patches) -> None:
    blind(patches, claims, "mod_revision", lambda key: key.endswith("/fence"))


@mutant("a generation's claim stands without the generation", "a claim is over with its generation")
def _claim_without_world(patches: Patches) -> None:
    async def claim_generation(*args: Any, **kwargs: Any) -> Claim:
        claim = await original(*args, **kwargs)
        return NoWorld(claim.run_id, claim.generation, claim.revision, claim.value, claim.world)

    class NoWorld(Claim):
        __slots__ = ()

        @property
        def conditions(self) -> tuple[Compare, ...]:
            return Claim(self.run_id, self.generation, self.revision, self.value).conditions

    original = patches.set(registry, "claim_generation", claim_generation)


# ---- attempts


@mutant("number left out of the directory", "no two attempts share a directory")
def _shared_directory(patches: Patches) -> None:
    patches.set(AttemptId, "directory", property(lambda self: f"step-{self.step:012d}.g{self.generation}"))


@mutant("numbers given twice", "the number of an attempt is asked for with its head")
def _begun_twice(patches: Patches) -> None:
    blind(patches, attempt, "mod_revision", lambda key: key.endswith("/begun"))


@mutant("record without latest", "latest is compared with the record that moves it")
def _latest_unseen(patches: Patches) -> None:
    blind(patches, attempts, "mod_revision", lambda key: key.startswith(LATEST))


@mutant("prepare without a head", "nobody prepares what is over")
def _prepare_late(patches: Patches) -> None:
    blind(patches, attempts, "version", lambda key: key.endswith("/head"))


@mutant("prepare over what is prepared", "a rank prepares once")
def _prepare_again(patches: Patches) -> None:
    blind(patches, attempts, "version", lambda key: "/rank/" in key)


async def _lenient(self: Attempt, original: Any, timeout_s: float | None = None, *, but: Any = ()) -> Any:
    """Wait a little, and make do with what is there."""
    try:
        return await original(0.3, but=but)
    except RanksMissing as error:
        rest = await original(None, but=[*but, *error.missing])
        return {**{rank: Prepared(rank) for rank in error.missing}, **rest}


@mutant("commit without all ranks", "a record exists only if every rank has prepared")
def _ranks_missing(patches: Patches) -> None:
    async def prepared(self: Attempt, timeout_s: float | None = None, *, but: Any = ()) -> Any:
        return await _lenient(self, partial(original, self), but=but)

    original = patches.set(Attempt, "prepared", prepared)


@mutant("commit without a manifest", "the manifest is there before the record")
def _no_manifest(patches: Patches) -> None:
    async def nothing(uri: str, data: bytes) -> None: ...

    def init(self: Attempt, means: Means, *args: Any) -> None:
        original(self, replace(means, write_manifest=nothing), *args)

    original = patches.set(Attempt, "__init__", init)


@mutant("takeover without all ranks", "only what every rank has prepared is taken over")
def _taken_in_parts(patches: Patches) -> None:
    async def take(means: Means, claim: Claim, head: AttemptRecord, refusal: object) -> Taken:
        attempt = Attempt(means, claim, head)
        attempt.prepared = partial(_lenient, attempt, attempt.prepared)  # type: ignore[method-assign]
        try:
            return Taken(head, await attempt.commit())
        except (AttemptOver, CheckpointExists, StaleStep, PrepareConflict) as error:
            await attempt.abort(str(error))
            return Taken(head, reason=str(error))

    patches.set(attempt, "_take", take)


@mutant("parent not held", "a parent stays as long as its child")
def _parent_let_go(patches: Patches) -> None:
    patches.set(Checkpoint, "hold_on_parent", "nothing")


@mutant("metrics written over what has changed", "a metric is set on the record as it was seen")
def _metrics_unseen(patches: Patches) -> None:
    blind(patches, summary, "mod_revision", lambda key: True)


@mutant("metrics beside a changed latest", "a metric is set on the summary as it was seen")
def _metrics_latest_unseen(patches: Patches) -> None:
    blind(patches, summary, "mod_revision", lambda key: key.startswith(LATEST))


# ---- the watch


@mutant("a changed record reported again", "a commit is the creation of a record")
def _reported_again(patches: Patches) -> None:
    def take(self: Commits, changes: Any) -> None:
        self._seen = 0 if self._seen is not None else None
        original(self, changes)

    original = patches.set(Commits, "_take", take)


@mutant("commits before the list are passed over", "a list reports what has come since the last commit")
def _passed_over(patches: Patches) -> None:
    def take(self: Commits, changes: Any) -> None:
        if len(changes) > 1 and self._seen is not None:
            self._seen = changes[0].kv.create_revision
        original(self, changes)

    original = patches.set(Commits, "_take", take)


# ---- deletion


@mutant("collector without the latest", "the latest stays")
def _latest_collected(patches: Patches) -> None:
    def decide(*args: Any, **kwargs: Any) -> Any:
        return [
            replace(each, is_kept=each.is_kept and each.why != (policy.LATEST,)) for each in original(*args, **kwargs)
        ]

    original = patches.set(collector, "decide", decide)


@mutant("collector beside a changed latest", "a deletion is of the picture that was decided on")
def _collected_unseen(patches: Patches) -> None:
    blind(patches, collector, "mod_revision", lambda key: key.startswith(LATEST))


@mutant("collector without holds", "what somebody holds stays")
def _held_collected(patches: Patches) -> None:
    def decide(*args: Any, held: Any, **kwargs: Any) -> Any:
        return original(*args, held={}, **kwargs)

    original = patches.set(collector, "decide", decide)
    blind(patches, collector, "create_revision", lambda key: True)


@mutant("holds asked for beforehand", "what somebody has held since it was decided to go stays")
def _held_since(patches: Patches) -> None:
    blind(patches, collector, "create_revision", lambda key: True)


@mutant("bytes before deleting", "bytes go only when nobody can find them any more")
def _bytes_first(patches: Patches) -> None:
    async def delete(self: Collector, kind: Any, decision: Any) -> Any:
        try:
            collector.Place(decision.checkpoint.uri).delete_tree()
        except RaftKVError:
            return False
        return await original(self, kind, decision)

    original = patches.set(Collector, "_delete", delete)


@mutant("every old directory is an orphan", "bytes that a key names are no orphans")
def _orphans(patches: Patches) -> None:
    async def is_orphan(self: Collector, attempt: AttemptId) -> bool:
        found = (await self._txn((), [get(self._keys.fence)])).results[0]
        return found is not None and FenceRecord.decode(found.value).generation > attempt.generation

    patches.set(Collector, "_is_orphan", is_orphan)


@mutant("deletion never ended", "who is cut off begins again at what is to be deleted")
def _never_ended(patches: Patches) -> None:
    async def nothing(self: Collector) -> None: ...

    patches.set(Collector, "_finish_deletions", nothing)


@mutant("prepared parts left", "nothing is left of dead attempts")
def _parts_left(patches: Patches) -> None:
    async def nothing(self: object) -> None: ...

    patches.set(Collector, "_delete_prepared", nothing)
    patches.set(Attempt, "_clean", nothing)


@mutant("pin of what is deleted", "a pin is taken on a record that exists")
def _pin_of_nothing(patches: Patches) -> None:
    blind(patches, holds, "mod_revision", lambda key: True)


# ---- copies


@mutant("digest of a copy not compared", "bytes count only by the committed digest", run_memory_seed)
def _believed(patches: Patches) -> None:
    patches.set(catalogue, "check", lambda data, wanted, where: None)


@mutant("copy outlives its lease", "a copy is announced under the lease of its holder", run_memory_seed)
def _unleased(patches: Patches) -> None:
    async def write(self: Shelf, operations: Any) -> None:
        await original(self, [replace(each, lease=None) if isinstance(each, Put) else each for each in operations])

    original = patches.set(Shelf, "_write", write)


@mutant("newest commit let go", "the newest commit stays in memory", run_memory_seed)
def _let_go(patches: Patches) -> None:
    def is_over(self: Shelf, copy: CopyRecord) -> bool:
        latest = self._latest.get(copy.kind)
        return latest is not None and copy.step <= latest.step

    patches.set(Shelf, "_is_over", is_over)
