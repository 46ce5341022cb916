"""``checkpoint list|show|latest|best|runs|lineage|watch|verify``: the commands that only read."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from raftkv.checkpoint.errors import CheckpointNotFound
from raftkv.checkpoint.find import Commit, Commits, RunLatest
from raftkv.checkpoint.keys import CHILD, PIN, TAG
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.registry import Registry
from raftkv.checkpoint.storage.verify import Report, load_manifest
from raftkv.checkpoint.storage.verify import verify as verify_bytes
from raftkv.cli.checkpoints import frame
from raftkv.cli.checkpoints.frame import Call, find, outside_the_store
from raftkv.cli.ctl.session import remark
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.output.table import Rows, byte_bar, count, out, printable
from raftkv.cli.program import BAD_ARGUMENTS, ERROR, CommandError

_WORDS = {PIN: "pinned by", TAG: "tag", CHILD: "parent of"}
Held = Mapping[tuple[str, int], Sequence[str]]


def list_all(invocation: Invocation) -> None:
    """Print the checkpoints of a run."""
    call = Call(invocation, "list", "RUN")
    limit = call["limit"]
    if limit < 0:
        raise CommandError(f"--limit must not be negative, and is {limit}", BAD_ARGUMENTS)

    async def read(registry: Registry) -> tuple[list[Checkpoint], Held]:
        found = await registry.checkpoints(call.kind, newest_first=bool(limit), limit=limit)
        if not found and not await registry.lookup.summary(registry.run_id):
            raise CheckpointNotFound(_no_checkpoints(call.run_id))
        return found, await held(registry)

    checkpoints, reasons = call.run(read)
    if call.as_json:
        frame.print_json([_with_holds(one, reasons) for one in checkpoints])
    else:
        out(frame.checkpoints_table(checkpoints, reasons))


def _no_checkpoints(run_id: str) -> str:
    return f"run {run_id!r} has no checkpoints; `raftkvctl checkpoint runs` shows the runs that have some"


def show(invocation: Invocation) -> None:
    """Print one checkpoint, and with --files what is in it."""
    call = Call(invocation, "show", "RUN [WHICH]")
    which = call.which(1)

    async def read(registry: Registry) -> tuple[Checkpoint, Held]:
        return await find(registry, which, call.kind), await held(registry)

    checkpoint, reasons = call.run(read)
    manifest = outside_the_store(lambda: load_manifest(checkpoint)) if call["files"] else None
    if call.as_json:
        files = {} if manifest is None else {"files": [{"rank": rank, **asdict(file)} for rank, file in manifest.files]}
        frame.print_json({**_with_holds(checkpoint, reasons), **files})
        return
    print(f"run {printable(checkpoint.run_id)}, step {checkpoint.step}")
    for name, value in frame.details(checkpoint, reasons.get((checkpoint.kind, checkpoint.step), ())):
        print(f"  {name:14}{value}")
    if manifest is not None:
        print()
        rows = [(str(rank), file.name, frame.size(file.size_bytes), file.digest) for rank, file in manifest.files]
        out(Rows(("rank", "file", "size", "digest"), rows))


def latest(invocation: Invocation) -> None:
    """Print the newest checkpoint of a run; with --uri where it lies."""
    call = Call(invocation, "latest", "RUN")
    _print_one(call, call.run(lambda registry: registry.latest(call.kind)))


def _print_one(call: Call, checkpoint: Checkpoint) -> None:
    if call["uri"]:
        print(checkpoint.uri)
    elif call.as_json:
        frame.print_json(checkpoint)
    else:
        out(frame.checkpoints_table([checkpoint], {}))


def best(invocation: Invocation) -> None:
    """Print the best checkpoints by a metric, of one run or of all."""
    call = Call(invocation, "best", "METRIC" if invocation["all-runs"] else "RUN METRIC")
    metric, mode, wanted = call.argument(0 if call["all-runs"] else 1), call["mode"], call["count"]
    if wanted < 1:
        raise CommandError(f"--count must be at least 1, not {wanted}", BAD_ARGUMENTS)

    async def read(registry: Registry) -> list[Checkpoint]:
        if call["all-runs"]:
            return await registry.lookup.best_of_all(metric, mode, kind=call.kind, count=wanted)
        return await registry.lookup.best(registry.run_id, metric, mode, kind=call.kind, count=wanted)

    found = call.run(read)
    if call["uri"]:
        print("\n".join(one.uri for one in found))
    elif call.as_json:
        frame.print_json(found)
    else:
        out(frame.best_table(found, metric))


def runs(invocation: Invocation) -> None:
    """Print which runs have checkpoints."""
    call = Call(invocation, "runs", "")

    async def read(registry: Registry) -> list[RunLatest]:
        return await registry.lookup.latest_of_all()

    found = call.run(read)
    if call.as_json:
        frame.print_json([{"run_id": one.run_id, "kind": one.kind, **asdict(one.latest)} for one in found])
    else:
        out(frame.runs_table(found))


def lineage(invocation: Invocation) -> None:
    """Print what a checkpoint descends from."""
    call = Call(invocation, "lineage", "RUN [WHICH]")
    which = call.which(1)

    async def read(registry: Registry) -> list[Checkpoint]:
        return await registry.lookup.lineage(await find(registry, which, call.kind))

    found = call.run(read)
    lost = found[-1].parent
    if call.as_json:
        frame.print_json({"checkpoints": found, "ends_at": lost})
        return
    out(frame.lineage_table(found))
    if lost is not None:
        print(f"it descends from {printable(str(lost))}, which does not exist any more")


async def held(registry: Registry) -> Held:
    """Read why checkpoints of a run must stay, by kind and step."""
    found: dict[tuple[str, int], list[str]] = {}
    for one in await registry.holds():
        found.setdefault((one.checkpoint.kind, one.checkpoint.step), []).append(
            f"{_WORDS.get(one.why, one.why)} {one.name}"
        )
    return found


def _with_holds(checkpoint: Checkpoint, reasons: Held) -> dict[str, Any]:
    return {**asdict(checkpoint), "kept_as": reasons.get((checkpoint.kind, checkpoint.step), ())}


def watch(invocation: Invocation) -> None:
    """Print each commit once until SIGINT or SIGTERM arrives, or ``--count`` have come; then where to go on."""
    call = Call(invocation, "watch", "RUN")
    first, wanted = call["from-revision"], call["count"]
    if first < 0 or wanted < 0:
        raise CommandError("--from-revision and --count must not be negative", BAD_ARGUMENTS)

    async def follow(registry: Registry) -> int:
        commits = registry.watch(call.kind, start_revision=first)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, commits.cancel)
        try:
            known = await commits.ready()
            # What exists already is printed, too, if the watch begins in the past: then nothing is known to be over.
            return await _print_commits(commits, call, first or known + 1, wanted)
        finally:
            commits.cancel()

    go_on = call.run(follow, limited=False)
    if not call.as_json:
        remark(f"to go on: --from-revision {go_on}")


async def _print_commits(commits: Commits, call: Call, go_on: int, wanted: int) -> int:
    """Print commits; return the revision from which to go on."""
    printed = 0
    async for commit in commits:
        go_on = commit.revision + 1
        _print(call, commit)
        printed += 1
        if printed == wanted:
            break
    return go_on


def _print(call: Call, commit: Commit) -> None:
    if call["uri"]:
        print(commit.checkpoint.uri, flush=True)
    elif call.as_json:
        place = {"revision": commit.revision, "next_revision": commit.revision + 1}
        frame.print_json({**place, "checkpoint": commit.checkpoint})
    else:
        print(frame.commit_line(commit.checkpoint, commit.revision), flush=True)


def verify(invocation: Invocation) -> None:
    """Compare the files of one checkpoint, or of all of a run, with what was committed."""
    call = Call(invocation, "verify", "RUN [WHICH]")
    if call["all"] and call.argument(1):
        raise CommandError("checkpoint verify takes --all or WHICH, not both", BAD_ARGUMENTS)
    which = call.which(1)

    async def read(registry: Registry) -> list[Checkpoint]:
        if not call["all"]:
            return [await find(registry, which, call.kind)]
        found = await registry.checkpoints(call.kind)
        if not found:
            raise CheckpointNotFound(f"run {call.run_id!r} has no checkpoints to verify")
        return found

    damaged = [one for one in call.run(read) if not _verify(call, one)]
    if damaged:
        steps = ", ".join(f"{one.step} ({one.kind})" for one in damaged)
        text = f"step {steps} of run {call.run_id!r} cannot be trusted; load another one, and have this looked at"
        raise CommandError(text, ERROR)


def _verify(call: Call, checkpoint: Checkpoint) -> bool:
    """Verify one, and print what was found; whether it is whole."""
    try:
        with byte_bar(f"verifying step {checkpoint.step}", hidden=call.as_json) as on_progress:
            report = outside_the_store(lambda: verify_bytes(checkpoint, on_progress=on_progress))
    except CommandError as error:
        if error.code != ERROR:
            raise
        _tell(call, checkpoint, {"error": str(error)}, [str(error)])
        return False
    facts = asdict(report)
    del facts["checkpoint"]
    _tell(call, checkpoint, {"whole": report.is_whole, **facts}, _lines(report))
    return report.is_whole


def _tell(call: Call, checkpoint: Checkpoint, facts: dict[str, object], lines: list[str]) -> None:
    name = {"run_id": checkpoint.run_id, "kind": checkpoint.kind, "step": checkpoint.step}
    if call.as_json:
        frame.print_json({**name, "whole": False, **facts})
        return
    if facts.get("whole"):
        print(f"step {checkpoint.step} ({checkpoint.kind}): {lines[0]}", flush=True)
        lines = lines[1:]
    for line in lines:
        remark(f"step {checkpoint.step} ({checkpoint.kind}): {line}")


def _lines(report: Report) -> list[str]:
    found = [f"{name} is missing" for name in report.missing]
    found += [f"{name} has another size than was committed" for name in report.wrong_size]
    found += [f"{name} has other contents than were committed" for name in report.wrong_digest]
    found += [f"{name}: {why}" for name, why in report.unreadable]
    whole = [f"{count(report.file_count, 'file')}, {frame.size(report.size_bytes)}, all digests match"]
    extra = [f"{name} belongs to no rank; it does no harm" for name in report.extra]
    return [*(whole if report.is_whole else []), *found, *extra]
