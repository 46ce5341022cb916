"""Maintenance.Snapshot: streams the database of this member as a file for etcd's tools.

    call --> flush --> pin the state --> a child process writes the file --pipe--> call.send, when there is space

The file is written by ``raftkv.offline.etcd.export``, which reads the database in a child process: the work takes
seconds of a core, and this loop only forwards messages of etcd's size. The read transaction held here keeps LMDB from
overwriting pages of that state or of later ones, so the child need not take part in LMDB's locks. The child compares
the file that it finds under the name with the pinned one: a file that has replaced it meanwhile is refused. A file that
is replaced afterwards is read to its end. Nothing is copied to the disk; memory holds at most a pipe and a stream's
send buffer.

The right is checked again when a state is pinned: later messages are of the same state. A call that loses its right
while it runs is ended (``server/auth/guard``).

A client that does not read, or reads too slowly for the rate of writes, loses its stream, because a pinned state makes
the database grow. Every member serves snapshots, even a learner, with or without a leader.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import Final

import raftkv
from raftkv import errors
from raftkv.histograms import Buckets, doubling
from raftkv.offline.etcd.export import messages
from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.replica.node.admission import parse_or_raise, refusals
from raftkv.replica.snapshots.files import flushed
from raftkv.rpc.server.server import Server
from raftkv.rpc.server.stream import StreamCall
from raftkv.storage import schema
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.mvcc import Store

_log = logging.getLogger(__name__)
_PATH: Final = SERVICES["etcdserverpb.Maintenance"]["Snapshot"].path

SMALL_BYTES: Final = 128 * 1024
"""Largest database that the member exports itself: 2,000 tiny records took 8 ms, starting a process takes 200 ms."""
STREAMS_MAX: Final = 2
"""Snapshots sent at the same time: for a larger database each is a process, which takes a core until its end."""
STALL_MAX_S: Final = 60.0
"""Longest time for the client to take one message, and for the process to make the first one."""
RATE_MIN_BYTES_S: Final = 256 * 1024
"""Lowest average rate of a client: one that reads a little now and then would keep its place for ever."""
GROWTH_MAX_BYTES: Final = 1 << 30
"""How much the database may grow while one state is pinned."""
ATTEMPTS_MAX: Final = 3
"""How often a snapshot is tried: a defragmentation may replace the file under its name."""
OTHER_FILE_STATUS: Final = 75
"""Exit status of a process that found another file (EX_TEMPFAIL)."""
DAMAGED_STATUS: Final = 65
"""Exit status of a process that found damage (EX_DATAERR)."""
PIPE_BYTES: Final = 256 * 1024

_PROGRAM: Final = ("-P", "-m", "raftkv.offline.etcd.export")
_LENGTH: Final = Struct("<I")


SNAPSHOT_S: Final = doubling(0.01, 17)


def _ignore(_error: errors.CorruptionError) -> None:
    """Do nothing more: the client gets the error."""


def _allow(_call: StreamCall) -> None:
    """Allow every caller."""


class SnapshotService:
    """Handler of Maintenance.Snapshot.

    Arguments:
        store: store to send.
        backend: database of the store.
        on_damage: called if the database turns out to be damaged.
        check: raises the StatusError that refuses a caller under the current rights.
    """

    def __init__(
        self,
        store: Store,
        backend: LMDBBackend,
        on_damage: Callable[[errors.CorruptionError], None] = _ignore,
        check: Callable[[StreamCall], None] = _allow,
    ) -> None:
        self._on_damage = on_damage
        self._check = check
        self._store = store
        self._backend = backend
        self._streams = 0
        self.durations = Buckets(SNAPSHOT_S)

    def register(self, server: Server) -> None:
        """Register the handler."""
        server.stream(_PATH, self.snapshot)

    async def snapshot(self, call: StreamCall) -> None:
        """Send one state: everything that was answered before the call, and perhaps more."""
        parse_or_raise(rpc_pb2.SnapshotRequest, await call.receive())
        with refusals():
            if self._streams >= STREAMS_MAX:
                raise errors.TooManyRequestsError
            self._streams += 1
            began_s = time.perf_counter()
            try:
                await self._serve(call)
                self.durations.observe(time.perf_counter() - began_s)
            finally:
                self._streams -= 1

    async def _serve(self, call: StreamCall) -> None:
        await flushed(self._store)
        for _ in range(ATTEMPTS_MAX):
            self._check(call)
            stream = _Stream(self._backend)
            try:
                if await stream.send(call):
                    return
            except errors.CorruptionError as error:
                self._on_damage(error)
                raise stream.given_up(str(error)) from None
            finally:
                await stream.close()
        raise errors.SnapshotGivenUpError(
            f"{errors.SnapshotGivenUpError.text}: the database was replaced again and again"
        )


class _Stream:
    """The transfer of one state: the read transaction that pins it, and the process that reads it."""

    def __init__(self, backend: LMDBBackend) -> None:
        self._backend = backend
        self._process: asyncio.subprocess.Process | None = None
        self._size_bytes = backend.size_bytes
        self._pin = backend.begin_read()
        self._index = schema.decode_integer(self._pin.get(schema.META, schema.META_CONSISTENT_INDEX)) or 0

    async def send(self, call: StreamCall) -> bool:
        """Send the whole state.

        Returns:
            False: nothing was sent, because the process found another file than the pinned one.

        Raises:
            SnapshotGivenUpError: the state could not be sent, or the client is too slow.
            CorruptionError: the database is damaged.
        """
        _log.info("sending a snapshot to a client: state at entry %d", self._index)
        try:
            async with asyncio.timeout(STALL_MAX_S) as limit:
                if self._size_bytes <= SMALL_BYTES:
                    if self._backend.is_sealed:
                        self._pin.check_seal()
                    for message in messages(self._pin):
                        await call.send(message)
                    return True
                self._process = process = await self._start()
                sent_bytes = await self._relay(process, call, limit)
                is_whole = await self._ended(process)
        except TimeoutError:
            raise self.given_up(f"the client took less than {RATE_MIN_BYTES_S >> 10} KiB/s") from None
        if is_whole:
            _log.info("sent a snapshot to a client (entry %d): %d bytes", self._index, sent_bytes)
        return is_whole

    async def _start(self) -> asyncio.subprocess.Process:
        # The same installation of raftkv as this process.
        path = os.pathsep.join(filter(None, (str(Path(raftkv.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *_PROGRAM,
            str(self._backend.path),
            str(self._index),
            self._pin.file_identity,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=PIPE_BYTES,
            env=os.environ | {"PYTHONPATH": path},
        )

    async def _relay(self, process: asyncio.subprocess.Process, call: StreamCall, limit: asyncio.Timeout) -> int:
        """Forward messages until the process has no more. Returns their bytes."""
        loop, output = asyncio.get_running_loop(), _pipe(process.stdout)
        sent_bytes, started = 0, loop.time()
        while True:
            try:
                size_bytes = _LENGTH.unpack(await output.readexactly(_LENGTH.size))[0]
                message = await output.readexactly(size_bytes)
            except asyncio.IncompleteReadError:
                return sent_bytes
            await call.send(message)
            sent_bytes += size_bytes
            limit.reschedule(STALL_MAX_S + min(loop.time(), started + sent_bytes / RATE_MIN_BYTES_S))
            self._check_room()

    def _check_room(self) -> None:
        """Fail if writes need the room that the pinned state takes."""
        grown_bytes = self._backend.size_bytes - self._size_bytes
        if grown_bytes > GROWTH_MAX_BYTES:
            raise self.given_up(f"the database grew by {grown_bytes >> 20} MiB while it was sent")
        if self._backend.waits_for_readers:
            raise self.given_up("the map of the database has to grow")

    async def _ended(self, process: asyncio.subprocess.Process) -> bool:
        """Return whether the process has completed its work; raise if it failed."""
        lines = (await _pipe(process.stderr).read()).decode(errors="replace").strip().splitlines()
        status = await process.wait()
        if status == DAMAGED_STATUS and lines:
            raise errors.CorruptionError(lines[-1])
        if status not in (0, OTHER_FILE_STATUS):
            raise self.given_up(lines[-1] if lines else f"its process ended with status {status}")
        return status == 0

    def given_up(self, reason: str) -> errors.SnapshotGivenUpError:
        """Log a line, and return the answer to the client."""
        _log.warning("aborted sending a snapshot to a client (entry %d): %s", self._index, reason)
        return errors.SnapshotGivenUpError(f"{errors.SnapshotGivenUpError.text}: {reason}")

    async def close(self) -> None:
        """End the process, then release the state."""
        try:
            if self._process is not None:
                if self._process.returncode is None:
                    self._process.kill()
                await self._process.communicate()
        finally:
            self._pin.close()


def _pipe(reader: asyncio.StreamReader | None) -> asyncio.StreamReader:
    if reader is None:
        raise errors.InvariantError("a process was started without its pipes")
    return reader
