"""What the dashboard's modules compute, run by Node: the tests are in the ``.test.mjs`` files beside this."""

from __future__ import annotations

import subprocess
from pathlib import Path

import playwright
import pytest

NODE = Path(playwright.__file__).with_name("driver") / "node"
"""The Node that Playwright brings; browser tests need it anyway."""


@pytest.mark.parametrize("name", sorted(path.name for path in Path(__file__).parent.glob("*.test.mjs")))
def test_modules(name: str) -> None:
    done = subprocess.run(
        [NODE, "--test", "--test-force-exit", "--test-reporter=tap", Path(__file__).with_name(name)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
