"""The members of one program, their figures while they are under attack, and whether they agree afterwards."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from bench.hostile.attacker import UserChannel
from bench.stage import QUOTA as FLAGS
from bench.stage import Worker, memory_mib, pids_of
from raftkv.cli.ctl import top
from raftkv.pb import rpc_pb2
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.status import RpcError
from tests.procs import ETCD, RAFTKV, Cluster, Member

SIZE: Final = 3
SAMPLE_INTERVAL_S: Final = 0.1
CALL_TIMEOUT_S: Final = 60.0
PROGRAMS: Final = {"raftkv": RAFTKV.with_flags("--log-level", "warn", *FLAGS), "etcd": ETCD.with_flags(*FLAGS)}
_LONG_TURN: Final = re.compile(
    r"a turn of the event loop took \d+ ms, (\d+) ms without waits for a processor, in ([^;\"\n]*)"
)


@contextmanager
def members(name: str) -> Iterator[Cluster]:
    """Three members of a program; as an error is on its way, their logs go with it."""
    with Cluster(PROGRAMS[name], SIZE) as cluster:
        yield cluster


def metrics_of(member: Member) -> dict[str, float]:
    """Sums of all metrics of a member by name; empty if it does not answer. A scrape begins the longest turn anew."""
    try:
        return top.fetch(member.endpoint, None, CALL_TIMEOUT_S)
    except OSError:
        return {}


def log_bytes(member: Member) -> int:
    """How much a member has logged so far."""
    return member.log_path.stat().st_size if member.log_path.exists() else 0


def long_turns(member: Member, since_bytes: int = 0) -> list[tuple[int, str]]:
    """Turns that a member of raftkv warned of, from a place in its log on: milliseconds of its own, and what ran."""
    text = member.log_path.read_bytes()[since_bytes:].decode("utf-8", errors="replace")
    return [(int(found[1]), found[2]) for found in _LONG_TURN.finditer(text)]


@asynccontextmanager
async def sampled_mib(cluster: Cluster) -> AsyncIterator[list[list[float]]]:
    """Note the members' own memory while the block runs."""
    samples: list[list[float]] = []

    async def sample() -> None:
        while True:
            with suppress(OSError, KeyError):  # a member that has died has no memory
                samples.append([memory_mib(pid)["RssAnon"] for pid in pids_of(cluster)])
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    task = asyncio.create_task(sample())
    try:
        yield samples
    finally:
        task.cancel()


class HonestProcess(Worker):
    """The honest client as a process; ``mark`` and ``tell`` frame what is measured."""

    def __init__(
        self, endpoints: list[str], *, streams: bool = False, puts_per_s: float | None = None, token: str = ""
    ) -> None:
        rate = () if puts_per_s is None else (f"--puts-per-second={puts_per_s:g}",)
        more = ("--streams",) if streams else ()
        super().__init__("bench.hostile.honest", ",".join(endpoints), f"--token={token}", *rate, *more)

    def mark(self) -> None:
        """Begin a window."""
        self.say("mark")

    async def tell(self) -> dict[str, Any]:
        """Return what the window shows."""
        return await asyncio.to_thread(self.ask, "tell")


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
