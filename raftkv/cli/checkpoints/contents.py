"""``checkpoint verify``: the bytes of checkpoints, beside what was committed."""

from __future__ import annotations

from dataclasses import asdict

from raftkv.checkpoint.errors import CheckpointNotFound
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.registry import Registry
from raftkv.checkpoint.storage.verify import Report
from raftkv.checkpoint.storage.verify import verify as verify_bytes
from raftkv.cli.checkpoints import view
from raftkv.cli.checkpoints.frame import Call, outside_the_store
from raftkv.cli.checkpoints.which import find
from raftkv.cli.ctl.session import remark
from raftkv.cli.exits import BAD_ARGUMENTS, ERROR, CommandError
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.output.bars import byte_bar
from raftkv.cli.output.rows import count


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
        view.print_json({**name, "whole": False, **facts})
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
    whole = [f"{count(report.file_count, 'file')}, {view.size(report.size_bytes)}, all digests match"]
    extra = [f"{name} belongs to no rank; it does no harm" for name in report.extra]
    return [*(whole if report.is_whole else []), *found, *extra]
