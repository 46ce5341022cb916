"""Plain HTTP on the client port and the metrics addresses: health, version, metrics.

Owns the answers that probes and load balancers know from etcd, byte for byte where they compare them.

    GET /health   /livez   /readyz   /version   /metrics          ``routes``
    GET /debug/vars   /debug/pprof/                               ``debug``; for root
    Host header, origins of pages, content types                  ``access``, around all of them

Laws:

- /readyz names what is missing until the member may serve clients. The client port itself is not answered before.
- ``access`` decides before any route, at every listener, what web pages in browsers may read and do.

Example::

    http = HttpService(node, applier, readiness, admission, Exposition(registry))
    Server(limits, HttpAccess(http.handle, HostCheck(host_whitelist, own_names(config)), Origins(cors)).handle)

Leaves out: the text of /metrics (``server.metrics``), HTTP/1.1 itself (``rpc.server.http1``).
"""
