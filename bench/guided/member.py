"""A member that ends as programs do when it is sent SIGTERM, so that the counts of its calls are written.

Else it is ``python -m raftkv``, which ends by the signal that it was sent: the C library writes nothing then.
"""

from __future__ import annotations

import os
import sys

from raftkv.cli.main import main


def end(pid: int, number: int) -> None:
    """Stand in for ``os.kill``, by which a member ends itself: nothing else of a member sends signals."""
    if pid != os.getpid():
        raise RuntimeError(f"a member sent signal {number} to {pid}")
    sys.exit(0)


if __name__ == "__main__":
    setattr(os, os.kill.__name__, end)
    sys.exit(main())
