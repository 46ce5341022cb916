"""What is installed: locks that fit setup.py, lower bounds without known holes, no way from bytes to code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.test_packaging import extras

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "requirements"
PIN = re.compile(
    r"^([A-Za-z0-9._-]+)==([^\s;\\]+)(?: ; [^\\]+)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE
)

FLOORS = {
    # package: (oldest version that may be asked for, why)
    "h11": ("0.16", "CVE-2025-43859: chunks that a proxy reads otherwise (request smuggling)"),
    "protobuf": ("4.25.8", "CVE-2025-4565: unbounded recursion of the parser in Python"),
    "cryptography": ("46.0.5", "CVE-2026-26007: points outside of the subgroup; CVE-2024-12797: its OpenSSL"),
    "PyJWT": ("2.12", "CVE-2026-32597: unknown critical headers; CVE-2024-53861: a part of an issuer's name matched"),
    "PyYAML": ("5.4", "CVE-2020-14343: code run by the full loader (raftkv uses the safe one)"),
    "lmdb": ("0.98", "CVE-2019-16224 to -16228: files made to crash the reader"),
    "grpcio": ("1.67.1", "CVE-2024-11407, CVE-2024-7246: corruption, HPACK table poisoned by a proxy (tests only)"),
    "pytest": ("9.0.3", "CVE-2025-71176: a directory in /tmp that others can guess (tests only)"),
    "torch": ("2.6", "CVE-2025-32434: code run by torch.load(weights_only=True)"),
    "setuptools": ("78.1.1", "CVE-2025-47273: files written outside of the target; CVE-2024-6345 (build only)"),
}


def _asked() -> dict[str, list[str]]:
    """Extra to requirements, as setup.py says; ``""``: what every installation needs, ``build``: to build."""
    build = re.search(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert build is not None
    return {**extras(), "build": re.findall(r'"([^"]+)"', build[1])}


def _lock(name: str) -> dict[str, list[str]]:
    """Package to its versions: more than one where they differ by Python."""
    found: dict[str, list[str]] = {}
    for package, version, _ in PIN.findall((LOCKS / name).read_text(encoding="utf-8")):
        found.setdefault(canonicalize_name(package), []).append(version)
    return found


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        ("runtime.lock", ("", "backup", "checkpoint", "dns")),
        ("native.lock", ("", "native")),
        ("ci.lock", ("", "dev", "build")),
    ],
)
def test_every_requirement_is_locked_at_a_version_that_it_allows(lock: str, extras: tuple[str, ...]) -> None:
    asked, locked = _asked(), _lock(lock)
    for text in (text for extra in extras for text in asked[extra]):
        requirement = Requirement(text)
        versions = locked.get(canonicalize_name(requirement.name), [])
        assert versions, f"{text} is not in {lock}: run make lock"
        assert all(requirement.specifier.contains(version) for version in versions), f"{text}: {versions}: make lock"


def test_clients_of_others_are_locked_at_the_versions_of_their_lists() -> None:
    lists = sorted((ROOT / "tests" / "foreign" / "packages").glob("*.txt"))
    assert {path.stem for path in lists} == {path.stem for path in (LOCKS / "foreign").glob("*.lock")}
    for path in lists:
        asked = [Requirement(line) for line in path.read_text(encoding="utf-8").splitlines() if re.match(r"\w", line)]
        locked = _lock(f"foreign/{path.stem}.lock")
        for one in asked:
            assert all(map(one.specifier.contains, locked[canonicalize_name(one.name)])), f"{path.name}: make lock"


@pytest.mark.parametrize(
    "lock",
    [
        "runtime.lock",
        "native.lock",
        "ci.lock",
        "oldest.lock",
        *(f"foreign/{path.name}" for path in sorted(LOCKS.glob("foreign/*"))),
    ],
)
def test_a_lock_has_pins_with_hashes_and_nothing_else(lock: str) -> None:
    text = (LOCKS / lock).read_text(encoding="utf-8")
    rest = re.sub(r"^#.*\n", "", PIN.sub("", text), flags=re.MULTILINE)
    assert rest == "", "no names of hosts, no options, nothing without a hash"
    assert PIN.findall(text)


def test_containers_install_the_versions_of_ci() -> None:
    tested = _lock("ci.lock")
    for lock in map(_lock, ("runtime.lock", "native.lock")):
        assert {name: tested.get(name) for name in lock} == lock
    (oldest,) = _lock("oldest.lock")["protobuf"]
    floor = next(Requirement(text) for text in _asked()[""] if text.startswith("protobuf"))
    assert floor.specifier.contains(oldest)


@pytest.mark.parametrize("package", FLOORS)
def test_no_version_with_a_known_hole_is_asked_for(package: str) -> None:
    floor, why = FLOORS[package]
    texts = {text for texts in _asked().values() for text in texts if Requirement(text).name == package}
    assert texts, f"{package} is not asked for any more"
    for text in texts:
        bounds = [one.version for one in Requirement(text).specifier if one.operator in (">=", "==")]
        assert bounds, text
        assert max(map(Version, bounds)) >= Version(floor), why


def _calls(name: str) -> set[str]:
    """The functions that a file calls, as they are written."""
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


@pytest.mark.long
def test_no_bytes_become_code() -> None:
    """Nothing that a peer, a client, a file or a registry says is unpickled, evaluated or loaded unsafely."""
    listed = subprocess.run(
        ["git", "ls-files", "raftkv", "storage"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    names = [name for name in listed if name.endswith(".py") and not (ROOT / name).is_symlink()]
    forbidden = re.compile(
        r"(eval|exec|compile|__import__|yaml\.(load|unsafe_load|full_load|load_all)|os\.(system|popen)"
        r"|(pickle|marshal|shelve|dill|cloudpickle|joblib)\.\w+|tarfile\.open|\w+\.extractall|tempfile\.mktemp)"
    )
    found = {name: calls for name in names if (calls := {call for call in _calls(name) if forbidden.fullmatch(call)})}
    assert found == {}


def test_an_audit_without_answers_is_not_clean(tmp_path: Path) -> None:
    """pip-audit itself ends with 0 for packages that it could not ask about."""
    program = tmp_path / "pip-audit"
    answers = {
        2: '{"dependencies": [{"name": "a", "skip_reason": "not found"}, {"name": "b", "skip_reason": "not found"}]}',
        0: '{"dependencies": [{"name": "a", "version": "1", "vulns": []}]}',
        1: '{"dependencies": [{"name": "a", "version": "1", "vulns":'
        ' [{"id": "X-1", "fix_versions": ["2"], "aliases": ["CVE-1"]}]}]}',
    }
    for status, answer in answers.items():
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n", encoding="utf-8")
        program.chmod(0o755)
        done = _audit(tmp_path)
        assert done.returncode == status, done.stderr
        assert ("NOTHING was audited" in done.stderr) == (status == 2)
        assert ("a 1: X-1 (CVE-1), fixed in 2" in done.stdout) == (status == 1)
    program.unlink()
    assert _audit(tmp_path).returncode == 2


def _audit(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, LOCKS / "audit.py", "x.lock"],
        env={"PATH": f"{path}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
