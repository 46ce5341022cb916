"""`make cluster` with an old Python, with an incomplete environment, and without any."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from requirements import pythons

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 120

PYTHON = """#!/bin/sh
echo "python $*" >> calls
if [ "$1" = -c ] && [ "$2" = "import pip" ]; then {pip}; exit; fi
if [ "$1" = -c ]; then exec {python} -c "import sys; sys.version_info = ({version}, 0); $2"; fi
if [ "$1" = -m ] && [ "$2" = venv ]; then
  mkdir -p .venv/bin
  {broken}
  cp "$0" .venv/bin/python
  for name in pip pip3 raftkv; do printf '#!/bin/sh\\necho "%s $*" >> calls\\n' $name > .venv/bin/$name; done
  chmod +x .venv/bin/*
fi
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the files that make reads."""
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    return tmp_path


def python(checkout: Path, name: str, version: str = "3, 11", broken: str = "", pip: str = "true") -> str:
    program = checkout / name
    text = PYTHON.format(python=sys.executable, version=version, broken=broken, pip=pip)
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)
    return f"./{name}"


def make(checkout: Path, target: str, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["make", target, f"PYTHON={program}", "LOCKED=", *words]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def calls(checkout: Path) -> list[str]:
    """Recorded calls of pip and of the environment's programs."""
    path = checkout / "calls"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [line for line in lines if not line.startswith("python -c")]


WANTED = [
    "python -m venv --without-pip .venv",
    "python -m pip --python .venv install -q -e .",
    "raftkv cluster --size 3",
]


def test_cluster_needs_only_raftkv(checkout: Path) -> None:
    done = make(checkout, "cluster", python(checkout, "python"))
    assert done.returncode == 0, done.stderr
    assert calls(checkout) == WANTED
    assert make(checkout, "cluster", "./python").returncode == 0
    assert calls(checkout) == [*WANTED, "raftkv cluster --size 3"]


def test_an_old_python_is_told_in_a_line_and_leaves_nothing(checkout: Path) -> None:
    done = make(checkout, "cluster", python(checkout, "old", "3, 9"))
    message, failed = done.stderr.splitlines()
    text = "raftkv needs Python 3.11 or newer, and ./old is 3.9; name another one: make PYTHON=python3.12"
    assert (done.returncode, message, "Error" in failed) == (2, text, True)
    assert not (checkout / ".venv").exists()
    assert make(checkout, "cluster", python(checkout, "python")).returncode == 0
    assert calls(checkout) == WANTED


@pytest.mark.parametrize("state", ["empty", "of an old Python", "with a dead interpreter"])
def test_incomplete_environment_is_recreated(checkout: Path, state: str) -> None:
    programs = checkout / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "left-behind").touch()
    if state == "of an old Python":
        shutil.copy(checkout / python(checkout, "old", "3, 9"), programs / "python")
    elif state == "with a dead interpreter":
        (programs / "python").symlink_to("/nowhere/python3.8")
    assert make(checkout, "cluster", python(checkout, "python")).returncode == 0
    assert calls(checkout) == WANTED
    assert not (programs / "left-behind").exists()


def test_a_machine_without_pip_gets_one_in_the_environment(checkout: Path) -> None:
    assert make(checkout, "cluster", python(checkout, "python", pip="false")).returncode == 0
    assert calls(checkout) == [WANTED[0], "python -m ensurepip", "pip3 install -q -e .", WANTED[2]]


def test_an_environment_that_cannot_be_made_is_removed(checkout: Path) -> None:
    done = make(checkout, "cluster", python(checkout, "python", broken="echo no ensurepip >&2; exit 1"))
    assert done.returncode == 2
    assert "no ensurepip" in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(("target", "asked"), [("docs", ["-e .[docs]"]), ("native", ["wheel"]), ("man", [])])
def test_the_site_a_native_build_and_manual_pages_need_neither_torch_nor_a_browser(checkout, target, asked):
    make(checkout, target, python(checkout, "python"))
    pip = [line for line in calls(checkout) if " -m pip " in line]
    assert len(pip) == 1 + len(asked)
    assert all(text in line for text, line in zip(asked, pip[1:], strict=True))


def test_development_needs_more(checkout: Path) -> None:
    done = make(checkout, ".venv/.installed", python(checkout, "python"))
    assert done.returncode == 0, done.stderr
    assert calls(checkout) == [
        WANTED[0],
        "python -m pip --python .venv install -q --no-compile -e .[dev,dev-torch] pip",
        "python -m pip install -q --no-compile --no-deps protobuf==4.25.* --target .venv/protobuf-4.25",
    ]
    assert make(checkout, "cluster", "./python").returncode == 0
    assert calls(checkout)[3:] == WANTED[2:], "an environment for development can run it"


def test_ci_installs_only_locked_packages_and_torch(checkout: Path) -> None:
    done = make(checkout, ".venv/.installed", python(checkout, "python"), "LOCKED=1")
    assert done.returncode == 0, done.stderr
    hashed = "-q --no-compile --no-deps --require-hashes -r requirements"
    assert calls(checkout)[1:] == [
        f"python -m pip --python .venv install {hashed}/ci.lock",
        "python -m pip --python .venv install -q --no-compile --no-build-isolation -e .[dev,dev-torch] pip",
        f"python -m pip install {hashed}/oldest.lock --target .venv/protobuf-4.25",
    ]
    shutil.rmtree(checkout / ".venv")
    (checkout / "calls").unlink()
    assert make(checkout, "cluster", "./python", "LOCKED=1").returncode == 0
    assert calls(checkout)[1:] == [f"python -m pip --python .venv install {hashed}/runtime.lock", *WANTED[1:]]


def test_each_minor_version_is_asked_once_and_old_or_broken_pythons_never(tmp_path: Path) -> None:
    paths = []
    for folder, name, text in [
        ("system", "python3.11", "echo 3 11 2"),
        ("system", "python3.13", "exit 1"),  # without what makes environments
        ("pyenv", "python3.9", "echo 3 9 18"),
        ("pyenv", "python3.11", "echo 3 11 7"),
        ("pyenv", "python3.13", "echo 3 13 0"),
        ("pyenv", "python3.12", "echo 3 12 1"),
    ]:
        (tmp_path / folder).mkdir(exist_ok=True)
        paths.append(tmp_path / folder / name)
        paths[-1].write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        paths[-1].chmod(0o755)
    assert list(pythons.found(paths).items()) == [
        ("3.11.2", tmp_path / "system" / "python3.11"),
        ("3.12.1", tmp_path / "pyenv" / "python3.12"),
        ("3.13.0", tmp_path / "pyenv" / "python3.13"),
    ]


def test_counts_are_read_from_the_last_line() -> None:
    assert pythons.counted("1 failed in a test\n2 failed, 40 passed, 1 error in 3.21s\n") == {
        "passed": 40,
        "failed": 2,
        "error": 1,
    }
    assert pythons.counted("") == {"passed": 0, "failed": 0, "error": 0}
