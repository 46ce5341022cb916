"""Clients that mean harm to the gateway, or to its other clients: what they make it do, hold and send is bounded."""

from __future__ import annotations

import asyncio
import gc
import resource
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from raftkv.training.tcpstore.gateway import (
    ANSWER_STALL_S,
    CONNECTIONS_MAX,
    PACE_BYTES_PER_S,
    PENDING_BYTES_MAX,
    REQUEST_TIMEOUT_S,
    REQUESTS_PER_TURN,
    WAITS_MAX,
    WATCH_BYTES,
    Budgets,
    Connection,
    connections_allowed,
)
from raftkv.training.tcpstore.store import NotANumber, ReplicatedStore, parse_number
from raftkv.training.tcpstore.wire import (
    READY,
    STRINGS_PER_TURN,
    VALIDATION,
    FrameError,
    Op,
    Reader,
    Request,
    pack_bytes,
    pack_int,
    pack_nonce,
)
from tests.training.tcpstore.tcpstore_client import encode

HIGH_WATER = 64 * 1024
LARGE = b"x" * 200_000


class Transport(asyncio.Transport):
    """A socket whose other end reads only when told to."""

    def __init__(self, connection: Connection, host: str) -> None:
        super().__init__({"peername": (host, 1)})
        self._connection = connection
        self.unread = bytearray()
        self.unread_max = 0
        self.sent = bytearray()
        self.is_reading = True
        self.is_aborted = False
        connection.connection_made(self)

    def write(self, data: Any) -> None:
        if self.is_aborted:
            return
        was = len(self.unread)
        self.unread += data
        self.unread_max = max(self.unread_max, len(self.unread))
        if was <= HIGH_WATER < len(self.unread):
            self._connection.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self.unread)

    def read_all(self) -> None:
        self.sent += self.unread
        was, self.unread = len(self.unread), bytearray()
        if was > HIGH_WATER:
            self._connection.resume_writing()

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        if not self.is_aborted:
            self.is_aborted = True
            asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)

    close = abort


class Store:
    """What connections ask for; a value for every key."""

    def __init__(self, value: bytes = LARGE) -> None:
        self.value = value
        self.gate = asyncio.Event()
        self.gate.set()
        self.reads = 0
        self.absent: set[bytes] = set()
        self.waiting = 0
        self.appeared = asyncio.Event()

    async def get(self, key: bytes) -> bytes | None:
        await self.gate.wait()
        self.reads += 1
        return self.value

    async def values(self, keys: Sequence[bytes]) -> AsyncIterator[list[bytes | None]]:
        for _ in keys:
            yield [await self.get(b"")]

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [await self.get(key) for key in keys]

    async def count(self) -> int:
        await self.gate.wait()
        return 1

    async def missing(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        return {key: 1 for key in keys if key in self.absent}

    async def wait_for(self, missing: dict[bytes, int]) -> None:
        self.waiting += 1
        await self.appeared.wait()


class World:
    """Connections of one gateway."""

    def __init__(self, store: Any = None, **budgets: int) -> None:
        self.store = store or Store()
        self.budgets = Budgets(**budgets)
        self.ended: list[Connection] = []

    def connect(self, host: str = "10.0.0.1") -> tuple[Connection, Transport]:
        connection = Connection(self.store, self.ended.append, self.budgets)
        transport = Transport(connection, host)
        connection.data_received(VALIDATION)
        return connection, transport


@pytest.fixture
def world():
    return World()


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_number_of_very_many_digits_is_refused_as_one_that_does_not_fit():
    """Python reads no such number: the request ended as a ValueError, and its client waited for ever."""
    for value in (b"1" * 5000, b"-" + b"9" * 5000, b"9" * 20):
        with pytest.raises(NotANumber):
            parse_number(b"k", value)
    assert [parse_number(b"k", value) for value in (b"0" * 5000 + b"7", b" -0012x", b"+5")] == [7, -12, 5]


async def test_unforeseen_error_closes_its_connection_alone():
    class Broken(Store):
        async def count(self) -> int:
            raise ZeroDivisionError("a bug")

    world = World(Broken())
    connection, transport = world.connect()
    _, other = world.connect()
    connection.data_received(bytes([Op.GETNUMKEYS]))
    await turns()
    assert transport.is_aborted
    assert not other.is_aborted


# ---- frames


def _calls(work: Callable[[], object]) -> int:
    """How many functions of Python a piece of work calls; a collection of garbage would call others."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def _calls_by_pieces(keys: int) -> int:
    reader = Reader()
    reader.feed(VALIDATION + bytes([Op.MULTI_GET]) + pack_int(keys))

    def feed() -> None:
        for _ in range(keys):
            reader.feed(pack_bytes(b"key"))
            found.extend(reader.requests())

    found: list[Request] = []
    calls = _calls(feed)
    assert [request.op for request in found][-1] is Op.MULTI_GET
    return calls


def test_bytes_of_a_partial_request_are_parsed_once() -> None:
    assert _calls_by_pieces(2000) < 2.5 * _calls_by_pieces(1000)


def test_a_string_that_comes_in_crumbs_is_copied_once() -> None:
    reader = Reader()
    reader.feed(VALIDATION + bytes([Op.SET]) + pack_bytes(b"k") + pack_int(100_000))
    assert [request.op for request in reader.requests()] == [Op.VALIDATE]
    for _ in range(999):
        reader.feed(b"x" * 100)
        assert _calls(lambda: list(reader.requests())) < 20
    reader.feed(b"x" * 100)
    assert [len(request.values[0]) for request in reader.requests()] == [100_000]


def test_a_request_of_very_many_keys_is_cut_in_several_turns() -> None:
    reader = Reader()
    keys = 3 * STRINGS_PER_TURN
    reader.feed(encode(Op.CHECK, [b"k"] * keys))
    assert reader.next() is None
    assert reader.is_cut_short
    assert reader.next() is None
    found = reader.next() or reader.next()
    assert found is not None
    assert len(found.keys) == keys


def test_held_bytes_count_string_overhead() -> None:
    reader = Reader()
    reader.feed(bytes([Op.MULTI_GET]) + pack_int(1000) + pack_bytes(b"ab") * 900)
    assert reader.next() is None
    assert reader.held_bytes >= 900 * sys.getsizeof(b"ab")


def test_a_whole_request_above_the_limit_is_refused_too() -> None:
    reader = Reader()
    value = pack_bytes(b"v" * 8 * 1024 * 1024)
    reader.feed(encode(Op.MULTI_SET, []).replace(pack_int(0), pack_int(8)) + (pack_bytes(b"k") + value) * 8)
    with pytest.raises(FrameError, match="a request of more than"):
        list(reader.requests())


# ---- fairness


async def test_a_flood_of_pings_does_not_delay_others(world: World) -> None:
    (flooding, flooded), (honest, answered) = world.connect(), world.connect()
    flooding.data_received(encode(Op.PING, 1) * 50_000)
    honest.data_received(encode(Op.PING, 7))
    for _ in range(100_000):
        if answered.unread:
            break
        await asyncio.sleep(0)
    assert answered.unread
    assert len(flooded.unread) <= 3 * REQUESTS_PER_TURN * len(pack_nonce(1))


async def test_requests_that_wait_are_held_as_they_came(world: World) -> None:
    """A request of one byte as an object is a hundred bytes: they are cut when their time comes."""
    world.store.gate.clear()
    connection, transport = world.connect()
    for _ in range(4 * PENDING_BYTES_MAX // 2**16):
        if transport.is_reading:
            connection.data_received(encode(Op.GETNUMKEYS) * 2**16)
            await turns(2)
    assert not transport.is_reading
    assert sum(type(item) is Request for item in gc.get_objects()) < 100
    assert connection.held_bytes <= 2 * PENDING_BYTES_MAX
    connection.close()
    world.store.gate.set()


# ---- answers


async def test_a_large_value_asked_for_very_often_is_sent_piece_by_piece(world: World) -> None:
    connection, transport = world.connect()
    connection.data_received(encode(Op.MULTI_GET, [b"large"] * 150))
    for _ in range(150):
        await turns()
        transport.read_all()
    assert bytes(transport.sent) == pack_bytes(LARGE) * 150
    assert transport.unread_max <= 3 * len(LARGE)
    assert world.budgets.answers.total == 0


async def test_a_client_that_reads_nothing_makes_the_store_read_no_more(world: World) -> None:
    connection, _ = world.connect()
    connection.data_received(encode(Op.MULTI_GET, [b"large"] * 1500) + encode(Op.GET, b"large") * 1000)
    await turns(500)
    assert world.store.reads <= 3
    connection.close()


async def test_the_answer_to_a_wait_does_not_come_within_another_answer(world: World) -> None:
    world.store.absent = {b"absent"}
    connection, transport = world.connect()
    connection.data_received(encode(Op.WAIT, [b"absent"]) + encode(Op.MULTI_GET, [b"large"] * 10))
    await turns()
    world.store.appeared.set()
    for _ in range(20):
        await turns()
        transport.read_all()
    assert bytes(transport.sent) == pack_bytes(LARGE) * 10 + READY
    assert connection.held_bytes == world.budgets.requests.total == 0


async def test_clients_that_read_nothing_hold_so_much_together_and_no_more() -> None:
    world = World(answer_bytes=10 * len(LARGE))
    clients = [world.connect() for _ in range(50)]
    for connection, _ in clients:
        connection.data_received(encode(Op.GET, b"large") * 3)
        await turns()
    assert sum(len(transport.unread) for _, transport in clients if not transport.is_aborted) <= 12 * len(LARGE)
    honest, transport = world.connect()
    honest.data_received(encode(Op.PING, 7))
    await turns()
    assert transport.unread == pack_nonce(7)
    for connection, _ in clients:
        connection.close()


async def test_lists_of_keys_are_made_one_at_a_time_and_count_with_the_answers() -> None:
    class ListingStore(Store):
        listing = listing_max = 0

        async def keys(self) -> list[bytes]:
            self.listing += 1
            self.listing_max = max(self.listing_max, self.listing)
            await self.gate.wait()
            await turns(3)
            self.listing -= 1
            return [b"k" * 100] * 2000

    store = ListingStore()
    world = World(store, answer_bytes=10 * len(LARGE))
    clients = [world.connect() for _ in range(50)]
    store.gate.clear()
    for connection, _ in clients:
        connection.data_received(encode(Op.LIST_KEYS))
    await turns()
    clients[3][0].close()
    store.gate.set()
    await turns(1000)
    assert store.listing_max == 1
    assert sum(len(transport.unread) for _, transport in clients if not transport.is_aborted) <= 12 * len(LARGE)
    assert not clients[3][1].unread, "it has gone"
    for connection, _ in clients:
        connection.close()


async def test_a_client_that_does_not_read_its_answers_is_left_in_the_end() -> None:
    now = asyncio.get_running_loop().time()
    connection, transport = World().connect()
    connection.data_received(encode(Op.GET, b"large"))
    await turns()
    connection.check(now + ANSWER_STALL_S / 2)
    assert not transport.is_aborted
    connection.check(now + ANSWER_STALL_S + 5)
    assert transport.is_aborted


async def test_a_client_that_reads_slowly_is_not_left() -> None:
    """The time was for the whole answer: a list of 64 MB had to cross any network at 1 MB/s."""
    now = asyncio.get_running_loop().time()
    world = World()
    world.store.value = bytes(8 * 2**20)
    connection, transport = world.connect()
    connection.data_received(encode(Op.GET, b"large"))
    await turns()
    for second in range(5, 100, 5):
        del transport.unread[: 5 * PACE_BYTES_PER_S]
        connection.check(now + second)
        assert not transport.is_aborted
    connection.check(now + 100 + ANSWER_STALL_S)
    assert transport.is_aborted


# ---- requests that stay


@pytest.mark.parametrize("beginning", [b"", VALIDATION[:3]])
async def test_a_connection_that_never_introduces_itself_is_closed(world: World, beginning: bytes) -> None:
    connection = Connection(world.store, world.ended.append, world.budgets)
    transport = Transport(connection, "10.0.0.1")
    connection.data_received(beginning)
    await turns()
    connection.check(asyncio.get_running_loop().time() + REQUEST_TIMEOUT_S + 1)
    assert transport.is_aborted


async def test_a_large_request_may_take_as_long_as_a_slow_network_needs() -> None:
    connection, transport = World().connect()
    begin = encode(Op.SET, b"k", bytes(8 * 2**20))[:-1]
    now = asyncio.get_running_loop().time()
    for second in range(5, 100, 5):
        connection.data_received(begin[(second - 5) * PACE_BYTES_PER_S : second * PACE_BYTES_PER_S])
        await turns()
        connection.check(now + second)
        assert not transport.is_aborted
    connection.check(now + 100 + REQUEST_TIMEOUT_S + len(begin) / PACE_BYTES_PER_S)
    assert transport.is_aborted


async def test_a_request_that_never_ends_is_closed_and_an_idle_client_is_not(world: World) -> None:
    (idle, stays), (slow, goes) = world.connect(), world.connect()
    idle.data_received(encode(Op.PING, 7))
    slow.data_received(encode(Op.SET, b"k", b"value")[:-1])
    await turns()
    later = asyncio.get_running_loop().time() + REQUEST_TIMEOUT_S + 1
    idle.check(later)
    slow.check(later)
    assert goes.is_aborted
    assert not stays.is_aborted


async def test_unfinished_requests_hold_so_much_together_and_no_more() -> None:
    world = World(request_bytes=4_000_000)
    clients = [world.connect() for _ in range(20)]
    for connection, _ in clients:
        connection.data_received(encode(Op.SET, b"k", b"v" * 1_000_000)[:-1])
        await turns()
    assert world.budgets.requests.total <= 4_000_000
    assert sum(not transport.is_aborted for _, transport in clients) == 3


async def test_small_requests_of_one_address_end_no_large_one_of_another() -> None:
    world = World(request_bytes=4_000_000)
    honest, stays = world.connect("10.0.0.2")
    honest.data_received(encode(Op.SET, b"k", b"v" * 1_000_000)[:-1])
    clients = [world.connect() for _ in range(20)]
    for connection, _ in clients:
        connection.data_received(encode(Op.SET, b"k", b"v" * 500_000)[:-1])
        await turns()
    assert not stays.is_aborted
    assert sum(not transport.is_aborted for _, transport in clients) == 5


async def test_waits_are_bounded_by_number_and_by_what_they_hold() -> None:
    world = World(request_bytes=1_000_000)
    keys = [b"%08d" % number for number in range(4000)]
    world.store.absent = {b"absent", *keys}
    many, closed = world.connect()
    many.data_received(encode(Op.WAIT, [b"absent"]) * (WAITS_MAX + 1))
    await turns(300)
    assert closed.is_aborted
    large, closed = world.connect()
    large.data_received(encode(Op.WAIT, keys) * 30)
    await turns(300)
    assert closed.is_aborted
    assert world.budgets.requests.total == 0
    # A key that is waited for costs a watch, however short the request.
    small = [world.connect() for _ in range(20)]
    for connection, _ in small:
        connection.data_received(encode(Op.WAIT, keys[:20]))
        await turns()
    assert 0 < sum(not transport.is_aborted for _, transport in small) <= 1_000_000 // (20 * WATCH_BYTES)
    honest, stays = world.connect()
    honest.data_received(encode(Op.WAIT, [b"absent"]))
    await turns()
    assert not stays.is_aborted


# ---- a store


class _Kv:
    """A client whose watches never see anything, and whose txns find large values."""

    scope = None

    def __init__(self) -> None:
        self.watches = 0
        self.watches_max = 0
        self.asked: list[int] = []

    def view(self, prefix: bytes | str) -> _Kv:
        return self

    def watch(self, key: bytes, end: bytes | None, **_: Any) -> _Watch:
        self.watches += 1
        self.watches_max = max(self.watches_max, self.watches)
        return _Watch(self)


class _Watch:
    def __init__(self, kv: _Kv) -> None:
        self._kv = kv

    def expect(self, cluster_id: int) -> None: ...

    async def next_step(self) -> Any:
        await asyncio.Event().wait()

    def cancel(self) -> None:
        self._kv.watches -= 1


async def test_a_wait_for_very_many_keys_watches_few_at_once() -> None:
    kv: Any = _Kv()
    store = ReplicatedStore(kv, b"p/")
    waiting = asyncio.ensure_future(store.wait_for({b"%d" % number: 1 for number in range(10_000)}))
    await turns()
    assert 0 < kv.watches_max <= 256
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert kv.watches == 0


class _Item:
    value = b"v" * 1_000_000


class _ReadingStore(ReplicatedStore):
    """Notes how many keys each txn reads."""

    asked: list[int]

    async def _read(self, questions: Any) -> Any:
        self.asked.append(len(questions))

        class Result:
            results = [_Item() for _ in questions]  # noqa: RUF012

        return Result()


async def test_values_are_read_by_the_megabyte_and_equal_keys_once() -> None:
    kv: Any = _Kv()
    store = _ReadingStore(kv, b"p/")
    store.asked = []
    sizes = [len(values) async for values in store.values([b"%d" % number for number in range(40)])]
    assert sum(sizes) == 40
    assert max(store.asked) <= 10
    assert store.asked[-1] <= 2
    store.asked = []
    assert sum([len(values) async for values in store.values([b"same"] * 1500)]) == 1500
    assert sum(store.asked) <= 150


# ---- connections


@pytest.mark.parametrize(("soft", "clients"), [(1024, 960), (70, 6), (10, 1), (1 << 20, CONNECTIONS_MAX)])
def test_clients_leave_descriptors_for_the_way_to_raftkv(soft, clients, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert connections_allowed() == clients


async def test_reads_of_a_client_that_has_gone_are_not_done(world: World) -> None:
    world.store.gate.clear()
    connection, transport = world.connect()
    connection.data_received(encode(Op.GET, b"k") * 1000)
    await turns()
    transport.abort()
    await turns()
    world.store.gate.set()
    await turns()
    assert world.store.reads <= 1
    assert world.ended == [connection]


async def test_a_closed_connection_is_freed_at_once(world: World) -> None:
    connection, transport = world.connect()
    connection.data_received(encode(Op.PING, 7) + encode(Op.GET, b"large")[:-1])
    await turns()
    reference = weakref.ref(connection)
    transport.abort()
    await turns()
    world.ended.clear()
    gc.disable()
    try:
        transport._connection = None
        del connection
        assert reference() is None
    finally:
        gc.enable()
