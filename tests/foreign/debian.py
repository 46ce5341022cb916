"""etcd 3.5.30, the second oracle: two packages of a newer suite of Debian, unpacked into a folder, installed nowhere.

    $ python -m tests.foreign.debian          # part of `make foreign`
    newer_etcd("etcdutl")                     # where a program is; None: the packages could not be had

The machine's own apt fetches them, from the mirror that it is set up with, into folders of its own: neither its lists
nor its packages change, and it needs no rights. Versions and hashes stand in ``packages/etcd.debian``. A suite under
way drops a version when the next one comes: then there is no second oracle, and no test with it, until the file is
changed.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

HOME: Final = Path(__file__).resolve().parents[2] / ".venv" / "foreign" / "etcd"
LIST: Final = Path(__file__).resolve().parent / "packages" / "etcd.debian"
STAMP: Final = HOME / "installed-from"
_KEYS: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
_TARGETS: Final = ("indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian")


class UnavailableError(Exception):
    """The packages cannot be had on this machine, or no more; the text says why."""


def newer_etcd(program: str) -> str | None:
    """Return the path of ``etcd``, ``etcdctl`` or ``etcdutl`` 3.5.30; None: they are not installed."""
    path = HOME / "bin" / program
    return str(path) if STAMP.exists() and path.exists() else None


def _apt(*words: str, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(str(error)) from None
    if done.returncode != 0:
        raise UnavailableError((done.stderr or done.stdout).strip().splitlines()[-1])
    return done.stdout


def install() -> None:
    """Fetch, check and unpack what ``packages/etcd.debian`` names, unless that is done.

    Raises:
        UnavailableError: it cannot be had.
    """
    wanted = LIST.read_text(encoding="utf-8")
    if STAMP.exists() and STAMP.read_text(encoding="utf-8") == wanted:
        return
    suite, *lines = [line for line in wanted.splitlines() if not line.startswith("#")]
    packages = dict(line.split() for line in lines)
    mirrors = [uri for uri in _apt("apt-get", *_TARGETS).split() if uri.rstrip("/").endswith("/debian")]
    if not mirrors:
        raise UnavailableError("apt knows no mirror of Debian: run apt-get update")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for sub in ("lists/partial", "cache/archives/partial", "files", "root"):
            (folder / sub).mkdir(parents=True)
        (folder / "sources.list").write_text(f"deb [signed-by={_KEYS}] {mirrors[0]} {suite} main\n")
        own = [f"-oDir::Etc::SourceList={folder}/sources.list", "-oDir::Etc::SourceParts=/dev/null"]
        own += [f"-oDir::State::Lists={folder}/lists", f"-oDir::Cache={folder}/cache", "-oAPT::Sandbox::User="]
        _apt("apt-get", *own, "update", "-q")
        _apt("apt-get", *own, "download", "-q", *packages, cwd=folder / "files")
        _unpack(folder, set(packages.values()))
    STAMP.write_text(wanted, encoding="utf-8")


def _unpack(folder: Path, digests: set[str]) -> None:
    files = sorted((folder / "files").glob("*.deb"))
    found = {hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    if found != digests:
        raise UnavailableError(f"the files have other hashes than {LIST.name}: {sorted(found)}")
    for file in files:
        _apt("dpkg-deb", "-x", str(file), str(folder / "root"))
    shutil.rmtree(HOME, ignore_errors=True)
    shutil.copytree(folder / "root" / "usr" / "bin", HOME / "bin")


def main() -> int:
    """Install; what cannot be had is said, and is no failure."""
    try:
        install()
    except UnavailableError as error:
        print(f"no second oracle, etcd 3.5.30: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
