"""Worker processes of a node."""
