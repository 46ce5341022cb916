"""Plain HTTP on the client port and the addresses for metrics: health, version, metrics.

Owns answers that probes, load balancers and Prometheus know from etcd, byte for byte where they look.

    GET /health   /livez   /readyz   /version   /metrics          ``routes``
    Host header, CORS                                             ``access``, around all of them
    families of metrics                                           ``metrics``, read when scraped

Laws:

- A scrape costs the hot path nothing: counters are plain integers of the parts themselves, read at the scrape.
- /readyz says what is missing until the member may serve clients; the client port itself is not answered before.
- What a browser may read is decided by ``access`` before any route.

Example::

    http = HttpService(node, applier, readiness, admission, metrics.exposition(registry))
    Server(limits, HttpAccess(http.handle, host_whitelist, cors).handle)

Leaves out: HTTP/1.1 itself (``rpc.server.http1``).
"""
