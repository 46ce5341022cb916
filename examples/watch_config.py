"""A program that follows its configuration: read once, then watched from that very revision on.

Nothing is missed between the read and the watch, nor when the member it is connected to dies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import raftkv


def follow(kv: raftkv.Client, config: dict[str, str], changed: threading.Event) -> None:
    """Keep ``config`` equal to the keys below config/, until the key config/stop appears."""
    page = kv.range("config/", prefix=True)
    config.update({item.key.decode(): item.text for item in page})
    changed.set()
    for event in kv.watch("config/", prefix=True, start_revision=page.revision + 1):
        name = event.key.decode()
        if event.type == "DELETE":
            config.pop(name, None)
        else:
            config[name] = event.kv.text
        print(event.type.lower(), name, event.kv.text)
        changed.set()
        if name == "config/stop":
            return


def insist(write: Callable[[], object]) -> None:
    """Write what may be written twice: when a leader dies, it is unknown if its last writes were done."""
    for attempt in range(10):
        try:
            write()
        except raftkv.StatusError:
            if attempt == 9:
                raise
        else:
            return


with raftkv.local(size=3) as cluster, cluster.connect() as kv:
    kv.put("config/log-level", "info")
    config: dict[str, str] = {}
    changed = threading.Event()
    follower = threading.Thread(target=follow, args=(kv, config, changed))
    follower.start()
    changed.wait()
    print("started with", config)

    kv.put("config/log-level", "debug")
    cluster.members[0].kill()
    insist(lambda: kv.put("config/workers", "8"))
    insist(lambda: kv.delete("config/log-level"))
    insist(lambda: kv.put("config/stop", "now"))
    follower.join()
    print("ended with", config)
