"""The client's half of the RPC layer: one connection to one of several targets, any number of calls over it.

Owns the connection (opened at the first call, and again whenever it is lost), the queue of calls that find none, and
what an ended stream means for its call.

    channel.unary(path, message) -> queue, if there is no connection or no free stream -> ClientCore -> cork of the turn
    bytes -> ClientCore -> UnaryFuture resolved | ClientStream's inbox

Laws:

- ``ClientCore`` is sans-IO: the shell (``connect``) moves bytes.
- ``RpcError.definite`` is true only if the request certainly reached no handler.
- Nothing is retried here: that is the client library's decision.
- Requests of one turn of the loop leave in one write.

Example::

    channel = Channel(["10.0.0.1:2379", "10.0.0.2:2379"])
    response = await channel.unary("/etcdserverpb.KV/Range", request, timeout_s=5)      # RpcError if it fails
    stream = channel.stream("/etcdserverpb.Watch/Watch")
    await channel.close()

Modules: ``channel`` (the queue, unary calls), ``connect`` (one connection), ``core``, ``stream``.

Leaves out: which member is asked, and again (``raftkv.client.rpc``).
"""
