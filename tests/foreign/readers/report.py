"""What a reader of large answers is asked and what it tells; it runs in a foreign environment on the standard library.

The last word of the command line is JSON: `{"host": ..., "port": ..., "timeout_s": ..., "reads": [[kind, prefix,
revision, count], ...]}`. For each read it prints one line: how many values came and the SHA-256 of all their bytes.

    range large/ 0 3      the values of the keys below large/, in one answer
    watch large/ 17 3     the first three events below large/ since revision 17
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Task(NamedTuple):
    """One read."""

    host: str
    port: int
    timeout_s: int
    prefix: str
    revision: int
    count: int


def run(ranged: Callable[[Task], Iterable[bytes]], watched: Callable[[Task], Iterable[bytes]]) -> None:
    """Do every read that the command line asks for."""
    asked = json.loads(sys.argv[-1])
    for kind, prefix, revision, count in asked["reads"]:
        task = Task(asked["host"], asked["port"], asked["timeout_s"], prefix, revision, count)
        digest, values = hashlib.sha256(), 0
        for value in (ranged if kind == "range" else watched)(task):
            digest.update(value)
            values += 1
        print(json.dumps([values, digest.hexdigest()]), flush=True)
