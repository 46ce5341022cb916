"""Two nodes of Patroni with PostgreSQL, whose state is kept in etcd or in raftkv, and how long what they do takes.

Patroni's `etcd3` speaks the JSON gateway. A story: both nodes begin, one leads and the other follows; a switchover by
patronictl; `kill -9` of everything on the node that leads, so that its lease has to end; the dead node comes back.

    python -m tests.foreign.patroni_nodes --rounds 2        # etcd and raftkv in turn, three members each; a table

PostgreSQL does not run as root: there it runs as Debian's user `postgres`, who is let read what Patroni is made of.
Every wait is for a condition; rows that both nodes had before a fault are there after it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.foreign.environments import HOME, interpreter
from tests.procs import ETCD, RAFTKV, Cluster, ProcessError, Program, data_directory, free_port, wait_for

BIN = Path("/usr/lib/postgresql/15/bin")
SCOPE = "raftkv-tests"
TTL_S = 20
"""The shortest that Patroni takes."""

LOOP_S = 1
POLL_S = 0.1
USER = "postgres"
_AS_USER = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
_READING = {"dac_read_search": 1 << 2, "dac_override": 1 << 1}
"""Capabilities that let a user read what is root's, such as an interpreter below /root; containers have one of them."""


def _words(*command: str) -> list[str]:
    """Return a command that does not run as root."""
    if os.geteuid() != 0:
        return list(command)
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    held = int(status.partition("CapEff:")[2].split()[0], 16)
    name = next((name for name, bit in _READING.items() if held & bit), None)
    reading = [] if name is None else [f"--inh-caps=+{name}", f"--ambient-caps=+{name}"]
    return [*_AS_USER, *reading, *command]


@dataclass
class Node:
    """One Patroni, and the PostgreSQL that it runs."""

    name: str
    directory: Path
    endpoints: Sequence[str]
    postgres_port: int = field(default_factory=free_port)
    rest_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def config_path(self) -> Path:
        """Its configuration: JSON, which is YAML."""
        return self.directory / f"{self.name}.yml"

    def write_config(self) -> None:
        """Write the configuration."""
        settings = {"fsync": "off", "shared_buffers": "16MB", "max_connections": 20, "wal_keep_size": "64MB"}
        config = {
            "scope": SCOPE,
            "name": self.name,
            "log": {"level": "INFO"},
            "restapi": {"listen": f"127.0.0.1:{self.rest_port}", "connect_address": f"127.0.0.1:{self.rest_port}"},
            "etcd3": {"hosts": list(self.endpoints)},
            "bootstrap": {
                "dcs": {
                    "ttl": TTL_S,
                    "loop_wait": LOOP_S,
                    "retry_timeout": 3,
                    "postgresql": {"use_pg_rewind": True, "parameters": {"wal_log_hints": "on"}},
                },
                "initdb": [{"encoding": "UTF8"}, {"auth": "trust"}, "no-sync"],
            },
            "postgresql": {
                "listen": f"127.0.0.1:{self.postgres_port}",
                "connect_address": f"127.0.0.1:{self.postgres_port}",
                "data_dir": str(self.directory / f"{self.name}.data"),
                "bin_dir": str(BIN),
                "basebackup": [{"checkpoint": "fast"}],
                "pgpass": str(self.directory / f"{self.name}.pgpass"),
                "authentication": {
                    "superuser": {"username": USER, "password": "secret"},
                    "replication": {"username": "replicator", "password": "secret"},
                },
                "pg_hba": ["host all all 127.0.0.1/32 trust", "host replication all 127.0.0.1/32 trust"],
                "parameters": {**settings, "unix_socket_directories": str(self.directory)},
            },
        }
        self.config_path.write_text(json.dumps(config), encoding="utf-8")

    def start(self) -> None:
        """Start Patroni, which starts PostgreSQL."""
        command = _words(str(interpreter("patroni")), "-m", "patroni", str(self.config_path))
        with (self.directory / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.directory, env=_environment(), start_new_session=True
            )

    def kill(self) -> None:
        """Kill Patroni, and PostgreSQL with all its processes, at once."""
        if self.process is None:
            return
        leaders = [self.process.pid, *self._postmaster()]
        for pid in leaders:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        self.process = None

    def _postmaster(self) -> list[int]:
        """The process id of PostgreSQL, which leads a group of its own."""
        path = self.directory / f"{self.name}.data" / "postmaster.pid"
        try:
            return [int(path.read_text(encoding="utf-8").splitlines()[0])]
        except (OSError, ValueError, IndexError):
            return []

    def is_role(self, role: str) -> bool:
        """Tell whether the node says that it has a role: ``primary`` or ``replica``."""
        connection = http.client.HTTPConnection("127.0.0.1", self.rest_port, timeout=2)
        try:
            connection.request("GET", f"/{role}")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def sql(self, text: str) -> str | None:
        """Return what PostgreSQL answers; None: nothing."""
        words = ["-h", "127.0.0.1", "-p", str(self.postgres_port), "-U", USER, "-d", "postgres", "-qAtc", text]
        done = subprocess.run([str(BIN / "psql"), *words], capture_output=True, text=True, check=False, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else None

    def log_tail(self) -> str:
        """Return the end of its log."""
        path = self.directory / f"{self.name}.log"
        text = path.read_text(encoding="utf-8", errors="replace")[-4000:] if path.exists() else ""
        return f"--- Patroni {self.name}\n{text}"


def _until(condition: Callable[[], bool], what: str) -> None:
    """Ask ten times a second: each time Patroni asks PostgreSQL."""
    asked_at = 0.0

    def holds() -> bool:
        nonlocal asked_at
        if time.monotonic() - asked_at < POLL_S:
            return False
        asked_at = time.monotonic()
        return condition()

    wait_for(holds, what)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PATRONI", "PG"))}
    return {**kept, "LC_ALL": "C.UTF-8"}


class Pair:
    """Two nodes of one cluster of PostgreSQL."""

    def __init__(self, directory: Path, endpoints: Sequence[str]) -> None:
        self.nodes = [Node(f"n{number}", directory, endpoints) for number in range(2)]
        self._rows = 0

    def begin(self) -> None:
        """Start both nodes; returns when one leads, the other follows, and a row has come over."""
        for node in self.nodes:
            node.write_config()
            node.start()
        _until(lambda: any(node.is_role("primary") for node in self.nodes), "a primary")
        self.must("CREATE TABLE rows (number int PRIMARY KEY)")
        self.write()

    @property
    def primary(self) -> Node:
        """The node that leads."""
        return next(node for node in self.nodes if node.is_role("primary"))

    @property
    def other(self) -> Node:
        """The node that does not."""
        return next(node for node in self.nodes if not node.is_role("primary"))

    def must(self, text: str) -> None:
        """Have the primary carry out a command."""
        _until(lambda: self.primary.sql(text) is not None, text)

    def write(self) -> None:
        """Write a row and wait until both nodes have all that were ever written."""
        self._rows += 1
        self.must(f"INSERT INTO rows VALUES ({self._rows}) ON CONFLICT DO NOTHING")
        _until(lambda: all(self.count(node) == self._rows for node in self.nodes), "the row on both nodes")

    def count(self, node: Node) -> int:
        """Return how many rows a node has; 0 if it does not answer."""
        return int(node.sql("SELECT count(*) FROM rows") or 0)

    def switch_over(self) -> None:
        """Have patronictl change the roles; returns when the new primary has written."""
        old, new = self.primary, self.other
        words = ["switchover", "--leader", old.name, "--candidate", new.name, "--force", SCOPE]
        program = [str(interpreter("patroni")), str(HOME / "patroni" / "bin" / "patronictl")]
        command = [*program, "-c", str(new.config_path), *words]
        done = subprocess.run(
            _words(*command), check=False, capture_output=True, text=True, timeout=60, env=_environment()
        )
        if done.returncode != 0 or "Successfully switched over" not in done.stdout:
            raise ProcessError(f"patronictl: {done.stdout}{done.stderr}")
        self._written_by(new)

    def kill_primary(self) -> Node:
        """Kill all of the node that leads; returns it when the other leads and has written."""
        old, new = self.primary, self.other
        old.kill()
        self._written_by(new)
        return old

    def _written_by(self, node: Node) -> None:
        _until(lambda: node.is_role("primary"), f"{node.name} leads")
        rows = self._rows
        self._rows += 1
        _until(lambda: node.sql(f"INSERT INTO rows VALUES ({rows + 1}) ON CONFLICT DO NOTHING") is not None, "a row")
        if self.count(node) != self._rows:
            raise ProcessError(f"{node.name} has {self.count(node)} rows of {self._rows}")

    def come_back(self, node: Node) -> None:
        """Start a dead node; returns when it follows and has all rows."""
        node.start()
        _until(lambda: node.is_role("replica"), f"{node.name} follows")
        self.write()

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(node.log_tail() for node in self.nodes)


@contextmanager
def pair(endpoints: Sequence[str]) -> Iterator[Pair]:
    """Two nodes that have not begun, in a directory of their own; all their processes are killed in the end."""
    directory = data_directory()
    if os.geteuid() == 0:
        entry = pwd.getpwnam(USER)
        os.chown(directory, entry.pw_uid, entry.pw_gid)
    found = Pair(directory, endpoints)
    try:
        yield found
    except BaseException as error:
        error.add_note(found.logs())
        raise
    finally:
        for node in found.nodes:
            node.kill()
        shutil.rmtree(directory, ignore_errors=True)


def play(endpoints: Sequence[str]) -> dict[str, float]:
    """Play the story on a store; return how long each part took, in seconds."""
    times: dict[str, float] = {}

    def timed(name: str, part: Callable[[], object]) -> None:
        begun = time.monotonic()
        part()
        times[name] = time.monotonic() - begun

    with pair(endpoints) as nodes:
        timed("bootstrap of two nodes", nodes.begin)
        timed("switchover", nodes.switch_over)
        nodes.write()
        dead = nodes.primary
        timed(f"failover after kill -9 (ttl {TTL_S} s)", nodes.kill_primary)
        timed("the dead node follows", lambda: nodes.come_back(dead))
    return times


def run(program: Program, size: int = 3) -> dict[str, float]:
    """Start a store and play the story on it."""
    with Cluster(program, size=size) as cluster:
        return play(cluster.endpoints)


def main(words: Sequence[str]) -> int:
    """Play what the command line asks for; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args(words)
    for number in range(asked.rounds):
        found = {program.name: run(program) for program in ((ETCD, RAFTKV), (RAFTKV, ETCD))[number % 2]}
        print(f"| round {number + 1} | etcd | raftkv |\n|---|---|---|")
        for name in found["etcd"]:
            print(f"| {name} | {found['etcd'][name]:.1f} s | {found['raftkv'][name]:.1f} s |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
