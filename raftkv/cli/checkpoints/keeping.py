"""``checkpoint pin|unpin|tag|untag|gc``: what keeps a checkpoint, and what deletes those that nothing keeps."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Sequence

from raftkv.checkpoint.find import MIN
from raftkv.checkpoint.registry import Registry
from raftkv.checkpoint.retention.collector import Collected
from raftkv.checkpoint.retention.policy import Best, Decision, Policy
from raftkv.cli.checkpoints import view
from raftkv.cli.checkpoints.frame import Call, find, outside_the_store
from raftkv.cli.ctl.quota import parse_size
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
    until = f"for {view.span(duration_s)}" if duration_s else f"until `raftkvctl checkpoint unpin {call.run_id} {step}`"
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
        view.print_json({"run_id": call.run_id, **facts})
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
        view.print_json({"run_id": call.run_id, "dry_run": dry_run, **_plain(result)})
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
    size = view.size(sum(one.checkpoint.size_bytes for one in gone))
    verb = "would be deleted" if dry_run else "deleted"
    left = count(len(result.given_up) + len(result.orphans), "directory").replace("directorys", "directories")
    print(f"{len(gone)} of {count(len(result.decisions), 'checkpoint')} {verb}, {size}; {left} of dead attempts")


def _decisions_table(decisions: Sequence[Decision], going: str) -> Rows:
    rows, styles = [], []
    for one in decisions:
        what = one.checkpoint
        verdict = "stays" if one.is_kept else going
        why = ", ".join(one.why)
        rows.append((str(what.step), what.kind, view.size(what.size_bytes), clock(what.time), verdict, why))
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
