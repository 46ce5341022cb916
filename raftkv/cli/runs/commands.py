"""``run``: training runs, seen from outside: which there are, who is in them, what happened, what happens.

Owns the commands' words, their failures and the choice between tables, plain text and JSON. Where the facts come from
is ``raftkv.training.history.reader``; how they look is ``runs.view``; what a node waits for is ``runs.facts``.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from typing import Final

from raftkv.cli.exits import BAD_ARGUMENTS, ERROR, CommandError
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.library import open_library, use_library
from raftkv.cli.output.rows import count, out
from raftkv.cli.runs import view as run_view
from raftkv.cli.runs.facts import Facts, read_facts
from raftkv.client.kv.compares import mod_revision, version
from raftkv.client.kv.operations import Delete
from raftkv.client.library import Client
from raftkv.errors import PermissionDeniedError
from raftkv.training.history.progress import read_progress
from raftkv.training.history.reader import UnknownRun, follow, list_runs, read_history
from raftkv.training.history.timeline import RunHistory
from raftkv.training.horovod.scopes import ROOT as HOROVOD_ROOT
from raftkv.training.keys import RunKeys, check_run_id
from raftkv.training.scheduling.view import ClusterView, describe_cluster, list_clusters

PARTS: Final = ("boot/", "deny/", "fault/", "node/", "store/", "strike/", "sync/")
"""What a run has besides ``arbiter``, ``round`` and ``state``; deleted one by one, for below the same prefix there may
be other runs (``jobs/a`` below ``jobs``)."""


_HOROVOD_GENERATION: Final = re.compile(r"(\d{12}/)(?:key|done)/")


def list_all(invocation: Invocation) -> None:
    """Print every run."""
    if invocation.arguments:
        raise CommandError("run list accepts no arguments", BAD_ARGUMENTS)
    session, as_json = open_library(invocation)
    runs = use_library(session, list_runs)
    if as_json:
        print(json.dumps([run_view.summary_to_plain(one) for one in runs]))
    else:
        out(run_view.runs_table(runs))


def show(invocation: Invocation) -> None:
    """Print one run as it is."""
    run_id = _run_id(invocation, "show")
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
    run_id = _run_id(invocation, "timeline")
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
    run_id = _run_id(invocation, "watch")
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


def delete(invocation: Invocation) -> None:
    """Delete everything that is known of one run."""
    run_id = _run_id(invocation, "delete")
    session, as_json = open_library(invocation)
    force = invocation["force"]

    async def alive(kv: Client) -> int:
        keys = RunKeys(check_run_id(run_id))
        if not len(await kv.range(*keys.record)) and not await kv.count(keys.nodes, prefix=True):
            raise UnknownRun(run_id)
        return await kv.count(keys.nodes, prefix=True)

    nodes = use_library(session, alive)
    if nodes and not force:
        raise CommandError(_in_use(run_id, nodes), ERROR)
    if not invocation["yes"] and not _confirmed(run_id, nodes):
        raise CommandError(f"run {run_id!r} was not deleted", ERROR)
    deleted = use_library(session, lambda kv: _delete(kv, run_id, force))
    told = f"run {run_id!r} is deleted: {count(deleted, 'key')}"
    print(json.dumps({"run": run_id, "deleted": deleted}) if as_json else told)


async def _delete(kv: Client, run_id: str, force: bool) -> int:
    keys = RunKeys(run_id)
    operations = [Delete(keys.base + part, prefix=True) for part in PARTS]
    operations += [Delete(key) for key in (keys.arbiter, keys.round, keys.state)]
    # Whoever is there has seen to it that there is an arbiter; so none came since we have looked.
    conditions = [] if force else [version(keys.arbiter) == 0, mod_revision(keys.arbiter) == 0]
    done = await kv.txn().when(*conditions).then(*operations).commit()
    if not done.succeeded:
        raise CommandError(_in_use(run_id, await kv.count(keys.nodes, prefix=True)), ERROR)
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


def _in_use(run_id: str, nodes: int) -> str:
    are = "1 node is" if nodes == 1 else f"{nodes} nodes are"
    return f"{are} alive in run {run_id!r}: end them first, or give --force"


def _confirmed(run_id: str, nodes: int) -> bool:
    if not sys.stdin.isatty():
        raise CommandError("nobody is there to confirm it: give --yes", BAD_ARGUMENTS)
    alive = f", in which {nodes} nodes are alive," if nodes else ""
    print(f"Delete run {run_id!r}{alive} with its generations and faults? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _run_id(invocation: Invocation, word: str) -> str:
    if len(invocation.arguments) != 1:
        raise CommandError(f"run {word} needs the id of one run", BAD_ARGUMENTS)
    return invocation.arguments[0]
