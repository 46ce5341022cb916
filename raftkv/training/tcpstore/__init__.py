"""torch's TCPStore on raftkv: its operations on keys, and a daemon that speaks its protocol.

::

    raftkv tcpstore-gateway --listen 127.0.0.1:29400 --endpoints h1:2379,h2:2379,h3:2379
    torchrun --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29400 --rdzv-conf=is_host=0 ...

    wire       parses requests, encodes answers; pure
    gateway    the daemon: connections, their memory limits, the lifetime of the keys
    store      the operations: exactly-once writes, ordered per key; waits

``store`` implements the operations for the gateway and for ``raftkv.torch.Store``, and describes the layout of the
keys.

Invariants:

1. A write happens exactly once, even if the member that got it fails: its txn also marks a key of its writer.
2. A wait reads once and watches from the next revision on, so nothing is polled and no event is missed.
3. The memory that one client, and all clients together, use in the gateway is bounded: the connection that uses most is
   closed.
4. The keys live as long as any gateway of that name; the next gateway that finds no other deletes them.

There is no authentication (TCPStore has none, so a gateway should listen only where its clients are), and torch is not
imported.
"""
