"""The registry of a run's checkpoints, for asyncio: ``commit``, ``find`` and ``retention`` as one object.

::

    registry = Registry(kv, "job", uri="/shared/checkpoints/job")
    claim = await registry.claim()                                  # or registry.claim_run(run.world, run.fence)
    attempt = await registry.begin(claim, step=100, kind=DCP, world_size=2)
    await attempt.prepare(0, files, metrics={"loss": 0.1})
    checkpoint = await attempt.commit()
    await registry.latest()

It uses only the client library, so it works with raftkv and with etcd. ``raftkv.checkpoint.Registry`` is the same for
programs without an event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from raftkv.checkpoint import exchange
from raftkv.checkpoint.commit import attempt as attempts
from raftkv.checkpoint.commit import summary
from raftkv.checkpoint.commit.attempt import Attempt, Means, Taken
from raftkv.checkpoint.commit.claim import CLAIM_NAME, Claim, WorldConditions, claim_generation
from raftkv.checkpoint.commit.manifest import NAME as MANIFEST
from raftkv.checkpoint.commit.manifest import Manifest
from raftkv.checkpoint.copies import catalogue
from raftkv.checkpoint.copies.catalogue import Copy, Spot, read_nearest
from raftkv.checkpoint.errors import printable
from raftkv.checkpoint.exchange import Imported, OnResult
from raftkv.checkpoint.find import MIN, Bests, Commits, Lookup, RunLatest
from raftkv.checkpoint.keys import FILES, MEMORY, PIN, AttemptId, RegistryKeys, check_kind, check_run_id, check_step
from raftkv.checkpoint.records import AttemptRecord, Checkpoint, Hold, HolderRecord, Reference
from raftkv.checkpoint.retention import holds, ownership
from raftkv.checkpoint.retention.collector import NO_POLICY, Collected, Collector
from raftkv.checkpoint.retention.holds import HoldInfo, Pin
from raftkv.checkpoint.retention.policy import Policy, unmeasured
from raftkv.checkpoint.storage.filesystems import absolute
from raftkv.checkpoint.storage.place import Place
from raftkv.checkpoint.storage.verify import Progress, check_there, require_below
from raftkv.client.arguments import instance, whole
from raftkv.client.control import ClientControl, check_whole
from raftkv.errors import ConfigError

if TYPE_CHECKING:
    from raftkv.client.library import Client

_log = logging.getLogger(__name__)

UNMEASURED_MAX: Final = 3
"""Number of checkpoints without a metric of ``keep_best`` before a warning; the first validation may come later."""


class Registry:
    """The checkpoints of one run.

    Arguments:
        kv: a client of the cluster, not a view of one.
        run_id: run id, which need not be a run of ``raftkv.training``.
        uri: directory below which checkpoints are stored; empty: this registry is only for lookups.

    Raises:
        ConfigError: the run id is not valid, or the client is a view.
    """

    def __init__(self, kv: Client, run_id: str, *, uri: str = "") -> None:
        control = ClientControl(check_whole(kv), is_patient=True)
        self._set_up(
            Means(control, write_manifest, check_files, time.time, leave_mark=ownership.leave_file), run_id, uri
        )

    @classmethod
    def from_parts(cls, means: Means, run_id: str, *, uri: str = "") -> Registry:
        """Make a registry without a client, for the simulator.

        Arguments:
            means: store, files and clock to use.
            run_id, uri: as for ``Registry``.
        """
        registry = cls.__new__(cls)
        registry._set_up(means, run_id, uri)
        return registry

    def _set_up(self, means: Means, run_id: str, uri: str) -> None:
        self.run_id = check_run_id(run_id)
        self.uri = absolute(uri)
        self.keys = RegistryKeys(run_id)
        self.control = means.control
        self.lookup = Lookup(self.control)
        self._means = means
        self._holder = f"{socket.gethostname()}:{os.getpid()}"
        self._is_marked = False
        self._told_unmeasured: set[str] = set()

    def __repr__(self) -> str:
        return f"<checkpoints of run {self.run_id!r} at {self.uri or 'no place'}>"

    # ---- who may write

    async def claim(self, name: str = "") -> Claim:
        """Claim the checkpoints of the run for this program; this ends all previous claims.

        Arguments:
            name: the same name returns the same claim, also to other ranks; empty: a new claim. A restarted program
                needs a new name: the old claim would not end the writes of its previous process or take over its
                attempts.

        Raises:
            StatusError: the cluster refused.
        """
        source = CLAIM_NAME + (name or os.urandom(16).hex())
        return await claim_generation(self.control, self.run_id, source, holder=self._holder, now=time.time)

    async def claim_run(self, generation: int, revision: int, fence: WorldConditions) -> Claim:
        """Claim the checkpoints for a generation of the run: all its ranks get the same claim.

        Arguments:
            generation, revision: number and revision of the generation (``run.world``).
            fence: fence of the generation (``run.fence``).

        Raises:
            GenerationOver: the generation has ended.
            StatusError: the cluster refused.
        """
        if not hasattr(fence, "conditions"):
            raise TypeError(f"fence is that of a run (run.fence), not {fence!r}")
        return await claim_generation(
            self.control, self.run_id, f"round/{revision}", at_least=generation, world=fence, holder=self._holder,
            now=time.time,
        )  # fmt: skip

    async def take_over(self, claim: Claim) -> list[Taken]:
        """Resolve open attempts of all previous generations: commit those that all ranks have prepared, abort the rest.

        Call this on one rank, before looking up the checkpoint to resume from.

        Arguments:
            claim: claim of the current generation.

        Raises:
            FenceBroken, GenerationOver: the claim has ended.
        """
        return await attempts.take_over(self._means, claim, self.foreign_place)

    # ---- saving

    async def begin(
        self,
        claim: Claim,
        step: int,
        *,
        world_size: int = 1,
        kind: str = FILES,
        parent: Reference | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Attempt:
        """Begin to save a checkpoint, on one rank; the others call ``join``.

        Arguments:
            claim: current claim.
            step: training step, above the latest.
            world_size: number of ranks that will prepare.
            kind: one of ``keys.KINDS``.
            parent: checkpoint that it descends from, as one of another run that was fine-tuned.
            metadata: user metadata.

        Raises:
            ConfigError: the registry has no ``uri``, or an argument is not valid: ranks, metadata, names.
            CheckpointExists, StaleStep: the step, or a later one, is committed.
            FenceBroken, GenerationOver: the claim has ended.
        """
        if kind == MEMORY:
            record = self._record(step, world_size, kind, parent, metadata)
            return await attempts.begin(self._means, claim, record, lambda attempt: f"{MEMORY}:{attempt.directory}")
        if not self.uri:
            raise ConfigError(
                f"there is no place for the checkpoints of run {self.run_id!r}; give join(checkpoints=URL) or "
                "RAFTKV_CHECKPOINT_URI in a run, and Registry(uri=URL) elsewhere"
            )
        record = self._record(step, world_size, kind, parent, metadata)
        await self._mark()
        return await attempts.begin(self._means, claim, record, self._uri_of)

    async def _mark(self) -> None:
        """Write the run's marker file to its place, once; files are only deleted in places with this marker."""
        if not self._is_marked and self._means.leave_mark is not None:
            await ownership.mark(self.control, self.run_id, self.uri, self._means.leave_mark)
            self._is_marked = True

    def _record(
        self, step: int, world_size: int, kind: str, parent: Reference | None, metadata: Mapping[str, str] | None
    ) -> AttemptRecord:
        return AttemptRecord(
            check_step(step), 0, 0, check_kind(kind), whole(world_size, "world_size"), "", parent,
            dict(metadata or {}), self._holder,
        )  # fmt: skip

    async def join(
        self,
        claim: Claim,
        step: int,
        *,
        kind: str = FILES,
        timeout_s: float | None = None,
        after: int | None = None,
        who: str = attempts.WHO,
    ) -> Attempt:
        """Wait until the coordinator has begun to save a checkpoint.

        Arguments:
            claim: the coordinator's, or one of the same generation.
            step, kind: step and kind of the checkpoint.
            timeout_s: None: as long as the claim lasts.
            after, who: see ``commit.attempt.join``.

        Raises:
            ConfigError: the coordinator saves another step, or not below the uri of this registry.
            FenceBroken, GenerationOver: the claim has ended.
            TimeoutError: the coordinator did not begin in time.
        """
        kind, step = check_kind(kind), check_step(step)
        attempt = await attempts.join(self._means, claim, kind, step, timeout_s, after=after, who=who)
        if why := await self.foreign_place(attempt.record):
            raise ConfigError(why)
        return attempt

    async def set_metrics(self, step: int, kind: str, metrics: Mapping[str, object]) -> Checkpoint:
        """Add metrics to a committed checkpoint, or replace those of the same names, for example after an evaluation.

        Arguments:
            step, kind: step and kind of the checkpoint.
            metrics: name to number; NaN is stored, but is never the best or worst.

        Returns:
            The checkpoint with all its metrics.

        Raises:
            CheckpointNotFound: the checkpoint does not exist, or was deleted.
            ConfigError: there are too many metrics, or one is not valid.
        """
        return await summary.set_metrics(self.control, self.run_id, step, kind, metrics)

    def attempt(self, claim: Claim, record: AttemptRecord) -> Attempt:
        """Return an attempt that another rank has begun, from its record.

        Arguments:
            claim: claim of that rank, or one of the same generation.
            record: head of the attempt.
        """
        return Attempt(self._means, claim, record)

    def _uri_of(self, attempt: AttemptId) -> str:
        return f"{self.uri}/{attempt.directory}"

    async def foreign_place(self, head: AttemptRecord) -> str:
        """Return why this registry must not write to the directory in an attempt's record; empty: it may.

        The record is not trusted. The directory must be that of the attempt, or one below the uri that no other attempt
        has created.
        """
        what = f"step {head.step} of run {self.run_id!r} ({head.kind})"
        if head.kind == MEMORY:
            return ""  # no files are written there
        if not self.uri:
            return printable(f"{what} is not saved: this registry has no place; name it (Registry(uri=), --place)")
        if head.uri == self._uri_of(head.id):
            return ""
        with suppress(ConfigError):
            name = await asyncio.to_thread(lambda: Place(self.uri).real_name_below(head.uri))
            # Not the directory of another attempt, nor one inside it, in any spelling.
            if name and all(AttemptId.of_directory(part) in (None, head.id) for part in name.split("/")):
                return ""
        return printable(
            f"{what} is not saved: its record names {head.uri}, which "
            f"does not lie below {self.uri} as a directory of its own; save again, check who may write its keys"
        )

    # ---- finding

    async def latest(self, kind: str = "") -> Checkpoint:
        """Return the newest checkpoint. Errors and arguments as ``Lookup.latest``."""
        return await self.lookup.latest(self.run_id, kind)

    async def at(self, step: int, kind: str = "") -> Checkpoint:
        """Return the checkpoint of a step. Errors and arguments as ``Lookup.at``."""
        return await self.lookup.at(self.run_id, step, kind)

    async def tagged(self, name: str) -> Checkpoint:
        """Return the checkpoint with a tag. Errors as ``Lookup.tagged``."""
        return await self.lookup.tagged(self.run_id, name)

    async def best(self, metric: str, mode: str = MIN, *, kind: str = "") -> Checkpoint:
        """Return the best checkpoint by a metric. Errors and arguments as ``Lookup.best``."""
        return (await self.lookup.best(self.run_id, metric, mode, kind=kind))[0]

    async def checkpoints(self, kind: str = "", *, newest_first: bool = False, limit: int = 0) -> list[Checkpoint]:
        """Return the checkpoints by kind and step. Arguments as ``Lookup.checkpoints``."""
        return await self.lookup.checkpoints(self.run_id, kind, newest_first=newest_first, limit=limit)

    # ---- copies

    async def nearest(
        self, step: int, file: str, *, to: str = "", topology: str = "", kind: str = MEMORY
    ) -> list[Copy]:
        """Return the copies of a file of a checkpoint, nearest first: in memory, on disks, in shared storage.

        Arguments:
            step, kind: step and kind of the checkpoint.
            file: file name in the checkpoint.
            to: name of the reader's machine; empty: this machine.
            topology: location of the host, as ``row1/rack7``.

        Raises:
            CheckpointNotFound: the checkpoint does not exist, or was deleted.
        """
        spot = Spot(to or socket.gethostname(), topology)
        return (await catalogue.nearest(self.control, self.keys, step, file, spot, check_kind(kind))).copies

    async def fetch(
        self, checkpoint: Checkpoint, file: str, *, to: str = "", topology: str = "", limit_bytes: int = 0
    ) -> memoryview:
        """Return the bytes of a file from the nearest copy with the right digest.

        Arguments:
            checkpoint: checkpoint in memory, or below the uri of the registry.
            file: file name in the checkpoint.
            to, topology: as for ``nearest``.
            limit_bytes: limit of allocated memory; 0: half of this machine's memory.

        Raises:
            CheckpointNotFound, DigestMismatch, StorageError, ConfigError: as ``copies.catalogue.read_nearest``.
        """
        if instance(checkpoint, Checkpoint, "checkpoint").kind != MEMORY:
            require_below(checkpoint, self.uri)
        return await read_nearest(
            self.control, self.keys, checkpoint, file, Spot(to or socket.gethostname(), topology),
            self._means.read_copy, limit_bytes=limit_bytes,
        )  # fmt: skip

    async def holders(self) -> list[HolderRecord]:
        """Return the nodes of the run that keep copies in their memory, by name."""
        return await catalogue.holders(self.control, self.keys)

    async def has_all_copies(self, checkpoint: Checkpoint) -> bool:
        """Return whether holders announce a copy of every file of a checkpoint in memory."""
        copies = await catalogue.copies_of(self.control, self.keys, checkpoint)
        return len({copy.file for copy in copies}) >= checkpoint.file_count

    async def forget_memory(self, claim: Claim) -> None:
        """Delete the checkpoint in memory. Arguments and errors as ``commit.attempt.forget_memory``."""
        await attempts.forget_memory(self._means, claim)

    # ---- taking in

    async def import_directory(
        self,
        uri: str,
        *,
        step: int | None = None,
        kind: str = "",
        claim: Claim | None = None,
        dry_run: bool = False,
        on_result: OnResult | None = None,
        on_progress: Progress | None = None,
    ) -> list[Imported]:
        """Register existing checkpoints of another tool in a directory, oldest first.

        Arguments and errors as for ``integrations.importers.importing.import_directory``.
        """
        importing = import_module("raftkv.integrations.importers.importing")  # by name: it imports this module
        found: list[Imported] = await importing.import_directory(
            self, uri, step=step, kind=kind, claim=claim, dry_run=dry_run, on_result=on_result, on_progress=on_progress
        )  # fmt: skip
        return found

    async def lineage(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        """Return a checkpoint and its ancestors in all runs, the nearest first."""
        return await self.lookup.lineage(instance(checkpoint, Checkpoint, "checkpoint"))

    async def runs(self) -> list[RunLatest]:
        """Return the summaries of all runs of the cluster, of each kind, in the order of run ids."""
        return await self.lookup.latest_of_all()

    def watch(self, kind: str = "", *, start_revision: int = 0) -> Commits:
        """Watch commits, each once; can be resumed. Arguments as ``Commits``."""
        return Commits(self.control, self.run_id, kind, start_revision=start_revision)

    def watch_best(self, metric: str, mode: str = MIN, *, kind: str = "") -> Bests:
        """Watch the best checkpoint: the current one, then each new one. Arguments as ``Bests``."""
        return Bests(self.lookup, self.control, self.run_id, metric, mode, kind=kind)

    # ---- keeping and deleting

    def pin(
        self,
        checkpoint: Checkpoint,
        reader: str,
        ttl_s: int = holds.PIN_TTL_S,
        *,
        on_lost: Callable[[Pin], Any] | None = None,
    ) -> Pin:
        """Make a pin; ``await`` or ``async with`` takes it. The checkpoint is not deleted while the pin is held.

        Arguments:
            checkpoint: checkpoint of any run.
            reader: name of the reader.
            ttl_s: how long it outlives a dead process.
            on_lost: called on the loop when the pin is lost.

        Raises:
            ConfigError: the name is not valid.
        """
        return Pin(
            self.control, checkpoint, reader, ttl_s, holder=self._holder, time=self._means.now(), on_lost=on_lost
        )

    async def pin_for(self, checkpoint: Checkpoint, reader: str, duration_s: float) -> None:
        """Hold a checkpoint, also after the end of this process. Arguments and errors as ``holds.pin_for``."""
        await holds.pin_for(self.control, checkpoint, reader, duration_s, self._hold())

    async def unpin(self, checkpoint: Checkpoint | Reference, reader: str) -> int:
        """Remove all pins of a reader on a checkpoint; return their number."""
        reference = (
            checkpoint
            if isinstance(checkpoint, Reference)
            else instance(checkpoint, Checkpoint, "checkpoint").reference
        )
        return await holds.unpin(self.control, reference, reader)

    async def holds(self) -> list[HoldInfo]:
        """Return the reasons to keep checkpoints of the run (pins, tags, children in other runs), by kind and step."""
        return await holds.holds(self.control, self.run_id)

    async def pins(self) -> list[HoldInfo]:
        """Return the pins on checkpoints of the run, by kind and step."""
        return [info for info in await self.holds() if info.why == PIN]

    async def tag(self, name: str, checkpoint: Checkpoint) -> None:
        """Set a tag on a checkpoint, or move it there. Errors as ``holds.tag``."""
        await holds.tag(self.control, self.run_id, name, checkpoint, self._hold())

    async def untag(self, name: str) -> bool:
        """Remove a tag; False: it did not exist."""
        return await holds.untag(self.control, self.run_id, name)

    async def tags(self) -> dict[str, Reference]:
        """Return the tags of the run by name, with their checkpoints."""
        return await holds.tags(self.control, self.run_id)

    async def collect(
        self, policy: Policy = NO_POLICY, *, dry_run: bool = False, on_progress: Progress | None = None
    ) -> Collected:
        """Delete the checkpoints that a policy does not keep, and the remains of dead attempts.

        Arguments:
            policy: the rules; empty: only remains of dead attempts are deleted.
            dry_run: change nothing, and return what would be deleted.
            on_progress: called on the loop with the bytes of deleted checkpoints.

        Raises:
            StatusError: the cluster refused; the next collection continues.
        """
        instance(policy, Policy, "policy")
        collector = Collector(
            self.control, self.run_id, self.uri, now=self._means.now, on_progress=on_progress, dry_run=dry_run
        )
        collected = await collector.collect(policy)
        checkpoints = [each.checkpoint for each in collected.decisions]
        for metric in sorted({*unmeasured(policy, checkpoints)} - self._told_unmeasured):
            if len(checkpoints) > UNMEASURED_MAX:
                self._told_unmeasured.add(metric)
                names = {name for each in checkpoints for name in each.metrics}
                _log.warning(
                    "raftkv: all %d checkpoints of run %r are kept: the policy keeps the best by %r, which none of "
                    "them has; their metrics: %s",
                    len(checkpoints), self.run_id, metric, ", ".join(sorted(names)) or "none",
                )  # fmt: skip
        return collected

    # ---- from elsewhere, and to elsewhere

    async def export(self, checkpoint: Checkpoint, uri: str, *, on_progress: Progress | None = None) -> None:
        """Copy a checkpoint to a directory outside the registry; after an interruption, call this again.

        Arguments:
            checkpoint: checkpoint of any run; pinned during the call.
            uri: directory, which is empty or holds the same export.
            on_progress: called with numbers of bytes, on several threads.

        Raises:
            CheckpointNotFound: the checkpoint is deleted.
            DigestMismatch: a file differs from the committed one.
            StorageError: a file could not be read or written.
            ConfigError: the directory has another checkpoint, or other files.
        """
        async with self.pin(checkpoint, f"export by {self._holder}"):
            await exchange.export(checkpoint, uri, on_progress)

    async def import_export(
        self,
        claim: Claim,
        uri: str,
        *,
        step: int | None = None,
        parent: Reference | None = None,
        on_progress: Progress | None = None,
    ) -> Checkpoint:
        """Copy an export into this run, with its kind, metrics and metadata.

        Arguments:
            claim: current claim, under which the copy is saved.
            uri: directory.
            step: new step; None: the step of the export.
            parent: checkpoint in this cluster that it descends from.
            on_progress: called with numbers of bytes, on several threads.

        Raises:
            ConfigError: the directory has no export, or an incomplete one.
            CheckpointExists, StaleStep, DigestMismatch, StorageError: as ``exchange.save_copy``.
        """
        _, what = await asyncio.to_thread(exchange.read_export, uri)
        what = replace(what, step=what.step if step is None else check_step(step), parent=parent)
        return await exchange.save_copy(self.begin, claim, what, on_progress)

    def _hold(self) -> Hold:
        return Hold(self._holder, self._means.now())


async def write_manifest(uri: str, data: bytes) -> None:
    """Write the manifest of an attempt, durably.

    Raises:
        StorageError: the manifest could not be written.
    """

    await asyncio.to_thread(lambda: Place(uri).write(MANIFEST, data))


async def check_files(uri: str, manifest: Manifest) -> None:
    """Check that the files of an attempt exist with their prepared sizes. Raises FilesChanged, StorageError."""
    await asyncio.to_thread(check_there, Place(uri), manifest)
