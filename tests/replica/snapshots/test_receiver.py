"""Receiving databases: exactly the sent data, verified on this disk, and no unneeded file remains."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raftkv.errors import ForkedError, StorageError
from raftkv.pb import raft_pb2
from raftkv.raft.types import ConfState, Message, MessageType, SnapshotMeta
from raftkv.replica.codec import encode_snapshot_meta
from raftkv.replica.snapshots import files, receiver
from raftkv.replica.snapshots.receiver import SnapshotReceiver
from raftkv.storage import snapshot as storage_snapshot
from raftkv.storage.backend import copying
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.mvcc import Store
from raftkv.storage.revision import pack, to_key
from raftkv.storage.snapshot import SnapshotInfo, write_snapshot
from tests.rpc.attacks.test_work_of_a_read import Turns
from tests.rpc.loop import until

CONF = ConfState(voters=(1, 2))
CHUNK_BYTES = 10_000
Chunks = list[raft_pb2.SnapshotChunk]


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SnapshotInfo]:
    """A copy that another member made."""
    directory = tmp_path_factory.mktemp("sent")
    store = Store.open(LMDBBackend(directory / "db", 16 << 20))
    for index in range(1, 30):
        txn = store.begin()
        txn.put(b"k%d" % index, bytes(index))
        txn.end()
        store.set_applied(index, 3)
    store.set_conf_state(CONF)
    store.set_applied(30, 3)
    store.commit()
    info = write_snapshot(store.backend, directory / "copy")
    store.close()
    store.backend.close()
    return directory / "copy", info


def raised(error: ForkedError) -> None:
    raise error


class Call:
    """The stream from the sender."""

    def __init__(self, chunks: Chunks, hangs: bool = False) -> None:
        self._chunks = chunks[::-1]
        self._hangs = hangs

    async def receive(self) -> bytes | None:
        await asyncio.sleep(0)
        if not self._chunks and self._hangs:
            await asyncio.get_running_loop().create_future()
        return self._chunks.pop().SerializeToString() if self._chunks else None


def chunks_of(sent: tuple[Path, SnapshotInfo], **claims: Any) -> Chunks:
    """What a sender sends; ``claims`` are fields of the info that it lies about."""
    path, info = sent
    info = replace(info, **claims)
    data = path.read_bytes()
    message = raft_pb2.Message(
        type=MessageType.SNAPSHOT,
        to_id=2,
        from_id=1,
        term=5,
        snapshot=encode_snapshot_meta(SnapshotMeta(info.index, info.term, info.conf_state)),
    )
    return [
        raft_pb2.SnapshotChunk(message=message, size_bytes=info.size_bytes),
        *(raft_pb2.SnapshotChunk(data=data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)),
        raft_pb2.SnapshotChunk(sha256=info.sha256),
    ]


def receive(
    directory: Path, *calls: Call, awaited: Callable[[int], bool] = lambda index: False, sender: int = 1
) -> list[Any]:
    """Take what some senders send at once; messages or errors."""

    async def scenario() -> list[Any]:
        taker = SnapshotReceiver(directory, awaited, lambda index: None, raised)
        taking: list[Any] = [taker.receive(call, sender) for call in calls]
        return list(await asyncio.gather(*taking, return_exceptions=True))

    return asyncio.run(scenario())


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


PLACED = f"{30:016x}.snap.db"


def test_a_whole_database_is_put_in_its_place(tmp_path: Path, sent: tuple[Path, SnapshotInfo]) -> None:
    (message,) = receive(tmp_path, Call(chunks_of(sent)))
    assert isinstance(message, Message)
    assert (message.type, message.from_, message.to, message.term) == (MessageType.SNAPSHOT, 1, 2, 5)
    assert message.snapshot == SnapshotMeta(30, 3, CONF)
    assert names(tmp_path) == [PLACED]
    assert (tmp_path / PLACED).read_bytes() == sent[0].read_bytes()
    assert (tmp_path / PLACED).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("revision", "data", "is_fork"),
    [
        (10, b"\x0a\x02k9\x10\x0a\x18\x0a \x01*\x09" + bytes(9), False),
        (10, b"\x0a\x01x", True),
        (31, b"\x0a\x01x", True),
    ],
    ids=["the same record", "another record", "no record"],
)
def test_database_of_another_history_is_refused(tmp_path, sent, revision: int, data: bytes, is_fork: bool) -> None:
    """A database took the place of the only copy of acknowledged writes, and no line of the log said so."""
    forks: list[ForkedError] = []

    async def scenario() -> Message:
        taker = SnapshotReceiver(
            tmp_path, lambda index: False, lambda index: (to_key(pack(revision, 0)), data), forks.append
        )
        return await taker.receive(Call(chunks_of(sent)), 1)

    if not is_fork:
        asyncio.run(scenario())
        assert names(tmp_path) == [PLACED]
        return
    with pytest.raises(StorageError, match=f"revision {revision} was committed here"):
        asyncio.run(scenario())
    assert (len(forks), names(tmp_path)) == (1, [])


class AtOnce(Call):
    """A stream of which everything has come already; notes in which turn each piece is taken."""

    def __init__(self, chunks: Chunks) -> None:
        super().__init__(chunks)
        self.by_turn: Counter[int] = Counter()
        self.turns: Turns | None = None

    async def receive(self) -> bytes | None:
        self.turns = self.turns or Turns()
        self.by_turn[self.turns.number] += 1
        if not self._chunks:
            self.turns.stop()
            return None
        return self._chunks.pop().SerializeToString()


def test_a_turn_takes_some_of_very_many_small_pieces(tmp_path: Path, sent: tuple[Path, SnapshotInfo]) -> None:
    """300,000 pieces of one byte each held a member for 1.2 s."""
    pieces = [raft_pb2.SnapshotChunk(data=b"x")] * (5 * receiver.PIECES_AT_ONCE)
    call = AtOnce([*chunks_of(sent)[:1], *pieces])
    (error,) = receive(tmp_path, call)
    assert "ended early" in str(error)
    assert max(call.by_turn.values()) <= receiver.PIECES_AT_ONCE + 1


def cut_off(chunks: Chunks) -> Chunks:
    return chunks[:-1]


def shorter(chunks: Chunks) -> Chunks:
    return [*chunks[:1], *chunks[2:]]


def longer(chunks: Chunks) -> Chunks:
    return [*chunks[:2], *chunks[1:]]


def with_nothing(chunks: Chunks) -> Chunks:
    """One piece more, without data: without end, such pieces would keep the room of the database for ever."""
    return [*chunks[:2], raft_pb2.SnapshotChunk(), *chunks[2:]]


def flipped(chunks: Chunks) -> Chunks:
    data = bytearray(chunks[2].data)
    data[77] ^= 1
    return [*chunks[:2], raft_pb2.SnapshotChunk(data=bytes(data)), *chunks[3:]]


def headless(chunks: Chunks) -> Chunks:
    return chunks[1:]


def nothing(chunks: Chunks) -> Chunks:
    return []


def test_a_database_in_the_name_of_another_member_is_refused_unread(tmp_path, sent):
    (error,) = receive(tmp_path, Call(chunks_of(sent)), sender=3)
    assert str(error) == "member 3 sent a snapshot in the name of 1"
    assert list(tmp_path.glob("*.tmp")) == []


@pytest.mark.parametrize("damage", [cut_off, shorter, longer, with_nothing, flipped, headless, nothing])
def test_incomplete_database_is_refused_and_removed(tmp_path, sent, damage):
    (error,) = receive(tmp_path, Call(damage(chunks_of(sent))))
    assert isinstance(error, StorageError)
    assert "\n" not in str(error)
    assert names(tmp_path) == []


@pytest.mark.parametrize("claims", [{"index": 31}, {"term": 4}, {"conf_state": ConfState(voters=(9,))}])
def test_a_database_of_another_entry_is_refused(tmp_path, sent, claims):
    (error,) = receive(tmp_path, Call(chunks_of(sent, **claims)))
    assert isinstance(error, StorageError)
    assert "damaged" in str(error)
    assert names(tmp_path) == []


def test_a_database_damaged_at_its_sender_is_refused_and_names_the_sender(tmp_path, sent):
    """All bytes arrived as they were sent: only their content tells."""
    data = bytearray(sent[0].read_bytes())
    data[data.index(b"k17")] ^= 1
    path = tmp_path.with_name("damaged")
    path.write_bytes(data)
    info = replace(sent[1], sha256=hashlib.sha256(data).digest())
    (error,) = receive(tmp_path, Call(chunks_of((path, info))))
    assert isinstance(error, StorageError)
    assert str(error) == (
        "member 1 sent a database that is damaged: record of revision 18.0 is corrupt: its checksum is wrong; this "
        "member keeps its own: look at the disk of member 1, and replace it"
    )
    assert names(tmp_path) == []


def test_checksum_is_verified_on_the_written_file(tmp_path, sent, monkeypatch):
    """What came over the wire was right; what the disk gives back is not."""

    def rot(path: Path, info: SnapshotInfo, rest: Callable[[float], None]) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
        storage_snapshot.verify_snapshot(path, info, rest)

    monkeypatch.setattr(receiver, "verify_snapshot", rot)
    (error,) = receive(tmp_path, Call(chunks_of(sent)))
    assert isinstance(error, StorageError)
    assert names(tmp_path) == []


def test_two_senders_do_not_write_one_file(tmp_path: Path, sent: tuple[Path, SnapshotInfo]) -> None:
    messages = receive(tmp_path, *(Call(chunks_of(sent)) for _ in range(3)), Call(flipped(chunks_of(sent))))
    assert [type(message) for message in messages] == [Message] * 3 + [StorageError]
    assert names(tmp_path) == [PLACED]
    assert (tmp_path / PLACED).read_bytes() == sent[0].read_bytes()


def test_ignored_database_is_removed_and_an_awaited_one_is_kept(tmp_path, sent):
    (message,) = receive(tmp_path, Call(chunks_of(sent)))
    awaited: list[int] = [30]
    taker = SnapshotReceiver(tmp_path, awaited.__contains__, lambda index: None, raised)
    before = (tmp_path / PLACED).stat().st_ino
    assert isinstance(receive(tmp_path, Call(chunks_of(sent)), awaited=awaited.__contains__)[0], Message)
    taker.settle(message)
    assert (tmp_path / PLACED).stat().st_ino == before
    awaited.clear()
    taker.settle(message)
    assert names(tmp_path) == []


async def test_awaited_database_survives_another_of_the_same_entry(tmp_path, sent):
    """Two leaders, one after the other, sent one each: the core ignores the first message and takes the second."""
    awaited: list[int] = []
    taker = SnapshotReceiver(tmp_path, awaited.__contains__, lambda index: None, raised)
    first, second = [await taker.receive(Call(chunks_of(sent)), 1) for _ in range(2)]
    taker.settle(first)
    assert names(tmp_path) == [PLACED]
    awaited.append(30)
    taker.settle(second)
    assert names(tmp_path) == [PLACED]
    awaited.clear()
    taker.settle(await taker.receive(Call(chunks_of(sent)), 1))
    await until(lambda: names(tmp_path) == [])  # a thread deletes it


def test_a_sender_that_stops_sending_is_not_waited_for(tmp_path, sent, monkeypatch):
    monkeypatch.setattr(receiver, "IDLE_TIMEOUT_S", 0.05)
    (error,) = receive(tmp_path, Call(chunks_of(sent)[:3], hangs=True))
    assert str(error) == "a snapshot stopped coming for 0.05 s"
    assert names(tmp_path) == []


def test_without_room_nothing_is_received(tmp_path, sent, monkeypatch):
    free_bytes = shutil.disk_usage(tmp_path).free
    monkeypatch.setattr(files, "DISK_RESERVE_BYTES", free_bytes + (1 << 30))
    (error,) = receive(tmp_path, Call(chunks_of(sent)))
    assert "free in" in str(error)
    assert str(error).endswith(": make room")
    assert names(tmp_path) == []


async def test_receive_is_cancelled_when_room_is_needed(tmp_path: Path, sent: tuple[Path, SnapshotInfo]) -> None:
    taker = SnapshotReceiver(tmp_path, lambda index: False, lambda index: None, raised)
    call: Any = Call(chunks_of(sent)[:3], hangs=True)
    receiving = asyncio.create_task(taker.receive(call, 1))
    await until(lambda: names(tmp_path))
    assert taker.give_up()
    assert not taker.give_up()
    error = (await asyncio.gather(receiving, return_exceptions=True))[0]
    assert isinstance(error, StorageError)
    assert "the disk is full" in str(error)
    await until(lambda: names(tmp_path) == [])


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    kept = ["applied", "before the upgrade.snap.db", "db", "db-lock", "my.out.db"]
    left = [
        "0001.1.tmp",
        "0001.1.out.db",
        f"{7:016x}.snap.db",
        f"{7:016x}.snap.db-lock",
        "0001.tmp",
        "0001.out.db-lock",
    ]
    for name in kept + left:
        (tmp_path / name).touch()
    files.remove_leftovers(tmp_path)
    assert names(tmp_path) == kept
    for index in (5, 6, 7):
        files.snapshot_path(tmp_path, index).touch()
    # A name without a number stopped the member in the last step of an installation.
    files.remove_received(tmp_path, 6)
    assert names(tmp_path) == [f"{7:016x}.snap.db", *kept]


def resumable(sent: tuple[Path, SnapshotInfo], offset: int = 0, until_byte: int | None = None) -> Chunks:
    """What a sender sends that goes on with broken streams; one that breaks is cut off there."""
    header, *_ = chunks_of(sent)
    header.sha256, header.offset_bytes = sent[1].sha256, offset
    data = sent[0].read_bytes()[offset:until_byte]
    pieces = [raft_pb2.SnapshotChunk(data=data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    return [header, *pieces, *([] if until_byte else [raft_pb2.SnapshotChunk(sha256=sent[1].sha256)])]


def question(info: SnapshotInfo) -> bytes:
    return raft_pb2.SnapshotOffsetRequest(
        index=info.index, term=info.term, size_bytes=info.size_bytes, sha256=info.sha256
    ).SerializeToString()


async def _offset(taker: SnapshotReceiver, info: SnapshotInfo) -> int:
    answer = await taker._offset(question(info), None)
    return raft_pb2.SnapshotOffsetResponse.FromString(answer).offset_bytes


async def _take(taker: SnapshotReceiver, chunks: Chunks) -> object:
    call: Any = Call(chunks)
    return (await asyncio.gather(taker.receive(call, 1), return_exceptions=True))[0]


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_broken_stream_is_gone_on_with_where_it_stopped(tmp_path, sent, monkeypatch, restarted):
    monkeypatch.setattr(receiver, "WRITE_BYTES", 1)
    taker = SnapshotReceiver(tmp_path, lambda index: False, lambda index: None, raised)
    assert await _offset(taker, sent[1]) == 0
    for end in (1, 9_000, 17_000):
        have = await _offset(taker, sent[1])
        error = await _take(taker, resumable(sent, have, end))
        assert str(error) == "a snapshot ended early"
        if restarted:
            files.remove_leftovers(tmp_path)
            taker = SnapshotReceiver(tmp_path, lambda index: False, lambda index: None, raised)
            taker.start()
        assert await _offset(taker, sent[1]) == end
        assert await _offset(taker, replace(sent[1], sha256=bytes(32))) == 0, "another copy"
    # Less than what is here is fine too; it is written again.
    assert isinstance(await _take(taker, resumable(sent, 16_500)), Message)
    taker.close()
    assert names(tmp_path) == [PLACED]
    assert (tmp_path / PLACED).read_bytes() == sent[0].read_bytes()


def test_stream_resuming_past_received_bytes_is_refused(tmp_path: Path, sent: tuple[Path, SnapshotInfo]) -> None:
    (error,) = receive(tmp_path, Call(resumable(sent, 100)))
    assert str(error) == "a snapshot continues at byte 100, of which 0 are here"
    assert names(tmp_path) == []


async def test_bytes_that_a_power_cut_lost_are_found_missing(tmp_path, sent, monkeypatch):
    """The file says that it has them: what it has is compared with the digest all the same, and all comes again."""
    monkeypatch.setattr(receiver, "WRITE_BYTES", 1)
    taker = SnapshotReceiver(tmp_path, lambda index: False, lambda index: None, raised)
    await _take(taker, resumable(sent, 0, 17_000))
    path = receiver.partial_path(tmp_path, 30, 3, sent[1].size_bytes, sent[1].sha256)
    data = bytearray(path.read_bytes())
    data[8_192:12_288] = bytes(4_096)
    path.write_bytes(data)
    error = await _take(taker, resumable(sent, 17_000))
    assert "damaged" in str(error)
    assert await _offset(taker, sent[1]) == 0
    assert isinstance(await _take(taker, resumable(sent)), Message)
    assert names(tmp_path) == [PLACED]


async def test_the_next_stream_ends_one_that_is_not_known_to_be_dead(tmp_path, sent, monkeypatch):
    monkeypatch.setattr(receiver, "WRITE_BYTES", 1)
    taker = SnapshotReceiver(tmp_path, lambda index: False, lambda index: None, raised)
    dead: Any = Call(resumable(sent, 0, 20_000), hangs=True)
    receiving = asyncio.create_task(taker.receive(dead, 1))
    await until(lambda: dead._chunks == [])
    assert await _offset(taker, sent[1]) == 20_000
    second: Any = Call(resumable(sent, 20_000, 20_400), hangs=True)
    replaced = asyncio.create_task(taker.receive(second, 1))
    await until(lambda: second._chunks == [])
    # Without a question too.
    whole = await _take(taker, resumable(sent))
    whole, *ended = [whole, *await asyncio.gather(receiving, replaced, return_exceptions=True)]
    assert isinstance(whole, Message)
    assert [type(error) for error in ended] == [asyncio.CancelledError] * 2
    assert names(tmp_path) == [PLACED]


async def test_remains_of_a_database_are_removed(tmp_path, sent, monkeypatch):
    other = replace(sent[1], sha256=bytes(32))
    taker = SnapshotReceiver(tmp_path, lambda index: False, lambda index: None, raised)
    await _take(taker, resumable((sent[0], other), 0, 20_000))
    (kept,) = names(tmp_path)
    await _take(taker, resumable(sent, 0, 20_000))
    await until(lambda: len(names(tmp_path)) == 1)
    assert names(tmp_path) != [kept]
    assert taker.give_up(), "its room is needed"
    await until(lambda: names(tmp_path) == [])
    assert not taker.give_up()
    monkeypatch.setattr(receiver, "KEPT_S", 0.01)
    await _take(taker, resumable(sent, 0, 20_000))
    await until(lambda: names(tmp_path) == [])


class Check:
    """The check of what has come, which ends when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        monkeypatch.setattr(receiver, "verify_snapshot", self._check)

    def _check(self, path: Path, info: SnapshotInfo, rest: Callable[[float], None]) -> None:
        storage_snapshot.verify_snapshot(path, info, rest)
        self.begun.set()
        assert self.may_end.wait(60)


async def test_database_being_checked_is_not_taken_for_an_abandoned_one(tmp_path, sent, monkeypatch):
    """The time of a broken stream's rest ended while all of it had come by the next: it was removed."""

    monkeypatch.setattr(receiver, "WRITE_BYTES", 1)
    check = Check(monkeypatch)
    taker = SnapshotReceiver(tmp_path, lambda index: False, lambda index: None, raised)
    await _take(taker, resumable(sent, 0, 20_000))
    whole = asyncio.create_task(_take(taker, resumable(sent, 20_000)))
    await until(check.begun.is_set)
    assert not taker._partials.remove()
    check.may_end.set()
    assert isinstance(await whole, Message)
    assert names(tmp_path) == [PLACED]


class Second(Call):
    """A stream of a copy that another has brought just now; looks at it when its own first piece is taken."""

    def __init__(self, chunks: Chunks, first: asyncio.Task[object], look: Callable[[], None]) -> None:
        super().__init__(chunks)
        self.first, self.look = first, look
        self.is_begun = False

    async def receive(self) -> bytes | None:
        if self.is_begun and not self.first.done():
            await asyncio.wait([self.first])
        if self.is_begun:
            self.look()
        self.is_begun = True
        return await super().receive()


async def test_a_stream_does_not_write_to_a_file_that_is_being_checked(tmp_path, sent, monkeypatch):
    """A sender whose connection broke silently comes again: it wrote on into what was by then the database in use."""
    looked: list[bytes] = []
    check = Check(monkeypatch)
    taker = SnapshotReceiver(tmp_path, lambda index: False, lambda index: None, raised)
    first = asyncio.create_task(_take(taker, resumable(sent)))
    await until(check.begun.is_set)
    call: Any = Second(resumable(sent), first, lambda: looked.append((tmp_path / PLACED).read_bytes()))
    second = asyncio.create_task(taker.receive(call, 1))
    await until(lambda: call.is_begun)
    for _ in range(200):  # more than the second one needs to open a file
        await asyncio.sleep(0)
    check.may_end.set()
    messages = list(await asyncio.gather(first, second, return_exceptions=True))
    assert looked
    assert all(data == sent[0].read_bytes() for data in looked)
    assert [type(message) for message in messages] == [Message, Message]
    assert names(tmp_path) == [PLACED]


async def test_receive_cancelled_during_allocation_frees_the_room(tmp_path, sent, monkeypatch):
    """Without its name, but open, the file took the room of a whole database until the member was started anew."""
    begun, may_end = threading.Event(), threading.Event()
    allocate = os.posix_fallocate

    def slow(*arguments: int) -> None:
        begun.set()
        assert may_end.wait(60)
        allocate(*arguments)

    def open_files() -> list[str]:
        links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        targets = [os.readlink(link) for link in links if os.path.islink(link)]
        return [target for target in targets if target.startswith(str(tmp_path))]

    taker = SnapshotReceiver(tmp_path, lambda index: False, lambda index: None, raised)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", slow)
        receiving = asyncio.create_task(_take(taker, resumable(sent)))
        await until(begun.is_set)
        assert taker.give_up()
        may_end.set()
        error = await receiving
    await until(lambda: names(tmp_path) == [])
    assert open_files() == []
    assert isinstance(error, StorageError)


@pytest.mark.parametrize("step", ["posix_fallocate", "pwrite", "fdatasync", "ftruncate", "fsync"])
async def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path, sent, monkeypatch, step):
    monkeypatch.setattr(receiver, "WRITE_BYTES", 1)
    monkeypatch.setattr(copying, "SYNC_BYTES", 15_000)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    taker = SnapshotReceiver(tmp_path, lambda index: False, lambda index: None, raised)
    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        error = await _take(taker, resumable(sent))
    assert str(error) == f"cannot store a snapshot in {tmp_path}: No space left on device"
    assert await _offset(taker, sent[1]) == 0
    await until(lambda: names(tmp_path) == [])
    assert isinstance(await _take(taker, resumable(sent)), Message)
    assert names(tmp_path) == [PLACED]
