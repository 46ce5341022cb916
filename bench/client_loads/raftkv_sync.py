"""raftkv: blocking calls from threads that share one client."""

from __future__ import annotations

from load import VALUE, Load

import raftkv


def main() -> None:
    load = Load.from_arguments()
    with raftkv.connect(load.endpoint) as client:
        calls = {"put": lambda key: client.put(key, VALUE), "get": client.get}
        load.run_threads(calls[load.operation])


main()
