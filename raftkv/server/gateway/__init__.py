"""etcd's JSON API on the client port (``/v3`` and ``/v3beta``), served by the handlers of gRPC.

    HTTP request -> handler -> decoder -> exchange -> encoder -> HTTP response

Paths come from ``option (google.api.http)`` in ``proto/`` (``raftkv.pb.bindings``), so no path needs its own handler.
JSON is read and written as in grpc-gateway 1.16, which etcd 3.5 uses.

Modules: ``handler``, ``decoder``, ``exchange`` (one call of a handler), ``encoder``, ``streams`` (streaming calls),
``openapi``.

Leaves out: HTTP itself (``rpc.server``), access checks (``server.http.access``, ``server.auth.guard``).
"""
