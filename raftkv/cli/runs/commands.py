"""``run``: training runs, seen from outside: which there are, who is in them, what happened, what happens.

Owns the commands' words, their failures and the choice between tables, plain text and JSON. Where the facts come from
is ``raftkv.training.history``; how they look is ``runs.view``; what a node waits for is ``runs.facts``.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import time
from collections.abc import Sequence
from typing import Final

from raftkv.cli.goflags.command import Invocation
from raftkv.cli.library import open_library, use_library
from raftkv.cli.output.table import count, out, progress_bar
from raftkv.cli.program import BAD_ARGUMENTS, ERROR, CommandError
from raftkv.cli.runs import view as run_view
from raftkv.cli.runs.view import Facts, read_facts
from raftkv.client.kv.kv import pipelined
from raftkv.client.kv.operations import Compare, Delete, mod_revision, version
from raftkv.client.library import Client
from raftkv.errors import PermissionDeniedError
from raftkv.integrations.horovod import ROOT as HOROVOD_ROOT
from raftkv.training.errors import UnknownRun
from raftkv.training.history import RunSummary, follow, list_runs, read_history, read_progress
from raftkv.training.keys import RunKeys, check_run_id
from raftkv.training.records import CLOSED
from raftkv.training.scheduling.ledger import ClusterView, describe_cluster, list_clusters
from raftkv.training.timeline import RunHistory


def list_all(invocation: Invocation) -> None:
    """Print every run."""
    invocation.refuse_arguments("run list accepts no arguments")
    session, as_json = open_library(invocation)
    runs = use_library(session, list_runs)
    if as_json:
        print(json.dumps([run_view.summary_to_plain(one) for one in runs]))
    else:
        out(run_view.runs_table(runs))


def show(invocation: Invocation) -> None:
    """Print one run as it is."""
    run_id = invocation.argument("run show needs the id of one run")
    session, as_json = open_library(invocation)

    async def read(kv: Client) -> Facts:
        return await read_facts(kv, run_id)

    facts = use_library(session, read)
    if as_json:
        print(json.dumps(facts.to_plain()))
    else:
        run_view.show(facts)


def queue(invocation: Invocation) -> None:
    """Print who holds the slots of a cluster that runs share, and who waits for them."""
    if len(invocation.arguments) > 1:
        raise CommandError("run queue takes the name of one cluster, or none", BAD_ARGUMENTS)
    session, as_json = open_library(invocation)

    async def read(kv: Client) -> list[ClusterView]:
        names = invocation.arguments or await list_clusters(kv)
        return [await describe_cluster(kv, name) for name in names]

    views = use_library(session, read)
    if not views and not as_json:
        print("No cluster shares its slots among runs. A run joins one with the setting cluster=NAME.")
    if as_json:
        print(json.dumps([view.to_plain() for view in views]))
        return
    for number, view in enumerate(views):
        print("\n" if number else "", end="")
        run_view.queue(view)


def timeline(invocation: Invocation) -> None:
    """Print what happened in one run."""
    run_id = invocation.argument("run timeline needs the id of one run")
    session, as_json = open_library(invocation)

    async def read(kv: Client) -> RunHistory:
        return await read_progress(kv, await read_history(kv, run_id))

    history = use_library(session, read)
    if as_json:
        print(json.dumps(history.to_plain()))
    else:
        run_view.timeline(history)


def watch(invocation: Invocation) -> None:
    """Print what happens in one run, as it happens."""
    run_id = invocation.argument("run watch needs the id of one run")
    session, as_json = open_library(invocation)

    async def print_changes(kv: Client) -> None:
        narrator = run_view.Narrator()
        async for change, fold in follow(kv, run_id):
            for line in narrator.lines(change, fold):
                if as_json:
                    print(json.dumps(line.to_plain()), flush=True)
                else:
                    run_view.emit(line)

    async def until_interrupted(kv: Client) -> None:
        printing = asyncio.ensure_future(print_changes(kv))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, printing.cancel)
        try:
            await printing
        except asyncio.CancelledError:
            return

    use_library(session, until_interrupted)


# -- deleting -------------------------------------------------------------------------------------------------------
#
# ``run delete``: what is known of runs is forgotten, of one by its id or of all that have ended.
#
#     raftkvctl run delete job7
#     raftkvctl run delete --ended --older-than 168h --dry-run
#
# A run has ended when it is closed and has no node. A run without nodes that was never closed may go on, as after a
# power
# cut: it stays until a user names it.

PARTS: Final = ("boot/", "deny/", "fault/", "node/", "store/", "strike/", "sync/")
"""What a run has besides ``arbiter``, ``round`` and ``state``; deleted one by one, for below the same prefix there may
be other runs (``jobs/a`` below ``jobs``)."""
WINDOW: Final = 16
"""Runs that are deleted side by side."""
_HOROVOD_GENERATION: Final = re.compile(r"(\d{12}/)(?:key|done)/")


def delete(invocation: Invocation) -> None:
    """Delete everything that is known of one run, or of all that have ended."""
    if invocation["ended"]:
        _delete_ended(invocation)
        return
    for flag in ("dry-run", "older-than"):
        if flag in invocation.changed:
            raise CommandError(f"--{flag} goes with --ended, which finds the runs to delete", BAD_ARGUMENTS)
    run_id = invocation.argument("run delete needs the id of one run, or --ended")
    session, as_json = open_library(invocation)

    async def alive(kv: Client) -> int:
        keys = RunKeys(check_run_id(run_id))
        if not len(await kv.range(*keys.record)) and not await kv.count(keys.nodes, prefix=True):
            raise UnknownRun(run_id)
        return await kv.count(keys.nodes, prefix=True)

    async def forget(kv: Client) -> int:
        # Each node that comes makes sure that there is an arbiter: without one, none has come since ``alive`` looked.
        deleted = await _delete(kv, run_id, [] if invocation["force"] else [version(RunKeys(run_id).arbiter) == 0])
        if deleted is None:
            raise CommandError(_in_use(run_id, await kv.count(RunKeys(run_id).nodes, prefix=True)), ERROR)
        return deleted

    nodes = use_library(session, alive)
    if nodes and not invocation["force"]:
        raise CommandError(_in_use(run_id, nodes), ERROR)
    present = f", in which {nodes} nodes are alive," if nodes else ""
    if not _is_confirmed(invocation, f"Delete run {run_id!r}{present} with its generations and faults?"):
        raise CommandError(f"run {run_id!r} was not deleted", ERROR)
    deleted = use_library(session, forget)
    told = f"run {run_id!r} is deleted: {count(deleted, 'key')}"
    print(json.dumps({"run": run_id, "deleted": deleted}) if as_json else told)


def _in_use(run_id: str, nodes: int) -> str:
    are = "1 node is" if nodes == 1 else f"{nodes} nodes are"
    return f"{are} alive in run {run_id!r}: end them first, or give --force"


def _is_confirmed(invocation: Invocation, question: str) -> bool:
    if invocation["yes"]:
        return True
    if not sys.stdin.isatty():
        raise CommandError("there is no terminal to confirm it on: give --yes", BAD_ARGUMENTS)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# ---- all that have ended


def _delete_ended(invocation: Invocation) -> None:
    if invocation.arguments or invocation["force"]:
        text = "run delete --ended takes no id and no --force: it deletes the runs that are closed and have no nodes"
        raise CommandError(text, BAD_ARGUMENTS)
    if invocation["older-than"] < 0:
        raise CommandError(f"--older-than must not be negative: {invocation['older-than']:g}s", BAD_ARGUMENTS)
    session, as_json = open_library(invocation)
    runs, dry_run = use_library(session, list_runs), invocation["dry-run"]
    ended = [one for one in runs if _has_ended(one, invocation["older-than"])]
    gone: list[int | None] = []
    if ended and not dry_run:
        question = f"Delete {count(len(ended), 'run')} of {len(runs)}, with generations and faults: all that have ended"
        if not _is_confirmed(invocation, f"{question}?"):
            raise CommandError("no run was deleted", ERROR)
        with progress_bar("deleting runs", ("MofNComplete",), len(ended), hidden=as_json) as update:

            async def forget(kv: Client, summary: RunSummary) -> int | None:
                state = mod_revision(RunKeys(summary.run_id).state) == summary.revision
                deleted = await _delete(kv, summary.run_id, [state, version(RunKeys(summary.run_id).arbiter) == 0])
                update(advance=1)
                return deleted

            gone = use_library(session, lambda kv: pipelined(lambda one: forget(kv, one), ended, WINDOW))
    _tell_ended(runs, ended, gone, as_json=as_json, dry_run=dry_run)


def _has_ended(run: RunSummary, age_s: float) -> bool:
    is_over = run.state is not None and run.state.phase == CLOSED and not run.nodes
    return is_over and run.state is not None and run.state.time <= time.time() - age_s


def _tell_ended(
    runs: Sequence[RunSummary],
    ended: Sequence[RunSummary],
    gone: Sequence[int | None],
    *,
    as_json: bool,
    dry_run: bool,
) -> None:
    again = [one.run_id for one, keys in zip(ended, gone, strict=False) if keys is None]
    deleted, keys = [one.run_id for one in ended if one.run_id not in again], sum(found or 0 for found in gone)
    dead = sum(not one.nodes and (one.state is None or one.state.phase != CLOSED) for one in runs)
    if as_json:
        print(json.dumps({"dry_run": dry_run, "deleted": deleted, "keys": keys, "begun_again": again, "dead": dead}))
        return
    if dry_run and ended:
        out(run_view.runs_table(ended))
        print()
    verb = "would be deleted" if dry_run else "deleted"
    size = "" if dry_run else f": {count(keys, 'key')}"
    print(f"{len(deleted)} of {count(len(runs), 'run')} {verb}{size}")
    for run_id in again:
        print(f"run {run_id!r} has begun again meanwhile, and stays")
    if dead:
        are = "1 run that was never closed stays" if dead == 1 else f"{dead} runs that were never closed stay"
        print(f"{are}, though no node is there: name each to delete it")


# ---- the keys


async def _delete(kv: Client, run_id: str, conditions: Sequence[Compare]) -> int | None:
    """Delete the keys of a run, and tell how many there were; None: a condition does not hold."""
    keys = RunKeys(run_id)
    operations = [Delete(keys.base + part, prefix=True) for part in PARTS]
    operations += [Delete(key) for key in (keys.arbiter, keys.round, keys.state)]
    done = await kv.txn().when(*conditions).then(*operations).commit()
    if not done.succeeded:
        return None
    deleted: int = sum(result.deleted for result in done.results)
    return deleted + await _delete_horovod(kv, run_id)


async def _delete_horovod(kv: Client, run_id: str) -> int:
    """Delete what workers of Horovod have left: the next run of that id comes to the same generations again."""
    root = f"{HOROVOD_ROOT}{run_id}/"
    generations, deleted = set(), 0
    try:
        async for item in kv.scan(root, prefix=True, keys_only=True):
            if found := _HOROVOD_GENERATION.match(item.key.decode(errors="replace"), len(root)):
                generations.add(found[1])
        for generation in generations:
            deleted += (await kv.delete(f"{root}{generation}", prefix=True)).deleted
    except PermissionDeniedError:
        return deleted  # a user of runs need not be one of Horovod's
    return deleted
