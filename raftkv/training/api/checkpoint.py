"""Checkpoints of a run: all ranks save one together, and all resume from the same one; for asyncio.

::

    async with run.checkpoint(step, metrics={"loss": loss}) as saving:      # every rank
        saving.write(f"model-{run.rank}.bin", data)                         # or saving.path(name)
    saving.checkpoint                                                       # it is committed, on all ranks

    async with run.resume() as last:                                        # every rank, in every generation
        if last is not None:
            data = last.read(f"model-{run.rank}.bin")                       # its digest is right, or this raises

Rank 0 begins the attempt, prepares last and commits. The others follow its decisions by the run's ``broadcast``, so all
ranks raise an error of rank 0, and no rank waits beyond the end of the generation. If the block raises on any rank, the
attempt is aborted for all of them and they raise ``AttemptOver``. If the process dies, the next generation commits or
aborts the attempt.

The content of the files is not handled here; ``raftkv.torch.checkpoint`` saves tensors. ``run`` is the same without an
event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from raftkv.checkpoint import errors
from raftkv.checkpoint.commit.attempt import Attempt, different_steps
from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.commit.summary import checked_metrics
from raftkv.checkpoint.errors import AttemptOver, CheckpointError, CheckpointNotFound, FenceBroken
from raftkv.checkpoint.keys import FILES
from raftkv.checkpoint.records import AttemptRecord, Checkpoint, Reference
from raftkv.checkpoint.storage.rank_files import RankFiles
from raftkv.checkpoint.storage.verify import find_file, load_manifest, read_verified, require_below
from raftkv.checkpoint.trackers import Trackers
from raftkv.client.arguments import limit
from raftkv.errors import ConfigError, RaftKVError
from raftkv.training.errors import GenerationOver

if TYPE_CHECKING:
    from raftkv.checkpoint.commit.manifest import Manifest
    from raftkv.checkpoint.registry import Registry
    from raftkv.checkpoint.retention.holds import Pin
    from raftkv.checkpoint.storage.place import Writer
    from raftkv.training.api.generation import Collectives, Generation

SAVE: Final = "raftkv: checkpoint"
RESUME: Final = "raftkv: resume"
_RELAYED: Final = ("CheckpointExists", "StaleStep", "CheckpointNotFound", "StorageError")
"""Errors of rank 0 that the other ranks raise with the same class."""


class Together(NamedTuple):
    """The objects with which the ranks of a generation save and load checkpoints.

    Attributes:
        generation: generation of the run.
        collectives: collectives of the generation.
        registry: registry of the run's checkpoints.
    """

    generation: Generation
    collectives: Collectives
    registry: Registry

    async def claim(self) -> Claim:
        """Claim the checkpoints for the generation; all its ranks get the same claim."""
        world = self.generation.world
        return await self.registry.claim_run(world.generation, world.revision, world.fence)

    async def decide(
        self, name: str, make: Callable[[], Coroutine[Any, Any, dict[str, Any]]], timeout_s: float | None
    ) -> dict[str, Any]:
        """Let rank 0 decide something for all ranks; return the result. All ranks raise an error of rank 0.

        Arguments:
            name: name of the broadcast.
            make: called by rank 0; returns JSON.
            timeout_s: time that the others wait for rank 0; None: until the generation ends.
        """
        if self.generation.rank != 0:
            told: dict[str, Any] = json.loads(await self.collectives.broadcast(name, None, 0, timeout_s))
            if "error" in told:
                raise _error_of(told)
            return told
        try:
            made = await self.generation.until_over(make())
        except Exception as error:  # any: else the others would wait, and mistake the next answer for this one
            if not isinstance(error, GenerationOver):
                kind, text = type(error).__name__, str(error)
                told = {"error": text if isinstance(error, RaftKVError) else f"rank 0: {kind}: {text}", "kind": kind}
                await self.collectives.broadcast(name, json.dumps(told), 0, None)
            raise
        await self.collectives.broadcast(name, json.dumps(made), 0, None)
        return made


def _error_of(told: Mapping[str, Any]) -> RaftKVError:
    text, kind = str(told["error"]), str(told.get("kind"))
    if kind == ConfigError.__name__:
        return ConfigError(text)
    known: type[CheckpointError] = getattr(errors, kind) if kind in _RELAYED else CheckpointError
    return known(text)


class Options(NamedTuple):
    """How a checkpoint of a run is saved; see ``Run.checkpoint``."""

    kind: str = FILES
    metrics: Mapping[str, float] | None = None
    metadata: Mapping[str, str] | None = None
    parent: Reference | None = None
    wait: bool = True
    trackers: Sequence[str] = ()
    timeout_s: float | None = None


class Saving:
    """A checkpoint that all ranks save together, for ``async with``; made by ``Run.checkpoint``.

    Attributes:
        step: training step.
        metrics: metrics, from rank 0; the content at the end of the block is saved.
        checkpoint: committed checkpoint; None before the end of the block, or on ranks that do not wait.
    """

    def __init__(self, together: Together, step: int, options: Options) -> None:
        limit(options.timeout_s, "timeout_s")
        if options.parent is not None and not isinstance(options.parent, Reference):
            raise TypeError(
                f"parent= takes the reference of a checkpoint (checkpoint.reference), not {options.parent!r}"
            )
        self.step = step
        self.metrics: dict[str, float] = checked_metrics(options.metrics, step)
        self.checkpoint: Checkpoint | None = None
        self._together = together
        self._options = options
        self._trackers = Trackers(together.registry, options.trackers, kind=options.kind)
        self._attempt: Attempt | None = None
        self._files: RankFiles | None = None

    @property
    def uri(self) -> str:
        """Return the URL of the directory of the files, used only by this attempt."""
        return self._begun().uri

    @property
    def files(self) -> RankFiles:
        """This rank's files."""
        if self._files is None:
            raise RuntimeError("a checkpoint is written inside of its block: with run.checkpoint(step) as saving: ...")
        return self._files

    def path(self, name: str) -> str:
        """Return a local path to write a file, or a directory of files, to. Errors as for ``RankFiles.path``."""
        return self.files.path(name)

    def write(self, name: str, data: bytes) -> None:
        """Write a complete file. Errors as for ``RankFiles.write``; blocking."""
        self.files.write(name, data)

    def open(self, name: str) -> Writer:
        """Open a new file, which is digested while it is written; blocking, like its methods."""
        return self.files.open(name)

    async def __aenter__(self) -> Saving:
        try:
            told = await self._together.decide(SAVE, self._begin, self._options.timeout_s)
            if self._attempt is None:
                claim = Claim.from_token(told["claim"], self._together.generation.fence)
                self._attempt = self._together.registry.attempt(claim, AttemptRecord.decode(told["attempt"].encode()))
            self._check_step(self._attempt.record.step)
            if why := await self._together.registry.foreign_place(self._attempt.record):
                raise ConfigError(why)
            self._files = await asyncio.to_thread(RankFiles, self._attempt.uri)
        except BaseException as error:
            await self._abort(error)
            raise
        return self

    def _check_step(self, begun: int) -> None:
        if begun != self.step:
            raise different_steps(begun, self.step, f"rank {self._together.generation.rank}")

    async def _begin(self) -> dict[str, Any]:
        claim = await self._together.claim()
        await self._trackers.write()  # a death between a commit and its trackers has left the previous trackers
        self._attempt = attempt = await self._together.registry.begin(
            claim,
            self.step,
            world_size=self._together.generation.size,
            kind=self._options.kind,
            parent=self._options.parent,
            metadata=self._options.metadata,
        )
        return {"claim": claim.token, "attempt": attempt.record.encode().decode()}

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            await self._abort(error)
            return
        try:
            files = await asyncio.to_thread(self.files.finish)
            self.checkpoint = await self._together.generation.until_over(self._finish(files))
        except BaseException as failure:
            await self._abort(failure)
            raise
        finally:
            self._files = None

    async def _finish(self, files: list[Any]) -> Checkpoint | None:
        attempt, rank = self._begun(), self._together.generation.rank
        if rank != 0:
            await attempt.prepare(rank, files)
            return await attempt.outcome(self._options.timeout_s) if self._options.wait else None
        await attempt.prepared(self._options.timeout_s, but=[0])
        # Rank 0 prepares last: an attempt that all have prepared is complete, and a later claim may commit it.
        await attempt.prepare(0, files, metrics=self.metrics)
        committed = await attempt.commit()
        await self._trackers.write()
        return committed

    async def _abort(self, error: BaseException) -> None:
        """Abort the attempt for all ranks, so that no rank waits for this one."""
        self._files = None
        if isinstance(error, GenerationOver | FenceBroken | AttemptOver) or self._attempt is None:
            return
        await self._attempt.give_up(error, f"rank {self._together.generation.rank} failed")

    def _begun(self) -> Attempt:
        if self._attempt is None:
            raise RuntimeError("a checkpoint is written inside of its block: with run.checkpoint(step) as saving: ...")
        return self._attempt


class Resumed:
    """The checkpoint that all ranks resume from; made by ``Run.resume``.

    Attributes:
        checkpoint: record with step, kind, metadata and metrics.
    """

    def __init__(self, checkpoint: Checkpoint, uri: str) -> None:
        self.checkpoint = checkpoint
        self._uri = uri

    def __repr__(self) -> str:
        return f"<checkpoint {self.checkpoint.reference}>"

    @property
    def step(self) -> int:
        """Return the training step."""
        return self.checkpoint.step

    @cached_property
    def manifest(self) -> Manifest:
        """The list of its files."""
        return load_manifest(self.checkpoint)

    def read(self, name: str, *, anywhere: bool = False) -> bytes:
        """Return the content of a file; blocking.

        Arguments:
            name: file name below the checkpoint.
            anywhere: read it from the directory that its record names; else only below the place of the run's
                checkpoints.

        Raises:
            ConfigError: the directory is not below that place.
            DigestMismatch, StorageError: the file has another content than was prepared, or is missing.
        """
        if not anywhere:
            require_below(self.checkpoint, self._uri)
        return read_verified(self.checkpoint, name, file=find_file(self.manifest, self.checkpoint, name))


class Resuming:
    """Agreement of all ranks on the checkpoint to resume from, for ``async with``; made by ``Run.resume``.

    Every rank pins it during its block, so that retention keeps files that a rank still reads.
    """

    def __init__(
        self, together: Together, kind: str, trackers: Sequence[str] = (), timeout_s: float | None = None
    ) -> None:
        self._together = together
        self._timeout_s = limit(timeout_s, "timeout_s")
        self._kind = kind
        self._trackers = Trackers(together.registry, trackers, kind=kind)
        self._pin: Pin | None = None

    async def __aenter__(self) -> Resumed | None:
        try:
            return await self._enter()
        except BaseException:
            await self._release()
            raise

    async def _enter(self) -> Resumed | None:
        collectives = self._together.collectives
        told = collectives.decided.get(RESUME) or await self._together.decide(RESUME, self._find, self._timeout_s)
        if "checkpoint" not in told:
            return None
        collectives.decided[RESUME] = told
        found = Checkpoint.decode(told["checkpoint"].encode())
        if self._pin is None:
            self._pin = self._pin_of(found)  # assigned before the pin is taken, so that an interruption releases it
            try:
                await self._together.generation.until_over(self._pin.take())
            except CheckpointNotFound:
                del collectives.decided[RESUME]
                raise
        await collectives.barrier(RESUME, self._timeout_s)  # rank 0 holds it for ranks that have not pinned it yet
        del collectives.decided[RESUME]
        return Resumed(found, self._together.registry.uri)

    async def _find(self) -> dict[str, Any]:
        registry = self._together.registry
        await registry.take_over(await self._together.claim())
        await self._trackers.write()
        while True:
            try:
                found = await registry.latest(self._kind)
            except CheckpointNotFound:
                return {}
            with contextlib.suppress(CheckpointNotFound):  # deleted after a later commit
                self._pin = await self._pin_of(found).take()
                return {"checkpoint": found.encode().decode()}

    def _pin_of(self, checkpoint: Checkpoint) -> Pin:
        generation = self._together.generation
        return self._together.registry.pin(
            checkpoint, f"rank {generation.rank} of generation {generation.world.generation}"
        )

    async def _release(self) -> None:
        pin, self._pin = self._pin, None
        if pin is not None:
            await pin.release()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pin = self._pin
        await self._release()
        if pin is not None and error is None:
            pin.check()
