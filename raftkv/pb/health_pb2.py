"""Messages of proto/health.proto; their types are in health_pb2.pyi."""

from raftkv.pb._pool import export

export("health", globals())
