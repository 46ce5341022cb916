"""Prints the first seed that finds each planted bug: the numbers of ``FIRST_SEEDS`` in ``test_mutants.py``.

python -m tests.sim.mutants                   # all of them, some minutes
python -m tests.sim.mutants "vote given twice"
"""

from __future__ import annotations

import argparse

from tests.sim.mutants import MUTANTS, hunt

SEEDS_MAX = 1_000


def main() -> None:
    """Print a line for each planted bug."""
    parser = argparse.ArgumentParser(description="print the first seed that finds each planted bug")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of planted bugs; all of them without one")
    names = parser.parse_args().names
    if unknown := sorted(set(names) - set(MUTANTS)):
        parser.error(f"no planted bug is named {', '.join(unknown)}; there are {', '.join(sorted(MUTANTS))}")
    for name in names or sorted(MUTANTS):
        mutant = MUTANTS[name]
        with mutant.planted():
            report = hunt(range(1, SEEDS_MAX + 1), mutant.parameters)
        print(f"{name}: {report.seed if report is not None else 'not found'}", flush=True)


if __name__ == "__main__":
    main()
