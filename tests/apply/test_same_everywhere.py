"""The same entries give the same answers and history on every member, regardless of its disk and restarts."""

from __future__ import annotations

import random

import pytest

from raftkv import errors
from raftkv.apply.applier import Outcome
from raftkv.pb import rpc_pb2
from tests.apply.machine import CHECKS, Machine
from tests.compat.differential.generator import Generator, View, is_write_txn
from tests.compat.wire import Answer

STEPS = 400


def _is_entry(request: object) -> bool:
    """Whether a member would put the request into the log."""
    if isinstance(request, rpc_pb2.RangeRequest):
        return False
    if isinstance(request, rpc_pb2.TxnRequest) and not is_write_txn(request):
        return False
    try:
        CHECKS.get(type(request), lambda _: None)(request)
    except errors.StatusError:
        return False
    return True


def _answer(outcome: Outcome) -> Answer:
    """As the generator wants it: it only reads the revision."""
    if outcome.error is not None:
        return Answer("UNKNOWN", str(outcome.error), None)
    response = rpc_pb2.PutResponse(header=rpc_pb2.ResponseHeader(revision=outcome.revision))
    return Answer("OK", "", response)


def _told(outcome: Outcome) -> tuple[int, bytes, str]:
    return outcome.revision, outcome.body, repr(outcome.error)


@pytest.mark.parametrize("seed", range(6))
def test_same_everywhere(seed: int) -> None:
    rng = random.Random(seed)
    generator = Generator(seed=seed, view=View(base=1, revision=1))
    plain, other, unasked = Machine(), Machine(), Machine()
    applied = refused = 0
    for _ in range(STEPS):
        step = generator.next_step()
        if not _is_entry(step.request):
            continue
        outcome = plain.apply(step.request, parsed=True)
        assert _told(other.apply(step.request)) == _told(outcome), step
        unheard = unasked.apply(step.request, is_answered=False)
        assert (unheard.revision, repr(unheard.error)) == (outcome.revision, repr(outcome.error)), step
        generator.observe(step, _answer(outcome))
        applied += outcome.error is None
        refused += outcome.error is not None
        if rng.random() < 0.1:
            other.store.commit()
        if rng.random() < 0.2:
            other.store.compaction_step(rng.randint(1, 3))
        if rng.random() < 0.03:
            other = other.reopened()
    assert applied > STEPS // 5
    assert refused > 0
    assert plain.hash() == other.hash()
    for machine in (plain, other, unasked):
        machine.finish_compactions()
    assert plain.hash() == other.hash() == unasked.hash() == plain.reopened().hash()
    everything = rpc_pb2.RangeRequest(key=b"\0", range_end=b"\0")
    assert plain.store.range(everything.key, everything.range_end).kvs == other.store.range(b"\0", b"\0").kvs
