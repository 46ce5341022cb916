"""What the node tells of traced requests: whose it is, in which order, and what is kept of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from raftkv.apply import wire
from raftkv.apply.wire import Kind
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft.types import Entry, Message, MessageType
from raftkv.replica import codec
from raftkv.replica.codec import BatchEncoder
from raftkv.rpc.server.calls import Peer
from raftkv.rpc.server.router import Kind as Way
from raftkv.server.tracing import stages as stages_module
from raftkv.server.tracing.assembly import TracedCalls
from raftkv.server.tracing.peers import CONTEXTS_MAX, TracedEncoder, decoder
from raftkv.server.tracing.recording import SERVER, Context, Recording, current, parse
from raftkv.server.tracing.stages import TracedStages
from tests.replica.node.node_world import Caller, World

PARENT = Context(7, 8, "a=b")
DATA = wire.encode(Kind.PUT, 5, b"")
SUBJECT = (5).to_bytes(8, "big")


def in_name_of(recording: Recording, do: Callable[[], object]) -> None:
    token = current.set(recording)
    do()
    current.reset(token)


@pytest.mark.parametrize(
    ("parent", "expected"),
    [
        (b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01", True),
        (b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-00", False),
        (b"cc-" + b"1" * 32 + b"-" + b"2" * 16 + b"-09-more", True),
        (b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01-more", None),
        (b"ff-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01", None),
        (b"00-" + b"0" * 32 + b"-" + b"2" * 16 + b"-01", None),
        (b"00-" + b"1" * 32 + b"-" + b"0" * 16 + b"-01", None),
        (b"00-" + b"A" * 32 + b"-" + b"2" * 16 + b"-01", None),
        (b"", None),
        (b"\xff" * 55, None),
    ],
)
def test_contexts_are_read_as_w3c_says(parent: bytes, expected: bool | None):
    context = parse([(b"traceparent", parent), (b"tracestate", b"k=v")])
    assert (context.is_sampled if context else None) is expected
    if context:
        assert (context.trace_id, context.span_id, context.state) == (int("1" * 32, 16), int("2" * 16, 16), "k=v")
        assert parse([(b"traceparent", parent), (b"tracestate", b"x" * 513)]).state == ""


async def test_a_turn_belongs_to_no_request():
    """What is proposed because a traced request was applied is no part of it."""
    ended: list[Recording] = []
    stages = TracedStages(ended.append)
    world = World(voters=(1,), stages=stages)
    world.node.start()
    world.node.campaign()
    await world.turns()
    recording = Recording("call", PARENT, SERVER, 1)
    others = iter([Caller(rpc_pb2.PutRequest(key=b"b"))])

    def propose(caller: Caller) -> None:
        world.node.submit(Kind.PUT, caller.request.SerializeToString(), caller, None)

    def applied() -> None:
        for caller in others:
            propose(caller)

    world.node.on_applied.append(applied)
    in_name_of(recording, lambda: propose(Caller(rpc_pb2.PutRequest(key=b"a"))))
    await world.turns()
    assert [span.name for span in recording.spans] == [
        *("raftkv.check", "raftkv.propose", "raftkv.wal.sync", "raftkv.replicate", "raftkv.apply")
    ]
    assert stages.is_idle
    assert ended == []  # the call ends when it is answered, which is not the node's to say


class Call:
    """A call whose client traces, or does not."""

    def __init__(self, is_traced: bool) -> None:
        parent = (b"traceparent", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01")
        self.headers = [parent] if is_traced else []
        self.observers: list[Callable[[int, bytes], None]] = []
        self.add_observer = self.observers.append
        self.peer = Peer("127.0.0.1:9", identity="address 127.0.0.1")


def test_a_call_is_current_while_its_handler_runs_alone():
    """The next call of the same connection runs in the same context."""
    seen: list[bool] = []
    ended: list[Recording] = []
    traced = TracedCalls(ended.append, 0).around(
        "/a.B/C", Way.UNARY, lambda call, data: seen.append(current.get() is not None)
    )
    first = Call(is_traced=True)
    traced(first, b"")
    traced(Call(is_traced=False), b"")
    assert seen == [True, False]
    assert current.get() is None
    second = Call(is_traced=True)
    traced(second, b"")
    (told,) = second.observers
    told(5, b"")
    assert [recording.code for recording in ended] == [5]


def test_contexts_travel_beside_messages_that_stay_as_they_are():
    ended: list[Recording] = []
    sender, receiver = TracedStages([].append), TracedStages(ended.append)
    recording = Recording("call", PARENT, SERVER, 1)
    in_name_of(recording, lambda: sender.submitted(5))
    sender.proposed([DATA], True)
    message = Message(MessageType.PROPOSE, to=1, from_=2, entries=[Entry(0, 0, DATA)])
    other = Message(MessageType.HEARTBEAT, to=1, from_=2, term=1)
    (traced,) = TracedEncoder(sender).batches([message, other])
    (plain,) = BatchEncoder().batches([message, other])
    assert traced.startswith(plain)
    for messages in (codec.decode(traced), decoder(receiver)(traced)):
        assert list(BatchEncoder().batches(messages)) == [plain]
    assert TracedStages([].append).forwarded(DATA) is None
    receiver.appended([Entry(1, 9, DATA)])
    receiver.committed(9)
    receiver.durable(9)
    receiver.applied(9)
    (part,) = ended
    forward = sender.forwarded(DATA)[1]
    assert (part.name, part.trace_id, part.parent_id, part.state) == ("raftkv.Peer/Propose", 7, forward, "a=b")
    assert [span.name for span in part.spans] == ["raftkv.propose", "raftkv.replicate", "raftkv.wal.sync"]


@pytest.mark.parametrize(
    "trace",
    [
        raft_pb2.TraceContext(subject=b"1", trace_id=b"1" * 16, span_id=b"1" * 8),
        raft_pb2.TraceContext(subject=SUBJECT, trace_id=b"1", span_id=b"1" * 8),
        raft_pb2.TraceContext(subject=SUBJECT, trace_id=bytes(16), span_id=b"1" * 8),
        raft_pb2.TraceContext(subject=SUBJECT, trace_id=b"1" * 16, span_id=bytes(8)),
    ],
)
def test_invalid_contexts_are_ignored(trace: raft_pb2.TraceContext):
    stages = TracedStages([].append)
    assert decoder(stages)(raft_pb2.MessageBatch(traces=[trace]).SerializeToString()) == []
    assert stages.is_idle


def test_nothing_grows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stages_module, "OPEN_MAX", 10)
    stages = TracedStages([].append)
    many = [
        raft_pb2.TraceContext(subject=at.to_bytes(8, "big"), trace_id=b"1" * 16, span_id=b"1" * 8) for at in range(200)
    ]
    decoder(stages)(raft_pb2.MessageBatch(traces=many).SerializeToString())
    assert len(stages._open) == 10
    stages.appended([Entry(1, at, wire.encode(Kind.PUT, at, b"")) for at in range(200)])
    decoder(stages)(raft_pb2.MessageBatch(traces=many).SerializeToString())
    assert len(stages._open) == 10
    assert len(stages._by_index) <= 10
    recording = Recording("call", None, SERVER, 1)
    for at in range(500):
        recording.add("span", at, at)
    assert len(recording.spans) < 100
    assert CONTEXTS_MAX < 100


def test_an_entry_that_another_leader_replaced_is_not_taken_for_the_request():
    stages = TracedStages([].append)
    recording = Recording("call", PARENT, SERVER, 1)
    in_name_of(recording, lambda: stages.submitted(5))
    stages.appended([Entry(1, 9, DATA)])
    stages.appended([Entry(2, 9, b"")])
    stages.committed(9)
    assert [span.name for span in recording.spans] == ["raftkv.check", "raftkv.propose"]


def test_stage_after_the_end_is_ignored():
    stages = TracedStages([].append)
    recording = Recording("call", PARENT, SERVER, 1)
    in_name_of(recording, lambda: stages.submitted(5))
    recording.end(2, 1)
    stages.appended([Entry(1, 9, DATA)])
    stages.applied(9)
    in_name_of(recording, lambda: stages.submitted(6))
    assert [span.name for span in recording.spans] == ["raftkv.check"]
    assert stages.is_idle


async def test_a_read_round_has_its_own_readers_alone():
    """A round begun for others is not taken for one of a traced reader that waits for an earlier one."""
    stages = TracedStages([].append)
    asked: list[bytes] = []
    begin = stages.asking(asked.append)
    recording = Recording("call", PARENT, SERVER, 1)
    caller = Caller()
    caller.ready = lambda: None
    readers = []
    in_name_of(recording, lambda: readers.append(stages.reading(caller)))
    begin(b"round  1")
    assert stages.reading(caller) is caller
    begin(b"round  2")
    await asyncio.sleep(0)
    assert stages.round_of(b"round  2") is None
    assert stages.round_of(b"round  1") == (recording, readers[0].span_id)
    readers[0].ready()
    assert stages.is_idle
