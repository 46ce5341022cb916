"""Rate limits applied equally by all members: set, replaced, removed, refused, kept over a restart."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv import errors
from raftkv.apply.limits import LIMITS_MAX
from raftkv.apply.wire import Kind, versioned
from raftkv.pb import admin_pb2
from raftkv.storage import schema
from tests.apply.machine import Machine


def apply(machine: Machine, limit: admin_pb2.Limit) -> None:
    """Apply an entry that sets or removes a limit; raises its refusal."""
    machine.applier.apply(Kind.LIMIT, versioned(Kind.LIMIT, limit.SerializeToString())).check()
    machine.store.set_applied(machine.store.applied_index + 1, 1)


@given(
    st.lists(
        st.builds(
            admin_pb2.Limit,
            kind=st.sampled_from(("user", "role", "prefix", "each", "certificate", "address", "no kind")),
            name=st.sampled_from((b"", b"a", b"b/", b"\xff/\x00", b"x" * 257)),
            requests_per_s=st.sampled_from((-1, 0, 0, 1, 10)),
            requests_burst=st.sampled_from((0, 0, 5)),
            watches_max=st.sampled_from((0, 0, 3)),
            weight=st.sampled_from((0, 0, 1, 10_000, 10_001)),
        )
    )
)
def test_limits_match_model_and_survive_restart(limits: list[admin_pb2.Limit]) -> None:
    machine = Machine()
    model: dict[tuple[str, bytes], admin_pb2.Limit] = {}
    for limit in limits:
        subject = limit.kind, limit.name
        try:
            apply(machine, limit)
        except errors.LimitNotFoundError:
            assert subject not in model
        except errors.InvalidLimitError:
            pass
        else:
            model.pop(subject, None)
            if limit.requests_per_s or limit.watches_max or limit.weight:
                model[subject] = limit
    assert machine.applier.limits.by_subject == model
    assert machine.reopened().applier.limits.messages() == [model[subject] for subject in sorted(model)]


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (admin_pb2.Limit(kind="users", name=b"a", requests_per_s=1), "a limit is of a user"),
        (admin_pb2.Limit(kind="user", requests_per_s=1), "a limit is of a user"),
        (admin_pb2.Limit(kind="each", name=b"a", requests_per_s=1), "a limit is of a user"),
        (admin_pb2.Limit(kind="user", name=b"a" * 257, requests_per_s=1), "a limit is of a user"),
        (admin_pb2.Limit(kind="user", name=b"a", bytes_per_s=-1), "0 (none) or more"),
        (admin_pb2.Limit(kind="user", name=b"a", requests_burst=9), "a burst needs a rate of at least one"),
        (admin_pb2.Limit(kind="user", name=b"a", bytes_burst=9), "a burst needs a rate of at least one"),
        (admin_pb2.Limit(kind="prefix", name=b"a", watches_max=9), "not prefix"),
        (admin_pb2.Limit(kind="user", name=b"a", weight=-1), "0 (none) or more"),
        (admin_pb2.Limit(kind="user", name=b"a", weight=10_001), "a weight is 1 to 10,000"),
        (admin_pb2.Limit(kind="role", name=b"a", weight=1), "of a user, certificate or address"),
        (admin_pb2.Limit(kind="each", weight=1), "of a user, certificate or address"),
    ],
)
def test_invalid_limit_is_refused_identically(limit: admin_pb2.Limit, text: str) -> None:
    machine = Machine()
    with pytest.raises(errors.InvalidLimitError) as caught:
        apply(machine, limit)
    assert text in str(caught.value)
    assert machine.applier.limits.by_subject == {}


def test_limit_stored_before_there_were_weights_is_read() -> None:
    machine = Machine()
    key = schema.CLUSTER_LIMIT_PREFIX + b"user/a"
    machine.store.meta_put(schema.CLUSTER, key, struct.pack(">QQQQQ", 10, 5, 0, 0, 3))
    machine.store.set_applied(1, 1)
    [limit] = machine.reopened().applier.limits.messages()
    assert limit == admin_pb2.Limit(kind="user", name=b"a", requests_per_s=10, requests_burst=5, watches_max=3)


def test_limits_are_limited() -> None:
    machine = Machine()
    for number in range(LIMITS_MAX):
        apply(machine, admin_pb2.Limit(kind="user", name=b"%d" % number, requests_per_s=1))
    with pytest.raises(errors.TooManyLimitsError):
        apply(machine, admin_pb2.Limit(kind="role", name=b"0", requests_per_s=1))
    apply(machine, admin_pb2.Limit(kind="user", name=b"0", requests_per_s=2))
    apply(machine, admin_pb2.Limit(kind="user", name=b"1"))
    apply(machine, admin_pb2.Limit(kind="role", name=b"0", requests_per_s=1))
