"""The honest client: puts and linearizable reads at a steady rate, in a separate process, with checked answers.

    python -m bench.hostile.honest h1:2379,h2:2379,h3:2379 [--puts-per-second 100]

Open loop: by default a put is due every 10 ms, and its latency counts from that time, so that a stall of a member
counts against every put that was due during it. Puts and reads use the members in turn, with one connection to each. A
read that started after the answer to a put must return that put or a later one; otherwise it is an error.

Standard input takes one word per line: ``mark`` starts a window; ``tell`` prints one JSON line about the window, once
all requests that were due in it have ended. At the end of standard input the process ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from bench.hostile.attacker import UserChannel
from bench.report import latencies_ms, parser_of
from bench.stage import Worker, tell
from raftkv.client.rpc import methods
from raftkv.pb import rpc_pb2
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.status import RpcError

PUTS_PER_S: Final = 100.0
READ_INTERVAL_S: Final = 0.02
CALL_TIMEOUT_S: Final = 15.0
TRIES_MAX: Final = 20
OLD_REVISION: Final = "revision of auth store is old"
KEYS: Final = 200
VALUE: Final = b"v" * 256
ERRORS_SHOWN: Final = 20
PREFIX: Final = b"honest/"

T = TypeVar("T", bound=Message)


class Window:
    """The measurements since ``mark``."""

    def __init__(self) -> None:
        self.put_s: list[float] = []
        self.read_s: list[float] = []
        self.errors: list[str] = []

    def as_json(self) -> dict[str, Any]:
        times = {"put": self.put_s, "read": self.read_s}
        found: dict[str, Any] = {name: {"count": len(each), **latencies_ms(each)} for name, each in times.items()}
        return {**found, "errors": len(self.errors), "error_texts": self.errors[:ERRORS_SHOWN]}


class Honest:
    """The honest client.

    Arguments:
        endpoints: endpoints of all members.
        puts_per_s: number of puts due per second.
        token: token of a user; empty: no authentication.
    """

    def __init__(self, endpoints: list[str], puts_per_s: float = PUTS_PER_S, token: str = "") -> None:
        self.window = Window()
        self._put_interval_s = 1.0 / puts_per_s
        self.channels: list[Channel] = [UserChannel(endpoint, token) for endpoint in endpoints]
        self._under_way: set[asyncio.Task[None]] = set()
        self._acknowledged: dict[bytes, int] = {}
        """The newest revision at which a put of a key was acknowledged."""

    async def run(self) -> None:
        """Put and read for ever."""
        puts = self._steadily(self._put_interval_s, self._put)
        await asyncio.gather(puts, self._steadily(READ_INTERVAL_S, self._read))

    async def settled(self) -> None:
        """Wait for the requests in progress."""
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
        answer = await self._call(methods.PUT, rpc_pb2.PutRequest(key=key, value=value), number)
        self.window.put_s.append(monotonic() - due)
        if answer is not None:
            self._acknowledged[key] = max(self._acknowledged.get(key, 0), answer.header.revision)

    async def _read(self, number: int, due: float) -> None:
        key = b"%s%04d" % (PREFIX, number * 7 % KEYS)
        known = self._acknowledged.get(key, 0)
        answer = await self._call(methods.RANGE, rpc_pb2.RangeRequest(key=key), number)
        self.window.read_s.append(monotonic() - due)
        if answer is not None:
            seen = max((kv.mod_revision for kv in answer.kvs), default=0)
            if seen < known:
                self.window.errors.append(f"STALE: a read shows revision {seen} of {key!r}, known: {known}")

    async def _call(self, method: methods.Method[T], request: Message, number: int) -> T | None:
        member = number % len(self.channels)
        where = f"{method.path.rpartition('/')[2]} at member {member + 1}"
        for _ in range(TRIES_MAX):
            try:
                data = await self.channels[member].unary(method.path, request.SerializeToString(), CALL_TIMEOUT_S)
                return method.response.FromString(data)
            except RpcError as error:
                # Users changed in the meantime, and the request was not executed; etcd's clients retry too.
                if OLD_REVISION not in str(error):
                    self.window.errors.append(f"{where}: {error}")
                    return None
        self.window.errors.append(f"{where}: users change all the time")
        return None


async def _obey(honest: Honest) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().strip():
        if line == "mark":
            honest.window = Window()
        elif line == "tell":
            window = honest.window
            await honest.settled()
            tell(**window.as_json())


class HonestProcess(Worker):
    """The honest client in a separate process."""

    def __init__(self, endpoints: list[str], *, puts_per_s: float = PUTS_PER_S, token: str = "") -> None:
        arguments = (",".join(endpoints), f"--token={token}", f"--puts-per-second={puts_per_s:g}")
        super().__init__("bench.hostile.honest", *arguments)

    async def window(self, beside: Callable[[], Awaitable[object]]) -> tuple[dict[str, Any], float]:
        """Return the client's report about the time of another task, and its answered puts per second."""
        self.say("mark")
        began = monotonic()
        await beside()
        self.say("tell")
        told = await asyncio.to_thread(self.answer)
        return told, (told["put"]["count"] - told["errors"]) / (monotonic() - began)


async def main() -> None:
    """Read the command line, and run until standard input ends."""
    parser = parser_of(__doc__)
    parser.add_argument("endpoints")
    parser.add_argument("--puts-per-second", type=float, default=PUTS_PER_S)
    parser.add_argument("--token", default="", help="of a user, where users are asked for")
    options = parser.parse_args()
    honest = Honest(options.endpoints.split(","), options.puts_per_second, options.token)
    work, commands = asyncio.create_task(honest.run()), asyncio.create_task(_obey(honest))
    await asyncio.wait([work, commands], return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        work.result()
    work.cancel()


if __name__ == "__main__":
    asyncio.run(main())
