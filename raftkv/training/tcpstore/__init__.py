"""torch's TCPStore, replicated."""
