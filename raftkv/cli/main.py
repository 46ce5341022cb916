"""raftkv: the server's command line.

Chooses the command (serve is the default, as for etcd). Each failure that a user can cause is one line on standard
error, ``raftkv: ...``. Exit codes are etcd's: 0 stopped as requested, 1 could not run, 2 an invalid flag.

    raftkv --name a --listen-client-urls http://127.0.0.1:2379 ...    serve (``raftkv serve`` is the same)
    raftkv cluster --size 3                                           a local cluster in this terminal
    raftkv version
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from raftkv import __version__
from raftkv.cli.program import API_VERSION, COMMANDS, ERROR, SUCCESS, CommandError, described, imported, leave

_ABSENT = ("gateway", "grpc-proxy")

USAGE = """\
Usage:
  raftkv [serve] [flags]     run a member
  raftkv join URL [flags]    add a member to a running cluster and run it
  raftkv cluster [options]   run a cluster of several members on this machine
  raftkv certs DIRECTORY     make, renew and revoke the certificates of a small cluster
  raftkv doctor              check this machine, a data directory and a cluster, and give advice
  raftkv backup URL          back up a cluster; list, verify and restore backups
  raftkv torchft-lighthouse  serve torchft's managers from a cluster
  raftkv tcpstore-gateway    serve torch's TCPStore from a cluster
  raftkv version             print the version

Examples:
  raftkv --data-dir /var/lib/raftkv
  raftkv --name a --listen-peer-urls http://10.0.0.1:2380 --initial-advertise-peer-urls http://10.0.0.1:2380 \\
    --listen-client-urls http://10.0.0.1:2379 --advertise-client-urls http://10.0.0.1:2379 \\
    --initial-cluster a=http://10.0.0.1:2380,b=http://10.0.0.2:2380,c=http://10.0.0.3:2380 --insecure-peers
  raftkv cluster --size 3

Flags are those of etcd, with one dash or two. Each is also an environment variable: --data-dir is ETCD_DATA_DIR.
With --config-file FILE, a YAML file replaces flags and variables.
The dashboard of a running member is on its client port: http://127.0.0.1:2379/ui/"""


def main(words: Sequence[str] | None = None) -> int:
    """Run raftkv.

    Arguments:
        words: the command line after the program's name; None: this process's.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if words is None else words)
    return leave(lambda: _run(given), lambda text: print(f"raftkv: {text}", file=sys.stderr))


def _run(words: list[str]) -> int:
    if not __debug__:
        raise CommandError("assertions are off: run raftkv without python -O and PYTHONOPTIMIZE")
    command = words[0] if words and not words[0].startswith("-") else "serve"
    rest = words[1:] if words[:1] == [command] else words
    if command == "serve":
        return _serve(rest)
    if command in COMMANDS:
        return int(imported(COMMANDS[command])(rest))
    if command == "version":
        return _serve(["--version", *rest])
    if command == "help":
        return _run([*rest[:1], "--help"])
    if command in _ABSENT:
        raise CommandError(f"{command} is not implemented in raftkv")
    raise CommandError(_unknown(command))


def _unknown(command: str) -> str:
    from raftkv.cli.ctl import tree as ctl
    from raftkv.cli.utl import tree as utl

    for program, tree in (("raftkvctl", ctl.make_tree()), ("raftkvutl", utl.make_tree())):
        if command in tree.commands:
            return f"'{command}' is a command of {program}, not of raftkv"
    return f"'{command}' is not a valid flag or command; see raftkv --help"


def _serve(words: list[str]) -> int:
    from raftkv.cli.server_options import read_options, usage

    options = read_options(words, os.environ)
    if options.help:
        print(USAGE)
        print(usage())
        return SUCCESS
    if options.version:
        return _version()
    for warning in options.warnings:
        print(f"raftkv: {warning}", file=sys.stderr)
    from raftkv.server.main import run

    extend_http = None
    if options.config.horovod_run:
        from raftkv.integrations.horovod import extension

        extend_http = extension(options.config.horovod_run)
    try:
        Path(options.config.data_dir).absolute()  # fails if the current directory is gone: before ports are in use
        return run(options.config, extend_http)
    except OSError as error:
        raise CommandError(" ".join(described(error).split()), ERROR) from None


def _version() -> int:
    from raftkv.native import is_compiled

    print(f"raftkv Version: {__version__}")
    print(f"API Version: {API_VERSION}")
    print(f"Python Version: {platform.python_version()}")
    print(f"Hot Path: {'compiled' if is_compiled() else 'interpreted'}")
    return SUCCESS


if __name__ == "__main__":
    sys.exit(main())
