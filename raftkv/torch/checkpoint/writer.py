"""DCP's storage writer for the registry: ``dcp.save`` and ``dcp.async_save`` commit a checkpoint, or leave none.

::

    dcp.save(state, storage_writer=Writer(run, step, metrics={"loss": loss}))
    future = dcp.async_save(state, storage_writer=Writer(run, step))     # in a thread, or AsyncCheckpointerType.PROCESS

Actions at each of DCP's steps:

    prepare_global_plan   coordinator    claims, begins the attempt; the plan carries claim and attempt to the ranks
    write_data            every rank     writes below the attempt's directory and digests; all but one prepare
    finish                coordinator    checks the fence, writes .metadata, prepares, commits

It writes the same files as torch's own ``FileSystemWriter``, whose code it uses, so any DCP reader can read the
directory of a committed checkpoint. With ``use_collectives=False`` every rank has a separate ``.metadata`` (kind
``dcp_per_rank``), and only the same number of ranks can load it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from raftkv.checkpoint.commit.attempt import different_steps
from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.digest import SHA256, Digest
from raftkv.checkpoint.errors import AttemptOver, FenceBroken, StorageError
from raftkv.checkpoint.keys import DCP, DCP_PER_RANK, check_step
from raftkv.checkpoint.records import AttemptRecord, Checkpoint, Reference
from raftkv.checkpoint.storage.rank_files import RankFiles
from raftkv.checkpoint.sync import Attempt
from raftkv.checkpoint.trackers import Trackers, check_tools
from raftkv.errors import ConfigError, RaftKVError
from raftkv.torch.checkpoint.link import Link, Source, Streams, from_rank_0, is_distributed
from raftkv.training.errors import GenerationOver

FileData = bytes | Callable[[], bytes]


@dataclass
class _Part:
    """A rank's part of an attempt, carried in the plan.

    Attributes:
        prefix: torch's own, of the names of the rank's files.
        rank: rank in the attempt.
        claim: token of the coordinator's.
        head: the attempt's record.
        is_used: this process has written it; a planner that caches plans hands it out again at the next save.
        last: number of the attempt for which it was used last.
    """

    prefix: _StoragePrefix
    rank: int
    claim: str
    head: bytes
    is_used: bool = False
    last: int = 0


class Writer(FileSystemWriter):
    """A storage writer for one checkpoint.

    Arguments:
        source: a run (``raftkv.training.join``), or a registry (``raftkv.checkpoint.Registry``). Keep one registry for
            the life of the program: the first save with it claims the run's checkpoints.
        step: training step, above the latest.
        metrics: numbers by which the best is found; the coordinator's count.
        metadata: texts of the user.
        parent: checkpoint that it descends from.
        files: further files of this rank by name, as bytes or as what returns them: part of the same commit. No two
            ranks use the same name.
        trackers: ``"deepspeed"``, ``"megatron"``: whose tracker files name the newest commit; see
            ``checkpoint.trackers``.
        timeout_s: time to wait for the other ranks to prepare; None: as long as the claim lasts.
        process_group: as given to ``dcp.save``.
        claim, client: see ``link.Link``.
        digest: algorithm. ``sha256`` costs a second core 0.6 to 0.8 s for each GB; ``blake3`` half of it, with its
            package on all nodes; ``crc32c`` a tenth, and it finds damage by a disk, but no forgery.
        single_file_per_rank, thread_count: as for torch's ``FileSystemWriter``. Files are always synced.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        source: Source,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, str] | None = None,
        parent: Reference | None = None,
        files: Mapping[str, FileData] | None = None,
        trackers: Sequence[str] = (),
        timeout_s: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        claim: Claim | None = None,
        client: Mapping[str, Any] | None = None,
        digest: str = SHA256,
        single_file_per_rank: bool = True,
        thread_count: int = 1,
    ) -> None:
        self._link = Link(source, claim=claim, client=client)
        super().__init__(
            self._link.uri, single_file_per_rank=single_file_per_rank, sync_files=False, thread_count=thread_count
        )
        self.use_collectives = True
        self.step = check_step(step)
        self.metrics = dict(metrics or {})
        self._metadata = dict(metadata or {})
        self._parent = parent
        self._extra: Mapping[str, FileData] = dict(files or {})
        self._trackers = check_tools(trackers)
        self._digest = Digest(digest).algorithm
        self._timeout_s = timeout_s
        self._group = process_group
        self._is_coordinator = True
        self._attempt: Attempt | None = None
        self._part: _Part | None = None
        self._files: RankFiles | None = None
        self._checkpoint: Checkpoint | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """The committed checkpoint.

        Raises:
            CheckpointNotFound: nothing was, or not yet.
        """
        if self._checkpoint is None:
            self._checkpoint = self._link.registry.at(self.step, self._kind)
        return self._checkpoint

    @property
    def checkpoint_id(self) -> str:
        """Directory of the files, once the attempt has begun."""
        return self._link.uri if self._attempt is None else self._attempt.uri

    @property
    def _kind(self) -> str:
        return DCP if self.use_collectives else DCP_PER_RANK

    # ---- what DCP calls

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return False: the writer is passed as ``storage_writer``, never chosen by an id."""
        return False

    def reset(self, checkpoint_id: Any = None) -> None:
        """Refuse an id, because the registry chooses the directory.

        Raises:
            ConfigError: one is given.
        """
        if checkpoint_id:
            raise ConfigError(f"the registry chooses where step {self.step} lies; give no checkpoint_id")

    def stage(self, state_dict: Any) -> Any:
        """Copy the state, and the current ``files``, for an asynchronous save."""
        self._extra = _resolved(self._extra)
        return super().stage(state_dict)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Store the rank; older versions of torch only say whether this is the coordinator."""
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        self._is_coordinator = is_coordinator
        self._attempt = self._part = self._files = self._checkpoint = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged, because there is no directory yet."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the attempt. Errors as for ``Registry.begin``; DCP raises them on all ranks."""
        if self.use_collectives:
            token, head = self._begin(len(plans))
            first = 0
        else:
            token, head = from_rank_0(self._group, lambda: self._begin(_world_size(self._group)))
            first = self.rank or 0
        return [
            replace(plan, storage_data=_Part(_StoragePrefix(f"__{rank}_"), rank, token, head))
            for rank, plan in enumerate(plans, first)
        ]

    def _begin(self, world_size: int) -> tuple[str, bytes]:
        claim = self._link.claim()
        self._write_trackers()  # who died between a commit and its trackers has left those of the commit before
        self._attempt = self._link.registry.begin(
            claim, self.step, world_size=world_size, kind=self._kind, parent=self._parent, metadata=self._metadata
        )
        return claim.token, self._attempt.record.encode()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; they are durable and prepared when the future is done.

        Raises:
            ConfigError: this rank saves another step than the coordinator; DCP raises it on all ranks.
        """
        part = plan.storage_data
        if not isinstance(part, _Part):
            raise ConfigError("the planner has lost what the storage writer put into the plan; use another planner")
        try:
            attempt = self._enter(part)
            files = self._files = RankFiles(attempt.uri, digest=self._digest)
            # .metadata is written under its own name at once: no reader looks before the commit.
            streams: Any = Streams(lambda name: files.open(name.removesuffix(".tmp")))
            self.fs = streams
            results = super().write_data(replace(plan, storage_data=part.prefix), planner)
            if (count := len(results.value())) != len(plan.items):
                raise StorageError(f"{len(plan.items) - count} of {len(plan.items)} items of rank {part.rank} were not "
                                   f"written to {attempt.uri}: a thread that writes has failed, see above")  # fmt: skip
            for name, data in _resolved(self._extra).items():
                files.write(name, data)
            if self.use_collectives and not self._is_coordinator:
                attempt.prepare(part.rank, files.finish())
        except BaseException as error:
            self._give_up(error)
            raise
        return results

    def _enter(self, part: _Part) -> Attempt:
        """Return the attempt; if the planner caches plans, the part may belong to an earlier one."""
        self._part = part
        was_used, part.is_used, who = part.is_used, True, f"rank {part.rank}"
        claim = self._link.claim_of(part.claim, is_new=not was_used)
        if self._attempt is None:
            head = AttemptRecord.decode(part.head)
            if was_used:
                self._attempt = self._link.registry.join(
                    claim, self.step, kind=self._kind, timeout_s=self._timeout_s, after=part.last, who=who
                )
                part.last = self._attempt.record.number
            else:
                part.last = head.number
                self._attempt = self._link.registry.attempt(claim, head)
                if head.step != self.step:
                    raise different_steps(head.step, self.step, who)
        return self._attempt

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata``, prepare and commit.

        Raises:
            FenceBroken, GenerationOver: the claim has ended: ``.metadata`` was not written.
            AttemptOver: another rank has given it up.
        """
        attempt, part, files = self._attempt, self._part, self._files
        if attempt is None or part is None or files is None:
            raise ConfigError("finish was called without write_data")
        try:
            attempt.check()
            super().finish(metadata, results)
            if self._is_coordinator and not self.use_collectives:  # which bring it here after all have prepared
                attempt.prepared(self._timeout_s, but=[part.rank])
            attempt.prepare(part.rank, files.finish(), metrics=self.metrics if self._is_coordinator else None)
            if self._is_coordinator:
                self._checkpoint = attempt.commit(timeout_s=self._timeout_s)
                self._write_trackers()
            else:
                self._checkpoint = attempt.outcome(self._timeout_s)
        except BaseException as error:
            self._give_up(error)
            raise

    def _write_trackers(self) -> None:
        if self._trackers:
            loop, registry = self._link.registry.target()
            loop.run(Trackers(registry, self._trackers, kind=self._kind).write())

    def _give_up(self, error: BaseException) -> None:
        """Abort the attempt for all ranks, so that no rank waits for this one."""
        if self._attempt is None or isinstance(error, GenerationOver | FenceBroken | AttemptOver):
            return
        with contextlib.suppress(RaftKVError):  # as when the client is closed: the first error is the one to tell
            self._attempt.give_up(error, f"rank {self._part.rank if self._part else 0} failed")

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the writer for the process of an asynchronous save, with the claim and without connections."""
        self._extra = _resolved(self._extra)
        if not is_distributed() or dist.get_rank(self._group) == 0:
            self._link.claim()
        gone = dict.fromkeys(("_group", "_attempt", "_part", "_files", "state_dict_cache"))
        return {**self.__dict__, **gone, "fs": None}


def _resolved(files: Mapping[str, FileData]) -> dict[str, bytes]:
    return {name: data if isinstance(data, bytes) else data() for name, data in files.items()}


def _world_size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if is_distributed() else 1
