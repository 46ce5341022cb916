"""``--rdzv-conf=prefork=torch``: spare workers for the next generation, under torch's own agent.

Owns one spare (``training.process.prefork``) for each local rank. Torch's agent starts scripts through
``get_subprocess_handler``; this module installs a handler there that uses a spare instead of a new process. The first
generation starts without spares, because the command and its environment are known only then.

Functions as entry points (``elastic_launch(f)``) and commands that are not Python scripts start as usual.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from raftkv.training.process.prefork import PREPARE_AFTER_S, Spare, of_no_generation

_END_TIMEOUT_S: Final = 5.0


class Prefork:
    """The spares of one agent.

    Arguments:
        modules: modules to import.
        on_worker: called with the process id and the rank of each spare that became a worker.
    """

    def __init__(self, modules: Sequence[str], on_worker: Callable[[int, int], object]) -> None:
        self._modules = modules
        self._on_worker = on_worker
        self._spares: dict[str, tuple[Spare, subprocess.Popen[bytes], tuple[str, ...]]] = {}
        self._timers: dict[str, threading.Timer] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._torchs = api.__dict__["get_subprocess_handler"]
        prefork = self

        class Handler(SubprocessHandler):
            """Uses a spare, if there is one with the same command."""

            def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
                outputs = [file.fileno() if file else own for file, own in ((self._stdout, 1), (self._stderr, 2))]
                process = prefork._take(args, env, outputs)
                prefork._prepare_later(args, env)
                return super()._popen(args, env) if process is None else process

        api.__dict__["get_subprocess_handler"] = Handler

    def close(self) -> None:
        """End the spares, and let torch start workers as usual. Idempotent."""
        with self._lock:
            self._is_closed = True
            timers, self._timers = self._timers, {}
            spares, self._spares = self._spares, {}
        api.__dict__["get_subprocess_handler"] = self._torchs
        for timer in timers.values():
            timer.cancel()
        for spare, process, _ in spares.values():
            spare.close()
            process.kill()
            process.wait(_END_TIMEOUT_S)

    def _take(
        self, command: tuple[str, ...], environment: Mapping[str, str], outputs: Sequence[int]
    ) -> subprocess.Popen[bytes] | None:
        with self._lock:
            spare, process, meant = self._spares.pop(environment["LOCAL_RANK"], (None, None, ()))
        if spare is None or process is None:
            return None
        if meant != command or process.poll() is not None or not spare.hand_over(environment, outputs):
            spare.close()
            process.kill()
            process.wait()
            return None
        self._on_worker(process.pid, int(environment["RANK"]))
        return process

    def _prepare_later(self, command: tuple[str, ...], environment: Mapping[str, str]) -> None:
        timer = threading.Timer(PREPARE_AFTER_S, self._prepare, (command, environment))
        timer.daemon = True
        with self._lock:
            if before := self._timers.pop(environment["LOCAL_RANK"], None):
                before.cancel()
            self._timers[environment["LOCAL_RANK"]] = timer
        timer.start()

    def _prepare(self, command: tuple[str, ...], environment: Mapping[str, str]) -> None:
        try:
            spare = Spare.plan(command, self._modules)
        except ValueError as error:
            print(f"raftkv: --rdzv-conf: prefork: {error}", file=sys.stderr)
            return
        with self._lock:
            if self._is_closed or environment["LOCAL_RANK"] in self._spares:
                spare.close()
                return
            known = of_no_generation(environment)
            process = subprocess.Popen(spare.command, env=known, pass_fds=spare.pass_fds, start_new_session=True)
            spare.started()
            self._spares[environment["LOCAL_RANK"]] = (spare, process, command)
