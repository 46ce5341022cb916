"""The stubs for ``grpc.aio``; ``aio.pyi`` has their methods."""

from raftkv.grpcio.calls import AsyncStream, AsyncUnary, stubs

globals().update(stubs(__name__, AsyncUnary, AsyncStream))
