"""A member without its sockets: from a request that was let in to the log, the database and the answer.

Owns everything between the pure parts (``raft``, ``apply``, ``storage``) and the ports of ``server``: in which order
things happen, and what this member alone decides (when a lease ends, which write finds no room).

    server: ports, services, users at the door          server/peer: the other members
              |  submit, propose, read                          |  ^
              v                                        received v  | send (``Devices.peers``)
    watch, lease, membership ---> node <------------------------+--+
                                   |   one turn: Ready -> disk -> send -> apply -> respond -> advance
                                   v
                       raft       apply -> storage       disk (the log)

    replica = Replica(config, durable, Devices(disk=disk, peers=transport, cork=cork, ids=ids), on_fatal, on_removed)
    replica.connect(...)                 # every subscription among the parts
    replica.start()

Laws:

- No module binds or dials: messages leave by the ``Sender`` that the replica is given, databases and questions for
  other members by the ``Channel`` that it returns. Nothing imports ``raftkv.server``.
- One loop, no locks: threads write the log and the database and read large files; results come back to the loop.
- An exception in the loop stops the member; one in serving a read is that read's alone, unless it found damage.
- The simulator (``tests/sim``) opens the same ``Replica`` on a simulated disk, network and clock.

Read ``replica``, then ``node/node``, then the subject: ``lease``, ``watch``, ``snapshots``, ``membership``,
``maintenance`` (damage, hashes, defragmentation). ``codec`` is the bytes of messages between members.

Leaves out: what requests mean (``apply``), consensus (``raft``), files (``storage``), gRPC services, HTTP and TLS.
"""
