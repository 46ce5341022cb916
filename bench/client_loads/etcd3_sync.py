"""python etcd3: blocking calls from threads that share one client, as its documentation has it."""

from __future__ import annotations

import etcd3
from load import VALUE, Load


def main() -> None:
    load = Load.from_arguments()
    host, port = load.address
    client = etcd3.client(host=host, port=port)
    calls = {"put": lambda key: client.put(key, VALUE), "get": client.get}
    load.run_threads(calls[load.operation])


main()
