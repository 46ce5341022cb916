"""The network between members, and between clients and members, under the control of the harness: cut, slow, reset.

Members and clients do not know the ports that members listen on. Members advertise, and clients dial, *relay ports* of
this class, which forwards the bytes. Because everything is loopback TCP, it needs no privileges and no packet filter,
and nothing is left behind when the harness is killed.

      m1 --dials--> relay port of m2 ~~~> m2         cut (1, 2): bytes of m1 wait, those of m2 still pass

The member that dialled is identified by the process that holds the socket (sock_diag, ``/proc``); members have their
numbers, clients are 0.

Invariants: a cut is one-way; a pair of cuts works both ways. Bytes and ends of connections that meet a cut wait; they
are neither lost nor reordered (as TCP appears when packets are lost for a while). A heal does one of three things,
chosen by the seed: it lets the bytes pass; it resets the connections in which they wait (as when packets were lost for
long); or it ends the connections only for the dialler, while the other end is never told (as after a power loss of the
machine, or with a firewall that forgot the connection).

Not simulated: loss, duplication and reordering below TCP, which TCP hides.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

CLIENTS = 0
"""The number that means all clients."""

Pair = tuple[int, int]
"""The sending member, and the receiving one."""

_CHUNK_BYTES = 1 << 16
_HOST = "127.0.0.1"
_REFUSED_S = 0.1
_TURNS_TO_HAND_OVER = 2
"""One in which asyncio creates the transport of a connection, one in which it calls the handler."""
_SOCK_DIAG, _BY_FAMILY, _ANY = 4, 20, 0xFFFFFFFF
_HEADER_BYTES, _INODE_AT = 16, 84


class Target(NamedTuple):
    """The target of a relay port: a member and the port it listens on; whether members or clients dial it."""

    member: int
    port: int
    for_members: bool


class Network:
    """Relays between relay ports and members.

    Arguments:
        targets: target of each relay port.
        process_ids: process ids of the running members.
        seed: seed of delays and of how connections are healed.
    """

    def __init__(self, targets: Mapping[int, Target], process_ids: Callable[[], Mapping[int, int]], seed: int) -> None:
        self.relayed_bytes = 0
        self._targets, self._process_ids = dict(targets), process_ids
        self._rng = random.Random(f"network {seed}")
        self._cut: set[Pair] = set()
        self._delay_s: dict[Pair, tuple[float, float, float]] = {}
        self._healed = asyncio.Event()
        self._servers: list[asyncio.Server] = []
        self._relays: dict[asyncio.Task[None], tuple[Pair, list[asyncio.StreamWriter]]] = {}
        self._stranded: list[asyncio.StreamWriter] = []

    async def open(self) -> None:
        """Listen on every relay port."""
        for port in self._targets:
            await self._listen(port)

    async def add(self, targets: Mapping[int, Target]) -> None:
        """Listen on further relay ports; a known one gets its new target."""
        for port, target in targets.items():
            known = port in self._targets
            self._targets[port] = target
            if not known:
                await self._listen(port)

    async def close(self) -> None:
        """Close every relay port and every connection."""
        for server in self._servers:
            await close_server(server)
        self.heal()
        tasks = list(self._relays)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        _abort(self._stranded)
        await asyncio.gather(*(writer.wait_closed() for writer in self._stranded), return_exceptions=True)

    def cut(self, pairs: Iterable[Pair]) -> None:
        """Let nothing pass from the first to the second of each pair."""
        self._cut |= set(pairs)

    def slow(self, pairs: Iterable[Pair], least_s: float, most_s: float, bytes_per_s: float = math.inf) -> None:
        """Delay forwarded bytes by a random time.

        Arguments:
            pairs: sender and receiver.
            least_s, most_s: bounds of the delay in seconds.
            bytes_per_s: bandwidth limit of a connection.
        """
        self._delay_s |= dict.fromkeys(pairs, (least_s, most_s, bytes_per_s))

    def reset(self) -> None:
        """Break every connection (RST)."""
        for _, writers in self._relays.values():
            _abort(writers)

    def heal(self) -> None:
        """Undo all cuts and delays: half of the cut connections continue, the others are reset or stranded."""
        how = self._rng.random()
        for task, ((source, target), writers) in list(self._relays.items()):
            if how < 0.5 and {(source, target), (target, source)} & self._cut:
                if how < 0.25:
                    _abort(writers)
                else:
                    self._strand(task, writers)
        self._cut.clear()
        self._delay_s.clear()
        self._healed.set()
        self._healed = asyncio.Event()

    def _strand(self, task: asyncio.Task[None], writers: list[asyncio.StreamWriter]) -> None:
        """End a connection for its dialler, and never tell the other end."""
        self._stranded += writers[1:]
        del writers[1:]
        task.cancel()

    async def _listen(self, port: int) -> None:
        self._servers.append(await asyncio.start_server(self._relay_to(port), _HOST, port, limit=_CHUNK_BYTES))

    def _relay_to(self, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            target = self._targets[port]
            source = self._dialler(writer.get_extra_info("peername")[1], port) if target.for_members else CLIENTS
            pair, writers = (source, target.member), [writer]
            task = asyncio.get_running_loop().create_task(self._relay(pair, target.port, reader, writers))
            self._relays[task] = (pair, writers)
            # Not in the task itself, because a task cancelled before its first step never runs.
            task.add_done_callback(lambda done: _abort(self._relays.pop(done)[1]))

        return accept

    async def _relay(
        self, pair: Pair, behind: int, reader: asyncio.StreamReader, writers: list[asyncio.StreamWriter]
    ) -> None:
        """Forward bytes both ways until both ends have closed or one broke; adds the far end to ``writers``."""
        with contextlib.suppress(OSError, ExceptionGroup):
            far_reader, far_writer = await self._connect(behind)
            near_writer = writers[0]
            writers.append(far_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(pair, reader, far_writer))
                group.create_task(self._pump((pair[1], pair[0]), far_reader, near_writer))

    async def _connect(self, behind: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_connection(_HOST, behind, limit=_CHUNK_BYTES)
        except OSError:
            # A peer that is accepted and disconnected at once redials at once; the pause prevents a flood.
            await asyncio.sleep(_REFUSED_S)
            raise

    async def _pump(self, pair: Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await self._passage(pair, len(data))
            self.relayed_bytes += len(data)
            writer.write(data)
            await writer.drain()
        await self._passage(pair, 0)
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def _passage(self, pair: Pair, size_bytes: int) -> None:
        if pair in self._delay_s:
            least_s, most_s, bytes_per_s = self._delay_s[pair]
            await asyncio.sleep(self._rng.uniform(least_s, most_s) + size_bytes / bytes_per_s)
        while pair in self._cut:
            await self._healed.wait()

    def _dialler(self, port: int, relay_port: int) -> int:
        """Return the member whose process holds the near end of a connection; clients if none does."""
        inode = _socket_inode(port, relay_port)
        for number, process_id in self._process_ids().items():
            if inode is not None and _holds(process_id, inode):
                return number
        return CLIENTS


async def close_server(server: asyncio.Server) -> None:
    """Stop listening, after every accepted connection has been passed to its handler.

    ``Server.close`` alone loses a connection accepted in the same turn: it is neither handled nor closed.
    """
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    for _ in range(_TURNS_TO_HAND_OVER):
        await asyncio.sleep(0)
    server.close()


def _socket_inode(port: int, relay_port: int) -> int | None:
    """Ask the kernel for one loopback connection (sock_diag(7)), because a table of all connections is slow to read."""
    near = far = socket.inet_aton(_HOST) + bytes(12)
    identity = struct.pack("!HH", port, relay_port) + near + far + struct.pack("=III", 0, _ANY, _ANY)
    request = struct.pack("=BBBxI", socket.AF_INET, socket.IPPROTO_TCP, 0, _ANY) + identity
    header = struct.pack("=IHHII", _HEADER_BYTES + len(request), _BY_FAMILY, 1, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.sendto(header + request, (0, 0))
        answer = kernel.recv(4096)
    if struct.unpack_from("=H", answer, 4)[0] != _BY_FAMILY:
        return None  # It is gone already.
    return int(struct.unpack_from("=I", answer, _INODE_AT)[0])


def _holds(process_id: int, inode: int) -> bool:
    wanted = f"socket:[{inode}]"
    try:
        descriptors = os.listdir(f"/proc/{process_id}/fd")
    except OSError:
        return False
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{process_id}/fd/{descriptor}") == wanted:
                return True
    return False


def _abort(writers: list[asyncio.StreamWriter]) -> None:
    for writer in writers:
        transport = writer.transport
        if isinstance(transport, asyncio.Transport):
            transport.abort()
