"""Imports a directory: registers complete checkpoints, oldest first, and refuses the others with a reason.

::

    results = await import_directory(registry, "/shared/old-job/output")
    results = await import_directory(registry, "s3://bucket/exported", step=400, kind="safetensors")
    json.dumps([result.plain() for result in results])

An import can be repeated: it skips steps that are in the registry, so it continues after an interruption. Like every
writer it claims the checkpoints of the run, if there is something to register; this fences out a running job, unless
its claim is passed. The files are copied below the URI of the registry and digested meanwhile.

DETECTION finds the tools that have written to a directory, from the names of files alone.

Directories are examined from the top. A tool that recognizes one takes its files, and the rest is passed to the next
tool. Tools with more specific names come first: for example, a Megatron directory also contains DCP files.
"""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from raftkv.checkpoint.commit.attempt import check_new
from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.errors import CheckpointExists, NotWhole, StaleStep, StorageError, printable
from raftkv.checkpoint.exchange import FOUND, IMPORTED, REFUSED, SKIPPED, Imported, Incoming, OnResult, save_copy
from raftkv.checkpoint.keys import check_kind, check_step
from raftkv.checkpoint.records import Checkpoint, FileRecord
from raftkv.checkpoint.registry import Registry
from raftkv.checkpoint.storage.place import Place
from raftkv.checkpoint.storage.transfer import UNKNOWN
from raftkv.checkpoint.storage.verify import Counter, Progress
from raftkv.errors import ConfigError
from raftkv.integrations.importers import (
    deepspeed,
    distributed,
    lightning,
    megatron,
    orbax,
    tensorflow,
    trainer,
    weights,
)
from raftkv.integrations.importers.candidate import Candidate, Facts
from raftkv.integrations.importers.source import Listing, Source


class Tool(NamedTuple):
    """One importer.

    Attributes:
        detect: returns what of one directory is the tool's, by its listing.
        inspect: checks that a candidate is complete; raises ``NotWhole``.
    """

    detect: Callable[[Listing], list[Candidate]]
    inspect: Callable[[Candidate, Source], Facts]


TOOLS: Final[Mapping[str, Tool]] = {
    module.NAME: Tool(module.detect, module.inspect)
    for module in (megatron, trainer, deepspeed, orbax, tensorflow, distributed, lightning, weights)
}


def detect(listing: Listing) -> list[Candidate]:
    """Return all candidates, oldest first; those without a step in their name come last."""
    names = sorted(listing.files)
    taken: set[str] = set()
    found: list[Candidate] = []
    for directory in ("", *listing.directories):
        for candidate in _detect_in(_left(directory, listing, names, taken)):
            found.append(candidate.below(directory))
            taken |= found[-1].sources
    return sorted(found, key=lambda candidate: (candidate.step is None, candidate.step or 0, candidate.path))


def _left(directory: str, listing: Listing, names: list[str], taken: set[str]) -> Listing:
    """Return the files of a directory that no tool has taken; they are adjacent in the sorted names."""
    start = f"{directory}/" if directory else ""
    first, end = (bisect_left(names, start), bisect_left(names, f"{directory}0")) if directory else (0, len(names))
    left = {name[len(start) :]: listing.files[name] for name in names[first:end] if name not in taken}
    return Listing(directory.rpartition("/")[2] or listing.name, left)


def _detect_in(here: Listing) -> list[Candidate]:
    found: list[Candidate] = []
    for tool in TOOLS.values():
        own = tool.detect(here) if here.files else []
        found += own
        taken = {name for candidate in own for name in candidate.sources}
        if taken:
            here = Listing(here.name, {name: size for name, size in here.files.items() if name not in taken})
    return found


# -- trackers -------------------------------------------------------------------------------------------------------
#
# Files that name the newest checkpoint of a directory: DeepSpeed's, Megatron's and TensorFlow's.
#
# A tracker may be wrong: written before its checkpoint is complete, truncated by a crash, or left by a deletion. The
# importer compares the named checkpoint with the existing files.

TRACKERS: Final = {
    "latest": re.compile(r"(?P<name>[\w.-]{1,255})\s*"),
    "latest_checkpointed_iteration.txt": re.compile(r"(?P<number>\d{1,12})\s*|(?P<name>release)\s*"),
    "checkpoint": re.compile(r'model_checkpoint_path:\s*"(?P<name>[^"\n]{1,1000})"(?:.|\n)*'),
}
"""Name and content of a tracker file."""
TRACKER_MAX_BYTES: Final = 64 * 1024


def wrong_trackers(source: Source, candidates: Iterable[Candidate]) -> dict[str, str]:
    """Return the trackers of the source that name a missing checkpoint, with the reason.

    Raises:
        StorageError: one could not be read.
    """
    paths = {candidate.path or source.listing.name for candidate in candidates}
    found = {}
    for tracker, pattern in TRACKERS.items():
        if tracker in source.listing.top and tracker not in source.bad and paths:
            text = source.head(tracker, TRACKER_MAX_BYTES).decode(errors="replace")
            match = pattern.fullmatch(text)
            if match is None:
                found[tracker] = "names nothing: it is empty or cut off, as after a crash while it was written"
            else:
                number = match.groupdict().get("number")
                name = f"iter_{int(number):07d}" if number else match["name"].rpartition("/")[2]
                if name not in paths:
                    found[tracker] = printable(f"names {name}, which is not there")
    return found


async def import_directory(
    registry: Registry,
    uri: str,
    *,
    step: int | None = None,
    kind: str = "",
    claim: Claim | None = None,
    dry_run: bool = False,
    on_result: OnResult | None = None,
    on_progress: Progress | None = None,
) -> list[Imported]:
    """Register the checkpoints in a directory; return the outcome for each candidate.

    Arguments:
        registry: registry of the run that gets them.
        uri: path or URL of the directory, or of one file.
        step: step of the only checkpoint there, if its name does not give it.
        kind: instead of the kind that was found.
        claim: under which; None: a new one, which ends all claims before.
        dry_run: look only.
        on_result: called with each result as it comes.
        on_progress: called on a thread with the bytes of complete checkpoints.

    Raises:
        ConfigError: nothing is there that any tool has written; or ``step`` is given for several.
        StorageError: it could not be read, or the copy could not be written.
        FenceBroken: another program has claimed the checkpoints meanwhile.
        StatusError: the cluster refused.
    """
    if kind:
        check_kind(kind)
    source = await asyncio.to_thread(Source, uri)
    candidates = await asyncio.to_thread(detect, source.listing)
    if not candidates:
        bad = "".join(f" ({printable(why)})" for why in list(source.bad.values())[:1])
        raise ConfigError(
            f"{uri} has nothing that one of {', '.join(TOOLS)} has written{bad}; name its checkpoint directory"
        )
    if step is not None and len(candidates) > 1:
        raise ConfigError(
            f"{uri} has {len(candidates)} checkpoints, and one step cannot be that of all; name one of them"
        )
    work = _Import(registry, source, None if step is None else check_step(step), kind, claim, on_progress)
    work.is_dry = dry_run
    return await work.run(candidates, on_result or (lambda _: None))


class _Import:
    """One import: the values shared by all its candidates."""

    def __init__(
        self,
        registry: Registry,
        source: Source,
        step: int | None,
        kind: str,
        claim: Claim | None,
        on_progress: Progress | None,
    ) -> None:
        self._registry, self._source, self._step, self._kind = registry, source, step, kind
        self._claim = claim
        self.is_dry = False
        self._on_progress = on_progress
        self._counter = Counter(0, None)
        self._seen: dict[tuple[str, int], str] = {}

    async def run(self, candidates: list[Candidate], on_result: OnResult) -> list[Imported]:
        """Register all candidates, oldest first."""
        bad = self._source.bad
        loose = sorted(bad.keys() - {name for candidate in candidates for name in candidate.sources})
        results = [Imported(printable(name), "", "", None, SKIPPED, printable(bad[name])) for name in loose]
        inspected: list[tuple[Candidate, Facts]] = []
        for tracker, why in (await asyncio.to_thread(wrong_trackers, self._source, candidates)).items():
            results.append(Imported(tracker, "tracker", "", None, REFUSED, f"{self._source.uri}/{tracker} {why}"))
        for candidate in candidates:
            try:
                self._source.check(candidate.sources)
                facts = await asyncio.to_thread(TOOLS[candidate.tool].inspect, candidate, self._source)
            except (NotWhole, StorageError) as error:
                results.append(self._result(candidate, Facts(candidate.step), REFUSED, str(error)))
            else:
                inspected.append((candidate, facts))
        for result in results:
            on_result(result)
        self._counter = Counter(sum(sum(one.files.values()) for one, _ in inspected), self._on_progress)
        for candidate, facts in sorted(inspected, key=self._order):
            results.append(await self._take(candidate, facts))
            if results[-1].action != IMPORTED:
                self._counter.add(results[-1].size_bytes)
            on_result(results[-1])
        return results

    def _order(self, item: tuple[Candidate, Facts]) -> tuple[int, bool, str]:
        candidate, facts = item
        return self._step_of(facts) or 0, candidate.step is None, candidate.path

    def _step_of(self, facts: Facts) -> int | None:
        return facts.step if self._step is None else self._step

    async def _take(self, candidate: Candidate, facts: Facts) -> Imported:
        step, kind = self._step_of(facts), self._kind or candidate.kind
        if step is None:
            return self._result(candidate, facts, REFUSED, "neither its name nor its files say its step; give the step")
        other = self._seen.setdefault((kind, step), candidate.path)
        if other != candidate.path:
            return self._result(candidate, facts, SKIPPED, f"{other} is of the same step")
        try:
            await check_new(self._registry.control, self._registry.run_id, step, kind)
        except CheckpointExists:
            return self._result(candidate, facts, SKIPPED, "the registry has this step")
        except StaleStep as error:
            return self._result(candidate, facts, SKIPPED, str(error))
        if self.is_dry:
            return self._result(candidate, facts, FOUND)
        try:
            done = await self._register(candidate, facts, step, kind)
        except (CheckpointExists, StaleStep) as error:
            return self._result(candidate, facts, SKIPPED, str(error))
        except NotWhole as error:  # it has changed since it was inspected
            return self._result(candidate, facts, REFUSED, str(error))
        return self._result(candidate, facts, IMPORTED, uri=done.uri)

    async def _register(self, candidate: Candidate, facts: Facts, step: int, kind: str) -> Checkpoint:
        if self._claim is None:
            self._claim = await self._registry.claim()
            await self._registry.take_over(self._claim)  # what an import before this one has left
        place = f"{self._source.uri}/{candidate.base}".rstrip("/")
        metadata = {
            **facts.metadata,
            "imported_from": printable(f"{self._source.uri}/{candidate.path}".rstrip("/")),
            "tool": candidate.tool,
        }
        if candidate.keep:
            place = place.rpartition("/")[0]  # its tool loads it by its name from the directory above
        files = [FileRecord(candidate.keep + name, size, UNKNOWN) for name, size in sorted(candidate.files.items())]
        what = Incoming(Place(place), files, step, kind, None, metadata, facts.metrics)
        return await save_copy(self._registry.begin, self._claim, what, self._advance())

    def _advance(self) -> Progress:
        """Return a progress callback that adds the bytes of one checkpoint to the total."""
        before = 0

        def told(done: int, _: int) -> None:
            nonlocal before
            self._counter.add(done - before)
            before = done

        return told

    def _result(self, candidate: Candidate, facts: Facts, action: str, reason: str = "", *, uri: str = "") -> Imported:
        files = candidate.files
        return Imported(
            printable(candidate.path), candidate.tool, self._kind or candidate.kind, self._step_of(facts), action,
            reason, uri, len(files), sum(files.values()), dict(facts.metrics),
        )  # fmt: skip
