"""``raftkvctl checkpoint``: the registry of checkpoints on the command line.

Every command starts with a ``Call``, which checks the arguments, opens the registry of a run, and reports failures::

    call = Call(invocation)
    found = call.run(lambda registry: find(registry, call.which(1), call.kind))

A registry waits for an unresponsive store indefinitely, as training jobs need. A command must not: it first tests the
store once with the time limit of all commands, and operations that only read the store end after that limit.

``raftkv.checkpoint`` is the registry; flags, help and examples are in ``cli.ctl.tree``.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, TypeVar

from raftkv.checkpoint.commit.attempt import check_new
from raftkv.checkpoint.commit.manifest import RECORD, Manifest
from raftkv.checkpoint.errors import CheckpointNotFound
from raftkv.checkpoint.exchange import IMPORTED, REFUSED, Imported, read_export
from raftkv.checkpoint.find import MAX, MIN, Commit, Commits, RunLatest
from raftkv.checkpoint.keys import CHILD, PIN, TAG, RegistryKeys, check_kind, check_run_id, check_step
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.registry import Registry
from raftkv.checkpoint.retention import ownership
from raftkv.checkpoint.retention.collector import Collected
from raftkv.checkpoint.retention.policy import Best, Decision, Policy
from raftkv.checkpoint.storage.place import Place
from raftkv.checkpoint.storage.verify import Report, load_manifest
from raftkv.checkpoint.storage.verify import verify as verify_bytes
from raftkv.cli.command import Invocation
from raftkv.cli.ctl.maintenance import parse_size
from raftkv.cli.ctl.session import open_library, remark, use_library
from raftkv.cli.program import BAD_ARGUMENTS, ERROR, CommandError, on_signals
from raftkv.cli.table import Rows, byte_bar, clock, count, out, tell
from raftkv.client.library import Client
from raftkv.client.records import number_in
from raftkv.errors import ConfigError, RaftKVError, printable

LATEST = "latest"
WORDS = "latest, a step, tag:NAME, min:METRIC or max:METRIC"


def check_which(word: str) -> str:
    """Return a word after checking that it has a form that names a checkpoint of a run.

    latest          the newest; the default
    100             the one of that step
    tag:release     the one with this tag
    min:loss        the best by a metric; max:accuracy

    Raises:
        CommandError: the word has another form.
    """
    prefix, colon, name = word.partition(":")
    is_step = not colon and number_in(word) is not None
    if word != LATEST and not is_step and not (name and prefix in (TAG, MIN, MAX)):
        raise CommandError(f"{word!r} is not a checkpoint: write {WORDS}", BAD_ARGUMENTS)
    return word


async def find(registry: Registry, word: str, kind: str) -> Checkpoint:
    """Return the checkpoint that a word names.

    Arguments:
        registry: registry of the run.
        word: see ``check_which``.
        kind: kind of checkpoint; empty: any kind.

    Raises:
        ConfigError: the step is too large.
        CheckpointNotFound: there is no such checkpoint.
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
        invocation: parsed command line.

    Attributes:
        as_json: whether to print JSON.
        run_id: first argument, if the usage begins with RUN; otherwise empty.
        kv: the client, inside ``run``.

    Raises:
        CommandError: too few or too many arguments, or an invalid one.
    """

    def __init__(self, invocation: Invocation) -> None:
        self.invocation, self._arguments = invocation, invocation.given()
        self.session, self.as_json = open_library(invocation)
        self.kv: Client
        self.run_id = ""
        if invocation.usage.startswith("RUN"):
            self.run_id = outside_the_store(lambda: check_run_id(self._arguments[0]))

    def __getitem__(self, flag: str) -> Any:
        return self.invocation[flag]

    @property
    def kind(self) -> str:
        """Return the kind of checkpoint from the flags; empty: any."""
        wanted: str = self["kind"]
        return outside_the_store(lambda: check_kind(wanted)) if wanted else ""

    def which(self, place: int) -> str:
        """Return the argument that names a checkpoint; ``latest`` if it is missing.

        Arguments:
            place: position of the argument, from 0.
        """
        return check_which(self.argument(place) or LATEST)

    def argument(self, place: int) -> str:
        """Return an argument; empty if it is missing."""
        return self._arguments[place]

    def tell_of_run(self, facts: dict[str, object], text: str) -> None:
        """Print the result of a change to the run."""
        self.tell({"run_id": self.run_id, **facts}, text)

    def tell(self, plain: Any, shown: Rows | str | Callable[[], object]) -> None:
        """Print an answer; see ``table.tell``."""
        tell(self.as_json, plain, shown)

    def run(self, use: Callable[[Registry], Awaitable[T]], *, uri: str = "", limited: bool = True) -> T:
        """Call a function with the registry of the run.

        Arguments:
            use: function to call.
            uri: location of new checkpoints.
            limited: whether the function must end within the time limit of commands, as for reads of the store.

        Raises:
            CommandError: the function failed.
        """
        return use_library(self.session, lambda kv: self._used(kv, use, uri, limited))

    def on(
        self, place: int, act: Callable[[Registry, Checkpoint], Awaitable[T]], *, limited: bool = True
    ) -> tuple[Checkpoint, T]:
        """Call a function with the checkpoint that an argument names; return the checkpoint and the result.

        Arguments:
            place: position of the argument, from 0.
            act: function to call.
            limited: as for ``run``.
        """
        which, kind = self.which(place), self.kind

        async def use(registry: Registry) -> tuple[Checkpoint, T]:
            found = await find(registry, which, kind)
            return found, await act(registry, found)

        return self.run(use, limited=limited)

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
    """Call a function that accesses the files of checkpoints; report a failure as one line.

    Raises:
        CommandError: the function failed.
    """
    try:
        return work()
    except ConfigError as error:
        raise CommandError(str(error), BAD_ARGUMENTS) from None
    except RaftKVError as error:
        raise CommandError(str(error), ERROR) from None


# -- view -----------------------------------------------------------------------------------------------------------
#
# Display of checkpoints: table cells, lines, JSON. Pure, except for the printing.

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


def checkpoints_table(checkpoints: Sequence[Checkpoint], held: Mapping[tuple[str, int], Sequence[str]]) -> Rows:
    """Return the table of a run's checkpoints.

    Arguments:
        checkpoints: checkpoints in row order.
        held: reasons to keep a checkpoint, by kind and step.
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
    """Return the table of all runs and kinds."""
    rows = []
    for one, last in ((one, one.latest) for one in summaries):
        best = ", ".join(f"{name} {two.min_value:.6g} {two.max_value:.6g}" for name, two in sorted(last.best.items()))
        facts = str(last.step), clock(last.time), str(last.count), size(last.size_bytes)
        rows.append((one.run_id, one.kind, *facts, best))
    return Rows(("run", "kind", "latest", "committed", "checkpoints", "size", "metrics (from to)"), rows)


def lineage_table(checkpoints: Sequence[Checkpoint]) -> Rows:
    """Return the table of a checkpoint and its ancestors."""
    rows = [
        (one.run_id, str(one.step), one.kind, clock(one.time), size(one.size_bytes), metrics_text(one.metrics))
        for one in checkpoints
    ]
    return Rows(("run", "step", "kind", "committed", "size", "metrics"), rows, [LATEST_STYLE])


def best_table(checkpoints: Sequence[Checkpoint], metric: str) -> Rows:
    """Return the table of the best checkpoints by a metric, best first."""
    rows = [
        (f"{one.metrics[metric]:.6g}", one.run_id, str(one.step), one.kind, clock(one.time), one.uri)
        for one in checkpoints
    ]
    return Rows((metric, "run", "step", "kind", "committed", "uri"), rows, [LATEST_STYLE])


def details(checkpoint: Checkpoint, held: Sequence[str]) -> list[tuple[str, str]]:
    """Return the details of one checkpoint as pairs of name and value."""
    one = checkpoint
    lines = [
        ("uri", one.uri),
        ("kind", one.kind),
        ("attempt", f"generation {one.generation}, number {one.number}"),
        ("saved by", f"{one.world_size} rank{'' if one.world_size == 1 else 's'}, {one.holder}"),
        ("files", f"{one.file_count}, {size(one.size_bytes)} ({one.size_bytes} bytes)"),
        ("committed", f"{clock(one.time)}, {span(one.duration_s)} after its start"),
        ("manifest", one.manifest),
        ("root", one.root),
    ]
    lines += [("descends from", str(one.parent))] if one.parent is not None else []
    lines += [("metric", f"{name} {value!r}") for name, value in sorted(one.metrics.items())]
    lines += [("metadata", f"{name}={value}") for name, value in sorted(one.metadata.items())]
    return [*lines, *(("kept as", why) for why in held)]


def commit_line(checkpoint: Checkpoint, revision: int) -> str:
    """Describe a commit in one line."""
    one = checkpoint
    told = [f"{one.file_count} files" if one.file_count != 1 else "1 file", size(one.size_bytes)]
    told += [metrics_text(one.metrics)] if one.metrics else []
    return (
        f"{clock(one.time)}  step {one.step} ({one.kind}): {', '.join(told)}; revision {revision}; {printable(one.uri)}"
    )


# -- finding --------------------------------------------------------------------------------------------------------
#
# ``checkpoint list|show|latest|best|runs|lineage|watch|verify``: the read-only commands.

_WORDS = {PIN: "pinned by", TAG: "tag", CHILD: "parent of"}
Held = Mapping[tuple[str, int], Sequence[str]]


def list_all(invocation: Invocation) -> None:
    """Print the checkpoints of a run."""
    call = Call(invocation)
    limit = call["limit"]

    async def read(registry: Registry) -> tuple[list[Checkpoint], Held]:
        found = await registry.checkpoints(call.kind, newest_first=bool(limit), limit=limit)
        if not found and not await registry.lookup.summary(registry.run_id):
            hint = "`raftkvctl checkpoint runs` shows the runs that have some"
            raise CheckpointNotFound(f"run {call.run_id!r} has no checkpoints; {hint}")
        return found, await held(registry)

    checkpoints, reasons = call.run(read)
    call.tell([_with_holds(one, reasons) for one in checkpoints], checkpoints_table(checkpoints, reasons))


def show(invocation: Invocation) -> None:
    """Print one checkpoint; with --files also its files."""
    call = Call(invocation)
    checkpoint, reasons = call.on(1, lambda registry, _: held(registry))
    manifest = outside_the_store(lambda: load_manifest(checkpoint)) if call["files"] else None
    files = [] if manifest is None else [{"rank": rank, **asdict(file)} for rank, file in manifest.files]
    plain = {**_with_holds(checkpoint, reasons), **({} if manifest is None else {"files": files})}
    call.tell(plain, lambda: _print_details(checkpoint, reasons, manifest))


def _print_details(checkpoint: Checkpoint, reasons: Held, manifest: Manifest | None) -> None:
    print(f"run {printable(checkpoint.run_id)}, step {checkpoint.step}")
    for name, value in details(checkpoint, reasons.get((checkpoint.kind, checkpoint.step), ())):
        print(f"  {name:14}{printable(value)}")
    if manifest is not None:
        print()
        rows = [(str(rank), file.name, size(file.size_bytes), file.digest) for rank, file in manifest.files]
        out(Rows(("rank", "file", "size", "digest"), rows))


def latest(invocation: Invocation) -> None:
    """Print the newest checkpoint of a run; with --uri only its location."""
    call = Call(invocation)
    found = call.run(lambda registry: registry.latest(call.kind))
    if call["uri"]:
        print(printable(found.uri))
    else:
        call.tell(found, checkpoints_table([found], {}))


def best(invocation: Invocation) -> None:
    """Print the best checkpoints by a metric, of one run or of all runs."""
    if invocation["all-runs"]:
        invocation.usage = "METRIC"
    call = Call(invocation)
    metric, mode, wanted = call.argument(0 if call["all-runs"] else 1), call["mode"], call["count"]

    async def read(registry: Registry) -> list[Checkpoint]:
        if call["all-runs"]:
            return await registry.lookup.best_of_all(metric, mode, kind=call.kind, count=wanted)
        return await registry.lookup.best(registry.run_id, metric, mode, kind=call.kind, count=wanted)

    found = call.run(read)
    if call["uri"]:
        print("\n".join(printable(one.uri) for one in found))
    else:
        call.tell(found, best_table(found, metric))


def runs(invocation: Invocation) -> None:
    """Print the runs that have checkpoints."""
    call = Call(invocation)
    found = call.run(lambda registry: registry.lookup.latest_of_all())
    call.tell([{"run_id": one.run_id, "kind": one.kind, **asdict(one.latest)} for one in found], runs_table(found))


def lineage(invocation: Invocation) -> None:
    """Print the ancestors of a checkpoint."""
    call = Call(invocation)
    _, found = call.on(1, lambda registry, one: registry.lookup.lineage(one))
    lost = found[-1].parent
    call.tell({"checkpoints": found, "ends_at": lost}, lineage_table(found))
    if lost is not None and not call.as_json:
        print(f"it descends from {printable(str(lost))}, which no longer exists")


async def held(registry: Registry) -> Held:
    """Return the reasons to keep checkpoints of a run, by kind and step."""
    found: dict[tuple[str, int], list[str]] = {}
    for one in await registry.holds():
        found.setdefault((one.checkpoint.kind, one.checkpoint.step), []).append(
            f"{_WORDS.get(one.why, one.why)} {one.name}"
        )
    return found


def _with_holds(checkpoint: Checkpoint, reasons: Held) -> dict[str, Any]:
    return {**asdict(checkpoint), "kept_as": reasons.get((checkpoint.kind, checkpoint.step), ())}


def watch(invocation: Invocation) -> None:
    """Print each commit once until SIGINT, SIGTERM or ``--count`` commits; then the revision to continue from."""
    call = Call(invocation)
    first, wanted = call["from-revision"], call["count"]

    async def follow(registry: Registry) -> int:
        commits = registry.watch(call.kind, start_revision=first)
        try:
            with on_signals(commits.cancel):
                known = await commits.ready()
                # A watch from a past revision also prints existing checkpoints, because none is known to be deleted.
                return await _print_commits(commits, call, first or known + 1, wanted)
        finally:
            commits.cancel()

    go_on = call.run(follow, limited=False)
    if not call.as_json:
        remark(f"to continue: --from-revision {go_on}")


async def _print_commits(commits: Commits, call: Call, go_on: int, wanted: int) -> int:
    """Print commits; return the revision to continue from."""
    printed = 0
    async for commit in commits:
        go_on = commit.revision + 1
        _print_commit(call, commit)
        printed += 1
        if printed == wanted:
            break
    return go_on


def _print_commit(call: Call, commit: Commit) -> None:
    if call["uri"]:
        print(printable(commit.checkpoint.uri), flush=True)
        return
    place = {"revision": commit.revision, "next_revision": commit.revision + 1}
    call.tell({**place, "checkpoint": commit.checkpoint}, commit_line(commit.checkpoint, commit.revision))


def verify(invocation: Invocation) -> None:
    """Compare the files of one checkpoint, or of all checkpoints of a run, with the committed sizes and hashes."""
    call = Call(invocation)
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
        text = f"step {steps} of run {call.run_id!r} cannot be used; load another one, and find the cause"
        raise CommandError(text, ERROR)


def _verify(call: Call, checkpoint: Checkpoint) -> bool:
    """Verify one checkpoint and print the findings; return whether it is intact."""
    try:
        with byte_bar(f"verifying step {checkpoint.step}", hidden=call.as_json) as on_progress:
            report = outside_the_store(lambda: verify_bytes(checkpoint, on_progress=on_progress))
    except CommandError as error:
        if error.code != ERROR:
            raise
        _tell_verified(call, checkpoint, {"error": str(error)}, [str(error)])
        return False
    facts = asdict(report)
    del facts["checkpoint"]
    _tell_verified(call, checkpoint, {"whole": report.is_whole, **facts}, _lines(report))
    return report.is_whole


def _tell_verified(call: Call, checkpoint: Checkpoint, facts: dict[str, object], lines: list[str]) -> None:
    name = {"run_id": checkpoint.run_id, "kind": checkpoint.kind, "step": checkpoint.step}
    subject = f"step {checkpoint.step} ({checkpoint.kind})"
    is_whole = bool(facts.get("whole"))
    if call.as_json or is_whole:
        call.tell({**name, "whole": False, **facts}, f"{subject}: {lines[0]}")
    for line in () if call.as_json else lines[is_whole:]:
        remark(f"{subject}: {line}")


def _lines(report: Report) -> list[str]:
    found = [f"{name} is missing" for name in report.missing]
    found += [f"{name} differs in size from what was committed" for name in report.wrong_size]
    found += [f"{name} differs in contents from what was committed" for name in report.wrong_digest]
    found += [f"{name}: {why}" for name, why in report.unreadable]
    whole = [f"{count(report.file_count, 'file')}, {size(report.size_bytes)}, all digests match"]
    extra = [f"{name} was not committed with the checkpoint; some loaders may read it" for name in report.extra]
    return [*(whole if report.is_whole else []), *found, *extra]


# -- keeping --------------------------------------------------------------------------------------------------------
#
# ``checkpoint pin|unpin|tag|untag|gc``: protecting checkpoints, and deleting unprotected ones.

_GONE_STYLE = "red"


def pin(invocation: Invocation) -> None:
    """Keep a checkpoint for a time, or until ``unpin``."""
    call = Call(invocation)
    reader, duration_s = call["reader"] or default_reader(), call["for"]
    step = call.on(1, lambda registry, one: registry.pin_for(one, reader, duration_s))[0].step
    until = f"for {span(duration_s)}" if duration_s else f"until `raftkvctl checkpoint unpin {call.run_id} {step}`"
    told = f"step {step} of run {call.run_id!r} is pinned by {reader!r} {until}"
    call.tell_of_run({"step": step, "reader": reader, "duration_s": duration_s}, told)


def unpin(invocation: Invocation) -> None:
    """Remove the pins of a reader from a checkpoint."""
    call = Call(invocation)
    reader = call["reader"] or default_reader()
    checkpoint, taken = call.on(1, lambda registry, one: registry.unpin(one, reader))
    step = checkpoint.step
    if not taken:
        raise CommandError(f"step {step} of run {call.run_id!r} has no pin of {reader!r}; `show` names its pins", ERROR)
    told = f"{count(taken, 'pin')} of {reader!r} on step {step} gone"
    call.tell_of_run({"step": step, "reader": reader, "pins": taken}, told)


def default_reader() -> str:
    """Return the default reader of a person's pins: USER-HOST."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user id
        user = "raftkvctl"
    return f"{user}-{socket.gethostname()}"


def tag(invocation: Invocation) -> None:
    """Put a tag on a checkpoint, or move the tag there."""
    call = Call(invocation)
    name = call.argument(1)
    step = call.on(2, lambda registry, one: registry.tag(name, one))[0].step
    call.tell_of_run({"tag": name, "step": step}, f"tag {name!r} of run {call.run_id!r} is on step {step}")


def untag(invocation: Invocation) -> None:
    """Remove a tag."""
    call = Call(invocation)
    name = call.argument(1)
    if not call.run(lambda registry: registry.untag(name)):
        raise CommandError(f"run {call.run_id!r} has no tag {name!r}; `list` shows the tags", ERROR)
    call.tell_of_run({"tag": name}, f"tag {name!r} of run {call.run_id!r} is gone")


# ---- gc


def collect(invocation: Invocation) -> None:
    """Delete the checkpoints that a policy does not keep, and the leftovers of dead attempts."""
    call = Call(invocation)
    policy, dry_run = _policy(call), call["dry-run"]
    with byte_bar("deleting", hidden=call.as_json or dry_run) as on_progress:
        result = call.run(
            lambda registry: registry.collect(policy, dry_run=dry_run, on_progress=on_progress),
            uri=call["place"],
            limited=False,
        )
    plain = {"run_id": call.run_id, "dry_run": dry_run, **_plain(result)}
    call.tell(plain, lambda: _print(result, dry_run))
    if result.failures:
        failures = count(len(result.failures), "directory").replace("directorys", "directories")
        raise CommandError(f"{failures} could not be deleted; run gc again", ERROR, result.failures)


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
    """Parse METRIC, METRIC:MODE or METRIC:MODE:COUNT."""
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
    for words, uris, advice in (
        ("aborted attempt", result.given_up, ""),
        ("orphan", result.orphans, ""),
        ("no longer in the registry, its files are kept", result.kept_bytes, ""),
        ("a complete checkpoint that is not in the registry, it is kept", result.unknown, " (import it, or delete it)"),
    ):
        for uri in uris:
            print(f"{words}: {printable(uri)}{advice}")
    size_freed = size(result.freed_bytes)
    verb = "would be deleted" if dry_run else "deleted"
    left = count(len(result.given_up) + len(result.orphans), "directory").replace("directorys", "directories")
    print(f"{len(gone)} of {count(len(result.decisions), 'checkpoint')} {verb}, {size_freed}; {left} of dead attempts")


def _decisions_table(decisions: Sequence[Decision], going: str) -> Rows:
    rows, styles = [], []
    for one in decisions:
        what = one.checkpoint
        verdict = "stays" if one.is_kept else going
        why = ", ".join(one.why)
        rows.append((str(what.step), what.kind, size(what.size_bytes), clock(what.time), verdict, why))
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
# ``checkpoint export|import``: moving checkpoints out of the registry, and into it.

_STYLES = {IMPORTED: "green", REFUSED: "red"}


def export(invocation: Invocation) -> None:
    """Copy a checkpoint to a directory, and verify it on the way."""
    call = Call(invocation)
    uri = call.argument(2)
    with byte_bar("exporting", hidden=call.as_json) as bar:
        done, _ = call.on(1, lambda registry, one: registry.export(one, uri, on_progress=bar), limited=False)
    _tell_place(call, done, f"step {done.step} ({done.kind}) of run {done.run_id!r} was exported to {uri}", uri)


def _tell_place(call: Call, checkpoint: Checkpoint, text: str, uri: str) -> None:
    one = checkpoint
    name = {"run_id": one.run_id, "kind": one.kind, "step": one.step, "uri": uri}
    told = f"{text}: {count(one.file_count, 'file')}, {size(one.size_bytes)}, all digests match"
    call.tell({**name, "file_count": one.file_count, "size_bytes": one.size_bytes}, told)


def take_in(invocation: Invocation) -> None:
    """Register the content of a directory: an export, or files saved by another tool."""
    call = Call(invocation)
    uri, step = call.argument(1), _step(call)
    is_export = outside_the_store(lambda: Place(uri).exists(RECORD))
    if is_export and (call.kind or call["dry-run"]):
        raise CommandError(f"{uri} is an export, which says its kind: give neither --kind nor --dry-run", BAD_ARGUMENTS)
    place = _place(call)

    async def take(registry: Registry) -> Checkpoint | list[Imported]:
        into = registry if call["dry-run"] else await registry_of(call, call.run_id, place)
        if is_export:
            saved, _ = await asyncio.to_thread(read_export, uri)
            await check_new(into.control, into.run_id, saved.step if step is None else step, saved.kind)
            return await into.import_export(await into.claim(), uri, step=step, on_progress=on_progress)
        return await into.import_directory(
            uri, step=step, kind=call.kind, dry_run=call["dry-run"], on_progress=on_progress
        )

    with byte_bar("importing", hidden=call.as_json) as on_progress:
        found = call.run(take, limited=False)
    if isinstance(found, Checkpoint):
        _tell_place(call, found, f"step {found.step} ({found.kind}) is in run {call.run_id!r}", found.uri)
        return
    call.tell({"run_id": call.run_id, "results": [one.plain() for one in found]}, _imports_table(found))
    if refused := sum(one.action == REFUSED for one in found):
        text = f"{count(refused, 'thing')} in {uri} could not be imported, see the lines above"
        raise CommandError(text, ERROR)


async def registry_of(call: Call, run_id: str, place: str) -> Registry:
    """Return the registry of a run with the location of its checkpoints: the given one, or that of its latest.

    Raises:
        CommandError: no location is given, and the run has no checkpoints, or its latest lies where it never wrote.
    """
    found = Registry(call.kv, run_id, uri=place)
    if place:
        return found
    advice = "name a directory for them, as --place /shared/checkpoints"
    try:
        latest = await found.latest()
    except CheckpointNotFound:
        raise CommandError(f"run {run_id!r} has no checkpoints yet: {advice}", BAD_ARGUMENTS) from None
    uri = latest.uri.rpartition("/")[0]
    own = await call.kv.get(found.keys.mark)
    marks = await asyncio.to_thread(ownership.read_marks, uri)
    if own is None or marks.get(own.value.decode(errors="replace")) != run_id:  # a record may name any directory
        text = f"run {run_id!r} has no mark in {printable(uri)}, where a record says that its latest lies: {advice}"
        raise CommandError(text, BAD_ARGUMENTS)
    return Registry(call.kv, run_id, uri=uri)


def _place(call: Call) -> str:
    """Return the given location; a path is made absolute, because others resolve it from other directories."""
    place: str = call["place"]
    return os.path.abspath(place) if place and "://" not in place else place


def _step(call: Call) -> int | None:
    wanted: int = call["step"]
    return outside_the_store(lambda: check_step(wanted)) if "step" in call.invocation.changed else None


def _imports_table(found: Sequence[Imported]) -> Rows:
    rows = [
        (one.action, "" if one.step is None else str(one.step), one.kind, one.tool, size(one.size_bytes),
         one.path, one.reason or one.uri)
        for one in found
    ]  # fmt: skip
    styles = [_STYLES.get(one.action, "") for one in found]
    return Rows(("", "step", "kind", "saved by", "size", "path", ""), rows, styles)
