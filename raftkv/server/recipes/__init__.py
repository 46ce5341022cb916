"""Locks and elections."""
