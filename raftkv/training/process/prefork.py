"""Spare workers, started in advance, that have already imported slow modules: ``--prefork=torch``.

A spare is a new Python process that has imported modules and waits. It becomes a worker when it receives its
environment and its output descriptors, and then runs the script as ``python SCRIPT`` would. It does not fork after the
imports, so modules that use threads or CUDA work.

::

    spare = Spare.plan(["python", "-u", "train.py", "--lr=1"], ["torch"])   # ValueError: no script of Python
    process = subprocess.Popen(spare.command, pass_fds=spare.pass_fds, ...)
    spare.started()
    ...
    if spare.hand_over(environment, (stdout, stderr)):      # False: it has ended; start the command itself
        ...                                                 # process is the worker now

Invariants:

1. A spare ends with its agent, because it waits on a socket whose other end only the agent holds.
2. If a module cannot be imported, the spare prints one line to stderr and continues; the script handles the error.
3. The worker's ``__main__``, ``sys.argv`` and ``sys.path`` are those of the command.

Differences from the plain command: environment variables that the modules read during import have the values of the
previous generation (ranks are not set), and ``ps`` shows this file before the script.

This file is also run by path, and then imports nothing of raftkv.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

PREPARE_AFTER_S: Final = 5.0
"""Delay between the start of workers and that of the next spares, so that workers get the processors first."""
_OPTIONS_ALONE: Final = frozenset("bBdEIOPqsSuvx")
_OPTIONS_WITH_VALUE: Final = frozenset("WX")
_OF_ONE_GENERATION: Final = frozenset((
    "RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spare:
    """A process that waits to become a worker; the caller starts it.

    Attributes:
        command: command line that starts it.
        pass_fds: descriptors that it inherits.
    """

    command: tuple[str, ...]
    pass_fds: tuple[int, ...]
    _ours: socket.socket
    _its: socket.socket

    @classmethod
    def plan(cls, command: Sequence[str], modules: Sequence[str]) -> Spare:
        """Make the command line and the socket of a spare.

        Raises:
            ValueError: the command is not ``python [OPTIONS] SCRIPT`` or ``python [OPTIONS] -m MODULE``.
        """
        options = count_options(command)
        ours, its = socket.socketpair()
        words = (__file__, str(its.fileno()), ",".join(modules), "--")
        return cls((*command[:options], *words, *command[options:]), (its.fileno(),), ours, its)

    def started(self) -> None:
        """Close our copy of the process' end of the socket, after the process was started."""
        self._its.close()

    def hand_over(self, environment: Mapping[str, str], outputs: Sequence[int]) -> bool:
        """Make the spare a worker; False: it has ended. If it is still importing, the worker starts after that.

        Arguments:
            environment: complete environment of the worker.
            outputs: descriptors that replace its stdout and stderr; empty: it keeps its own.
        """
        with self._ours, tempfile.TemporaryFile() as file:  # a file takes any size at once, a socket does not
            file.write(json.dumps(dict(environment)).encode())
            file.flush()
            try:
                socket.send_fds(self._ours, [b"!"], [file.fileno(), *outputs])
            except OSError:
                return False
        return True

    def close(self) -> None:
        """End a spare that is not needed."""
        self._its.close()
        self._ours.close()


def of_no_generation(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment without the variables of its generation, so that a spare is not taken for a
    worker."""
    return {name: value for name, value in environment.items() if name not in _OF_ONE_GENERATION}


def count_options(command: Sequence[str]) -> int:
    """Count the words before the script, or before ``-m``: the interpreter and its options.

    Raises:
        ValueError: there is no script.
    """
    words = list(command)
    if words and os.path.basename(words[0]).startswith("python"):
        at = 1
        while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "-m"):
            letters = words[at][1:]
            if not letters or not set(letters[:1]) <= _OPTIONS_ALONE | _OPTIONS_WITH_VALUE:
                break
            if letters[0] in _OPTIONS_WITH_VALUE:
                at += 2 if len(letters) == 1 else 1
                continue
            if not set(letters) <= _OPTIONS_ALONE:
                break
            at += 1
        if at + 1 < len(words) and words[at] == "-m":
            return at
        if at < len(words) and not words[at].startswith("-") and os.path.isfile(words[at]):
            return at
    raise ValueError("the command must be: python [OPTIONS] SCRIPT [ARGUMENTS], or python [OPTIONS] -m MODULE")


# ---- in the spare


def main(descriptor: int, modules: Sequence[str], words: list[str]) -> None:
    """Import the modules, wait, and become the worker.

    Arguments:
        descriptor: socket to the agent.
        modules: modules to import.
        words: the script and its arguments, or ``-m``, a module and its arguments.
    """
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0]))
    with socket.socket(fileno=descriptor) as agent:
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception as error:
                print(f"raftkv: --prefork: {name} cannot be imported: {error}", file=sys.stderr, flush=True)
        _become_worker(agent)
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def _become_worker(agent: socket.socket) -> None:
    try:
        message, descriptors, _, _ = socket.recv_fds(agent, 1, 3)
    except (OSError, KeyboardInterrupt):
        message, descriptors = b"", []
    if not message:
        os._exit(0)  # the agent has ended, or does not need this spare
    with open(descriptors[0], "rb") as file:
        file.seek(0)
        environment = json.loads(file.read())
    for number, output in enumerate(descriptors[1:], start=1):
        os.dup2(output, number)
        os.close(output)
    os.environ.clear()
    os.environ.update(environment)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","), sys.argv[4:])
