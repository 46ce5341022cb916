"""A member without its sockets: from an admitted request to the log, the database and the response.

This package connects the pure parts (``raft``, ``apply``, ``storage``) with the ports of ``server``. It defines the
order of operations, and makes the decisions of a single member (when a lease ends, which write finds no space).

    server: ports, services, authentication             server/peer: the other members
              |  submit, propose, read                          |  ^
              v                                        received v  | send (``Devices.peers``)
    watch, lease, membership ---> node <------------------------+--+
                                   |   one turn: Ready -> disk -> send -> apply -> respond -> advance
                                   v
                       raft       apply -> storage       disk (the log)

    replica = Replica(config, durable, Devices(disk, transport, cork, ids, settings), on_fatal, on_removed)
    replica.connect(...)                 # every subscription between the parts
    replica.start()

Invariants:

- No module binds or dials: messages are sent with the ``Sender`` passed to the replica, databases and queries for other
  members with the ``Channel`` that it returns. Nothing imports ``raftkv.server``.
- One loop, no locks: threads write the log and the database and read large files; results return to the loop.
- An exception in the loop stops the member; an exception in a read affects only that read, unless it found damage.
- The simulator (``tests/sim``) runs the same ``Replica`` on a simulated disk, network and clock.

Read ``replica``, then ``node/node``, then one subject: ``lease``, ``watch``, ``snapshots``, ``membership``,
``maintenance`` (damage, hashes, defragmentation). ``codec`` encodes the messages between members.

Not here: the meaning of requests (``apply``), consensus (``raft``), files (``storage``), gRPC services, HTTP and TLS.
"""
