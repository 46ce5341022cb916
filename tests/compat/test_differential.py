"""The differential test: the same seeded KV requests on etcd 3.5.1 and on raftkv, every answer compared.

Prints the counts; on a difference seed, step, request, both answers and a shrunk history (see `differential.py`,
which is also a command: `python -m tests.compat.differential --help`).
"""

from __future__ import annotations

import pytest

from tests.compat.differential import play
from tests.procs import ETCD_FAST, RAFTKV, Cluster

SEED = 20_261_121
STEPS_ON_THREE_MEMBERS = 15_000
STEPS_ON_ONE_MEMBER = 5_000


@pytest.mark.parametrize(
    ("members", "steps", "seed"), [(3, STEPS_ON_THREE_MEMBERS, SEED), (1, STEPS_ON_ONE_MEMBER, SEED + 1)]
)
def test_raftkv_answers_as_etcd_does(members: int, steps: int, seed: int) -> None:
    with Cluster(ETCD_FAST) as etcd, Cluster(RAFTKV, size=members) as raftkv:
        report = play(etcd.endpoints, raftkv.endpoints, seed, steps)
    print(report.describe())
    assert report.differences == [], report.describe()
    assert report.steps == steps
    assert report.codes["OK"] > steps // 2  # most requests are valid, so that the stores get deep
    assert len(report.codes) >= 10  # and every kind of refusal came up
