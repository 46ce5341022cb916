"""torch's TCPStore on raftkv: its operations on keys, and a daemon that speaks its protocol.

::

    raftkv tcpstore-gateway --listen 127.0.0.1:29400 --endpoints h1:2379,h2:2379,h3:2379
    torchrun --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29400 --rdzv-conf=is_host=0 ...

    wire       bytes to requests, answers to bytes; pure
    gateway    the daemon: connections, what they may hold together, how long the keys live
    store      what an operation means: writes exactly once, in order of each key; waits

``store`` is what an operation means, for the gateway and for ``raftkv.torch.Store`` alike. Layout of the keys: there.

Invariants:

1. A write happens exactly once, even if the member that was asked fails: its txn marks a key of its writer.
2. A wait reads once and follows from the next revision on: nothing is polled, and no event falls between.
3. The bytes that one client makes the gateway hold are bounded, and those of all clients: the largest holder is closed.
4. The keys live as long as one gateway of that name, and are deleted by the next that finds none.

Leaves out authentication (TCPStore has none: a gateway listens where its clients are) and torch itself, which nothing
here imports.
"""
