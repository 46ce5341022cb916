"""The memory of a member, and the budgets that depend on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from raftkv.config import ServerConfig, Tracing
from raftkv.rpc.limits import ServerLimits
from raftkv.server import memory
from raftkv.server.listening import client_limits
from tests.server.tracing.members import running

MIB = 1 << 20


@pytest.mark.parametrize(
    ("line", "folder", "name", "none"),
    [
        ("0::/a/b\n", "a/b", "memory.max", "max\n"),
        ("4:memory:/a/b\n", "memory/a/b", "memory.limit_in_bytes", "9223372036854771712\n"),
    ],
)
def test_limits_of_control_groups(tmp_path: Path, line: str, folder: str, name: str, none: str):
    group = tmp_path / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    machine = memory.limit_bytes(tmp_path)
    (tmp_path / "proc/self/cgroup").write_text("3:cpu:/elsewhere\n" + line)
    assert memory.limit_bytes(tmp_path) == machine > 4096
    (group / name).write_text(none)
    assert (memory.limit_bytes(tmp_path), memory.cgroup_limit_bytes(tmp_path)) == (machine, None)
    (group.parent / name).write_text("4096\n")
    assert memory.limit_bytes(tmp_path) == 4096


def test_what_clients_can_make_a_small_member_hold_fits_its_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "limit_bytes", lambda: 512 * MIB)
    small = client_limits(ServerConfig())
    assert small.process_send_buffer_bytes == small.connection_send_buffer_bytes == 128 * MIB
    assert small.process_assembly_bytes == small.assembly_bytes == 64 * MIB
    monkeypatch.setattr(memory, "limit_bytes", lambda: 4096 * MIB)
    large, default = client_limits(ServerConfig()), ServerLimits()
    assert large.process_send_buffer_bytes == default.process_send_buffer_bytes
    assert large.process_assembly_bytes == default.process_assembly_bytes


@pytest.mark.parametrize(
    ("memory_bytes", "writes", "watchers", "log"),
    [(256 * MIB, 32 * MIB, 64 * MIB, (16 * MIB, 16 * MIB)), (4096 * MIB, 256 * MIB, 1024 * MIB, (96 * MIB, 64 * MIB))],
)
async def test_what_a_member_keeps_fits_its_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    memory_bytes: int,
    writes: int,
    watchers: int,
    log: tuple[int, int],
):
    """With 256 MiB it kept half of them of its log alone; a flag that asked for more was lowered in silence."""
    monkeypatch.setattr(memory, "limit_bytes", lambda: memory_bytes)
    async with running(tmp_path, monkeypatch, [Tracing()], snapshot_bytes=96 * MIB) as ((member,), _, _):
        replica, node = member.replica, member.node
        assert (replica.config.snapshot_bytes, replica.config.snapshot_catchup_bytes) == log
        assert (node.settings.unapplied_max_bytes, node.settings.unwritten_max_bytes) == (writes, writes)
        assert (node.proposals.shares.limit, replica.hub.shares.limit) == (writes, watchers)
    warned = [record.getMessage() for record in caplog.records if "--snapshot-" in record.getMessage()]
    text = f"--snapshot-bytes={96 * MIB} is more than a sixteenth of the memory of this process: {16 * MIB} is used"
    assert warned == ([text] if log[0] < 96 * MIB else [])
