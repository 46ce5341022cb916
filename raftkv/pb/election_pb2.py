"""Messages of proto/election.proto; their types are in election_pb2.pyi."""

from raftkv.pb._pool import export

export("election", globals())
