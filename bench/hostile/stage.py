"""The members of one program, their figures while they are under attack, and whether they agree afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.hostile.users import UserChannel
from raftkv.cli.ctl import top
from raftkv.pb import rpc_pb2
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.status import RpcError
from tests.procs import ETCD, RAFTKV, ROOT, Cluster, Member, Program

SIZE: Final = 3
SAMPLE_INTERVAL_S: Final = 0.1
CALL_TIMEOUT_S: Final = 60.0
FLAGS: Final = ("--quota-backend-bytes", str(8 * 1024**3))
PROGRAMS: Final = {"raftkv": RAFTKV.with_flags("--log-level", "warn", *FLAGS), "etcd": ETCD.with_flags(*FLAGS)}
_LONG_TURN: Final = re.compile(
    r"a turn of the event loop took \d+ ms, (\d+) ms without waits for a processor, in ([^;\"\n]*)"
)


def limited(program: Program, nofile: int | None) -> Program:
    """The program with a limit of descriptors, soft and hard."""
    if nofile is None:
        return program
    prefix = ("prlimit", f"--nofile={nofile}:{nofile}")
    return Program(program.name, (*prefix, *program.command), program.flags)


@contextmanager
def members(name: str, nofile: int | None = None) -> Iterator[Cluster]:
    """Three members of a program; as an error is on its way, their logs go with it."""
    with Cluster(limited(PROGRAMS[name], nofile), SIZE) as cluster:
        yield cluster


def metrics_of(member: Member) -> dict[str, float]:
    """Sums of all metrics of a member by name; empty if it does not answer. A scrape begins the longest turn anew."""
    try:
        return top.fetch(member.endpoint, None, CALL_TIMEOUT_S)
    except OSError:
        return {}


def anonymous_bytes(member: Member) -> int:
    """Resident memory that is the process's own; 0: it does not run."""
    try:
        status = Path(f"/proc/{_pid(member)}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def descriptors(member: Member) -> int:
    """Open descriptors; 0: it does not run."""
    try:
        return len(os.listdir(f"/proc/{_pid(member)}/fd"))
    except OSError:
        return 0


def _pid(member: Member) -> int:
    return member.process.pid if member.process is not None else 0


def log_bytes(member: Member) -> int:
    """How much a member has logged so far."""
    return member.log_path.stat().st_size if member.log_path.exists() else 0


def long_turns(member: Member, since_bytes: int = 0) -> list[tuple[int, str]]:
    """Turns that a member of raftkv warned of, from a place in its log on: milliseconds of its own, and what ran."""
    text = member.log_path.read_bytes()[since_bytes:].decode("utf-8", errors="replace")
    return [(int(found[1]), found[2]) for found in _LONG_TURN.finditer(text)]


class Sampler:
    """Memory and descriptors of all members, while the block runs."""

    def __init__(self, cluster: Cluster, interval_s: float = SAMPLE_INTERVAL_S) -> None:
        self._cluster = cluster
        self._interval_s = interval_s
        self.memory: list[list[int]] = []
        self.descriptors: list[list[int]] = []
        self._task: asyncio.Task[None] | None = None

    def sample(self) -> None:
        """Take one of each member."""
        self.memory.append([anonymous_bytes(member) for member in self._cluster.members])
        self.descriptors.append([descriptors(member) for member in self._cluster.members])

    async def _run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(self._interval_s)

    async def __aenter__(self) -> Sampler:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
        self.sample()


class HonestProcess:
    """The honest client as a process; ``mark`` and ``tell`` frame what is measured."""

    def __init__(
        self, endpoints: list[str], *, streams: bool = False, puts_per_s: float | None = None, token: str = ""
    ) -> None:
        command = [sys.executable, "-m", "bench.hostile.honest", ",".join(endpoints), f"--token={token}"]
        if puts_per_s is not None:
            command += ["--puts-per-second", f"{puts_per_s:g}"]
        self._process = subprocess.Popen(
            [*command, "--streams"] if streams else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def mark(self) -> None:
        """Begin a window."""
        self._say("mark")

    async def tell(self) -> dict[str, Any]:
        """About the window."""
        self._say("tell")
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


@dataclass
class Agreement:
    """Whether members live and hold the same; ``problem`` is empty if so."""

    problem: str = ""
    leader: int = 0
    terms: list[int] = field(default_factory=list)


async def agreement(cluster: Cluster, token: str = "") -> Agreement:
    """Ask every member, after a linearizable read of each, for its leader and the hash of one revision."""
    channels = [UserChannel(endpoint, token) for endpoint in cluster.endpoints]
    try:
        for member in cluster.members:
            if not member.is_running():
                return Agreement(f"{member.name} died: {member.log_tail()}")
        revisions = [(await _read(channel)).header.revision for channel in channels]
        statuses = [await _status(channel) for channel in channels]
        hashes = [await _hash(channel, min(revisions)) for channel in channels]
    except RpcError as error:
        return Agreement(f"a member does not serve: {error}")
    finally:
        for channel in channels:
            await channel.close()
    leaders = {status.leader for status in statuses}
    result = Agreement("", statuses[0].leader, [status.header.raft_term for status in statuses])
    if len(leaders) > 1:
        result.problem = f"members name different leaders: {sorted(leaders)}"
    elif len(set(hashes)) > 1:
        result.problem = f"members have different hashes at revision {min(revisions)}: {hashes}"
    return result


async def leader_number(cluster: Cluster) -> int:
    """Which of the members leads, from 0."""
    for number, endpoint in enumerate(cluster.endpoints):
        channel = Channel(endpoint)
        try:
            status = await _status(channel)
        finally:
            await channel.close()
        if status.leader == status.header.member_id:
            return number
    raise RuntimeError("no member leads")


async def _read(channel: Channel) -> rpc_pb2.RangeResponse:
    request = rpc_pb2.RangeRequest(key=b"honest/").SerializeToString()
    return rpc_pb2.RangeResponse.FromString(await channel.unary("/etcdserverpb.KV/Range", request, CALL_TIMEOUT_S))


async def _status(channel: Channel) -> rpc_pb2.StatusResponse:
    answer = await channel.unary("/etcdserverpb.Maintenance/Status", b"", CALL_TIMEOUT_S)
    return rpc_pb2.StatusResponse.FromString(answer)


async def _hash(channel: Channel, revision: int) -> tuple[int, int]:
    request = rpc_pb2.HashKVRequest(revision=revision).SerializeToString()
    answer = await channel.unary("/etcdserverpb.Maintenance/HashKV", request, CALL_TIMEOUT_S)
    reply = rpc_pb2.HashKVResponse.FromString(answer)
    return reply.hash, reply.compact_revision
