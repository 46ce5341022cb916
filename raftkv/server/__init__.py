"""The front door of a member: its ports, and what clients, other members and operators meet there.

Owns who is listened to and how a request is let in; ``raftkv.replica`` decides everything after that.

    clients ---- rpc ----> services  streams  recipes  maintenance  http, gateway, ui        other members
                              |         |        |         |                                   |  ^
                            auth: who calls, and may they? audit, tracing, metrics             v  |
                              |  submit, propose, read                                        peer: transport, service
                              +---------+--------+----> replica <-------------------------------+

    start    main -> member: read the disk, open a replica, put ports around it, listen, take part, serve clients
    stop     hand leadership over, finish calls under way, leave, close the disk

Read ``member`` first, then the way of one request: ``services/kv`` (a Put), ``streams/lease``, ``streams/watch``.

Laws:

- No turn of the loop is longer than 50 ms for any request of one client (``loop.turns``, ``loop.scheduler``).
- Nothing is acknowledged before the fsync that it depends on.
- Every subscription among the parts of a replica is made in ``Replica.connect``.

Example::

    member = Member(config)              # on the running loop; parts are made and connected, nothing has started
    await member.run()                   # until member.stop()
    assert member.failure is None

Leaves out: what requests mean (``raftkv.apply``), bytes on the wire (``raftkv.rpc``). Nothing here imports a client.
"""
