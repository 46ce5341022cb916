"""The doctor's look at this machine, at directories and at certificates: nothing is left behind, nothing is changed."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest

from raftkv.cli import doctor as command
from raftkv.cli.doctor import Finding, Level, check_files
from raftkv.cli.main import main as raftkv
from raftkv.cli.program import CommandError
from raftkv.config import TLSFiles


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SYNCS", 5)


def by_subject(found) -> dict[str, tuple[Level, str]]:
    return {one.subject: (one.level, one.figure) for one in found}


def test_a_directory_is_tried_without_a_trace(tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    before = os.stat(data).st_mtime_ns
    found = by_subject(command.check_disk(str(data)))
    assert found["data directory: fdatasync"][1].endswith(" of 5 syncs")
    assert list(data.iterdir()) == []
    assert os.stat(data).st_mtime_ns == before
    assert by_subject(command.check_disk(str(data / "not" / "there"))).keys() == found.keys()


def test_a_file_system_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = os.open

    def without(path, flags, *rest, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", without)
    assert len(command.sync_times_ms(tmp_path)) == 5
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_is_mounted_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(command, "_nameless", refused)
    assert command.check_latency("sync", tmp_path) == Finding(
        "sync",
        Level.FAILURE,
        "cannot write there: Read-only file system",
        "no member can start there: the kernel mounts a disk read-only after an error (see dmesg)",
    )


def test_machines(tmp_path: Path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000000 kB\nMemAvailable: 1000 kB\n")
    assert by_subject(command.check_machine(tmp_path))["memory"][0] == Level.WARNING
    assert by_subject(command.check_machine(tmp_path / "nothing"))["memory"][0] == Level.SKIPPED


def test_clocks_and_files():
    assert command.check_clock(lambda: (0, 1500)).figure == "yes, within 1.5 ms"
    assert command.check_clock(lambda: (5, 0)).level == Level.WARNING
    assert command.check_clock(lambda: (-1, 0)).level == Level.SKIPPED
    assert [command.check_descriptors(hard).level for hard in (-1, 1024, 65536)] == [Level.OK, Level.WARNING, Level.OK]


def test_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert raftkv(["certs", str(tmp_path / "tls"), "a=10.0.0.1", "--days", "60"]) == 0
    capsys.readouterr()
    folder = tmp_path / "tls" / "members" / "a"
    names = {path.name: str(path) for path in folder.iterdir()}
    files = TLSFiles(names["server.crt"], names["server.key"], trusted_ca_file=names["ca.crt"])
    assert {level for level, _ in by_subject(check_files("x", files)).values()} == {Level.OK}
    now = time.time()
    for days, level in ((40, Level.WARNING), (61, Level.FAILURE)):
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda days=days: now + days * 86_400)
            assert by_subject(check_files("x", files))["x: certificate"][0] == level
    (missing,) = check_files("x", TLSFiles("/nowhere", "/nowhere"))
    assert missing.level == Level.FAILURE
    assert check_files("x", TLSFiles()) == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    assert command.main(["--data-dir", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["level"] in ("ok", "warning")
    assert {"subject", "level", "figure", "advice"} == set(report["findings"][0])
    monkeypatch.setattr(command, "FREE_MIN_BYTES", 1 << 62)
    assert command.main(["--data-dir", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "writes stop when it is full" in printed
    assert "\n1 failure, " in printed
    settings = tmp_path / "raftkv.yml"
    settings.write_text(
        f"data-dir: {tmp_path}/d\nelection-timeuot: 500\n"
        "client-transport-security:\n  cert-file: /no.crt\n  key-file: /no.key\n"
    )
    monkeypatch.setattr(command, "_check_cluster", lambda *given: [])
    assert command.main([f"--config-file={settings}"]) == 1
    printed = capsys.readouterr().out
    assert "/no.crt" in printed
    assert "unknown setting 'election-timeuot' is ignored (did you mean election-timeout?)" in printed
    for words in (["--nothing"], ["--config-file=/nowhere"], ["word"]):
        with pytest.raises(CommandError) as raised:
            command.main(words)
        assert raised.value.code == 2
    assert command.main(["--help"]) == 0
