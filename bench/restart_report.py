"""What the restart benchmark shows and keeps: tables, results, and `docs/training/restart.png`.

python -m bench.restart_report          # writes docs/training/index.md and draws the plot again, from the results
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.report import INK, drawing, keep, write_table
from bench.report import markdown as table_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "restart_results.json"
PLOT = ROOT / "docs" / "training" / "restart.png"
COLOURS = {"raftkv": "#2a6f97", "etcd": "#61a5c2", "c10d": "#bc4749", "c10d-tuned": "#e9a178"}


@dataclass(frozen=True)
class Line:
    """One fault with one backend.

    Attributes:
        fault, backend: names.
        median_s, max_s: from the fault to the first allreduce of the next world; None: never.
        rounds_per_fault: None: not known with this rendezvous.
        respawn_s: median until the next workers were started.
        trials: that ended.
        verdict: why there were no more.
        bar_s: median that raftkv aims at.
    """

    fault: str
    backend: str
    median_s: float | None
    max_s: float | None
    rounds_per_fault: float | None
    respawn_s: float | None
    trials: int
    verdict: str = ""
    bar_s: float = 0.0


def show(lines: list[Line]) -> None:
    """Print a table."""
    own = {line.fault: line.median_s for line in lines if line.backend == "raftkv"}
    rows = []
    for line in lines:
        base = own.get(line.fault) if line.backend != "raftkv" else None
        times = f"{line.median_s / base:.1f}x" if base and line.median_s is not None else ""
        seconds = (_seconds(line.median_s, line.verdict), _seconds(line.max_s, ""), _seconds(line.respawn_s, ""))
        rounds = "" if line.rounds_per_fault is None else f"{line.rounds_per_fault:g}"
        rows.append((line.fault, line.backend, *seconds, line.trials, rounds, times))
    headings = ("fault", "rendezvous", "median s", "max s", "respawn s", "trials", "rounds", "beside raftkv")
    print(table_of(headings, rows, texts=2))


def _seconds(value: float | None, verdict: str) -> str:
    return verdict if value is None else f"{value:.2f}"


def write(lines: list[Line], machine: dict[str, Any]) -> None:
    """Keep the results, and draw them."""
    import torch

    about = {**machine, "torch": torch.__version__}
    kept = {"machine": about, "lines": [asdict(line) for line in _merged(lines)]}
    keep(RESULTS, kept)
    publish(kept)


def _merged(lines: list[Line]) -> list[Line]:
    """What was kept, with what was measured now in its place; the faults and backends in the order of the first run."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))["lines"] if RESULTS.exists() else []
    merged = {(line.fault, line.backend): line for line in (Line(**one) for one in kept)}
    merged.update({(line.fault, line.backend): line for line in lines})
    return list(merged.values())


def publish(kept: dict[str, Any]) -> None:
    """Write the table of docs/training/index.md and draw the plot."""
    lines = [Line(**line) for line in kept["lines"]]
    write_table(f"{markdown(lines)}\n\n{_about(kept)}", "restart")
    plot(lines)


def markdown(lines: list[Line]) -> str:
    """A row for each fault, a column for each rendezvous."""
    backends = list(dict.fromkeys(line.backend for line in lines))
    rows = []
    for fault in dict.fromkeys(line.fault for line in lines):
        found = {line.backend: line for line in lines if line.fault == fault}
        cells = [_cell(found.get(backend)) for backend in backends]
        own = found.get("raftkv")
        rounds = "" if own is None or own.rounds_per_fault is None else f"{own.rounds_per_fault:g}"
        rows.append((fault, *cells, rounds))
    return table_of(("fault", *backends, "new generations of raftkv"), rows)


def _cell(line: Line | None) -> str:
    if line is None:
        return "-"
    if line.median_s is None:
        return line.verdict or "never"
    text = f"{line.median_s:.2f} s (max {line.max_s:.2f})"
    return f"**{text}**" if line.backend == "raftkv" else text


def _about(kept: dict[str, Any]) -> str:
    trials = max(Line(**line).trials for line in kept["lines"])
    machine = kept["machine"]
    return (
        f"Seconds from the fault to the first allreduce of the next world: median (and longest) of up to {trials} "
        f"trials. Three members, three agents with a worker each, on {machine['cores']} shared cores, fsync on, gloo, "
        f"torch {machine['torch']}, lease_ttl=1, {machine['date']}."
    )


def plot(lines: list[Line]) -> None:
    """Bars of seconds; a job that did not come back has no bar, but a cross and the reason."""
    faults = list(dict.fromkeys(line.fault for line in lines))
    backends = list(dict.fromkeys(line.backend for line in lines))
    by_fault = {fault: [line for name in backends for line in lines if (line.fault, line.backend) == (fault, name)]
                for fault in faults}  # fmt: skip
    place, ticks = 0.0, []
    with drawing(PLOT, "From a fault to training again", 0.27 * len(lines) + 0.16 * len(faults) + 1.5) as axes:
        for found in by_fault.values():
            ticks.append(place + (len(found) - 1) / 2)
            for line in found:
                colour = COLOURS.get(line.backend)
                axes.barh(place, line.median_s or 0.0, 0.82, color=colour)
                if line.median_s is None:
                    axes.plot(0.06, place, "x", color=colour, markersize=5, markeredgewidth=1.6, clip_on=False)
                text = _seconds(line.median_s, line.verdict)
                axes.annotate(text, (line.median_s or 0.06, place), (7, 0), textcoords="offset points", va="center",
                              fontsize=8, color=INK)  # fmt: skip
                place += 1
            place += 0.6
        axes.set_yticks(ticks, faults)
        axes.invert_yaxis()
        axes.set_xlim(0, max(line.median_s or 0.0 for line in lines) * 1.12)
        axes.set_xlabel("seconds from the fault to the first allreduce of the next world (median; x: it never came)")
        for backend in backends:
            axes.barh(0, 0, color=COLOURS.get(backend), label=backend)
        axes.legend(loc="lower right", fontsize=8)


if __name__ == "__main__":
    publish(json.loads(RESULTS.read_text(encoding="utf-8")))
