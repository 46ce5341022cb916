"""What the chaos of checkpoints shows and keeps: `bench/checkpoint/chaos_results.json`, and its table.

python -m bench.checkpoint.chaos.report          # writes docs/training/checkpoints-chaos.md again, from the results
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.checkpoint.chaos.compare import GOES_BACK, KEPT, NEW, OVERWRITTEN, RIGHT, WRONG, Row, rows_of
from bench.checkpoint.chaos.orders import ALL_POINTS, LOST_STATE, MIXED, PARTIAL, REFUSES, SCRATCH
from bench.checkpoint.chaos.trial import VICTIMS, Tally
from bench.compare import machine, write_table

RESULTS: Final = Path(__file__).resolve().parents[1] / "chaos_results.json"
SHORT: Final = {
    NEW: "ok",
    KEPT: "ok",
    PARTIAL: "does not load",
    MIXED: "mixture",
    LOST_STATE: "state lost",
    REFUSES: "refuses",
    SCRATCH: "scratch",
    GOES_BACK: "goes back",
    OVERWRITTEN: "overwritten",
    WRONG: "WRONG",
}
"""How the table says it; the page explains each."""
NAMES: Final = {"registry": "raftkv", "dcp": "raftkv + DCP", "dcp-async": "raftkv + DCP, asynchronous"}
"""By what saves."""


def line_of(tally: Tally) -> str:
    """Return a tally as a line of a terminal."""
    return (
        f"{tally.kill:24} {tally.kill_at:15} {tally.trials:4} trials, resumed from new step {tally.new_step:4}, "
        f"previous {tally.previous_step:4}, {tally.zombie_writes:5} zombie writes refused, "
        f"{tally.seconds / max(1, tally.trials):.2f} s a trial (max {tally.longest_s:.2f}), "
        f"{len(tally.problems)} problems"
    )


def table(rows: Sequence[Row]) -> str:
    """Return a row for each tool and victim, a column for each point, as markdown."""
    lines = [f"| tool | fault | {' | '.join(ALL_POINTS)} |", f"|---|---|{'---|' * len(ALL_POINTS)}"]
    for tool, kill in dict.fromkeys((row.tool, row.kill) for row in rows):
        found = {row.kill_at: row for row in rows if (row.tool, row.kill) == (tool, kill)}
        cells = [_cell(found.get(point)) for point in ALL_POINTS]
        lines.append(f"| {tool} | {kill} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.is_right:
        return "ok"
    names = Counter[str]()
    for verdict, count in row.found.items():
        names[SHORT[verdict]] += count
    return ", ".join(f"**{name}**" if name != "ok" else name for name, _ in sorted(names.items()))


def write(writer: str, tallies: Sequence[Tally], rows: Sequence[Row]) -> None:
    """Keep what was measured, in place of what was kept of it, and write the table."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    raftkv = {(each["writer"], each["kill"], each["kill_at"]): each for each in kept.get("raftkv", [])}
    raftkv.update({(writer, tally.kill, tally.kill_at): _rounded(writer, tally) for tally in tallies})
    others = [row.plain() for row in rows] or kept.get("others", [])
    results = {"machine": machine(), "raftkv": [raftkv[key] for key in sorted(raftkv, key=_place)], "others": others}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    publish(results)


def _place(key: tuple[str, str, str]) -> tuple[int, ...]:
    """Return where a cell stands among the others: the order of the options."""
    return tuple(names.index(name) for names, name in zip((tuple(NAMES), VICTIMS, ALL_POINTS), key, strict=True))


def _rounded(writer: str, tally: Tally) -> dict[str, Any]:
    times = {"seconds": round(tally.seconds, 1), "longest_s": round(tally.longest_s, 2)}
    return {"writer": writer, **asdict(tally), **times}


def publish(results: dict[str, Any]) -> None:
    """Write the table of the documentation."""
    tallies = [(each["writer"], _tally(each)) for each in results["raftkv"]]
    others = [Row(**{**each, "found": Counter(each["found"])}) for each in results["others"]]
    own = [row for writer, tally in tallies for row in rows_of(NAMES[writer], [tally])]
    write_table(f"{table([*own, *others])}\n\n{_about(results, others)}", "checkpoint-chaos")


def _tally(kept: dict[str, Any]) -> Tally:
    return Tally(**{name: value for name, value in kept.items() if name != "writer"})


def _about(results: dict[str, Any], others: Sequence[Row]) -> str:
    lines = [
        "| raftkv | fault | trials | resumed from the new step | from the one before | writes of zombies | "
        "problems | s a trial (max) |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    groups: dict[tuple[str, str], list[Tally]] = {}
    for each in results["raftkv"]:
        groups.setdefault((each["writer"], each["kill"]), []).append(_tally(each))
    for (writer, kill), tallies in groups.items():
        trials, seconds = sum(each.trials for each in tallies), sum(each.seconds for each in tallies)
        counts = [
            f"{trials:,}",
            *(f"{sum(getattr(each, name) for each in tallies):,}" for name in ("new_step", "previous_step")),
            f"{sum(each.zombie_writes for each in tallies):,}",
            str(sum(len(each.problems) for each in tallies)),
            f"{seconds / max(1, trials):.2f} ({max(each.longest_s for each in tallies):.1f})",
        ]
        lines.append(f"| {NAMES[writer]} | {kill} | {' | '.join(counts)} |")
    admitted = any("not refused" in problem for each in results["raftkv"] for problem in each["problems"])
    return "\n".join([*lines, "", " ".join(_facts(results, others, admitted=admitted))])


def _facts(results: dict[str, Any], others: Sequence[Row], *, admitted: bool) -> list[str]:
    compared = sum(row.found.total() for row in others)
    wrong = sum(count for row in others for verdict, count in row.found.items() if verdict not in RIGHT)
    machine = results["machine"]
    return [
        "Some writes of zombies were admitted." if admitted else "Every write of a zombie was refused.",
        f"The others: {compared:,} trials, {wrong:,} of them not ok.",
        f"Three members with fsync on {machine['cores']} cores that other work shared, {machine['date']}.",
    ]


if __name__ == "__main__":
    publish(json.loads(RESULTS.read_text(encoding="utf-8")))
