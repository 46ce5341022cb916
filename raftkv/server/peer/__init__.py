"""Messages between members: one long stream to each other member, over the peer port.

Owns both halves of the way from one node to another: ``transport`` sends, ``service`` receives; ``replica.codec`` is
the bytes.

    node's turn -> transport.send -> one MessageBatch a peer -> stream -> service.raft -> node.receive
    lease.on_leader -> channel of the same peer -> unary call -> service -> LeaseService.for_members
    snapshots.sender -> stream of its own -> service.install_snapshot -> snapshots.receiver

Laws:

- Messages to one peer arrive in order and at most once: a stream is never resumed. Raft repairs any loss, so nothing
  is kept for a peer that is away.
- Nothing is read from a caller before it has named this cluster, itself as a member of it, and this member.
- A peer whose stream holds more than 64 MiB unsent is treated as away.
- A batch leaves before the member's own sync of the same turn, so that the disks of members work side by side.

Example::

    transport = Transport(cluster_id, member_id, ssl, on_unreachable, send_snapshot)
    transport.add_peer(peer_id, ["http://10.0.0.2:2380"])
    transport.send(messages)

Leaves out: what messages mean (``raftkv.raft``), databases for members that fell behind (``snapshots``).
"""
