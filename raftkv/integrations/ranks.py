"""Sharing decisions of rank 0 with the other ranks, for frameworks without a call for it.

    path = decide(lambda: find_checkpoint())       # called by all ranks; only rank 0 looks

Ranks connected by ``torch.distributed`` get the decision by a broadcast. Before that, processes that rank 0 starts
later, such as those of Lightning's launcher, inherit it in their environment. Otherwise there must be only one process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import torch
from torch import distributed as dist

from raftkv.checkpoint.errors import CheckpointError
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.storage.place import Place
from raftkv.checkpoint.storage.transfer import HandedOut
from raftkv.checkpoint.storage.verify import require_below
from raftkv.errors import ConfigError

if TYPE_CHECKING:
    from raftkv.checkpoint.saver import Saver

INHERITED: Final = "RAFTKV_DECIDED_BY_RANK_0"


def is_connected() -> bool:
    """Return whether ``torch.distributed`` connects several ranks."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def barrier() -> None:
    """Wait for all ranks."""
    if is_connected():
        dist.barrier()


def decide(make: Callable[[], str], *, inherited: bool = False) -> str:
    """Return rank 0's decision, or raise its error; called by all ranks at the same place.

    Arguments:
        make: called by rank 0.
        inherited: processes that this one starts later may ask too.

    Raises:
        CheckpointError: rank 0 has failed, on the others.
        ConfigError: there are other ranks, and no way to ask the first one.
    """
    if not is_connected():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not (dist.is_available() and dist.is_initialized()):
            return _from_environment(inherited)
        made = make()
        if inherited:
            os.environ[INHERITED] = json.dumps(made)
        return made
    told: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            told[0] = make()
        except Exception as error:
            failure, told[1] = error, f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(told, src=0)
    if failure is not None:
        raise failure
    if told[1] is not None:
        raise CheckpointError(f"rank 0 could not continue: {told[1]}")
    return str(told[0])


def directory_of(
    saver: Saver,
    find: Callable[[], Checkpoint | None],
    directory: str,
    handed: HandedOut,
    *,
    inherited: bool = False,
    anywhere: bool = False,
) -> str | None:
    """Return a local directory with a checkpoint, verified, or None. Called by all ranks.

    Arguments:
        saver: saver of the registry.
        find: called by rank 0.
        directory: download directory for checkpoints that are not on a local disk.
        handed: checkpoint handed to this process; checked when all ranks have read it.
        inherited: as for ``decide``; so are the errors.
        anywhere: load a checkpoint from anywhere; otherwise only from below the ``uri`` of the registry.

    Raises:
        DigestMismatch: a file is missing or differs from the committed one.
        ConfigError: the checkpoint is not below the ``uri`` of the registry.
    """

    def look_up() -> str:
        checkpoint = handed.pinned(find)
        if checkpoint is None:
            return ""
        if not anywhere:
            require_below(checkpoint, saver.registry.uri)
        look = uuid4().hex
        handed.take(checkpoint, directory, look)
        return f"{look} {checkpoint.encode().decode()}"

    found = decide(look_up, inherited=inherited)
    if not found:
        return None
    look, _, encoded = found.partition(" ")
    checkpoint = Checkpoint.decode(encoded.encode())
    place = Place(checkpoint.uri)
    return place.root if place.is_local else handed.take(checkpoint, directory, look)


def is_any(told: bool, device: Any) -> bool:
    """Return whether any rank was notified; called by all ranks at the same place.

    Arguments:
        told: whether this one was notified.
        device: device on which the ranks' collectives work.
    """
    if not is_connected():
        return told
    flag = torch.tensor([told], dtype=torch.int32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def _from_environment(inherited: bool) -> str:
    if not inherited or INHERITED not in os.environ:
        raise ConfigError(
            f"this is one of {os.environ['WORLD_SIZE']} ranks, and cannot ask the first one yet: call it after "
            "torch.distributed.init_process_group (TrainingArguments does that)"
        )
    return str(json.loads(os.environ[INHERITED]))
