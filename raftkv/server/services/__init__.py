"""The gRPC services whose calls end with one answer: KV, Cluster and Health.

Owns the way of a request through this member: parsed, checked, then proposed (writes), confirmed with a quorum
(linearizable reads) or answered at once (serializable reads, Status).

    Put     parse -> apply.check -> node.admission -> node.submit ... applied -> PendingWrite.finish -> call.reply
    Range   parse -> apply.check -> node.read ... confirmed, applied -> PendingRead.ready -> read -> call.reply
            more than 128 keys, or 512 KiB: in slices, on a pinned view of the present

Laws:

- Codes and texts of errors are etcd's.
- The common part of services (parse, refuse, propose, answer) lies in ``responder``; services differ in meaning alone.
- Handlers of the hot path are plain callbacks: a call costs no task.
- A read changes nothing, so an error in it fails that read alone; only damaged data stops the member.

Example::

    responder = Responder(node, applier, header, admission, check_capable)
    KVService(responder, txn_operations_max=128).register(server)

Modules: ``kv``, ``range_stream`` (a range in chunks), ``cluster`` (members), ``health``, ``responder``, ``crowded``
(refuses txns of far too many operations).

Leaves out: leases, watches, recipes and maintenance, which have packages of their own.
"""
