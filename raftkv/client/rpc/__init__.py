"""Calls to a cluster."""
