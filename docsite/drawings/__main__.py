"""Writes the drawings: see the package."""

from __future__ import annotations

from pathlib import Path

from docsite.drawings.consensus import election, write
from docsite.drawings.history import leases, revisions
from docsite.drawings.runs import fence, generations

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "concepts"
DRAWINGS = (write, election, revisions, leases, generations, fence)


def main() -> None:
    """Write all of them."""
    for draw in DRAWINGS:
        (FOLDER / f"{draw.__name__}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
