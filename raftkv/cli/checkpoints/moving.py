"""``checkpoint export|import|copy``: checkpoints that leave the registry, come into it, or go to another run."""

from __future__ import annotations

import os
from collections.abc import Sequence

from raftkv.checkpoint.errors import CheckpointNotFound
from raftkv.checkpoint.exchange import RECORD
from raftkv.checkpoint.importers.importing import IMPORTED, REFUSED, Imported
from raftkv.checkpoint.keys import check_run_id, check_step
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.registry import Registry
from raftkv.checkpoint.storage.place import Place
from raftkv.cli.checkpoints import view
from raftkv.cli.checkpoints.frame import Call, check_which, find, outside_the_store
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.output.table import Rows, byte_bar, count, out
from raftkv.cli.program import BAD_ARGUMENTS, ERROR, CommandError

_STYLES = {IMPORTED: "green", REFUSED: "red"}


def export(invocation: Invocation) -> None:
    """Copy a checkpoint to a directory, verified on the way."""
    call = Call(invocation, "export", "RUN WHICH DIRECTORY")
    which, uri = check_which(call.argument(1)), call.argument(2)

    async def copy(registry: Registry) -> Checkpoint:
        checkpoint = await find(registry, which, call.kind)
        await registry.export(checkpoint, uri, on_progress=on_progress)
        return checkpoint

    with byte_bar("exporting", hidden=call.as_json) as on_progress:
        done = call.run(copy, limited=False)
    _tell(call, done, f"step {done.step} ({done.kind}) of run {done.run_id!r} is exported to {uri}", uri)


def _tell(call: Call, checkpoint: Checkpoint, text: str, uri: str) -> None:
    one = checkpoint
    if call.as_json:
        name = {"run_id": one.run_id, "kind": one.kind, "step": one.step, "uri": uri}
        view.print_json({**name, "file_count": one.file_count, "size_bytes": one.size_bytes})
    else:
        print(f"{text}: {count(one.file_count, 'file')}, {view.size(one.size_bytes)}, all digests match")


def copy(invocation: Invocation) -> None:
    """Copy a checkpoint of one run into another."""
    call = Call(invocation, "copy", "RUN WHICH INTO-RUN")
    which, step, place = check_which(call.argument(1)), _step(call), _place(call)
    into = outside_the_store(lambda: check_run_id(call.argument(2)))

    async def take(registry: Registry) -> Checkpoint:
        checkpoint = await find(registry, which, call.kind)
        target = await registry_of(call, into, place)
        return await target.copy_from(await target.claim(), checkpoint, step=step, on_progress=on_progress)

    with byte_bar("copying", hidden=call.as_json) as on_progress:
        done = call.run(take, limited=False)
    _tell(call, done, f"step {done.step} ({done.kind}) is in run {into!r}", done.uri)


def take_in(invocation: Invocation) -> None:
    """Register what lies in a directory: an export, or what another tool has saved there."""
    call = Call(invocation, "import", "RUN DIRECTORY")
    uri, step = call.argument(1), _step(call)
    is_export = outside_the_store(lambda: Place(uri).exists(RECORD))
    if is_export and (call.kind or call["dry-run"]):
        raise CommandError(f"{uri} is an export, which says its kind: give neither --kind nor --dry-run", BAD_ARGUMENTS)
    place = _place(call)

    async def take(registry: Registry) -> Checkpoint | list[Imported]:
        into = registry if call["dry-run"] else await registry_of(call, call.run_id, place)
        if is_export:
            return await into.import_export(await into.claim(), uri, step=step, on_progress=on_progress)
        return await into.import_directory(
            uri, step=step, kind=call.kind, dry_run=call["dry-run"], on_progress=on_progress
        )

    with byte_bar("importing", hidden=call.as_json) as on_progress:
        found = call.run(take, limited=False)
    if isinstance(found, Checkpoint):
        _tell(call, found, f"step {found.step} ({found.kind}) is in run {call.run_id!r}", found.uri)
        return
    if call.as_json:
        view.print_json({"run_id": call.run_id, "results": [one.plain() for one in found]})
    else:
        _print(found)
    if refused := sum(one.action == REFUSED for one in found):
        text = f"{count(refused, 'thing')} in {uri} could not be imported, each for the reason in its line"
        raise CommandError(text, ERROR)


async def registry_of(call: Call, run_id: str, place: str) -> Registry:
    """Return the registry of a run with the place of its checkpoints: the one given, or where its latest lies.

    Raises:
        CommandError: none is given, and the run has no checkpoints.
    """
    found = Registry(call.kv, run_id, uri=place)
    if place:
        return found
    try:
        latest = await found.latest()
    except CheckpointNotFound:
        text = f"run {run_id!r} has no checkpoints yet: say where they are to lie, as --place /shared/checkpoints"
        raise CommandError(text, BAD_ARGUMENTS) from None
    return Registry(call.kv, run_id, uri=latest.uri.rpartition("/")[0])


def _place(call: Call) -> str:
    """Return the place that was given; a path is made absolute, for others will look from elsewhere."""
    place: str = call["place"]
    return os.path.abspath(place) if place and "://" not in place else place


def _step(call: Call) -> int | None:
    wanted: int = call["step"]
    return outside_the_store(lambda: check_step(wanted)) if "step" in call.invocation.changed else None


def _print(found: Sequence[Imported]) -> None:
    rows = [
        (one.action, "" if one.step is None else str(one.step), one.kind, one.tool, view.size(one.size_bytes), one.path,
         one.reason or one.uri)
        for one in found
    ]  # fmt: skip
    styles = [_STYLES.get(one.action, "") for one in found]
    out(Rows(("", "step", "kind", "saved by", "size", "path", ""), rows, styles))
