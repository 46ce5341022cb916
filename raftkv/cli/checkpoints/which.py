"""How a checkpoint of a run is named on the command line, and how it is found.

latest          the newest (what is meant without a word)
100             the one of that step
tag:release     the one that the tag is on
min:loss        the best by a metric; max:accuracy
"""

from __future__ import annotations

from raftkv.checkpoint.find.lookup import MAX, MIN
from raftkv.checkpoint.keys import check_step
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.registry import Registry
from raftkv.cli.exits import BAD_ARGUMENTS, CommandError

LATEST = "latest"
TAG = "tag"
WORDS = "latest, a step, tag:NAME, min:METRIC or max:METRIC"


def check_which(word: str) -> str:
    """Return a word that names a checkpoint.

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
