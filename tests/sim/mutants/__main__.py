"""Prints the first seed that finds each planted bug: the numbers of ``FIRST_SEEDS`` in ``test_mutants.py``.

python -m tests.sim.mutants                   # all of them, some minutes
python -m tests.sim.mutants "vote given twice"
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.sim.mutants import MUTANTS, hunt

SEEDS_MAX = 1_000


def main(names: Sequence[str]) -> None:
    """Print a line for each planted bug."""
    for name in names or sorted(MUTANTS):
        mutant = MUTANTS[name]
        with mutant.planted():
            report = hunt(range(1, SEEDS_MAX + 1), mutant.parameters)
        print(f"{name}: {report.seed if report is not None else 'not found'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
