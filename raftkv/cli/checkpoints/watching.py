"""``checkpoint watch``: each commit once, resumable from the revision that it prints."""

from __future__ import annotations

import asyncio
import signal

from raftkv.checkpoint.find.commits import Commit, Commits
from raftkv.checkpoint.registry import Registry
from raftkv.cli.checkpoints import view
from raftkv.cli.checkpoints.frame import Call
from raftkv.cli.ctl.session import remark
from raftkv.cli.exits import BAD_ARGUMENTS, CommandError
from raftkv.cli.goflags.command import Invocation


def watch(invocation: Invocation) -> None:
    """Print commits until SIGINT or SIGTERM arrives, or as many as wanted have come."""
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
        view.print_json({**place, "checkpoint": commit.checkpoint})
    else:
        print(view.commit_line(commit.checkpoint, commit.revision), flush=True)
