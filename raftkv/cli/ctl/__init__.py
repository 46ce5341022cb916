"""The commands of raftkvctl."""
