"""Checkpoints in the memory of nodes: copies of a rank's state on its own node and on others.

::

    memory = raftkv.torch.memory.Memory(run, every=10, copies=1)       # run: of raftkv.training.join, in each worker
    last = memory.restore()                                            # all ranks the same attempt, or all None
    for step in range(0 if last is None else last.step + 1, steps):
        train()
        memory.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})

The agents hold the bytes (option ``checkpoint_memory`` of a run), so they survive the workers; copies on other nodes
survive the node. ``save`` blocks training while it copies the tensors into a buffer (pinned memory with CUDA). A thread
computes the digest, sends the bytes to the node's holder and to holders in ``copies`` other failure domains, and
commits with the other ranks, in the two phases of every checkpoint.

Invariants

1. No byte is used before its digest was verified against the one that its rank prepared for the restored attempt.
2. ``restore`` returns states of the same attempt, chosen by rank 0, on all ranks, or None on all ranks.
3. Reading a state runs no code from it: it consists of tensors, numbers, strings and containers of them.

Durable checkpoints (``torch.checkpoint``) are still needed, at longer intervals. A state can only be restored by the
same number of ranks that saved it.
"""

from __future__ import annotations

import io
import json
import logging
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from raftkv.checkpoint.copies import transfer
from raftkv.checkpoint.copies.catalogue import Spot, choose
from raftkv.checkpoint.digest import Digest
from raftkv.checkpoint.errors import CheckpointError, CheckpointNotFound, StorageError
from raftkv.checkpoint.keys import MEMORY, check_step
from raftkv.checkpoint.records import Checkpoint, FileRecord
from raftkv.client.arguments import whole
from raftkv.errors import ConfigError, RaftKVError

if TYPE_CHECKING:
    from raftkv.checkpoint.commit.claim import Claim
    from raftkv.checkpoint.sync import Attempt
    from raftkv.training.api.run import Run

_log = logging.getLogger(__name__)

_AGREE: Final = "raftkv: which memory"
_RESTORED: Final = "raftkv: memory restored"
_ALIGNMENT_BYTES: Final = 64
_LENGTH: Final = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Restored:
    """The state of a rank, as it was saved.

    Attributes:
        step: training step.
        state: state given to ``save``; tensors are on the CPU.
        checkpoint: record of the checkpoint.
    """

    step: int
    state: Any
    checkpoint: Checkpoint


class Memory:
    """The checkpoints in memory of one rank; see the module.

    Arguments:
        run: run of this worker (``raftkv.training.join``).
        every: ``save`` saves only at steps that are multiples of this.
        copies: number of other nodes that keep a copy of a rank's state.
        timeout_s: time to wait for the other ranks in a save, and for the save before it.

    Attributes:
        held_s: seconds for which ``save`` has blocked training so far.
        committed: step of the last save that this rank knows to be prepared (rank 0: committed); -1: none.
    """

    def __init__(self, run: Run, *, every: int = 1, copies: int = 1, timeout_s: float = 60.0) -> None:
        if whole(every, "every") < 1 or whole(copies, "copies") < 0:
            raise ConfigError(f"every={every}, copies={copies} is not valid: every is at least 1, copies at least 0")
        self.held_s = 0.0
        self.committed = -1
        self._run = run
        self._every, self._copies, self._timeout_s = every, copies, timeout_s
        member = run.world.member
        self._own, self._spot = member.id, Spot(member.host, member.topology)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._is_checked = False
        self._number = 0
        self._saving: threading.Thread | None = None
        self._is_overdue = False

    # ---- going on

    def restore(self) -> Restored | None:
        """Return the state of the newest checkpoint in memory; None: resume from a durable one.

        All ranks call this in every generation before their first ``save``. All ranks also get None if a durable
        checkpoint is newer, if a different number of ranks saved it, or if a rank finds no good copy. In the last case
        the checkpoint is deleted, and earlier steps may be saved again.

        Raises:
            BarrierTimeout, GenerationOver: as ``Run.broadcast``.
            CheckpointError: rank 0 could not look it up.
        """
        run, found = self._run, self._agree()
        restored: Restored | None = None
        if found is not None:
            try:
                data = run.checkpoints.fetch(found, _file(run.rank), to=self._spot.host, topology=self._spot.topology)
                restored = Restored(found.step, unpacked(data), found)
            except RaftKVError as error:
                _log.warning("raftkv: step %d cannot be restored from memory: %s", found.step, error)
        answers = run.all_gather(_RESTORED, b"1" if restored is not None else b"0", timeout_s=self._timeout_s)
        if restored is not None and answers == [b"1"] * run.world_size:
            return restored
        if run.rank == 0:
            run.checkpoints.forget_memory(self._claim())
        return None

    def _agree(self) -> Checkpoint | None:
        run = self._run
        if run.rank != 0:
            told = json.loads(run.broadcast(_AGREE, timeout_s=self._timeout_s))
        else:
            try:
                told = {"checkpoint": self._newest()}
            except RaftKVError as error:
                told = {"error": str(error)}
            run.broadcast(_AGREE, json.dumps(told))
        if "error" in told:
            raise CheckpointError(str(told["error"]))
        return Checkpoint.decode(told["checkpoint"].encode()) if told["checkpoint"] else None

    def _newest(self) -> str:
        """Resolve open attempts of dead generations; return the record of the checkpoint to restore, or empty."""
        registry, size = self._run.checkpoints, self._run.world_size
        registry.take_over(self._claim())
        try:
            found = registry.latest(MEMORY)
        except CheckpointNotFound:
            return ""
        try:
            durable = registry.latest().step
        except CheckpointNotFound:
            durable = -1
        why = ""
        if durable > found.step:
            why = f"step {durable} is durable"
        elif found.world_size != size:
            why = f"{found.world_size} ranks have saved it, and these are {size}"
        elif not registry.has_all_copies(found):
            why = "a file of it no longer has a copy"
        if why:
            _log.warning("raftkv: step %d cannot be restored from memory: %s", found.step, why)
        return "" if why else found.encode().decode()

    def _claim(self) -> Claim:
        world = self._run.world
        return self._run.checkpoints.claim_run(world.generation, world.revision, world.fence)

    # ---- saving

    def save(self, step: int, state: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> bool:
        """Save a state at every ``every``-th step; after the copy, the work is done on a thread. All ranks call this.

        A failed save is logged, and training continues: the previous checkpoint stays. A step is left out while the
        save before it has not ended in ``timeout_s``, as when the cluster does not answer.

        Arguments:
            step: training step.
            state: state of this rank: dicts, lists and tuples of tensors, numbers and strings; or a function that
                returns it.

        Returns:
            Whether a save was due.

        Raises:
            ConfigError: the state has objects that cannot be restored without running code, or tensors of several ranks
                (``DTensor``): pass their local parts.
        """
        if check_step(step) % self._every:
            return False
        began = time.perf_counter()
        if self._has_ended(step):
            packed = self._stage(state() if callable(state) else state)
            self._saving = threading.Thread(target=self._save, args=(step, packed), name="raftkv-memory", daemon=True)
            self._saving.start()
        self.held_s += time.perf_counter() - began
        return True

    def _has_ended(self, step: int) -> bool:
        """Wait for the save before a step, once and not for ever, because its bytes lie in the same buffer."""
        if self._saving is not None:
            self._saving.join(0.0 if self._is_overdue else self._timeout_s)
            if self._saving.is_alive():
                if not self._is_overdue:
                    _log.warning(
                        "raftkv: step %d is not kept in memory: the save before it has not ended in %g s; later steps "
                        "are left out too until it has", step, self._timeout_s,
                    )  # fmt: skip
                self._is_overdue = True
                return False
        self._is_overdue, self._saving = False, None
        return True

    def wait(self) -> None:
        """Wait until the running save has ended, successfully or not."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None

    def _stage(self, state: Mapping[str, Any]) -> list[memoryview]:
        """Copy a state into the buffer; returns its bytes."""
        tensors: list[torch.Tensor] = []
        head = io.BytesIO()
        torch.save(_without_tensors(state, tensors), head)
        if not self._is_checked:
            _load_head(head.getvalue())
            self._is_checked = True
        size_bytes = sum(_room(tensor) for tensor in tensors)
        if len(self._buffer) != size_bytes:
            self._buffer = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        place = 0
        for tensor in tensors:
            _view(self._buffer, place, tensor).copy_(tensor.detach(), non_blocking=True)
            place += _room(tensor)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.current_stream().synchronize()
        prefix = _LENGTH.pack(head.tell()) + head.getvalue()
        prefix += bytes(-len(prefix) % _ALIGNMENT_BYTES)
        return [memoryview(prefix), memoryview(cast(Any, self._buffer.numpy()))]

    def _save(self, step: int, parts: Sequence[memoryview]) -> None:
        attempt: Attempt | None = None
        rank = self._run.rank
        try:
            attempt = self._open(step)
            digest = Digest()
            for part in parts:
                digest.update(part)
            file = FileRecord(_file(rank), sum(len(part) for part in parts), str(digest))
            self._spread(attempt, file, parts)
            attempt.prepare(rank, [file])
            if rank == 0:
                attempt.commit(timeout_s=self._timeout_s)
            self._number, self.committed = attempt.record.number, step
        except Exception as error:
            if attempt is not None:
                attempt.give_up(error, f"rank {rank} failed")
            _log.warning("raftkv: step %d could not be kept in memory: %s: %s", step, type(error).__name__, error)

    def _open(self, step: int) -> Attempt:
        run = self._run
        if run.rank == 0:
            return run.checkpoints.begin(self._claim(), step, kind=MEMORY, world_size=run.world_size)
        return run.checkpoints.join(
            self._claim(), step, kind=MEMORY, timeout_s=self._timeout_s, after=self._number, who=f"rank {run.rank}"
        )

    def _spread(self, attempt: Attempt, file: FileRecord, parts: Sequence[memoryview]) -> None:
        """Send a file to the node's holder and to others, in their order, until enough have it."""
        record, wanted = attempt.record, 1 + self._copies
        copy = {
            "kind": MEMORY, "step": record.step, "generation": record.generation, "number": record.number,
            "file": file.name, "digest": file.digest, "size_bytes": file.size_bytes, "secret": attempt.offer(file),
        }  # fmt: skip
        why = []
        found = self._run.checkpoints.holders()
        for holder in choose(found, self._own, self._spot):
            if wanted:
                try:
                    transfer.send(holder, copy, parts)
                    wanted -= 1
                except StorageError as error:
                    why.append(str(error))
        if wanted > self._copies:
            raise StorageError(
                f"no node of run {self._run.run_id!r} keeps step {record.step} in memory: "
                f"{'; '.join(why) or 'none has checkpoint_memory set'}"
            )
        if wanted:
            _log.warning(
                "raftkv: step %d of rank %d has only %d of %d copies: %s", record.step, self._run.rank,
                1 + self._copies - wanted, 1 + self._copies,
                "; ".join(why) or f"nodes that keep copies: {len(found)}",
            )  # fmt: skip


def _file(rank: int) -> str:
    return f"rank-{rank}"


# ---- the bytes of a state: the length of a head, the head, then each tensor at a multiple of 64 bytes
#
# The head is the state with empty tensors on no device in place of the real ones, written by torch.save.


def _without_tensors(state: Any, found: list[torch.Tensor]) -> Any:
    """Return a state with empty tensors; the real tensors are added to ``found``, in order."""
    if isinstance(state, torch.Tensor):
        if type(state) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or state.layout != torch.strided:
            raise ConfigError(f"a {type(state).__name__} cannot be kept in memory: give its local part, as to_local()")
        found.append(state)
        return torch.empty(state.shape, dtype=state.dtype, device="meta")
    if isinstance(state, Mapping):
        items = [(key, _without_tensors(value, found)) for key, value in state.items()]
        return OrderedDict(items) if isinstance(state, OrderedDict) else dict(items)
    if type(state) in (list, tuple):
        return type(state)(_without_tensors(item, found) for item in state)
    return state


def _with_tensors(head: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(head, torch.Tensor):
        return next(tensors)
    if isinstance(head, dict):
        items = [(key, _with_tensors(value, tensors)) for key, value in head.items()]
        return OrderedDict(items) if isinstance(head, OrderedDict) else dict(items)
    if type(head) in (list, tuple):
        return type(head)(_with_tensors(item, tensors) for item in head)
    return head


def _room(tensor: torch.Tensor) -> int:
    size_bytes = tensor.numel() * tensor.element_size()
    return size_bytes + -size_bytes % _ALIGNMENT_BYTES


def _view(buffer: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    size_bytes = like.numel() * like.element_size()
    return buffer[place : place + size_bytes].view(like.dtype).view(like.shape)


def _lying_at(data: memoryview, place: int, like: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a tensor with its own storage, because a Generator reads from a storage's
    start."""
    size_bytes = like.numel() * like.element_size()
    if not size_bytes:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(data, dtype=torch.uint8, count=size_bytes, offset=place).view(like.dtype).view(like.shape)


def _load_head(data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # any: torch raises classes of other modules
        raise ConfigError(
            "a state in memory is made of dicts, lists and tuples of tensors, numbers and texts: "
            f"{str(error).partition(chr(10))[0]}"
        ) from None


def unpacked(data: memoryview) -> Any:
    """Return the state in bytes whose digest was verified; its tensors share these bytes.

    Arguments:
        data: writable bytes that ``Memory.save`` has written.

    Raises:
        ConfigError: the bytes are not a state.
    """
    try:
        (length,) = _LENGTH.unpack(data[: _LENGTH.size])
        head = _load_head(bytes(data[_LENGTH.size : _LENGTH.size + length]))
        place = _LENGTH.size + length
        place += -place % _ALIGNMENT_BYTES
        likes: list[torch.Tensor] = []
        _without_tensors(head, likes)
        places = accumulate(map(_room, likes[:-1]), initial=place)
        tensors = [_lying_at(data, at, like) for at, like in zip(places, likes, strict=False)]
    except (struct.error, RuntimeError, ValueError) as error:
        raise ConfigError(f"these bytes are not a state of raftkv.torch.memory: {error}") from None
    return _with_tensors(head, iter(tensors))
