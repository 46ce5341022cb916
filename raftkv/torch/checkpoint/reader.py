"""DCP's storage reader for the registry: finds a checkpoint, pins it, and verifies what it reads.

::

    dcp.load(state, storage_reader=Reader(registry, "latest"))
    dcp.load(state, storage_reader=Reader(registry, 100))
    dcp.load(state, storage_reader=Reader(registry, "release"))              # a tag
    reader = Reader(registry, ("best", "accuracy", "max"))
    dcp.load(state, storage_reader=reader)
    reader.checkpoint.step, reader.read("data.json")                         # another file of the same commit

The first rank chooses the checkpoint for all ranks. Every file, ``.metadata`` first, is read completely and compared
with the manifest before any part of it is used. A rank verifies the files that it needs, and with ``verify="all"`` also
its share of the others. The number of loading ranks may differ from that of the saving ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import socket
import weakref
from collections.abc import Iterator, Mapping
from enum import Enum, EnumType
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.futures import Future

from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.errors import AttemptOver, CheckpointNotFound, DigestMismatch
from raftkv.checkpoint.find import MIN
from raftkv.checkpoint.keys import DCP, DCP_PER_RANK, check_step
from raftkv.checkpoint.records import Checkpoint, FileRecord
from raftkv.checkpoint.storage.verify import load_manifest, open_verified, require_below
from raftkv.checkpoint.sync import Pin
from raftkv.errors import ConfigError, RaftKVError
from raftkv.torch.checkpoint.link import Link, Source, Streams, from_rank_0, is_distributed
from raftkv.training.api.run import Run

LATEST: Final = "latest"
BEST: Final = "best"
READ: Final = "read"
ALL: Final = "all"

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    _METADATA: (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed._shard.sharded_tensor.metadata": ("MEM_FORMAT_ENCODING", "TensorProperties"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "builtins": ("set", "frozenset", "bytearray", "complex"),
}  # fmt: skip
"""Types allowed in the metadata of DCP, besides those built into pickle."""

Which = int | str | tuple[str, ...] | Checkpoint
"""``"latest"``, a step, a tag, ``("best", metric)``, ``("best", metric, "max")``, or a checkpoint from a lookup."""


class Reader(FileSystemReader):
    """A storage reader of one checkpoint.

    Arguments:
        source: a run (``raftkv.training.join``), or a registry (``raftkv.checkpoint.Registry``); its ``uri`` may be
            empty.
        step: checkpoint to read; see ``Which``.
        kind: ``dcp``, or ``dcp_per_rank`` for what was saved with ``use_collectives=False``.
        verify: ``"read"``: the files that are needed; ``"all"``: all files, shared among the ranks.
        anywhere: load a checkpoint from the directory in its record; else only below the ``uri`` of the registry.
        process_group, no_dist: as given to ``dcp.load``.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        source: Source,
        step: Which = LATEST,
        *,
        kind: str = DCP,
        verify: str = READ,
        anywhere: bool = False,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> None:
        if verify not in (READ, ALL):
            raise ConfigError(f"verify is {READ!r} or {ALL!r}, not {verify!r}")
        if kind not in (DCP, DCP_PER_RANK):
            raise ConfigError(f"DCP loads checkpoints of kind {DCP!r} or {DCP_PER_RANK!r}, not {kind!r}")
        self._link = Link(source)
        super().__init__(self._link.uri or ".")
        self._which = step if isinstance(step, str | tuple | list | Checkpoint) else check_step(step)
        self._kind = kind
        self._verify = verify
        self._anywhere = anywhere
        self._group = process_group
        self._no_dist = no_dist
        self._checkpoint: Checkpoint | None = None
        self._pin: Pin | None = None
        self._finalizer: weakref.finalize[..., Reader] | None = None
        self._records: Mapping[str, FileRecord] = {}
        self.failure: Exception | None = None

    # ---- which

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint; with several ranks, all of them must read this.

        Raises:
            CheckpointNotFound: no checkpoint exists.
            ConfigError: the checkpoint is not below the ``uri`` of the registry.
            DigestMismatch: its manifest is not the committed one.
        """
        if self._checkpoint is None:
            found = from_rank_0(self._group, self._find_pinned, no_dist=self._no_dist)
            if self._pin is None:
                self._take_pin(found)
            self._records = {file.name: file for _, file in load_manifest(found).files}
            self._checkpoint = found
        return self._checkpoint

    def _find_pinned(self) -> Checkpoint:
        """Find the checkpoint on the first rank and pin it; every other rank pins it before the first rank's pin
        ends."""
        while True:
            found = self._find()
            if not self._anywhere:
                require_below(found, self._link.uri)
            try:
                self._take_pin(found)
            except CheckpointNotFound:
                if isinstance(self._which, int | Checkpoint):
                    raise
                continue  # a later one came, and this was deleted
            return found

    def _take_pin(self, checkpoint: Checkpoint) -> None:
        pin = self._link.registry.pin(checkpoint, f"{socket.gethostname()}:{os.getpid()}").take()
        self._pin = pin
        self._finalizer = weakref.finalize(self, pin.let_go)

    def close(self) -> None:
        """Release the pin, so that the checkpoint may be deleted; the end of a load does this."""
        pin, self._pin = self._pin, None
        if pin is not None and self._finalizer is not None:
            self._finalizer.detach()
            pin.release()

    def _find(self) -> Checkpoint:
        which, registry = self._which, self._link.registry
        if isinstance(which, Checkpoint):
            return which
        if isinstance(which, int):
            return registry.at(which, self._kind)
        if which == LATEST:
            return registry.latest(self._kind)
        if isinstance(which, str):
            return registry.tagged(which)
        if len(which) in (2, 3) and which[0] == BEST:
            return registry.best(which[1], which[2] if len(which) == 3 else MIN, kind=self._kind)
        raise ConfigError(f"{which!r} names no checkpoint: give 'latest', a step, a tag, or ('best', METRIC, 'max')")

    @property
    def checkpoint_id(self) -> str:
        """Directory of the files, once the checkpoint is found."""
        return self._link.uri if self._checkpoint is None else self._checkpoint.uri

    # ---- files

    def read(self, name: str) -> bytes:
        """Return the content of a file, such as one of ``Writer(files=...)``.

        Raises:
            DigestMismatch: there is none of that name, or it is not the committed one.
            StorageError: it cannot be read.
        """
        with self.open(name) as file:
            return bytes(file.read())

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Any]:
        """Open a verified file. Arguments and errors as for ``read``."""
        with open_verified(self.checkpoint, name, file=self.record(name)) as file:
            yield file

    def record(self, name: str) -> FileRecord:
        """Return the committed record of a file. Arguments and errors as for ``read``."""
        checkpoint = self.checkpoint
        if name not in self._records:
            raise DigestMismatch(checkpoint.uri, name, "is not a file of this checkpoint")
        return self._records[name]

    # ---- what DCP calls

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return False: the reader is passed as ``storage_reader``, never chosen by an id."""
        return False

    def reset(self, checkpoint_id: Any = None) -> None:
        """Refuse an id, because the registry chooses the directory.

        Raises:
            ConfigError: one is given.
        """
        if checkpoint_id:
            raise ConfigError("the registry knows where checkpoints lie; give Reader(step=...) and no checkpoint_id")

    # Without a parameter that is called ``kwargs`` DCP does not look for a .metadata of this rank after an error, so
    # that the first error is the one that users see.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Find the checkpoint and read its ``.metadata``."""
        try:
            checkpoint = self.checkpoint
            if checkpoint.kind not in (DCP, DCP_PER_RANK):
                raise ConfigError(
                    f"{checkpoint.reference} is not a DCP checkpoint; load it with the tool that saved it"
                )
            files: Any = Streams(self.open, self._records)
            self.fs = files
            own = {} if checkpoint.kind == DCP else {"rank": self._own_rank(checkpoint)}
            return self._load_metadata(str(self._get_metadata_path(**own)))
        except Exception as error:
            self.failure = error
            self.close()
            raise

    def _load_metadata(self, name: str) -> Metadata:
        with self.open(name) as file:
            try:
                found = _MetadataUnpickler(file).load()
            except Exception as error:  # a pickle that no writer has made raises what it likes
                why = " ".join(str(error).split())[:200]
                raise DigestMismatch(self.checkpoint.uri, name, f"is not DCP metadata: {why}") from None
        if not isinstance(found, Metadata):
            raise DigestMismatch(self.checkpoint.uri, name, f"is a {type(found).__name__} instead of DCP metadata")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def _own_rank(self, checkpoint: Checkpoint) -> int:
        size = dist.get_world_size(self._group) if is_distributed(self._no_dist) else 1
        if size != checkpoint.world_size:
            raise ConfigError(
                f"{checkpoint.reference} was saved without collectives by {checkpoint.world_size} ranks, so {size} "
                "cannot load it; save with use_collectives=True to load with another number of ranks"
            )
        return dist.get_rank(self._group) if is_distributed(self._no_dist) else 0

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Verify this rank's share of all files, with ``verify="all"``."""
        self.storage_data = dict(metadata.storage_data or {})
        if self._verify == ALL:
            rank = dist.get_rank(self._group) if is_distributed(self._no_dist) else 0
            size = dist.get_world_size(self._group) if is_distributed(self._no_dist) else 1
            for name in sorted(self._records)[rank::size]:
                with self.open(name):
                    pass

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs from verified files; then release the pin.

        Raises:
            DigestMismatch, StorageError: a file is not the committed one, or cannot be read.
            PinLost: this process was away for so long that the checkpoint may have been deleted under it.
        """
        try:
            done = super().read_data(plan, planner)
            if self._pin is not None:
                self._pin.check()
        finally:
            self.close()
        return done


def _member(kind: Any, name: str) -> Enum:
    if not isinstance(kind, EnumType):
        raise ValueError(f"it asks for {name!r} of {kind!r}")
    return cast("Enum", kind[name])


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles the metadata of DCP: only values of a few types, and never a function named in the file."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed type of metadata."""
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python 3.11 writes members of an enumeration so
        if name in _TYPES.get(module, ()):
            return getattr(importlib.import_module(module), name)
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype | torch.layout | torch.memory_format):
            return found
        raise ValueError(f"it names {module}.{name}, a type that no metadata has")


# ---- the start of a training program: claim, decide what was left undecided, load the newest checkpoint


def resume(
    source: Source,
    state: dict[str, Any],
    *,
    kind: str = DCP,
    verify: str = READ,
    anywhere: bool = False,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Checkpoint | None:
    """Load the newest checkpoint into a state, the same one on all ranks. Returns None if none exists.

    Arguments:
        source: a run, or a registry, whose checkpoints this program then claims, which fences out earlier writers.
        state: as for ``dcp.load``.
        kind, verify, anywhere: see ``Reader``.
        process_group, no_dist: as for ``dcp.load``.

    Raises:
        DigestMismatch: a file differs from the committed one; it names the file.
        StorageError: a file cannot be read.
        FenceBroken, GenerationOver: another has claimed the run's checkpoints meanwhile.
        CheckpointException: of DCP, for what else can go wrong on any rank.
    """

    def load(checkpoint: Checkpoint) -> Checkpoint:
        reader = Reader(
            source, checkpoint, kind=checkpoint.kind, verify=verify, anywhere=anywhere, process_group=process_group,
            no_dist=no_dist,
        )  # fmt: skip
        with typed(reader):
            load_state(state, storage_reader=reader, process_group=process_group, no_dist=no_dist)
        return checkpoint

    if isinstance(source, Run):
        with source.resume(kind) as last:
            return None if last is None else load(last.checkpoint)
    claim, found = from_rank_0(process_group, lambda: _find(Link(source), kind), no_dist=no_dist)
    Link(source).keep(claim)
    return None if found is None else load(found)


def _find(link: Link, kind: str) -> tuple[Claim, Checkpoint | None]:
    claim = link.claim(take_over=True)
    try:
        return claim, link.registry.latest(kind)
    except CheckpointNotFound:
        return claim, None


@contextlib.contextmanager
def typed(reader: Reader | None = None) -> Iterator[None]:
    """Raise raftkv's own error instead of DCP's ``CheckpointException`` around it."""
    try:
        yield
    except CheckpointException as error:
        if reader is not None and reader.failure is not None:
            raise reader.failure from error
        causes = [cause for cause, _ in error.failures.values() if isinstance(cause, RaftKVError)]
        # A rank that failed gives the attempt up, which the others hear: its own error is the one to report.
        for cause in sorted(causes, key=lambda cause: isinstance(cause, AttemptOver)):
            raise cause from error
        raise
