"""The common parts of ``raftkvctl`` and ``raftkvutl``: ``version``, ``completion`` and the commands for snapshot files;
also the flags of a point-in-time restore, which ``raftkv backup restore`` has too.

The command trees of both programs (``cli.ctl.tree``, ``cli.utl.tree``) import this module, so it must not import code
that talks to a cluster or reads a database.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raftkv import __version__
from raftkv.cli.command import Branch, Invocation
from raftkv.cli.pflag import BOOL, INT, UINT, Flag
from raftkv.cli.program import API_VERSION, BAD_ARGUMENTS, ERROR, CommandError, leave, refused

if TYPE_CHECKING:
    from raftkv.offline.archive import Replayed, Target
    from raftkv.offline.database import Forward


POINT_IN_TIME_FLAGS = (
    Flag("wal-archive-dir", usage="directory of archived log segments to replay after the snapshot", ours=True),
    Flag("to-revision", INT, usage="last revision to replay; 0 means to the end of the archive", ours=True),
    Flag("to-time", usage="time to stop at, to a second, as 2026-01-31T12:00:00Z", ours=True),
)


def target_of(values: Mapping[str, Any]) -> Target | None:
    """Return the point in time at which a restore from a snapshot and the log stops; None: restore only the snapshot.

    Raises:
        CommandError: flags exclude each other, or are malformed.
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
    from raftkv.offline.archive import Target, parse_time

    with refused(ValueError, BAD_ARGUMENTS, "--to-time must be a time such as 2026-01-31T12:00:00Z: {}"):
        time_s = parse_time(text) if text else None
    return Target(revision or None, time_s)


def forward_of(values: Mapping[str, Any]) -> Forward | None:
    """Return the log replay that the flags request after the snapshot; None: no replay.

    Raises:
        CommandError: as for ``target_of``.
    """
    target = target_of(values)
    if target is None:
        return None
    from raftkv.offline.archive import forward_to

    return forward_to(Path(values["wal-archive-dir"]), target, _tell)


def _tell(replayed: Replayed) -> None:
    if replayed.remark:
        print(f"raftkv: {replayed.remark}: restored to revision {replayed.revision}", file=sys.stderr)


FORMATS = ("simple", "fields", "json", "protobuf", "table")
FORMATS_FLAG = Flag("write-out", default="simple", usage="output format", short="w", choices=FORMATS)
SHELLS = ("bash", "zsh", "fish", "powershell")
_POWERSHELL = """Register-ArgumentCompleter -Native -CommandName %(name)s -ScriptBlock {
    param($word, $commandAst, $cursor)
    $position = $commandAst.CommandElements.Count
    if ($word) { $position -= 1 }
    $env:%(variable)s = 'bash_complete'
    $env:COMP_WORDS = $commandAst.ToString()
    $env:COMP_CWORD = $position
    try {
        %(name)s | ForEach-Object {
            $kind, $value = $_ -split ',', 2
            [System.Management.Automation.CompletionResult]::new($value, $value, 'ParameterValue', $value)
        }
    } finally {
        Remove-Item Env:%(variable)s, Env:COMP_WORDS, Env:COMP_CWORD
    }
}"""
"""click has no script for PowerShell. PowerShell passes the words as bash does, and understands bash's answers."""


def add_about_commands(root: Branch) -> None:
    """Add ``version`` and ``completion`` to a program."""
    shells, place = "|".join(SHELLS), f"bash > /etc/bash_completion.d/{root.name}"
    root.leaf("version", "", "Print the version", run="common:print_version")
    root.leaf("completion", shells, "Print a completion script for a shell", run="common:print_completion").like(place)


def print_version(invocation: Invocation) -> None:
    """Print the version of this program and of the API."""
    invocation.refuse_surplus()
    print(f"{invocation.program.name} version: {__version__}")
    print(f"API version: {API_VERSION}")


def print_completion(invocation: Invocation) -> None:
    """Print a script with which a shell completes the program's commands and flags.

    Raises:
        CommandError: not exactly one argument, or an unknown shell.
    """
    from click import shell_completion

    shell = invocation.argument(f"accepts 1 arg(s), received {len(invocation.arguments)}", ERROR)
    if shell not in SHELLS:
        raise CommandError(f'unknown shell "{shell}": one of {", ".join(SHELLS)}', BAD_ARGUMENTS)
    name = invocation.program.name or ""
    variable = _completion_variable(name)
    if shell == "powershell":
        print(_POWERSHELL % {"name": name, "variable": variable})
        return
    kind = shell_completion.get_completion_class(shell)
    if kind is None:
        raise CommandError(f"no completion for {shell}")
    script = kind(invocation.program, {}, name, variable)
    print(script.source_template % script.source_vars())


def run_program(tree: Branch, run: Callable[[], int]) -> int:
    """Run a program to its end, or answer a shell's request for completions.

    Arguments:
        tree: command tree of the program.
        run: function that runs a command and returns the exit code.

    Returns:
        The exit code.
    """
    name = tree.name or ""
    if instruction := os.environ.get(_completion_variable(name)):
        from click.shell_completion import shell_complete

        return shell_complete(tree, {}, name, _completion_variable(name), instruction)
    return leave(run, lambda text: print(f"Error: {text}", file=sys.stderr), name)


def _completion_variable(name: str) -> str:
    """Return the environment variable with which a shell requests completions from a program."""
    return f"_{name.upper()}_COMPLETE"


RESTORE_FLAGS = (
    Flag("data-dir", usage="directory to make; it must not exist or be empty (default NAME.etcd)"),
    Flag("wal-dir", usage="directory to make for the log (default inside --data-dir)"),
    Flag("name", default="default", usage="name of this member"),
    Flag("initial-cluster", default="default=http://localhost:2380", usage="members of the new cluster"),
    Flag("initial-cluster-token", default="etcd-cluster", usage="token of the new cluster"),
    Flag("initial-advertise-peer-urls", default="http://localhost:2380", usage="peer URLs of this member"),
    Flag("skip-hash-check", BOOL, usage="accept a file without its SHA-256, copied from a data directory of etcd"),
    Flag("bump-revision", UINT, usage="raise the revision of the file by this number"),
    Flag("mark-compacted", BOOL, usage="compact all history; required with --bump-revision, refused without"),
    Flag("initial-memory-map-size", UINT, usage="accepted for etcdutl's scripts, and ignored"),
    *POINT_IN_TIME_FLAGS,
)
_STATUS = """FILE is a snapshot that raftkvctl or etcdctl saved, or a database of etcd. The command reads all of it. The
simple format is: """
_RESTORE = """Restore every member of the new cluster from the same FILE, each with its own flags. FILE may be of
raftkv or of etcd 3.4 to 3.7. The restored data keeps users and roles."""


def add_file_commands(snapshot: Branch, columns: str, remark: str = "") -> None:
    """Add the commands for snapshot files.

    Arguments:
        snapshot: branch to add them to.
        columns: columns that ``status`` prints, in order.
        remark: text at the end of this program's help pages.
    """
    status, restore = f"{_STATUS}{columns}.{remark}", f"{_RESTORE}{remark}"
    look, make = "Check a snapshot file and print what is in it", "Make a data directory of a member"
    snapshot.leaf("status", "FILE", look, (), status).like("backup.db", "backup.db -w table")
    snapshot.leaf("restore", "FILE", make, RESTORE_FLAGS, restore, run="restore_directory").like(
        "old.db --data-dir new.etcd",
        "old.db --bump-revision 1000000 --mark-compacted",
        "old.db --wal-archive-dir archive --to-revision 900",
    )
