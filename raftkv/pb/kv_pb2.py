"""Messages of proto/kv.proto; their types are in kv_pb2.pyi."""

from raftkv.pb._pool import export

export("kv", globals())
