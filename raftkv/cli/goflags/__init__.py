"""Flags and values as Go programs take them."""
