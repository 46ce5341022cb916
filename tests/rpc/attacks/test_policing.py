"""Token buckets and ping strikes, by the numbers of grpc-go."""

from __future__ import annotations

from raftkv.rpc.limits import (
    RESETS_FREE_MAX,
    UPDATE_BYTES,
    UPDATES_PER_CALL,
    ResetAllowance,
    TokenBucket,
    UpdateAllowance,
)


def test_bucket_gives_its_burst_then_its_rate() -> None:
    bucket = TokenBucket(3, 2)
    assert [bucket.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert [bucket.take(11.0) for _ in range(3)] == [True, True, False]


def test_updates_are_earned_by_bytes_and_by_calls_once_each() -> None:
    updates = UpdateAllowance(1)

    def taken(sent_bytes: int, last_stream_id: int) -> int:
        return next(count for count in range(1_000) if not updates.take(sent_bytes, last_stream_id))

    assert taken(0, 0) == 1
    assert taken(10 * UPDATE_BYTES, 0) == 10
    assert taken(10 * UPDATE_BYTES, 41) == 20 * UPDATES_PER_CALL
    assert taken(10 * UPDATE_BYTES, 41) == taken(10 * UPDATE_BYTES, 0) == 0
    assert taken(11 * UPDATE_BYTES, 43) == 1 + UPDATES_PER_CALL


def reset(allowance: ResetAllowance, ids: range, now: float) -> int:
    return sum(allowance.take(one, now) for one in ids)


def begin(allowance: ResetAllowance, ids: range, now: float) -> None:
    for one in ids:
        allowance.begun(one, now)


def test_calls_that_have_aged_may_all_be_reset_and_young_ones_as_the_bucket_allows() -> None:
    allowance = ResetAllowance(10, 0, free_after_s=1.0)
    begin(allowance, range(1, 2001, 2), now=5.0)
    begin(allowance, range(2001, 4001, 2), now=5.5)
    assert reset(allowance, range(2001, 4001, 2), now=6.0) == 10
    assert reset(allowance, range(1, 2001, 2), now=6.0) == 1000
    assert reset(allowance, range(2021, 4001, 2), now=6.5) == 990


def test_calls_that_never_stop_coming_age_as_others() -> None:
    allowance = ResetAllowance(0, 0, free_after_s=1.0)
    for tick in range(1000):
        allowance.begun(2 * tick + 1, tick / 100)
    assert reset(allowance, range(1, 1600, 2), now=10.0) == 800


def test_a_call_pays_for_one_reset() -> None:
    allowance = ResetAllowance(3, 0, free_after_s=1.0)
    begin(allowance, range(1, 11, 2), now=0.0)
    assert [allowance.take(1, 9.0) for _ in range(9)] == [True] * (5 + 3) + [False]


def test_a_long_life_does_not_pay_for_a_flood() -> None:
    allowance = ResetAllowance(0, 0, free_after_s=1.0)
    for tick in range(100):
        allowance.begun(1000 * tick + 1, float(tick))
    assert reset(allowance, range(1, 99_000, 2), now=101.0) == RESETS_FREE_MAX
