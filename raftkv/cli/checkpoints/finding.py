"""``checkpoint list|show|latest|best|runs|lineage``: what there is; nothing here writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from raftkv.checkpoint.errors import CheckpointNotFound
from raftkv.checkpoint.find.lookup import RunLatest
from raftkv.checkpoint.keys import CHILD, PIN, TAG
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.registry import Registry
from raftkv.checkpoint.storage.verify import load_manifest
from raftkv.cli.checkpoints import view
from raftkv.cli.checkpoints.frame import Call, outside_the_store
from raftkv.cli.checkpoints.which import find
from raftkv.cli.exits import BAD_ARGUMENTS, CommandError
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.output.rows import Rows, out, printable

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
        view.print_json([_with_holds(one, reasons) for one in checkpoints])
    else:
        out(view.checkpoints_table(checkpoints, reasons))


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
        view.print_json({**_with_holds(checkpoint, reasons), **files})
        return
    print(f"run {printable(checkpoint.run_id)}, step {checkpoint.step}")
    for name, value in view.details(checkpoint, reasons.get((checkpoint.kind, checkpoint.step), ())):
        print(f"  {name:14}{value}")
    if manifest is not None:
        print()
        rows = [(str(rank), file.name, view.size(file.size_bytes), file.digest) for rank, file in manifest.files]
        out(Rows(("rank", "file", "size", "digest"), rows))


def latest(invocation: Invocation) -> None:
    """Print the newest checkpoint of a run; with --uri where it lies."""
    call = Call(invocation, "latest", "RUN")
    _print_one(call, call.run(lambda registry: registry.latest(call.kind)))


def _print_one(call: Call, checkpoint: Checkpoint) -> None:
    if call["uri"]:
        print(checkpoint.uri)
    elif call.as_json:
        view.print_json(checkpoint)
    else:
        out(view.checkpoints_table([checkpoint], {}))


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
        view.print_json(found)
    else:
        out(view.best_table(found, metric))


def runs(invocation: Invocation) -> None:
    """Print which runs have checkpoints."""
    call = Call(invocation, "runs", "")

    async def read(registry: Registry) -> list[RunLatest]:
        return await registry.lookup.latest_of_all()

    found = call.run(read)
    if call.as_json:
        view.print_json([{"run_id": one.run_id, "kind": one.kind, **asdict(one.latest)} for one in found])
    else:
        out(view.runs_table(found))


def lineage(invocation: Invocation) -> None:
    """Print what a checkpoint descends from."""
    call = Call(invocation, "lineage", "RUN [WHICH]")
    which = call.which(1)

    async def read(registry: Registry) -> list[Checkpoint]:
        return await registry.lookup.lineage(await find(registry, which, call.kind))

    found = call.run(read)
    lost = found[-1].parent
    if call.as_json:
        view.print_json({"checkpoints": found, "ends_at": lost})
        return
    out(view.lineage_table(found))
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
