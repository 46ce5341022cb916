"""Sending databases: whatever happens, the core hears once of each, and no file and no hold on the log is left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv.pb import raft_pb2
from raftkv.raft.types import ConfState, Message, MessageType, SnapshotMeta
from raftkv.rpc.status import Code, RpcError
from raftkv.server.snapshots import files, sender
from raftkv.server.snapshots.sender import SnapshotSender
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.mvcc import Store

MAP_BYTES = 16 << 20
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
    def __init__(self, ending: str) -> None:
        self.ending = ending
        self.streams: list[Stream] = []

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
        self.store.set_applied(7, 1)
        self.channels: dict[int, Channel | None] = {}
        self.reports: list[tuple[int, bool]] = []
        self.wanted = True
        channel: Any = self.channels.get
        self.sender = SnapshotSender(
            self.store,
            directory,
            channel,
            lambda to: (),
            lambda message: self.wanted,
            lambda to, ok: self.reports.append((to, ok)),
        )

    async def settled(self) -> None:
        """Wait until nothing is under way."""
        async with asyncio.timeout(30):
            while self.sender._tasks:
                await asyncio.wait(self.sender._tasks)
                await asyncio.sleep(0)

    def close(self) -> None:
        self.store.close()
        self.store.backend.close()

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir() if not path.name.startswith("db"))


def run(directory: Path, scenario: Any) -> None:
    async def main() -> None:
        world = World(directory)
        try:
            step: Coroutine[Any, Any, None] = scenario(world)
            await step
            await world.sender.close()
        finally:
            world.close()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "RETRY_MIN_S", 0.0)


ENDINGS = st.sampled_from(["takes", "refuses", "breaks", "surprises", "hangs", "absent", "unwanted"])
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["send", "send", "turn", "wait", "give up"]), st.integers(2, 3), ENDINGS), max_size=12
)


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS)
def test_every_send_ends_in_one_report_unless_another_follows(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int, str]]
) -> None:
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
        async with asyncio.timeout(30):
            while world.sender._tasks:
                await asyncio.sleep(0.001)
                world.sender.give_up("a test says so")
        for to in (2, 3):
            sequence = "".join(what[0] for peer, what in events if peer == to)
            assert "rr" not in sequence, "a report that nobody waits for"
            assert not sequence.startswith("r"), "a report that nobody waits for"
            assert not sequence.endswith("s"), f"member {to} would stay in SNAPSHOT for ever"
        assert not world.sender.in_flight
        assert world.files == []

    run(tmp_path_factory.mktemp("send"), scenario)


@pytest.mark.parametrize(
    ("ending", "ok"), [("takes", True), ("refuses", False), ("breaks", False), ("surprises", False)]
)
def test_how_a_send_ends_is_told(tmp_path: Path, ending: str, ok: bool) -> None:
    async def scenario(world: World) -> None:
        channel = world.channels[2] = Channel(ending)
        world.sender.send(snapshot(2))
        await world.settled()
        assert world.reports == [(2, ok)]
        assert channel.streams[0].cancelled
        assert channel.streams[0].sent[0].message.snapshot.index == 7, "the copy's own index"

    run(tmp_path, scenario)


def test_a_send_asked_for_by_the_report_of_the_last_is_made(tmp_path: Path) -> None:
    """The core sends again as soon as it hears of a failure: in the very turn in which the old send ends."""

    async def scenario(world: World) -> None:
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

    run(tmp_path, scenario)


def test_two_sends_to_one_member_do_not_share_a_file(tmp_path: Path) -> None:
    names = {files.outgoing_path(tmp_path, 2) for _ in range(3)} | {files.incoming_path(tmp_path, 2) for _ in range(3)}
    assert len(names) == 6


def test_without_room_for_it_no_copy_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROOM_RESERVE_BYTES", 1 << 60)

    async def scenario(world: World) -> None:
        channel = world.channels[2] = Channel("takes")
        world.sender.send(snapshot(2))
        await world.settled()
        assert world.reports == [(2, False)]
        assert channel.streams == []

    run(tmp_path, scenario)
