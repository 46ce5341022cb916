"""The output of benches: medians, Markdown tables, pages of the documentation, plots."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

from raftkv.native import is_compiled
from tests.procs import ROOT

PERFORMANCE = ROOT / "docs" / "reference" / "performance.md"
TABLES = {
    "bench": PERFORMANCE,
    "kubernetes": ROOT / "docs" / "reference" / "kubernetes.md",
    "neutral": PERFORMANCE,
    "neutral-compiled": PERFORMANCE,
    "operate": PERFORMANCE,
    "registry": PERFORMANCE,
    "restart": ROOT / "docs" / "training" / "index.md",
    "tenants": PERFORMANCE,
}
"""The page with the table of each benchmark, which is between markers with the benchmark's name."""

Figures = Mapping[str, float]


def machine() -> dict[str, Any]:
    """Return a description of the machine."""
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
    """Return p50, p99 and the maximum of some times, in milliseconds; zeros if there are none."""
    times = list(seconds) or [0.0]
    cuts = statistics.quantiles(times * 2 if len(times) == 1 else times, n=100, method="inclusive")
    return {"p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3, "max_ms": max(times) * 1e3}


# ---- tables


def markdown(headings: Sequence[str], rows: Iterable[Sequence[object]], texts: int = 1) -> str:
    """Return a Markdown table; the first columns are texts, the others right-aligned numbers."""
    lines = [headings, ["---"] * texts + ["---:"] * (len(headings) - texts), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


Rows = Mapping[str, Mapping[str, Figures]]
"""Figures by row and program."""
Bars = Mapping[str, Sequence[str]]
"""By row, the figures in which raftkv must not exceed etcd."""


def _pairs(rows: Rows) -> Iterator[tuple[str, str, float | None, float | None]]:
    """Yield the row, the name of the figure, etcd's value, and raftkv's."""
    for row, programs in rows.items():
        etcd, raftkv = (programs.get(program, {}) for program in ("etcd", "raftkv"))
        yield from ((row, name, etcd.get(name), raftkv.get(name)) for name in raftkv or etcd)


def beside(rows: Rows, titles: Mapping[str, tuple[str, str]], bars: Bars | None = None) -> str:
    """Return the table of raftkv's figures beside etcd's; ratios with a bar are bold.

    Arguments:
        rows: the figures.
        titles: titles of figures, and the formats of their values; a figure without a title keeps its name.
        bars: see ``Bars``.
    """
    lines = []
    for row, name, etcd, raftkv in _pairs(rows):
        title, form = titles.get(name, (name, ",.4g"))
        ratio = f"{raftkv / etcd:.2f}" if etcd and raftkv is not None else ""
        cells = ("-" if each is None else format(each, form) for each in (etcd, raftkv))
        lines.append((row, title, *cells, f"**{ratio}**" if ratio and name in (bars or {}).get(row, ()) else ratio))
    return markdown(("row", "figure", "etcd 3.5.1", "raftkv", "raftkv / etcd"), lines, texts=2)


def missed(rows: Rows, bars: Bars) -> list[str]:
    """Return the bars that raftkv misses."""
    return [
        f"{row}: {name}: {raftkv / etcd:.2f} times etcd's"
        for row, name, etcd, raftkv in _pairs(rows)
        if name in bars.get(row, ()) and etcd and raftkv is not None and raftkv > etcd
    ]


def write_table(text: str, name: str) -> None:
    """Write a table between the markers with its name."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    page = TABLES[name]
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} lacks the markers {begin} and {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def finish(text: str, problems: Sequence[str] = (), table: str = "") -> NoReturn:
    """Print the result and the problems, write the table with this name, and exit: with 1 if there are problems."""
    print(text)
    if table:
        write_table(text, table)
    for problem in problems:
        print(f"wrong: {problem}", file=sys.stderr)
    sys.exit(int(bool(problems)))


def keep(path: Path, results: object) -> None:
    """Write results as JSON."""
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


# ---- arguments


def parser_of(
    module_doc: str | None, rows: Sequence[str] | Mapping[str, str] = (), *, rounds: int = 0, writes: str = ""
) -> argparse.ArgumentParser:
    """Return a parser whose help is the bench's docstring.

    Arguments:
        module_doc: docstring of the bench.
        rows: names for ``--rows``, with descriptions if known; the default is all.
        rounds: default of ``--rounds``; 0: no such flag.
        writes: description of what ``--write`` writes; empty: no such flag.
    """
    parser = argparse.ArgumentParser(description=module_doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if isinstance(rows, Mapping):
        parser.epilog = "\n".join(["rows:", *(f"  {name:24} {what}" for name, what in rows.items())])
    if rows:
        parser.add_argument("--rows", type=names_of(rows), default=list(rows), help="comma-separated; default: all")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help="medians of them count")
    if writes:
        parser.add_argument("--write", action="store_true", help=f"keep {writes}")
    return parser


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return an argument type for comma-separated names."""
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
"""The common style of all bar plots."""


def plot_bars(
    path: Path, title: str, what: str, bars: Sequence[tuple[str, float | None, str, str]], start: float = 0.0
) -> None:
    """Draw bars that start at a line: name, end (None: no bar), text beside the bar, colour."""
    with drawing(path, title, 0.32 * len(bars) + 1.3) as (axes,):
        for place, (_, value, text, colour) in enumerate(bars):
            end = start if value is None else value
            axes.barh(place, end - start, left=start, color=colour, height=0.66)
            side, shift = ("left", 4) if end >= start else ("right", -4)
            axes.annotate(text, (end, place), (shift, 0), textcoords="offset points", ha=side, va="center", color=INK)
        axes.set_yticks(range(len(bars)), [name for name, *_ in bars])
        axes.invert_yaxis()
        axes.axvline(start, color=MUTED, linewidth=1)
        axes.margins(x=0.12)
        axes.set_xlabel(what)


@contextmanager
def drawing(path: Path, title: str, height: float, panels: int = 1) -> Iterator[Any]:
    """Yield axes, one for each panel, in the common style; write the drawing to a file at the end of the block."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise SystemExit("bench: the plot needs matplotlib: pip install matplotlib") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    with mpl.rc_context(STYLE):
        figure, axes = pyplot.subplots(panels, figsize=(8, height), sharex=True, squeeze=False)
        axes[0, 0].set_title(title)
        yield axes[:, 0]
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)
