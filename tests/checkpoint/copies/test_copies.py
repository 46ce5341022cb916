"""Copies of checkpoints: the catalogue, the holder's protocol, what a hostile record can do, commits in memory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import mmap
import random
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raftkv.checkpoint.commit.attempt import Attempt
from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.copies import holder as copies_holder
from raftkv.checkpoint.copies import transfer
from raftkv.checkpoint.copies.catalogue import Spot, choose
from raftkv.checkpoint.copies.holder import CONNECTIONS_MAX, HEAD_TIMEOUT_S, Holder, Me
from raftkv.checkpoint.digest import Digest, of_bytes
from raftkv.checkpoint.errors import AttemptOver, CheckpointNotFound, FilesChanged, StorageError
from raftkv.checkpoint.keys import MEMORY
from raftkv.checkpoint.records import Checkpoint, CopyRecord, FileRecord, HolderRecord
from raftkv.checkpoint.registry import Registry
from raftkv.checkpoint.retention.policy import Policy
from raftkv.client.control import Control, Grant
from raftkv.client.errors import HistoryReplaced
from raftkv.errors import ConfigError
from tests.checkpoint.world import KEYS, RUN, World, play, prepared, saved
from tests.virtual_store.direct import FakeControl

SIZE = 300_000
TOKEN = "0" * 64
LEFT = ("/copy/", "/record/memory", "/manifest/")


def bytes_of(rank: int, step: int) -> bytes:
    return f"rank {rank} at step {step}, ".encode().ljust(64, b".") * (SIZE // 64)


class Telling(FakeControl):
    """A control that says that its lease is lost when the test calls ``on_lost``."""

    on_lost: Callable[[], None]

    async def grant(self, ttl_s: int, grace_s: float, on_lost: Callable[[], None]) -> Grant:
        self.on_lost = on_lost
        return await super().grant(ttl_s, grace_s, on_lost)


@asynccontextmanager
async def nodes(
    world: World, *names: str, limit_bytes: int = 8 * SIZE, controls: Sequence[Control] = ()
) -> AsyncIterator[list[Holder]]:
    """Run holders; ``a@row1`` is node a in row1."""
    made = []
    for number, name in enumerate(names):
        host, _, topology = name.partition("@")
        me = Me(f"node-{host}", host, topology=topology)
        control = controls[number] if controls else world.control()
        made.append(Holder(control, RUN, me, limit_bytes=limit_bytes))
        await made[-1].open()
    try:
        yield made
    finally:
        for holder in made:
            await holder.close()


@pytest.fixture
@asynccontextmanager
async def holder(world: World) -> AsyncIterator[Holder]:
    async with nodes(world, "a") as (holder,):
        yield holder


def head_of(attempt: Attempt, rank: int, data: bytes, **changed: Any) -> dict[str, Any]:
    record = attempt.record
    return {
        "kind": record.kind, "step": record.step, "generation": record.generation, "number": record.number,
        "file": f"rank-{rank}", "digest": of_bytes(data), "size_bytes": len(data), **changed,
    }  # fmt: skip


async def offered(attempt: Attempt, rank: int, data: bytes, **changed: Any) -> dict[str, Any]:
    """Offer a copy as its rank does; returns what its sender says."""
    head = head_of(attempt, rank, data, **changed)
    return head | {"secret": await attempt.offer(FileRecord(head["file"], head["size_bytes"], head["digest"]))}


async def give(holder: Holder, attempt: Attempt, rank: int, data: bytes, **changed: Any) -> None:
    """Hand a copy to a holder."""
    await send(holder, await offered(attempt, rank, data, **changed), data)


async def send(holder: Holder, head: dict[str, Any], data: bytes) -> None:
    await asyncio.to_thread(transfer.send, holder.shelf.record, head, [memoryview(data)])


async def kept(registry: Registry, claim: Claim, step: int, holders: Sequence[Holder], ranks: int = 2) -> Checkpoint:
    """Commit a step in the memory of some holders."""
    attempt = await registry.begin(claim, step, kind=MEMORY, world_size=ranks)
    for rank in range(ranks):
        data = bytes_of(rank, step)
        for holder in holders:
            await give(holder, attempt, rank, data)
        await attempt.prepare(rank, [FileRecord(f"rank-{rank}", len(data), of_bytes(data))])
    return await attempt.commit()


async def settled(world: World, *parts: str) -> list[str]:
    """Wait until nothing happens any more; returns the keys that contain one of the parts."""
    before = -1
    while before != world.store.revision:
        before = world.store.revision
        for _ in range(50):
            await asyncio.sleep(0)
    return [key for part in parts for key in world.keys() if part in key]  # noqa: SIM118


# ---- the catalogue


async def test_copies_come_nearest_first_and_shared_storage_last(registry: Registry, world: World) -> None:
    attempt = await prepared(registry, await registry.claim(), 100)
    async with nodes(world, "a@row1/rack1", "b@row1/rack2", "c@row2/rack9", "d@row1/rack1") as holders:
        for holder in holders:
            await give(holder, attempt, 0, b"x" * 100, file="0.bin")
        checkpoint = await attempt.commit()
        found = await registry.nearest(100, "0.bin", to="a", topology="row1/rack1", kind="files")
        assert [(copy.distance, copy.record and copy.record.host, copy.tier) for copy in found] == [
            (0, "a", "memory"), (1, "d", "memory"), (2, "b", "memory"), (3, "c", "memory"), (3, None, "shared"),
        ]  # fmt: skip
        assert found[-1].uri == checkpoint.uri


async def test_copies_of_another_attempt_at_the_step_are_left_out(holder, claim, registry):
    given_up = await registry.begin(claim, 100, kind=MEMORY)
    await give(holder, given_up, 0, b"torn" * 100)
    await given_up.abort("a rank has failed")
    checkpoint = await kept(registry, claim, 100, [holder], ranks=1)
    found = await registry.nearest(100, "rank-0")
    assert [copy.record and copy.record.id for copy in found] == [checkpoint.id]
    assert bytes(await registry.fetch(checkpoint, "rank-0")) == bytes_of(0, 100)


def test_nodes_of_other_failure_domains_come_first() -> None:
    def holder(name: str, topology: str) -> HolderRecord:
        return HolderRecord(name, f"host-{name}", "127.0.0.1:1", TOKEN, topology)

    ring = [holder("a", "r1"), holder("b", "r1"), holder("c", "r2"), holder("d", "r2"), holder("e", "r3")]
    chosen = choose(ring, "b", Spot("host-b", "r1"))
    assert [each.holder for each in chosen] == ["b", "c", "e", "d", "a"]
    without = [replace(each, topology="") for each in ring]
    assert [each.holder for each in choose(without, "d", Spot("host-d"))] == ["d", "e", "a", "b", "c"]
    assert [each.holder for each in choose(ring, "", Spot("elsewhere", "r1"))] == ["c", "e", "a", "b", "d"]


async def test_what_ends_with_its_lease_is_no_copy_and_a_living_holder_announces_it_again(registry, world):
    controls = [Telling(world, random.Random(seed), 0.0) for seed in range(2)]
    async with nodes(world, "a", "b", controls=controls) as holders:
        checkpoint = await kept(registry, await registry.claim(), 10, holders)
        first, second = (item.lease for key, item in sorted(world.store.items.items()) if b"/holder/" in key)
        world.store.revoke(first)
        assert [copy.record.host for copy in await registry.nearest(10, "rank-0") if copy.record] == ["b"]
        controls[0].on_lost()
        await settled(world)
        assert [copy.record.host for copy in await registry.nearest(10, "rank-0") if copy.record] == ["a", "b"]
        assert first != second
    assert await settled(world, "/copy/", "/holder/") == []
    with pytest.raises(StorageError, match="there is none"):
        await registry.fetch(checkpoint, "rank-0")


# ---- commits in memory


async def test_holder_without_a_lease_is_none(holder: Holder, world: World) -> None:
    """A copy of its key, as a mirror of another cluster writes it, cost every save a connection that never came."""
    ghost = replace(holder.shelf.record, holder="ghost")
    world.put(KEYS.holder("ghost"), ghost.encode())
    assert [found.holder for found in await world.registry().holders()] == ["node-a"]


async def test_a_commit_in_memory_replaces_the_one_before_and_is_no_latest(holder, claim, registry, world):
    durable = await saved(registry, claim, 5, {"loss": 1.0})
    commits = registry.watch(start_revision=1)
    await kept(registry, claim, 10, [holder])
    aborted = await registry.begin(claim, 15, kind=MEMORY)
    await aborted.abort("not wanted")
    last = await kept(registry, claim, 20, [holder])
    assert await registry.latest(MEMORY) == last
    with pytest.raises(CheckpointNotFound):
        await registry.at(10, MEMORY)
    keys = await settled(world, *LEFT, "/deleting/")
    assert [key.split("/memory/")[1] for key in keys if "/copy/" not in key] == ["0" * 10 + "20"] * 2
    assert {key.split("/")[7] for key in keys if "/copy/" in key} == {"000000000020"}
    assert sum(held.size_bytes for held in holder.shelf.held.values()) == last.size_bytes
    # Questions for any kind mean durable ones.
    assert [found.step for found in (await registry.latest(), await registry.at(5), durable)] == [5, 5, 5]
    assert [found.step for found in await registry.checkpoints()] == [5]
    assert [(run.kind, run.latest.count) for run in await registry.runs()] == [("files", 1)]
    with pytest.raises(CheckpointNotFound):
        await registry.at(20)
    await saved(registry, claim, 30)
    assert [(await anext(commits)).checkpoint.step for _ in range(2)] == [5, 30]
    commits.cancel()
    await registry.collect(Policy(keep_last=1))
    assert await registry.latest(MEMORY) == last


async def test_what_is_replaced_by_the_next_has_no_metrics_pins_tags_and_children(holder, claim, registry):
    checkpoint = await kept(registry, claim, 10, [holder])
    attempt = await registry.begin(claim, 20, kind=MEMORY)
    await give(holder, attempt, 0, b"1")
    await attempt.prepare(0, [FileRecord("rank-0", 1, of_bytes(b"1"))])
    for refused in (
        registry.set_metrics(10, MEMORY, {"loss": 1.0}),
        registry.pin(checkpoint, "reader").take(),
        registry.tag("release", checkpoint),
        registry.begin(claim, 30, parent=checkpoint.reference),
        attempt.commit(metrics={"loss": 1.0}),
    ):
        with pytest.raises(ConfigError, match="is replaced by the next one"):
            await refused


async def test_a_file_that_is_in_no_memory_is_not_committed(holder: Holder, claim: Claim, registry: Registry) -> None:
    before = await kept(registry, claim, 10, [holder])
    attempt = await registry.begin(claim, 20, kind=MEMORY, world_size=2)
    await give(holder, attempt, 0, bytes_of(0, 20))
    for rank in range(2):
        data = bytes_of(rank, 20)
        await attempt.prepare(rank, [FileRecord(f"rank-{rank}", len(data), of_bytes(data))])
    with pytest.raises(FilesChanged, match="rank-1, which rank 1 had prepared, is no longer in the memory of any node"):
        await attempt.commit()
    again = await registry.claim()
    (taken,) = await registry.take_over(again)
    assert taken.checkpoint is None
    assert bytes(await registry.fetch(before, "rank-1")) == bytes_of(1, 10)


async def test_after_a_loss_earlier_steps_are_saved_again(holder: Holder, registry: Registry, world: World) -> None:
    await kept(registry, await registry.claim(), 50, [holder])
    claim = await registry.claim()
    await registry.forget_memory(claim)
    assert await settled(world, *LEFT) == []
    await kept(registry, claim, 20, [holder])
    world.repeat_everything()
    assert (await registry.latest(MEMORY)).step == 20
    assert bytes(await registry.fetch(await registry.at(20, MEMORY), "rank-1")) == bytes_of(1, 20)


async def test_a_forgotten_step_is_saved_again_in_the_same_generation(holder, claim, registry, world):
    await kept(registry, claim, 10, [holder])
    await registry.forget_memory(claim)
    await settled(world)
    again = await kept(registry, claim, 10, [holder])
    await settled(world)
    assert bytes(await registry.fetch(again, "rank-0")) == bytes_of(0, 10)


async def test_copies_stay_in_a_restored_cluster_whose_revisions_begin_again_below_a_loss(world: World) -> None:
    registry, control = world.registry(), world.control()
    claim = await registry.claim()
    async with nodes(world, "a", controls=[control]) as holders:
        restore = world.store.backup()
        await kept(registry, claim, 10, holders)
        for number in range(100):
            world.put("other", str(number))
        await registry.forget_memory(claim)
        await settled(world)
        restore()
        control.lose_watch(HistoryReplaced())
        await settled(world)
        again = await kept(registry, await registry.claim(), 10, holders)
        await settled(world)
        assert bytes(await registry.fetch(again, "rank-0")) == bytes_of(0, 10)


# ---- reading


async def test_a_copy_with_another_digest_is_passed_over(registry: Registry, world: World, tmp_path: Path) -> None:
    async with nodes(world, "a", "b") as holders:
        checkpoint = await kept(registry, await registry.claim(), 10, holders)
        for held in holders[0].shelf.held.values():
            held.memory[7] ^= 1
        assert bytes(await registry.fetch(checkpoint, "rank-0", to="a")) == bytes_of(0, 10)
        for held in holders[1].shelf.held.values():
            held.memory[7] ^= 1
        with pytest.raises(StorageError, match=r"is not what was prepared.*is not what was prepared"):
            await registry.fetch(checkpoint, "rank-0", to="a")


async def test_a_reader_told_of_one_attempt_reads_no_other(holder: Holder, registry: Registry) -> None:
    checkpoint = await kept(registry, await registry.claim(), 10, [holder])
    claim = await registry.claim()
    await registry.forget_memory(claim)
    await kept(registry, claim, 10, [holder])
    with pytest.raises(CheckpointNotFound, match="is another attempt by now"):
        await registry.fetch(checkpoint, "rank-0")


class Stranger:
    """A server that answers anything that connects to it with the same bytes, and notes what it was sent."""

    def __init__(self, answer: bytes) -> None:
        self.heard: list[bytes] = []
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                self.heard.append(connection.recv(4096))
                connection.sendall(self._answer)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n\r\n",
        struct.pack(">4sI", b"RKC1", 2**32 - 1),
        transfer.encode({"size_bytes": 2**60}),
        transfer.encode({"size_bytes": len(bytes_of(0, 10))}) + b"short",
        transfer.encode({"size_bytes": len(bytes_of(0, 10))}) + b"z" * SIZE,
        transfer.encode({"error": "\x1b[31mno"}),
        struct.pack(">4sI", b"RKC1", 2) + b"[]",
        struct.pack(">4sI", b"RKC1", 4000) + b"[" * 4000,
    ],
)
async def test_a_hostile_holder_costs_a_reader_its_try_alone(registry: Registry, world: World, answer: bytes) -> None:
    stranger = Stranger(answer)
    async with nodes(world, "b") as holders:
        checkpoint = await kept(registry, await registry.claim(), 10, holders)
        true = holders[0].shelf.held[of_bytes(bytes_of(0, 10))].copies[0]
        planted = replace(true, holder="node-a", host="a", address=stranger.address, token="f" * 64)
        world.put(KEYS.copy(MEMORY, checkpoint.id, "rank-0", "node-a"), planted.encode(), leased=True)
        assert bytes(await registry.fetch(checkpoint, "rank-0", to="a")) == bytes_of(0, 10)
        assert len(stranger.heard) == 1
        assert true.token.encode() not in stranger.heard[0]


@pytest.mark.long
def test_a_holder_that_sends_a_byte_now_and_then_costs_a_reader_its_try_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play a broken network card: each byte came in time, and the whole file took without end."""
    monkeypatch.setattr(transfer, "IDLE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(transfer, "PACE_BYTES_PER_S", SIZE)
    data, over = bytes_of(0, 10), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(4096)
            connection.sendall(transfer.encode({"size_bytes": len(data)}))
            for start in range(len(data)):
                connection.sendall(data[start : start + 1])
                over.wait(0.05)

    async def story() -> None:
        world = World()
        registry = world.registry()
        threading.Thread(target=drip, daemon=True).start()
        async with nodes(world, "b") as holders:
            checkpoint = await kept(registry, await registry.claim(), 10, holders)
            true = holders[0].shelf.held[of_bytes(data)].copies[0]
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            slow = replace(true, holder="node-a", host="a", address=address, token="f" * 64)
            world.put(KEYS.copy(MEMORY, checkpoint.id, "rank-0", "node-a"), slow.encode(), leased=True)
            assert bytes(await asyncio.wait_for(registry.fetch(checkpoint, "rank-0", to="a"), 90)) == data

    try:
        play(story())
    finally:
        over.set()
        listener.close()


GOOD = CopyRecord(
    MEMORY, 10, 1, 7, "rank-0", of_bytes(b""), 5, holder="a", host="a", address="127.0.0.1:80", token=TOKEN
)  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        {"file": "../rank-0"}, {"address": "/etc/passwd"}, {"address": "http://host:80"}, {"address": ":80"},
        {"token": ""}, {"digest": "crc32c:00000000"}, {"digest": "sha256:00"}, {"size_bytes": 1 << 60},
        {"size_bytes": -1}, {"tier": "ftp"}, {"step": -1}, {"generation": 2}, {"holder": "b"}, {"kind": "files"},
    ],
)  # fmt: skip
async def test_a_record_that_is_not_of_its_key_is_no_copy(registry, world, changed):
    async with nodes(world, "z") as holders:
        checkpoint = await kept(registry, await registry.claim(), 10, holders, ranks=1)
        good = replace(GOOD, generation=checkpoint.generation, number=checkpoint.number)
        key = KEYS.copy(MEMORY, checkpoint.id, "rank-0", "a")
        world.put(key, good.encode(), leased=True)
        assert len(await registry.nearest(10, "rank-0")) == 2
        world.put(key, json.dumps({**json.loads(good.encode()), **changed}), leased=True)
        assert len(await registry.nearest(10, "rank-0")) == 1


async def test_copy_of_a_key_without_a_lease_does_not_count(registry: Registry, world: World) -> None:
    """A mirror of a cluster has the keys of its holders for ever: all copies seemed to be there."""
    async with nodes(world, "z") as holders:
        checkpoint = await kept(registry, await registry.claim(), 10, holders, ranks=1)
        (copy,) = await registry.nearest(10, "rank-0")
        assert copy.record is not None
    world.put(KEYS.copy(MEMORY, checkpoint.id, "rank-0", copy.record.holder), copy.record.encode())
    assert await registry.nearest(10, "rank-0") == []
    assert not await registry.has_all_copies(checkpoint)


async def test_a_list_of_files_that_was_not_committed_makes_no_reader_allocate(holder, registry, world, monkeypatch):
    taken: list[int] = []
    memory_of = transfer.memory_of
    monkeypatch.setattr(transfer, "memory_of", lambda size: taken.append(size) or memory_of(min(size, SIZE)))
    checkpoint = await kept(registry, await registry.claim(), 10, [holder])
    taken.clear()
    listing = world.store.items[KEYS.manifest(MEMORY, 10).encode()].value
    world.put(KEYS.manifest(MEMORY, 10), listing.replace(str(len(bytes_of(0, 10))).encode(), b"9" * 12))
    with pytest.raises(Exception, match="is not the one that was committed"):
        await registry.fetch(checkpoint, "rank-0")
    world.put(KEYS.manifest(MEMORY, 10), listing)
    with pytest.raises(ConfigError, match="more than 1000"):
        await registry.fetch(checkpoint, "rank-0", limit_bytes=1000)
    assert taken == []


# ---- the holder's protocol


async def test_without_the_token_a_holder_says_nothing_and_takes_no_room(holder: Holder, world: World) -> None:
    record = replace(holder.shelf.record, token="1" * 64)
    attempt = await world.registry().begin(await world.registry().claim(), 10, kind=MEMORY)
    put = {"do": "put", "token": record.token, **head_of(attempt, 0, b"x", size_bytes=8 * SIZE)}
    for sent in (
        transfer.encode(put),
        transfer.encode({"do": "get", "token": "", "digest": of_bytes(b"")}),
        struct.pack(">4sI", b"RKC1", 2**31),
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">4sI", b"RKC1", 4000) + b"[" * 4000,
    ):
        assert await asyncio.to_thread(_talk, record.address, sent) == b""
    assert holder.shelf.used_bytes == 0


async def test_a_reader_of_the_token_hands_over_nothing_and_drops_nothing(claim, registry, world):
    """Who may read the keys of a run reads the token, which was the right to fill a node's memory and the catalogue."""
    data = bytes_of(0, 20)
    async with nodes(world, "a", limit_bytes=2 * len(data)) as (holder,):
        committed = await kept(registry, claim, 10, [holder], ranks=1)
        attempt = await registry.begin(claim, 20, kind=MEMORY, world_size=2)
        true = await offered(attempt, 0, data)
        public = head_of(attempt, 0, data) | {"secret": "0" * 64}
        for forged in (
            {"generation": 2**40}, {}, {"file": "rank-1"}, {"number": attempt.record.number + 1}, {"kind": "files"},
            {"step": 10, "number": committed.number}, {"digest": of_bytes(bytes_of(0, 10))}, {"secret": 7},
        ):  # fmt: skip
            with pytest.raises(StorageError, match="no writer of the run has offered"):
                await send(holder, public | forged, data)
        await send(holder, true, data)  # nothing has its room
        assert len(await settled(world, "/copy/")) == 2
        await attempt.abort("the test is over")
        assert await settled(world, "/offer/") == []
        with pytest.raises(AttemptOver):
            await offered(attempt, 1, data)


async def test_readers_that_read_nothing_keep_no_sender_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_holder, "CONNECTIONS_MAX", 4)
    monkeypatch.setattr(copies_holder, "READERS_MAX", 3)
    data = bytes(16_000_000)  # more than the buffers of a connection hold
    world = World()
    async with nodes(world, "a", limit_bytes=2 * len(data)) as (holder,):
        attempt = await world.registry().begin(await world.registry().claim(), 10, kind=MEMORY)
        await give(holder, attempt, 0, data)
        record = holder.shelf.record
        host, _, port = record.address.rpartition(":")
        asked = transfer.encode({"do": "get", "token": record.token, "digest": of_bytes(data)})
        with contextlib.ExitStack() as silent:
            for _ in range(6):
                connection = silent.enter_context(socket.create_connection((host, int(port))))
                with contextlib.suppress(ConnectionError):
                    connection.sendall(asked)
                    await asyncio.to_thread(connection.recv, 1)
            await give(holder, attempt, 1, b"x")


async def test_strangers_that_hold_every_connection_keep_no_sender_out(holder: Holder, world: World) -> None:
    attempt = await world.registry().begin(await world.registry().claim(), 10, kind=MEMORY)
    host, _, port = holder.shelf.record.address.rpartition(":")
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(2 * CONNECTIONS_MAX)]
    await asyncio.wait_for(give(holder, attempt, 0, b"x"), HEAD_TIMEOUT_S / 2)
    for _, writer in silent:
        writer.close()


def _talk(address: str, sent: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(sent)
        try:
            return connection.recv(1000)
        except ConnectionResetError:  # it was closed before all was read
            return b""


async def test_bytes_with_another_digest_are_not_taken(holder: Holder, registry: Registry, world: World) -> None:
    attempt = await registry.begin(await registry.claim(), 10, kind=MEMORY)
    with pytest.raises(StorageError, match="do not match their digest"):
        await give(holder, attempt, 0, b"x" * SIZE, digest=of_bytes(b"y"))
    with pytest.raises(StorageError, match="file name"):
        await send(holder, head_of(attempt, 0, b"x", file="../0"), b"x")
    assert (holder.shelf.held, holder.shelf.used_bytes) == ({}, 0)
    assert await settled(world, "/copy/") == []


class SlowLink(socket.socket):
    """A network of a few MB/s. ``sendall`` fails as Python's does: its timeout is that of all it is given."""

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        if len(data) / 2_000_000 > (self.gettimeout() or float("inf")):
            raise TimeoutError("timed out")
        super().sendall(data, flags)


async def test_a_large_copy_takes_as_long_as_its_network_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_connection(address: tuple[str, int], timeout_s: float) -> socket.socket:
        connection = SlowLink()
        connection.settimeout(timeout_s)
        connection.connect(address)
        return connection

    world = World()
    data = bytes(24_000_000)  # 12 s, more than the time without a byte
    async with nodes(world, "a", limit_bytes=len(data)) as (holder,):
        attempt = await world.registry().begin(await world.registry().claim(), 10, kind=MEMORY)
        monkeypatch.setattr(socket, "create_connection", slow_connection)
        await give(holder, attempt, 0, data)
        assert holder.shelf.has(of_bytes(data), len(data))


async def test_a_copy_is_digested_while_it_comes_and_answered_soon_after_its_last_byte(monkeypatch):
    data = bytes(24_000_000)
    loop, half, digested = asyncio.get_running_loop(), asyncio.Event(), 0

    class Counted(Digest):
        def __init__(self, algorithm: str) -> None:
            super().__init__(algorithm)
            self.take, self.update = self.update, self.count

        def count(self, part: Any, /) -> None:
            nonlocal digested
            self.take(part)
            digested += len(part)
            if digested > len(data) // 2:
                loop.call_soon_threadsafe(half.set)

    monkeypatch.setattr("raftkv.checkpoint.copies.holder.Digest", Counted)
    world = World()
    async with nodes(world, "a", limit_bytes=len(data)) as (holder,):
        attempt = await world.registry().begin(await world.registry().claim(), 10, kind=MEMORY)
        head, record = await offered(attempt, 0, data), holder.shelf.record
        host, _, port = record.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(transfer.encode({"do": "put", "token": record.token, **head}) + data[:-1])
        await asyncio.wait_for(half.wait(), HEAD_TIMEOUT_S / 2)
        writer.write(data[-1:])
        assert (await reader.read()).endswith(transfer.encode({"has": True}))
        writer.close()


async def test_room_that_the_machine_does_not_have_is_not_counted_as_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any, **__: Any) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    world = World()
    async with nodes(world, "a") as (holder,):
        attempt = await world.registry().begin(await world.registry().claim(), 10, kind=MEMORY)
        with monkeypatch.context() as patch:
            patch.setattr(mmap, "mmap", no_memory)
            with pytest.raises(StorageError, match="Cannot allocate memory"):
                await give(holder, attempt, 0, bytes_of(0, 10))
        assert holder.shelf.used_bytes == 0
        await give(holder, attempt, 0, bytes_of(0, 10))


async def test_what_does_not_fit_is_refused_and_left_over_attempts_make_room(claim, registry, world):
    data = bytes_of(0, 20)
    async with nodes(world, "a", limit_bytes=2 * len(data)) as (holder,):
        await kept(registry, claim, 10, [holder], ranks=1)
        left = await registry.begin(claim, 20, kind=MEMORY)
        await give(holder, left, 0, data)
        other = await registry.begin(claim, 30, kind=MEMORY)
        with pytest.raises(StorageError, match="do not fit into"):
            await give(holder, other, 0, bytes_of(0, 30))
        claim = await registry.claim()
        await registry.take_over(claim)
        last = await kept(registry, claim, 40, [holder], ranks=1)
        assert bytes(await registry.fetch(last, "rank-0")) == bytes_of(0, 40)
        assert holder.shelf.used_bytes <= 2 * len(data)


async def test_the_same_bytes_of_many_ranks_are_kept_once(holder: Holder, registry: Registry) -> None:
    attempt = await registry.begin(await registry.claim(), 10, kind=MEMORY, world_size=3)
    for rank in range(3):
        await give(holder, attempt, rank, bytes_of(0, 10))
        await attempt.prepare(rank, [FileRecord(f"rank-{rank}", len(bytes_of(0, 10)), of_bytes(bytes_of(0, 10)))])
    checkpoint = await attempt.commit()
    assert holder.shelf.used_bytes == len(bytes_of(0, 10))
    assert bytes(await registry.fetch(checkpoint, "rank-2")) == bytes_of(0, 10)


async def test_a_killed_holder_costs_a_sender_its_try_alone(registry: Registry, world: World) -> None:
    async with nodes(world, "a", "b") as (first, second):
        attempt = await registry.begin(await registry.claim(), 10, kind=MEMORY)
        await first.close()
        with pytest.raises(StorageError, match="the holder of copies at"):
            await give(first, attempt, 0, b"x")
        await give(second, attempt, 0, b"x")


def write(uri: str, name: str, data: bytes) -> Path:
    path = Path(uri, name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


async def test_a_copy_of_a_durable_file_is_read_from_memory_and_else_from_storage(world: World, tmp_path: Path) -> None:
    registry = world.registry(uri=str(tmp_path))
    attempt = await registry.begin(await registry.claim(), 10)
    data = bytes_of(0, 10)
    file = write(attempt.uri, "rank-0", data)
    await attempt.prepare(0, [FileRecord("rank-0", len(data), of_bytes(data))])
    async with nodes(world, "a") as (holder,):
        await give(holder, attempt, 0, data)
        checkpoint = await attempt.commit()
        write(attempt.uri, "raftkv-manifest.jsonl", world.files[attempt.uri])
        file.rename(file.with_suffix(".away"))
        assert bytes(await registry.fetch(checkpoint, "rank-0")) == data
    file.with_suffix(".away").rename(file)
    assert bytes(await registry.fetch(checkpoint, "rank-0")) == data
    elsewhere = replace(checkpoint, uri="/etc")
    with pytest.raises(ConfigError, match="is not loaded"):
        await registry.fetch(elsewhere, "rank-0")
