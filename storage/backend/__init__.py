"""Backends of the MVCC store."""
