"""A worker for the tests of ``run exec``: ``python run_worker.py DIRECTORY WHAT``.

It writes its environment to ``DIRECTORY/<epoch>-<rank>.json``, then does what its arguments say:

- ``fail``: in epoch 1 rank 3 kills itself once all four have written, the others wait; later all end well;
- ``collateral``: in epoch 1 rank 1 kills itself, and rank 0 fails because of that; later both end well;
- ``exit``: rank 0 ends with 7, the others wait;
- ``wait``: starts a child in a session of its own, and waits; SIGTERM is noted in ``<epoch>-<rank>.term``;
- ``signals``: notes each signal that comes in ``<epoch>-<rank>.<its name>``; SIGTERM ends it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

directory, what = sys.argv[1:]
epoch, rank = os.environ["RAFTKV_EPOCH"], os.environ["RANK"]
name = os.path.join(directory, f"{epoch}-{rank}")
child = 0


def note(suffix: str, **more: int) -> None:
    with open(f"{name}.new", "w", encoding="utf-8") as file:
        json.dump({**os.environ, "pid": os.getpid(), **more}, file)
    os.rename(f"{name}.new", f"{name}.{suffix}")


def lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def on_term(number: int, frame: object) -> None:
    note("term")
    os._exit(0)


if what == "wait":
    signal.signal(signal.SIGTERM, on_term)
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "import threading; threading.Event().wait()"], start_new_session=True
    ).pid
if what == "signals":
    for one in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, one), lambda number, frame: note(signal.Signals(number).name))
    signal.signal(signal.SIGTERM, on_term)
note("json", child=child)
if what == "fail" and epoch == "1" and rank == "3":
    pause = threading.Event()
    while len([name for name in os.listdir(directory) if name.endswith(".json")]) < 4:
        pause.wait(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
if what == "collateral" and epoch == "1":
    other = os.path.join(directory, "1-1.json" if rank == "0" else "1-0.json")
    pause = threading.Event()
    while not os.path.exists(other):
        pause.wait(0.02)
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    with open(other, encoding="utf-8") as file:
        pid = json.load(file)["pid"]
    while lives(pid):
        pause.wait(0.001)
    sys.exit(1)
if what == "exit" and rank == "0":
    sys.exit(7)
if what in ("wait", "exit", "signals") or (what == "fail" and epoch == "1"):
    threading.Event().wait()
