"""The client half of the RPC layer: one connection to one of several targets, and any number of calls over it.

Owns the connection (opened at the first call, reopened after a loss), the queue of calls without a connection, and the
outcome of a call whose stream has ended.

    channel.unary(path, message) -> queue, if there is no connection or no free stream -> ClientCore -> cork of the turn
    bytes -> ClientCore -> UnaryFuture resolved | ClientStream's inbox

Laws:

- ``ClientCore`` is sans-IO: the shell (``connect``) moves bytes.
- ``RpcError.definite`` is true only if the request certainly reached no handler.
- Nothing is retried here: that is the client library's decision.
- Requests of one loop turn leave in one write.

Example::

    channel = Channel(["10.0.0.1:2379", "10.0.0.2:2379"])
    response = await channel.unary("/etcdserverpb.KV/Range", request, timeout_s=5)      # RpcError if it fails
    stream = channel.stream("/etcdserverpb.Watch/Watch")
    await channel.close()

Modules: ``channel`` (the queue), ``calls`` (unary calls), ``stream``, ``connect`` (one connection), ``core``.

Leaves out: choosing a member, and retries (``raftkv.client.rpc``).
"""
