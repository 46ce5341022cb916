"""A training program that saves checkpoints, dies, and goes on where it was; no framework, no tensors.

    python examples/checkpoints/quickstart.py --endpoints 127.0.0.1:2379 --place /tmp/checkpoints --until 60

Without --endpoints it starts a throwaway cluster of its own. The "model" is one number that approaches pi.

Needs fsspec: `pip install 'raftkv[checkpoint]'`.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from contextlib import ExitStack
from pathlib import Path

import raftkv
from raftkv.checkpoint import Policy, Registry, Saver


def train(registry: Registry, until: int) -> None:
    """Go on from the newest checkpoint, and save every 10 steps."""
    saver = Saver(registry)
    last = saver.newest()  # decides first what a writer that died has left
    weight = 0.0 if last is None else json.loads(Path(last.uri, "weight.json").read_text())
    print("from the beginning" if last is None else f"from step {last.step}")
    for step in range(1 if last is None else last.step + 1, until + 1):
        weight += 0.1 * (math.pi - weight)
        if step % 10 == 0:
            with saver.saving(step, metrics={"loss": abs(math.pi - weight)}) as saving:
                Path(saving.uri, "weight.json").write_text(json.dumps(weight))


def main() -> None:
    """Train twice: the second time goes on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoints", help="of a cluster, separated by commas")
    parser.add_argument("--place", help="where the files go: a directory that all ranks see")
    parser.add_argument("--until", type=int, default=60, help="the last step")
    options = parser.parse_args()
    with ExitStack() as stack:
        endpoints = options.endpoints or stack.enter_context(raftkv.local()).endpoints
        place = options.place or stack.enter_context(tempfile.TemporaryDirectory())
        kv = stack.enter_context(raftkv.connect(endpoints))
        registry = Registry(kv, "quickstart", uri=place)
        train(registry, options.until // 2)
        train(registry, options.until)
        registry.tag("release", registry.best("loss"))
        gone = registry.collect(Policy(keep_last=2, keep_every=30)).deleted
        print("steps:", [one.step for one in registry.checkpoints()], "deleted:", len(gone))


if __name__ == "__main__":
    main()
