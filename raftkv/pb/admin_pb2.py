"""Messages of proto/admin.proto; their types are in admin_pb2.pyi."""

from raftkv.pb._pool import export

export("admin", globals())
