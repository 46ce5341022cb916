"""Maintenance.Snapshot: one state, complete or with an error, during writes and with slow readers."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from raftkv.errors import CorruptionError
from raftkv.offline.etcd.export import LENGTH, OTHER_FILE_STATUS
from raftkv.offline.etcd.file import Status, snapshot_status
from raftkv.pb import rpc_pb2
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.status import RpcError
from raftkv.server.maintenance import snapshot
from raftkv.server.maintenance.snapshot import ATTEMPTS_MAX, SMALL_BYTES, STREAMS_MAX, SnapshotService
from raftkv.storage.backend.base import WriteBatch
from raftkv.storage.backend.lmdb import LMDBBackend, ThreadWriter
from raftkv.storage.failpoints import arm, disarm_all
from raftkv.storage.mvcc import Store
from raftkv.storage.revision import to_key
from raftkv.storage.schema import AUTH_USERS, CLUSTER_VERSION


class Call:
    """One call, whose client takes messages when ``take`` lets it."""

    def __init__(self, take: Callable[[], Awaitable[None]] | None = None) -> None:
        self._take = take
        self.messages: list[rpc_pb2.SnapshotResponse] = []

    async def receive(self) -> bytes:
        return b""

    async def send(self, message: bytes) -> None:
        if self._take is not None:
            await self._take()
        self.messages.append(rpc_pb2.SnapshotResponse.FromString(message))

    def save(self, path: Path) -> Status:
        path.write_bytes(b"".join(message.blob for message in self.messages))
        return snapshot_status(path)


class Blocked:
    """A client that takes nothing until it is released."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.released = asyncio.Event()

    async def take(self) -> None:
        self.reached.set()
        await self.released.wait()


class Member:
    def __init__(self, path: Path, map_size_bytes: int = 256 << 20) -> None:
        self.backend = LMDBBackend(path, map_size_bytes)
        self.store = Store.open(self.backend)
        self.service = SnapshotService(self.store, self.backend)
        self.index = 0

    def put(self, key: bytes, value: bytes = b"v") -> None:
        txn = self.store.begin()
        txn.put(key, value)
        txn.end()
        self.end_entry()

    def end_entry(self) -> None:
        self.index += 1
        self.store.set_applied(self.index, 1)

    async def send(self, call: Call) -> Call:
        await self.service.snapshot(cast(StreamCall, call))
        return call

    def replace(self, copy: Path) -> None:
        self.store.commit()
        self.backend.copy_to(copy)
        self.backend.replace(copy)

    def pins(self) -> int:
        return self.backend._environment.users - 1  # one is the store's own


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Member]:
    member = Member(tmp_path / "db")
    for number in range(300):
        member.put(b"k%d" % number, b"v" * 4_000)
    yield member
    member.store.close()
    member.backend.close()


def test_a_snapshot_is_everything_that_was_answered_before(member: Member, tmp_path: Path) -> None:
    call = asyncio.run(member.send(Call()))
    path = tmp_path / "file"
    assert call.save(path).revision == member.store.revision == 301
    *blobs, last = call.messages
    assert last.blob == hashlib.sha256(path.read_bytes()[:-32]).digest()
    assert {message.version for message in call.messages} == {CLUSTER_VERSION}
    assert blobs[0].remaining_bytes + len(blobs[0].blob) == path.stat().st_size - 32
    assert (blobs[-1].remaining_bytes, last.remaining_bytes) == (0, 0)
    assert not last.HasField("header")
    assert member.pins() == 0


def test_small_database_is_sent_without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "create_subprocess_exec", None)
    member = Member(tmp_path / "db")
    member.put(b"k")
    try:
        call = asyncio.run(member.send(Call()))
        assert call.save(tmp_path / "file").revision == member.store.revision == 2
        assert member.pins() == 0
    finally:
        member.store.close()
        member.backend.close()


def test_export_process_loads_neither_consensus_nor_apply() -> None:
    code = (
        "import sys, raftkv.offline.etcd.export; print(*(name for name in sys.modules if name.startswith('raftkv.')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name for name in ran.stdout.split() if not name.startswith(("raftkv.pb", "raftkv.storage.b"))}
    assert loaded == {
        "raftkv.errors",
        "raftkv.lazy",
        "raftkv.offline",
        "raftkv.offline.etcd",
        "raftkv.offline.etcd.export",
        "raftkv.offline.etcd.records",
        "raftkv.raft",
        "raftkv.raft.types",
        *(f"raftkv.{name}" for name in ("storage", "storage.datadir", "storage.failpoints")),
        *(f"raftkv.storage.{name}" for name in ("revision", "schema")),
    }


@pytest.mark.long
async def test_snapshot_waits_until_answered_writes_are_on_disk(tmp_path: Path) -> None:
    """Commits follow the answers, here by a second."""
    backend = LMDBBackend(tmp_path / "db", 64 << 20)
    store = Store.open(backend, ThreadWriter(asyncio.get_running_loop().call_soon_threadsafe))
    arm("beforeCommit", "sleep(1000)")
    try:
        txn = store.begin()
        txn.put(b"k", b"v")
        txn.end()
        store.set_applied(1, 1)
        call = Call()
        await SnapshotService(store, backend).snapshot(cast(StreamCall, call))
        assert call.save(tmp_path / "file").revision == 2
    finally:
        disarm_all()
        store.close()
        backend.close()


def test_writes_during_a_snapshot_are_not_in_it(member: Member, tmp_path: Path) -> None:
    """Every page that the first state does not need is written again while the client reads."""

    async def write() -> None:
        for number in range(40):
            member.put(b"k%d" % number, b"w" * 4_000)
        member.store.compact(member.store.revision)
        member.end_entry()
        while member.store.is_compacting:
            if not member.store.compaction_step():
                member.store.commit()

    call = asyncio.run(member.send(Call(write)))
    status = call.save(tmp_path / "file")
    assert (status.keys, status.revision) == (300, 301)
    assert member.store.revision > 1_000


async def test_more_than_some_at_a_time_are_refused(member: Member) -> None:
    readers = [Blocked() for _ in range(STREAMS_MAX)]
    sending = [asyncio.create_task(member.send(Call(reader.take))) for reader in readers]
    await asyncio.gather(*(reader.reached.wait() for reader in readers))
    with pytest.raises(RpcError, match="too many requests"):
        await member.send(Call())
    for reader in readers:
        reader.released.set()
    await asyncio.gather(*sending)
    await member.send(Call())


async def test_a_client_that_leaves_takes_the_process_and_the_pin_with_it(member: Member) -> None:
    reader = Blocked()
    task = asyncio.create_task(member.send(Call(reader.take)))
    await reader.reached.wait()
    task.cancel()
    await asyncio.wait([task])
    assert member.pins() == 0


def test_snapshot_to_stalled_client_is_cancelled(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "STALL_MAX_S", 0.5)
    with pytest.raises(RpcError, match="given up: the client took less than 256 KiB/s"):
        asyncio.run(member.send(Call(asyncio.Event().wait)))
    assert member.pins() == 0


@pytest.mark.long
def test_snapshot_to_trickling_client_is_cancelled(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "RATE_MIN_BYTES_S", 1 << 30)

    async def take() -> None:
        monkeypatch.setattr(snapshot, "STALL_MAX_S", 1.0)  # from the first message on: a process is to start before it
        await asyncio.sleep(0.1)

    call = Call(take)
    with pytest.raises(RpcError, match="given up: the client took less than"):
        asyncio.run(member.send(call))
    assert call.messages


def test_snapshot_is_cancelled_when_database_grows_too_much(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "GROWTH_MAX_BYTES", 1 << 20)

    async def write() -> None:
        for number in range(300):
            member.put(b"k%d" % number, b"w" * 4_000)
        member.store.commit()

    with pytest.raises(RpcError, match=r"given up: the database grew by \d+ MiB"):
        asyncio.run(member.send(Call(write)))


def test_a_damaged_record_ends_the_stream_with_its_name(member: Member) -> None:
    member.store.commit()
    batch = WriteBatch()
    batch.records[to_key(500 << 24)] = b"\0\0\0\0\x0a\x01k"
    member.backend.commit(batch)
    with pytest.raises(RpcError, match=r"given up: record of revision 500\.0 is corrupt"):
        asyncio.run(member.send(Call()))


@pytest.mark.parametrize("size_bytes", [0, 2 * SMALL_BYTES], ids=["in this process", "in a process"])
def test_damaged_user_is_not_sent(tmp_path: Path, size_bytes: int) -> None:
    """Records have checksums of their own, all else has one that was compared only where a process was started."""
    member, found = Member(tmp_path / "db"), list[CorruptionError]()
    member.service = SnapshotService(member.store, member.backend, found.append)
    member.put(b"k", bytes(size_bytes))
    member.store.meta_put(AUTH_USERS, b"some user", b"needle")
    member.end_entry()
    member.store.commit()
    data = (tmp_path / "db").read_bytes()
    with (tmp_path / "db").open("r+b") as file:
        file.seek(data.rindex(b"needle"))
        file.write(b"noodle")
    with pytest.raises(RpcError, match="its applied index, members, leases or users are not what was written"):
        asyncio.run(member.send(Call()))
    assert len(found) == 1
    member.store.close()
    member.backend.close()


def test_a_database_that_is_replaced_is_sent_to_its_end(member: Member, tmp_path: Path) -> None:
    """The old file goes on without its name; what is written goes to the other."""
    replaced = False

    async def replace() -> None:
        nonlocal replaced
        if not replaced:
            replaced = True
            member.replace(tmp_path / "copy")
        for number in range(50):
            member.put(b"k%d" % number, b"w" * 4_000)
        member.store.commit()

    call = asyncio.run(member.send(Call(replace)))
    assert call.save(tmp_path / "file").revision == 301


@pytest.mark.long
def test_a_file_that_was_exchanged_before_it_was_opened_is_not_sent(member, tmp_path, monkeypatch):
    """What is pinned is the old file: the process finds the new one, and is started again for that."""
    start, starts = snapshot._Stream._start, 0

    async def exchange_and_start(stream: Any) -> Any:
        nonlocal starts
        starts += 1
        if starts < ATTEMPTS_MAX:
            member.replace(tmp_path / "copy")
        return await start(stream)

    monkeypatch.setattr(snapshot._Stream, "_start", exchange_and_start)
    call = asyncio.run(member.send(Call()))
    assert starts == ATTEMPTS_MAX
    assert call.save(tmp_path / "file").revision == 301
    starts = -100
    with pytest.raises(RpcError, match="replaced again and again"):
        asyncio.run(member.send(Call()))


def test_a_map_that_must_grow_ends_the_stream(member: Member) -> None:
    async def grow() -> None:
        member.backend.grow()

    with pytest.raises(RpcError, match="given up: the map of the database has to grow"):
        asyncio.run(member.send(Call(grow)))


def test_both_ends_of_the_pipe_agree() -> None:
    assert snapshot._LENGTH.format == LENGTH.format
    assert snapshot.OTHER_FILE_STATUS == OTHER_FILE_STATUS
