"""etcd's JSON on the client port: ``/v3`` and ``/v3beta``, by the handlers of gRPC.

    HTTP request -> handler -> decoder -> exchange -> encoder -> HTTP response

Paths come from ``option (google.api.http)`` in ``proto/`` (``raftkv.pb.bindings``): no handler a path. JSON is what
grpc-gateway 1.16 reads and writes, which etcd 3.5 has.

Leaves out: HTTP itself (``rpc.server``), who may ask (``server.http.access``, ``server.auth.guard``).
"""
