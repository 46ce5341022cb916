"""A member that runs interpreted in a checkout whose hot path is compiled: the libraries beside the sources are hidden.

    INTERPRETED = Program("raftkv", (sys.executable, "-m", "tests.compat.builds.interpreted"))

Processes that a member starts (``server/maintenance/snapshot``) take the libraries all the same.
"""

from __future__ import annotations

import sys
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path

PACKAGE = str(Path(__file__).resolve().parents[3] / "raftkv")


def hide_libraries() -> None:
    """Have modules of raftkv that are not imported yet come from their sources."""
    sources = FileFinder.path_hook((SourceFileLoader, SOURCE_SUFFIXES))

    def finder(path: str) -> FileFinder:
        if path != PACKAGE and not path.startswith(PACKAGE + "/"):
            raise ImportError(path)
        return sources(path)

    sys.path_hooks.insert(0, finder)


def main() -> int:
    """Run the command line of ``raftkv``."""
    hide_libraries()
    from raftkv.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
