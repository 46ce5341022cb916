"""The memory of a member, and the budgets that depend on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from raftkv.config import ServerConfig
from raftkv.rpc.limits import ServerLimits
from raftkv.server import memory
from raftkv.server.listening import client_limits

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
    assert memory.limit_bytes(tmp_path) == machine
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
