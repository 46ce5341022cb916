"""gRPC and HTTP/1.1 on one port: the RPC layer shared by server, peers and client library.

Owns bytes, calls, deadlines and every limit on what a peer can make grow. It knows no request type of raftkv.

    socket (sockets) -> protocol -> http2 (engine) -> core -> handler(call, message)               bytes in
    handler: call.reply(message) -> core -> engine -> cork, end of the turn -> one write        bytes out

Read in this order: ``status`` (gRPC's codes), ``framing`` (messages in a byte stream, metadata), ``http2`` (the
engine), ``server.core`` and ``client.core`` (sans-IO: bytes in, calls out), ``server`` and ``client`` (the asyncio
shells), ``sockets`` (sockets of a server). ``loop.cork`` writes the output of a turn at its end; ``limits`` has all
numbers; ``shares`` divides budgets among identities.

Laws:

1. The core modules do no I/O and read no clock: bytes, times and wake-ups are passed to them.
2. All output of one loop turn for one connection leaves in one write.
3. Everything that a peer can make grow has a named limit in ``limits``.
4. A failed call says whether the request certainly never reached a handler (``RpcError.definite``).
5. A lost connection is freed by its reference count: a member's collector skips old objects (``loop.cycle_free``).

Example::

    server = Server()
    server.unary("/pkg.Echo/Say", lambda call, message: call.reply(message))
    ((_, port),) = await server.listen("127.0.0.1", 0)
    async with Channel(f"127.0.0.1:{port}") as channel:
        assert await channel.unary("/pkg.Echo/Say", b"hello", timeout_s=5) == b"hello"

Leaves out: retries, load balancing (the client library), authentication of users, compression of sent messages.

The names below are imported on first use, so that a client does not load the server, nor a server the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raftkv.lazy import attach

if TYPE_CHECKING:
    from raftkv.rpc.client.channel import Channel as Channel
    from raftkv.rpc.client.channel import ChannelState as ChannelState
    from raftkv.rpc.client.stream import ClientStream as ClientStream
    from raftkv.rpc.limits import ChannelOptions as ChannelOptions
    from raftkv.rpc.limits import ServerLimits as ServerLimits
    from raftkv.rpc.server.calls import UnaryCall as UnaryCall
    from raftkv.rpc.server.http import HttpRequest as HttpRequest
    from raftkv.rpc.server.http import HttpResponse as HttpResponse
    from raftkv.rpc.server.server import Server as Server
    from raftkv.rpc.server.stream import StreamCall as StreamCall
    from raftkv.rpc.status import Code as Code
    from raftkv.rpc.status import RpcError as RpcError

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "client.channel": "Channel ChannelState",
        "client.stream": "ClientStream",
        "limits": "ChannelOptions ServerLimits",
        "server.calls": "UnaryCall",
        "server.http": "HttpRequest HttpResponse",
        "server.server": "Server",
        "server.stream": "StreamCall",
        "status": "Code RpcError",
    },
)
