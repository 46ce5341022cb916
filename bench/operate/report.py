"""Medians of the rounds, what misses its bar, and the table."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.operate.rows import Row
from bench.report import markdown, medians


@dataclass
class Result:
    """One row with both programs.

    Attributes:
        figures: by program and name; the median of the rounds.
        problems: why a program has none.
    """

    row: str
    what: str
    bars: tuple[str, ...]
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Row, rounds: dict[str, list[dict[str, float]]], problems: dict[str, str]) -> Result:
        """Take the medians."""
        result = cls(row.name, row.what, row.bars, problems=problems)
        for program, seen in rounds.items():
            if seen:
                result.figures[program] = {name: round(value, 2) for name, value in medians(seen).items()}
        return result

    def ratio(self, name: str) -> float | None:
        """raftkv's figure as a multiple of etcd's; None if one of them is missing."""
        raftkv, etcd = (self.figures.get(program, {}).get(name) for program in ("raftkv", "etcd"))
        return round(raftkv / etcd, 2) if raftkv is not None and etcd else None

    @property
    def misses(self) -> list[str]:
        """The bars that raftkv misses."""
        found = [f"{program}: {problem}" for program, problem in self.problems.items()]
        for name in self.bars:
            ratio = self.ratio(name)
            if ratio is not None and ratio > 1:
                found.append(f"{name}: {ratio:.2f} times etcd's")
        return found


def table(results: list[Result], facts: str) -> str:
    """The results as Markdown; figures that have a bar have their ratio in bold."""
    lines = []
    for result in results:
        for name in result.figures.get("raftkv", result.figures.get("etcd", {})):
            ratio = result.ratio(name)
            shown = "" if ratio is None else f"**{ratio:.2f}**" if name in result.bars else f"{ratio:.2f}"
            figures = (result.figures.get(program, {}).get(name) for program in ("etcd", "raftkv"))
            cells = ("-" if figure is None else f"{figure:,g}" for figure in figures)
            lines.append((result.row, name, *cells, shown))
        lines += [(result.row, f"{program}: {problem}", "", "", "") for program, problem in result.problems.items()]
    return f"{markdown(('row', 'figure', 'etcd 3.5.1', 'raftkv', 'raftkv / etcd'), lines, texts=2)}\n\n{facts}"
