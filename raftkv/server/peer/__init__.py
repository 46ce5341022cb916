"""Raft messages between members."""
