"""Messages of proto/rpc.proto; their types are in rpc_pb2.pyi."""

from raftkv.pb._pool import export

export("rpc", globals())
