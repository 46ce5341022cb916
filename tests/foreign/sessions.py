"""Run one script of a foreign client against a cluster and return what it reported, step by step.

A script plays the scenarios of one area (kv, watch, lease, ...) in its own environment and tells each step as a line
of JSON (`clients/shared/report.py`). It may order the death or the restart of a member and waits until that is done.

    steps = play(SCRIPTS["etcd3-kv"], cluster, "etcd3-kv")        # {"put_and_get": [["get", "1"], ...], ...}

Invariants: a script that dies, hangs or says something else than steps and orders is an error that shows its stderr;
members that a script left dead are started again, so that the next test finds the cluster whole; what a script
started ends with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from raftkv.client.local import is_healthy
from raftkv.pb import rpc_pb2
from tests.compat.ctl import Tool
from tests.compat.wire import Wire
from tests.foreign.environments import HOME, interpreter
from tests.procs import Cluster, wait_for

CLIENTS = Path(__file__).resolve().parent / "clients"
SCRIPT_TIMEOUT_S = 120.0
Steps = list[list[Any]]


class ScriptError(Exception):
    """A script did not end as a script must; the text holds what it wrote to stderr."""


@dataclass(frozen=True)
class Script:
    """One area of one client: the command that plays it."""

    environment: str
    area: str

    @property
    def name(self) -> str:
        """Such as `etcd3-kv`."""
        return f"{self.environment}-{self.area}"

    @property
    def path(self) -> Path:
        """The file that plays it; the two etcdctl share theirs."""
        client = "etcdctl" if self.environment.startswith("etcdctl") else self.environment
        return CLIENTS / client / f"{self.area}.{'js' if client == 'node' else 'py'}"

    def command(self) -> list[str]:
        """Return the command line but the endpoints and the prefix."""
        if self.environment.startswith("etcdctl"):
            tool = Tool.debian() if self.environment == "etcdctl-3.4" else Tool.distro()
            return [sys.executable, str(self.path), str(tool.path)]
        return [str(interpreter(self.environment)), str(self.path)]


def follower_first(cluster: Cluster) -> list[str]:
    """Return the endpoints, a follower's first: clients that know one endpoint only then try the harder path."""
    with Wire(cluster.endpoints) as wire:
        statuses = [
            wire.call("etcdserverpb.Maintenance/Status", rpc_pb2.StatusRequest(), member)
            for member in range(len(cluster.endpoints))
        ]
    followers = [
        index for index, answer in enumerate(statuses) if answer.message.leader != answer.message.header.member_id
    ]
    first = followers[0] if followers else 0
    return [cluster.endpoints[(first + offset) % len(statuses)] for offset in range(len(statuses))]


def play(script: Script, cluster: Cluster, endpoints: list[str] | None = None) -> dict[str, Steps]:
    """Run `script` against `cluster`; return the steps of every scenario.

    :param endpoints: in which order; None: a follower's first.
    :raises ScriptError: it ended badly, hung, or wrote something else.
    """
    endpoints = follower_first(cluster) if endpoints is None else endpoints
    command = [*script.command(), ",".join(endpoints), script.name]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        watchdog = threading.Timer(SCRIPT_TIMEOUT_S, _end, [process])
        watchdog.start()
        try:
            with process:
                steps, ended = _listen(process, cluster, endpoints)
        finally:
            watchdog.cancel()
            watchdog.join()
            _end(process)
            _start_the_dead(cluster)
        if not ended or process.returncode != 0:
            raise ScriptError(
                f"{script.name} on {cluster.program.name} x {len(endpoints)} ended with "
                f"{process.returncode} after {steps}\n{_tail(errors)}"
            )
    return steps


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the script and what it has started, e.g. an etcdctl that waits for a lock."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def environment() -> dict[str, str]:
    """Return what programs of foreign environments find: none of this one's settings, `report`, Node.js's packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ETCDCTL_", "PYTHON"))}
    return {
        **kept,
        "ETCDCTL_API": "3",
        "GRPC_VERBOSITY": "NONE",
        "NODE_PATH": str(HOME / "node" / "node_modules"),
        "PYTHONPATH": str(CLIENTS / "shared"),
    }


def _listen(process: subprocess.Popen[str], cluster: Cluster, endpoints: list[str]) -> tuple[dict[str, Steps], bool]:
    if process.stdin is None or process.stdout is None:
        raise ScriptError("the script has no pipes")
    steps: dict[str, Steps] = {}
    for line in process.stdout:
        message = json.loads(line)
        if "end" in message:
            return steps, True
        if "order" in message:
            _obey(message["order"], cluster, endpoints[message["member"]])
            _answer(process.stdin)
        else:
            steps.setdefault(message["scenario"], []).append(message["step"])
    return steps, False


def _answer(pipe: IO[str]) -> None:
    pipe.write("done\n")
    pipe.flush()


def _obey(order: str, cluster: Cluster, endpoint: str) -> None:
    member = cluster.members[cluster.endpoints.index(endpoint)]
    if order == "kill":
        _start_the_dead(cluster)  # a scenario that failed may have left one: never two at a time
        member.kill()
    elif order == "restart":
        member.restart()
    elif order == "settle":
        others = [other for other in cluster.members if other is not member]
        wait_for(lambda: all(is_healthy(other.endpoint) for other in others), "a leader of those that are left")
    else:
        raise ScriptError(f"unknown order {order!r}")


def _start_the_dead(cluster: Cluster) -> None:
    for member in cluster.members:
        if not member.is_running():
            member.restart()


def _tail(errors: IO[bytes]) -> str:
    errors.seek(0)
    return errors.read()[-4000:].decode(errors="replace")
