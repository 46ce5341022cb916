"""Hostile requests, floods and greedy clients against three real members, beside real etcd 3.5.1 in the same run.

    python -m bench.hostile [--rows sort-modify,flood-ping] [--scale 1.0] [--seconds 6]

The bars of a row: no turn of a member's loop above 50 ms of its own time (not counting waits for a processor that
others used), no change of leader, no error for the honest client, and the p99 of an honest put not above etcd's in the
same row. The exit code is 1 if raftkv misses a bar. Members, attacker and honest client share the machine's cores:
figures of one run can be compared, those of two machines cannot. Of several rounds, the one with the median p99 counts,
with the worst of the other figures that have bars.
"""

from __future__ import annotations

import asyncio

from bench.hostile.measure import Outcome, measure, misses, table, together
from bench.hostile.rows import ROWS, Row
from bench.report import finish, names_of, parser_of
from bench.stage import NAMES, allow_many_files, alternate, progress
from tests.procs import Program


def main() -> None:
    """Measure, print, and exit with 1 if a bar is missed."""
    parser = parser_of(__doc__, {row.name: row.what for row in ROWS}, rounds=1)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of keys, calls and connections")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long an attack that can be repeated lasts")
    parser.add_argument("--programs", type=names_of(NAMES), default=list(NAMES))
    options = parser.parse_args()
    allow_many_files()

    def run(row: Row) -> dict[str, Outcome]:
        def once(program: Program) -> Outcome:
            outcome = asyncio.run(measure(row, program, options.scale, options.seconds))
            for line in outcome.details:
                progress(f"{row.name} {program.name}: {line}")
            return outcome

        progress(f"{row.name}: {row.what}")
        seen = alternate(options.rounds, once, options.programs)
        return {name: together(found) for name, found in seen.items()}

    found = [run(row) for row in ROWS if row.name in options.rows]
    ours = [(each["raftkv"], each.get("etcd")) for each in found if "raftkv" in each]
    finish(table(found), [f"{raftkv.row}: {text}" for raftkv, etcd in ours for text in misses(raftkv, etcd)])


if __name__ == "__main__":
    main()
