"""Short words for table tests: build KV requests, ask them, and write expected answers relative to a base.

    assert store.ask(put(b"a", b"1")) == store.put_answer(1)
    assert store.ask(get(b"a")) == store.range_answer(1, [store.kv(b"a", b"1", create=1)])
    assert store.refusal(get(b"")) == EMPTY_KEY

Revisions in expectations count from the emptied store (`store.base`): 1 is the first write of the test. Answers are
compared whole, as messages; of the outer header only the revision is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raftkv.pb import kv_pb2, rpc_pb2
from tests.compat.differential.generator import METHODS, Step
from tests.compat.wire import Answer, Wire

EVERYTHING = (b"\x00", b"\x00")

Refusal = tuple[str, str]
EMPTY_KEY: Refusal = ("INVALID_ARGUMENT", "etcdserver: key is not provided")
KEY_NOT_FOUND: Refusal = ("INVALID_ARGUMENT", "etcdserver: key not found")
VALUE_PROVIDED: Refusal = ("INVALID_ARGUMENT", "etcdserver: value is provided")
LEASE_PROVIDED: Refusal = ("INVALID_ARGUMENT", "etcdserver: lease is provided")
TOO_MANY_OPERATIONS: Refusal = ("INVALID_ARGUMENT", "etcdserver: too many operations in txn request")
DUPLICATE_KEY: Refusal = ("INVALID_ARGUMENT", "etcdserver: duplicate key given in txn request")
INVALID_SORT: Refusal = ("INVALID_ARGUMENT", "etcdserver: invalid sort option")
TOO_LARGE: Refusal = ("INVALID_ARGUMENT", "etcdserver: request is too large")
COMPACTED: Refusal = ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted")
FUTURE: Refusal = ("OUT_OF_RANGE", "etcdserver: mvcc: required revision is a future revision")
LEASE_NOT_FOUND: Refusal = ("NOT_FOUND", "etcdserver: requested lease not found")


# --- requests -----------------------------------------------------------------------------------------------


def put(key: bytes, value: bytes = b"", **fields: Any) -> rpc_pb2.PutRequest:
    """A PutRequest."""
    return rpc_pb2.PutRequest(key=key, value=value, **fields)


def get(key: bytes, range_end: bytes = b"", **fields: Any) -> rpc_pb2.RangeRequest:
    """A RangeRequest."""
    return rpc_pb2.RangeRequest(key=key, range_end=range_end, **fields)


def delete(key: bytes, range_end: bytes = b"", **fields: Any) -> rpc_pb2.DeleteRangeRequest:
    """A DeleteRangeRequest."""
    return rpc_pb2.DeleteRangeRequest(key=key, range_end=range_end, **fields)


def compact(revision: int, physical: bool = False) -> rpc_pb2.CompactionRequest:
    """A CompactionRequest."""
    return rpc_pb2.CompactionRequest(revision=revision, physical=physical)


def compare(target: str, result: str, key: bytes, operand: Any, range_end: bytes = b"") -> rpc_pb2.Compare:
    """A Compare, e.g. `compare("VERSION", "EQUAL", b"a", 1)`."""
    field = {"CREATE": "create_revision", "MOD": "mod_revision"}.get(target, target.lower())
    numbers = {
        "target": rpc_pb2.Compare.CompareTarget.Value(target),
        "result": rpc_pb2.Compare.CompareResult.Value(result),
    }
    return rpc_pb2.Compare(key=key, range_end=range_end, **numbers, **{field: operand})


def operation(request: Any) -> rpc_pb2.RequestOp:
    """Wrap a request as an operation of a transaction; None gives one without any request."""
    if request is None:
        return rpc_pb2.RequestOp()
    return rpc_pb2.RequestOp(**{REQUEST_FIELDS[type(request)]: request})


def txn(
    compares: Sequence[rpc_pb2.Compare] = (), then: Sequence[Any] = (), otherwise: Sequence[Any] = ()
) -> rpc_pb2.TxnRequest:
    """A TxnRequest: if all `compares` hold do `then`, if not do `otherwise`."""
    return rpc_pb2.TxnRequest(
        compare=compares,
        success=[operation(request) for request in then],
        failure=[operation(request) for request in otherwise],
    )


REQUEST_FIELDS = {
    rpc_pb2.PutRequest: "request_put",
    rpc_pb2.RangeRequest: "request_range",
    rpc_pb2.DeleteRangeRequest: "request_delete_range",
    rpc_pb2.TxnRequest: "request_txn",
}
RESPONSE_FIELDS = {
    rpc_pb2.PutResponse: "response_put",
    rpc_pb2.RangeResponse: "response_range",
    rpc_pb2.DeleteRangeResponse: "response_delete_range",
    rpc_pb2.TxnResponse: "response_txn",
}


# --- asking and expecting -----------------------------------------------------------------------------------


class Store:
    """One cluster's store, emptied and compacted when this object is made.

    Attributes:
        program: etcd, of either version, or raftkv.
        is_newer: whether it is the second oracle.
    """

    def __init__(self, wire: Wire, program: str) -> None:
        self.wire = wire
        self.program, _, version = program.partition("-")
        self.is_newer = version != ""
        self._member = 0
        self._last_writer = 0
        self._send(put(b"~"))
        self._send(delete(*EVERYTHING))
        self.base = self._send(get(b"~")).revision
        self._send(compact(self.base))

    def answer(self, request: Any) -> Answer:
        """Send to the members in turn and return the answer.

        What a member may answer from its own state goes to the one that acknowledged the last write: a transaction of
        compares alone too, since *all* of its ranges are serializable.
        """
        step = Step(f"etcdserverpb.KV/{METHODS[type(request)]}", request)
        self._member = (self._member + 1) % len(self.wire.endpoints)
        member = self._last_writer if step.is_serializable else self._member
        answer = self.wire.call(step.method, request, member)
        if step.is_write and answer.code == "OK":
            self._last_writer = member
        return answer

    def _send(self, request: Any) -> Answer:
        answer = self.answer(request)
        assert answer.code == "OK", answer
        return answer

    def ask(self, request: Any) -> Any:
        """Send a request that must succeed; return the response, of the outer header only the revision."""
        response = self._send(request).message
        response.header.CopyFrom(rpc_pb2.ResponseHeader(revision=response.header.revision))
        return response

    def refusal(self, request: Any) -> Refusal:
        """Send a request that must fail; return its code and text."""
        answer = self.answer(request)
        assert answer.code != "OK", answer
        return answer.code, answer.text

    def fill(self, *keys: bytes) -> None:
        """Put each key, one revision each, with its own name as the value."""
        for key in keys:
            self._send(put(key, key))

    def keys(self, request: rpc_pb2.RangeRequest) -> list[bytes]:
        """Return the keys that a range gives."""
        return [kv.key for kv in self._send(request).message.kvs]

    # --- expected messages, revisions relative to the base ---------------------------------------------------

    def at(self, revision: int) -> int:
        """Return the store's revision for a relative one."""
        return self.base + revision

    def header(self, revision: int) -> rpc_pb2.ResponseHeader:
        """A header with only a revision."""
        return rpc_pb2.ResponseHeader(revision=self.at(revision))

    def kv(
        self, key: bytes, value: bytes = b"", create: int = 1, mod: int | None = None, version: int = 1
    ) -> kv_pb2.KeyValue:
        """A stored key; without `mod` it was written once."""
        modified = self.at(create if mod is None else mod)
        return kv_pb2.KeyValue(
            key=key, value=value, create_revision=self.at(create), mod_revision=modified, version=version
        )

    def put_answer(self, revision: int, prev_kv: kv_pb2.KeyValue | None = None) -> rpc_pb2.PutResponse:
        """The answer to a put."""
        return rpc_pb2.PutResponse(header=self.header(revision), prev_kv=prev_kv)

    def range_answer(
        self, revision: int, kvs: Sequence[kv_pb2.KeyValue] = (), count: int | None = None, more: bool = False
    ) -> rpc_pb2.RangeResponse:
        """The answer to a range; `count` is that of the kvs if not given."""
        total = len(kvs) if count is None else count
        return rpc_pb2.RangeResponse(header=self.header(revision), kvs=kvs, count=total, more=more)

    def delete_answer(
        self, revision: int, deleted: int, prev_kvs: Sequence[kv_pb2.KeyValue] = ()
    ) -> rpc_pb2.DeleteRangeResponse:
        """The answer to a deletion."""
        return rpc_pb2.DeleteRangeResponse(header=self.header(revision), deleted=deleted, prev_kvs=prev_kvs)

    def txn_answer(self, revision: int | None, succeeded: bool, responses: Sequence[Any] = ()) -> rpc_pb2.TxnResponse:
        """The answer to a transaction; a nested one has an empty header (revision None)."""
        header = rpc_pb2.ResponseHeader() if revision is None else self.header(revision)
        results = [rpc_pb2.ResponseOp(**{RESPONSE_FIELDS[type(part)]: part}) for part in responses]
        return rpc_pb2.TxnResponse(header=header, succeeded=succeeded, responses=results)
