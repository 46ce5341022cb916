"""Draws docs/training/checkpoints.svg: how a checkpoint comes to exist, and what a fault at each moment leads to.

python -m bench.checkpoint.drawing
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[2] / "docs" / "training" / "checkpoints.svg"
LANES = {"store": 5.0, "rank 0": 4.0, "rank 1": 3.0, "rank 2": 2.0}
BLUE, GREEN, GREY, RED, INK = "#3b6fb6", "#3a8f5c", "#8a8f98", "#b6453b", "#22262b"
SHARDS = {"rank 0": (1.0, 2.85), "rank 1": (1.2, 2.95), "rank 2": (1.2, 4.0)}
PREPARED = {"rank 1": 3.05, "rank 2": 4.2, "rank 0": 5.3}
FATES = (
    (0.3, 5.3, RED, "a fault here: the attempt is given up,\nlatest is what it was, the directory is garbage"),
    (5.3, 7.6, BLUE, "here: the next generation\ncommits it"),
    (7.6, 9.9, GREEN, "here: it exists\nand loads"),
)


def draw(axes: Any) -> None:
    """Draw everything."""
    for begin, end, colour, title in ((0.3, 5.3, BLUE, "1  PREPARE"), (5.3, 7.6, GREEN, "2  COMMIT")):
        axes.axvspan(begin, end, 0.235, 0.93, color=colour, alpha=0.07, lw=0)
        axes.text((begin + end) / 2, 5.72, title, ha="center", weight="bold", color=colour, size=11)
    for name, height in LANES.items():
        axes.plot([0.3, 9.9], [height, height], color=GREY, lw=3 if name == "store" else 1, zorder=1)
        shown = {"store": "raftkv\n(3 members)", "rank 0": "rank 0\n(coordinator)"}.get(name, name)
        axes.text(0.2, height, shown, ha="right", va="center", size=9, color=INK)
    for name, (begin, end) in SHARDS.items():
        axes.barh(LANES[name], end - begin, left=begin, height=0.3, color="#c9d6ea", edgecolor=BLUE, zorder=2)
        axes.text(
            (begin + end) / 2, LANES[name], "shards, digests, fsync", ha="center", va="center", size=7.5, color=INK
        )
    _arrow(axes, 0.6, "rank 0", "begin", BLUE)
    for name, moment in PREPARED.items():
        _arrow(axes, moment, name, "prepare", BLUE)
    axes.barh(LANES["rank 0"], 0.9, left=5.75, height=0.3, color="#d3e8da", edgecolor=GREEN, zorder=2)
    axes.text(6.2, LANES["rank 0"], "manifest", ha="center", va="center", size=7.5, color=INK)
    axes.barh(LANES["rank 0"], 0.85, left=4.35, height=0.3, color="#c9d6ea", edgecolor=BLUE, zorder=2)
    axes.text(4.775, LANES["rank 0"], ".metadata", ha="center", va="center", size=7.5, color=INK)
    _arrow(axes, 7.6, "rank 0", "commit", GREEN)
    axes.text(
        7.7, 4.42, "one txn: fence holds,\nno record yet,\nlatest as it was seen", size=8, color=GREEN, va="center"
    )
    axes.text(8.0, 5.1, "watchers hear of it", size=8, color=INK, va="bottom")
    for begin, end, colour, text in FATES:
        axes.annotate("", (end, 1.3), (begin, 1.3), arrowprops={"arrowstyle": "<->", "color": colour, "lw": 1.4})
        axes.text((begin + end) / 2, 1.16, text, ha="center", va="top", size=8, color=colour)


def _arrow(axes: Any, moment: float, lane: str, text: str, colour: str) -> None:
    """Draw what a rank writes into the store."""
    style = {"arrowstyle": "-|>", "color": colour, "lw": 1.6, "shrinkA": 0, "shrinkB": 2}
    axes.annotate("", (moment, LANES["store"]), (moment, LANES[lane]), arrowprops=style, zorder=4)
    axes.text(moment, LANES["store"] + 0.1, text, ha="center", va="bottom", size=8, color=colour)


def main() -> None:
    """Write the drawing."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=TARGET, help="the file to write; its suffix is the format")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "raftkv", "font.family": "sans-serif"})
    figure, axes = plt.subplots(figsize=(10, 4.6))
    draw(axes)
    axes.set_xlim(-0.9, 10)
    axes.set_ylim(0.6, 5.95)
    axes.axis("off")
    target = parser.parse_args().target
    extra = {"metadata": {"Date": None}} if target.suffix == ".svg" else {"dpi": 110}
    figure.savefig(target, bbox_inches="tight", facecolor="white", **extra)


if __name__ == "__main__":
    main()
