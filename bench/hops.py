"""The number of raftkv files that one request crosses in a member, and how often control changes file.

    python -m bench.hops [--list put] [--rounds 30]

One member runs in this process, interpreted, alone in its cluster, with a client in another thread. `sys.setprofile`
records each call of a Python function on the loop's thread while one request is in progress and shortly after its
answer. A *hop* is a call of a function in another file than the previously called function. Ticks and timers also run
in this time, so the round with the fewest hops counts. A reader of the code has to follow the files and hops; a
processor pays for the calls.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import pairwise
from types import FrameType
from typing import Any, Final

from bench.report import markdown, parser_of
from raftkv.config import ServerConfig
from raftkv.native import is_compiled
from raftkv.pb import rpc_pb2
from raftkv.rpc.client.channel import Channel
from raftkv.server import main as server
from raftkv.server.member import Member
from tests.procs import ROOT, free_port

KINDS: Final = ("put", "range", "event", "keep-alive")
SETTLE_S: Final = 0.03
"""Idle time before a request and after its answer, in seconds."""
_KV: Final = "/etcdserverpb.KV/"

Ask = Callable[[], Awaitable[Any]]


class Calls:
    """The recorded calls of the thread that created this object, each as ``file:function``."""

    def __init__(self) -> None:
        self.seen: list[str] | None = None

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and self.seen is not None and (name := _relative(frame.f_code.co_filename)):
            self.seen.append(f"{name}:{frame.f_code.co_qualname}")


@functools.cache
def _relative(path: str) -> str:
    """Return the path of a raftkv file from the root of the sources; empty for other files."""
    relative = os.path.relpath(path, ROOT)
    return relative if relative.startswith(("raftkv/", "storage/")) else ""


def hops_of(calls: list[str]) -> int:
    """Return the number of file changes in a sequence of ``file:function``."""
    files = [call.partition(":")[0] for call in calls]
    return sum(one != other for one, other in pairwise(files))


async def _asks(channel: Channel) -> dict[str, Ask]:
    """Return a function for each kind of request that sends one request; the streams are open."""

    def unary(method: str, request: Any) -> Ask:
        data = request.SerializeToString()
        return lambda: channel.unary(_KV + method, data, 10.0)

    put = unary("Put", rpc_pb2.PutRequest(key=b"k", value=b"v" * 100))
    watch = channel.stream("/etcdserverpb.Watch/Watch")
    create = rpc_pb2.WatchCreateRequest(key=b"watched")
    await watch.send(rpc_pb2.WatchRequest(create_request=create).SerializeToString())
    await watch.receive()
    written = unary("Put", rpc_pb2.PutRequest(key=b"watched", value=b"v" * 100))
    grant = rpc_pb2.LeaseGrantRequest(ID=7, TTL=600).SerializeToString()
    await channel.unary("/etcdserverpb.Lease/LeaseGrant", grant, 10.0)
    alive = channel.stream("/etcdserverpb.Lease/LeaseKeepAlive")
    renewal = rpc_pb2.LeaseKeepAliveRequest(ID=7).SerializeToString()

    async def event() -> None:
        await asyncio.gather(written(), watch.receive())

    async def keep_alive() -> None:
        await alive.send(renewal)
        await alive.receive()

    asked = unary("Range", rpc_pb2.RangeRequest(key=b"k"))
    return {"put": put, "range": asked, "event": event, "keep-alive": keep_alive}


async def _measure(endpoint: str, calls: Calls, rounds: int) -> dict[str, list[str]]:
    """Return the calls of the round with the fewest hops, for each kind of request."""
    least: dict[str, list[str]] = {}
    async with Channel(endpoint) as channel:
        asks = await _asks(channel)
        for _ in range(rounds):
            for kind in KINDS:
                await asyncio.sleep(SETTLE_S)
                seen = calls.seen = []
                await asks[kind]()
                await asyncio.sleep(SETTLE_S)
                calls.seen = None
                if kind not in least or hops_of(seen) < hops_of(least[kind]):
                    least[kind] = seen
    return least


def measure(rounds: int) -> dict[str, list[str]]:
    """Run a member, and return the calls of each kind of request in it."""
    found: dict[str, list[str]] = {}
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))

    async def on_ready(member: Member) -> None:
        calls = Calls()
        sys.setprofile(calls)

        def run() -> None:
            try:
                found.update(asyncio.run(_measure(client.removeprefix("http://"), calls, rounds)))
            finally:
                loop.call_soon_threadsafe(member.stop)

        loop = asyncio.get_running_loop()
        threading.Thread(target=run, name="client").start()

    with tempfile.TemporaryDirectory(prefix="raftkv-hops-") as directory:
        config = ServerConfig(
            data_dir=f"{directory}/data",
            listen_client_urls=(client,),
            advertise_client_urls=(client,),
            listen_peer_urls=(peer,),
            initial_advertise_peer_urls=(peer,),
            initial_cluster=f"default={peer}",
            log_outputs=(f"{directory}/log",),
            unsafe_no_fsync=True,  # otherwise the disk's speed would decide which path a sync takes
        )
        try:
            server.serve(config, on_ready=on_ready)
        finally:
            sys.setprofile(None)
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--list", choices=KINDS, help="print the calls of one kind, the most frequent first")
    options = parser.parse_args()
    if is_compiled():
        sys.exit("bench.hops: compiled code has no frames; run `make interpreted` first")
    found = measure(options.rounds)
    if options.list:
        print("\n".join(f"{count:4}  {call}" for call, count in Counter(found[options.list]).most_common()))
        return
    files = {kind: len({call.partition(":")[0] for call in calls}) for kind, calls in found.items()}
    rows = [(kind, files[kind], hops_of(calls), len(calls)) for kind, calls in found.items()]
    print(markdown(("request", "files", "hops", "calls"), rows))


if __name__ == "__main__":
    main()
