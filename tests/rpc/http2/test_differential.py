"""A short run of the differential (``differential``), and connections that once differed."""

from __future__ import annotations

import pytest

from tests.rpc.http2.differential import Differential

FRAMES = 4000
LONG_FRAMES = 60_000


def _run(is_server: bool, frames: int, seed: int) -> None:
    differential = Differential(is_server)
    while differential.frames < frames:
        differential.run(seed)
        seed += 1
    assert not differential.found
    assert differential.asked < frames / 1000, "h2 has to be asked too often: the reasons do not hold any more"


@pytest.mark.parametrize("is_server", [True, False], ids=["server", "client"])
def test_other_engines_make_the_same_of_the_same_frames(is_server: bool) -> None:
    _run(is_server, FRAMES, 1)


@pytest.mark.parametrize("seed", [23_667, 46_647, 2_059_952, 2_073_521, 2_089_056])
def test_a_connection_that_once_differed(seed: int) -> None:
    """Three have trailers, which no handler is given, one a setting of RFC 9218, the last a blank in a path."""
    _run(is_server=True, frames=1, seed=seed)


@pytest.mark.long
@pytest.mark.parametrize("is_server", [True, False], ids=["server", "client"])
def test_other_engines_make_the_same_of_many_frames(is_server: bool) -> None:
    _run(is_server, LONG_FRAMES, 1_000_000)
