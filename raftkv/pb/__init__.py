"""Message classes of the wire contract, in a descriptor pool of their own.

Owns the loading of ``descriptors.bin`` (compiled from ``proto/`` by ``make proto``). The pool is private because
message names on the wire are etcd's: classic generated modules register ``mvccpb.KeyValue`` in the process-wide
pool, where any other etcd client loaded in the same process would collide with it, and they refuse protobuf
runtimes older than their compiler. Descriptors built at import do neither (protobuf 4.25 to 7).

    from raftkv.pb import rpc_pb2
    rpc_pb2.PutRequest(key=b"k", value=b"v").SerializeToString()

``raftkv.pb.services`` lists the services and their methods. Types are in the ``*_pb2.pyi`` beside each module.
"""
