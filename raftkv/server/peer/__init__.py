"""Messages between members: one long-lived stream to each other member, over the peer port.

Owns both ends of the path between two nodes: ``transport`` sends, ``service`` receives. ``replica.codec`` encodes the
messages.

    node's turn -> transport.send -> one MessageBatch a peer -> stream -> service.raft -> node.receive
    lease.on_leader -> channel of the same peer -> unary call -> service -> LeaseService.for_members
    snapshots.sender -> stream of its own -> service.install_snapshot -> snapshots.receiver

Laws:

- Messages to one peer arrive in order and at most once: a stream is never resumed. Raft repairs any loss, so nothing
  is kept for a peer that is disconnected.
- Nothing is read from a caller before it has named this cluster, itself as a member, and this member as the receiver.
- A peer whose stream holds more than 64 MiB unsent counts as disconnected.
- A batch leaves before the member's own sync of the same turn, so the disks of all members work in parallel.

Example::

    transport = Transport(cluster_id, member_id, ssl, on_unreachable, send_snapshot)
    transport.add_peer(peer_id, ["http://10.0.0.2:2380"])
    transport.send(messages)

Leaves out: the meaning of messages (``raftkv.raft``), databases for members that are too far behind (``snapshots``).
"""
