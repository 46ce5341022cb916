"""The picture: a bar for each stage on a line of time, one result under the other; and the same as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.latency.stages import STAGES

COLOURS = {"between processes": "#b0b7bf", "leader": "#2a6f97", "follower": "#61a5c2", "disk": "#e09f3e"}
_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "raftkv", "font.size": 8}


def lines(name: str, result: Mapping[str, Any]) -> list[str]:
    """Say what each stage took."""
    head = f"{name}: one put {result['p50_us']:,.0f} us (90 % below {result['p90_us']:,.0f}), {_of(result)}"
    rows = [
        f"  {stage.name:40} {stage.who:18} {found['p50_us']:8,.0f} us  from {found['begin_us']:8,.0f} us"
        for stage in STAGES
        if (found := result["stages"].get(stage.name)) is not None
    ]
    return [head, *rows]


def _of(result: Mapping[str, Any]) -> str:
    """Say which puts these are medians of."""
    puts, of_puts = result["puts"], result["of_puts"]
    return f"{puts:,} puts" if puts == of_puts else f"the fastest {puts:,} of {of_puts:,} puts"


def draw(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw results under each other on the same scale, as the kind of picture that the path's ending names."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    with mpl.rc_context(_SETTINGS):
        figure, panels = pyplot.subplots(
            len(results), 1, figsize=(8, 3.4 * len(results)), sharex=True, squeeze=False, layout="constrained"
        )
        for axes, (name, result) in zip(panels[:, 0], results.items(), strict=True):
            _panel(axes, name, result)
        panels[-1, 0].set_xlabel("microseconds since the client sent the put")
        handles = [Patch(color=colour, label=who) for who, colour in COLOURS.items()]
        panels[0, 0].legend(handles=handles, loc="lower left", frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def _panel(axes: Any, name: str, result: Mapping[str, Any]) -> None:
    names = [stage.name for stage in STAGES]
    for position, stage in enumerate(STAGES):
        found = result["stages"][stage.name]
        axes.barh(position, found["p50_us"], left=found["begin_us"], color=COLOURS[stage.who], height=0.7)
        axes.text(found["end_us"], position, f" {found['p50_us']:,.0f}", va="center")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(result["p50_us"], color="#888888", linewidth=1, linestyle="--")
    axes.set_title(f"{name}: a put takes {result['p50_us']:,.0f} us at one client (median of {_of(result)})")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08)
