"""One member of a cluster: a process with one event loop, from its sockets to its files.

Owns everything between the pure parts (``raft``, ``apply``, ``storage``) and the world: who is listened to, in which
order things happen, and what this member alone decides (when a lease ends, which write finds no room).

    clients ---- rpc ----> services  lease  watch  recipes  http         other members
                              |        |      |       |                      |  ^
                              | submit, propose, read |                      v  |
                              +--------+---> node <---+------------------- peer, snapshots
                                              |   one turn: Ready -> disk -> send -> apply -> respond -> advance
                                              v
                                  raft       apply -> storage       log (WAL)

    start    main -> member: read the disk, open a replica, put ports around it, listen, take part, serve clients
    stop     hand leadership over, finish calls under way, leave, close the disk

Read ``replica`` and ``node`` first, then the way of one request: ``services/kv`` (a Put), ``lease``, ``watch``.

Laws:

- One loop, no locks: threads write the log and the database and read large files; results come back to the loop.
- No turn of the loop is longer than 50 ms for any request of one client (``loop.turns``, ``loop.scheduler``).
- Nothing is acknowledged before the fsync that it depends on.
- An exception in the loop stops the member; one in serving a read is that read's alone, unless it found damage.
- Parts know each other through their constructors; every subscription among them is made in ``Replica.connect``.

Example::

    member = Member(config)              # on the running loop; parts are made and connected, nothing has started
    await member.run()                   # until member.stop()
    assert member.failure is None

Leaves out: what requests mean (``raftkv.apply``), consensus (``raftkv.raft``), files (``raftkv.storage``), bytes on the
wire (``raftkv.rpc``). Nothing here imports a client.
"""

from typing import Final

ETCD_VERSION: Final = "3.7.1"
"""The etcd version whose behaviour a member shows: clients choose what to send by it."""
