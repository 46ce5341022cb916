"""Messages of proto/torchft.proto; their types are in torchft_pb2.pyi."""

from raftkv.pb._pool import export

export("torchft", globals())
