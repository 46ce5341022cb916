"""A torchft job of real processes: replicas with torchft's own manager, and the lighthouse they go to.

    with TorchftJob() as job:
        address = job.lighthouse(cluster.endpoints, "--min-replicas=2")
        a, b = job.replica("a", address), job.replica("b", address)
        a.wait(lambda step: step.replicas == 2)

A replica is ``examples/torchft_ddp.py`` and trains until it is killed; each step that it has committed is a ``Step``.
All processes end with the block.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.foreign.environments import interpreter

ROOT = Path(__file__).resolve().parents[2]
REPLICA = ROOT / "examples" / "torchft_ddp.py"
ENDLESS = str(10**9)
WAIT_S = 120.0


@dataclass(frozen=True)
class Step:
    """One step that a replica has committed; ``at``: by the machine's monotonic clock, seconds."""

    step: int
    quorum_id: int
    replicas: int
    at: float


class Replica:
    """One replica and what it has reported."""

    def __init__(self, name: str, lighthouse: str, log: Path) -> None:
        self.steps: list[Step] = []
        self._log = log
        self._over = False
        self._changed = threading.Condition()
        with log.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                [str(interpreter("torchft")), str(REPLICA), ENDLESS],
                env={**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse, "REPLICA": name, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            try:
                step = Step(**json.loads(line))
            except ValueError:
                continue  # a line that was cut off by its death
            with self._changed:
                self.steps.append(step)
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait(self, condition: Callable[[Step], bool], *, after: int = -1) -> Step:
        """The first step behind number ``after`` of which the condition holds; waits for it."""
        seen = 0
        with self._changed:
            while True:
                for step in self.steps[seen:]:
                    if step.step > after and condition(step):
                        return step
                seen = len(self.steps)
                if self._over or not self._changed.wait(WAIT_S):
                    raise AssertionError(f"no such step; the last was {self.steps[-1:]}\n{self.last_words()}")

    def last_words(self) -> str:
        """The end of what it has said to stderr."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-3000:]

    @property
    def last(self) -> Step:
        """The last step."""
        return self.steps[-1]

    def kill(self) -> None:
        """SIGKILL; returns when it is gone and all that it reported is read."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()


class TorchftJob:
    """See the module."""

    def __init__(self) -> None:
        self._replicas: list[Replica] = []
        self._lighthouses: list[tuple[str, subprocess.Popen[str]]] = []
        self._logs = tempfile.TemporaryDirectory(prefix="torchft-")

    def lighthouse(self, endpoints: Sequence[str], *flags: str) -> str:
        """Start a daemon of raftkv's; returns its address."""
        command = [sys.executable, "-m", "raftkv", "torchft-lighthouse", "--listen=127.0.0.1:0", *flags]
        return self._start([*command, f"--endpoints={','.join(endpoints)}"])

    def _start(self, command: list[str]) -> str:
        log = Path(self._logs.name, f"lighthouse-{len(self._lighthouses)}")
        with log.open("w", encoding="utf-8") as errors:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        line = process.stdout.readline() if process.stdout is not None else ""
        self._lighthouses.append((line.split()[-1] if line.strip() else "", process))
        if not line.strip():
            raise AssertionError(f"the lighthouse did not start: {log.read_text(encoding='utf-8')[-3000:]}")
        return line.split()[-1]

    def replica(self, name: str, lighthouse: str) -> Replica:
        """Start one."""
        self._replicas.append(Replica(name, lighthouse, Path(self._logs.name, f"replica-{len(self._replicas)}")))
        return self._replicas[-1]

    def kill_lighthouse(self, address: str) -> None:
        """SIGKILL."""
        next(process for at, process in self._lighthouses if at == address).kill()

    def kill_all(self) -> None:
        """Replicas and lighthouses."""
        for replica in self._replicas:
            replica.kill()
        for _, process in self._lighthouses:
            process.kill()
            process.communicate()
        self._replicas.clear()
        self._lighthouses.clear()

    def __enter__(self) -> TorchftJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_all()
        self._logs.cleanup()
