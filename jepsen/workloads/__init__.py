"""Workloads, one a file."""
