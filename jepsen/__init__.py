"""Fault-injection tests on real processes."""
