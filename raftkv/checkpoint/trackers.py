"""Tracker files, by which DeepSpeed and Megatron find the newest checkpoint; written only after the commit.

::

    trackers = Trackers(registry, (DEEPSPEED, MEGATRON))
    await trackers.write()                       # after a commit, and at a start: updates the files to the newest
    engine.load_checkpoint(directory)            # DeepSpeed reads ``latest``: the name of a directory below
    python train.py --load directory             # Megatron reads ``latest_checkpointed_iteration.txt``: a number

``Writer(trackers=...)`` of ``raftkv.torch.checkpoint`` and ``run.checkpoint(step, trackers=...)`` write them. The
registry is authoritative: if a process dies between the commit and the tracker, the file names the previous step, which
still exists, and the next program corrects it. A file is replaced atomically (a new file is synced and renamed over
it), so a reader never sees half a name. A process may be frozen between reading the registry and the rename, so it
reads the registry again after each rename, and writes again if there is a newer commit.

Megatron needs a directory named ``iter_0000100``: a link of that name points to the attempt's directory. Both tools
read only local or mounted file systems.
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
"""Name of each tool's file in the directory of the run's checkpoints."""


def check_tools(tools: Sequence[str]) -> tuple[str, ...]:
    """Return the valid names of tools.

    Raises:
        ConfigError: a tool is unknown.
    """
    unknown = [tool for tool in tools if tool not in FILES]
    if unknown or isinstance(tools, str):
        raise ConfigError(f"trackers are of {', '.join(FILES)}, given as a sequence; not of {tools!r}")
    return tuple(tools)


class Trackers:
    """The tracker files of a run.

    Arguments:
        registry: registry of the run; the tools look below its ``uri``.
        tools: ``DEEPSPEED``, ``MEGATRON``.
        kind: kind of checkpoint that the tools look for; empty: the kind of the newest.

    Raises:
        ConfigError: a tool is unknown, or the checkpoints are not on a mounted file system.
    """

    def __init__(self, registry: Registry, tools: Sequence[str], *, kind: str = "") -> None:
        self._registry = registry
        self._tools = check_tools(tools)
        self._kind = kind
        if self._tools and registry.uri and not Place(registry.uri).is_local:
            raise ConfigError(f"{' and '.join(self._tools)} read no tracker at {registry.uri}: use a local directory")

    async def write(self) -> Checkpoint | None:
        """Update the files to the newest checkpoint and return it; with none, return None and write nothing.

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
    """Update the files of some tools to a checkpoint.

    Arguments:
        uri: directory of the run's checkpoints.
        tools: tools whose files are written.
        checkpoint: committed checkpoint.

    Raises:
        StorageError: they could not be written.
        ConfigError: the checkpoint is not below that directory.
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
    """Set the target of a link atomically."""
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
    """Remove links to deleted checkpoints, but keep links of other programs, whose disk may be temporarily
    unavailable."""
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
