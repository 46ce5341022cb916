"""Operations on a running cluster: how long they take or delay writers, beside etcd 3.5.1 in the same run.

    python -m bench.operate [--rows restart-killed,memory] [--rounds 3] [--scale 0.1] [--write]

Each round of a row starts fresh members of each program, one program after the other, in alternating order. Rows with a
writer measure its latencies: 1,000 puts per second, due at fixed times, to all members in turn, so that a stall counts
against every put that was due during it.

The bar of a figure is etcd's value in the same run; the exit code is 1 if a bar is missed. Members, writer and loader
share the cores of the machine: figures of one run can be compared, those of two machines cannot.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from bench.hostile.honest import HonestProcess
from bench.report import Figures, beside, finish, machine, medians, missed, parser_of
from bench.stage import alternate, fill, leader_of, memory_mib, open_watches, progress
from raftkv.client.rpc import methods
from raftkv.client.rpc.methods import Method
from raftkv.pb import rpc_pb2
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.status import RpcError
from tests.procs import Cluster, Member, ProcessError, Program, free_port

SIZE: Final = 3
PUTS_PER_S: Final = 1_000
QUIET_S: Final = 2.0
"""Seconds in which only the writer runs, before and after the measured operation."""
TIMEOUT_S: Final = 300.0
POLL_S: Final = 0.01
DOWN_S: Final = 1.0
SETTLE_S: Final = 1.5
"""Seconds between a restart and the next one, so that the members have connected."""
HEALTHY_S: Final = 6.0
"""Seconds for which members must have been connected before either program adds another one."""
KEYS: Final = 1_000_000
COPIED_KEYS: Final = 1 << 18
"""Number of keys, with values of 1 KiB, in the database that an empty member receives."""
WATCHERS: Final = 100_000
HISTORY_KEYS: Final = 1_000
MISSED_ENTRIES: Final = 40_000
"""Puts that a follower misses: more than either program keeps in its log after a snapshot."""

Answer = TypeVar("Answer", bound=Message)


class Scene:
    """One running cluster.

    Arguments:
        cluster: the cluster, of three members.
        scale: factor of all numbers of keys and watchers.
    """

    def __init__(self, cluster: Cluster, scale: float) -> None:
        self.cluster = cluster
        self._scale = scale

    def count(self, full: int) -> int:
        """Return a number multiplied by the scale."""
        return max(2, int(full * self._scale))

    async def fill(self, keys: int, value_bytes: int = 256, puts: int = 0) -> None:
        """Put every key once, or repeatedly up to a total number of puts."""
        await asyncio.to_thread(fill, self._running[0].endpoint, keys, puts, value_bytes=value_bytes)

    @property
    def _running(self) -> list[Member]:
        return [member for member in self.cluster.members if member.is_running()]

    @property
    def follower(self) -> Member:
        """Return a member that is not the leader."""
        leader = leader_of(self.cluster)
        return next(member for member in self.cluster.members if member is not leader)

    async def call(self, method: Method[Answer], request: Message, member: Member | None = None) -> Answer:
        """Call a method of a member; by default, the first running one."""
        async with Channel((member or self._running[0]).endpoint) as channel:
            data = await channel.unary(method.path, request.SerializeToString(), TIMEOUT_S)
        return method.response.FromString(data)

    async def read(self, member: Member | None = None) -> rpc_pb2.RangeResponse:
        """Make a linearizable read, retrying until a member answers."""
        request = rpc_pb2.RangeRequest(key=b"x")
        return await self.until(lambda: self.call(methods.RANGE, request, member))

    async def until(self, ask: Callable[[], Awaitable[Answer]], *, is_good: Callable[[Answer], bool] = bool) -> Answer:
        """Repeat a request until the answer is good."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    answer = await ask()
                    if is_good(answer):
                        return answer
                except (RpcError, OSError):
                    pass
                await asyncio.sleep(POLL_S)

    async def caught_up(self, member: Member, source: Member) -> None:
        """Wait until a member has applied everything that another one has applied by now."""
        asked = rpc_pb2.StatusRequest()
        wanted = (await self.call(methods.STATUS, asked, source)).raftAppliedIndex
        ask = partial(self.call, methods.STATUS, asked, member)
        await self.until(ask, is_good=lambda answer: answer.raftAppliedIndex >= wanted)

    async def compact(self) -> None:
        """Compact to the current revision, and wait until the compaction has finished."""
        request = rpc_pb2.CompactionRequest(revision=(await self.read()).header.revision, physical=True)
        await self.call(methods.COMPACT, request)

    async def restarted(self, members: list[Member], end: Callable[[Member], object] = Member.kill) -> float:
        """End members and start them again; return the seconds from the start to a linearizable read of each."""
        for member in members:
            await asyncio.to_thread(end, member)
        await asyncio.sleep(DOWN_S)
        began = monotonic()
        for member in members:
            member.start()
        await asyncio.gather(*map(self.read, members))
        took_s = monotonic() - began
        await asyncio.sleep(SETTLE_S)
        return took_s

    async def writer_during(self, work: Callable[[], Awaitable[Any]]) -> Figures:
        """Run an operation while the writer writes to all running members; return its figures and the duration."""
        writer = HonestProcess([member.endpoint for member in self._running], puts_per_s=PUTS_PER_S)
        try:
            await asyncio.sleep(QUIET_S)
            before, _ = await writer.window(partial(asyncio.sleep, QUIET_S))
            took_s = 0.0

            async def timed() -> None:
                nonlocal took_s
                began = monotonic()
                await work()
                took_s = monotonic() - began
                await asyncio.sleep(QUIET_S)

            seen, _ = await writer.window(timed)
        finally:
            writer.end()
        put = seen["put"]
        names = {"longest stall ms": put["max_ms"], "p99 ms": put["p99_ms"], "p99 before ms": before["put"]["p99_ms"]}
        return {**names, "took s": took_s, "failed puts": seen["errors"]}

    def new_member(self) -> Member:
        """Return a further member, still unknown to the others; it ends with the cluster."""
        first = self.cluster.members[0]
        member = Member(
            name=f"m{len(self.cluster.members)}", directory=self.cluster.directory, client_port=free_port(),
            peer_port=free_port(), flags=[*first.flags, "--initial-cluster-state", "existing"], server=first.server,
            environment=first.environment,
        )  # fmt: skip
        member.initial_cluster = f"{first.initial_cluster},{member.name}={member.peer_url}"
        self.cluster.members.append(member)
        return member


# ---- rows


async def restart_killed(scene: Scene) -> Figures:
    """Restart one follower after the other with kill -9; then all members at once."""
    await scene.fill(scene.count(KEYS))
    one = [await scene.restarted([scene.follower]) for _ in range(3)]
    return {"one member s": statistics.median(one), "all members s": await scene.restarted(scene.cluster.members)}


async def defragment(scene: Scene) -> Figures:
    """Delete half of the keys, then defragment every member, the leader last."""
    await scene.fill(scene.count(KEYS))
    deletion = rpc_pb2.DeleteRangeRequest(key=b"\0", range_end=b"\0")
    await scene.call(methods.DELETE_RANGE, deletion)
    await scene.fill(scene.count(KEYS // 2))
    await scene.compact()
    leader, request = leader_of(scene.cluster), rpc_pb2.DefragmentRequest()

    async def work() -> None:
        for member in sorted(scene.cluster.members, key=lambda member: member is leader):
            await scene.call(methods.DEFRAGMENT, request, member)

    return await scene.writer_during(work)


async def compact(scene: Scene) -> Figures:
    """Compact a long history of a thousand keys to the current revision, and wait for the end."""
    await scene.fill(HISTORY_KEYS, puts=scene.count(KEYS))
    return await scene.writer_during(scene.compact)


async def send_snapshot(scene: Scene) -> Figures:
    """Send a snapshot, under load, to a follower that missed more entries than the log still has."""
    await scene.fill(scene.count(COPIED_KEYS), 1024)
    follower, leader = scene.follower, leader_of(scene.cluster)
    follower.kill()
    await scene.fill(1_000, puts=MISSED_ENTRIES)

    async def work() -> None:
        follower.start()
        await scene.caught_up(follower, leader)

    return await scene.writer_during(work)


async def add_member(scene: Scene) -> Figures:
    """Add a fourth member under load, which receives the whole database."""
    await scene.fill(scene.count(COPIED_KEYS), 1024)
    leader = leader_of(scene.cluster)

    async def work() -> None:
        member = scene.new_member()
        request = rpc_pb2.MemberAddRequest(peerURLs=[member.peer_url])
        await scene.until(lambda: scene.call(methods.MEMBER_ADD, request, leader))
        await asyncio.to_thread(member.start)
        await scene.caught_up(member, leader)

    await asyncio.sleep(HEALTHY_S)
    return await scene.writer_during(work)


async def memory(scene: Scene) -> Figures:
    """Private memory of a member: without keys, per watcher of a key, per key after a restart."""
    member = scene.follower

    def own_bytes() -> float:
        return memory_mib(member.process.pid)["RssAnon"] * 1024**2

    await scene.restarted([member], Member.stop)
    empty = own_bytes()
    watched = [b"%032d" % number for number in range(scene.count(WATCHERS))]
    async with AsyncExitStack() as stack:
        await open_watches(stack, await stack.enter_async_context(Channel(member.endpoint)), watched)
        watcher = (own_bytes() - empty) / len(watched)
    keys = scene.count(KEYS)
    await scene.fill(keys)
    await scene.restarted([member], Member.stop)
    key = (own_bytes() - empty) / keys
    return {"empty MiB": empty / 1024**2, "bytes of a watcher": watcher, "bytes of a key": key}


@dataclass(frozen=True)
class Row:
    """One operation; its bars are the figures in which raftkv must not exceed etcd."""

    run: Callable[[Scene], Coroutine[Any, Any, Figures]]
    bars: tuple[str, ...] = ("longest stall ms", "p99 ms")
    flags: tuple[str, ...] = ()


_CUT: Final = ("--snapshot-count", "10000")
ROWS: Final = {
    "restart-killed": Row(restart_killed, ("one member s",)),
    "defragment": Row(defragment),
    "compact": Row(compact),
    "send-snapshot": Row(send_snapshot, flags=_CUT),
    "add-member": Row(add_member, flags=_CUT),
    "memory": Row(memory, ("bytes of a key", "bytes of a watcher")),
}
BARS: Final = {name: row.bars for name, row in ROWS.items()}


def measure(name: str, rounds: int, scale: float, problems: list[str]) -> dict[str, Figures]:
    """Run all rounds of a row; return medians by program. A program that fails is reported as a problem."""

    def once(program: Program) -> Figures:
        try:
            with Cluster(program.with_flags(*ROWS[name].flags), SIZE) as cluster:
                found = asyncio.run(ROWS[name].run(Scene(cluster, scale)))
        except (RpcError, ProcessError, TimeoutError) as error:
            problems.append(f"{name}: {program.name}: {type(error).__name__}: {error}")
            return {}
        progress(f"{name} {program.name}: {', '.join(f'{figure} {value:,.4g}' for figure, value in found.items())}")
        return found

    seen = alternate(rounds, once)
    return {program: medians(whole) for program, found in seen.items() if (whole := [each for each in found if each])}


def main() -> None:
    """Measure, print, and exit with 1 if a bar is missed."""
    shown = {name: (row.run.__doc__ or "").partition("\n")[0] for name, row in ROWS.items()}
    parser = parser_of(__doc__, shown, rounds=1, writes="the table of docs/reference/performance.md")
    parser.add_argument("--scale", type=float, default=1.0, help="of 1,000,000 keys, 256 MiB, 100,000 watchers")
    options = parser.parse_args()
    problems: list[str] = []
    rows = {name: measure(name, options.rounds, options.scale, problems) for name in options.rows}
    facts = machine()
    text = (
        f"{beside(rows, {}, BARS)}\n\n"
        f"Three members, writer and loader on {facts['cores']} shared cores, fsync on, median of {options.rounds} "
        f"rounds, scale {options.scale:g}, {facts['date']}. Less is better; ratios in bold have a bar of 1."
    )
    finish(text, problems + missed(rows, BARS), "operate" if options.write else "")


if __name__ == "__main__":
    main()
