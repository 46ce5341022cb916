"""Patroni and PostgreSQL 15 on three members of raftkv: begin, switch over, survive `kill -9`, come back.

How long each part takes on etcd, in the same minutes: `python -m tests.foreign.patroni_nodes` (docs/compatibility).
"""

from __future__ import annotations

import pytest

from tests import installed
from tests.foreign.patroni_nodes import run
from tests.procs import RAFTKV


@pytest.mark.long
def test_a_node_that_dies_is_replaced_and_comes_back_and_no_row_is_lost() -> None:
    """Rows are counted after each fault; a node that did not take over in time fails the wait for it."""
    installed.program("psql")
    assert len(run(RAFTKV)) == 4
