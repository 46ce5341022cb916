"""A manifest of a million files, published and read by many clients; see `bench.dataset.manifest`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

if __name__ == "__main__":
    from bench.dataset.manifest import main

    sys.exit(main())
