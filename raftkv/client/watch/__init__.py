"""Watches."""
