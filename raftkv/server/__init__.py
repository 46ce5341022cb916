"""The outer part of a member: its ports, and the services for clients, other members and operators.

Owns who may connect and how requests are admitted; ``raftkv.replica`` decides everything after that.

    clients ---- rpc ----> services  streams  recipes  maintenance  http, gateway, ui        other members
                              |         |        |         |                                   |  ^
                            auth: who calls, and may they? audit, tracing, metrics             v  |
                              |  submit, propose, read                                        peer: transport, service
                              +---------+--------+----> replica <-------------------------------+

    start    main -> member: read the disk, open a replica, open ports, listen, join consensus, serve clients
    stop     hand leadership over, finish open calls, leave consensus, close the disk

Read ``member`` first, then the path of one request: ``services/kv`` (a Put), ``streams/lease``, ``streams/watch``.

Laws:

- No request of a client makes a loop turn longer than 50 ms (``loop.turns``, ``loop.scheduler``).
- Nothing is acknowledged before the fsync that it depends on.
- All subscriptions between parts of a replica are made in ``Replica.connect``.

Example::

    member = Member(config)              # on the running loop; creates and connects the parts, starts nothing
    await member.run()                   # until member.stop()
    assert member.failure is None

Leaves out: the meaning of requests (``raftkv.apply``), bytes on the wire (``raftkv.rpc``). Nothing here imports a
client.
"""
