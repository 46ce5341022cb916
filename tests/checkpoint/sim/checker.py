"""What must hold at all times: checked at every revision of the store and at every change of the bytes.

P0  nothing raises what it does not promise
P1  a record exists only of what every rank has prepared, as it was prepared, and only under a fence that holds
P2  ``latest`` never goes back, names a checkpoint that exists, and all its bytes are there with the right digests
P3  no attempt begins twice, no two share a directory, none is both committed and given up, no step is committed twice
P4  a checkpoint that is the latest, pinned, tagged or a parent is not deleted, and bytes go only after ``deleting``
P5  no bytes of a committed checkpoint are overwritten
P6  what was acknowledged is so: commits, preparations, ends of attempts, metrics
P7  each commit is reported to each watcher once, in order
P8  index and summary say what the records say
P9  in the end the run saves again, and nothing is left of dead attempts
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from raftkv.checkpoint.commit.manifest import NAME as MANIFEST
from raftkv.checkpoint.commit.manifest import Manifest
from raftkv.checkpoint.digest import of_bytes
from raftkv.checkpoint.keys import MEMORY, AttemptId, RegistryKeys, run_of
from raftkv.checkpoint.records import AttemptRecord, Checkpoint, Latest, Prepared, Reference
from raftkv.client.values import PUT, Event
from tests.virtual_store.store import Store

if TYPE_CHECKING:
    from .disk import Disk
    from .process import Process

ROUND = "round"
"""The key whose revision is the fence of a generation of the run."""

Which = tuple[str, str, AttemptId]
"""Run, kind, attempt."""


class Checker:
    """Check what must hold, after each event and at the end.

    Attributes:
        violations: the first says it all.
        log: every event a line.
        sender: whose txn is executed now.
        commits: revision and which, in order.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.disk: Disk
        self.violations: list[str] = []
        self.log: list[str] = []
        self.now = 0.0
        self.sender: Process | None = None
        self.commits: list[tuple[int, Which]] = []
        self.committed: dict[Which, Checkpoint] = {}
        self.live: dict[Reference, Checkpoint] = {}
        self.heads: dict[Which, AttemptRecord] = {}
        self.begun: set[Which] = set()
        self.given_up: set[Which] = set()
        self.over: set[Which] = set()
        self.owners: dict[str, Which] = {}
        self.parts: dict[Which, dict[int, bytes]] = {}
        self.latest: dict[str, Latest] = {}
        self.metrics: dict[tuple[Reference, str], list[float | None]] = {}
        self.fenced = 0
        store.on_commit.append(self._on_commit)

    def say(self, text: str) -> None:
        self.log.append(f"{self.now:9.4f} {text}")

    def fail(self, rule: str, text: str) -> None:
        self.violations.append(f"{rule} at {self.now:.4f} s: {text}")
        self.say(f"VIOLATION {self.violations[-1]}")

    # ---- the store

    def _on_commit(self, revision: int, events: Sequence[Event]) -> None:
        changed = {event.kv.key.decode(): event for event in events}
        for key, event in changed.items():
            short = key.removeprefix("/raftkv/checkpoint/")
            who = self.sender.name if self.sender else "-"
            self.say(f"{revision} {event.type} {short} by {who}")
        for key, event in changed.items():
            parts = key.removeprefix("/raftkv/checkpoint/").split("/")
            if key.startswith("/raftkv/checkpoint/run/"):
                run, what, *rest = run_of(event.kv.key), parts[2], *parts[3:]
                if (check := getattr(self, f"_{what}", None)) is not None:
                    check(run, rest, event, changed)
            elif key.startswith("/raftkv/checkpoint/latest/"):
                self._moved(run_of(event.kv.key), parts[2], event)
        self._forget(changed)

    def _attempt(self, run: str, rest: list[str], event: Event, changed: Mapping[str, Event]) -> None:
        kind, text, last = rest[:3]
        which = (run, kind, AttemptId.parse(text))
        if event.type != PUT:
            if last == "head":
                self._decided(which, changed)
            return
        self._under_fence(f"{last} of {which}")
        if last == "head":
            head = AttemptRecord.decode(event.kv.value)
            if which in self.begun:
                self.fail("P3", f"{which} has begun twice")
            if head.uri in self.owners:
                self.fail("P3", f"{which} writes to the directory of {self.owners[head.uri]}")
            self.begun.add(which)
            self.owners[head.uri] = which
            self.heads[which] = head
            return
        if which not in self.heads:
            self.fail("P3", f"a rank prepares {which}, or offers bytes for it, which is over")
        if rest[3] == "offer":
            return
        if event.kv.version != 1:
            self.fail("P1", f"rank {rest[3]} has prepared {which} twice")
        self.parts.setdefault(which, {})[int(rest[3])] = event.kv.value

    def _decided(self, which: Which, changed: Mapping[str, Event]) -> None:
        run, kind, attempt = which
        keys = RegistryKeys(run)
        record, deleting = changed.get(keys.record(kind, attempt.step)), changed.get(keys.deleting(kind, attempt))
        is_committed = record is not None and record.type == PUT
        if not is_committed and not (deleting is not None and deleting.type == PUT):
            self.fail("P3", f"{which} has vanished undecided")
        if not is_committed:
            self.given_up.add(which)
            self._under_fence(f"the end of {which}")

    def _under_fence(self, what: str) -> None:
        if (sender := self.sender) is None:
            return
        self.fenced += 1
        claim = sender.claim
        fence = None if claim is None else self.store.items.get(RegistryKeys(claim.run_id).fence.encode())
        if claim is None or fence is None or fence.mod_revision != claim.revision:
            self.fail("P1", f"{what} written by {sender.name} after its fence has ended")
        elif claim.world is not None and self.store.items[ROUND.encode()].mod_revision != sender.world_revision:
            self.fail("P1", f"{what} written by {sender.name} after its generation has ended")

    def _record(self, run: str, rest: list[str], event: Event, changed: Mapping[str, Event]) -> None:
        kind, step = rest[0], int(rest[1])
        reference = Reference(run, kind, step)
        if event.type != PUT:
            self._deleted(reference, changed)
            return
        checkpoint = Checkpoint.decode(event.kv.value)
        if event.kv.version > 1:
            self.live[reference] = checkpoint
            return
        which = (run, kind, checkpoint.id)
        self._under_fence(f"the record of {which}")
        head = self.heads.get(which)
        if head is None or which in self.given_up:
            self.fail("P3", f"{which} is committed, but is not undecided")
            return
        others = (other for at, other in self.committed.items() if at[0] == run and kind != MEMORY)  # may be forgotten
        if any(other.kind == kind and other.step == step for other in others):
            self.fail("P3", f"step {step} is committed twice")
        self._check_prepared(which, head, checkpoint)
        moved = changed.get(RegistryKeys(run).latest(kind))
        if moved is None or Latest.decode(moved.kv.value).step != step:
            self.fail("P2", f"{which} is committed, and is not the latest")
        self.committed[which] = checkpoint
        self.live[reference] = checkpoint
        self.commits.append((event.kv.mod_revision, which))
        if kind == MEMORY:
            listing = changed.get(RegistryKeys(run).manifest(kind, step))
            if listing is None or of_bytes(listing.kv.value) != checkpoint.manifest:
                self.fail("P2", f"{which} is committed without its list of files")
            return
        self._check_bytes(checkpoint)
        self._check_parent(checkpoint)

    def _check_prepared(self, which: Which, head: AttemptRecord, checkpoint: Checkpoint) -> None:
        parts = {rank: Prepared.decode(value) for rank, value in self.parts.get(which, {}).items()}
        if set(parts) != set(range(head.world_size)):
            self.fail("P1", f"{which} is committed with ranks {sorted(parts)} of {head.world_size}")
            return
        manifest = Manifest.of(head, parts)
        if (manifest.digest, manifest.root) != (checkpoint.manifest, checkpoint.root):
            self.fail("P1", f"{which} is committed with other files than were prepared")

    def _check_bytes(self, checkpoint: Checkpoint) -> None:
        data = self.disk.files.get(f"{checkpoint.uri}/{MANIFEST}")
        if data is None or of_bytes(data) != checkpoint.manifest:
            self.fail("P2", f"{checkpoint.reference} has no manifest, or another")
            return
        for _, file in Manifest.decode(data).files:
            found = self.disk.files.get(f"{checkpoint.uri}/{file.name}")
            if found is None or of_bytes(found) != file.digest:
                self.fail("P2", f"{checkpoint.reference} cannot be loaded: {file.name} is not what was prepared")

    def _check_parent(self, checkpoint: Checkpoint) -> None:
        parent = checkpoint.parent
        if parent is not None and parent.run_id != checkpoint.run_id and parent not in self.live:
            self.fail("P4", f"{checkpoint.reference} descends from {parent}, which is deleted")

    def _deleted(self, reference: Reference, changed: Mapping[str, Event]) -> None:
        checkpoint = self.live.pop(reference)
        keys = RegistryKeys(reference.run_id)
        if reference.kind == MEMORY:
            if keys.latest(MEMORY) not in changed:
                self.fail("P4", f"{reference} has vanished, and was neither replaced nor forgotten")
            return
        if keys.deleting(reference.kind, checkpoint.id) not in changed:
            self.fail("P4", f"{reference} has vanished")
        if self.latest[f"{reference.run_id}/{reference.kind}"].step == reference.step:
            self.fail("P4", f"{reference} is deleted, and is the latest")
        for child in self.live.values():
            if child.parent == reference and child.run_id != reference.run_id:
                self.fail("P4", f"{reference} is deleted, and {child.reference} descends from it")
        prefix = keys.holds_of(reference.kind, reference.step).encode()
        if held := [key for key in self.store.items if key.startswith(prefix)]:
            self.fail("P4", f"{reference} is deleted, and is held by {held}")

    def _hold(self, run: str, rest: list[str], event: Event, changed: Mapping[str, Event]) -> None:
        reference = Reference(run, rest[0], int(rest[1]))
        if event.type == PUT and reference not in self.live:
            self.fail("P4", f"{reference} is held, and is deleted")

    def _copy(self, run: str, rest: list[str], event: Event, changed: Mapping[str, Event]) -> None:
        if event.type == PUT and not event.kv.lease:
            self.fail("P11", f"a copy is announced for ever: {rest}")

    _holder = _copy

    def _moved(self, run: str, kind: str, event: Event) -> None:
        name = f"{run}/{kind}"
        if event.type != PUT:
            if kind != MEMORY:
                self.fail("P2", f"latest of {name} is deleted")
            self.latest.pop(name, None)
            return
        latest, before = Latest.decode(event.kv.value), self.latest.get(name)
        if before is not None and latest.step < before.step:
            self.fail("P2", f"latest of {name} goes back from {before.step} to {latest.step}")
        self.latest[name] = latest

    def _forget(self, changed: Mapping[str, Event]) -> None:
        """Take in what has gone, after everything was compared with how it was before; then compare the sums."""
        for key, event in changed.items():
            parts = key.removeprefix("/raftkv/checkpoint/").split("/")
            if len(parts) > 5 and parts[2] == "attempt" and event.type != PUT:
                which = (run_of(event.kv.key), parts[3], AttemptId.parse(parts[4]))
                if parts[5] == "head":
                    self.heads.pop(which, None)
                elif parts[6] != "offer":
                    self.parts.get(which, {}).pop(int(parts[6]), None)
        for key in changed:
            parts = key.removeprefix("/raftkv/checkpoint/").split("/")
            if parts[0] == "latest" and f"{parts[1]}/{parts[2]}" in self.latest:
                self._check_summary(parts[1], parts[2])

    def _check_summary(self, run: str, kind: str) -> None:
        keys = RegistryKeys(run)
        latest = self.latest[f"{run}/{kind}"]
        records = [each for reference, each in self.live.items() if (reference.run_id, reference.kind) == (run, kind)]
        if Reference(run, kind, latest.step) not in self.live:
            self.fail("P2", f"latest of {run} is {latest.step}, which does not exist")
        sums = len(records), sum(each.size_bytes for each in records)
        if (latest.count, latest.size_bytes) != sums:
            self.fail("P8", f"{run}/{kind} says {latest.count}, {latest.size_bytes} bytes, and has {sums}")
        values: dict[str, list[float]] = {}
        index = set()
        for each in records:
            for name, value in each.metrics.items():
                if not math.isnan(value):
                    values.setdefault(name, []).append(value)
                    index.add(keys.metric(kind, name, value, each.step).encode())
        if {name: (each.min_value, each.max_value) for name, each in latest.best.items()} != {
            name: (min(some), max(some)) for name, some in values.items()
        }:
            self.fail("P8", f"{run}/{kind}: {latest.best} is not the best of {values}")
        prefix = f"{keys.base}metric/{kind}/".encode()
        if {key for key in self.store.items if key.startswith(prefix)} != index:
            self.fail("P8", f"the index of {run}/{kind} is not that of its records")

    # ---- the bytes

    def writes(self, path: str, before: bytes | None, after: bytes) -> None:
        """Implement ``Guard.writes``."""
        which = self.owners.get(path.rpartition("/")[0])
        if which in self.committed and before is not None and before != after:
            self.fail("P5", f"{path} of a committed checkpoint is overwritten")

    def deletes(self, path: str) -> None:
        """Implement ``Guard.deletes``."""
        which = self.owners.get(path.rpartition("/")[0])
        if which is None:
            return
        run, kind, attempt = which
        found = self.live.get(Reference(run, kind, attempt.step))
        if found is not None and found.id == attempt:
            self.fail("P4", f"{path} is deleted, and its checkpoint exists")
        if which in self.heads:
            self.fail("P4", f"{path} is deleted, and its attempt is undecided")
        elif which not in self.committed and which not in self.given_up:
            self.fail("P4", f"{path} is deleted, and nothing says so")

    # ---- what processes were answered

    def acknowledged(self, checkpoint: Checkpoint) -> None:
        """A process was answered that a checkpoint is committed."""
        if (checkpoint.run_id, checkpoint.kind, checkpoint.id) not in self.committed:
            self.fail("P6", f"{checkpoint.reference} was acknowledged, and is not committed")

    def prepared(self, run: str, head: AttemptRecord, rank: int) -> None:
        """A process was answered that its part is prepared."""
        which = (run, head.kind, head.id)
        if which not in self.committed and which not in self.given_up and rank not in self.parts.get(which, {}):
            self.fail("P6", f"rank {rank} of {which} was acknowledged, and has prepared nothing")

    def is_over(self, run: str, head: AttemptRecord) -> None:
        """A process was answered that an attempt is over: given up, or committed and deleted since."""
        which = (run, head.kind, head.id)
        if which not in self.committed:
            self.over.add(which)
        elif Reference(run, head.kind, head.step) in self.live:
            self.fail("P6", f"{which} was said to be over, and is committed")

    def loads(self, checkpoint: Checkpoint, name: str, data: bytes | None, digest: str, pin: bytes) -> None:
        """A reader has read a file of a checkpoint that it has pinned."""
        if (data is None or of_bytes(data) != digest) and pin in self.store.items:
            self.fail("P4", f"{checkpoint.reference} is pinned, and {name} cannot be read")

    def reported(self, told: list[tuple[int, Which]], revision: int, checkpoint: Checkpoint) -> None:
        """A watcher was told of a commit."""
        which = (checkpoint.run_id, checkpoint.kind, checkpoint.id)
        if (revision, which) not in self.commits or checkpoint.kind == MEMORY:
            self.fail("P7", f"a watcher hears of {which} at {revision}, which is no commit")
        if told and told[-1][0] >= revision:
            self.fail("P7", f"a watcher hears of {which} at {revision} after {told[-1][0]}")
        told.append((revision, which))

    # ---- the end

    def check_end(self, told: Sequence[list[tuple[int, Which]]], is_compacted: bool) -> None:
        """Compare what processes were answered with how everything has ended."""
        for which in self.over & self.committed.keys():
            self.fail("P6", f"{which} was said to be given up, and is committed")
        for some in told:
            for revision, which in self.commits:
                gone = Reference(which[0], which[1], which[2].step) not in self.live
                if (
                    which[0] == "job"
                    and which[1] != MEMORY
                    and (revision, which) not in some
                    and not (is_compacted and gone)
                ):
                    self.fail("P7", f"a watcher has not heard of {which}")
        for (reference, name), values in self.metrics.items():
            found = self.live.get(reference)
            if found is not None and found.metrics.get(name) not in values:
                self.fail("P6", f"{name} of {reference} is {found.metrics.get(name)}, not {values}")
        for checkpoint in self.live.values():
            if checkpoint.kind != MEMORY:
                self._check_bytes(checkpoint)
        self._check_garbage()

    def _check_garbage(self) -> None:
        left = [key.decode() for key in self.store.items if b"/attempt/" in key or b"/deleting/" in key]
        if left:
            self.fail("P9", f"keys are left: {left}")
        known = {each.uri for each in self.live.values()}
        paths = [path for path in self.disk.files if "/step-" in path and path.rpartition("/")[0] not in known]
        if paths:
            self.fail("P9", f"bytes are left: {paths}")
