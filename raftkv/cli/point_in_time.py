"""The flags that say to which point in time a restore goes, and what they mean."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raftkv.cli.exits import BAD_ARGUMENTS, CommandError
from raftkv.cli.goflags.pflag import INT, Flag

if TYPE_CHECKING:
    from raftkv.offline.database import Forward
    from raftkv.offline.replay import Replayed, Target

FLAGS = (
    Flag("wal-archive-dir", usage="archived segments of the log: go on from the snapshot by their entries", ours=True),
    Flag("to-revision", INT, usage="stop at this revision; 0: go on to the end of the archive", ours=True),
    Flag("to-time", usage="stop at this time, as in 2026-01-31T12:00:00Z (to a second)", ours=True),
)


def target_of(values: Mapping[str, Any]) -> Target | None:
    """Return where a restore stops that goes on from its snapshot; None: it does not go on.

    Raises:
        CommandError: flags that exclude each other, or cannot be read.
    """
    archive, revision, text = values["wal-archive-dir"], values["to-revision"], values["to-time"]
    if not archive:
        if revision or text:
            raise CommandError("--to-revision and --to-time need --wal-archive-dir", BAD_ARGUMENTS)
        return None
    if revision and text:
        raise CommandError("--to-revision and --to-time exclude each other", BAD_ARGUMENTS)
    if revision < 0:
        raise CommandError(f"--to-revision must not be negative (set to {revision})", BAD_ARGUMENTS)
    from raftkv.offline.replay import Target, parse_time

    try:
        time_s = parse_time(text) if text else None
    except ValueError as error:
        raise CommandError(f"--to-time must be a time such as 2026-01-31T12:00:00Z: {error}", BAD_ARGUMENTS) from None
    return Target(revision or None, time_s)


def forward_of(values: Mapping[str, Any]) -> Forward | None:
    """Return what brings a snapshot forward to where the flags say; None: it stays as it is.

    Raises:
        CommandError: as ``target_of``.
    """
    target = target_of(values)
    if target is None:
        return None
    from raftkv.offline.replay import forward_to

    return forward_to(Path(values["wal-archive-dir"]), target, _tell)


def _tell(replayed: Replayed) -> None:
    if replayed.remark:
        print(f"raftkv: {replayed.remark}: restored to revision {replayed.revision}", file=sys.stderr)
