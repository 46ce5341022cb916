"""The server's half of the RPC layer."""
