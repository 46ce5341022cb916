"""Converts between the vocabulary of histories (``ops.py``) and etcd's messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jepsen import special_wire
from jepsen.ops import (
    Compare,
    Delete,
    DeleteResult,
    KeyValue,
    Leader,
    Part,
    PartResult,
    Put,
    PutResult,
    Range,
    RangeResult,
    Relation,
    Request,
    Result,
    Special,
    Target,
    Txn,
    TxnResult,
)
from raftkv.pb import rpc_pb2

METHODS: dict[type[Any], tuple[str, type[Any]]] = {
    Put: ("/etcdserverpb.KV/Put", rpc_pb2.PutResponse),
    Range: ("/etcdserverpb.KV/Range", rpc_pb2.RangeResponse),
    Delete: ("/etcdserverpb.KV/DeleteRange", rpc_pb2.DeleteRangeResponse),
    Txn: ("/etcdserverpb.KV/Txn", rpc_pb2.TxnResponse),
    **special_wire.METHODS,
}
"""Path and response class of each kind of request."""

STREAMING = special_wire.STREAMING
"""Kinds of requests that are sent as one message on a stream."""

_RELATIONS: dict[Relation, str] = {"=": "EQUAL", ">": "GREATER", "<": "LESS", "!=": "NOT_EQUAL"}
_TARGETS: dict[Target, tuple[str, str]] = {
    "value": ("VALUE", "value"),
    "version": ("VERSION", "version"),
    "create": ("CREATE", "create_revision"),
    "mod": ("MOD", "mod_revision"),
}


def request_message(request: Request) -> Any:
    """Return the wire message of a request."""
    if isinstance(request, Special):
        return special_wire.message(request)
    if not isinstance(request, Txn):
        return _part_message(request)
    return rpc_pb2.TxnRequest(
        compare=[_compare(guard) for guard in request.compares],
        success=[_operation(part) for part in request.success],
        failure=[_operation(part) for part in request.failure],
    )


def result_of(request: Request, response: Any) -> Result:
    """Convert a response message to an answer.

    Arguments:
        request: the request.
        response: the response message.
    """
    if isinstance(request, Leader):
        return RangeResult(key_values([response.kv] if response.HasField("kv") else []))
    if isinstance(request, Special):
        return special_wire.result(request, response)
    if not isinstance(request, Txn):
        return _part_result(request, response)
    parts = request.success if response.succeeded else request.failure
    answers = [getattr(item, item.WhichOneof("response")) for item in response.responses]
    results = tuple(_part_result(part, answer) for part, answer in zip(parts, answers, strict=True))
    return TxnResult(response.succeeded, results)


def key_values(kvs: Iterable[Any]) -> tuple[KeyValue, ...]:
    """Convert keys of the wire to those of histories."""
    return tuple(
        KeyValue(kv.key.decode(), kv.value.decode(), kv.create_revision, kv.mod_revision, kv.version, kv.lease)
        for kv in kvs
    )


def _part_message(part: Part) -> Any:
    match part:
        case Put():
            return rpc_pb2.PutRequest(
                key=part.key.encode(), value=part.value.encode(), prev_kv=part.previous, lease=part.lease
            )
        case Range():
            return rpc_pb2.RangeRequest(
                key=part.key.encode(), range_end=part.end.encode(), revision=part.rev, serializable=part.serializable
            )
        case Delete():
            return rpc_pb2.DeleteRangeRequest(key=part.key.encode(), range_end=part.end.encode(), prev_kv=part.previous)


def _operation(part: Part) -> Any:
    message = _part_message(part)
    match part:
        case Put():
            return rpc_pb2.RequestOp(request_put=message)
        case Range():
            return rpc_pb2.RequestOp(request_range=message)
        case Delete():
            return rpc_pb2.RequestOp(request_delete_range=message)


def _compare(guard: Compare) -> Any:
    target, name = _TARGETS[guard.target]
    message = rpc_pb2.Compare(result=_RELATIONS[guard.relation], target=target, key=guard.key.encode())
    setattr(message, name, str(guard.operand).encode() if guard.target == "value" else guard.operand)
    return message


def _part_result(part: Part, response: Any) -> PartResult:
    match part:
        case Put():
            previous = key_values([response.prev_kv])[0] if response.HasField("prev_kv") else None
            return PutResult(previous)
        case Range():
            return RangeResult(key_values(response.kvs))
        case Delete():
            return DeleteResult(response.deleted, key_values(response.prev_kvs))
