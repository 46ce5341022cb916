"""What every command on checkpoints begins with: its arguments checked, the registry of a run, and its failures.

::

    call = Call(invocation, "show", "RUN [WHICH]")
    found = call.run(lambda registry: find(registry, call.which(1), call.kind))

A registry waits for a store that does not answer as long as it takes, as training jobs must. A command must not: it
asks once with the time limit of all commands before it begins, and what only reads the store ends after that limit.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, Final, TypeVar

from raftkv.checkpoint.find import MAX, MIN, RunLatest
from raftkv.checkpoint.keys import RegistryKeys, check_kind, check_run_id, check_step
from raftkv.checkpoint.records import Checkpoint, Extremes
from raftkv.checkpoint.registry import Registry
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.library import open_library, use_library
from raftkv.cli.output.table import Rows, clock, printable
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


# -- view -----------------------------------------------------------------------------------------------------------
#
# How checkpoints look: cells of tables, lines, JSON. Pure, but for the printing.

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
LATEST_STYLE: Final = "bold green"


def size(size_bytes: float) -> str:
    """Format a number of bytes.

    >>> size(999), size(1536), size(5 << 40)
    ('999 B', '1.5 KiB', '5.0 TiB')
    """
    unit = 0
    while size_bytes >= 1024 and unit < len(_UNITS) - 1:
        size_bytes /= 1024
        unit += 1
    return f"{size_bytes:.1f} {_UNITS[unit]}" if unit else f"{size_bytes:.0f} B"


def span(seconds: float) -> str:
    """Format a duration.

    >>> span(0.25), span(75), span(7500)
    ('0.25 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Format as ``accuracy 0.5, loss 0.25``."""
    return ", ".join(f"{printable(name)} {value:.6g}" for name, value in sorted(metrics.items()))


def to_plain(value: Any) -> Any:
    """Convert to what JSON can hold: records to objects, numbers that JSON does not have to their names.

    >>> to_plain({"loss": math.nan, "steps": (1, 2)})
    {'loss': 'NaN', 'steps': [1, 2]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return to_plain(asdict(value))
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def print_json(value: Any) -> None:
    """Print one line of JSON, at once."""
    print(json.dumps(to_plain(value), allow_nan=False), flush=True)


def checkpoints_table(checkpoints: Sequence[Checkpoint], held: Mapping[tuple[str, int], Sequence[str]]) -> Rows:
    """Lay out the checkpoints of a run.

    Arguments:
        checkpoints: in the order of the rows.
        held: why one must stay, by kind and step.
    """
    newest: dict[str, int] = {}
    for one in checkpoints:
        newest[one.kind] = max(newest.get(one.kind, 0), one.step)
    rows, styles = [], []
    for one in checkpoints:
        is_latest = newest[one.kind] == one.step
        why = ", ".join([*(["latest"] if is_latest else []), *held.get((one.kind, one.step), ())])
        rows.append(
            (
                str(one.step), one.kind, str(one.generation), str(one.world_size), str(one.file_count),
                size(one.size_bytes), clock(one.time), span(one.duration_s), metrics_text(one.metrics), why,
            )
        )  # fmt: skip
        styles.append(LATEST_STYLE if is_latest else "")
    header = ("step", "kind", "generation", "ranks", "files", "size", "committed", "took", "metrics", "kept as")
    return Rows(header, rows, styles)


def runs_table(summaries: Sequence[RunLatest]) -> Rows:
    """Lay out all runs and kinds."""
    rows = [
        (
            one.run_id, one.kind, str(one.latest.step), clock(one.latest.time), str(one.latest.count),
            size(one.latest.size_bytes), _best_text(one.latest.best),
        )
        for one in summaries
    ]  # fmt: skip
    return Rows(("run", "kind", "latest", "committed", "checkpoints", "size", "metrics (from to)"), rows)


def _best_text(best: Mapping[str, Extremes]) -> str:
    return ", ".join(f"{name} {one.min_value:.6g} {one.max_value:.6g}" for name, one in sorted(best.items()))


def lineage_table(checkpoints: Sequence[Checkpoint]) -> Rows:
    """Lay out a checkpoint and those it descends from."""
    rows = [
        (one.run_id, str(one.step), one.kind, clock(one.time), size(one.size_bytes), metrics_text(one.metrics))
        for one in checkpoints
    ]
    return Rows(("run", "step", "kind", "committed", "size", "metrics"), rows, [LATEST_STYLE])


def best_table(checkpoints: Sequence[Checkpoint], metric: str) -> Rows:
    """Lay out the best checkpoints by a metric, the best first."""
    rows = [
        (f"{one.metrics[metric]:.6g}", one.run_id, str(one.step), one.kind, clock(one.time), one.uri)
        for one in checkpoints
    ]
    return Rows((metric, "run", "step", "kind", "committed", "uri"), rows, [LATEST_STYLE])


def details(checkpoint: Checkpoint, held: Sequence[str]) -> list[tuple[str, str]]:
    """Describe one checkpoint, a name and a value each."""
    one = checkpoint
    lines = [
        ("uri", printable(one.uri)),
        ("kind", one.kind),
        ("attempt", f"generation {one.generation}, number {one.number}"),
        ("saved by", f"{one.world_size} rank{'' if one.world_size == 1 else 's'}, {printable(one.holder)}"),
        ("files", f"{one.file_count}, {size(one.size_bytes)} ({one.size_bytes} bytes)"),
        ("committed", f"{clock(one.time)}, {span(one.duration_s)} after its beginning"),
        ("manifest", one.manifest),
        ("root", one.root),
    ]
    lines += [("descends from", printable(str(one.parent)))] if one.parent is not None else []
    lines += [("metric", f"{printable(name)} {value!r}") for name, value in sorted(one.metrics.items())]
    lines += [("metadata", printable(f"{name}={value}")) for name, value in sorted(one.metadata.items())]
    return [*lines, *(("kept as", printable(why)) for why in held)]


def commit_line(checkpoint: Checkpoint, revision: int) -> str:
    """Describe a commit in one line."""
    one = checkpoint
    told = [f"{one.file_count} files" if one.file_count != 1 else "1 file", size(one.size_bytes)]
    told += [metrics_text(one.metrics)] if one.metrics else []
    return (
        f"{clock(one.time)}  step {one.step} ({one.kind}): {', '.join(told)}; revision {revision}; {printable(one.uri)}"
    )
