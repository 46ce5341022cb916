"""When two answers to one request count as equal.

Everything counts: status code, status text, presence and value of every field. Except:
- cluster_id, member_id and raft_term of the outer header, which differ between clusters (`HeaderWatch` holds them
  to be constant or rising within one cluster);
- the order among kvs whose sort keys are equal, and which of them a limit keeps: etcd's sort is unstable;
- leases of keys without values, which etcd leaves out from 3.7 on;
- the entries of `ALLOWED`, each counted by name.

    difference(step, etcd_answer, raftkv_answer) -> None, or a text saying what differs
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from raftkv.pb import kv_pb2, rpc_pb2
from tests.compat.differential.generator import Step
from tests.compat.wire import Answer, Wire

SORT_FIELDS = {
    rpc_pb2.RangeRequest.VERSION: "version",
    rpc_pb2.RangeRequest.CREATE: "create_revision",
    rpc_pb2.RangeRequest.MOD: "mod_revision",
    rpc_pb2.RangeRequest.VALUE: "value",
}
INVALID_SORT = "etcdserver: invalid sort option"


# --- what is allowed to differ ------------------------------------------------------------------------------


def ranges_of(request: Any) -> Iterator[rpc_pb2.RangeRequest]:
    """Yield every RangeRequest of a request, nested transactions included."""
    if isinstance(request, rpc_pb2.RangeRequest):
        yield request
    elif isinstance(request, rpc_pb2.TxnRequest):
        for operation in [*request.success, *request.failure]:
            kind = operation.WhichOneof("request")
            if kind is not None:
                yield from ranges_of(getattr(operation, kind))


def _is_sort_nonsense(step: Step, oracle: Answer, ours: Answer) -> bool:
    """3.5.1 ignores sort values outside the enums; 3.6.14, and so raftkv, refuses them."""
    nonsense = any(
        request.sort_order not in (0, 1, 2) or request.sort_target not in (0, 1, 2, 3, 4)
        for request in ranges_of(step.request)
    )
    return nonsense and (ours.code, ours.text) == ("INVALID_ARGUMENT", INVALID_SORT)


ALLOWED: dict[str, Callable[[Step, Answer, Answer], bool]] = {"sort-outside-enum": _is_sort_nonsense}
"""The rows of the table of reference section 0 that KV requests can meet.

etcd's bug #18667 needs no row: a one-member oracle does not have it (see test_failing_range_in_txn.py).
"""


def allowed_difference(step: Step, oracle: Answer, ours: Answer) -> str | None:
    """Return the name of the `ALLOWED` entry that covers this difference."""
    return next((name for name, covers in ALLOWED.items() if covers(step, oracle, ours)), None)


# --- equality -----------------------------------------------------------------------------------------------


def difference(step: Step, oracle: Answer, ours: Answer) -> str | None:
    """Return what differs between two answers to `step`, or None."""
    if (oracle.code, oracle.text) != (ours.code, ours.text):
        return f"status: {oracle.code} {oracle.text!r} against {ours.code} {ours.text!r}"
    if oracle.message is None:
        return None
    expected, got = comparable(step.request, oracle.message), comparable(step.request, ours.message)
    if expected == got:
        return None
    return "fields: " + ", ".join(differing_fields(expected, got))


def comparable(request: Any, response: Any) -> Any:
    """Return a copy of `response` without what may differ (see the module's text)."""
    copy = type(response)()
    copy.CopyFrom(response)
    for name in ("cluster_id", "member_id", "raft_term"):
        copy.header.ClearField(name)
    _settle_ties(request, copy)
    return copy


def _settle_ties(request: Any, response: Any) -> None:
    if isinstance(request, rpc_pb2.RangeRequest):
        _settle_ties_of_range(request, response)
    elif isinstance(request, rpc_pb2.TxnRequest):
        branch = request.success if response.succeeded else request.failure
        for operation, result in zip(branch, response.responses, strict=False):
            kind = operation.WhichOneof("request")
            result_kind = result.WhichOneof("response")
            if kind is not None and result_kind == kind.replace("request", "response", 1):
                _settle_ties(getattr(operation, kind), getattr(result, result_kind))


def _settle_ties_of_range(request: rpc_pb2.RangeRequest, response: rpc_pb2.RangeResponse) -> None:
    if request.keys_only:
        for kv in response.kvs:  # from 3.7 on they have none
            kv.ClearField("lease")
    name = SORT_FIELDS.get(request.sort_target)
    if name is None or not response.kvs:
        return
    hidden = name == "value" and request.keys_only
    groups: list[list[kv_pb2.KeyValue]] = []
    for kv in response.kvs:
        if groups and (hidden or getattr(groups[-1][0], name) == getattr(kv, name)):
            groups[-1].append(kv)
        else:
            groups.append([kv])
    settled = [kv for group in groups for kv in sorted(group, key=lambda kv: kv.key)]
    if response.more and request.sort_order != rpc_pb2.RangeRequest.NONE:
        cut = len(groups[-1])
        settled[-cut:] = [_only_sort_key(kv, name) for kv in settled[-cut:]]
    del response.kvs[:]
    response.kvs.extend(settled)


def _only_sort_key(kv: kv_pb2.KeyValue, name: str) -> kv_pb2.KeyValue:
    return kv_pb2.KeyValue(**{name: getattr(kv, name)})


def differing_fields(expected: Any, got: Any, prefix: str = "") -> list[str]:
    """Return the paths of the fields in which two messages of one type differ."""
    paths: list[str] = []
    for descriptor in expected.DESCRIPTOR.fields:
        one, other = getattr(expected, descriptor.name), getattr(got, descriptor.name)
        path = f"{prefix}{descriptor.name}"
        if descriptor.message_type is None or hasattr(one, "append"):
            if one != other:
                paths.append(path if descriptor.message_type is None else _differing_item(one, other, path))
        elif expected.HasField(descriptor.name) != got.HasField(descriptor.name):
            paths.append(f"{path} (present: {expected.HasField(descriptor.name)})")
        elif one != other:
            paths.extend(differing_fields(one, other, f"{path}."))
    return paths


def _differing_item(one: Any, other: Any, path: str) -> str:
    if len(one) != len(other):
        return f"{path} ({len(one)} against {len(other)})"
    at = next(index for index in range(len(one)) if one[index] != other[index])
    return " ".join(differing_fields(one[at], other[at], f"{path}[{at}]."))


# --- header rules within one cluster ------------------------------------------------------------------------


@dataclass
class HeaderWatch:
    """Holds the outer headers of one cluster to the rules: ids constant, terms and revisions never backward."""

    cluster_id: int = 0
    member_ids: dict[int, int] = field(default_factory=dict)
    terms: dict[int, int] = field(default_factory=dict)

    def problem(self, member: int, answer: Answer) -> str | None:
        """Return which rule `answer` of the member with this number breaks, or None."""
        if answer.message is None:
            return None
        header = answer.message.header
        self.cluster_id = self.cluster_id or header.cluster_id
        known = self.member_ids.setdefault(member, header.member_id)
        term = self.terms.get(member, 0)
        self.terms[member] = header.raft_term
        if not header.cluster_id or header.cluster_id != self.cluster_id:
            return f"header.cluster_id {header.cluster_id} after {self.cluster_id}"
        if not header.member_id or header.member_id != known:
            return f"header.member_id {header.member_id} after {known}"
        if header.raft_term < max(term, 1):
            return f"header.raft_term {header.raft_term} after {term}"
        return None


# --- the command line ---------------------------------------------------------------------------------------


def command_line(play: Callable[[Wire, Wire, int, int], Any], name: str, count: int) -> int:
    """Compare the two clusters that the words of the command line name; returns 1 if there was a difference."""
    parser = argparse.ArgumentParser(description="Compare two etcd v3 clusters, answer by answer.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(f"--{name}", dest="count", type=int, default=count)
    parser.add_argument("--a", required=True, help="the oracle's members: host:port[,host:port…]")
    parser.add_argument("--b", required=True, help="the tested members: host:port[,host:port…]")
    given = parser.parse_args()
    with Wire(given.a.split(",")) as oracle, Wire(given.b.split(",")) as tested:
        report = play(oracle, tested, given.seed, given.count)
    print(report.describe())
    return 1 if report.differences else 0
