"""Messages of proto/raft.proto; their types are in raft_pb2.pyi."""

from raftkv.pb._pool import export

export("raft", globals())
