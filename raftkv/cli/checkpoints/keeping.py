"""``checkpoint pin|unpin|tag|untag|gc``: what keeps a checkpoint, and what deletes those that nothing keeps."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Sequence

from raftkv.checkpoint.errors import CheckpointNotFound
from raftkv.checkpoint.exchange import IMPORTED, RECORD, REFUSED, Imported
from raftkv.checkpoint.find import MIN
from raftkv.checkpoint.keys import check_run_id, check_step
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.registry import Registry
from raftkv.checkpoint.retention.collector import Collected
from raftkv.checkpoint.retention.policy import Best, Decision, Policy
from raftkv.checkpoint.storage.place import Place
from raftkv.cli.checkpoints import frame
from raftkv.cli.checkpoints.frame import Call, check_which, find, outside_the_store
from raftkv.cli.ctl.maintenance import parse_size
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.output.table import Rows, byte_bar, clock, count, out
from raftkv.cli.program import BAD_ARGUMENTS, ERROR, CommandError

_GONE_STYLE = "red"


def pin(invocation: Invocation) -> None:
    """Keep a checkpoint for a time, or until ``unpin``."""
    call = Call(invocation, "pin", "RUN [WHICH]")
    which, reader, duration_s = call.which(1), call["reader"] or default_reader(), call["for"]

    async def keep(registry: Registry) -> int:
        checkpoint = await find(registry, which, call.kind)
        await registry.pin_for(checkpoint, reader, duration_s)
        return checkpoint.step

    step = call.run(keep)
    until = (
        f"for {frame.span(duration_s)}" if duration_s else f"until `raftkvctl checkpoint unpin {call.run_id} {step}`"
    )
    told = f"step {step} of run {call.run_id!r} is pinned by {reader!r} {until}"
    _tell(call, {"step": step, "reader": reader, "duration_s": duration_s}, told)


def unpin(invocation: Invocation) -> None:
    """Take the pins of a reader on a checkpoint away."""
    call = Call(invocation, "unpin", "RUN [WHICH]")
    which, reader = call.which(1), call["reader"] or default_reader()

    async def let_go(registry: Registry) -> tuple[int, int]:
        checkpoint = await find(registry, which, call.kind)
        return checkpoint.step, await registry.unpin(checkpoint, reader)

    step, taken = call.run(let_go)
    if not taken:
        raise CommandError(f"step {step} of run {call.run_id!r} has no pin of {reader!r}; `show` names its pins", ERROR)
    _tell(
        call,
        {"step": step, "reader": reader, "pins": taken},
        f"{count(taken, 'pin')} of {reader!r} on step {step} gone",
    )


def default_reader() -> str:
    """Return the name under which a person pins: USER-HOST."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        user = "raftkvctl"
    return f"{user}-{socket.gethostname()}"


def tag(invocation: Invocation) -> None:
    """Put a tag on a checkpoint, or move it there."""
    call = Call(invocation, "tag", "RUN NAME [WHICH]")
    name, which = call.argument(1), call.which(2)

    async def put(registry: Registry) -> int:
        checkpoint = await find(registry, which, call.kind)
        await registry.tag(name, checkpoint)
        return checkpoint.step

    step = call.run(put)
    _tell(call, {"tag": name, "step": step}, f"tag {name!r} of run {call.run_id!r} is on step {step}")


def untag(invocation: Invocation) -> None:
    """Take a tag away."""
    call = Call(invocation, "untag", "RUN NAME")
    name = call.argument(1)
    if not call.run(lambda registry: registry.untag(name)):
        raise CommandError(f"run {call.run_id!r} has no tag {name!r}; `list` shows the tags", ERROR)
    _tell(call, {"tag": name}, f"tag {name!r} of run {call.run_id!r} is gone")


def _tell(call: Call, facts: dict[str, object], text: str) -> None:
    if call.as_json:
        frame.print_json({"run_id": call.run_id, **facts})
    else:
        print(text)


# ---- gc


def collect(invocation: Invocation) -> None:
    """Delete what a policy does not keep, and what dead attempts have left."""
    call = Call(invocation, "gc", "RUN")
    policy, dry_run = _policy(call), call["dry-run"]
    with byte_bar("deleting", hidden=call.as_json or dry_run) as on_progress:
        result = call.run(
            lambda registry: registry.collect(policy, dry_run=dry_run, on_progress=on_progress),
            uri=call["place"],
            limited=False,
        )
    if call.as_json:
        frame.print_json({"run_id": call.run_id, "dry_run": dry_run, **_plain(result)})
    else:
        _print(result, dry_run)
    if result.failures:
        failures = count(len(result.failures), "directory").replace("directorys", "directories")
        raise CommandError(f"{failures} could not be deleted; the next gc tries again", ERROR, result.failures)


def _policy(call: Call) -> Policy:
    best = [_best(text) for text in call["keep-best"]]
    given = call.invocation.changed
    return outside_the_store(
        lambda: Policy(
            keep_last=call["keep-last"],
            keep_every=call["keep-every"],
            keep_best=best,
            keep_for_s=call["keep-for"],
            max_age_s=call["max-age"] if "max-age" in given else None,
            max_bytes=parse_size(call["max-bytes"], "--max-bytes") if "max-bytes" in given else None,
        )
    )


def _best(text: str) -> Best:
    """Read METRIC, METRIC:MODE or METRIC:MODE:COUNT."""
    metric, *rest = text.split(":")
    try:
        return Best(metric, rest[0] if rest else MIN, *map(int, rest[1:]))
    except (ValueError, TypeError):
        raise CommandError(
            f"--keep-best {text!r} is not METRIC, METRIC:MODE or METRIC:MODE:COUNT", BAD_ARGUMENTS
        ) from None


def _print(result: Collected, dry_run: bool) -> None:
    gone = [one for one in result.decisions if not one.is_kept]
    if result.decisions:
        out(_decisions_table(result.decisions, "would go" if dry_run else "gone"))
        print()
    for words, uris in (("attempt that was given up", result.given_up), ("orphan", result.orphans)):
        for uri in uris:
            print(f"{words}: {uri}")
    for uri in result.kept_bytes:
        print(f"not in the registry any more, its bytes stay: {uri}")
    for uri in result.unknown:
        print(f"a whole checkpoint that the store does not know, it stays: {uri} (import it, or delete it)")
    size = frame.size(sum(one.checkpoint.size_bytes for one in gone))
    verb = "would be deleted" if dry_run else "deleted"
    left = count(len(result.given_up) + len(result.orphans), "directory").replace("directorys", "directories")
    print(f"{len(gone)} of {count(len(result.decisions), 'checkpoint')} {verb}, {size}; {left} of dead attempts")


def _decisions_table(decisions: Sequence[Decision], going: str) -> Rows:
    rows, styles = [], []
    for one in decisions:
        what = one.checkpoint
        verdict = "stays" if one.is_kept else going
        why = ", ".join(one.why)
        rows.append((str(what.step), what.kind, frame.size(what.size_bytes), clock(what.time), verdict, why))
        styles.append("" if one.is_kept else _GONE_STYLE)
    return Rows(("step", "kind", "size", "committed", "", "because"), rows, styles)


def _plain(result: Collected) -> dict[str, object]:
    def named(decision: Decision) -> dict[str, object]:
        one = decision.checkpoint
        return {"kind": one.kind, "step": one.step, "size_bytes": one.size_bytes, "uri": one.uri, "why": decision.why}

    return {
        "kept": [named(one) for one in result.decisions if one.is_kept],
        "deleted": [named(one) for one in result.decisions if not one.is_kept],
        "given_up": result.given_up,
        "orphans": result.orphans,
        "unknown": result.unknown,
        "kept_bytes": result.kept_bytes,
        "failures": result.failures,
    }


# -- moving ---------------------------------------------------------------------------------------------------------
#
# ``checkpoint export|import|copy``: checkpoints that leave the registry, come into it, or go to another run.

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
    _tell_place(call, done, f"step {done.step} ({done.kind}) of run {done.run_id!r} is exported to {uri}", uri)


def _tell_place(call: Call, checkpoint: Checkpoint, text: str, uri: str) -> None:
    one = checkpoint
    if call.as_json:
        name = {"run_id": one.run_id, "kind": one.kind, "step": one.step, "uri": uri}
        frame.print_json({**name, "file_count": one.file_count, "size_bytes": one.size_bytes})
    else:
        print(f"{text}: {count(one.file_count, 'file')}, {frame.size(one.size_bytes)}, all digests match")


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
    _tell_place(call, done, f"step {done.step} ({done.kind}) is in run {into!r}", done.uri)


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
        _tell_place(call, found, f"step {found.step} ({found.kind}) is in run {call.run_id!r}", found.uri)
        return
    if call.as_json:
        frame.print_json({"run_id": call.run_id, "results": [one.plain() for one in found]})
    else:
        _print_imports(found)
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


def _print_imports(found: Sequence[Imported]) -> None:
    rows = [
        (one.action, "" if one.step is None else str(one.step), one.kind, one.tool, frame.size(one.size_bytes),
         one.path, one.reason or one.uri)
        for one in found
    ]  # fmt: skip
    styles = [_STYLES.get(one.action, "") for one in found]
    out(Rows(("", "step", "kind", "saved by", "size", "path", ""), rows, styles))
