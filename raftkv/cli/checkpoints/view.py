"""How checkpoints look: cells of tables, lines, JSON. Pure, but for the printing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, Final

from raftkv.checkpoint.find import RunLatest
from raftkv.checkpoint.records import Checkpoint, Extremes
from raftkv.cli.output.table import Rows, clock, printable

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
LATEST_STYLE: Final = "bold green"


def size(size_bytes: float) -> str:
    """Format a number of bytes.

    >>> size(999), size(1536), size(5 << 40)
    ('999 B', '1.5 KiB', '5.0 TiB')
    """
    unit = 0
    while size_bytes >= 1024 and unit < len(_UNITS) - 1:
        size_bytes /= 1024
        unit += 1
    return f"{size_bytes:.1f} {_UNITS[unit]}" if unit else f"{size_bytes:.0f} B"


def span(seconds: float) -> str:
    """Format a duration.

    >>> span(0.25), span(75), span(7500)
    ('0.25 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Format as ``accuracy 0.5, loss 0.25``."""
    return ", ".join(f"{printable(name)} {value:.6g}" for name, value in sorted(metrics.items()))


def to_plain(value: Any) -> Any:
    """Convert to what JSON can hold: records to objects, numbers that JSON does not have to their names.

    >>> to_plain({"loss": math.nan, "steps": (1, 2)})
    {'loss': 'NaN', 'steps': [1, 2]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return to_plain(asdict(value))
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def print_json(value: Any) -> None:
    """Print one line of JSON, at once."""
    print(json.dumps(to_plain(value), allow_nan=False), flush=True)


def checkpoints_table(checkpoints: Sequence[Checkpoint], held: Mapping[tuple[str, int], Sequence[str]]) -> Rows:
    """Lay out the checkpoints of a run.

    Arguments:
        checkpoints: in the order of the rows.
        held: why one must stay, by kind and step.
    """
    newest: dict[str, int] = {}
    for one in checkpoints:
        newest[one.kind] = max(newest.get(one.kind, 0), one.step)
    rows, styles = [], []
    for one in checkpoints:
        is_latest = newest[one.kind] == one.step
        why = ", ".join([*(["latest"] if is_latest else []), *held.get((one.kind, one.step), ())])
        rows.append(
            (
                str(one.step), one.kind, str(one.generation), str(one.world_size), str(one.file_count),
                size(one.size_bytes), clock(one.time), span(one.duration_s), metrics_text(one.metrics), why,
            )
        )  # fmt: skip
        styles.append(LATEST_STYLE if is_latest else "")
    header = ("step", "kind", "generation", "ranks", "files", "size", "committed", "took", "metrics", "kept as")
    return Rows(header, rows, styles)


def runs_table(summaries: Sequence[RunLatest]) -> Rows:
    """Lay out all runs and kinds."""
    rows = [
        (
            one.run_id, one.kind, str(one.latest.step), clock(one.latest.time), str(one.latest.count),
            size(one.latest.size_bytes), _best_text(one.latest.best),
        )
        for one in summaries
    ]  # fmt: skip
    return Rows(("run", "kind", "latest", "committed", "checkpoints", "size", "metrics (from to)"), rows)


def _best_text(best: Mapping[str, Extremes]) -> str:
    return ", ".join(f"{name} {one.min_value:.6g} {one.max_value:.6g}" for name, one in sorted(best.items()))


def lineage_table(checkpoints: Sequence[Checkpoint]) -> Rows:
    """Lay out a checkpoint and those it descends from."""
    rows = [
        (one.run_id, str(one.step), one.kind, clock(one.time), size(one.size_bytes), metrics_text(one.metrics))
        for one in checkpoints
    ]
    return Rows(("run", "step", "kind", "committed", "size", "metrics"), rows, [LATEST_STYLE])


def best_table(checkpoints: Sequence[Checkpoint], metric: str) -> Rows:
    """Lay out the best checkpoints by a metric, the best first."""
    rows = [
        (f"{one.metrics[metric]:.6g}", one.run_id, str(one.step), one.kind, clock(one.time), one.uri)
        for one in checkpoints
    ]
    return Rows((metric, "run", "step", "kind", "committed", "uri"), rows, [LATEST_STYLE])


def details(checkpoint: Checkpoint, held: Sequence[str]) -> list[tuple[str, str]]:
    """Describe one checkpoint, a name and a value each."""
    one = checkpoint
    lines = [
        ("uri", printable(one.uri)),
        ("kind", one.kind),
        ("attempt", f"generation {one.generation}, number {one.number}"),
        ("saved by", f"{one.world_size} rank{'' if one.world_size == 1 else 's'}, {printable(one.holder)}"),
        ("files", f"{one.file_count}, {size(one.size_bytes)} ({one.size_bytes} bytes)"),
        ("committed", f"{clock(one.time)}, {span(one.duration_s)} after its beginning"),
        ("manifest", one.manifest),
        ("root", one.root),
    ]
    lines += [("descends from", printable(str(one.parent)))] if one.parent is not None else []
    lines += [("metric", f"{printable(name)} {value!r}") for name, value in sorted(one.metrics.items())]
    lines += [("metadata", printable(f"{name}={value}")) for name, value in sorted(one.metadata.items())]
    return [*lines, *(("kept as", printable(why)) for why in held)]


def commit_line(checkpoint: Checkpoint, revision: int) -> str:
    """Describe a commit in one line."""
    one = checkpoint
    told = [f"{one.file_count} files" if one.file_count != 1 else "1 file", size(one.size_bytes)]
    told += [metrics_text(one.metrics)] if one.metrics else []
    return (
        f"{clock(one.time)}  step {one.step} ({one.kind}): {', '.join(told)}; revision {revision}; {printable(one.uri)}"
    )
