"""Adapters for other frameworks; the rest of raftkv imports none of them.

    horovod    serves Horovod's HTTP rendezvous on a member's client port; needs only the member
    torchft    serves torchft's lighthouse as a daemon; needs only a cluster
    importers  registers existing checkpoints of other tools; needs only the registry
    lightning, transformers
               callbacks that save to the registry; need that framework and torch (``ranks``); programs import them
               from ``raftkv.torch``

The docstring of each module says which protocol it speaks, with which versions it was tested, and what must be
installed. This file imports nothing, so an integration costs only the programs that use it.
"""
