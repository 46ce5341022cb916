"""The stubs for ``grpc``; ``services.pyi`` has their methods."""

from raftkv.grpcio.calls import Stream, Unary, stubs

globals().update(stubs(__name__, Unary, Stream))
