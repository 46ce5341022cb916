"""Runs h2load and reads what it prints.

    load = h2load.send("http://127.0.0.1:2379/etcdserverpb.KV/Put", body_path, requests=1000, connections=10)
    load.rate, load.data_bytes

h2load counts answers by their HTTP status, and a failed gRPC call is a 200 too: who calls this checks the answers
another way, by the bytes of the bodies for instance.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 600.0
_RATE = re.compile(r"finished in [^,]+, ([0-9.]+) req/s")
_GOOD = re.compile(r"status codes: (\d+) 2xx")
_DATA = re.compile(r"\((\d+)\) data")


@dataclass(frozen=True)
class Load:
    """What a run of h2load measured.

    Attributes:
        rate: answered requests a second.
        data_bytes: bodies of all answers together.
    """

    rate: float
    data_bytes: int


def is_installed() -> bool:
    """Tell whether this machine has it."""
    return shutil.which("h2load") is not None


def send(url: str, body: Path, *, requests: int, connections: int, streams: int = 1, flags: Sequence[str] = ()) -> Load:
    """POST the body so many times.

    Raises:
        SystemExit: not all of them were answered with a status of 2xx.
    """
    command = ["h2load", "-t1", f"-c{connections}", f"-m{streams}", f"-n{requests}", "-d", str(body), *flags, url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    return parse(done.stdout + done.stderr, requests)


def parse(text: str, requests: int) -> Load:
    """Read its output. SystemExit as in ``send``."""
    rate, good, data = _RATE.search(text), _GOOD.search(text), _DATA.search(text)
    if rate is None or good is None or data is None or int(good[1]) != requests:
        raise SystemExit(f"bench: h2load: {text}")
    return Load(float(rate[1]), int(data[1]))
