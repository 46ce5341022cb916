"""Measurements of raftkv beside real etcd. Run by `make bench`; never part of the tests."""
