"""The gRPC services whose calls have one answer: KV, Cluster and Health.

Owns the path of a request through this member: it is parsed, checked, then proposed (writes), confirmed by a quorum
(linearizable reads) or answered at once (serializable reads, Status).

    Put     parse -> apply.check -> node.admission -> node.submit ... applied -> PendingWrite.finish -> call.reply
    Range   parse -> apply.check -> node.read ... confirmed, applied -> PendingRead.ready -> read -> call.reply
            more than 128 keys, or 512 KiB: in slices, on a pinned view of the current state

Laws:

- Codes and texts of errors are etcd's.
- ``responder`` has the common part of the services (parse, refuse, propose, answer).
- Handlers of the hot path are plain callbacks: a call needs no task.
- A read changes nothing, so an error in a read fails only that read. Only damaged data stops the member.

Example::

    responder = Responder(node, applier, header, admission, check_capable, uses)
    KVService(responder, txn_operations_max=128).register(server)

Modules: ``kv``, ``range_stream`` (a range in chunks), ``cluster`` (members), ``health``, ``responder``, ``crowded``
(refuses transactions with far too many operations).

Leaves out: leases, watches, recipes and maintenance, which have packages of their own.
"""
