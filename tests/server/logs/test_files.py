"""Log files: rotated as in lumberjack, and reopened when another process moves them."""

from __future__ import annotations

import errno
import gzip
import logging
import os
import re
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from raftkv.config import LogRotation, ServerConfig
from raftkv.errors import ConfigError
from raftkv.server.logs import files, outputs
from raftkv.server.logs.files import LineFile, LineStream, RotatedFile, open_output
from raftkv.server.logs.handler import ThreadedHandler

LINE = b"x" * 99 + b"\n"


class Small(LogRotation):
    """One that rotates after a kilobyte."""

    @property
    def size_max_bytes(self) -> int:
        return 1000


def write(file: RotatedFile, lines: int) -> None:
    for _ in range(lines):
        file.write(LINE)
    file.close()


def rotated(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != "raftkv.log")


def test_a_file_is_rotated_before_it_gets_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All in one millisecond, too: no rotated file takes the place of another."""
    monkeypatch.setattr(time, "time_ns", lambda: 1_795_000_000_123_000_000)
    file = RotatedFile(str(tmp_path / "raftkv.log"), Small())
    for _ in range(25):
        file.write(LINE)
    file.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 2500
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    for path in rotated(tmp_path):
        assert re.fullmatch(r"raftkv-\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.\d{3}\.log", path.name)


def past(folder: Path, days: float, suffix: str = ".log") -> Path:
    moment = datetime.fromtimestamp(time.time() - days * files.DAY_S, UTC)
    path = folder / f"raftkv-{moment:%Y-%m-%dT%H-%M-%S}.000{suffix}"
    path.write_bytes(LINE)
    return path


def test_old_files_go_by_number_and_by_age(tmp_path: Path):
    dated = [past(tmp_path, days) for days in (1, 2, 3)] + [past(tmp_path, 4, ".log.gz")]
    stranger = tmp_path / "raftkv-yesterday.log"
    stranger.touch()
    RotatedFile(str(tmp_path / "raftkv.log"), LogRotation(maxage=3, maxbackups=0)).tidy()
    assert [path.exists() for path in dated] == [True, True, False, False]
    RotatedFile(str(tmp_path / "raftkv.log"), LogRotation(maxbackups=1)).tidy()
    assert [path.exists() for path in dated] == [True, False, False, False]
    assert stranger.exists()


def test_a_clock_that_was_ahead_costs_no_line_of_today(tmp_path: Path):
    ahead, more_ahead, today = past(tmp_path, -1), past(tmp_path, -2), past(tmp_path, 0.001)
    RotatedFile(str(tmp_path / "raftkv.log"), LogRotation(maxbackups=2)).tidy()
    assert [path.exists() for path in (today, more_ahead, ahead)] == [True, True, False]


def test_rotated_file_is_compressed(tmp_path: Path):
    write(RotatedFile(str(tmp_path / "raftkv.log"), Small(compress=True)), 11)
    (packed,) = rotated(tmp_path)
    assert packed.name.endswith(".log.gz")
    assert gzip.decompress(packed.read_bytes()) == LINE * 10


def test_rotated_file_keeps_its_mode(tmp_path: Path):
    path = tmp_path / "raftkv.log"
    path.touch()
    path.chmod(0o640)
    before = os.umask(0o077)
    try:
        write(RotatedFile(str(path), Small()), 11)
    finally:
        os.umask(before)
    assert [oct(each.stat().st_mode & 0o777) for each in (path, *rotated(tmp_path))] == ["0o640", "0o640"]


def test_logrotate_needs_no_signal(tmp_path: Path):
    path = tmp_path / "raftkv.log"
    file = LineFile(str(path), "the log")
    file.write(b"one\n")
    path.rename(tmp_path / "moved")
    file.write(b"two\n")
    os.truncate(path, 0)  # copytruncate
    file.write(b"three\n")
    path.unlink()
    file.write(b"four\n")
    file.close()
    assert ((tmp_path / "moved").read_text(), path.read_text()) == ("one\n", "four\n")


@pytest.mark.parametrize("call", ["replace", "open"])
def test_lines_go_on_in_the_old_file_while_it_cannot_be_rotated(tmp_path, monkeypatch, call):
    """All lines were dropped until it could be: on a disk without a free inode, for ever."""
    path = tmp_path / "raftkv.log"
    handler = ThreadedHandler(RotatedFile(str(path), Small()))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        for number in range(30):
            handler.handle(logging.makeLogRecord({"msg": f"{number:099d}", "levelno": logging.INFO}))
        while handler.written < 30:
            handler.flush()
    handler.handle(logging.makeLogRecord({"msg": "the last", "levelno": logging.INFO}))
    handler.close()
    lines = [line for file in (*rotated(tmp_path), path) for line in file.read_text().splitlines()]
    told = "the log goes on in this file, which cannot be rotated: No space left on device"
    assert [line for line in lines if line != told] == [f"{number:099d}" for number in range(30)] + ["the last"]
    assert lines.count(told) == 1
    assert path.read_text() == "the last\n"


def test_lines_wait_when_the_file_is_gone_with_its_directory(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    file = LineFile(str(tmp_path / "logs/raftkv.log"), "the log")
    shutil.rmtree(tmp_path / "logs")
    with pytest.raises(FileNotFoundError):
        file.write(b"one\n")
    (tmp_path / "logs").mkdir()
    file.write(b"two\n")
    file.close()
    assert (tmp_path / "logs/raftkv.log").read_text() == "one\ntwo\n"


def test_outputs(tmp_path: Path):
    assert isinstance(open_output("default", None), LineStream)
    assert isinstance(open_output("/dev/null", None), LineStream)
    assert isinstance(open_output(str(tmp_path / "a"), None), LineFile)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for name, fault in (("/nowhere/log", "No such file or directory"), (str(pipe), "No such device or address")):
        with pytest.raises(ConfigError, match=f"cannot write the log to {name}: {fault}"):
            open_output(name, None)
    with pytest.raises(ConfigError, match="single file path"):
        ServerConfig(log_rotation=LogRotation())


def test_several_outputs_get_every_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    root = logging.getLogger()
    kept, level = list(root.handlers), root.level
    path = tmp_path / "raftkv.log"
    try:
        outputs.configure(
            ServerConfig(log_outputs=(str(path), "stdout"), log_rotation=LogRotation(), log_format="json")
        )
        logging.getLogger("x").info("a line")
        outputs.close()
    finally:
        root.handlers[:] = kept
        root.setLevel(level)
    assert '"msg": "a line"' in path.read_text()
    assert capfd.readouterr().out == path.read_text()
