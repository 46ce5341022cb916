"""Leases on one member."""
