"""One member of a throwaway cluster, for those who want to see what a program does when it is killed or paused.

Members run in the process group of the cluster's guard (see ``local.guard``), so a Ctrl-C in the terminal does not
reach them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from raftkv.client.local.process import READY_TIMEOUT_S, LocalClusterError, ServerProcess

_PACKAGE_ROOT: Final = str(Path(__file__).resolve().parents[3])

__all__ = ["LocalClusterError", "LocalMember"]


@dataclass
class LocalMember(ServerProcess):
    """One member. ``endpoint`` is where clients reach it, ``log_path`` where its log is."""

    group: int = 0

    def spawn_options(self) -> Mapping[str, Any]:
        """Implement ``ServerProcess.spawn_options``: the group is the guard's."""
        return {"cwd": self.directory, "env": _environment(), "process_group": self.group}

    @property
    def is_running(self) -> bool:
        """Whether its process is alive."""
        return self.is_alive

    def stop(self) -> None:
        """Ask it to stop and wait until it has; a member that is paused is woken first."""
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            process.wait()

    def pause(self) -> None:
        """Freeze it (SIGSTOP): its connections stay open and nobody answers.

        Raises:
            LocalClusterError: it does not run.
        """
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused member run on.

        Raises:
            LocalClusterError: it does not run.
        """
        self._signal(signal.SIGCONT)

    def restart(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """End it if it runs, start it again on the same data and ports, and wait until it serves.

        A member of three serves once it knows a leader, so restart the majority with ``start`` first.

        Raises:
            LocalClusterError: it did not start.
        """
        self.kill()
        self.start()
        self.wait_ready(timeout_s=timeout_s)

    def _signal(self, number: signal.Signals) -> None:
        if self.process is None or not self.is_alive:
            raise LocalClusterError(f"member {self.name} does not run")
        self.process.send_signal(number)


def _environment() -> dict[str, str]:
    """Return the caller's, without the settings that would reach a member (ETCD_*), and with this very raftkv first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    path = kept.get("PYTHONPATH", "")
    kept["PYTHONPATH"] = f"{_PACKAGE_ROOT}{os.pathsep}{path}" if path else _PACKAGE_ROOT
    kept.pop("PYTHONOPTIMIZE", None)
    return kept
