"""Tools for benches: raftkv and etcd in turn, the load generator, worker processes, values from ``/proc``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import resource
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

import raftkv
from raftkv.pb import rpc_pb2
from raftkv.rpc.client.channel import Channel
from tests import forked
from tests.procs import ETCD, RAFTKV, ROOT, Program

_QUOTA: Final = ("--quota-backend-bytes", str(8 * 1024**3))
PROGRAMS: Final = (ETCD.with_flags(*_QUOTA), RAFTKV.with_flags("--log-level", "warn", *_QUOTA))
"""Both get the same settings; logging is reduced so that it costs nothing."""
NAMES: Final = tuple(program.name for program in PROGRAMS)
PATIENCE_S: Final = 300.0
LOAD_MAX_S: Final = 3600.0
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")

T = TypeVar("T")


def in_turn(items: Iterable[T], number: int) -> list[T]:
    """Return the items in the order of a round, reversed in every other one, so that drift favours none."""
    return list(items)[:: -1 if number % 2 else 1]


def alternate(rounds: int, measure: Callable[[Program], T], names: Sequence[str] = NAMES) -> dict[str, list[T]]:
    """Measure the named programs in every round; return the results of each round by program."""
    programs = [program for program in PROGRAMS if program.name in names]
    seen: dict[str, list[T]] = {program.name: [] for program in programs}
    for number in range(rounds):
        for program in in_turn(programs, number):
            seen[program.name].append(measure(program))
    return seen


def progress(text: str) -> None:
    """Print progress, separately from the results."""
    print(text, file=sys.stderr, flush=True)


def allow_many_files() -> None:
    """Raise this process's limit on open files to the maximum."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# ---- members


def leader_of(cluster: Any) -> Any:
    """Return the leader, once there is one; of a ``Cluster`` or a ``LocalCluster``."""
    pause = threading.Event()
    with raftkv.connect(cluster.endpoints) as kv:
        while True:
            for status in kv.status():
                if status.member_id and status.member_id == status.leader_id:
                    return next(member for member in cluster.members if member.endpoint == status.endpoint)
            pause.wait(0.01)


def number_of_leader(cluster: Any) -> int:
    """Return the position of the leader among the members, from 0."""
    return int(cluster.members.index(leader_of(cluster)))


def memory_mib(pid: int | str) -> dict[str, float]:
    """Return the memory of a process: private, resident, and peak resident."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines())
    return {name: int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "VmRSS", "VmHWM")}


def processor_s(pid: int) -> float:
    """Return user and system time of a process with all its threads, to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def pids_of(cluster: Any) -> list[int]:
    """Return the process ids of the running members."""
    return [member.process.pid for member in cluster.members if member.process is not None]


# ---- load


def load(
    endpoints: Sequence[str], words: str, *flags: str, clients: int, connections: int, total: int
) -> dict[str, Any]:
    """Run ``raftkvctl bench`` and return its results.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, "-m", "raftkv.cli.ctl", "bench", *words.split(), "--json", *flags]
    command += ["--endpoints", ",".join(endpoints), "--clients", str(clients), "--conns", str(connections)]
    done = forked.run([*command, f"--total={total}"], timeout_s=LOAD_MAX_S)
    if done.returncode != 0:
        raise SystemExit(f"bench: {words}: {done.stderr.strip() or done.stdout.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def fill(endpoint: str, keys: int, puts: int = 0, *, key_bytes: int = 64, value_bytes: int = 256) -> None:
    """Put every key once, or repeatedly up to a total number of puts."""
    sizes = (f"--key-size={key_bytes}", f"--val-size={value_bytes}", f"--key-space-size={keys}")
    words = "put --sequential-keys --keep-keys"
    load([endpoint], words, *sizes, clients=500, connections=50, total=puts or keys)


async def open_watches(
    stack: AsyncExitStack, channel: Channel, keys: Sequence[bytes], **options: Any
) -> AsyncIterator[bytes]:
    """Open a stream with a watch of each key; it stays open until the stack is closed. Return it for reading events."""
    stream = await stack.enter_async_context(channel.stream("/etcdserverpb.Watch/Watch"))

    async def send() -> None:
        for key in keys:
            create = rpc_pb2.WatchCreateRequest(key=key, **options)
            await stream.send(rpc_pb2.WatchRequest(create_request=create).SerializeToString())

    sending = asyncio.create_task(send())  # concurrently: a server with unread answers stops accepting requests
    created = 0
    while created < len(keys):
        created += rpc_pb2.WatchResponse.FromString(await anext(stream)).created
    await sending
    return stream


# ---- worker processes


def tell(**facts: Any) -> None:
    """Send one line of JSON to the bench that started this process."""
    print(json.dumps(facts), flush=True)


def share_gpu(device: str) -> Any:
    """Return the GPU that all workers share over NCCL's sockets; None on the CPU.

    NCCL accepts each GPU once per host, so each worker claims to be a separate host.
    """
    if device != "cuda":
        return None
    os.environ |= {"NCCL_HOSTID": str(os.getpid()), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    import torch

    return torch.device("cuda", 0)


class Worker:
    """A module of the benches in a separate process; its input is one word per line, its output JSON lines.

    Arguments:
        module: name of the module, run with ``python -m``.
        arguments: arguments of the module.
        said: queue for its output lines, each with the worker; None: a separate queue.
    """

    def __init__(self, module: str, *arguments: str, said: queue.Queue[Any] | None = None) -> None:
        self.said: queue.Queue[Any] = queue.Queue() if said is None else said
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.said.put((self, json.loads(line)))
        self.said.put((self, None))

    def say(self, word: str) -> None:
        """Send a word to the process, which starts an action."""
        if self.process.stdin is not None:
            self.process.stdin.write(f"{word}\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return its next output line.

        Raises:
            SystemExit: the process has ended, or wrote nothing in time.
        """
        try:
            _, line = self.said.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise SystemExit(f"bench: a process did not answer within {PATIENCE_S:g} s") from None
        if line is None:
            raise SystemExit(f"bench: a process ended with {self.process.wait()}")
        return dict(line)

    def rest(self) -> list[dict[str, Any]]:
        """Return all output lines until the process ends."""
        return [dict(line) for _, line in iter(self.said.get, (self, None))]

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self._reader.join()
        with contextlib.suppress(BrokenPipeError), self.process:  # closes the pipes, and waits
            pass
