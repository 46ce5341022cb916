"""With large values the log is cut by bytes, so that memory and disk stay bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.wire import Wire
from tests.procs import RAFTKV, Cluster, Member, wait_for
from tests.server.process.process import must_put

MIB = 1 << 20
VALUE = bytes(1_400_000)
WARM_UP, PUTS = 50, 100
BUDGETS = ("--snapshot-bytes", str(8 * MIB), "--snapshot-catchup-bytes", str(8 * MIB))


def _memory_bytes(member: Member) -> int:
    """What a process has allocated, without pages of files that it maps."""
    assert member.process is not None
    lines = Path(f"/proc/{member.process.pid}/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def _log_bytes(member: Member) -> int:
    return sum(path.stat().st_size for path in Path(member.data_dir, "member", "wal").glob("*.wal"))


@pytest.mark.long
def test_large_values_leave_memory_and_the_log_on_disk_as_they_are() -> None:
    with Cluster(RAFTKV, size=3, flags=BUDGETS) as cluster, Wire(cluster.endpoints) as wire:
        for number in range(WARM_UP):
            must_put(wire, "k", VALUE + b"%d" % number)
        before = [_memory_bytes(member) for member in cluster.members]
        for number in range(PUTS):
            must_put(wire, "k", VALUE + b"%d" % number)
        # 210 MB were written; a segment takes 64 MiB, and what is being written and what comes next are two.
        for member, size_bytes in zip(cluster.members, before, strict=True):
            wait_for(lambda member=member: _log_bytes(member) <= 3 * 64 * MIB, "a log that was cut on the disk")
            assert _memory_bytes(member) < size_bytes + 48 * MIB, member.name
