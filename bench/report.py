"""What benches print and keep: medians, tables in Markdown, pages of the documentation, plots."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from raftkv.native import is_compiled
from tests.procs import ROOT

PERFORMANCE = ROOT / "docs" / "reference" / "performance.md"
TABLES = {
    "bench": PERFORMANCE,
    "checkpoint-chaos": ROOT / "docs" / "training" / "checkpoints-chaos.md",
    "kubernetes": ROOT / "docs" / "reference" / "kubernetes.md",
    "neutral": PERFORMANCE,
    "neutral-compiled": PERFORMANCE,
    "operate": PERFORMANCE,
    "registry": ROOT / "docs" / "training" / "checkpoints.md",
    "restart": ROOT / "docs" / "training" / "index.md",
}
"""Where the table of each benchmark stands, between markers of its name."""

Figures = Mapping[str, float]


def machine() -> dict[str, Any]:
    """Say what the figures were measured on."""
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "hot_path": "compiled" if is_compiled() else "interpreted",
        "date": date.today().isoformat(),
        "load": round(os.getloadavg()[0], 1),
    }


# ---- figures


def medians(seen: Sequence[Figures]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: statistics.median(one[name] for one in seen) for name in seen[0]}


def latencies_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50, p99 and the longest of some times, in milliseconds; zeros if there are none."""
    times = list(seconds) or [0.0]
    cuts = statistics.quantiles(times * 2 if len(times) == 1 else times, n=100, method="inclusive")
    return {"p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3, "max_ms": max(times) * 1e3}


# ---- tables


def markdown(headings: Sequence[str], rows: Iterable[Sequence[object]], texts: int = 1) -> str:
    """Return a table; its first columns hold texts, the others numbers, to the right."""
    lines = [headings, ["---"] * texts + ["---:"] * (len(headings) - texts), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def beside(rows: Mapping[str, Mapping[str, Figures]], shown: Callable[[str], tuple[str, str]]) -> str:
    """Return the table of figures of raftkv beside etcd's.

    Arguments:
        rows: figures by row and program.
        shown: title of a figure and the format of its value.
    """
    lines = []
    for row, programs in rows.items():
        etcd = programs.get("etcd", {})
        for name, value in programs.get("raftkv", etcd).items():
            title, form = shown(name)
            other = etcd.get(name)
            cells = ("-" if each is None else format(each, form) for each in (other, value))
            lines.append((row, title, *cells, f"{value / other:.2f}" if other else ""))
    return markdown(("row", "figure", "etcd 3.5.1", "raftkv", "raftkv / etcd"), lines, texts=2)


def write_table(text: str, name: str) -> None:
    """Put a table between the markers of its name."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    page = TABLES[name]
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} lacks the markers {begin} and {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def keep(path: Path, results: object) -> None:
    """Write results as JSON."""
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


# ---- arguments


def parser_of(module_doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the text of the bench."""
    return argparse.ArgumentParser(description=module_doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def parser_of_rows(module_doc: str | None, rows: Sequence[Any]) -> argparse.ArgumentParser:
    """Return a parser that takes names of rows, each of which has ``name`` and ``what``."""
    parser = parser_of(module_doc)
    parser.epilog = "\n".join(["rows:", *(f"  {row.name:20} {row.what}" for row in rows)])
    parser.add_argument("--row", action="append", default=[], choices=[row.name for row in rows], metavar="NAME")
    return parser


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return what reads names that are separated by commas, for an argument."""
    names = list(known)

    def split(text: str) -> list[str]:
        wanted = text.split(",")
        if unknown := [name for name in wanted if name not in names]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(names)}")
        return wanted

    return split


# ---- plots

INK, MUTED, GRID = "#1f2933", "#52606d", "#e4e7eb"
STYLE = {
    "font.size": 9, "text.color": INK, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": INK,
    "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 14,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.edgecolor": "#cbd2d9",
    "axes.grid": True, "axes.grid.axis": "x", "axes.axisbelow": True, "grid.color": GRID, "ytick.major.size": 0,
    "legend.frameon": False, "figure.constrained_layout.use": True, "savefig.dpi": 130,
    "svg.fonttype": "none", "svg.hashsalt": "raftkv",
}  # fmt: skip
"""How all plots of bars look."""


@contextmanager
def drawing(path: Path, title: str, height: float) -> Iterator[Any]:
    """Write what the block draws on the axes to a file, in the common style."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise SystemExit("bench: the plot needs matplotlib: pip install matplotlib") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    with mpl.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(8, height))
        axes.set_title(title)
        yield axes
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)
