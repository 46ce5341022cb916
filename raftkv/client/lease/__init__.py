"""Leases and sessions."""
