"""Deletes checkpoints that no rule keeps, and the remains of dead attempts.

::

        record ----one txn----> deleting ----> bytes ----> (no key)
          |                        ^
          | refused while it is    |        aborted attempts enter here
          | the latest, or held    |
          v
        stays

A collection may be interrupted at any point. The next one continues: it first deletes what ``deleting`` names. Two
concurrent collectors may delete the same files twice, which does no harm. No claim is needed, because a concurrent
commit or hold changes a key that the txn compares.

The order is: deletions that earlier collections began; checkpoints by a policy; what ranks had prepared for ended
attempts; directories of earlier generations that no key names, if only this run writes to the place (a process of a
deleted attempt may have written them). Open attempts of dead generations are left to ``Registry.take_over``.
"""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from raftkv.checkpoint.errors import StorageError
from raftkv.checkpoint.find import PAGE
from raftkv.checkpoint.keys import (
    KINDS,
    MEMORY,
    STEP_MAX,
    AttemptId,
    AttemptKeys,
    RegistryKeys,
    check_run_id,
    is_comparable,
    kind_of,
)
from raftkv.checkpoint.records import Checkpoint, Deleting, Extremes, FenceRecord, Latest, Reference
from raftkv.checkpoint.retention import ownership
from raftkv.checkpoint.retention.holds import holds
from raftkv.checkpoint.retention.policy import UNRULED, Decision, Policy, decide
from raftkv.checkpoint.storage.place import Place
from raftkv.checkpoint.storage.verify import Progress
from raftkv.client.control import Control, read_below, txn_until_answered
from raftkv.client.operations import Operation, create_revision, delete, get, get_range, mod_revision, put, version
from raftkv.client.records import RecordError, read, readable
from raftkv.client.values import KeyValue
from raftkv.errors import ConfigError, StatusError

# ---- what a collection decides on: the checkpoints of a run, and what holds them
#
# ``latest`` of a kind is read before its records, and every txn that changes one of them changes ``latest`` too. If a
# deletion finds every ``latest`` unchanged, the picture of the run is still right: counts, extremes, and the rules that
# look at all kinds.


@dataclass(slots=True)
class KindState:
    """All checkpoints of one kind.

    Attributes:
        latest, revision: the summary, and of its last change.
        records: step to checkpoint, and to the revision of the record's last change.
    """

    latest: Latest
    revision: int
    records: dict[int, tuple[Checkpoint, int]] = field(default_factory=dict)
    _values: dict[str, list[tuple[float, int]]] | None = None

    def remove(self, step: int) -> Latest:
        """Remove a checkpoint, and return the summary of the rest; the cost does not depend on their number.

        If the deletion is refused, this object is outdated and must be loaded again.
        """
        values_of = self._sum_up() if self._values is None else self._values
        gone, _ = self.records.pop(step)
        best = dict(self.latest.best)
        for name, value in gone.metrics.items():
            if is_comparable(value):
                values = values_of[name]
                del values[bisect_left(values, (value, step))]
                if name in best:
                    best.pop(name)
                    best |= {name: _extremes(values)} if values else {}
        size_bytes = self.latest.size_bytes - gone.size_bytes
        self.latest = replace(self.latest, count=len(self.records), size_bytes=size_bytes, best=best)
        return self.latest

    def _sum_up(self) -> dict[str, list[tuple[float, int]]]:
        """Compute the sum of all sizes, and return the values of each metric with their steps, sorted."""
        checkpoints = [checkpoint for checkpoint, _ in self.records.values()]
        self.latest = replace(self.latest, size_bytes=sum(each.size_bytes for each in checkpoints))
        found: dict[str, list[tuple[float, int]]] = {}
        for each in checkpoints:
            for name, value in each.metrics.items():
                if is_comparable(value):
                    found.setdefault(name, []).append((value, each.step))
        for values in found.values():
            values.sort()
        self._values = found
        return found


def _extremes(values: list[tuple[float, int]]) -> Extremes:
    """Return the extremes of sorted values; of equal ones the newer step counts."""
    low = values[bisect_left(values, (values[0][0], STEP_MAX + 1)) - 1]
    return Extremes(*low, *values[-1])


@dataclass(slots=True)
class RunState:
    """All kinds of a run.

    Attributes:
        kinds: kinds by name.
        held: the holds on each checkpoint, by their names.
    """

    kinds: dict[str, KindState]
    held: dict[Reference, list[str]]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """All of the run."""
        return [checkpoint for kind in self.kinds.values() for checkpoint, _ in kind.records.values()]


async def load(control: Control, run_id: str) -> RunState:
    """Read all checkpoints of a run.

    Arguments:
        control: the store.
        run_id: run id.
    """
    keys = RegistryKeys(run_id)
    listed = await txn_until_answered(control, (), [get_range(keys.latest_all, prefix=True)])
    kinds = {
        kind_of(item.key): KindState(latest, item.mod_revision)
        for item in listed.results[0].items
        if kind_of(item.key) not in ("", MEMORY)  # a commit in memory replaces the one before it
        for latest in readable(Latest, [item])
    }
    for name, kind in kinds.items():
        await _load_records(control, keys.records_of(name), kind)
    held: dict[Reference, list[str]] = {}
    for info in await holds(control, run_id):
        held.setdefault(info.checkpoint, []).append(str(info))
    return RunState(kinds, held)


async def _load_records(control: Control, prefix: str, kind: KindState) -> None:
    async for items in read_below(control, prefix, PAGE):
        for item in items:
            for checkpoint in readable(Checkpoint, [item]):
                kind.records[checkpoint.step] = (checkpoint, item.mod_revision)


NO_POLICY: Final = Policy()
UNSURE: Final = ("its bytes may not be deleted",)


@dataclass(slots=True)
class Collected:
    """The effects of a collection; for a dry run, those that it would have.

    Attributes:
        decisions: decision for each checkpoint, and its reason.
        deleted: checkpoints that are gone from the store.
        given_up: directories of aborted attempts, and of deletions that were interrupted earlier.
        orphans: directories that no key named.
        unknown: directories that no key names, but with all files of a checkpoint: they stay. The store may have been
            restored from a backup since; import them, or delete them by hand.
        kept_bytes: checkpoints that are gone from the store, whose bytes are not the registry's and stay.
        failures: deletions that failed, and why; the next collection tries again.
    """

    decisions: list[Decision] = field(default_factory=list)
    deleted: list[Checkpoint] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    kept_bytes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def freed_bytes(self) -> int:
        """Return the size of the deleted checkpoints, without those whose files stay."""
        return sum(each.size_bytes for each in self.deleted if each.uri not in self.kept_bytes)


class Collector:
    """One collection; see the module.

    Arguments:
        control: the store.
        run_id: run id.
        uri: place below which files are deleted; empty: no files are deleted.
        now: the wall clock.
        on_progress: called with the bytes of deleted checkpoints.
        dry_run: nothing is changed.
    """

    def __init__(
        self,
        control: Control,
        run_id: str,
        uri: str = "",
        *,
        now: Callable[[], float],
        on_progress: Progress | None = None,
        dry_run: bool = False,
    ) -> None:
        self._control = control
        self._txn = partial(txn_until_answered, control)
        self._run_id = run_id
        self._keys = RegistryKeys(run_id)
        self._uri = uri
        self._now = now
        self._on_progress = on_progress
        self._dry_run = dry_run
        self._name = os.urandom(8).hex()
        self._result = Collected()
        self._problem = ""
        self._others: dict[str, str] = {}

    async def collect(self, policy: Policy = NO_POLICY) -> Collected:
        """Run the collection. Failed deletions are in ``failures``.

        Raises:
            StatusError: the cluster refused.
        """
        await self._finish_deletions()
        while not await self._apply(policy):
            await self._finish_deletions()
        if not self._dry_run:
            await self._delete_prepared()
        if self._uri:
            await self._delete_orphans()
        return self._result

    # ---- what is to be deleted already

    async def _survey(self) -> None:
        """Read the marker files of the place, before anything is deleted there."""
        self._problem = "" if self._dry_run else await self._find_problem()

    async def _find_problem(self) -> str:
        """Return why nothing may be deleted in the place; empty: it may."""
        if not self._uri:
            return (
                "nothing was deleted: the place of the checkpoints is not named; name it (gc --place, Registry(uri=))"
            )
        try:
            others = await asyncio.to_thread(ownership.read_marks, self._uri)
        except (StorageError, ConfigError) as error:
            return str(error)
        own: KeyValue | None = (await self._txn((), [get(self._keys.mark)])).results[0]
        if own is None or others.pop(own.value.decode(errors="replace"), None) != self._run_id:
            return f"nothing was deleted: {self._uri} has no mark of run {self._run_id!r}, so it never wrote there"
        self._others = others
        return ""

    async def _refusal(self, gone: Deleting, attempt: AttemptId) -> str:
        """Return why files must not be deleted, after ``_survey``; empty: they may be, or they stay anyway."""
        if self._dry_run or not ownership.is_own(gone.uri, attempt):
            return ""
        try:
            if refused := self._problem or ownership.refusal(gone, attempt, Place(self._uri)):
                return refused
        except ConfigError as error:
            return str(error)
        for mark, run_id in self._others.items():
            stays = f"{gone.uri} stays: {ownership.PREFIX}{mark} there says that run {run_id!r} writes there too, and"
            try:
                found, named = await self._look_up(get(RegistryKeys(check_run_id(run_id)).mark), run_id, attempt)
            except (ConfigError, StatusError) as error:
                return f"{stays} its records cannot be read: {error}"
            if found is None or found.value != mark.encode():
                return f"{stays} this cluster does not know its mark; delete that file if the run is gone"
            if named:
                return f"{stays} it is the directory of that run"
        return ""

    async def _finish_deletions(self) -> None:
        listed = await self._txn((), [get_range(self._keys.deletings, prefix=True)])
        if listed.results[0].items:
            await self._survey()
        for item in listed.results[0].items:
            try:
                gone = read(Deleting, item)
                kind, text = item.key.decode().removeprefix(self._keys.deletings).split("/")
                attempt = AttemptId.parse(text)
            except (RecordError, ValueError) as error:
                self._fail(f"passed over: {error}")  # raftkv did not write it
                continue
            if gone.uri in self._result.given_up:
                continue  # it could not be deleted a moment ago
            self._result.given_up.append(gone.uri)
            if not self._dry_run:
                await self._finish(kind, attempt, gone)

    def _fail(self, line: str) -> None:
        if line not in self._result.failures:
            self._result.failures.append(line)

    async def _finish(self, kind: str, attempt: AttemptId, gone: Deleting) -> None:
        """Delete files, then the key that names them."""
        key = self._keys.deleting(kind, attempt)
        if kind != MEMORY and (refused := await self._refusal(gone, attempt)):
            self._fail(refused)
            return
        if not await self._is_over(kind, attempt, key):
            return
        if kind == MEMORY:  # whose holders let go of the bytes themselves: no file is its
            await self._txn((), [delete(key)])
            return
        try:
            if ownership.is_own(gone.uri, attempt):
                await asyncio.to_thread(lambda: Place(gone.uri).delete_tree())
            else:
                self._result.kept_bytes.append(gone.uri)
        except (StorageError, ConfigError) as error:
            self._fail(str(error))
            return
        await self._txn((), [delete(key)])

    async def _is_over(self, kind: str, attempt: AttemptId, key: str) -> bool:
        """Delete the keys with which an attempt could still be committed; False: its files must stay."""
        keys, record = self._keys.attempt(kind, attempt), self._keys.record(kind, attempt.step)
        others = [name for name in KINDS if name != kind]
        of_others = [
            operation
            for name in others
            for operation in (get(self._keys.record(name, attempt.step)), get(self._keys.attempt(name, attempt).head))
        ]
        while True:
            present, found, *named = (await self._txn((), [get(key), get(record), *of_others])).results
            if present is None:
                return False
            for name, other, head in zip(others, named[::2], named[1::2], strict=True):
                if head is not None or (other is not None and _is_of(other, attempt)):
                    self._fail(
                        f"the bytes of attempt {attempt} ({kind}) stay: it is that of a checkpoint of kind {name}"
                    )
                    return False
            if found is not None and not readable(Checkpoint, [found]):
                self._fail(f"the bytes of attempt {attempt} ({kind}) stay: the record of its step cannot be read")
                return False
            if found is not None and _is_of(found, attempt):
                await self._txn([mod_revision(record) == found.mod_revision], [delete(key)])
                return False
            seen = mod_revision(record) == (0 if found is None else found.mod_revision)
            # A head here is a late copy of the txn that began the attempt.
            over = [delete(keys.head), delete(keys.ranks, prefix=True)]
            if (await self._txn([version(key) > 0, seen], over)).succeeded:
                return True

    # ---- checkpoints

    async def _apply(self, policy: Policy) -> bool:
        """Delete by a policy; False: the keys have changed meanwhile, so decide again."""
        state = await load(self._control, self._run_id)
        decisions = await self._allowed(await self._decide(policy, state))
        self._result.decisions = [
            *(each for each in self._result.decisions if each.checkpoint in self._result.deleted),
            *decisions,
        ]
        going = [each for each in decisions if not each.is_kept]
        total = sum(each.checkpoint.size_bytes for each in going)
        done = 0
        for each in going:
            if self._dry_run:
                self._result.deleted.append(each.checkpoint)
                continue
            if not await self._delete(state.kinds, each):
                return False
            done += each.checkpoint.size_bytes
            if self._on_progress is not None:
                self._on_progress(done, total)
        return True

    async def _decide(self, policy: Policy, state: RunState) -> list[Decision]:
        """Decide by a policy, with no place for a checkpoint whose files are gone."""
        decided = partial(
            decide, policy, state.checkpoints, latest={name: kind.latest.step for name, kind in state.kinds.items()},
            held=state.held, now=self._now(),
        )  # fmt: skip
        decisions = decided()
        if all(each.is_kept for each in decisions):
            return decisions
        ruled = [each.checkpoint for each in decisions if each.is_kept and each.why != UNRULED]
        try:
            if not await asyncio.to_thread(ownership.without_files, self._uri, ruled):
                return decisions
            lost = await asyncio.to_thread(ownership.without_files, self._uri, state.checkpoints)
        except StorageError as error:
            self._fail(f"nothing was deleted: {error}")
            return [each if each.is_kept else replace(each, is_kept=True, why=UNSURE) for each in decisions]
        return decided(lost={each.reference for each in lost})

    async def _allowed(self, decisions: list[Decision]) -> list[Decision]:
        """Keep checkpoints whose files must not be deleted, and record why."""
        if all(each.is_kept for each in decisions):
            return decisions
        await self._survey()
        found = []
        for each in decisions:
            if not each.is_kept:
                gone = Deleting(each.checkpoint.uri)
                if refused := await self._refusal(gone, each.checkpoint.id):
                    self._fail(refused)
                    each = replace(each, is_kept=True, why=UNSURE)
            found.append(each)
        return found

    async def _delete(self, kinds: Mapping[str, KindState], decision: Decision) -> bool:
        checkpoint, keys = decision.checkpoint, self._keys
        name, step = checkpoint.kind, checkpoint.step
        kind, record = kinds[name], keys.record(name, step)
        gone = Deleting(checkpoint.uri, "; ".join(decision.why), self._now(), self._name)
        key, seen = keys.deleting(name, checkpoint.id), kind.records[step][1]
        # A summary without records bears on no decision, and any number of them may have been planted.
        pictured = {each: found.revision for each, found in kinds.items() if found.records}
        summary = kind.remove(step)
        result = await self._txn(
            [
                mod_revision(record) == seen,
                *(mod_revision(keys.latest(each)) == revision for each, revision in pictured.items()),
                create_revision(keys.holds_of(name, step), prefix=True) == 0,
            ],
            [
                delete(record),
                put(key, gone.encode()),
                put(keys.latest(name), summary.encode()),
                *(delete(keys.metric(name, metric, value, step)) for metric, value in checkpoint.metrics.items()),
                *(delete(hold) for hold in [checkpoint.hold_on_parent] if hold),
            ],
            [get(key)],
        )
        if not result.succeeded:
            found = result.results[0]
            if found is not None and found.value == gone.encode():
                self._result.deleted.append(checkpoint)  # by an earlier copy of this txn, whose answer was lost
            return False
        kind.revision = result.revision
        self._result.deleted.append(checkpoint)
        await self._finish(name, checkpoint.id, gone)
        return True

    # ---- what dead attempts have left

    async def _delete_prepared(self) -> None:
        """Delete prepared parts of committed or aborted attempts."""
        listed = await self._txn((), [get_range(self._keys.attempts, prefix=True, keys_only=True)])
        # <kind>/<attempt>/head, or <kind>/<attempt>/rank/<rank>; any other key is foreign.
        found = [item.key[len(self._keys.attempts.encode()) :].split(b"/") for item in listed.results[0].items]
        with_head = {tuple(parts[:2]) for parts in found if parts[2:] == [b"head"]}
        for kind, attempt in sorted({tuple(parts[:2]) for parts in found if parts[2:3] == [b"rank"]} - with_head):
            if not (kind + attempt).isascii():
                continue
            keys = AttemptKeys(f"{self._keys.attempts}{kind.decode()}/{attempt.decode()}/")
            await self._txn([version(keys.head) == 0], [delete(keys.ranks, prefix=True)])

    async def _delete_orphans(self) -> None:
        try:
            names = await asyncio.to_thread(lambda: Place(self._uri).names())
            # The marks are read after the names: a run leaves its mark before it makes a directory there.
            marks = await asyncio.to_thread(ownership.read_marks, self._uri)
        except StorageError as error:
            self._fail(str(error))
            return
        own = (await self._txn((), [get(self._keys.mark)])).results[0]
        if not ownership.is_alone(marks, self._run_id, own and own.value):
            return
        for name in names:
            attempt = AttemptId.of_directory(name)
            if attempt is not None and await self._is_orphan(attempt):
                await self._delete_orphan(f"{self._uri}/{name}")

    async def _delete_orphan(self, uri: str) -> None:
        try:
            if await asyncio.to_thread(ownership.holds_whole_checkpoint, uri):
                self._result.unknown.append(uri)
                return
            self._result.orphans.append(uri)
            if not self._dry_run:
                await asyncio.to_thread(lambda: Place(uri).delete_tree())
        except StorageError as error:
            self._fail(str(error))

    async def _is_orphan(self, attempt: AttemptId) -> bool:
        """Return whether no key names the attempt, now or later; read at one revision."""
        fence, is_named = await self._look_up(get(self._keys.fence), self._run_id, attempt)
        generations = [record.generation for record in readable(FenceRecord, [fence] if fence else [])]
        return bool(generations) and generations[0] > attempt.generation and not is_named

    async def _look_up(self, first: Operation, run_id: str, attempt: AttemptId) -> tuple[KeyValue | None, bool]:
        """Return the result of a read, and whether a key of the run names an attempt, at one revision."""
        keys, reads = RegistryKeys(run_id), [first]
        for kind in KINDS:
            reads += [get(keys.record(kind, attempt.step)), get(keys.attempt(kind, attempt).head)]
            reads.append(get(keys.deleting(kind, attempt)))
        answer, *found = (await self._txn((), reads)).results
        is_committed = any(item is not None and _is_of(item, attempt) for item in found[::3])
        return answer, is_committed or any(item is not None for item in (*found[1::3], *found[2::3]))


def _is_of(item: KeyValue, attempt: AttemptId) -> bool:
    """Return whether a record may belong to an attempt; an unreadable one, as of a later version, may."""
    found = readable(Checkpoint, [item])
    return not found or found[0].id == attempt
