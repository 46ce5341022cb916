"""What every command on checkpoints begins with: its arguments checked, the registry of a run, and its failures.

::

    call = Call(invocation, "show", "RUN [WHICH]")
    found = call.run(lambda registry: find(registry, call.which(1), call.kind))

A registry waits for a store that does not answer as long as it takes, as training jobs must. A command must not: it
asks once with the time limit of all commands before it begins, and what only reads the store ends after that limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from raftkv.checkpoint.find import MAX, MIN
from raftkv.checkpoint.keys import RegistryKeys, check_kind, check_run_id, check_step
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.registry import Registry
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.library import open_library, use_library
from raftkv.cli.program import BAD_ARGUMENTS, ERROR, CommandError
from raftkv.client.library import Client
from raftkv.errors import ConfigError, RaftKVError

LATEST = "latest"
TAG = "tag"
WORDS = "latest, a step, tag:NAME, min:METRIC or max:METRIC"


def check_which(word: str) -> str:
    """Return a word that names a checkpoint of a run.

    latest          the newest; the default
    100             the one of that step
    tag:release     the one that the tag is on
    min:loss        the best by a metric; max:accuracy

    Raises:
        CommandError: it does not.
    """
    prefix, colon, name = word.partition(":")
    is_step = not colon and word.isascii() and word.isdecimal()
    if word != LATEST and not is_step and not (name and prefix in (TAG, MIN, MAX)):
        raise CommandError(f"{word!r} names no checkpoint: write {WORDS}", BAD_ARGUMENTS)
    return word


async def find(registry: Registry, word: str, kind: str) -> Checkpoint:
    """Return the checkpoint that a word names.

    Arguments:
        registry: of the run.
        word: as ``check_which`` has it.
        kind: empty: of any kind.

    Raises:
        ConfigError: the step is too large.
        CheckpointNotFound: there is none.
    """
    prefix, colon, name = word.partition(":")
    if word == LATEST:
        return await registry.latest(kind)
    if not colon:
        return await registry.at(check_step(int(word)), kind)
    return await (registry.tagged(name) if prefix == TAG else registry.best(name, prefix, kind=kind))


T = TypeVar("T")


class Call:
    """One run of a command.

    Arguments:
        invocation: its words.
        name: of the command, for errors.
        usage: its arguments; those in brackets may be left out.

    Attributes:
        as_json: whether JSON is wanted.
        run_id: the first argument, if the usage begins with RUN; else empty.
        kv: the client, inside ``run``.

    Raises:
        CommandError: too few or too many arguments, or one that cannot be.
    """

    def __init__(self, invocation: Invocation, name: str, usage: str) -> None:
        words, most = usage.split(), len(usage.split())
        least = sum(not word.startswith("[") for word in words)
        if not least <= len(invocation.arguments) <= most:
            raise CommandError(f"checkpoint {name} needs {usage or 'no arguments'}", BAD_ARGUMENTS)
        self.invocation = invocation
        self.session, self.as_json = open_library(invocation)
        self.kv: Client
        self.run_id = ""
        if usage.startswith("RUN"):
            self.run_id = outside_the_store(lambda: check_run_id(invocation.arguments[0]))

    def __getitem__(self, flag: str) -> Any:
        return self.invocation[flag]

    @property
    def kind(self) -> str:
        """Return the kind of the checkpoints that are meant; empty: any."""
        wanted: str = self["kind"]
        return outside_the_store(lambda: check_kind(wanted)) if wanted else ""

    def which(self, place: int) -> str:
        """Return the argument that names a checkpoint; the latest if it was left out.

        Arguments:
            place: of the argument, from 0.
        """
        return check_which(self.argument(place) or LATEST)

    def argument(self, place: int) -> str:
        """Return an argument; empty: it was left out."""
        given = self.invocation.arguments
        return given[place] if place < len(given) else ""

    def run(self, use: Callable[[Registry], Awaitable[T]], *, uri: str = "", limited: bool = True) -> T:
        """Use the registry of the run.

        Arguments:
            use: what to do with it.
            uri: below which new checkpoints lie.
            limited: whether it must end within the time limit of commands, as reads of the store.

        Raises:
            CommandError: it failed.
        """
        return use_library(self.session, lambda kv: self._used(kv, use, uri, limited))

    async def _used(self, kv: Client, use: Callable[[Registry], Awaitable[T]], uri: str, limited: bool) -> T:
        limit_s, self.kv = self.session.timeout_s, kv
        await kv.get(RegistryKeys(self.run_id or "-").fence, timeout_s=limit_s)
        registry = Registry(kv, self.run_id or "-", uri=uri)
        try:
            async with asyncio.timeout(limit_s if limited and limit_s else None) as limit:
                return await use(registry)
        except TimeoutError:
            if not limit.expired():
                raise
            raise CommandError(
                f"the store did not answer within {limit_s:g} s; see `raftkvctl endpoint health`, or give more time "
                "with --command-timeout",
                ERROR,
            ) from None


def outside_the_store(work: Callable[[], T]) -> T:
    """Do something with the bytes of checkpoints; a failure becomes one line.

    Raises:
        CommandError: it failed.
    """
    try:
        return work()
    except ConfigError as error:
        raise CommandError(str(error), BAD_ARGUMENTS) from None
    except RaftKVError as error:
        raise CommandError(str(error), ERROR) from None
