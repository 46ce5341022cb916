"""Messages of proto/auth.proto; their types are in auth_pb2.pyi."""

from raftkv.pb._pool import export

export("auth", globals())
