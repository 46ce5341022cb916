"""Certificates for the process tests: those of the RPC tests."""

from tests.rpc.conftest import certificates

__all__ = ["certificates"]
