"""Nodes of torch's own dynamic rendezvous (c10d) in one process, for `bench.rdzv_scale` to stand beside.

    python -m bench.rdzv_scale_c10d '{"nodes": 64, "rounds": 1, "limit_s": 60}'

One TCPStore, and a handler with a connection of its own on each thread: what `torchrun --rdzv-backend=c10d` has,
without the processes. Prints one JSON object: seconds until the last node is in the world, for each round, and the
store calls of the rendezvous. The last-call time does not count: the maximum is always there.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from typing import Any

CALLS: Counter[str] = Counter()


def make_handler(port: int, nodes: int, limit_s: float) -> Any:
    """A handler as torch makes it, its calls of the store counted."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    store = TCPStore("127.0.0.1", port, is_master=False, multi_tenant=True)
    backend = C10dRendezvousBackend(store, "scale")
    for name in ("get_state", "set_state"):
        setattr(backend, name, _counted(name, getattr(backend, name)))
    parameters = RendezvousParameters(
        "c10d", f"127.0.0.1:{port}", "scale", nodes, nodes, "127.0.0.1", join_timeout=int(limit_s)
    )
    return create_handler(store, backend, parameters)


def _counted(name: str, call: Any) -> Any:
    def counted(*arguments: Any) -> Any:
        CALLS[name] += 1
        return call(*arguments)

    return counted


def measure(nodes: int, rounds: int, limit_s: float) -> dict[str, Any]:
    """All rounds; stops at the first that takes too long."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    handlers = [make_handler(server.port, nodes, limit_s) for _ in range(nodes)]
    measured: list[dict[str, Any]] = []
    for _ in range(rounds):
        CALLS.clear()
        started = time.monotonic()
        threads = [threading.Thread(target=handler.next_rendezvous, daemon=True) for handler in handlers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(started + limit_s - time.monotonic(), 0.0))
        finished = not any(thread.is_alive() for thread in threads)
        seconds = round(time.monotonic() - started, 3)
        measured.append({"seconds": seconds, "finished": finished, "calls_per_node": round(CALLS.total() / nodes, 2)})
        if not finished:
            break
    return {"nodes": nodes, "rounds": measured}


def main() -> None:
    import os

    given = json.loads(sys.argv[1])
    print(json.dumps(measure(given["nodes"], given["rounds"], given["limit_s"])), flush=True)
    os._exit(0)  # its keep-alive timers would go on


if __name__ == "__main__":
    main()
