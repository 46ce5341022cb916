"""The replay checker: replays the run in the order of its revisions.

The store guarantees that every write has its own revision, without gaps, and that every answer carries the revision at
which it is true. So the order is given, and no search is needed: the checker places every answered operation at its
revision, replays all of them on the model, and requires:

- *durable*: every acknowledged write is in the store at its revision, as requested;
- *once*: every revision of the store comes from exactly one request; no request is there twice;
- *honest*: no definitely refused request is in the store;
- *exact*: every answer (also of reads of the past, failed txns, stale reads) equals the model's, field by field;
- *real time*: no operation returned before one placed earlier was called.

Writes of unknown fate are looked up in the store as read back (``StoreRecord``): values are unique, so a value
identifies its request. A plain delete leaves no value; an unexplained deletion is assigned to the unknown delete of
that key that was called first, which can always be exchanged for any other choice. (Txns that delete must also put.) A
change that no request explains is the server's own, if the keys allow this (``ops.SERVERS``); other checkers check it.

The checker is sound (the replay is the witness of an accepted history) and, because revision order is guaranteed,
complete. The linearizability checker (``linear.py``) does not rely on revisions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from jepsen.checkers import Violation
from jepsen.checkers.model import Model
from jepsen.history import Change, History, Operation, StoreRecord
from jepsen.ops import RECIPES, SERVERS, Delete, KeyValue, Special, is_in, is_serializable, may_write, puts

FIRST_REVISION = 1
"""The revision of an empty store."""


def check(history: History) -> list[Violation]:
    """Return all violations found by replaying the history against the store read back."""
    if history.store is None:
        return [Violation("unreadable", "the store was not read back: nothing can be checked")]
    replay = _Replay(history.operations, history.store)
    replay.run()
    return replay.violations


@dataclass(frozen=True, slots=True)
class Replayed:
    """The store as explained by the history, with which other checkers compare answers.

    Attributes:
        model: model with the log of all changes.
        servers: revisions that no request explains, of keys that the server writes.
    """

    model: Model
    servers: frozenset[int]


def replayed(history: History) -> Replayed:
    """Replay to the end, continuing after violations."""
    replay = _Replay(history.operations, history.store or StoreRecord())
    replay.run()
    return Replayed(replay.model, frozenset(replay.servers))


@dataclass(slots=True)
class _Replay:
    operations: list[Operation]
    store: StoreRecord
    violations: list[Violation] = field(default_factory=list)
    model: Model = field(default_factory=Model)
    acked: dict[int, Operation] = field(default_factory=dict)
    reads: dict[int, list[Operation]] = field(default_factory=lambda: defaultdict(list))
    by_value: dict[tuple[str, str], list[Operation]] = field(default_factory=lambda: defaultdict(list))
    unknown_deletes: list[Operation] = field(default_factory=list)
    placed: dict[int, int] = field(default_factory=dict)
    order: list[list[Operation]] = field(default_factory=list)
    servers: set[int] = field(default_factory=set)

    def run(self) -> None:
        self._sort_out()
        for rev in range(FIRST_REVISION, self.store.last + 1):
            if rev > FIRST_REVISION:
                self._replay_revision(rev)
            self._replay_reads(rev)
            self._compare_state(rev)
        self._report_beyond_end()
        self.violations += real_time(self.order)

    def _sort_out(self) -> None:
        for operation in self.operations:
            if isinstance(operation.request, Special):
                continue  # Their answers name no revision; other checkers check them.
            for put in puts(operation.request):
                self.by_value[put.key, put.value].append(operation)
            if operation.wrote:
                self._claim(operation)
            elif operation.kind == "ok":
                self.reads[operation.rev].append(operation)
            elif operation.kind == "info" and isinstance(operation.request, Delete):
                self.unknown_deletes.append(operation)
        self.unknown_deletes.sort(key=lambda operation: operation.call)

    def _claim(self, operation: Operation) -> None:
        other = self.acked.setdefault(operation.rev, operation)
        if other is not operation:
            text = f"two acknowledged writes claim revision {operation.rev}"
            self._report("duplicate revision", text, other, operation)

    def _replay_revision(self, rev: int) -> None:
        change = self.store.changes.get(rev)
        if change is None:
            self._report("unreadable", f"revision {rev} was not read back")
            change = Change(())
        owner = self.acked.get(rev) or self._unknown_owner(rev, change)
        if owner is None and _is_servers(change):
            self.servers.add(rev)
            self.model.force(rev, change.kvs, change.deleted)
            return
        if owner is None:
            self._report("phantom write", f"no request explains revision {rev}: {_show(change.kvs)}")
            self.model.force(rev, change.kvs, change.deleted)
            return
        if owner.id in self.placed:
            text = f"applied at revision {self.placed[owner.id]} and again at {rev}"
            self._report("applied twice", text, owner)
        self.placed[owner.id] = rev
        self.order.append([owner])
        self._apply(owner, rev, change)

    def _unknown_owner(self, rev: int, change: Change) -> Operation | None:
        """Return the request without an acknowledged revision that must have written this one."""
        for kv in change.kvs:
            candidates = self.by_value.get((kv.key, kv.value), [])
            for operation in sorted(candidates, key=lambda candidate: candidate.kind != "info"):
                if operation.kind == "fail":
                    text = f"refused for certain, yet found at revision {rev}"
                    self._report("refused but done", text, operation)
                if operation.kind != "info" or operation.id not in self.placed or len(candidates) == 1:
                    return operation
        return self._unknown_delete(change) if change.deleted and not change.kvs else None

    def _unknown_delete(self, change: Change) -> Operation | None:
        for position, operation in enumerate(self.unknown_deletes):
            if operation.id not in self.placed and _could_delete(operation, change.deleted):
                return self.unknown_deletes.pop(position)
        return None

    def _apply(self, owner: Operation, rev: int, change: Change) -> None:
        expected = self.model.apply(owner.request, rev)
        if owner.result is not None and owner.result != expected and self.acked.get(rev) is owner:
            self._report("wrong answer", f"at revision {rev}: expected {expected}, got {owner.result}", owner)
        keys = {put.key for put in puts(owner.request)} | {kv.key for kv in change.kvs} | set(change.deleted)
        written = self.model.written_at(rev, keys)
        wanted = {key: kv for key, kv in written.items() if kv is not None}
        found = {kv.key: kv for kv in change.kvs}
        if wanted != found or not set(change.deleted) <= {key for key, kv in written.items() if kv is None}:
            rule = "lost write" if owner.result is not None and not found else "wrong write"
            text = f"revision {rev} should hold {_show(wanted.values())}, the store has {_show(change.kvs)}"
            self._report(rule, text, owner)

    def _replay_reads(self, rev: int) -> None:
        at_revision = self.reads.pop(rev, [])
        for operation in at_revision:
            expected = self.model.apply(operation.request, rev) if not operation.wrote else None
            if expected != operation.result:
                text = f"at revision {rev}: expected {expected}, got {operation.result}"
                self._report("wrong read", text, operation)
        if at_revision:
            self.order.append(at_revision)

    def _compare_state(self, rev: int) -> None:
        state = self.store.states.get(rev)
        if state is None:
            return
        wanted = {kv.key: kv for kv in self.model.current.values()}
        found = {kv.key: kv for kv in state}
        if wanted != found:
            missing = [kv for key, kv in wanted.items() if found.get(key) != kv]
            extra = [kv for key, kv in found.items() if wanted.get(key) != kv]
            text = f"at revision {rev}: should hold {_show(missing)}, holds {_show(extra)}"
            self._report("wrong state", text)

    def _report_beyond_end(self) -> None:
        """Report answers from revisions that the store does not have at the end: revisions were lost."""
        for rev, operation in sorted(self.acked.items()):
            if not FIRST_REVISION < rev <= self.store.last:
                text = f"acknowledged at revision {rev}, the store ends at {self.store.last}"
                self._report("lost write", text, operation)
        for rev, left in sorted(self.reads.items()):
            text = f"answered at revision {rev}, the store has {FIRST_REVISION} to {self.store.last}"
            self._report("lost revision", text, *left)

    def _report(self, rule: str, text: str, *operations: Operation) -> None:
        self.violations.append(Violation(rule, text, tuple(operation.id for operation in operations)))


def real_time(order: Iterable[list[Operation]]) -> list[Violation]:
    """Return the operations that returned before one placed earlier was called.

    Arguments:
        order: groups of operations, earliest first; within a group, any order is allowed.
    """
    found = []
    latest: Operation | None = None
    for group in order:
        for operation in group:
            if latest is not None and operation.kind == "ok" and operation.returned < latest.call:
                text = "returned before an operation was called that the revisions place earlier"
                found.append(Violation("real time", text, (operation.id, latest.id)))
        for operation in group:
            stale_allowed = not may_write(operation.request) and is_serializable(operation.request)
            if not stale_allowed and (latest is None or operation.call > latest.call):
                latest = operation
    return found


def _is_servers(change: Change) -> bool:
    """Return whether the server may have made the change by itself: for a lease, a lock or an election."""
    put = all(kv.key.startswith(RECIPES) for kv in change.kvs)
    return put and all(key.startswith(SERVERS) for key in change.deleted) and bool(change.kvs or change.deleted)


def _could_delete(operation: Operation, deleted: tuple[str, ...]) -> bool:
    request = operation.request
    return isinstance(request, Delete) and all(is_in(key, request.key, request.end) for key in deleted)


def _show(kvs: Iterable[KeyValue]) -> str:
    listed = [f"{kv.key}={kv.value[:40]}@{kv.mod}" for kv in kvs]
    return ", ".join(listed[:5]) + (" ..." if len(listed) > 5 else "") if listed else "nothing"
