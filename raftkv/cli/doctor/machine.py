"""This machine: its clock, its limits and memory, and the versions of what is installed."""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from raftkv import __version__
from raftkv.cli.doctor.judgement import Finding, failure, ok, skipped, warning
from raftkv.cli.output.printer import human_size

FILES_MIN: Final = 4096
MEMORY_MIN_BYTES: Final = 512 * 1024**2
_TIME_ERROR: Final = 5
_TIMEX_BYTES: Final = 512
_MAX_ERROR_AT: Final = 24
_LIBRARIES: Final = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*([^;]*)(;.*)?")


def check_machine(root: Path = Path("/")) -> list[Finding]:
    """Look at this machine.

    Arguments:
        root: where ``proc`` and ``sys`` are.
    """
    return [
        check_clock(_adjtimex),
        check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        _check_memory(root),
        _check_swap(root),
        _check_huge_pages(root),
        *check_versions(sys.version_info[:2], _requirements(), importlib.metadata.version),
        _check_crc(),
    ]


def _adjtimex() -> tuple[int, int]:
    """State of the kernel's clock and its largest error in microseconds; nothing is set."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
    state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    return state, int.from_bytes(buffer.raw[_MAX_ERROR_AT : _MAX_ERROR_AT + 8], sys.byteorder, signed=True)


def check_clock(adjtimex: Callable[[], tuple[int, int]]) -> Finding:
    """Look whether the clock is kept right.

    Arguments:
        adjtimex: returns the state of the kernel's clock, and its largest error in microseconds.
    """
    subject = "clock: synchronised"
    try:
        state, error_us = adjtimex()
    except (OSError, AttributeError):
        return skipped(subject, "this system does not tell")
    if state < 0:
        return skipped(subject, "the kernel does not tell")
    if state == _TIME_ERROR:
        advice = "run chrony or systemd-timesyncd: certificates, tokens and logs go by the clock (leases do not)"
        return warning(subject, "no", advice)
    return ok(subject, f"yes, within {error_us / 1000:.3g} ms")


def check_files(hard: int) -> Finding:
    """Look how many descriptors a member can have: it raises its own limit to the hard one.

    Arguments:
        hard: limit; negative: none.
    """
    subject = "limit: open files"
    figure = "none" if hard < 0 else f"{hard} (of this shell)"
    if 0 <= hard < FILES_MIN:
        return warning(subject, figure, "each connection takes one: LimitNOFILE=65536 in the unit, or ulimit -Hn")
    return ok(subject, figure)


def _fields(path: Path) -> dict[str, int]:
    """Figures of a file such as ``meminfo``, in bytes."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdigit()}


def _check_memory(root: Path) -> Finding:
    subject = "memory"
    try:
        found = _fields(root / "proc/meminfo")
    except OSError:
        return skipped(subject, "this system does not tell")
    limit, available = cgroup_limit(root), found.get("MemAvailable", 0)
    shown = f"{human_size(available)} available of {human_size(found.get('MemTotal', 0))}"
    if limit is not None:
        shown += f", limit of the control group {human_size(limit)}"
        available = min(available, limit)
    if available < MEMORY_MIN_BYTES:
        return warning(subject, shown, "the index of all keys is in memory: give a member 512 MiB and 300 bytes a key")
    return ok(subject, shown)


def cgroup_limit(root: Path) -> int | None:
    """Return the least memory that a control group above this process may have; None: as much as there is."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    group = next((line[3:] for line in lines if line.startswith("0::")), "/")
    base = root / "sys/fs/cgroup"
    here = base / group.strip("/")
    limits: list[int] = []
    for folder in (here, *here.parents):
        if base not in (folder, *folder.parents):
            break
        try:
            text = (folder / "memory.max").read_text(encoding="ascii").strip()
        except OSError:
            continue
        limits += [int(text)] if text.isdigit() else []
    return min(limits, default=None)


def _check_swap(root: Path) -> Finding:
    subject = "swap"
    try:
        found = _fields(root / "proc/meminfo")
    except OSError:
        return skipped(subject, "this system does not tell")
    used = found.get("SwapTotal", 0) - found.get("SwapFree", 0)
    if used > MEMORY_MIN_BYTES:
        advice = "a member that is swapped out misses heartbeats: give the machine memory, or swapoff"
        return warning(subject, f"{human_size(used)} in use", advice)
    return ok(subject, f"{human_size(used)} in use")


def _check_huge_pages(root: Path) -> Finding:
    subject = "transparent huge pages"
    try:
        text = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return skipped(subject, "this system does not tell")
    chosen = text[text.find("[") + 1 : text.find("]")]
    if chosen == "always":
        advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: compacting them pauses processes"
        return warning(subject, chosen, advice)
    return ok(subject, chosen)


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("raftkv") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def check_versions(python: tuple[int, ...], requirements: list[str], version_of: Callable[[str], str]) -> list[Finding]:
    """Compare what is installed with what raftkv asks for.

    Arguments:
        python: version of the interpreter.
        requirements: of raftkv, as its metadata has them.
        version_of: returns the version of a package, or raises ``PackageNotFoundError``.
    """
    found = [ok("raftkv", f"{__version__} on Python {platform.python_version()}")]
    if python < (3, 11):
        found = [failure("raftkv", f"Python {'.'.join(map(str, python))}", "install Python 3.11 or later")]
    wrong: dict[str, str] = {}
    names = 0
    for requirement in requirements:
        match = _LIBRARIES.fullmatch(requirement.strip())
        if match is None or "extra" in (match[3] or ""):
            continue
        names += 1
        if fault := _fault(match[1], match[2], version_of):
            wrong[match[1]] = fault
    if wrong:
        advice = f"pip install --upgrade {' '.join(sorted(wrong))}"
        found.append(failure("libraries", "; ".join(f"{name} {text}" for name, text in wrong.items()), advice))
    else:
        found.append(ok("libraries", f"{names} as asked for"))
    return found


def _fault(name: str, wanted: str, version_of: Callable[[str], str]) -> str:
    try:
        version = version_of(name)
    except importlib.metadata.PackageNotFoundError:
        return "is missing"
    lowest = re.search(r">=\s*([0-9.]+)", wanted)
    if lowest and _numbers(version) < _numbers(lowest[1]):
        return f"{version} is older than {lowest[1]}"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _check_crc() -> Finding:
    import google_crc32c

    if google_crc32c.implementation == "c":
        return ok("checksums", "CRC32C of the processor")
    return warning("checksums", "CRC32C in Python: slow", "install a wheel of google-crc32c for this platform")
