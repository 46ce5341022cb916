"""Tracker files: how DeepSpeed and Megatron find the newest checkpoint, written after the commit and never before.

::

    trackers = Trackers(registry, (DEEPSPEED, MEGATRON))
    await trackers.write()                       # after a commit, and at a start: brings the files to the newest
    engine.load_checkpoint(directory)            # DeepSpeed reads ``latest``: the name of a directory below
    python train.py --load directory             # Megatron reads ``latest_checkpointed_iteration.txt``: a number

``Writer(trackers=...)`` of ``raftkv.torch.checkpoint`` and ``run.checkpoint(step, trackers=...)`` do so. The registry
is the truth, the files follow it: a process that dies between commit and tracker leaves the file of the
step before, which exists too, and the next program writes the right one. A file is replaced at once (a new one,
synced, is renamed over it), so no reader sees half a name. A frozen process may wake up between its look at the
registry and its rename; it looks again after each rename, and writes again if the registry has gone on.

Megatron asks for a directory called ``iter_0000100``: a link of that name leads to the attempt's own. Both tools read
local disks, or what is mounted like one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from raftkv.checkpoint.errors import CheckpointNotFound
from raftkv.checkpoint.keys import AttemptId
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.storage.filesystems import open_file, sync
from raftkv.checkpoint.storage.place import Place
from raftkv.errors import ConfigError

if TYPE_CHECKING:
    from raftkv.checkpoint.registry import Registry

DEEPSPEED: Final = "deepspeed"
MEGATRON: Final = "megatron"
FILES: Final = {DEEPSPEED: "latest", MEGATRON: "latest_checkpointed_iteration.txt"}
"""Tool to the name of its file, in the directory of the run's checkpoints."""


def check_tools(tools: Sequence[str]) -> tuple[str, ...]:
    """Return which tools are to find the checkpoints.

    Raises:
        ConfigError: one is not known.
    """
    unknown = [tool for tool in tools if tool not in FILES]
    if unknown or isinstance(tools, str):
        raise ConfigError(f"trackers are of {', '.join(FILES)}, given as a sequence; not of {tools!r}")
    return tuple(tools)


class Trackers:
    """The tracker files of a run.

    Arguments:
        registry: of the run; its ``uri`` is where the tools look.
        tools: ``DEEPSPEED``, ``MEGATRON``.
        kind: of the checkpoints that they are to find; empty: of the kind of the newest.

    Raises:
        ConfigError: a tool is not known, or the checkpoints lie on no disk.
    """

    def __init__(self, registry: Registry, tools: Sequence[str], *, kind: str = "") -> None:
        self._registry = registry
        self._tools = check_tools(tools)
        self._kind = kind
        if self._tools and registry.uri and not Place(registry.uri).is_local:
            raise ConfigError(f"{' and '.join(self._tools)} read no tracker at {registry.uri}: use a local directory")

    async def write(self) -> Checkpoint | None:
        """Make the files name the newest checkpoint; returns it. None: there is none, and nothing is written.

        Raises:
            StorageError: they could not be written.
        """
        written: Checkpoint | None = None
        while self._tools:
            newest = await self._newest()
            if newest is None or (written is not None and newest.id == written.id):
                return newest
            await asyncio.to_thread(write_all, self._registry.uri, self._tools, newest)
            written = newest
        return None

    async def _newest(self) -> Checkpoint | None:
        try:
            return await self._registry.latest(self._kind)
        except CheckpointNotFound:
            return None


def write_all(uri: str, tools: Sequence[str], checkpoint: Checkpoint) -> None:
    """Make the files of some tools name a checkpoint.

    Arguments:
        uri: of the directory of the run's checkpoints.
        tools: whose.
        checkpoint: committed.

    Raises:
        StorageError: they could not be written.
        ConfigError: the checkpoint lies elsewhere.
    """
    place = Place(uri)
    directory = os.path.relpath(Place(checkpoint.uri).root, place.root)
    if directory.startswith(os.pardir):
        raise ConfigError(f"{checkpoint.uri} is not below {uri}, where trackers are read")
    for tool in tools:
        text = directory
        if tool == MEGATRON:
            text = str(checkpoint.step)
            with place.named("link", f"iter_{checkpoint.step:07d}"):
                _link(f"{place.root}/iter_{checkpoint.step:07d}", directory)
            with place.named("look for links in"):
                _remove_dangling(place.root)
        if not _says(f"{place.root}/{FILES[tool]}", text):
            place.write(FILES[tool], text.encode())


def _link(path: str, target: str) -> None:
    """Have a link lead somewhere, replaced at once."""
    if os.path.islink(path) and os.readlink(path) == target:
        return
    new = f"{path}.part-{os.urandom(4).hex()}"
    os.symlink(target, new)
    try:
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    sync(os.path.dirname(path))


def _remove_dangling(directory: str) -> None:
    """Remove the links to checkpoints that were deleted; another program's may lead to a disk that is away just now."""
    for entry in os.scandir(directory):
        if entry.name.startswith("iter_") and entry.is_symlink() and not os.path.exists(entry.path):
            with contextlib.suppress(FileNotFoundError):
                if AttemptId.of_directory(os.path.basename(os.readlink(entry.path))) is not None:
                    os.unlink(entry.path)


def _says(path: str, text: str) -> bool:
    try:
        with open_file(path) as file:
            return file.read(len(text.encode()) + 1) == text.encode()
    except OSError:
        return False
