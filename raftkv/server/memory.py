"""The memory that this process may use: that of the machine, or less in a control group (container, systemd unit).

The budgets of answers, unfinished requests and watchers are made for 4 GiB, those of writes for 2 GiB, the log for
1 GiB. With less memory they are smaller in proportion, so that the kernel does not kill a member because its clients
read or write much.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final


def share_bytes(part: int, most_bytes: int) -> int:
    """Return a fraction of the memory that this process may use, but at most a given size.

    Arguments:
        part: denominator of the fraction.
        most_bytes: size that is enough.
    """
    return min(limit_bytes() // part, most_bytes)


def limit_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may use.

    Arguments:
        root: directory that holds ``proc`` and ``sys``.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, cgroup_limit_bytes(root) or machine)


UNLIMITED_BYTES: Final = 1 << 62
"""Version 1 writes no limit as the largest number of whole pages."""


def cgroup_limit_bytes(root: Path = Path("/")) -> int | None:
    """Return the lowest memory limit of the control groups above this process, version 1 or 2; None: no limit.

    Arguments:
        root: directory that holds ``proc`` and ``sys``.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    limits: list[int] = []
    mount = root / "sys/fs/cgroup"
    for _, controllers, group in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (mount / "memory", "memory.limit_in_bytes") if controllers else (mount, "memory.max")
        here = base / group.strip("/")
        for folder in (here, *here.parents):
            if base not in (folder, *folder.parents):
                break
            with contextlib.suppress(OSError):
                text = (folder / name).read_text(encoding="ascii").strip()
                limits += [int(text)] if text.isdigit() else []
    return min((limit for limit in limits if limit < UNLIMITED_BYTES), default=None)
