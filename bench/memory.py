"""What one member costs at scale, raftkv beside real etcd 3.5.1: memory per key and watcher, a start with many keys.

    python -m bench.memory [--keys 1000000] [--watchers 100000] [--starts 3]

Keys of 32 bytes and values of 100 are put through the client port of a member alone: every key once, and a tenth of
the keys ten times. Then the members are started again in turn, so that memory is the state itself and not what writing
it left behind. A start is the time from ``exec`` to an answer of the client port, and the processor seconds until then.
Watchers are opened on members without keys, one key each, all on one stream and then a hundred on each.

Memory is anonymous memory, the process's own, above that of a member that holds nothing. What is mapped of the database
file is left out, because the kernel may take it back at any time. Prints a table and writes nothing.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, ExitStack
from typing import Final

from bench.report import beside, medians, parser_of
from bench.stage import PROGRAMS, QUOTA, fill, memory_mib, processor_s
from raftkv.pb import rpc_pb2
from raftkv.rpc.client.channel import Channel
from tests.procs import Cluster, Member

KEY_BYTES, VALUE_BYTES = 32, 100
VERSIONS: Final = 10
PER_STREAM: Final = 100
CONNECTIONS: Final = 10

Figures = dict[str, float]


def started(member: Member) -> Figures:
    """Start a member again."""
    if member.is_running():
        member.stop()
    began_s = time.perf_counter()
    member.restart()
    started_s = time.perf_counter() - began_s
    return {"start_s": started_s, "start_cpu_s": processor_s(member.process.pid)} | memory_mib(member.process.pid)


def starts(keys: int, puts: int, rounds: int) -> dict[str, Figures]:
    """Medians of some starts in turn, by program."""
    with ExitStack() as stack:
        clusters = {one.name: stack.enter_context(Cluster(one.with_flags(*QUOTA))) for one in PROGRAMS}
        for cluster in clusters.values():
            if puts:
                fill(cluster.members[0].endpoint, keys, puts, key_bytes=KEY_BYTES, value_bytes=VALUE_BYTES)
            cluster.members[0].stop()
        seen: dict[str, list[Figures]] = {name: [] for name in clusters}
        for _ in range(rounds):
            for name, cluster in clusters.items():
                seen[name].append(started(cluster.members[0]))
                cluster.members[0].stop()
    return {name: medians(found) for name, found in seen.items()}


async def _watch(stack: AsyncExitStack, channel: Channel, first: int, count: int) -> None:
    """Open a stream with so many watchers; it stays until the stack is closed."""
    stream = await stack.enter_async_context(channel.stream("/etcdserverpb.Watch/Watch"))

    async def send() -> None:
        for number in range(first, first + count):
            create = rpc_pb2.WatchCreateRequest(key=f"{number:0{KEY_BYTES}}".encode())
            await stream.send(rpc_pb2.WatchRequest(create_request=create).SerializeToString())

    async with asyncio.TaskGroup() as group:
        # Beside reading: a server whose answers nobody takes takes no more requests.
        group.create_task(send())
        created = 0
        async for message in stream:
            created += rpc_pb2.WatchResponse.FromString(message).created
            if created == count:
                return


async def watched(member: Member, watchers: int, per_stream: int) -> Figures:
    """Memory of a member with so many watchers."""
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(Channel(member.endpoint)) for _ in range(CONNECTIONS)]
        for number, first in enumerate(range(0, watchers, per_stream)):
            await _watch(stack, channels[number % CONNECTIONS], first, min(per_stream, watchers - first))
        return memory_mib(member.process.pid)


def watches(watchers: int, per_stream: int) -> dict[str, Figures]:
    """Memory of members with so many watchers, by program."""
    found: dict[str, Figures] = {}
    for program in PROGRAMS:
        with Cluster(program) as cluster:
            found[program.name] = asyncio.run(watched(cluster.members[0], watchers, per_stream))
    return found


def measure(keys: int, watchers: int, rounds: int) -> dict[str, dict[str, Figures]]:
    """All rows: name of the row, program, figures."""
    rows = {
        "empty": starts(0, 0, rounds),
        "keys": starts(keys, keys, rounds),
        "versions": starts(keys // VERSIONS, keys, rounds),
        "watchers-on-one-stream": watches(watchers, watchers),
        "watchers-on-many-streams": watches(watchers, PER_STREAM),
    }
    counts = {"keys": keys, "versions": keys // VERSIONS}
    for row, programs in rows.items():
        for name, figures in programs.items():
            own_bytes = (figures["RssAnon"] - rows["empty"][name]["RssAnon"]) * 1024**2
            figures["bytes_each"] = own_bytes / counts.get(row, watchers) if row != "empty" else 0.0
    return rows


SHOWN: Final = {
    "bytes_each": ("bytes each", ".0f"),
    "RssAnon": ("anonymous MiB", ".0f"),
    "VmHWM": ("peak MiB", ".0f"),
    "start_s": ("start s", ".2f"),
    "start_cpu_s": ("start CPU s", ".2f"),
}


def table(rows: dict[str, dict[str, Figures]]) -> str:
    """The rows for people, in Markdown."""
    shown = {
        row: {name: {key: figures[key] for key in SHOWN if figures.get(key)} for name, figures in programs.items()}
        for row, programs in rows.items()
    }
    return beside(shown, SHOWN.__getitem__)


def main() -> None:
    """Measure both programs."""
    parser = parser_of(__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--watchers", type=int, default=100_000)
    parser.add_argument("--starts", type=int, default=3, help="starts of each member, of which the median is shown")
    given = parser.parse_args()
    print(table(measure(given.keys, given.watchers, given.starts)))


if __name__ == "__main__":
    main()
