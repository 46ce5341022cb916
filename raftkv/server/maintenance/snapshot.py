"""Maintenance.Snapshot: the database of this member as a file that etcd's tools read, streamed.

    call --> flush --> pin the state --> a process of its own makes the file --pipe--> call.send, when there is room

The file is made by ``raftkv.offline.etcd.export``, which reads the database beside this process: the work takes seconds
of a core, and this loop only passes messages on, each as large as etcd's. The read transaction held here keeps LMDB
from writing on any page of that state or of a later one, so the process needs no part in LMDB's locks. It says which
file it found under the name: a file that was put in its place meanwhile is not the one that is pinned. One that is
replaced afterwards is read to its end. Nothing is copied to the disk, and at most a pipe and a stream's send buffer lie
in memory.

The right is asked again when a state is pinned: what is sent from then on is as old. A call that loses its right while
it lasts is ended (``server/auth/guard``).

A client that does not read, or reads too slowly for how much is written, loses its stream: a pinned state makes the
database grow. Every member serves it, a learner too, with or without a leader.
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
"""Largest database that the member exports by itself: 2,000 tiny records took 8 ms, to start a process takes 200."""
STREAMS_MAX: Final = 2
"""Snapshots sent at a time: each of a larger database is a process, and takes a core for as long as it lasts."""
STALL_MAX_S: Final = 60.0
"""How long a client may take for one message, and the process to make the first one."""
RATE_MIN_BYTES_S: Final = 256 * 1024
"""Slowest that a client may be on the whole: one that takes a little now and then would keep its place for ever."""
GROWTH_MAX_BYTES: Final = 1 << 30
"""How much the database may grow while one state of it is pinned."""
ATTEMPTS_MAX: Final = 3
"""How often a file is looked for under its name: a defragmentation may put another one there."""
OTHER_FILE_STATUS: Final = 75
"""Exit status of the process that found another file (EX_TEMPFAIL)."""
DAMAGED_STATUS: Final = 65
"""Exit status of the process that found damage (EX_DATAERR)."""
PIPE_BYTES: Final = 256 * 1024

_PROGRAM: Final = ("-P", "-m", "raftkv.offline.etcd.export")
_LENGTH: Final = Struct("<I")


SNAPSHOT_S: Final = doubling(0.01, 17)


def _ignore(_error: errors.CorruptionError) -> None:
    """Leave it at the answer to the client."""


def _allow(_call: StreamCall) -> None:
    """Let every caller have it."""


class SnapshotService:
    """Handler of Maintenance.Snapshot.

    Arguments:
        store: what is sent.
        backend: its database.
        on_damage: called when it turns out to be damaged.
        check: raises the StatusError that refuses a caller by now.
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
        """Serve it."""
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
    """One state on its way: the read transaction that pins it, and the process that reads it."""

    def __init__(self, backend: LMDBBackend) -> None:
        self._backend = backend
        self._process: asyncio.subprocess.Process | None = None
        self._size_bytes = backend.size_bytes
        self._pin = backend.begin_read()
        self._index = schema.decode_integer(self._pin.get(schema.META, schema.META_CONSISTENT_INDEX)) or 0

    async def send(self, call: StreamCall) -> bool:
        """Send the whole state.

        Returns:
            False: nothing was sent, because the process found another file than the one that is pinned.

        Raises:
            SnapshotGivenUpError: it could not be sent, or the client is too slow.
            CorruptionError: the database is damaged.
        """
        _log.info("sending a snapshot of the state at %d to a client", self._index)
        try:
            async with asyncio.timeout(STALL_MAX_S) as limit:
                if self._size_bytes <= SMALL_BYTES:
                    for message in messages(self._pin):
                        await call.send(message)
                    return True
                self._process = process = await self._start()
                sent_bytes = await self._relay(process, call, limit)
                is_whole = await self._ended(process)
        except TimeoutError:
            raise self.given_up(f"the client took less than {RATE_MIN_BYTES_S >> 10} KiB/s") from None
        if is_whole:
            _log.info("sent the snapshot at %d to a client: %d bytes", self._index, sent_bytes)
        return is_whole

    async def _start(self) -> asyncio.subprocess.Process:
        # The same raftkv as this one, wherever it was found.
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
        """Pass messages on until the process has no more; returns their bytes."""
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
        """Give way to writes that find no room while the state is pinned."""
        grown_bytes = self._backend.size_bytes - self._size_bytes
        if grown_bytes > GROWTH_MAX_BYTES:
            raise self.given_up(f"the database grew by {grown_bytes >> 20} MiB while it was sent")
        if self._backend.waits_for_readers:
            raise self.given_up("the map of the database has to grow")

    async def _ended(self, process: asyncio.subprocess.Process) -> bool:
        """Return whether the process did all its work; raise if it failed."""
        lines = (await _pipe(process.stderr).read()).decode(errors="replace").strip().splitlines()
        status = await process.wait()
        if status == DAMAGED_STATUS and lines:
            raise errors.CorruptionError(lines[-1])
        if status not in (0, OTHER_FILE_STATUS):
            raise self.given_up(lines[-1] if lines else f"its process ended with status {status}")
        return status == 0

    def given_up(self, reason: str) -> errors.SnapshotGivenUpError:
        """Return the answer to the client, after a line in the log."""
        _log.warning("gave up the snapshot at %d on its way to a client: %s", self._index, reason)
        return errors.SnapshotGivenUpError(f"{errors.SnapshotGivenUpError.text}: {reason}")

    async def close(self) -> None:
        """End the process, then let go of the state."""
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
