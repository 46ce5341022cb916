"""One attempt to save one checkpoint: the steps of the coordinator and the ranks.

::

    attempt = await begin(means, claim, record, make_uri)     # the coordinator; other ranks: await join(...)
    await attempt.prepare(rank, files)                        # every rank, when its files are durable
    await attempt.prepare(0, files, metrics={"loss": 0.1})    # the coordinator, last of all
    checkpoint = await attempt.commit()                       # the coordinator, or, after its death, a later claim
    checkpoint = await attempt.outcome()                      # the other ranks

Every step may be repeated, by the same process or, after its death, by another with a later claim: a second ``prepare``
of the same files and a second ``commit`` return the result of the first. The commit is one txn whose size does not
depend on the number of ranks; what they prepared is in the Merkle root and the manifest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, cast

from raftkv.checkpoint.commit.claim import Claim, Items, Watching, limited, under
from raftkv.checkpoint.commit.manifest import NAME as MANIFEST
from raftkv.checkpoint.commit.manifest import Manifest
from raftkv.checkpoint.commit.summary import advanced, checked_metrics, indexed
from raftkv.checkpoint.copies import catalogue
from raftkv.checkpoint.copies.catalogue import ReadCopy, receive
from raftkv.checkpoint.digest import of_bytes
from raftkv.checkpoint.errors import (
    AttemptOver,
    CheckpointExists,
    CheckpointNotFound,
    FilesChanged,
    PrepareConflict,
    RanksMissing,
    StaleStep,
    printable,
)
from raftkv.checkpoint.keys import (
    MEMORY,
    METRICS_MAX,
    RANDOM_DIGITS,
    WORLD_SIZE_MAX,
    AttemptId,
    AttemptKeys,
    RegistryKeys,
    check_durable,
    check_file_name,
)
from raftkv.checkpoint.records import (
    AttemptRecord,
    Checkpoint,
    Deleting,
    FileRecord,
    Hold,
    Latest,
    Offer,
    Prepared,
    Reference,
)  # fmt: skip
from raftkv.client.arguments import instance, whole
from raftkv.client.control import Control, below, until_answered
from raftkv.client.lease import farewell_s
from raftkv.client.operations import Operation, delete, get, get_range, mod_revision, put, version
from raftkv.client.records import RecordError, read, readable
from raftkv.client.scope import prefix_end
from raftkv.client.values import KeyValue, RangeResult
from raftkv.errors import ConfigError, RaftKVError, StatusError

WriteManifest = Callable[[str, bytes], Awaitable[None]]
CheckFiles = Callable[[str, Manifest], Awaitable[None]]

GIVE_UP_S: Final = 10.0
"""Time limit for aborting a failed attempt, so that the caller gets the error without waiting for the cluster."""
PREPARED_MAX_BYTES: Final = 256 * 1024
"""Maximum size of one rank's prepared part: about 1,700 files."""
PREPARED_TOTAL_MAX_BYTES: Final = 256 * 1024 * 1024
"""Maximum size of all prepared parts, which the coordinator reads at once; with more than 1,024 ranks, divided among
them."""
RECORD_MAX_BYTES: Final = 64 * 1024
"""Maximum size of the head of an attempt, including user metadata; the record is not much larger."""
LISTING_MAX_BYTES: Final = 1 << 20
"""Maximum size of the list of files of a checkpoint in memory, which is a value in the store."""


@dataclass(frozen=True, slots=True)
class Means:
    """The store, files and clock that attempts work with.

    Attributes:
        control: the store.
        write_manifest: writes the manifest, durably, below the uri of an attempt.
        check_files: raises FilesChanged if what a manifest lists is not below that uri, or has another size.
        now: the wall clock in seconds, for people.
        draw: returns a random number below a limit.
        leave_mark: writes a marker file with a name and content below a uri (``retention.ownership``); None: none.
        read_copy: reads a copy from its holder, without verification.
    """

    control: Control
    write_manifest: WriteManifest
    check_files: CheckFiles
    now: Callable[[], float]
    draw: Callable[[int], int] = secrets.randbelow
    leave_mark: Callable[[str, str, bytes], Awaitable[None]] | None = None
    read_copy: ReadCopy = receive


class _Seen(NamedTuple):
    """The keys that a commit reads, at one revision."""

    head: KeyValue | None
    record: KeyValue | None
    latest: KeyValue | None
    deleting: KeyValue | None


class Attempt:
    """One attempt to save one checkpoint; made by ``begin`` and ``join``.

    Arguments:
        means: store, files and clock to use.
        claim: current claim: that of its own generation, or a later one that takes it over.
        record: head of the attempt.

    Attributes:
        record: head of the attempt.
    """

    def __init__(self, means: Means, claim: Claim, record: AttemptRecord) -> None:
        self.record = instance(record, AttemptRecord, "record")
        self._means = means
        self._control = means.control
        self._claim = instance(claim, Claim, "claim")
        self._run = RegistryKeys(claim.run_id)
        self._keys: AttemptKeys = self._run.attempt(record.kind, record.id)

    def __str__(self) -> str:
        return f"step {self.record.step} of run {self._claim.run_id!r} ({self.record.kind})"

    @property
    def uri(self) -> str:
        """Return the URL of the directory of its files."""
        return self.record.uri

    async def check(self) -> None:
        """Raise if it can no longer be committed; call this before writing files that other programs read.

        Raises:
            FenceBroken, GenerationOver: the claim has ended.
            AttemptOver: the attempt was aborted.
        """
        seen = await self._read()
        if seen.head is None and self._own(seen.record) is None:
            raise self._over(seen.deleting)

    # ---- ranks

    async def prepare(
        self, rank: int, files: Sequence[FileRecord], *, metrics: Mapping[str, object] | None = None
    ) -> None:
        """Record that this rank's files are durable. From now on they must not change.

        Arguments:
            rank: rank, from 0 to ``world_size`` - 1.
            files: all files of the rank; a rank without files must prepare too.
            metrics: as for ``commit``; given here, they are kept also if a later claim commits the checkpoint.

        Raises:
            ConfigError: the rank, a name or a metric is not valid, or there are too many files.
            PrepareConflict: this rank has prepared other files.
            AttemptOver: the attempt was aborted.
            FenceBroken, GenerationOver: the claim has ended; nothing was written.
        """
        rank = whole(rank, "rank")
        part = self._checked(rank, files, checked_metrics(metrics, self.record.step))
        value = part.encode()
        size_bytes = len(replace(part, metrics={}).encode() if part.metrics else value)
        most = min(PREPARED_MAX_BYTES, PREPARED_TOTAL_MAX_BYTES // self.record.world_size)
        if size_bytes > most:
            raise ConfigError(
                f"rank {rank} has {len(files)} files in step {self.record.step}, whose list of {size_bytes} bytes is "
                f"too long for one of {self.record.world_size} ranks: at most {most} bytes; "
                "write fewer and larger files"
            )
        key = self._keys.rank(rank)
        result = await under(
            self._control,
            self._claim,
            [version(key) == 0, version(self._keys.head) > 0],
            [put(key, value)],
            [get(key), get(self._run.record(self.record.kind, self.record.step)), get(self._deleting)],
        )
        if result.succeeded:
            return
        found, record, deleting = result.results
        if found is not None and found.value != value and self._part(rank, found).files != part.files:
            raise PrepareConflict(f"rank {rank} has prepared other files for {self} already; abort it, and save again")
        if found is None and self._own(record) is None:
            raise self._over(deleting)
        # Otherwise an earlier copy of this call was applied, and the attempt may already be committed.

    def _checked(self, rank: int, files: Sequence[FileRecord], metrics: Mapping[str, float]) -> Prepared:
        if not 0 <= rank < self.record.world_size:
            raise ConfigError(f"rank {rank} does not exist: {self} is saved by {self.record.world_size} ranks")
        files = [instance(file, FileRecord, "a file of a rank") for file in files]
        if len({file.name for file in files}) < len(files):
            raise ConfigError(f"rank {rank} names a file of step {self.record.step} twice; name each once")
        for file in files:
            file.check()
            if file.name == MANIFEST:
                raise ConfigError(f"{MANIFEST} is the name of the manifest; give the file of rank {rank} another")
        return Prepared(rank, tuple(sorted(files, key=lambda file: file.name)), metrics)

    async def offer(self, file: FileRecord) -> str:
        """Record which bytes this rank will send to holders of copies, which take no others.

        Returns:
            The secret that the sender presents.

        Raises:
            ConfigError: the name of the file is not valid.
            AttemptOver: the attempt was aborted, or is committed.
            FenceBroken, GenerationOver: the claim has ended; nothing was written.
        """
        key, secret = self._keys.offer(check_file_name(file.name)), secrets.token_hex(32)
        offer = Offer(file.name, file.size_bytes, file.digest, of_bytes(secret.encode()))
        there = [version(self._keys.head) > 0]
        result = await under(self._control, self._claim, there, [put(key, offer.encode())], [get(self._deleting)])
        if not result.succeeded:
            raise self._over(result.results[0])
        return secret

    async def outcome(self, timeout_s: float | None = None) -> Checkpoint:
        """Wait until the attempt is committed.

        Arguments:
            timeout_s: None: as long as the claim lasts.

        Raises:
            AttemptOver: the attempt was aborted.
            FenceBroken, GenerationOver: the claim ended before; the next claim commits or aborts the attempt.
            TimeoutError: the attempt was neither committed nor aborted in time.
        """
        what = f"{self} was neither committed nor given up"
        async with limited(timeout_s, what), Watching(self._control, self._claim, (self._keys.head, "")) as copy:
            is_decided = await copy.holds(lambda items: not items)
        # Read even if the claim has ended, because it may have been committed just before.
        seen = await self._read_unfenced()
        committed = self._own(seen.record)
        if committed is None:
            raise self._over(seen.deleting) if is_decided else self._claim.broken(copy.why_over or "")
        return committed

    # ---- the coordinator

    async def prepared(self, timeout_s: float | None = None, *, but: Sequence[int] = ()) -> dict[int, Prepared]:
        """Wait until the ranks have prepared; return their parts.

        Arguments:
            timeout_s: None: as long as the claim lasts.
            but: ranks not to wait for, such as the coordinator itself, which prepares last.

        Raises:
            RanksMissing: some ranks did not prepare in time; another call continues to wait.
            PrepareConflict: a prepared part cannot be read.
            CheckpointExists: the attempt is already committed.
            AttemptOver: the attempt was aborted.
            FenceBroken, GenerationOver: the claim ended before.
        """
        wanted = {self._keys.rank(rank).encode(): rank for rank in range(self.record.world_size) if rank not in but}
        parts: dict[int, Prepared] = {}
        head = self._keys.head.encode()

        def is_decided(items: Items) -> bool:
            for key in wanted.keys() & items.keys():  # read while others still prepare
                rank = wanted.pop(key)
                parts[rank] = self._part(rank, items[key])
            return not wanted or head not in items

        try:
            async with (
                asyncio.timeout(timeout_s),
                Watching(self._control, self._claim, below(self._keys.ranks), (self._keys.head, "")) as copy,
            ):
                await copy.until(is_decided)
        except TimeoutError:
            raise RanksMissing(str(self), timeout_s or 0.0, sorted(wanted.values())) from None
        if wanted:
            await self.check()  # a later claim may have committed or aborted it
            raise CheckpointExists(f"{self} is committed already")
        return {rank: parts[rank] for rank in sorted(parts)}

    def _part(self, rank: int, item: KeyValue) -> Prepared:
        try:
            return read(Prepared, item)
        except RecordError as error:
            raise PrepareConflict(f"what rank {rank} has prepared for {self} cannot be used: {error}") from None

    async def commit(self, *, metrics: Mapping[str, float] | None = None, timeout_s: float | None = None) -> Checkpoint:
        """Wait for all ranks, write the manifest, and commit; or return the result if this was already done.

        Arguments:
            metrics: numbers by which the best is found, in addition to the prepared ones.
            timeout_s: time to wait for the ranks; None: as long as the claim lasts.

        Raises:
            ConfigError: there are too many metrics, or one is not valid.
            RanksMissing: some ranks did not prepare in time.
            PrepareConflict: two ranks have prepared the same file.
            FilesChanged: a prepared file is missing or truncated.
            CheckpointExists: another attempt has committed the step.
            StaleStep: a newer step is committed.
            AttemptOver: the attempt was aborted.
            FenceBroken, GenerationOver: the claim has ended.
        """
        metrics = checked_metrics(metrics, self.record.step)
        seen = await self._read()
        if (done := self._own(seen.record)) is not None:
            return done
        self._undecided(seen)
        try:
            parts = await self.prepared(timeout_s)
            manifest = Manifest.of(self.record, parts)
        except CheckpointExists:
            return await self.commit()  # committed by another process of this claim: read the result
        await self.check()  # so that a dead generation writes no manifest for readers
        try:
            await self._check_bytes(manifest)  # first, because writing the manifest would create the directory
        except FilesChanged:
            if (await self._read()).head is None:  # aborted meanwhile, so its files are being deleted; or committed
                return await self.commit()
            raise
        if self.record.kind != MEMORY:
            await self._means.write_manifest(self.uri, manifest.encoded)
        noted = [item for part in parts.values() for item in part.metrics.items() if item[0] not in metrics]
        metrics |= dict(noted[: METRICS_MAX - len(metrics)])  # of records: more than one coordinator gives are not its
        checkpoint = self._checkpoint(manifest, metrics)
        if metrics:
            check_durable(self.record.kind)
        while (committed := await self._try_commit(checkpoint, manifest)) is None:
            pass  # `latest` has changed meanwhile, for example by a new metric
        await self._clean()
        return committed

    async def _check_bytes(self, manifest: Manifest) -> None:
        """Check that all files, or in memory a copy of each, exist. Raises FilesChanged, StorageError."""
        if self.record.kind != MEMORY:
            await self._means.check_files(self.uri, manifest)
            return
        if len(manifest.encoded) > LISTING_MAX_BYTES:
            raise ConfigError(
                f"{self} has too many files for a checkpoint in memory: at most {LISTING_MAX_BYTES} bytes"
            )
        there = {(copy.file, copy.digest) for copy in await catalogue.copies_of(self._control, self._run, self.record)}
        for rank, file in manifest.files:
            if (file.name, file.digest) not in there:
                raise FilesChanged(self.uri, file.name, rank, "is no longer in the memory of any node")

    def _checkpoint(self, manifest: Manifest, metrics: Mapping[str, float]) -> Checkpoint:
        attempt, now = self.record, self._means.now()
        return Checkpoint(
            self._claim.run_id, attempt.step, attempt.generation, attempt.number, attempt.kind, attempt.world_size,
            attempt.uri, manifest.digest, manifest.root, len(manifest.files), manifest.size_bytes, attempt.parent,
            metrics, attempt.metadata, attempt.holder, now, max(0.0, now - attempt.time),
        )  # fmt: skip

    async def _try_commit(self, checkpoint: Checkpoint, manifest: Manifest) -> Checkpoint | None:
        """Try to commit on the condition of the keys as read; None: they have changed in between."""
        seen = await self._read()
        if (done := self._own(seen.record)) is not None:
            return done
        head = self._undecided(seen)
        kind, step, run = checkpoint.kind, checkpoint.step, self._run
        latest = None if seen.latest is None else read(Latest, seen.latest)
        conditions = [
            mod_revision(self._keys.head) == head.mod_revision,
            version(run.record(kind, step)) == 0,
            mod_revision(run.latest(kind)) == (0 if seen.latest is None else seen.latest.mod_revision),
        ]
        is_memory = kind == MEMORY  # then it replaces all previous ones
        operations = [
            put(run.record(kind, step), checkpoint.encode()),
            put(run.latest(kind), advanced(None if is_memory else latest, checkpoint).encode()),
            *(_replacing(run, step, manifest) if is_memory else ()),
            *indexed(run, checkpoint),
            delete(self._keys.head),
        ]
        reads: list[Operation] = [get(run.record(kind, step))]
        parent = checkpoint.parent
        if parent is not None and parent.run_id != checkpoint.run_id:
            key = RegistryKeys(parent.run_id).record(parent.kind, parent.step)
            conditions.append(version(key) > 0)
            operations.append(put(checkpoint.hold_on_parent, Hold(str(checkpoint.reference), checkpoint.time).encode()))
            reads.append(get(key))
        result = await under(self._control, self._claim, conditions, operations, reads)
        if result.succeeded:
            return checkpoint
        if len(reads) == 2 and result.results == (None, None):
            raise CheckpointNotFound(f"the parent {parent} of {self} does not exist, or was deleted")
        return None

    def _undecided(self, seen: _Seen) -> KeyValue:
        """Return the head, unless it can no longer be committed."""
        _refuse(str(self), self.record.step, seen.record, seen.latest)
        if seen.head is None:
            raise self._over(seen.deleting)
        return seen.head

    async def abort(self, reason: str) -> bool:
        """Abort the attempt, so that its files will be deleted; idempotent. False: it is committed and exists.

        Arguments:
            reason: human-readable reason.

        Raises:
            FenceBroken, GenerationOver: the claim has ended; the next one aborts the attempt.
        """
        while True:
            seen = await self._read()
            if seen.head is None:
                return self._own(seen.record) is None
            gone = Deleting(self.uri, reason, self._means.now())
            deleting = put(self._deleting, gone.encode())
            # Delete the ranks' keys too, so that nothing prepared for deleted files can ever be committed.
            operations: list[Operation] = [delete(self._keys.head), delete(self._keys.ranks, prefix=True), deleting]
            as_seen = mod_revision(self._keys.head) == seen.head.mod_revision
            if (await under(self._control, self._claim, [as_seen], operations)).succeeded:
                return True

    async def give_up(self, error: BaseException, who: str = "") -> None:
        """Abort the attempt because of an error that the caller raises; this method raises nothing and returns soon.

        If it cannot be aborted now, the next claim aborts it.

        Arguments:
            error: error, whose first line is the reason.
            who: name of the failed rank, for people; empty: none.
        """
        line = f"{type(error).__name__}: {error}".partition("\n")[0][:500]
        with contextlib.suppress(RaftKVError, TimeoutError):
            async with asyncio.timeout(farewell_s(error) or GIVE_UP_S):
                await self.abort(f"{who}: {line}" if who else line)

    # ---- what is there

    async def _read(self) -> _Seen:
        result = await under(self._control, self._claim, (), self._reads())
        return _Seen(*result.results)

    async def _read_unfenced(self) -> _Seen:
        result = await until_answered(lambda: self._control.txn((), self._reads()))
        return _Seen(*result.results)

    def _reads(self) -> list[Operation]:
        kind, step = self.record.kind, self.record.step
        keys = (self._keys.head, self._run.record(kind, step), self._run.latest(kind), self._deleting)
        return [get(key) for key in keys]

    @property
    def _deleting(self) -> str:
        """Return the operation that marks its files for deletion, with the reason."""
        return self._run.deleting(self.record.kind, self.record.id)

    def _own(self, found: KeyValue | None) -> Checkpoint | None:
        """Return the committed checkpoint if it is from this attempt."""
        checkpoint = None if found is None else read(Checkpoint, found)
        return checkpoint if checkpoint is not None and checkpoint.id == self.record.id else None

    def _over(self, deleting: KeyValue | None) -> AttemptOver:
        with contextlib.suppress(RecordError):
            if deleting is not None and (reason := printable(read(Deleting, deleting).reason)):
                return AttemptOver(f"{self} was aborted, or deleted: {reason}; save again, or a later step")
        return AttemptOver(f"{self} was aborted, or was committed and deleted since; save a later step")

    async def _clean(self) -> None:
        """Delete the ranks' prepared parts, which are in the manifest; after a crash the collector does it."""
        with contextlib.suppress(StatusError):
            await until_answered(lambda: self._control.txn((), [delete(self._keys.ranks, prefix=True)]))


def _replacing(run: RegistryKeys, step: int, manifest: Manifest) -> list[Operation]:
    """Return the additional writes of a commit in memory: store its list of files, delete all previous checkpoints."""
    return [
        put(run.manifest(MEMORY, step), manifest.encoded),
        delete(run.manifests_of(MEMORY), run.manifest(MEMORY, step)),
        delete(run.records_of(MEMORY), run.record(MEMORY, step)),
        delete(f"{run.deletings}{MEMORY}/", prefix=True),
    ]


async def forget_memory(means: Means, claim: Claim) -> None:
    """Delete the checkpoint in memory, so that an earlier step may be saved there again.

    The coordinator calls this when a restore found that a file has no good copy.

    Arguments:
        means: store, files and clock to use.
        claim: claim of the current generation, which has taken over.

    Raises:
        FenceBroken, GenerationOver: the claim has ended.
    """
    run = RegistryKeys(instance(claim, Claim, "claim").run_id)
    prefixes = (run.records_of(MEMORY), run.manifests_of(MEMORY), f"{run.deletings}{MEMORY}/")
    operations: list[Operation] = [delete(prefix, prefix=True) for prefix in prefixes]
    while (found := (await under(means.control, claim, (), [get(run.latest(MEMORY))])).results[0]) is not None:
        seen = mod_revision(run.latest(MEMORY)) == found.mod_revision  # so that a late copy has no effect
        await under(means.control, claim, [seen], [delete(run.latest(MEMORY)), *operations])


# ---- how an attempt is opened
#
# No two attempts share a directory. ``begun`` is written with every head, on the condition that no head was written
# since the attempt's number was chosen, so even a very late copy of the txn changes nothing. The number ends in random
# digits, in case a lost cluster is replaced by one that begins at revision 1 while the old files exist.

WHO: Final = "this rank"

_log = logging.getLogger(__name__)


async def begin(means: Means, claim: Claim, record: AttemptRecord, make_uri: Callable[[AttemptId], str]) -> Attempt:
    """Begin an attempt.

    Arguments:
        means: store, files and clock to use.
        claim: current claim.
        record: what to save; ``generation``, ``number``, ``uri`` and ``time`` are filled in.
        make_uri: returns the directory for an attempt.

    Raises:
        ConfigError: there are too many ranks, the parent cannot exist, or the metadata is too large or not text.
        CheckpointExists: the step is already committed.
        StaleStep: a newer step is committed.
        FenceBroken, GenerationOver: the claim has ended.
    """
    if not 1 <= record.world_size <= WORLD_SIZE_MAX:
        raise ConfigError(f"a checkpoint is saved by 1 to {WORLD_SIZE_MAX} ranks, not by {record.world_size}")
    if isinstance(record.parent, Reference):
        record.parent.check()
        check_durable(record.parent.kind)
    run = RegistryKeys(instance(claim, Claim, "claim").run_id)
    while True:
        reads = [get(run.record(record.kind, record.step)), get(run.latest(record.kind))]
        result = await under(means.control, claim, (), reads)
        number = result.revision * RANDOM_DIGITS + means.draw(RANDOM_DIGITS)
        attempt_id = AttemptId(record.step, claim.generation, number)
        filled = replace(record, generation=claim.generation, number=number, uri=make_uri(attempt_id), time=means.now())
        value = _encoded(filled)
        attempt = Attempt(means, claim, filled)
        _refuse(str(attempt), record.step, *result.results)
        head = run.attempt(record.kind, attempt_id).head
        none_since = mod_revision(run.begun) < result.revision + 1
        done = await under(
            means.control, claim, [none_since], [put(head, value), put(run.begun, str(attempt_id))], [get(head)]
        )
        if done.succeeded or (done.results[0] is not None and done.results[0].value == value):
            return attempt


async def check_new(control: Control, run_id: str, step: int, kind: str) -> None:
    """Refuse a step that could not be saved now, before a claim ends the other writers of the run for nothing.

    Arguments:
        control: the store.
        run_id, step, kind: run, step and kind of the checkpoint.

    Raises:
        CheckpointExists, StaleStep: the step, or a later one, is committed.
    """
    run = RegistryKeys(run_id)
    found = await until_answered(lambda: control.txn((), [get(run.record(kind, step)), get(run.latest(kind))]))
    _refuse(f"step {step} of run {run_id!r} ({kind})", step, *found.results)


def _refuse(what: str, step: int, record: KeyValue | None, latest: KeyValue | None) -> None:
    """Raise if no attempt can commit a step, according to the two keys."""
    if record is not None:
        raise CheckpointExists(f"{what} is committed already, by another attempt; load that one, or save a later step")
    newest = None if latest is None else read(Latest, latest)
    if newest is not None and newest.step >= step:
        raise StaleStep(
            f"{what} is not above step {newest.step}, which is the latest, and latest never goes back; "
            "to go on from an older step, use a new run id and name the old checkpoint as its parent"
        )


def _encoded(record: AttemptRecord) -> bytes:
    try:
        value = record.encode()
    except RecordError as error:
        raise ConfigError(f"step {record.step} cannot be saved: {error.why}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"step {record.step} cannot be saved: metadata is a table of texts: {error}") from None
    if not all(isinstance(text, str) for item in record.metadata.items() for text in item):
        raise ConfigError(f"step {record.step} cannot be saved: metadata is a table of texts")
    if len(value) > RECORD_MAX_BYTES:
        raise ConfigError(
            f"step {record.step} cannot be saved: with its metadata its record is {len(value)} bytes long, more than "
            f"{RECORD_MAX_BYTES}; put what is large into a file of the checkpoint"
        )
    return value


async def join(
    means: Means,
    claim: Claim,
    kind: str,
    step: int,
    timeout_s: float | None = None,
    *,
    after: int | None = None,
    who: str = WHO,
) -> Attempt:
    """Wait until the coordinator has begun an attempt in this generation.

    Arguments:
        means: store, files and clock to use.
        claim: current claim.
        kind, step: kind and step to save.
        timeout_s: None: as long as the claim lasts.
        after: number of the last attempt of this kind in which this rank took part, 0: none. If an attempt for another
            step has begun since, the ranks save different steps. None: a coordinator may save several concurrently.
        who: name of this rank, for the error about different steps.

    Raises:
        ConfigError: the coordinator saves another step.
        CheckpointExists: the step is committed already.
        FenceBroken, GenerationOver: the claim ended before.
        TimeoutError: nothing was begun in time.
    """
    run = RegistryKeys(instance(claim, Claim, "claim").run_id)
    heads = below(run.attempts_at(kind, step, claim.generation))
    committed = run.record(kind, step)
    what = f"no coordinator began to save step {step} of run {claim.run_id!r} ({kind})"
    intervals = [heads, (committed, "")] if after is None else [heads, (committed, ""), (run.begun, "")]

    def is_there(items: Items) -> bool:
        return any(_is_head(key) or key == committed.encode() for key in items)

    def other(items: Items) -> AttemptId | None:
        begun = _begun(items.get(run.begun.encode()))
        if after is None or begun is None or begun.number <= after:
            return None
        return begun if begun.generation == claim.generation and begun.step != step else None

    async with limited(timeout_s, what), Watching(means.control, claim, *intervals) as copy:
        while not is_there(items := await copy.until(lambda items: is_there(items) or other(items) is not None)):
            begun = cast(AttemptId, other(items))
            head = (await under(means.control, claim, (), [get(run.attempt(kind, begun).head)])).results[0]
            if head is not None:
                error = different_steps(begun.step, step, who)
                await Attempt(means, claim, read(AttemptRecord, head)).give_up(
                    error, f"{who} failed"
                )  # else its coordinator would keep waiting
                raise error
            after = begun.number  # of another kind, or aborted
    found = [read(AttemptRecord, item) for key, item in items.items() if _is_head(key)]
    if not found:
        raise CheckpointExists(f"step {step} of run {claim.run_id!r} ({kind}) is committed already")
    return Attempt(means, claim, max(found, key=lambda head: head.number))


def different_steps(begun: int, step: int, who: str) -> ConfigError:
    """Make the error of a rank that saves another step than the coordinator."""
    return ConfigError(
        f"the coordinator saves step {begun}, and {who} step {step}: all ranks save the same steps, in the same order"
    )


def _begun(item: KeyValue | None) -> AttemptId | None:
    try:
        return None if item is None else AttemptId.parse(item.value.decode())
    except ValueError:
        return None  # not written by raftkv


def _is_head(key: bytes) -> bool:
    return key.endswith(b"/head")


async def undecided(control: Control, run: RegistryKeys) -> list[AttemptRecord]:
    """Return all open attempts of a run, with one read for each.

    A head that cannot be read, or does not belong to its key, was not written by raftkv; it is logged and skipped.
    """
    found = []
    start, end = run.attempts.encode(), prefix_end(run.attempts.encode())
    while (item := await _first(control, start, end)) is not None:
        kind, attempt_id, last = (*item.key.removeprefix(run.attempts.encode()).split(b"/", 2), b"", b"")[:3]
        start = item.key + b"\0"
        if last >= b"head":
            # The keys of the ranks sort after the head, so one step skips all of them.
            start = run.attempts.encode() + kind + b"/" + attempt_id + b"0"
        if last != b"head":
            continue
        found += readable(AttemptRecord, [item])
    return found


async def _first(control: Control, start: bytes, end: bytes) -> KeyValue | None:
    listed = await until_answered(lambda: control.txn((), [get_range(start, end, limit=1)]))
    items: RangeResult = listed.results[0]
    return items.items[0] if items.items else None


# ---- takeover: a new generation commits or aborts the open attempts of previous generations
#
# The coordinator of an attempt prepares last, and prepares everything that readers need. So an attempt that all ranks
# have prepared is complete: the next claim commits it, unless its files were deleted or truncated meanwhile. It aborts
# any other attempt, whose files are then deleted.

_UNFIT: Final = (
    AttemptOver, CheckpointExists, CheckpointNotFound, ConfigError, FilesChanged, PrepareConflict, StaleStep,
)  # fmt: skip
"""Errors after which an attempt that all ranks have prepared can never be committed."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The outcome of an attempt of a dead generation.

    Attributes:
        attempt: head of the attempt.
        checkpoint: committed checkpoint; None: the attempt was aborted.
        reason: why it was aborted.
    """

    attempt: AttemptRecord
    checkpoint: Checkpoint | None = None
    reason: str = ""


async def take_over(means: Means, claim: Claim, refusal: Callable[[AttemptRecord], Awaitable[str]]) -> list[Taken]:
    """Commit or abort all open attempts of generations before that of a claim, the lowest step first.

    Arguments:
        means: store, files and clock to use.
        claim: claim of the current generation.
        refusal: returns why the directory in an attempt's record must not be written; empty: it may be written.

    Raises:
        FenceBroken, GenerationOver: the claim has ended.
    """
    run = RegistryKeys(instance(claim, Claim, "claim").run_id)
    await under(means.control, claim, (), [get(run.fence)])  # an ended claim raises, even without open attempts
    dead = [head for head in await undecided(means.control, run) if head.generation < claim.generation]
    return [await _take(means, claim, head, refusal) for head in sorted(dead, key=lambda head: head.id)]


async def _take(
    means: Means, claim: Claim, head: AttemptRecord, refusal: Callable[[AttemptRecord], Awaitable[str]]
) -> Taken:
    attempt = Attempt(means, claim, head)
    keys = RegistryKeys(claim.run_id).attempt(head.kind, head.id)
    listed = await until_answered(lambda: means.control.txn((), [get_range(keys.ranks, prefix=True, keys_only=True)]))
    found = {item.key for item in listed.results[0]}
    prepared = sum(keys.rank(rank).encode() in found for rank in range(head.world_size))
    reason = f"{prepared} of {head.world_size} ranks had prepared when generation {head.generation} ended"
    if prepared == head.world_size and not (reason := await refusal(head)):
        try:
            return Taken(head, await attempt.commit())
        except _UNFIT as error:
            reason = str(error)
    if await attempt.abort(reason):
        return Taken(head, reason=reason)
    return Taken(head, await attempt.outcome())  # committed meanwhile by another rank of this claim
