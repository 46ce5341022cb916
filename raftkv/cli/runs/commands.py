"""``run``: training runs, seen from outside: which there are, who is in them, what happened, what happens.

Owns the commands' words, their failures and the choice between tables, plain text and JSON. Where the facts come from
is ``raftkv.training.history``; how they look is ``runs.view``; what a node waits for is ``runs.facts``.
"""

from __future__ import annotations

import asyncio
import json
import signal

from raftkv.cli.goflags.command import Invocation
from raftkv.cli.library import open_library, use_library
from raftkv.cli.output.table import out
from raftkv.cli.program import BAD_ARGUMENTS, CommandError
from raftkv.cli.runs import view as run_view
from raftkv.cli.runs.facts import Facts, read_facts
from raftkv.client.library import Client
from raftkv.training.history import follow, list_runs, read_history, read_progress
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
