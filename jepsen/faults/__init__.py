"""Faults of members and of the network, and their schedule from a seed."""
