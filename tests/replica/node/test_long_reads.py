"""Long ranges and txns at the service: the state they show, early ends, and memory limits."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from raftkv import errors
from raftkv.apply import compares, ranges, wire
from raftkv.apply.applier import Applier, Outcome
from raftkv.apply.txn import LONG_WORK, VALUES_AT_ONCE
from raftkv.apply.wire import HeaderEncoder
from raftkv.loop import scheduler as slices_module
from raftkv.pb import rpc_pb2
from raftkv.replica.node.admission import Admission
from raftkv.replica.node.node import Node
from raftkv.rpc.server.budget import CONNECTION_FULL
from raftkv.rpc.server.calls import UnaryCall
from raftkv.rpc.shares import Identity, Uses
from raftkv.rpc.status import RpcError
from raftkv.server.services import responder as responder_module
from raftkv.server.services.kv import KVService
from raftkv.server.services.responder import Responder
from raftkv.storage.selection import finish
from tests.apply.machine import Machine
from tests.server.recipes.recipes import Granted, ManualNode, NoAdmission

KEYS = 3000
ALL = rpc_pb2.RangeRequest(key=b"k", range_end=b"l", serializable=True)


class Call:
    """A call of a client whose connection accepts a number of bytes."""

    def __init__(self, room_bytes: int = 1 << 40) -> None:
        self._room_bytes = room_bytes
        self._on_cancel: Callable[[], None] = lambda: None
        self.cancelled = False
        self.deadline: float | None = None
        self.trailers: tuple[tuple[bytes, bytes], ...] = ()
        self.caller = None
        self.identity: Identity = "address 10.0.0.1"
        self.answer = b""
        self.error: tuple[int, str] | None = None

    def room_bytes(self) -> int:
        return self._room_bytes

    def on_cancel(self, callback: Callable[[], None]) -> None:
        self._on_cancel = callback

    def cancel(self) -> None:
        self.cancelled = True
        self._on_cancel()

    def reply(self, message: bytes) -> None:
        self.reply_many([message])

    def reply_many(self, pieces: list[bytes]) -> None:
        assert not self.answer
        self.answer = b"".join(pieces)

    def fail(self, code: int, text: str, *, trailers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self.error, self.trailers = (code, text), trailers

    def fail_with(self, error: RpcError) -> None:
        self.error = (error.code, error.text)


class World:
    """A service on a store of ``KEYS`` keys; every pass of the loop does one piece of each job."""

    def __init__(self, value: bytes = b"v") -> None:
        self.machine = Machine()
        for number in range(KEYS):
            self.put(b"k%05d" % number, value)
        applier = Applier(self.machine.store, self.machine.alarms, self.machine.membership, Granted())
        admission = cast(Admission, NoAdmission())
        self.responder = Responder(
            cast(Node, ManualNode()), applier, HeaderEncoder(1, 2), admission, lambda needed: None, Uses()
        )
        self.service = KVService(self.responder, 128)

    def put(self, key: bytes, value: bytes) -> None:
        txn = self.machine.store.begin()
        txn.put(key, value)
        txn.end()
        self.machine.store.set_applied(self.machine.store.applied_index, 1)

    def range(self, call: Call, request: rpc_pb2.RangeRequest) -> None:
        self.service.range(cast(UnaryCall, call), request.SerializeToString())

    def txn(self, call: Call, request: rpc_pb2.TxnRequest) -> None:
        self.service.txn(cast(UnaryCall, call), request.SerializeToString())

    async def finish(self, between: Callable[[], Any] = lambda: None) -> int:
        passes = 0
        while len(self.responder.slices):
            between()
            await asyncio.sleep(0)
            passes += 1
        return passes


@pytest.fixture(autouse=True)
def _one_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TURN_S", "SLICE_S", "INLINE_S"):
        monkeypatch.setattr(slices_module, name, 1e-9)


async def test_a_long_range_shows_the_state_at_its_beginning() -> None:
    world, call = World(), Call()
    expected = world.machine.store.range(b"k", b"l").kvs
    world.range(call, ALL)
    assert not call.answer
    assert await world.finish(lambda: world.put(b"k02999", b"later")) > 5
    answer = rpc_pb2.RangeResponse.FromString(call.answer)
    assert [kv.SerializeToString() for kv in answer.kvs] == expected
    assert (answer.count, answer.header.revision) == (KEYS, KEYS + 1)


async def test_a_long_txn_of_ranges_shows_one_state() -> None:
    world, call = World(), Call()
    operation = rpc_pb2.RequestOp(request_range=ALL)
    compare = rpc_pb2.Compare(
        key=b"k", range_end=b"l", result=rpc_pb2.Compare.EQUAL, target=rpc_pb2.Compare.VERSION, version=1
    )
    world.txn(call, rpc_pb2.TxnRequest(compare=[compare], success=[operation, operation]))
    await world.finish(lambda: world.put(b"k02999", b"later"))
    answer = rpc_pb2.TxnResponse.FromString(call.answer)
    assert answer.succeeded
    one, other = answer.responses
    assert one == other
    assert {kv.value for kv in one.response_range.kvs} == {b"v"}


async def test_a_cancelled_range_stops_and_lets_go() -> None:
    world, call = World(), Call()
    world.range(call, ALL)
    store = world.machine.store
    store.compact(store.revision)
    store.set_applied(store.applied_index, 1)
    assert not store.compaction_step()
    call.cancel()
    assert len(world.responder.slices) == 0
    while store.is_compacting:
        store.compaction_step()
        store.commit()
    assert (call.answer, call.error) == (b"", None)


@pytest.mark.interpreted
async def test_log_says_whose_read_was_slow(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(responder_module, "SLOW_READ_S", 0.0)
    world, call = World(), Call()
    call.identity = b"mallory\n"
    world.range(call, ALL)
    await world.finish()
    assert call.answer
    (record,) = caplog.records
    assert re.fullmatch(r"slow read: took \d+\.\d s, from 'user mallory\\n'", record.getMessage())


@pytest.mark.interpreted
async def test_range_that_cannot_be_read_in_time_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose deadline has passed is not read, and one that would wait for too long hears it at once."""
    monkeypatch.setattr(slices_module, "SHORT_ACTIVE_MAX", 1)
    world = World()
    now = asyncio.get_running_loop().time()
    read, expired, *waiting = (Call() for _ in range(40))
    for call in (read, expired, *waiting):
        world.range(call, ALL)
    expired.cancelled = True  # its deadline has passed, and its answer is not sent yet
    answered: list[bool] = []
    while not answered:
        await asyncio.sleep(0)
        answered = [True for call in waiting if call.answer]
    assert (read.answer != b"", expired.answer, expired.error) == (True, b"", None)
    hasty, patient = Call(), Call()
    hasty.deadline, patient.deadline = now, now + 3600
    world.range(hasty, ALL)
    world.range(patient, ALL)
    assert hasty.error == (errors.RESOURCE_EXHAUSTED, "etcdserver: too many requests")
    assert int(dict(hasty.trailers)[errors.RETRY_AFTER]) >= 1
    await world.finish()
    assert patient.answer


async def test_an_answer_that_would_not_be_taken_is_given_up_while_it_is_made() -> None:
    world = World(bytes(1000))
    refused, small, other = Call(1_500_000), Call(1_500_000), Call()
    world.range(refused, ALL)
    world.range(other, ALL)
    world.range(small, rpc_pb2.RangeRequest(key=b"k", range_end=b"k00500", serializable=True))
    await world.finish()
    assert refused.error == (errors.RESOURCE_EXHAUSTED, CONNECTION_FULL)
    assert len(rpc_pb2.RangeResponse.FromString(other.answer).kvs) == KEYS
    assert len(rpc_pb2.RangeResponse.FromString(small.answer).kvs) == 500
    assert world.responder._growing.used == 0


async def test_of_too_many_answers_those_of_the_greediest_are_given_up() -> None:
    world = World(bytes(1000))
    greedy, honest = [Call(), Call(), Call(2_000_000)], Call(2_000_000)
    honest.identity = b"alice"
    for call in greedy:
        world.range(call, ALL)
    waiting = [honest]

    def begin() -> None:
        if waiting and world.responder._growing.used > 2_500_000:
            world.range(waiting.pop(), rpc_pb2.RangeRequest(key=b"k", range_end=b"k01500", serializable=True))

    await world.finish(begin)
    assert len(rpc_pb2.RangeResponse.FromString(honest.answer).kvs) == 1500
    assert [call.error for call in greedy] == [None, None, (errors.RESOURCE_EXHAUSTED, CONNECTION_FULL)]
    assert world.responder._growing.used == 0


@pytest.mark.interpreted
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_an_answer_that_is_given_up_is_freed_little_by_little(is_cancelled, monkeypatch):
    # 512 MiB at once took a turn of 116 to 231 ms.
    monkeypatch.setattr(wire, "DROPPED_BYTES", 100_000)
    bodies: list[list[bytes]] = []
    in_pieces = ranges.in_pieces

    def noted(view: Any, request: Any, grow: Any, body: list[bytes]) -> Any:
        bodies.append(body)
        return in_pieces(view, request, grow, body)

    monkeypatch.setattr(ranges, "in_pieces", noted)
    world = World(bytes(1000))
    call = Call(1 << 40 if is_cancelled else 2_500_000)
    world.range(call, ALL)
    sizes: list[int] = []

    def look() -> None:
        sizes.append(sum(map(len, bodies[0])) if bodies else 0)
        if is_cancelled and sizes[-1] > 1_500_000:
            call.cancel()

    await world.finish(look)
    look()
    assert max(sizes) > 1_500_000
    steps = [before - after for before, after in itertools.pairwise(sizes) if before > after]
    assert len(steps) >= 4
    assert max(steps) < 1_000_000
    assert sizes[-1] == 0


async def proposed(node: ManualNode) -> None:
    """Wait until something is proposed: a txn with ranges is checked in slices."""
    for _ in range(100):
        if node.proposed:
            return
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_deletion", [False, True])
async def test_an_entry_whose_answer_would_not_be_taken_is_applied_without_it(is_deletion, monkeypatch):
    monkeypatch.setattr(slices_module, "TURN_S", 0.002)  # long jobs come after short ones

    # A txn of a put and 127 ranges of 28 MB, 5 KB in all, took 10 GB and held the loop for 40 s.
    world = World(bytes(1000))
    refused, taken = Call(1_500_000), Call()
    node = world.responder.node
    assert isinstance(node, ManualNode)
    for call in (taken, refused):
        world.put(b"k", bytes(1000))
        if is_deletion:
            deletion = rpc_pb2.DeleteRangeRequest(key=b"k", range_end=b"k02900", prev_kv=True)
            world.service.delete_range(cast(UnaryCall, call), deletion.SerializeToString())
        else:
            request = rpc_pb2.TxnRequest()
            request.success.add().request_put.key = b"new"
            request.success.add().request_range.CopyFrom(ALL)
            world.txn(call, request)
        await proposed(node)
        kind, data, waiter = node.proposed.pop()
        applier = world.responder.applier
        outcome = applier.begin(kind, data, waiter.request)
        assert not isinstance(outcome, Outcome)
        before = applier.store.revision
        whole = finish(outcome)
        assert applier.store.revision == before + 1
        world.machine.store.set_applied(world.machine.store.applied_index, 1)
        waiter.finish(whole)
        await world.finish(lambda: world.put(b"k02999", b"later"))
        for number in range(KEYS if is_deletion and call is taken else 0):
            world.put(b"k%05d" % number, bytes(1000))
    assert taken.error is None
    assert len(taken.answer) > 2_000_000
    assert b"later" not in taken.answer
    assert (refused.error, refused.answer) == ((errors.RESOURCE_EXHAUSTED, CONNECTION_FULL), b"")
    assert world.responder._growing.used == 0


async def test_an_answer_of_what_is_compacted_while_it_waits_is_read() -> None:
    """A deletion that was applied, as one member did at once, heard "request timed out"."""
    world, call, other = World(), Call(), Call()
    world.range(other, ALL)
    deletion = rpc_pb2.DeleteRangeRequest(key=b"k", range_end=b"k02900", prev_kv=True)
    world.service.delete_range(cast(UnaryCall, call), deletion.SerializeToString())
    kind, data, waiter = cast(ManualNode, world.responder.node).proposed.pop()
    outcome = world.responder.applier.begin(kind, data, waiter.request)
    assert not isinstance(outcome, Outcome)
    store = world.machine.store
    outcome = finish(outcome)
    store.set_applied(store.applied_index, 1)
    waiter.finish(outcome)
    store.compact(store.revision)
    store.set_applied(store.applied_index, 1)

    def compact() -> None:
        while store.compaction_step():
            store.commit()

    compact()
    await world.finish(compact)
    assert (other.error, call.error) == (None, None)
    answer = rpc_pb2.DeleteRangeResponse.FromString(call.answer)
    assert (answer.deleted, [kv.value for kv in answer.prev_kvs]) == (2900, [b"v"] * 2900)


def _nested(count: int, each: Callable[[rpc_pb2.TxnRequest, int], object]) -> rpc_pb2.TxnRequest:
    """A txn of so many nested ones with 64 things each."""
    request = rpc_pb2.TxnRequest()
    for number in range(count):
        nested = request.success.add().request_txn
        for other in range(64):
            each(nested, number * 64 + other)
    return request


def _put_in(nested: rpc_pb2.TxnRequest, number: int) -> None:
    nested.success.add().request_put.key = b"new%d" % number


def _compare_in(nested: rpc_pb2.TxnRequest, number: int) -> None:
    nested.compare.add(key=b"k", range_end=b"l%d" % number, result=rpc_pb2.Compare.GREATER)


@pytest.mark.parametrize("end", ["proposed", "refused", "cancelled"])
async def test_large_txn_check_does_not_block_loop(end: str) -> None:
    world, call = World(), Call()
    request = _nested(40, _put_in)
    if end == "refused":
        request.success.add().request_put.key = b"new0"
    world.txn(call, request)
    node = world.responder.node
    assert isinstance(node, ManualNode)
    assert not node.proposed
    if end == "cancelled":
        call.cancel()
        assert len(world.responder.slices) == 0
    assert await world.finish() > 10 or end == "cancelled"
    assert len(node.proposed) == (end == "proposed")
    duplicate = (errors.INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request")
    assert call.error == (duplicate if end == "refused" else None)


_LARGE_BYTES = 100_000
"""Size of a large value: 195 keys of work."""


def _make(message: Any, **fields: Any) -> Any:
    return message(key=fields.pop("key", b"large"), **fields)


_RANGE_OF_LARGE = partial(_make, rpc_pb2.RangeRequest)


def _write_and(*ranges_: rpc_pb2.RangeRequest) -> rpc_pb2.TxnRequest:
    put = rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"x", value=b"v"))
    return rpc_pb2.TxnRequest(success=[put, *(rpc_pb2.RequestOp(request_range=one) for one in ranges_)])


_BY_VALUE = rpc_pb2.Compare(key=b"large", target=rpc_pb2.Compare.VALUE, value=b"v")


@pytest.mark.parametrize(
    ("method", "request_", "values"),
    [
        ("put", rpc_pb2.PutRequest(key=b"large", value=b"v"), 0),
        ("put", rpc_pb2.PutRequest(key=b"large", value=b"v", prev_kv=True), 1),
        ("put", rpc_pb2.PutRequest(key=b"large", ignore_value=True), 1),
        ("put", rpc_pb2.PutRequest(key=b"large", value=b"v", ignore_lease=True), 1),
        ("delete_range", rpc_pb2.DeleteRangeRequest(key=b"large", prev_kv=True), 1),
        ("delete_range", rpc_pb2.DeleteRangeRequest(key=b"large", range_end=b"largf"), 0),
        ("delete_range", rpc_pb2.DeleteRangeRequest(key=b"large", range_end=b"largf", prev_kv=True), 0),
        ("txn", _write_and(_RANGE_OF_LARGE()), 1),
        ("txn", _write_and(*[_RANGE_OF_LARGE()] * 30), VALUES_AT_ONCE),
        ("txn", _write_and(_RANGE_OF_LARGE(keys_only=True)), 0),
        ("txn", _write_and(_RANGE_OF_LARGE(range_end=b"large11")), 3),
        ("txn", _write_and(_RANGE_OF_LARGE(range_end=b"largf")), 0),
        ("txn", rpc_pb2.TxnRequest(compare=[_BY_VALUE] * 20, success=_write_and().success), 20),
    ],
)
async def test_a_write_states_the_work_of_the_values_that_it_reads(method: str, request_: Any, values: int) -> None:
    """A txn of a put and 63 keys of 1 MB, 1 KB itself, counted as two puts, and took a third of a second to apply."""
    world, call = World(), Call()
    for name in (b"gone", b"large"):
        for number in range(20):
            world.put(name + b"%d" % number * bool(number), bytes(_LARGE_BYTES))
    deletion = world.machine.store.begin()
    deletion.delete_range(b"gone", b"gonf")
    deletion.end()
    getattr(world.service, method)(call, request_.SerializeToString())
    await world.finish()
    ((_, _, waiter),) = cast(ManualNode, world.responder.node).proposed
    of_a_value = _LARGE_BYTES // compares.BYTES_PER_KEY
    assert values * of_a_value <= waiter.work <= values * (of_a_value + 2) + 20


@pytest.mark.interpreted
@pytest.mark.parametrize("is_plain", [True, False])
async def test_few_large_values_are_looked_at_before_a_txn_is_proposed(is_plain, monkeypatch):
    """Finding the sizes of 127 values of 1 MB took 30 ms of one turn of the loop: LMDB copies a value that it finds."""
    world, call = World(), Call()
    for number in range(60):
        world.put(b"large%d" % number, bytes(1_000_000))
    reader, looks = world.machine.store.reader, [0]
    mean_bytes = reader.mean_bytes

    def counted(*arguments: Any) -> int:
        looks[0] += 1
        return mean_bytes(*arguments)

    monkeypatch.setattr(type(reader), "mean_bytes", lambda self, *arguments: counted(*arguments))
    compared = [
        rpc_pb2.Compare(key=b"large%d" % number, target=rpc_pb2.Compare.VALUE, value=b"v") for number in range(60)
    ]
    written = _write_and(*[] if is_plain else [_RANGE_OF_LARGE(keys_only=True)])
    world.txn(call, rpc_pb2.TxnRequest(compare=compared, success=written.success))
    ((_, _, waiter),) = cast(ManualNode, world.responder.node).proposed
    assert waiter.work > LONG_WORK
    assert looks[0] < 12


@pytest.mark.parametrize("is_nested", [False, True])
async def test_a_txn_keeps_no_more_than_it_may(is_nested: bool) -> None:
    """5 KB that kept 100 values of 1 MB took each member 100 MB of memory and disk, in seconds without other writes."""
    world = World()
    for number in range(100):
        world.put(b"large%d" % number, bytes(400_000))
    for count, is_refused in ((50, False), (100, True)):
        call, request = Call(), rpc_pb2.TxnRequest()
        inner = request.success.add().request_txn if is_nested else request
        for number in range(count):
            inner.success.add().request_put.CopyFrom(rpc_pb2.PutRequest(key=b"large%d" % number, ignore_value=True))
        world.txn(call, request)
        await world.finish()
        refusal = (errors.INVALID_ARGUMENT, "etcdserver: request is too large")
        assert call.error == (refusal if is_refused else None)
    assert len(cast(ManualNode, world.responder.node).proposed) == 1


@pytest.mark.parametrize(("lists", "is_taken"), [(5, True), (6, False)])
async def test_compares_that_would_keep_all_members_busy_are_refused(lists, is_taken, monkeypatch):
    monkeypatch.setattr(slices_module, "TURN_S", 0.002)  # long jobs come after short ones
    # A key takes 0.3 us: 3,500 compares over 200,000 keys are 210 s of every member's applying.
    assert 5 * 64 * KEYS < compares.WORK_MAX < 6 * 64 * KEYS
    world, call, other = World(), Call(), Call()
    request = _nested(lists, _compare_in)
    request.success.add().request_put.key = b"new"
    world.txn(call, request)
    await world.finish()
    node = world.responder.node
    assert isinstance(node, ManualNode)
    assert len(node.proposed) == is_taken
    refusal = (errors.INVALID_ARGUMENT, "raftkv: the compares of the txn look at too many keys")
    assert call.error == (None if is_taken else refusal)
    # A request to one member delays no other.
    reads = rpc_pb2.TxnRequest(compare=[_interval(b"l%d" % number) for number in range(128)])
    reads.success.add().request_range.CopyFrom(ALL)
    world.txn(other, reads)
    await world.finish()
    assert rpc_pb2.TxnResponse.FromString(other.answer).succeeded


def _interval(end: bytes) -> rpc_pb2.Compare:
    return rpc_pb2.Compare(key=b"k", range_end=end, result=rpc_pb2.Compare.GREATER)


@pytest.mark.parametrize(("size_bytes", "is_taken"), [(100_000, True), (1_400_000, False)])
async def test_values_that_are_compared_count_by_their_size(size_bytes: int, is_taken: bool) -> None:
    world, call = World(), Call()
    for number in range(50):
        world.put(b"large%02d" % number, bytes(size_bytes))
    request = rpc_pb2.TxnRequest()
    for number in range(100):
        request.compare.add(key=b"large", range_end=b"m%d" % number, target=rpc_pb2.Compare.VALUE, result=1)
    request.success.add().request_put.key = b"new"
    world.txn(call, request)
    await world.finish()
    node = world.responder.node
    assert isinstance(node, ManualNode)
    assert len(node.proposed) == is_taken
    assert (call.error is None) == is_taken


async def test_many_large_values_are_not_read_in_one_pass() -> None:
    world = World()
    world.put(b"large", bytes(100_000))
    calls = [Call() for _ in range(10)]
    for call in calls:
        world.range(call, rpc_pb2.RangeRequest(key=b"large", serializable=True))
    assert sum(bool(call.answer) for call in calls) == 1
    await world.finish()
    assert all(call.answer for call in calls)
