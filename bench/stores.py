"""torch's own TCPStore, the gateway and ``raftkv.torch.Store``, one beside the other on this machine.

    python -m bench.stores [--calls 500] [--json]

For each: calls a second of ``set`` (TCPStore's are not answered: so many, then one ``get``), ``get`` and ``add`` by one
client, and milliseconds from a ``set`` to the return of a ``wait`` of another client, the median. raftkv is three real
members of one machine with fsync; TCPStore is one process that keeps everything in memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore

import raftkv
from raftkv.torch import Store

TIMEOUT = timedelta(seconds=60)
WAITS = 30


def rate(calls: int, call: Callable[[int], object], last: Callable[[], object] = lambda: None) -> float:
    begin = time.perf_counter()
    for number in range(calls):
        call(number)
    last()
    return round(calls / (time.perf_counter() - begin), 1)


def wake_ms(writer: Any, reader: Any) -> float:
    """Median time from a write to the end of a wait for it."""
    times: list[float] = []
    ready = threading.Semaphore(0)
    woken = threading.Semaphore(0)

    def wait() -> None:
        for number in range(WAITS):
            ready.release()
            reader.wait([f"wake/{number}"])
            times.append(time.perf_counter())
            woken.release()

    thread = threading.Thread(target=wait)
    thread.start()
    took = []
    for number in range(WAITS):
        ready.acquire()
        writer.add("pause", 1)  # by now the wait is there
        begin = time.perf_counter()
        writer.set(f"wake/{number}", "")
        woken.acquire()
        took.append((times[-1] - begin) * 1000)
    thread.join()
    return round(statistics.median(took), 2)


def measure(name: str, writer: Any, reader: Any, calls: int) -> dict[str, Any]:
    value = "v" * 170  # as gloo's addresses
    return {
        "store": name,
        "set_per_s": rate(calls, lambda i: writer.set(f"key/{i}", value), lambda: writer.get(f"key/{calls - 1}")),
        "get_per_s": rate(calls, lambda i: writer.get(f"key/{i}")),
        "add_per_s": rate(calls, lambda _: writer.add("counter", 1)),
        "wake_ms": wake_ms(writer, reader),
    }


def clients(port: int) -> list[Any]:
    return [PrefixStore("bench", TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)) for _ in range(2)]


def run(calls: int) -> list[dict[str, Any]]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    rows = [measure("TCPStore", *clients(server.port), calls)]
    with raftkv.local(3) as cluster:
        endpoints = ",".join(cluster.endpoints)
        command = [sys.executable, "-m", "raftkv", "tcpstore-gateway", "--listen=127.0.0.1:0"]
        gateway = subprocess.Popen([*command, f"--endpoints={endpoints}"], stdout=subprocess.PIPE, text=True)
        try:
            port = int(gateway.stdout.readline().split(",")[0].rpartition(":")[2])
            rows.append(measure("tcpstore-gateway", *clients(port), calls))
        finally:
            gateway.terminate()
            gateway.communicate()
        with Store(endpoints, "bench", TIMEOUT) as writer, Store(endpoints, "bench", TIMEOUT) as reader:
            rows.append(measure("raftkv.torch.Store", writer, reader, calls))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--json", action="store_true", help="a line for each store")
    options = parser.parse_args()
    rows = run(options.calls)
    if options.json:
        print(*map(json.dumps, rows), sep="\n")
        return
    print(f"{'':20}{'set/s':>12}{'get/s':>12}{'add/s':>12}{'wake ms':>10}")
    for row in rows:
        print(
            f"{row['store']:20}" + "".join(f"{row[key]:>12,.0f}" for key in ("set_per_s", "get_per_s", "add_per_s")),
            end="",
        )
        print(f"{row['wake_ms']:>10.2f}")


if __name__ == "__main__":
    main()
