"""Measurements of a cluster."""
