"""The server half of the RPC layer: one port for gRPC over HTTP/2 (with or without TLS) and HTTP/1.1.

Owns connections from accept to close, calls from their first HEADERS to their status, and the memory clients may use.

    accept -> Connection (preface, ALPN) -> h2: ServerCore -> router -> UnaryCall | StreamCall -> handler
                                         -> HTTP/1.1: Http1Protocol -> HttpHandler
    answers -> AnswerAccount (of the connection) -> AnswerBudget (of the process) -> engine -> cork -> socket

Laws:

- ``ServerCore`` is sans-IO: it has no socket and no clock (``Environment`` provides both).
- A call ends exactly once: with an answer or a cancellation. Answering a cancelled call has no effect.
- An answer counts against the budget when it is made, not when the client reads it (``budget``).
- A guard or a log of all calls wraps each handler once, at its registration (``router.Around``).
- A unary call whose handler is a callback needs no task, and neither does a stream with a listener (``stream``).
- A client that sends too many pings, resets, empty frames or window updates gets a GOAWAY (``rpc.limits``).

Example::

    server = Server(ServerLimits(connections=1_000), http_handler)
    server.unary(path, handler)                     # handler(call, message): call.reply(bytes) or call.fail(code, text)
    server.stream(path, stream_handler)             # async def stream_handler(call): one task a call
    await server.listen("127.0.0.1", 2379)
    await server.close(grace_s=5)

Modules: ``server`` (listeners, registration), ``accept`` (connections), ``core`` (an HTTP/2 connection), ``router``,
``calls`` and ``stream`` (the handler's view of a call), ``budget`` (waiting answers), ``http`` (requests and
responses), ``http1`` (with ``known_heads``), ``http2_plain``.

Leaves out: the meaning of methods; the HTTP/2 engine (``rpc.http2``).
"""
