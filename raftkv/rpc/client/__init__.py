"""The client's half of the RPC layer."""
