"""Kill ranks, coordinators and leaders while checkpoints are saved; see `bench.checkpoint.chaos`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

if __name__ == "__main__":
    from bench.checkpoint.chaos.main import main

    main()
