"""Measurements of the checkpoint registry."""
