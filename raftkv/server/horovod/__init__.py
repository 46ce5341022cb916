"""Horovod's rendezvous over HTTP."""
