"""Debian programs that tests run, and the package of each.

    promtool = installed.program("promtool")

If a program is missing, the test that needs it is skipped and names the package; in CI (``CI`` is set) it fails.
"""

from __future__ import annotations

import os
import shutil

import pytest

PACKAGES = {
    "chromium": "chromium", "etcdctl": "etcd-client", "ip": "iproute2", "prometheus": "prometheus",
    "promtool": "prometheus", "psql": "postgresql", "systemd-analyze": "systemd", "systemd-sysusers": "systemd",
    "systemd-tmpfiles": "systemd",
}  # fmt: skip


def program(name: str, folder: str | None = None) -> str:
    """Return the path of a program, from a folder if one is given; if it is missing, skip or fail the test."""
    path = shutil.which(name, path=folder)
    if path is None:
        reason = f"{name} is missing: apt-get install {PACKAGES[name]}"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return path
