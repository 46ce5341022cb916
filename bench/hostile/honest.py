"""The honest client: puts and linearizable reads at a steady rate, in a process of its own, with checked answers.

    python -m bench.hostile.honest h1:2379,h2:2379,h3:2379 [--streams] [--puts-per-second 100]

Open loop: a put is due every 10 ms, or as often as asked for, and counts from when it was due, so that a member that
stalls costs every put which should have been made meanwhile. Puts and reads take the members in turn, one connection to
each. What is checked:

- a read that began after the answer to a put shows that put or a later one;
- with ``--streams``, a watch from each member shows every revision once and in order, with what was written, and each
  acknowledged put arrives; a lease on each member is kept alive and never ends.

Standard input takes a word a line: ``mark`` begins a window, ``tell`` answers one JSON line about the window, once all
that was due in it has ended. The end of standard input ends the process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

from bench.hostile.attacker import UserChannel
from bench.report import latencies_ms
from raftkv.pb import rpc_pb2
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.status import RpcError

PUTS_PER_S: Final = 100.0
READ_INTERVAL_S: Final = 0.02
CALL_TIMEOUT_S: Final = 15.0
EVENT_TIMEOUT_S: Final = 15.0
LEASE_TTL_S: Final = 10
TRIES_MAX: Final = 20
OLD_REVISION: Final = "revision of auth store is old"
KEYS: Final = 200
VALUE: Final = b"v" * 256
ERRORS_KEPT: Final = 20
PREFIX: Final = b"honest/"


class Window:
    """What was measured since ``mark``."""

    def __init__(self) -> None:
        self.put_s: list[float] = []
        self.read_s: list[float] = []
        self.event_s: list[float] = []
        self.errors: list[str] = []
        self.errors_total = 0

    def error(self, text: str) -> None:
        self.errors_total += 1
        if len(self.errors) < ERRORS_KEPT:
            self.errors.append(text)

    def as_json(self) -> dict[str, Any]:
        names = (("put", self.put_s), ("read", self.read_s), ("event", self.event_s))
        summaries: dict[str, Any] = {name: _summary(times) for name, times in names}
        return {**summaries, "errors": self.errors_total, "error_texts": self.errors}


def _summary(times_s: list[float]) -> dict[str, float]:
    return {"count": len(times_s), **{name: round(ms, 2) for name, ms in latencies_ms(times_s).items()}}


class Honest:
    """The client.

    Arguments:
        endpoints: of all members.
        puts_per_s: how many puts are due in a second.
        token: of a user; empty: users are not asked for.
    """

    def __init__(self, endpoints: list[str], puts_per_s: float = PUTS_PER_S, token: str = "") -> None:
        self.window = Window()
        self._put_interval_s = 1.0 / puts_per_s
        self.channels: list[Channel] = [UserChannel(endpoint, token) for endpoint in endpoints]
        self._under_way: set[asyncio.Task[None]] = set()
        self._acknowledged: dict[bytes, int] = {}
        """The newest revision at which a put of a key was acknowledged."""
        self.on_put: list[Callable[[int, bytes, float], None]] = []
        """Note an acknowledged put: revision, value, when."""

    async def run(self) -> None:
        """Put and read for ever."""
        puts = self._steadily(self._put_interval_s, self._put)
        await asyncio.gather(puts, self._steadily(READ_INTERVAL_S, self._read))

    async def settled(self) -> None:
        """Wait for what is under way now."""
        if self._under_way:
            await asyncio.wait(list(self._under_way))

    async def _steadily(self, interval_s: float, call: Callable[[int, float], Any]) -> None:
        number, due = 0, monotonic()
        while True:
            task = asyncio.create_task(call(number, due))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            number += 1
            due += interval_s
            await asyncio.sleep(max(0.0, due - monotonic()))

    async def _put(self, number: int, due: float) -> None:
        key, value = b"%s%04d" % (PREFIX, number % KEYS), b"%d/%s" % (number, VALUE)
        request = rpc_pb2.PutRequest(key=key, value=value).SerializeToString()
        member = number % len(self.channels)
        answer = await self._call(member, "/etcdserverpb.KV/Put", request, f"put at member {member + 1}")
        now = monotonic()
        self.window.put_s.append(now - due)
        if answer is not None:
            revision = rpc_pb2.PutResponse.FromString(answer).header.revision
            self._acknowledged[key] = max(self._acknowledged.get(key, 0), revision)
            for listener in self.on_put:
                listener(revision, value, now)

    async def _read(self, number: int, due: float) -> None:
        key = b"%s%04d" % (PREFIX, number * 7 % KEYS)
        known = self._acknowledged.get(key, 0)
        member = number % len(self.channels)
        request = rpc_pb2.RangeRequest(key=key).SerializeToString()
        answer = await self._call(member, "/etcdserverpb.KV/Range", request, f"read at member {member + 1}")
        self.window.read_s.append(monotonic() - due)
        if answer is None:
            return
        found = rpc_pb2.RangeResponse.FromString(answer).kvs
        seen = found[0].mod_revision if found else 0
        if seen < known:
            self.window.error(f"STALE: a read at member {member + 1} shows revision {seen} of {key!r}, known: {known}")

    async def _call(self, member: int, path: str, request: bytes, what: str) -> bytes | None:
        for _ in range(TRIES_MAX):
            try:
                return await self.channels[member].unary(path, request, CALL_TIMEOUT_S)
            except RpcError as error:
                # Users have changed on the way, and nothing else was done: etcd's clients ask again, too.
                if OLD_REVISION not in str(error):
                    self.window.error(f"{what}: {error}")
                    return None
        self.window.error(f"{what}: users change all the time")
        return None


class HonestWatch:
    """One watch of all honest keys at one member."""

    def __init__(self, honest: Honest, member: int) -> None:
        self._honest = honest
        self._member = member
        self._expected: dict[int, tuple[bytes, float]] = {}
        self._seen: dict[int, bytes] = {}
        self._began = self._last = 0
        honest.on_put.append(self._acknowledged)

    async def run(self) -> None:
        """Watch for ever; an end of the stream is an error, and the next one goes on where it stood."""
        while True:
            try:
                await self._watch()
                self._honest.window.error(f"watch at member {self._member + 1}: it ended")
            except RpcError as error:
                self._honest.window.error(f"watch at member {self._member + 1}: {error}")
            await asyncio.sleep(1.0)

    async def _watch(self) -> None:
        create = rpc_pb2.WatchCreateRequest(
            key=PREFIX, range_end=PREFIX[:-1] + b"0", start_revision=self._last + 1 if self._last else 0
        )
        async with self._honest.channels[self._member].stream("/etcdserverpb.Watch/Watch") as stream:
            await stream.send(rpc_pb2.WatchRequest(create_request=create).SerializeToString())
            async for message in stream:
                response = rpc_pb2.WatchResponse.FromString(message)
                if response.canceled:
                    self._honest.window.error(f"watch at member {self._member + 1}: {response.cancel_reason}")
                    return
                if response.created and not self._last:
                    self._began = self._last = response.header.revision
                for event in response.events:
                    self._event(event.kv.mod_revision, event.kv.value)

    def _event(self, revision: int, value: bytes) -> None:
        if revision <= self._last:
            self._honest.window.error(f"watch at member {self._member + 1}: {revision} after {self._last}")
        self._last = revision
        expected = self._expected.pop(revision, None)
        if expected is None:
            self._seen[revision] = value
        else:
            self._check(revision, expected, value)

    def _acknowledged(self, revision: int, value: bytes, now: float) -> None:
        if not self._last or revision <= self._began:
            return
        if revision in self._seen:
            self._check(revision, (value, now), self._seen.pop(revision))
        elif revision > self._last:
            self._expected[revision] = (value, now)
        else:
            self._honest.window.error(f"LOST: member {self._member + 1} showed {self._last} and never {revision}")

    def _check(self, revision: int, expected: tuple[bytes, float], value: bytes) -> None:
        if expected[0] != value:
            self._honest.window.error(f"WRONG: the event of {revision} at member {self._member + 1} has another value")
        self._honest.window.event_s.append(max(0.0, monotonic() - expected[1]))

    async def overdue(self) -> None:
        """Look, for ever, for puts whose event does not come."""
        while True:
            await asyncio.sleep(1.0)
            late = [
                revision for revision, (_, since) in self._expected.items() if monotonic() - since > EVENT_TIMEOUT_S
            ]
            for revision in late:
                del self._expected[revision]
                self._honest.window.error(f"LATE: no event of {revision} at member {self._member + 1}")
            # Puts that were never acknowledged leave an event behind.
            for revision in [revision for revision in self._seen if revision < self._last - 10_000]:
                del self._seen[revision]


async def keep_lease(honest: Honest, member: int) -> None:
    """A lease kept alive at one member; its end is an error."""
    channel, where = honest.channels[member], f"lease at member {member + 1}"
    while True:
        try:
            request = rpc_pb2.LeaseGrantRequest(TTL=LEASE_TTL_S).SerializeToString()
            granted = rpc_pb2.LeaseGrantResponse.FromString(
                await channel.unary("/etcdserverpb.Lease/LeaseGrant", request, CALL_TIMEOUT_S)
            )
            alive = rpc_pb2.LeaseKeepAliveRequest(ID=granted.ID).SerializeToString()
            async with channel.stream("/etcdserverpb.Lease/LeaseKeepAlive") as stream:
                while True:
                    await stream.send(alive)
                    answer = await asyncio.wait_for(stream.receive(), CALL_TIMEOUT_S)
                    if answer is None or rpc_pb2.LeaseKeepAliveResponse.FromString(answer).TTL <= 0:
                        honest.window.error(f"{where}: it ended")
                        break
                    await asyncio.sleep(1.0)
        except (RpcError, TimeoutError) as error:
            honest.window.error(f"{where}: {error!r}")
            await asyncio.sleep(1.0)


async def _obey(honest: Honest) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().strip():
        if line == "mark":
            honest.window = Window()
        elif line == "tell":
            window = honest.window
            await honest.settled()
            print(json.dumps(window.as_json()), flush=True)


async def serve(endpoints: list[str], streams: bool, puts_per_s: float, token: str) -> None:
    """Run until standard input ends."""
    honest = Honest(endpoints, puts_per_s, token)
    work = [honest.run()]
    for member in range(len(endpoints)) if streams else ():
        watch = HonestWatch(honest, member)
        work += [watch.run(), watch.overdue(), keep_lease(honest, member)]
    tasks = [asyncio.create_task(item) for item in work]
    commands = asyncio.create_task(_obey(honest))
    await asyncio.wait([*tasks, commands], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="the honest client of bench.hostile")
    parser.add_argument("endpoints")
    parser.add_argument("--streams", action="store_true", help="watches and leases too")
    parser.add_argument("--puts-per-second", type=float, default=PUTS_PER_S)
    parser.add_argument("--token", default="", help="of a user, where users are asked for")
    options = parser.parse_args()
    asyncio.run(serve(options.endpoints.split(","), options.streams, options.puts_per_second, options.token))


if __name__ == "__main__":
    main()
