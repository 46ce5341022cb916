"""Sending databases: one report to the core per send, after any failure; no file and no hold on the log remains."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv.errors import CorruptionError, MapFullError, SpaceError, StorageError
from raftkv.pb import raft_pb2
from raftkv.raft.types import ConfState, Message, MessageType, SnapshotMeta
from raftkv.replica.snapshots import files, sender
from raftkv.replica.snapshots.sender import SnapshotSender
from raftkv.rpc.status import Code, RpcError
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.mvcc import Store
from tests.rpc.loop import until

MAP_BYTES = 16 << 20
PATIENCE_S = 90.0
META = SnapshotMeta(1, 1, ConfState(voters=(1, 2)))


def snapshot(to: int, term: int = 1) -> Message:
    return Message(MessageType.SNAPSHOT, to=to, from_=1, term=term, snapshot=META)


class Stream:
    """The other member: takes everything, or ends as the test says."""

    def __init__(self, ending: str) -> None:
        self.ending = ending
        self.sent: list[raft_pb2.SnapshotChunk] = []
        self.cancelled = False

    async def send(self, message: bytes) -> None:
        await asyncio.sleep(0)
        self.sent.append(raft_pb2.SnapshotChunk.FromString(message))
        if self.ending == "breaks":
            raise RpcError(Code.UNAVAILABLE, "gone")
        if self.ending == "surprises":
            raise ZeroDivisionError("a bug")
        if self.ending == "hangs":
            await asyncio.get_running_loop().create_future()

    def half_close(self) -> None:
        pass

    def cancel(self) -> None:
        self.cancelled = True

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> bytes:
        if self.ending == "refuses":
            raise RpcError(Code.RESOURCE_EXHAUSTED, "no room")
        raise StopAsyncIteration


class Channel:
    """The connection to a member that has so much of every copy; None: it does not know the question."""

    def __init__(self, ending: str, has_bytes: int | None = 0) -> None:
        self.ending = ending
        self.has_bytes = has_bytes
        self.streams: list[Stream] = []

    async def unary(self, *_: object, **__: object) -> bytes:
        if self.has_bytes is None:
            raise RpcError(Code.UNIMPLEMENTED, "unknown method SnapshotOffset")
        return raft_pb2.SnapshotOffsetResponse(offset_bytes=self.has_bytes).SerializeToString()

    def stream(self, *_: object, **__: object) -> Stream:
        self.streams.append(Stream(self.ending))
        return self.streams[-1]


class World:
    """A sender and what it is connected to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = Store.open(LMDBBackend(directory / "db", MAP_BYTES))
        txn = self.store.begin()
        txn.put(b"k", b"v")
        txn.end()
        self.store.set_conf_state(ConfState(tuple(range(1, 10))))
        self.store.set_applied(7, 1)
        self.channels: dict[int, Channel | None] = {}
        self.reports: list[tuple[int, bool]] = []
        self.damage: list[CorruptionError] = []
        self.wanted = True
        self.served: set[tuple[int, int]] = set()
        channel: Any = self.channels.get
        self.sender = SnapshotSender(
            self.store,
            directory,
            channel,
            lambda message: self.wanted,
            lambda to, index: (to, index) in self.served,
            lambda to, ok: self.reports.append((to, ok)),
            self.damage.append,
        )

    async def settled(self) -> None:
        """Wait until nothing is under way."""
        async with asyncio.timeout(90):
            while self.sender._tasks:
                await asyncio.wait(self.sender._tasks)
                await asyncio.sleep(0)

    def close(self) -> None:
        self.store.close()
        self.store.backend.close()

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir() if not path.name.startswith("db"))


@asynccontextmanager
async def world_in(directory: Path) -> AsyncIterator[World]:
    world = World(directory)
    try:
        yield world
        await world.sender.close()
    finally:
        world.close()


@pytest.fixture
def world(tmp_path: Path) -> AbstractAsyncContextManager[World]:
    return world_in(tmp_path)


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "RETRY_MIN_S", 0.0)


ENDINGS = st.sampled_from(["takes", "refuses", "breaks", "surprises", "hangs", "absent", "unwanted"])
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["send", "send", "turn", "wait", "give up"]), st.integers(2, 3), ENDINGS), max_size=12
)


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS)
def test_every_send_ends_in_one_report_unless_another_follows(tmp_path_factory, actions):
    async def scenario(world: World) -> None:
        events: list[tuple[int, str]] = []
        world.sender._report = lambda to, ok: events.append((to, "report"))
        for action, to, ending in actions:
            if action == "send":
                world.channels[to] = None if ending == "absent" else Channel(ending)
                world.wanted = ending != "unwanted"
                before = len(events)
                world.sender.send(snapshot(to))
                assert len(events) == before, "the core must not be entered again while it sends"
                events.append((to, "send"))
            elif action == "turn":
                await asyncio.sleep(0)
            elif action == "wait":
                await asyncio.sleep(0.005)
            else:
                world.sender.give_up("a test says so")
        async with asyncio.timeout(90):
            while world.sender._tasks:
                await asyncio.sleep(0.001)
                world.sender.give_up("a test says so")
            world.sender.give_up("a test says so")
            await world.sender.copies.close()
        for to in (2, 3):
            sequence = "".join(what[0] for peer, what in events if peer == to)
            assert "rr" not in sequence, "a report without a waiting core"
            assert not sequence.startswith("r"), "a report without a waiting core"
            assert not sequence.endswith("s"), f"member {to} would stay in SNAPSHOT for ever"
        assert not world.sender.holds_log()
        assert world.files == []

    async def main() -> None:
        async with world_in(tmp_path_factory.mktemp("send")) as world:
            await scenario(world)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("ending", "ok"), [("takes", True), ("refuses", False), ("breaks", False), ("surprises", False)]
)
async def test_how_a_send_ends_is_told(world: World, ending: str, ok: bool) -> None:
    channel = world.channels[2] = Channel(ending)
    world.sender.send(snapshot(2))
    await world.settled()
    assert world.reports == [(2, ok)]
    assert channel.streams[0].cancelled
    assert channel.streams[0].sent[0].message.snapshot.index == 7, "the copy's own index"


async def test_leadership_loss_during_pause_is_not_a_failure(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "RETRY_MIN_S", 3600.0)
    monkeypatch.setattr(sender, "RETRY_MAX_S", 3600.0)
    world.channels[2] = Channel("takes")
    world.wanted = False
    world.sender.send(snapshot(2))
    await world.settled()
    world.wanted = True
    world.sender.send(snapshot(2))
    await world.settled()
    assert world.reports == [(2, False), (2, True)]


def test_a_member_rests_after_its_failure_not_after_the_next_question(tmp_path, monkeypatch):
    """Each leader's term may be shorter than the rest."""
    monkeypatch.setattr(sender, "RETRY_MIN_S", 3600.0)
    monkeypatch.setattr(sender, "RETRY_MAX_S", 3600.0)

    async def scenario() -> None:
        async with world_in(tmp_path) as world:
            channel = world.channels[2] = Channel("refuses")
            world.sender.send(snapshot(2))
            await world.settled()
            channel.ending = "takes"
            world.sender.send(snapshot(2))
            for _ in range(10):
                await asyncio.sleep(0)
            assert len(channel.streams) == 1
            loop = asyncio.get_running_loop()
            clock = loop.time
            monkeypatch.setattr(loop, "time", lambda: clock() + 3600)
            world.sender.send(snapshot(2))
            await world.settled()
            assert world.reports == [(2, False), (2, True)]

    asyncio.run(scenario())  # the clock of the loop is set beyond the time that a test may take


async def test_a_send_asked_for_by_the_report_of_the_last_is_made(world: World) -> None:
    """The core sends again as soon as it hears of a failure: in the very turn in which the old send ends."""
    world.channels[2] = Channel("breaks")
    reports = world.reports.append

    def report(to: int, ok: bool) -> None:
        reports((to, ok))
        if not ok:
            world.channels[2] = Channel("takes")
            world.sender.send(snapshot(2))

    world.sender._report = report
    world.sender.send(snapshot(2))
    await world.settled()
    assert world.reports == [(2, False), (2, True)]


def test_two_sends_to_one_member_do_not_share_a_file(tmp_path: Path) -> None:
    names = {files.outgoing_path(tmp_path) for _ in range(3)} | {files.incoming_path(tmp_path, 2) for _ in range(3)}
    assert len(names) == 6


@pytest.mark.parametrize(("size_mib", "needed_mib"), [(0, 80), (50, 180), (1_000, 1_256)])
def test_a_copy_needs_room_for_itself_and_for_the_writes_meanwhile(tmp_path, size_mib, needed_mib):
    """Where a disk is small, a follower with a small database can still catch up as long as writes are accepted."""
    needed_bytes = needed_mib << 20
    files.check_room(tmp_path, size_mib << 20, free_disk_bytes=lambda _: needed_bytes)
    with pytest.raises(SpaceError, match=f"a snapshot of {size_mib} MiB needs {needed_mib} MiB free"):
        files.check_room(tmp_path, size_mib << 20, free_disk_bytes=lambda _: needed_bytes - 1)


async def test_without_room_for_it_no_copy_is_begun(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "DISK_RESERVE_BYTES", 1 << 60)
    channel = world.channels[2] = Channel("takes")
    world.sender.send(snapshot(2))
    await world.settled()
    assert world.reports == [(2, False)]
    assert channel.streams == []


async def test_a_copy_is_not_dropped_before_the_send_that_waited_for_it_has_run(world: World) -> None:
    """The log asks ten times a second whether it is held; in one moment of each copy it seemed unused."""
    world.channels[2] = Channel("takes")
    world.sender.send(snapshot(2))
    while world.sender._tasks:
        world.sender.holds_log()
        await asyncio.sleep(0)
    assert world.reports == [(2, True)]


async def test_a_member_that_stops_in_the_middle_of_an_entry_waits_for_no_commit(world: World) -> None:
    """The entry under way never ends then, so the commit behind it never comes: the member hung as it stopped."""
    world.channels[2] = Channel("takes")
    world.store.begin().put(b"half", b"an entry")
    world.sender.send(snapshot(2))
    await until(lambda: world.sender.copies.held)
    async with asyncio.timeout(PATIENCE_S):
        await world.sender.close()
    assert world.files == []


async def _send(world: World, to: int, channel: Channel) -> Stream:
    """One send, to its end."""
    world.channels[to] = channel
    world.sender.send(snapshot(to))
    await world.settled()
    return channel.streams[-1]


async def test_a_member_newer_than_the_kept_copy_is_sent_another(world: World) -> None:
    """In the first one it is no member: it would refuse it, be sent it again, and so on, and the log would stay."""
    first = await _send(world, 2, Channel("breaks"))
    world.store.set_conf_state(ConfState((1, 2), learners=(14,)))
    world.store.set_applied(8, 1)
    second = await _send(world, 14, Channel("takes"))
    header = second.sent[0].message.snapshot
    assert (first.sent[0].message.snapshot.index, header.index) == (7, 8)
    assert list(header.conf_state.learners) == [14]
    assert world.reports == [(2, False), (14, True)]


async def test_a_copy_begun_before_a_member_joined_is_made_again(world: World) -> None:
    joined = Channel("takes")
    world.channels |= {2: Channel("takes"), 14: joined}
    world.sender.send(snapshot(2))
    await until(lambda: bool(world.files))
    world.store.set_conf_state(ConfState((1, 2, 14)))
    world.store.set_applied(8, 1)
    world.sender.send(snapshot(14))
    await world.settled()
    assert sorted(world.reports) == [(2, True), (14, True)]
    assert 14 in joined.streams[-1].sent[0].message.snapshot.conf_state.voters


async def test_a_stranger_is_sent_no_snapshot(world: World) -> None:
    channel = world.channels[14] = Channel("takes")
    world.sender.send(snapshot(14))
    await world.settled()
    assert (channel.streams, world.reports) == ([], [(14, False)])


async def test_broken_transfer_resumes_same_copy(world: World, tmp_path: Path) -> None:
    first = await _send(world, 2, Channel("breaks"))
    assert world.sender.holds_log(), "the log behind the kept copy stays"
    (name,) = world.files
    whole = (tmp_path / name).read_bytes()
    second = await _send(world, 2, Channel("takes", has_bytes=5_000))
    header, digest = second.sent[0], second.sent[-1].sha256
    assert (header.offset_bytes, header.sha256) == (5_000, digest)
    assert first.sent[0].sha256 == digest
    assert b"".join(chunk.data for chunk in second.sent) == whole[5_000:]
    assert world.reports == [(2, False), (2, True)]
    assert not world.sender.copies.held
    await world.sender.copies.close()
    assert world.files == []


@pytest.mark.parametrize("has_bytes", [None, 1 << 40], ids=["an older version", "more than there is"])
async def test_member_that_cannot_resume_is_sent_everything(world: World, has_bytes: int | None) -> None:
    await _send(world, 2, Channel("breaks", has_bytes))
    stream = await _send(world, 2, Channel("takes", has_bytes))
    assert stream.sent[0].offset_bytes == 0
    assert sum(len(chunk.data) for chunk in stream.sent) == stream.sent[0].size_bytes


async def test_members_that_need_a_copy_at_once_share_it(world: World) -> None:
    hanging = Channel("hangs")
    for to, channel in ((2, Channel("takes")), (3, Channel("takes")), (4, hanging)):
        world.channels[to] = channel
        world.sender.send(snapshot(to))
    await until(lambda: len(world.reports) == 2 and hanging.streams)
    assert sorted(world.reports) == [(2, True), (3, True)]
    assert len(world.files) == 1
    world.sender.give_up("a test says so")
    await world.settled()
    await world.sender.copies.close()
    assert world.files == []


async def test_an_abandoned_copy_is_removed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "KEPT_S", 0.02)
    await _send(world, 2, Channel("breaks"))
    await until(lambda: not world.files and not world.sender.holds_log())


async def test_kept_copy_is_dropped_when_room_is_needed(world: World) -> None:
    await _send(world, 2, Channel("breaks"))
    assert world.sender.give_up("the disk is full")
    assert not world.sender.holds_log()
    assert not world.sender.give_up("the disk is full")
    await world.sender.copies.close()
    assert world.files == []


async def test_outdated_copy_is_remade(world: World) -> None:
    """The log was replaced by a newer database since: entries behind the copy are gone."""
    await _send(world, 2, Channel("breaks"))
    world.store.set_applied(20, 1)
    newer = Channel("takes")
    world.channels[2] = newer
    world.sender.send(Message(MessageType.SNAPSHOT, to=2, from_=1, term=1, snapshot=SnapshotMeta(15, 1)))
    await world.settled()
    assert newer.streams[0].sent[0].message.snapshot.index == 20


async def test_copy_in_progress_ends_soon_when_room_is_needed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "COPY_SHARE", 1e-9)
    monkeypatch.setattr(sender, "REST_MAX_S", 1_000.0)
    monkeypatch.setattr("raftkv.storage.snapshot._CHUNK_BYTES", 1)
    world.channels[2] = Channel("takes")
    world.sender.send(snapshot(2))
    await until(lambda: world.files)
    assert world.sender.give_up("the disk is full")
    await world.settled()
    await world.sender.copies.close()
    assert world.reports == [(2, False)]
    assert world.files == []


async def test_kept_copy_is_dropped_when_member_has_caught_up(world: World) -> None:
    """It had all of it, and died before it could say so."""
    await _send(world, 2, Channel("breaks"))
    await _send(world, 3, Channel("breaks"))
    world.served |= {(2, 7), (3, 6)}
    assert world.sender.holds_log()
    world.served.add((3, 7))
    assert not world.sender.holds_log()
    await world.sender.copies.close()
    assert world.files == []


@pytest.mark.parametrize("way", ["catches up", "is sent another", "takes too long", "log grows too long"])
async def test_the_log_is_held_until_the_member_has_caught_up(world, monkeypatch, way):
    """Were it cut while the database is installed, the member would need the next one, and so on under many writes."""
    monkeypatch.setattr(sender, "CATCH_UP_S", 0.0 if way == "takes too long" else 60.0)
    world.channels[2] = Channel("takes")
    world.sender.send(snapshot(2))
    await until(lambda: world.sender._holding)
    world.store.set_applied(30, 1)  # written while it was sent
    await world.settled()
    if way != "takes too long":
        world.served |= {(2, 7), (2, 29)}
        assert world.sender.holds_log()
    if way == "catches up":
        world.served.add((2, 30))
    elif way == "is sent another":
        world.wanted = False
        world.sender.send(snapshot(2))
        await world.settled()
    elif way == "log grows too long":
        world.sender.give_up("too much")
    await until(lambda: not world.sender.holds_log())


@pytest.mark.parametrize("step", ["pwrite", "fdatasync"])
async def test_a_disk_that_fills_up_under_a_copy_ends_it(world, monkeypatch, step):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        channel = world.channels[2] = Channel("takes")
        world.sender.send(snapshot(2))
        await world.settled()
    assert world.reports == [(2, False)]
    assert channel.streams == []
    assert not world.sender.holds_log()
    assert world.files == []
    await _send(world, 2, Channel("takes"))
    assert world.reports == [(2, False), (2, True)]


def test_copy_is_cancelled_when_database_must_grow(tmp_path: Path) -> None:
    """That waits for its readers, and all entries with it."""
    store = Store.open(LMDBBackend(tmp_path / "db", MAP_BYTES))
    made = sender.Copies(store, tmp_path, [].append)
    rest = sender._pace(threading.Event(), made._is_in_the_way)
    rest(0.0)
    store._overlay.space_error = MapFullError("readers hold it")
    with pytest.raises(StorageError, match="so that it can grow"):
        rest(0.0)
    store.close()
    store.backend.close()


async def test_nothing_of_a_damaged_database_leaves(world: World, tmp_path: Path) -> None:
    store = world.store
    store.commit()
    data = (tmp_path / "db").read_bytes()
    with (tmp_path / "db").open("r+b") as file:
        file.seek(data.rindex(b"\x0a\x01k\x10"))
        file.write(b"\x0a\x01l")
    channel = Channel("takes")
    world.channels[2] = channel
    world.sender.send(snapshot(2))
    await world.settled()
    assert world.reports == [(2, False)]
    assert not channel.streams
    assert [str(error) for error in world.damage] == ["record of revision 2.0 is corrupt: its checksum is wrong"]
    assert world.files == []
