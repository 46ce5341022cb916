"""The outcome of an entry that was refused: it keeps no frames, and raises its refusal once."""

from __future__ import annotations

import gc

import pytest

from raftkv import errors
from raftkv.apply.applier import Outcome

REFUSED = 100


def _refused() -> Outcome:
    outcome = Outcome(7)
    try:
        raise errors.LeaseNotFoundError
    except errors.StatusError as error:
        outcome = Outcome(7, error=error)  # this frame, which the error has passed, holds it
    return outcome


def test_refused_request_leaves_no_cycles() -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(REFUSED):
            assert _refused().error is not None
        gathered = gc.collect()
    finally:
        gc.enable()
    assert gathered < REFUSED


def test_a_refusal_is_raised_once() -> None:
    outcome = _refused()
    assert isinstance(outcome.error, errors.LeaseNotFoundError)
    with pytest.raises(errors.LeaseNotFoundError):
        outcome.check()
    outcome.check()
    Outcome(7).check()
