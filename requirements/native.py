"""The native build: modules of the hot path, compiled by mypyc from the same sources that an interpreter runs.

    RAFTKV_NATIVE=1 pip wheel .    a wheel for this platform and this Python
    make native                    that wheel, and its libraries beside the sources of this checkout
    make interpreted               takes them away again

Owns the list of what is compiled. A wheel without it has the same sources and runs on every platform; a native one has
them beside its libraries, which are taken first. A call then takes a fifth to 60 % less processor time.

Rules for a module of the list; ``tests/test_native.py`` checks those that a source shows:

- A class that others extend, outside the list, says ``mypyc_attr(allow_interpreted_subclasses=True)``; one without is
  final for them, and Python would find that out only when the first object is made.
- A base of one of its classes is in the same library, unless it is not raftkv's. Nothing extends a class written in C.
- No generator expression is endless: it becomes a list.
- No attribute is found to be None, changed by a call, and read again in the same function: then what mypy concluded is
  asserted. ``extensions`` looks for that in the C, and ends the build.
- Types are what they say: a stand-in is taken where a ``Protocol`` is asked for, and nowhere else. An ``int`` is no
  ``bool``.

Left out: modules that a call does not pass, modules that wait (asyncio's part of a member), and what tests replace.
"""

from __future__ import annotations

import importlib.machinery
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from setuptools import Extension

ROOT = Path(__file__).resolve().parents[1]
GROUP = "raftkv_native"
"""The library that most others share has this name, and is no part of a package."""
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]

_OF_MEMBERS = {
    "raftkv/apply": "applier check compares quotas ranges txn wire",
    "raftkv/raft": "confchange core log read_lease tracker types",
    "raftkv/replica": "codec",
    "raftkv/replica/lease": "graces lessor renewals times",
    "raftkv/replica/node": "applying node proposals reads waits",
    "raftkv/server/services": "kv responder",
    "raftkv/server/streams": "keep_alives",
    "raftkv/replica/watch": "hub index messages piece stream",
    "raftkv/storage": (
        "applied_mark failpoints index key_value mvcc mvcc_range overlay restore revision schema selection"
    ),
    "raftkv/storage/wal": "record segment wal",
}
_OF_CALLS = {
    "raftkv/loop": "cork timers",
    "raftkv/rpc": "framing inbox limits protocol sockets",
    "raftkv/rpc/http2": "connection frames hpack",
    "raftkv/rpc/server": "budget calls core known_heads router stream",
}


def _paths(names_of: dict[str, str]) -> list[str]:
    return [f"{folder}/{name}.py" for folder, names in names_of.items() for name in names.split()]


TOGETHER = _paths(_OF_MEMBERS)
APART = {
    "raftkv_native_rpc": _paths(_OF_CALLS),
    "raftkv_native_peer": ["raftkv/server/peer/transport.py"],
    "raftkv_native_admission": ["raftkv/replica/node/admission.py"],
    "raftkv_native_disk": ["raftkv/replica/node/disk.py"],
    "raftkv_native_client": ["raftkv/rpc/client/core.py", "raftkv/rpc/client/stream.py"],
}
"""Each group compiled for itself, by the name of the library that its modules share: calls across its edge are those of
Python, and stand-ins pass in both directions. Connections and calls are one: services get calls of any class, from
simulators too."""
MODULES = [*TOGETHER, *chain.from_iterable(APART.values())]
"""All files, from the root of the sources."""

BOUND_COMPILE = ["-fno-semantic-interposition"]
BOUND_LINK = ["-Wl,-Bsymbolic"]
"""Calls within a library are bound when it is linked, not looked up in a table: 2 to 4 % of a put. Link-time
optimization brings nothing beside it."""


def extensions() -> list[Extension]:
    """Translate the modules to C.

    Returns:
        What setuptools is to compile.

    Raises:
        SystemExit: there is no compiler, or a function would fail when an attribute that was None is so no more.
    """
    if absent := missing():
        sys.exit(f"the native build needs {absent} (Debian: gcc, libc6-dev, python3-dev)")
    from mypyc.build import mypycify

    packed = ROOT / "raftkv" / "storage"
    if not packed.exists():  # sources copied without links
        packed.symlink_to("../storage")
    build = ROOT / "build"
    for earlier in build.rglob("__native*.c"):  # of modules that were in the list
        earlier.unlink()
    found: list[Extension] = mypycify(TOGETHER, opt_level="3", debug_level="0", multi_file=True, group_name=GROUP)
    for group, names in APART.items():
        path = str(build / group)
        found += mypycify(names, opt_level="3", debug_level="0", multi_file=True, group_name=group, target_dir=path)
    if sys.platform == "linux":
        for extension in found:
            extension.extra_compile_args += BOUND_COMPILE
            extension.extra_link_args += BOUND_LINK
    for generated in sorted(build.rglob("__native*.c")):
        if places := asserted_none(generated.read_text(encoding="utf-8")):
            sys.exit(f"{generated.name}: read again after it was None: {', '.join(places)}")
    return found


def missing() -> str:
    """Return what a compilation would lack; empty: nothing that can be known before it."""
    words = _compiler()
    if shutil.which(words[0]) is None:
        return f"a C compiler, and {words[0]} is not found"
    # One that is there and fails would do so for each module, with pages.
    trial = [*words, "-x", "c", "-fsyntax-only", "-"]
    tried = subprocess.run(trial, input="#include <stdlib.h>\n", capture_output=True, text=True, check=False)
    if tried.returncode:
        why = (tried.stderr.strip() or f"exit status {tried.returncode}").splitlines()[0]
        return f"a C compiler, and {words[0]} compiles nothing: {why}"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"Python's headers, and {header} is not there"


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or str(sysconfig.get_config_var("CC") or "cc"))


def asserted_none(code: str) -> list[str]:
    """Return where the C asserts that an attribute, not the result of a call, is None."""
    places = []
    for found in re.finditer(r'CPy_TypeError\("None", (\w+)\)', code):
        register, before = found[1], code[: found.start()]
        value = before[before.rindex(f" {register} = ") :].partition(";")[0]
        if "->" in value:
            after = code[found.end() :]
            places.append(after[after.index("CPy_AddTraceback(") :].partition(")")[0].replace("CPy_AddTraceback(", ""))
    return places


def libraries() -> list[Path]:
    """Return where the libraries of a checkout are, or would be."""
    return [(ROOT / name).with_suffix(SUFFIX) for name in MODULES] + [_shared(group) for group in (GROUP, *APART)]


def stale() -> list[str]:
    """Return the modules whose library is older than its source."""
    pairs = [(name, (ROOT / name).with_suffix(SUFFIX)) for name in MODULES]
    return [name for name, at in pairs if at.exists() and at.stat().st_mtime < (ROOT / name).stat().st_mtime]


def unpack(wheel: Path) -> None:
    """Lay the libraries of a wheel beside the sources, and the one that they share where this Python finds it."""
    with zipfile.ZipFile(wheel) as packed:
        for at in libraries():
            inside = at.relative_to(ROOT).as_posix() if at.is_relative_to(ROOT / "raftkv") else at.name
            at.unlink(missing_ok=True)  # a process that has the old one open keeps it
            at.write_bytes(packed.read(inside))


def remove() -> None:
    """Take the libraries away."""
    for at in libraries():
        at.unlink(missing_ok=True)


def _shared(group: str) -> Path:
    return Path(sysconfig.get_path("platlib"), f"{group}__mypyc{SUFFIX}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["unpack", wheel]:
            unpack(Path(wheel))
        case ["remove"]:
            remove()
        case _:
            sys.exit("usage: python -m requirements.native unpack WHEEL | remove")
