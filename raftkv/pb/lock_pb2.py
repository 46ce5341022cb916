"""Messages of proto/lock.proto; their types are in lock_pb2.pyi."""

from raftkv.pb._pool import export

export("lock", globals())
