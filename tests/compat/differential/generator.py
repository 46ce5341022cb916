"""A seeded stream of KV requests, valid and invalid, that drives two stores through the same deep states.

Owns what is sent, never what is right: the answers of the oracle are only read for its revision, so that the
stream can ask for revisions just before, at and just after every edge (compacted, current, future).

    generator = Generator(seed=7, view=View(base=1, revision=1))
    step = generator.next_step()        # Step(method="etcdserverpb.KV/Put", request=PutRequest(...))
    generator.observe(step, answer)     # the oracle's answer

How it gets deep: few keys (so that requests meet), and swarm testing: every phase of some dozen steps draws its
own mixture of operations, so that long runs of overwrites, deletions or compactions happen.
What it leaves out: watches, leases that exist, auth; sizes within 64 bytes of the size limit, whose verdict
depends on the width of the server's own request id.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from raftkv.pb import rpc_pb2
from tests.compat.wire import Answer

KEYS = (
    *(b"a", b"a", b"a", b"b", b"b", b"c", b"aa", b"ab", b"ab\x00", b"abc", b"b\xff", b"c\x00", b"d", b"e/1", b"e/2"),
    *(b"\x00", b"\x00\x00", b"\xff", b"\xff\xff", b"e/\xff"),
)
VALUES = (b"", b"0", b"1", b"2", b"10", b"\xff", b"value")
UNKNOWN_LEASES = (1, 7, -1, 2**63 - 1)
INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)
TXN_OPS_MAX = 128
REQUEST_MAX_BYTES = 1536 * 1024
MESSAGE_MAX_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class Step:
    """One request of the stream."""

    method: str
    request: Any

    @property
    def is_write(self) -> bool:
        """Tell whether the request may change the store (etcd's rule: a nested txn counts as a write)."""
        if isinstance(self.request, rpc_pb2.TxnRequest):
            return is_write_txn(self.request)
        return not isinstance(self.request, rpc_pb2.RangeRequest)

    @property
    def is_serializable(self) -> bool:
        """Tell whether the member may answer from what it has applied, without asking the others."""
        if isinstance(self.request, rpc_pb2.RangeRequest):
            return self.request.serializable
        if isinstance(self.request, rpc_pb2.TxnRequest) and not self.is_write:
            operations = [*self.request.success, *self.request.failure]
            return all(operation.request_range.serializable for operation in operations)
        return False


def is_write_txn(txn: rpc_pb2.TxnRequest) -> bool:
    """Tell whether etcd takes the txn for a write: any operation but a range."""
    return any(operation.WhichOneof("request") != "request_range" for operation in [*txn.success, *txn.failure])


@dataclass
class View:
    """What the generator knows of the stores: revisions as the oracle's answers show them."""

    base: int
    revision: int
    compacted: int = 0


@dataclass
class Mixture:
    """How often each kind of request comes in one phase, and for how many steps more."""

    weights: list[int]
    steps_left: int


@dataclass
class Generator:
    """Makes what the module's text says. The same seed and the same answers give the same stream."""

    seed: int
    view: View
    compactions: bool = True
    random: random.Random = field(init=False)
    mixture: Mixture = field(init=False)
    recent: deque[bytes] = field(init=False)
    written: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.mixture = Mixture([], 0)
        self.recent = deque(maxlen=5)

    # --- the stream -----------------------------------------------------------------------------------------

    def next_step(self) -> Step:
        """Draw the next request."""
        kinds = [self.put, self.range, self.delete_range, self.txn, self.compact, self.oversized]
        if self.mixture.steps_left == 0:
            self.mixture = self._draw_mixture()
        self.mixture.steps_left -= 1
        (kind,) = self.random.choices(kinds, self.mixture.weights)
        request = kind()
        return Step(f"etcdserverpb.KV/{METHODS[type(request)]}", request)

    def observe(self, step: Step, answer: Answer) -> None:
        """Take the oracle's answer to `step` into account."""
        if answer.message is None:
            return
        self.view.revision = max(self.view.revision, answer.revision)
        if isinstance(step.request, rpc_pb2.CompactionRequest):
            self.view.compacted = step.request.revision

    def _draw_mixture(self) -> Mixture:
        draw = self.random.randint
        rare = 1 if self.random.random() < 0.05 else 0
        compactions = draw(0, 3) if self.compactions else 0
        weights = [draw(0, 60), draw(10, 60), draw(0, 15), draw(5, 60), compactions, rare]
        return Mixture(weights, draw(20, 120))

    def _often(self, percent: float) -> bool:
        return self.random.random() * 100 < percent

    # --- parts of requests ----------------------------------------------------------------------------------

    def key(self, again: float = 10) -> bytes:
        """A key; one in a hundred is empty; `again` percent are among the last few, so that operations meet."""
        if self._often(1):
            return b""
        key = self.random.choice(self.recent) if self.recent and self._often(again) else self.random.choice(KEYS)
        self.recent.append(key)
        return key

    def range_end(self, key: bytes) -> bytes:
        """An interval's end: none, everything from the key on, its prefix, any other key (also before it)."""
        choice = self.random.randrange(10)
        if choice < 4:
            return b""
        if choice == 4:
            return b"\x00"
        if choice == 5:
            return prefix_end(key)
        if choice == 6:
            return key + b"\x00"
        if choice == 7:
            return b"\xff\xff\xff"
        return self.random.choice(KEYS)

    def interval(self) -> dict[str, bytes]:
        """Key and range end; sometimes the whole store."""
        if self._often(12):
            return {"key": b"\x00", "range_end": b"\x00"}
        key = self.key(again=25)
        return {"key": key, "range_end": self.range_end(key)}

    def revision(self) -> int:
        """A revision near some edge, or any of the history, or nonsense."""
        view = self.view
        edges = (view.compacted, view.revision, view.base)
        choice = self.random.randrange(20)
        if choice < 12:
            return self.random.randint(max(1, view.compacted), max(1, view.revision))
        if choice < 17:
            return self.random.choice(edges) + self.random.randint(-1, 1)
        return self.random.choice((1, 0, -1, -2, INT64_MIN, INT64_MAX))

    # --- requests -------------------------------------------------------------------------------------------

    def put(self) -> rpc_pb2.PutRequest:
        """A put, sometimes with preconditions (`ignore_*`) and with leases that do not exist."""
        request = rpc_pb2.PutRequest(key=self.key(), value=self.value(), prev_kv=self._often(30))
        if self._often(12):
            request.ignore_value = True
            if self._often(75):
                request.value = b""
        if self._often(12):
            request.ignore_lease = True
        if self._often(5):
            request.lease = self.random.choice(UNKNOWN_LEASES)
        return request

    def value(self) -> bytes:
        """A value: mostly one of a few, so that comparisons and sorts by value meet equals."""
        if self._often(2):
            return bytes([self.random.randrange(256)]) * self.random.randrange(6000)
        return self.random.choice(VALUES)

    def delete_range(self) -> rpc_pb2.DeleteRangeRequest:
        """A deletion, mostly of one key."""
        interval = self.interval() if self._often(40) else {"key": self.key()}
        return rpc_pb2.DeleteRangeRequest(**interval, prev_kv=self._often(30))

    def compact(self) -> rpc_pb2.CompactionRequest:
        """A compaction, mostly legal and leaving some history."""
        view = self.view
        legal = self.random.randint(view.compacted + 1, max(view.revision, view.compacted + 1))
        revision = legal if self._often(70) else self.revision()
        return rpc_pb2.CompactionRequest(revision=revision, physical=self._often(30))

    def oversized(self) -> Any:
        """A write over the request limit, or over the message limit."""
        limit = self.random.choice((REQUEST_MAX_BYTES, MESSAGE_MAX_BYTES))
        size = limit + self.random.choice((-4096, 256, 4096))
        put = rpc_pb2.PutRequest(key=b"big", value=b"x" * size)
        if self._often(70):
            return put
        return rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_put=put)])

    def range(self, sort_nonsense: bool = True) -> rpc_pb2.RangeRequest:
        """A range with any of its fields; `sort_nonsense` allows an order outside its enum."""
        request = rpc_pb2.RangeRequest(**self.interval())
        request.serializable = self._often(30)
        request.keys_only = self._often(15)
        request.count_only = self._often(10)
        if self._often(35):
            request.revision = self.revision()
        if self._often(35):
            request.limit = self.random.choice((1, 1, 2, 3, 5, 100, -1, INT64_MAX, INT64_MIN))
        if self._often(35):
            request.sort_order = self.random.randrange(3)
            request.sort_target = self.random.randrange(5)
        if sort_nonsense and self._often(0.7):
            # Not the target: any value outside its enum crashes etcd 3.5.1 (nil pointer in sort.Sort).
            request.sort_order = self.random.choice((-1, 7, 99))
        for name in REVISION_FILTERS:
            if self._often(6):
                setattr(request, name, self.revision())
        return request

    # --- transactions ---------------------------------------------------------------------------------------

    def txn(self) -> rpc_pb2.TxnRequest:
        """A transaction; nested ones up to three deep; rarely with as many operations as the limit or more."""
        if self._often(0.7):
            return self._crowded_txn()
        self.written.clear()
        if self._often(25):
            return self._read_txn()
        txn = self._txn(depth=0)
        _spare_oracle(txn)
        return txn

    def _txn(self, depth: int) -> rpc_pb2.TxnRequest:
        return rpc_pb2.TxnRequest(
            compare=[self.compare() for _ in range(self.random.choice((0, 0, 1, 1, 1, 2, 3)))],
            success=self._operations(depth),
            failure=self._operations(depth),
        )

    def _operations(self, depth: int) -> list[rpc_pb2.RequestOp]:
        return [self._operation(depth) for _ in range(self.random.choice((0, 1, 1, 1, 2, 2, 3, 4)))]

    def _operation(self, depth: int) -> rpc_pb2.RequestOp:
        if self._often(0.5):
            return rpc_pb2.RequestOp()
        (kind,) = self.random.choices(("put", "range", "delete", "txn"), (42, 28, 14, 16 if depth < 3 else 0))
        if kind == "put":
            put = self.put()
            self.written.append(put.key)
            return rpc_pb2.RequestOp(request_put=put)
        if kind == "range":
            return rpc_pb2.RequestOp(request_range=self._range_of_write_txn())
        if kind == "delete":
            return rpc_pb2.RequestOp(request_delete_range=self.delete_range())
        return rpc_pb2.RequestOp(request_txn=self._txn(depth + 1))

    def _range_of_write_txn(self) -> rpc_pb2.RangeRequest:
        # No nonsense in sorts here: newer servers refuse it and 3.5.1 does not, so the stores would part.
        request = self.range(sort_nonsense=False)
        if self._often(70):
            request.revision = 0
        return request

    def _read_txn(self) -> rpc_pb2.TxnRequest:
        def operations() -> list[rpc_pb2.RequestOp]:
            return [rpc_pb2.RequestOp(request_range=self.range()) for _ in range(self.random.randrange(4))]

        compares = [self.compare() for _ in range(self.random.randrange(3))]
        return rpc_pb2.TxnRequest(compare=compares, success=operations(), failure=operations())

    def _crowded_txn(self) -> rpc_pb2.TxnRequest:
        outer = self.random.choice((1, 100, TXN_OPS_MAX - 1, TXN_OPS_MAX, TXN_OPS_MAX + 1))
        operations = [rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=b"a")) for _ in range(outer)]
        if self._often(60):
            room = TXN_OPS_MAX - outer + self.random.randint(-1, 1)
            inner = rpc_pb2.TxnRequest()
            self._fill(inner, operations[:1] * max(0, room))
            operations[-1] = rpc_pb2.RequestOp(request_txn=inner)
        txn = rpc_pb2.TxnRequest()
        self._fill(txn, operations)
        return txn

    def _fill(self, txn: rpc_pb2.TxnRequest, operations: Sequence[rpc_pb2.RequestOp]) -> None:
        part = self.random.choice(("success", "failure", "compare"))
        if part == "compare":
            txn.compare.extend(self.compare() for _ in operations)
        else:
            getattr(txn, part).extend(operations)

    def _compared_key(self) -> bytes:
        # Nested compares must not see what the transaction wrote before them: ask for just that often.
        return self.random.choice(self.written) if self.written and self._often(60) else self.key(again=50)

    def compare(self) -> rpc_pb2.Compare:
        """A comparison of any target, result and interval; rarely without the operand of its target, or unknown."""
        target = self.random.randrange(5)
        request = rpc_pb2.Compare(result=self.random.randrange(4), target=target, key=self._compared_key())
        operand = target if self._often(95) else self.random.randrange(5)
        if operand == rpc_pb2.Compare.VALUE:
            request.value = self.value()
        elif operand == rpc_pb2.Compare.VERSION:
            request.version = self.random.choice((0, 0, 1, 2, 3, -1, INT64_MAX))
        elif operand == rpc_pb2.Compare.LEASE:
            request.lease = self.random.choice((0, 0, 1, -1))
        elif self._often(97):
            revision = 0 if self._often(20) else self.revision()
            setattr(request, "create_revision" if operand == rpc_pb2.Compare.CREATE else "mod_revision", revision)
        if self._often(25):
            request.range_end = self.range_end(request.key)
        if self._often(1):
            setattr(request, self.random.choice(("result", "target")), self.random.choice((-1, 9)))
        return request


def _spare_oracle(txn: rpc_pb2.TxnRequest) -> None:
    """Take preconditions off the puts of a txn that deletes up to the end of the key space.

    etcd overlooks that such a deletion meets the puts of its branch (it takes the end "\\0" literally), so the
    precondition holds when it is checked and fails when the put runs: etcd 3.5.1 panics.
    """
    operations = list(operations_of(txn))
    if any(operation.request_delete_range.range_end == b"\x00" for operation in operations):
        for operation in operations:
            if operation.HasField("request_put"):
                operation.request_put.ClearField("ignore_value")
                operation.request_put.ClearField("ignore_lease")


def operations_of(txn: rpc_pb2.TxnRequest) -> Iterator[rpc_pb2.RequestOp]:
    """Yield every operation of both branches, nested transactions included."""
    for operation in [*txn.success, *txn.failure]:
        yield operation
        if operation.HasField("request_txn"):
            yield from operations_of(operation.request_txn)


METHODS = {
    rpc_pb2.PutRequest: "Put",
    rpc_pb2.RangeRequest: "Range",
    rpc_pb2.DeleteRangeRequest: "DeleteRange",
    rpc_pb2.TxnRequest: "Txn",
    rpc_pb2.CompactionRequest: "Compact",
}
REVISION_FILTERS = ("min_mod_revision", "max_mod_revision", "min_create_revision", "max_create_revision")
REVISION_FIELDS = frozenset({*REVISION_FILTERS, "revision", "create_revision", "mod_revision"})


def prefix_end(key: bytes) -> bytes:
    """Return the end of the interval of all keys that begin with `key`."""
    stripped = key.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\x00"


def map_revisions(message: Any, mapped: Callable[[int], int]) -> None:
    """Replace every positive revision in `message` by what `mapped` gives for it.

    Nonsense (zero, negatives, the largest integers) stays what it is.
    """
    for descriptor, value in message.ListFields():
        if descriptor.name in REVISION_FIELDS and isinstance(value, int):
            if 0 < value < INT64_MAX // 2:
                setattr(message, descriptor.name, mapped(value))
        elif descriptor.message_type is not None:
            for part in value if hasattr(value, "append") else [value]:
                map_revisions(part, mapped)
