"""The wheel, installed without a clone: it is complete, and its programs serve."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.procs import Cluster, Program

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300.0

pytestmark = pytest.mark.long


def _run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _sources() -> list[str]:
    listed = _run("git", "ls-files", "raftkv", "storage", cwd=ROOT).split()
    return [name for name in listed if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from tracked files, without leftovers of earlier builds or test dependencies."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    build = _run("git", "ls-files", "requirements", cwd=ROOT).split()
    for name in [*_sources(), *build, "setup.py", "pyproject.toml", "README.md"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", target, source, cwd=target)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def home(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel in it; other packages are those of this one, which come after its own."""
    home = tmp_path_factory.mktemp("environment")
    _run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    python = home / "bin" / "python"
    _run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel, cwd=home)
    found = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip()
    Path(found, "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return home


def test_the_wheel_has_every_file_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    renamed = {name if name.startswith("raftkv/") else f"raftkv/{name}" for name in _sources()}
    assert packed == renamed


def test_wheel_sbom_lists_every_dependency(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if "/sboms/" in name)
        bill = json.loads(archive.read(name))
        metadata = archive.read(f"{name.split('/')[0]}/METADATA").decode()
    assert name.endswith(".dist-info/sboms/raftkv.cdx.json")
    assert (bill["bomFormat"], bill["specVersion"], bill["metadata"]["component"]["name"]) == (
        "CycloneDX",
        "1.6",
        "raftkv",
    )
    needed = re.findall(r"^Requires-Dist: ([A-Za-z0-9_.-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert {name.lower().replace("_", "-") for name in needed} <= {one["name"] for one in bill["components"]}
    assert all(one["purl"] == f"pkg:pypi/{one['name']}@{one['version']}" for one in bill["components"])


def test_installed_wheel_is_used_and_serves(home: Path) -> None:
    python, programs = home / "bin" / "python", home / "bin"
    where = _run(python, "-c", "import raftkv.storage; print(raftkv.storage.__file__)", cwd=home)
    assert where.startswith(str(home))
    with Cluster(Program("raftkv", (str(programs / "raftkv"),), ())) as cluster:
        (endpoint,) = cluster.endpoints
        assert _run(programs / "raftkvctl", "--endpoints", endpoint, "put", "a", "b", cwd=home) == "OK\n"
        assert _run(programs / "raftkvctl", "--endpoints", endpoint, "get", "a", cwd=home) == "a\nb\n"
    assert _run(programs / "raftkvutl", "version", cwd=home).startswith("raftkvutl version: ")
