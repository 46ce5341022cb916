"""python -m tests.fuzz.coverage_engine TARGET SECONDS SEED: inputs guided by coverage, with Google's atheris.

Atheris is no dependency: ``pip install atheris`` (3.0.0 has a wheel for Python 3.11) to use it,
for hours rather than minutes. Findings are those of the other engine, and go into ``regressions.txt`` alike.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Run one target; ends the process, with a status other than 0 after a finding."""
    import atheris

    name, seconds, seed = sys.argv[1:4]
    with atheris.instrument_imports(include=["raftkv"], enable_loader_override=False):
        from tests.fuzz.targets import TARGETS
    from tests.fuzz.engine import regressions
    from tests.fuzz.oracle import Judge, watched

    target = TARGETS[name]
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as corpus, watched():
        for number, data in enumerate([*target.samples(), *regressions(name)]):
            (Path(corpus) / str(number)).write_bytes(data)
        judge = Judge(target, Path(scratch))
        words = [sys.argv[0], f"-max_total_time={seconds}", f"-seed={seed}", "-max_len=65536", "-verbosity=0", corpus]
        atheris.Setup(words, judge.judge)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
